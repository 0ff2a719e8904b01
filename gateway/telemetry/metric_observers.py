"""What a process counts of the events of its parts (metrics.py). Called on the event loop; must not block."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Protocol

from gateway.shared.recent_requests import RecentRequests
from gateway.telemetry.metric_kinds import LATENCY_BUCKETS_SECONDS
from gateway.telemetry.metrics import (
    AUTHORIZATIONS,
    BANDWIDTH_WAIT_SECONDS,
    CACHE_CAPACITY_BYTES,
    CACHE_COALESCED,
    CACHE_DAMAGED,
    CACHE_DISK_ERRORS,
    CACHE_DISK_STATE,
    CACHE_EVICTED_BLOCKS,
    CACHE_EVICTED_BYTES,
    CACHE_FILL_SECONDS,
    CACHE_FILLED_BYTES,
    CACHE_FILLS,
    CACHE_HIT_BYTES,
    CACHE_MISS_BYTES,
    CACHE_NOT_KEPT,
    CACHE_PINNED_BYTES,
    CACHE_RESERVED_BYTES,
    CACHE_STORE_UNAVAILABLE,
    CACHE_UNSURVEYED_BYTES,
    CACHE_USAGE_BYTES,
    CACHE_WRITTEN_TODAY_BYTES,
    CALLER_RECEIVED_BYTES,
    CALLER_REFUSED,
    CALLER_REQUESTS,
    CALLER_RUNNING,
    CALLER_SENT_BYTES,
    CALLER_WAIT_SECONDS,
    CALLER_WAITING,
    CALLER_WAITS,
    CATALOG_LOOKUPS,
    CATALOG_NOT_KEPT,
    DISK_STATES,
    INDEX_CHANGED_KEYS,
    INDEX_CRAWLED_KEYS,
    INDEX_CRAWLS,
    INDEX_KEYS,
    INDEX_KNOWN_SINCE,
    LINK_CAPACITY,
    LINK_DELAY,
    LISTING_KEYS_NOT_KEPT,
    LISTING_PAGES,
    MISSES,
    ORIGIN_BYTES,
    ORIGIN_HEDGES,
    ORIGIN_REQUEST_RATE,
    ORIGIN_REQUEST_SECONDS,
    ORIGIN_REQUESTS,
    ORIGIN_SLOW_DOWN,
    ORIGIN_THROTTLE_WAIT_SECONDS,
    ORIGIN_THROTTLED,
    ORIGIN_THROTTLED_IN_VAIN,
    PREPARED_REQUESTS,
    RECEIVED_BYTES,
    REQUEST_SECONDS,
    REQUESTS,
    REQUESTS_IN_FLIGHT,
    SCRUB_BLOCKS,
    SCRUB_BYTES,
    SCRUB_PASSES,
    SENT_BYTES,
    SMALL_ANSWER_TROUBLES,
    SMALL_ANSWERS,
    SNAPSHOT_REFUSALS,
    WARM_UP_OBJECTS,
    WARM_UP_WAITING,
)


class SlotBytes(Protocol):
    """What one slot has on disk and set aside (`blocks.shares.SlotUsage`)."""

    @property
    def used_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def pinned_bytes(self) -> int: ...


class CacheMetrics:
    """Events of one process's block cache. `slot` is the name of the one on whose account they go."""

    def hit_bytes(self, slot: str, count: int) -> None:
        """Bytes given to a reader from blocks that were complete when it came to them."""
        CACHE_HIT_BYTES.add(count, slot)

    def miss_bytes(self, slot: str, count: int) -> None:
        """Bytes given to a reader from a fetch in progress, or straight from the origin."""
        CACHE_MISS_BYTES.add(count, slot)

    def coalesced(self, slot: str) -> None:
        """A reader joined a fetch that another reader had started."""
        CACHE_COALESCED.add(1, slot)

    def evicted(self, slot: str, blocks: int, size_bytes: int) -> None:
        """Blocks made room for others; `size_bytes` is what they took on disk."""
        CACHE_EVICTED_BLOCKS.add(blocks, slot)
        CACHE_EVICTED_BYTES.add(size_bytes, slot)

    def damaged(self, slot: str) -> None:
        """A block was not what had been written, or could not be read; it was dropped and is a miss now."""
        CACHE_DAMAGED.add(1, slot)

    def fill_finished(self, slot: str, seconds: float, size_bytes: int) -> None:
        """A block was fetched and published."""
        CACHE_FILLS.add(1, slot, "filled")
        CACHE_FILL_SECONDS.observe(seconds)
        CACHE_FILLED_BYTES.add(size_bytes, slot)

    def fill_failed(self, slot: str) -> None:
        """A fetch ended without a block: the origin failed or refused, or the store could not take the bytes."""
        CACHE_FILLS.add(1, slot, "failed")

    def not_kept(self, slot: str, reason: str, blocks: int) -> None:
        """Blocks went to their readers and not to the disk. `reason`: of `errors.NotKept`, or "disk": it failed."""
        CACHE_NOT_KEPT.add(blocks, slot, reason)

    def store_unavailable(self) -> None:
        """The cache directory could not take or give bytes, and a range was served straight from the origin."""
        CACHE_STORE_UNAVAILABLE.add(1)

    def scrubbed(self, size_bytes: int) -> None:
        """The scrubber has looked at a block; so much of it had to be read from the disk."""
        SCRUB_BLOCKS.add(1)
        SCRUB_BYTES.add(size_bytes)

    def scrubbed_all(self) -> None:
        """The scrubber has looked at every block."""
        SCRUB_PASSES.add(1)

    def disk_error(self, trouble: str) -> None:
        """The disk refused something: full, read-only or failing."""
        CACHE_DISK_ERRORS.add(1, trouble)

    def disk_state(self, state: str) -> None:
        """What this process may use the directory for has changed: well, full, read-only, failing or closed."""
        for one in DISK_STATES:
            CACHE_DISK_STATE.set(int(one == state), one)

    def usage(self, slots: Mapping[str, SlotBytes], unsurveyed_bytes: int, written_today_bytes: int) -> None:
        """What all processes together have on disk and set aside, by slot; told every second or so.

        `unsurveyed_bytes` lie on disk without being in the index yet; `written_today_bytes` fetches were given room for
        since midnight UTC.
        """
        for slot, usage in slots.items():
            CACHE_USAGE_BYTES.set(usage.used_bytes, slot)
            CACHE_RESERVED_BYTES.set(usage.reserved_bytes, slot)
            CACHE_PINNED_BYTES.set(usage.pinned_bytes, slot)
        CACHE_UNSURVEYED_BYTES.set(unsurveyed_bytes)
        CACHE_WRITTEN_TODAY_BYTES.set(written_today_bytes)


class CatalogMetrics:
    """Events of one process's catalog."""

    def looked_up(self, slot: str, outcome: str) -> None:
        """A question about an object in a slot that lets the catalog answer.

        `outcome`: hit (there is such an object), listed (so too, as a listing has shown since), absent (there is
        none), miss (the origin was asked), stale (it was asked, did not answer, and the slot allows an older answer).
        """
        CATALOG_LOOKUPS.add(1, slot, outcome)

    def not_kept(self, count: int) -> None:
        """Answers of the origin that were not remembered: too many at once, or the disk could not take them."""
        CATALOG_NOT_KEPT.add(count)

    def listed(self, slot: str, outcome: str) -> None:
        """A page of a listing in slots that let the index answer.

        `outcome`: hit, miss or stale, as above; partial: a hit for which the origin was asked about keys just written.
        """
        LISTING_PAGES.add(1, slot, outcome)

    def keys_not_kept(self, count: int) -> None:
        """Keys that the origin has listed and the index has not kept: too many at once, or the disk is in trouble."""
        LISTING_KEYS_NOT_KEPT.add(count)


class SnapshotMetrics:
    """Events of one process's frozen slots."""

    def refused(self, slot: str, reason: str) -> None:
        """A request that could not be answered. `reason`: missing (there is no such snapshot), unusable (there is, and
        it cannot be used), changed or gone (the origin has another version of the object, or none, and it is not
        cached).
        """
        SNAPSHOT_REFUSALS.add(1, slot, reason)


class IndexMetrics:
    """What becomes of indexes."""

    def crawled(self, slot: str, keys: int) -> None:
        """A page of a crawl has been kept."""
        INDEX_CRAWLED_KEYS.add(keys, slot)

    def found_changed(self, slot: str, keys: int) -> None:
        """Keys that the origin has changed or removed since they were known."""
        INDEX_CHANGED_KEYS.add(keys, slot)

    def crawl_ended(self, slot: str, outcome: str) -> None:
        """A crawl has come to its end: done, or failed."""
        INDEX_CRAWLS.add(1, slot, outcome)

    def index_stands(self, slot: str, keys: int | None, known_since: float | None) -> None:
        """How many keys the last whole crawl has found, and since when all is known; None: not all is."""
        if keys is not None:
            INDEX_KEYS.set(keys, slot)
        INDEX_KNOWN_SINCE.set(known_since or 0.0, slot)


class AuthorizationMetrics:
    """What callers may do where the origin says it."""

    def asked(self, slot: str, outcome: str) -> None:
        """A question was answered. `outcome`: remembered, allowed, denied, other or failed."""
        AUTHORIZATIONS.add(1, slot, outcome)


class WarmUpMetrics:
    """Objects that clients have a worker fetch in the background."""

    def waiting(self, change: int) -> None:
        WARM_UP_WAITING.add(change)

    def ended(self, slot: str, outcome: str) -> None:
        """One is over. `outcome`: fetched, no-room, changed or failed."""
        WARM_UP_OBJECTS.add(1, slot, outcome)


class SmallAnswerMetrics:
    """Events of one process's small answers."""

    def answered(self, operation: str, outcome: str) -> None:
        """A question that may be answered from memory. `outcome`: hit, miss or stale, as for the catalog."""
        SMALL_ANSWERS.add(1, operation, outcome)

    def trouble(self, kind: str) -> None:
        """The disk did not give or take an answer (unavailable), or gave what was not written (damaged)."""
        SMALL_ANSWER_TROUBLES.add(1, kind)


CLIENT_LEFT = "client-left"
BROKEN_OFF = "broken-off"
"""Ends without a status: the client left before its answer was complete, or the answer failed behind its head."""


class RequestMetrics:
    """Counts the requests of one process's S3 port."""

    def in_flight(self, change: int) -> None:
        """A request waits for its answer from now on (1), or no more (-1). What is answered at once never does."""
        REQUESTS_IN_FLIGHT.add(change)

    def ended(
        self,
        operation: str,
        slot: str,
        status: str,
        cache: str | None,
        seconds: float,
        sent_bytes: int,
        received_bytes: int,
    ) -> None:
        """It is over. `status` is the HTTP status, CLIENT_LEFT or BROKEN_OFF; bytes are those of the bodies."""
        REQUESTS.add(1, operation, slot, status, cache or "none")
        REQUEST_SECONDS.observe(seconds, operation)
        if sent_bytes:
            SENT_BYTES.add(sent_bytes, operation, slot)
        if received_bytes:
            RECEIVED_BYTES.add(received_bytes, operation, slot)

    def refused(self, status: int) -> None:
        """A request was answered so before anything was known of it but that it came: it cannot be read, or too many
        connections are open."""
        REQUESTS.add(1, "Unknown", "none", str(status), "none")

    def of_credential(self, credential: str, requests: int, sent_bytes: int, received_bytes: int) -> None:
        """What a credential has used. `credential` is bounded: a configured one, or one of all others."""
        CALLER_REQUESTS.add(requests, credential)
        if sent_bytes:
            CALLER_SENT_BYTES.add(sent_bytes, credential)
        if received_bytes:
            CALLER_RECEIVED_BYTES.add(received_bytes, credential)

    def missed(self, operation: str, slot: str, reason: str) -> None:
        """Not all that was asked for was here. `reason`: of `objects.MissReason`."""
        MISSES.add(1, operation, slot, reason)


class CallerMetrics:
    """Events of one process's limits of callers (the methods of `policy.callers.Observer`)."""

    def waited(self, scope: str, name: str, limit: str, seconds: float) -> None:
        CALLER_WAIT_SECONDS.add(seconds, scope, name, limit)

    def refused(self, scope: str, name: str, limit: str) -> None:
        CALLER_REFUSED.add(1, scope, name, limit)

    def waiting(self, scope: str, name: str, limit: str, change: int) -> None:
        if change > 0:
            CALLER_WAITS.add(1, scope, name, limit)
        CALLER_WAITING.add(change, scope, name, limit)

    def running(self, scope: str, name: str, change: int) -> None:
        CALLER_RUNNING.add(change, scope, name)


class HitTally:
    """Requests answered by what is prepared, of one kind: summed here, as shared memory costs more than all the rest.

    `lay` adds them to what all processes count.
    """

    __slots__ = (
        "_buckets",
        "_count",
        "_seconds",
        "_sent_bytes",
        "credential",
        "is_known",
        "operation",
        "slot",
        "status",
    )

    def __init__(self, operation: str, slot: str, status: str, *, is_known: bool, credential: str = "none") -> None:
        """`is_known`: the catalog has answered; else the origin has been asked about each."""
        self.operation = operation
        self.slot = slot
        self.status = status
        self.is_known = is_known
        self.credential = credential
        self._begin()

    def _begin(self) -> None:
        self._count = self._sent_bytes = 0
        self._seconds = 0.0
        self._buckets = [0] * (len(LATENCY_BUCKETS_SECONDS) + 1)

    def add(self, seconds: float, sent_bytes: int) -> None:
        """One more."""
        self._count += 1
        self._seconds += seconds
        self._sent_bytes += sent_bytes
        self._buckets[bisect_left(LATENCY_BUCKETS_SECONDS, seconds)] += 1

    def lay(self) -> None:
        """Count as `RequestMetrics`, `CatalogMetrics` and `CacheMetrics` do."""
        if not self._count:
            return
        REQUESTS.add(self._count, self.operation, self.slot, self.status, "hit")
        PREPARED_REQUESTS.add(self._count, self.operation, self.slot)
        CALLER_REQUESTS.add(self._count, self.credential)
        REQUEST_SECONDS.add(self._buckets, self._seconds, self.operation)
        if self.is_known:
            CATALOG_LOOKUPS.add(self._count, self.slot, "hit")
        if self._sent_bytes:
            SENT_BYTES.add(self._sent_bytes, self.operation, self.slot)
            CALLER_SENT_BYTES.add(self._sent_bytes, self.credential)
            CACHE_HIT_BYTES.add(self._sent_bytes, self.slot)
        self._begin()


class OriginAttempt(Protocol):
    """One try of a request to the origin that is over; `status` None is no answer (`origin.s3.Attempt`)."""

    @property
    def slot(self) -> str: ...

    @property
    def purpose(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def bucket(self) -> str | None: ...

    @property
    def key(self) -> str | None: ...

    @property
    def status(self) -> int | None: ...

    @property
    def seconds(self) -> float: ...

    @property
    def origin(self) -> str: ...


class WorkerMetrics:
    """What one S3 worker counts."""

    def __init__(self, cache_capacity_bytes: int, recent: RecentRequests | None = None) -> None:
        self._recent = recent
        self.cache_capacity(cache_capacity_bytes)
        self.requests = RequestMetrics()
        self.cache = CacheMetrics()
        self.catalog = CatalogMetrics()
        self.answers = SmallAnswerMetrics()
        self.snapshots = SnapshotMetrics()
        self.indexes = IndexMetrics()
        self.callers = CallerMetrics()

    def cache_capacity(self, size_bytes: int) -> None:
        CACHE_CAPACITY_BYTES.set(size_bytes)

    def origin_attempt(self, attempt: OriginAttempt) -> None:
        status = "unreachable" if attempt.status is None else str(attempt.status)
        ORIGIN_REQUESTS.add(1, attempt.method, status, str(attempt.purpose), attempt.slot, attempt.origin)
        ORIGIN_REQUEST_SECONDS.observe(attempt.seconds, str(attempt.purpose), attempt.origin)
        if self._recent is not None and (attempt.status is None or attempt.status >= 500 or attempt.status == 429):
            of_request = attempt.method, attempt.bucket, attempt.key, attempt.slot, str(attempt.purpose)
            self._recent.origin_failed(*of_request, status, attempt.seconds)

    def origin_hedge(self, outcome: str) -> None:
        ORIGIN_HEDGES.add(1, outcome)

    def origin_bytes(self, direction: str, slot: str, purpose: str, count: int) -> None:
        """Bytes of a body moved; `direction` is read or write."""
        ORIGIN_BYTES.add(count, direction, purpose, slot)

    def link_found(self, direction: str, capacity: float | None, delay_seconds: float | None) -> None:
        """What the link bears (bytes per second), and how late answers are, where that is known."""
        LINK_CAPACITY.set(capacity or 0.0, direction)
        LINK_DELAY.set(delay_seconds or 0.0, direction)

    def origin_waited(self, direction: str, slot: str, by: str, seconds: float) -> None:
        """A piece of a body was held back; `by` is ceiling or link."""
        BANDWIDTH_WAIT_SECONDS.add(seconds, by, direction, slot)

    def origin_slowed_down(self, slot: str) -> None:
        """The origin has refused a request for their number."""
        ORIGIN_SLOW_DOWN.add(1, slot)

    def origin_throttled(self, slot: str, seconds: float) -> None:
        """A request was held back because of that."""
        ORIGIN_THROTTLED.add(1, slot)
        ORIGIN_THROTTLE_WAIT_SECONDS.add(seconds, slot)

    def origin_throttled_in_vain(self, slot: str) -> None:
        """A request was held back for as long as it may be, and not sent."""
        ORIGIN_THROTTLED_IN_VAIN.add(1, slot)

    def origin_request_rate(self, bucket: str, direction: str, rate: float) -> None:
        """What the origin is believed to take; `bucket` is bounded, 0 is everything."""
        ORIGIN_REQUEST_RATE.set(rate, bucket, direction)
