"""The current version of each object and its metadata, remembered as long as the object's slot allows.

    remembered, and fresh enough for the slot? → that; listed since then, and the same? → that (`is_confirmed`);
    else one HEAD at the origin, remembered for the next

Answers to questions before an own write of the key are void after it, on any worker (entries.py).
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lmdb
import structlog

from gateway.core.clock import Clock
from gateway.core.errors import OriginAnswered, OriginUnreachable, S3Error, StoreUnavailable
from gateway.core.model import Homes, ObjectKey, ObjectVersion
from gateway.metadata.ages import AnswerAges
from gateway.metadata.entries import (
    CatalogEntry,
    Freshness,
    InDoubtWrites,
    InvalidationEpochs,
    ObjectHead,
    ObservedAt,
    catalog_key,
    freshness,
    is_confirmed,
    is_settled,
    object_head,
    without_checksums,
)
from gateway.metadata.joined_calls import JoinedCalls
from gateway.metadata.listing.index import ListingIndex, trim
from gateway.metadata.listing.pages import Listed
from gateway.metadata.listing.ranges import KeyBound, bound_of
from gateway.metadata.listing.records import etag_and_size
from gateway.metadata.opening import OPENING_SECONDS_MAX, OpenCatalog, open_directory
from gateway.metadata.store import CatalogUpdate, CatalogWriter, DiskThread
from gateway.origin.client import (
    BeginRead,
    BegunRead,
    KeyPair,
    OnEnd,
    Origin,
    OriginHead,
    OriginRequest,
    Purpose,
    age_of,
    from_peer,
    is_of_s3,
    still_of,
)
from gateway.origin.peer_protocol import COPY, Roles
from gateway.policy.slots import Slot, Slots
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import is_same_version, unquote
from gateway.s3.list_result import ListedEntry
from gateway.s3.origin_habits import OriginHabits, makes_weak_etags, shared_etags
from gateway.s3.requests import parse_copy_source
from gateway.telemetry import metrics


class SizesSeen:
    """How large the objects were that this process looked at last, by bucket and the ending of their names."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], deque[int]] = OrderedDict()

    def note(self, version: ObjectVersion) -> None:
        """To be called when the origin has said how long an object is."""
        kind = _kind(version.key)
        sizes = self._kinds.get(kind)
        if sizes is None:
            sizes = self._kinds[kind] = deque(maxlen=SIZES_SEEN)
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        sizes.append(version.size_bytes)

    def are_within(self, key: ObjectKey, size_bytes: int) -> bool:
        """Return True if enough objects of this kind were seen, the last ones all within `size_bytes`."""
        sizes = self._kinds.get(_kind(key), ())
        return len(sizes) == SIZES_SEEN and max(sizes) <= size_bytes


SIZES_SEEN = 8
KINDS_MAX = 4096

BUCKETS_LISTED_MAX, ETAGS_LISTED_MAX = 16, 10_000
"""With more, a process forgets which sizes it has seen listed with which ETags."""


def _kind(key: ObjectKey) -> tuple[str, str]:
    _, dot, ending = key.key.rpartition("/")[2].rpartition(".")
    return key.bucket, ending if dot else ""


HABITS_SECONDS = 600.0
"""Seconds for which Forebay believes that an origin knows no ranges, makes weak ETags or withholds ranges."""

HABITS_REREAD_SECONDS = 1.0
_WEAK, _RANGES, _SHARED, _WITHHELD = "weak-etags", "no-ranges", "shared-etags", "withheld-etags"


def habits_version(bucket: str) -> ObjectVersion:
    """Return the place of a bucket's habits in the catalog: no object has such a key."""
    return ObjectVersion(ObjectKey(bucket, ""), "habits", 0)


def pack_habits(habits: OriginHabits) -> dict[str, str]:
    packed = {_WEAK: "1" if habits.weak_etags else "", _RANGES: "1" if habits.no_ranges else ""}
    packed[_WITHHELD] = "\t".join(sorted(habits.withheld_etags))
    return {**packed, _SHARED: "\t".join(sorted(habits.shared_etags))}


def unpack_habits(entry: CatalogEntry, boot: int, now_seconds: float) -> OriginHabits:
    """Return the habits that are still valid at `now_seconds` of the boot of that number."""
    told: Mapping[str, str] = entry.head.headers if entry.head is not None else {}
    observed = entry.observed_at
    is_young = observed.boot == boot and 0 <= now_seconds - observed.seconds < HABITS_SECONDS
    shared, withheld = (frozenset(filter(None, told.get(name, "").split("\t"))) for name in (_SHARED, _WITHHELD))
    if not is_young:
        return OriginHabits(shared_etags=shared)
    return OriginHabits(told.get(_WEAK) == "1", told.get(_RANGES) == "1", shared, withheld)


_OF_ANY_AGE = KeyBound(math.inf, math.inf)

_OF_OBJECTS = frozenset({200, 206, 304, 412, 416})
"""Statuses by which the origin answers a read of an object, or of something about it, if there is one."""

_SHOWN_AT_ONCE_SECONDS = 0.001
"""Seconds after which a process that notes the time of something was stopped meanwhile."""

__all__ = ["Catalog", "ObjectHead", "is_down", "is_plainly_asked", "is_remembered"]

_log = structlog.get_logger("forebay.catalog")
CHECKSUM_MODE = "x-amz-checksum-mode"


class Hold(Protocol):
    """A condition under which a version stays the object's current one."""

    def holds(self) -> bool:
        """Return True while the version is current within its slot's bound."""


class HeldVersion(NamedTuple):
    """The version of an object that is current as long as `hold` says so."""

    head: ObjectHead
    hold: Hold


class CatalogHit(NamedTuple):
    """The catalog's knowledge of an object. `head` None: it does not exist. `age_seconds` None: the age is unknown."""

    head: ObjectHead | None
    age_seconds: float | None
    freshness: Freshness


class BegunHead:
    """A HEAD that was sent without a wait. Close it in the end; idempotent."""

    __slots__ = ("_begun", "_over", "_understand")

    def __init__(
        self, begun: BegunRead, over: Callable[[], None], understand: Callable[[OriginHead], ObjectHead]
    ) -> None:
        self._begun = begun
        self._over: Callable[[], None] | None = over
        self._understand = understand

    def answer(self) -> ObjectHead | OriginRequest:
        """Return the answer, when `on_end` is called; or the `onward` of `Catalog.ask`. Raises OriginBodyError."""
        self._end()
        begun = self._begun
        if not begun.is_whole or begun.whole() is None:
            return begun.onward()
        return self._understand(begun)

    def close(self) -> None:
        self._end()
        self._begun.close()

    def _end(self) -> None:
        over, self._over = self._over, None
        if over is not None:
            over()


class SeenVersion(NamedTuple):
    """The version that was seen last; `etag` None: none, or no object. `is_current`: within the slot's bound."""

    etag: str | None
    is_current: bool


class Catalog:
    """One worker process's view of the catalog that all workers share. Use `open`, and `close` at the end."""

    def __init__(self, origin: Origin, opened: OpenCatalog | None, clock: Clock, roles: Roles | None = None) -> None:
        self._origin = origin
        self._roles = roles
        self._opened = opened
        self._clock = clock
        self._store = opened.store if opened is not None else None
        self._epochs = opened.epochs if opened is not None else InvalidationEpochs(None, clock=clock)
        self._boot = opened.boot if opened is not None else 0
        self._writer = CatalogWriter(self._store)
        self.listing = ListingIndex(opened, self._epochs, clock)
        self.in_doubt = InDoubtWrites(clock)
        self.joined_calls = JoinedCalls(clock)
        self.sizes_seen = SizesSeen()
        self._habits: dict[str, tuple[OriginHabits, float]] = {}
        """Habits of each bucket, and the time until which they are not read again."""
        self._refused: dict[ObjectKey, str] = {}
        """ETags of the versions that the origin has named last and then not given."""
        self._told: set[tuple[str, str]] = set()
        self._listed_sizes: dict[str, dict[str, int]] = {}
        """For each bucket, the size of each ETag on the pages that the origin listed last."""
        if self._epochs.left_behind:
            self._epochs.void(self._epochs.left_behind)
            self.in_doubt.add(self._end_left_behind)

    @classmethod
    async def open(
        cls,
        directory: Path,
        origin: Origin,
        *,
        homes: Homes,
        clock: Clock,
        slots: Slots,
        process: int = 0,
        roles: Roles | None = None,
    ) -> Catalog:
        """Open the shared directory. Entries of buckets that are at other `homes` now are forgotten.

        `process` is this process's number in shared memory (heartbeats.py): writes during which its
        predecessor was killed are void. `roles` say which other node to ask for readers.

        So are listings in slots that are strict now; `slots` are the same in all processes.
        StartupError when it has another format or is a mistake, StoreUnavailable when the disk fails.
        """
        thread = DiskThread("opening the catalog")
        try:
            opened = await thread.run(OPENING_SECONDS_MAX, _opened, directory, homes, slots, process, clock)
        except TimeoutError:
            raise StoreUnavailable(f"the catalog {directory} cannot be opened: another process holds it up") from None
        finally:
            await thread.close(0.0)  # it ends with what it does now, however long that takes
        return cls(origin, opened, clock, roles)

    @classmethod
    def switched_off(cls, origin: Origin, clock: Clock) -> Catalog:
        """One that remembers nothing, where the directory cannot be used.

        Every question goes to the origin then, in every slot, and own writes have nothing to void. All workers of a
        gateway must do without together: one that writes without the directory could not void what another remembers.
        """
        return cls(origin, None, clock)

    async def ask(
        self,
        key: ObjectKey,
        slot: Slot,
        *,
        headers: Mapping[str, str],
        part_number: str | None = None,
        signed_by: KeyPair | None = None,
        purpose: Purpose = Purpose.LIVE,
        onward: OriginRequest | None = None,
    ) -> ObjectHead:
        """Ask the origin about `key` now; with `part_number` also where that part lies.

        `headers` go along with the HEAD (`x-amz-checksum-mode`, `x-amz-request-payer`, …), `signed_by` is the caller's
        own key pair. Concurrent callers with the same question and purpose share a HEAD that begins after each of them
        has called; `onward` is one that was begun for this caller. Raises OriginAnswered for every error status,
        without a body as HEAD has none, OriginUnreachable, and OriginBodyError.
        """
        question = key, part_number, frozenset(headers.items()), signed_by, purpose

        def send() -> Coroutine[Any, Any, ObjectHead]:
            query = (("partNumber", part_number),) if part_number is not None else ()
            ages = self.ages(key, slot) if COPY in headers else None
            request = onward or OriginRequest(
                "HEAD",
                key.bucket,
                key.key,
                query,
                headers,
                purpose=purpose,
                slot=slot.name,
                signed_by=signed_by,
                ages=ages,
            )
            return self._head(key, slot, request, is_part=part_number is not None)

        return await self.joined_calls.ask(question, send)

    def begin_ask(
        self, key: ObjectKey, slot: Slot, headers: Mapping[str, str], begin: BeginRead, on_end: OnEnd
    ) -> BegunHead | None:
        """Ask as `ask` does, without a wait, and call `on_end`; None: call `ask`."""
        request = OriginRequest("HEAD", key.bucket, key.key, (), headers, slot=slot.name)
        question = key, None, frozenset(headers.items()), None, request.purpose
        over = self.joined_calls.enter(question, lambda: self._head(key, slot, request, is_part=False))
        begun = begin(request, on_end) if over is not None else None
        if over is None or begun is None:
            if over is not None:
                over()
            return None
        return BegunHead(begun, over, partial(self._told_of, key, slot, request, is_part=False))

    async def _head(self, key: ObjectKey, slot: Slot, request: OriginRequest, *, is_part: bool) -> ObjectHead:
        async with await self._origin.send(request) as response:
            return self._told_of(key, slot, request, response, is_part=is_part)

    def _told_of(
        self, key: ObjectKey, slot: Slot, request: OriginRequest, response: OriginHead, *, is_part: bool
    ) -> ObjectHead:
        is_not_learned = is_part or not is_remembered(slot, request.headers)
        if response.status not in (200, 206):
            if response.status == 404 and is_not_learned:
                self.shown(key, None)
            raise OriginAnswered(response.status, list(response.headers.items()), b"", age_of(response))
        head = object_head(key, response.headers, is_part=is_part)
        if (told := from_peer(response)) is not None:
            head = replace(head, age_seconds=told.age_seconds, of_peer=True)
        if (still := still_of(response)) is not None:
            head = replace(head, still=still)
        self._seen(head, slot)
        if is_not_learned:
            self.shown(key, head.version.etag)
        return head

    def shown(self, key: ObjectKey, etag: str | None) -> None:
        """Forget all versions but this ETag (None: no object): no reader of an unlearned answer goes back to one."""
        entry = self._lookup(key)
        if entry is not None and etag != (entry.head.version.etag if entry.head is not None else None):
            self.forget(key)
        else:
            self._refuse_older(key)

    def _refuse_older(self, key: ObjectKey) -> None:
        if self._roles is not None:
            self._epochs.note(key)

    def ages(self, key: ObjectKey, slot: Slot) -> AnswerAges:
        """Return how old other nodes' answers may be to a question about `key` that is asked from now on."""
        changed_at = self._epochs.changed_at(key.bucket, catalog_key(key)) if self._store is not None else math.inf
        unchanged_seconds = self._clock.monotonic() - changed_at
        return AnswerAges(key, slot, unchanged_seconds, self.listing, self._is_shown)

    def _is_shown(self, key: ObjectKey, age_seconds: float) -> bool:
        return self._epochs.is_shown_since(self.now(key).before(age_seconds), key)

    def answered(self, request: OriginRequest, status: int, slot: Slot) -> None:
        """End all absences of the objects that an answer of the origin shows: the request's own, a copy's source.

        Call it before the client learns of the answer. `slot` is that of the request's own. Answers to `ask`, and those
        that are `learned` or `listed`, do so by themselves.
        """
        copied = request.headers.get("x-amz-copy-source")
        if copied is not None and status == 200:
            with suppress(S3Error):  # a form of its own, as of an access point
                for text in {copied, copied.replace("+", "%2B")}:  # origins read a plus sign in two ways
                    self._show(parse_copy_source(text).key)
        if request.bucket and request.key and request.method in ("GET", "HEAD") and status in _OF_OBJECTS:
            self._show_in(slot, ObjectKey(request.bucket, request.key))

    def _show_in(self, slot: Slot, key: ObjectKey) -> None:
        if slot.negative_ttl_seconds and is_remembered(slot, {}):  # elsewhere, no absence is believed
            self._show(key)

    def _show(self, key: ObjectKey) -> None:
        seconds = self._clock.monotonic()
        self._epochs.show(key, seconds, self._boot)
        if self._clock.monotonic() - seconds > _SHOWN_AT_ONCE_SECONDS:
            self._epochs.show(key, self._clock.monotonic(), self._boot)  # another process may have noted a later time

    def listed(self, bucket: str, entries: Sequence[ListedEntry], slots: Iterable[Slot]) -> None:
        """Void what all workers remember otherwise than just listed, in order. Call before any client learns of it.

        `slots` are all those of the entries.
        """
        self._listed(bucket, [(entry.key, (entry.etag, entry.size_bytes)) for entry in entries])
        if any(slot.negative_ttl_seconds for slot in slots):
            for entry in entries:
                if entry.size_bytes >= 0:  # else it was deleted
                    self._show(ObjectKey(bucket, entry.key.decode()))

    def listed_records(self, bucket: str, listed: Sequence[Listed]) -> None:
        self._listed(bucket, [(key, etag_and_size(record)) for key, record in listed])

    def _listed(self, bucket: str, versions: Sequence[tuple[bytes, tuple[str, int]]]) -> None:
        self.listed_sizes(bucket, [version for _, version in versions])
        if self._store is not None:
            self._store.void_if_listed_otherwise(bucket, versions)

    def listed_sizes(self, bucket: str, versions: Iterable[tuple[str, int]]) -> None:
        """Learn which ETags the origin has listed with several sizes, on this page and the last ones."""
        if len(self._listed_sizes) >= BUCKETS_LISTED_MAX:
            self._listed_sizes.clear()
        sizes = self._listed_sizes.setdefault(bucket, {})
        if len(sizes) >= ETAGS_LISTED_MAX:
            sizes.clear()
        self.learn_habits(bucket, OriginHabits(shared_etags=shared_etags(versions, sizes)))

    def habits(self, bucket: str) -> OriginHabits:
        """Return what the origin was found to do in a bucket by this process or, at least a second ago, by others."""
        now_seconds = self._clock.monotonic()
        known = self._habits.get(bucket)
        if known is None or now_seconds >= known[1]:
            entry = self._store.lookup_version(habits_version(bucket)) if self._store is not None else None
            habits = unpack_habits(entry, self._boot, now_seconds) if entry is not None else OriginHabits()
            if len(self._habits) >= KINDS_MAX:
                self._habits.clear()
            known = self._habits[bucket] = habits, now_seconds + HABITS_REREAD_SECONDS
        return known[0]

    def learn_habits(self, bucket: str, found: OriginHabits) -> None:
        """Record what the origin's answers have shown of a bucket: once, and for all processes."""
        before = self.habits(bucket)
        now = before.joined(found)
        if now == before:
            return
        if now.shared_etags != before.shared_etags:
            self.forget_bucket(bucket)  # callers that answer by earlier knowledge ask again
        if len(self._told) >= KINDS_MAX:
            self._told.clear()
        for why in now.reasons() - before.reasons():
            if (bucket, why) in self._told:
                continue
            self._told.add((bucket, why))
            _log.warning("objects of a bucket are kept out of the cache", bucket=bucket, because=why)
        seconds = HABITS_REREAD_SECONDS if self._store is not None else HABITS_SECONDS
        self._habits[bucket] = now, self._clock.monotonic() + seconds
        version = habits_version(bucket)
        head = ObjectHead(version, pack_habits(now), None)
        self._writer.add(CatalogUpdate(version.key, CatalogEntry(self.now(version.key), head), of_version=True))

    def refused(self, version: ObjectVersion) -> None:
        """Forget a version that the origin did not give under its ETag: it may have another now, or withhold it."""
        if len(self._refused) >= KINDS_MAX:
            self._refused.clear()
        self._refused[version.key] = version.etag
        self.forget(version.key)

    def named(self, version: ObjectVersion) -> None:
        """Learn that the origin withholds a version: it was `refused`, and the origin has just named it again."""
        if self._refused and self._refused.pop(version.key, None) == version.etag:
            self.learn_habits(version.key.bucket, OriginHabits(withheld_etags=frozenset({unquote(version.etag)})))

    def _seen(self, head: ObjectHead, slot: Slot) -> None:
        self._show_in(slot, head.version.key)
        self.sizes_seen.note(head.version)
        if makes_weak_etags(head.version.etag) and not head.of_peer:
            self.learn_habits(head.version.key.bucket, OriginHabits(weak_etags=True))

    async def current(
        self,
        key: ObjectKey,
        slot: Slot,
        *,
        headers: Mapping[str, str],
        look: bool = False,
        purpose: Purpose = Purpose.LIVE,
        of_peer: bool = False,
    ) -> ObjectHead:
        """Return the version current within the bound of `slot`; with `look` the origin is asked anyway.

        `of_peer`: another node asks, so no other is asked.

        Raises as `ask` does. `slot.consistency` strict, and headers that the origin must judge each time, always ask.
        An absence that is remembered comes as OriginAnswered 404 too, or as S3Error NoSuchKey where it is known that
        the bucket is there.
        """
        if not is_remembered(slot, headers):
            return await self.ask(key, slot, headers=headers, purpose=purpose)
        known = None if look else self.remembered(key, slot, headers=headers)
        if known is not None:
            return known
        try:
            roles = None if look or of_peer else self._roles
            head = await self._learn(key, slot, headers_of_question(roles, key, 0, slot, headers), purpose)
        except (OriginUnreachable, OriginAnswered) as error:
            if look and isinstance(error, OriginAnswered) and error.status == 404:
                self.shown(key, None)
            entry = self._lookup(key)
            if (
                entry is None
                or _lacks_checksums(entry, headers)
                or look
                or not is_down(error)
                or self._freshness(entry, slot) is Freshness.USELESS
            ):
                raise
            metrics.CATALOG_LOOKUPS.add(1, slot.name, "stale")
            return answer_of(key, entry, headers)
        if look:  # a fresh entry would answer until this one lands
            self.shown(key, head.version.etag)
        metrics.CATALOG_LOOKUPS.add(1, slot.name, "miss")
        return head

    def remembered(self, key: ObjectKey, slot: Slot, *, headers: Mapping[str, str]) -> ObjectHead | None:
        """Return what `current` answers without asking the origin; None if it would ask. Raises as `current`."""
        if not is_remembered(slot, headers):
            return None
        entry = self._lookup(key)
        if entry is not None and _lacks_checksums(entry, headers):
            return None
        if entry is not None and self._freshness(entry, slot) is Freshness.FRESH:
            metrics.CATALOG_LOOKUPS.add(1, slot.name, "hit" if entry.head is not None else "absent")
            return answer_of(key, entry, headers)
        if entry is not None and self._is_confirmed(key, entry, slot):
            metrics.CATALOG_LOOKUPS.add(1, slot.name, "listed")
            return answer_of(key, entry, headers)
        if self.is_listed_absent(key, slot):
            metrics.CATALOG_LOOKUPS.add(1, slot.name, "absent")
            raise s3_error("NoSuchKey", Key=key.key)
        return None

    def learned_within(
        self, seconds_max: float, key: ObjectKey, slot: Slot, *, headers: Mapping[str, str]
    ) -> tuple[float, CatalogEntry] | None:
        """Return what `remembered` answers by, if it was learned so lately, after its age in seconds.

        An absence must be as young as the slot allows.
        """
        entry = self._lookup(key) if is_remembered(slot, headers) else None
        if entry is None or _lacks_checksums(entry, headers) or self._freshness(entry, slot) is not Freshness.FRESH:
            return None
        age_seconds = self._clock.monotonic() - entry.observed_at.seconds
        if entry.observed_at.boot != self._boot or (entry.head is not None and not 0 <= age_seconds < seconds_max):
            return None
        metrics.CATALOG_LOOKUPS.add(1, slot.name, "hit" if entry.head is not None else "absent")
        return age_seconds, entry

    def is_listed_absent(self, key: ObjectKey, slot: Slot) -> bool:
        """Return whether the listing index knows within the slot's bounds that there is no such object."""
        bound = bound_of((slot,)) if slot.negative_ttl_seconds > 0 else None
        if bound is None:
            return False
        seconds = min(bound.fresh_seconds, slot.negative_ttl_seconds)
        listed = self.listing.entry(*key, KeyBound(seconds, seconds))
        return listed is not None and listed.entry is None

    def hold(self, key: ObjectKey, slot: Slot, *, with_checksums: bool) -> HeldVersion | None:
        """Return a fresh version as `remembered` does, checkable for repeated answers; None: call `remembered`."""
        if self._store is None or slot.consistency not in ("immutable", "ttl"):
            return None
        held = self._store.hold(key)
        if held is None or held[0].head is None:
            return None
        entry, record = held
        head = held[0].head
        if self._freshness(entry, slot) is not Freshness.FRESH or (with_checksums and not entry.with_checksums):
            return None
        if slot.consistency != "immutable":
            record.limit(self._clock, entry.observed_at.seconds + slot.metadata_ttl_seconds)
        stripped = entry.with_checksums and not with_checksums
        return HeldVersion(without_checksums(head) if stripped else head, record)

    def has_learned(self, version: ObjectVersion) -> bool:
        """Return True if this version is the last one learned of its key, at any age, and not written since."""
        entry = self._lookup(version.key)
        head = entry.head if entry is not None else None
        return head is not None and is_same_version(head.version, version)

    def learned(
        self, head: ObjectHead, slot: Slot, asked: ObservedAt, *, headers: Mapping[str, str], with_checksums: bool
    ) -> None:
        """Keep the result of a GET that was sent at `asked`, so that the catalog may answer the same question."""
        self._seen(head, slot)
        if not is_remembered(slot, headers):
            self.shown(head.version.key, head.version.etag)
            return
        metrics.CATALOG_LOOKUPS.add(1, slot.name, "miss")
        if head.version.etag:
            self._writer.add(CatalogUpdate(head.version.key, _entry(asked, head, with_checksums=with_checksums)))

    def last_seen(self, key: ObjectKey, slot: Slot) -> SeenVersion:
        """Return the version that was seen last, by an answer or a listing, and whether the slot's bound allows it."""
        entry, bound = self._lookup(key), bound_of((slot,))
        etag = entry.head.version.etag if entry is not None and entry.head is not None else None
        is_current = entry is not None and self._freshness(entry, slot) is Freshness.FRESH
        if bound is not None and not is_current:
            listed = self.listing.entry(*key, bound)
            is_current = listed is not None
            listed = listed or self.listing.entry(*key, _OF_ANY_AGE)
            if listed is not None and (is_current or etag is None):
                etag = listed.entry.etag if listed.entry is not None else None
        return SeenVersion(etag or None, is_current=is_current and etag != "")

    def last_known(self, key: ObjectKey) -> ObjectHead | None:
        """Return the last head learned of an object, however old; None if unknown or written since."""
        entry = self._lookup(key)
        return entry.head if entry is not None else None

    def last_learned(self, key: ObjectKey) -> ObjectHead | None:
        """Return the last head learned even if the object was written since, for a check whether it has changed."""
        entry = self._store.last(key) if self._store is not None else None
        return entry.head if entry is not None else None

    def unknown_at(self, key: ObjectKey) -> ObservedAt | None:
        """Return the present time of a key, as `now` does, if nothing was ever learned of the object; None: it was."""
        record_key = catalog_key(key)
        is_known = self._store is not None and self._store.has(record_key)
        return None if is_known else self._now(key.bucket, record_key)

    def explain(self, key: ObjectKey, slot: Slot) -> CatalogHit | None:
        """Return the catalog's knowledge of an object and how far its slot believes it; None if unknown."""
        entry = self._lookup(key)
        if entry is None:
            return None
        observed, now = entry.observed_at, self._clock.monotonic()
        age_seconds = now - observed.seconds if observed.boot == self._boot and now >= observed.seconds else None
        state = self._freshness(entry, slot)
        is_listed = state is not Freshness.FRESH and self._is_confirmed(key, entry, slot)
        return CatalogHit(entry.head, age_seconds, Freshness.FRESH if is_listed else state)

    def of_version(self, version: ObjectVersion, *, with_checksums: bool) -> ObjectHead | None:
        """Return the head of one version, current or not. It never changes, so its age does not matter."""
        entry = self._store.lookup_version(version) if self._store is not None else None
        if entry is None or entry.head is None or (with_checksums and not entry.with_checksums):
            return None
        return entry.head if with_checksums or not entry.with_checksums else without_checksums(entry.head)

    def learned_version(self, head: ObjectHead, *, with_checksums: bool) -> None:
        """Keep the head of a version that was requested by its ETag."""
        entry = CatalogEntry(self.now(head.version.key), head, with_checksums=with_checksums)
        self._writer.add(CatalogUpdate(head.version.key, entry, of_version=True))

    def now(self, key: ObjectKey) -> ObservedAt:
        """To be taken before the origin is asked about `key`, for `remember_absence` and `learned`."""
        return self._now(key.bucket, catalog_key(key))

    def _now(self, bucket: str, record_key: bytes) -> ObservedAt:
        epochs = self._epochs
        return ObservedAt(epochs.of_bucket(bucket), self._clock.monotonic(), self._boot, epochs.of_key(record_key))

    def remember_absence(self, key: ObjectKey, slot: Slot, asked: ObservedAt, *, named: bool) -> None:
        """Remember that the origin has answered 404 to a question sent at `asked`; `named`: with NoSuchKey."""
        self._refuse_older(key)
        if slot.consistency not in ("strict", "snapshot") and slot.negative_ttl_seconds > 0:
            self._writer.add(CatalogUpdate(key, CatalogEntry(asked, named=named)))

    def forget(self, key: ObjectKey) -> None:
        """Believe nothing that was asked about `key` until now, on any worker. To be called around every own write."""
        self._epochs.change_key(key)

    def forget_bucket(self, bucket: str | None) -> None:
        """Do the same for a bucket and all of its keys; None: for all buckets."""
        if bucket is None:
            self._epochs.change_everything()
        else:
            self._epochs.change_bucket(bucket)

    def begin_write(self, bucket: str | None, keys: Sequence[ObjectKey] | None) -> Sequence[int]:
        """Note a write about to be sent: of these keys, of all keys of the bucket, or of all buckets if it names none.

        If this process is killed before `end_write`, nothing is believed that was asked about them before the next one
        in its place starts, or soon after.
        """
        return self._epochs.begin_write(bucket, keys)

    def end_write(self, places: Sequence[int]) -> None:
        """End a write, answered or not: forget what it changes. `places`: from `begin_write`."""
        self._epochs.end_write(places)

    async def settle(self) -> None:
        """Wait until what was learned so far is written."""
        await self._writer.settle()
        await self.listing.settle()

    async def close(self) -> None:
        await self.joined_calls.close()
        await self.in_doubt.close()
        ended = await asyncio.gather(self._writer.close(), self.listing.close())
        if not all(ended):
            _log.warning("the catalog was not closed: another process does not end its transaction")
            return
        try:
            if self._opened is not None:
                await asyncio.to_thread(self._opened.close)
        except (OSError, lmdb.Error) as error:
            _log.warning("the catalog could not be closed properly; Forebay learns it again", error=str(error))

    async def _end_left_behind(self) -> None:
        self._epochs.void(self._epochs.left_behind)
        self._epochs.end_write(self._epochs.left_behind)

    def _lookup(self, key: ObjectKey) -> CatalogEntry | None:
        entry = self._store.lookup(key) if self._store is not None else None
        is_void = entry is not None and entry.head is None and self._epochs.is_shown_since(entry.observed_at, key)
        return None if is_void else entry

    def _is_confirmed(self, key: ObjectKey, entry: CatalogEntry, slot: Slot) -> bool:
        """Return True if a listing within the slot's bound agrees with the entry, which is older."""
        if entry.head is None or not entry.settled:
            return False
        bound = bound_of((slot,))
        listed = self.listing.entry(*key, bound) if bound is not None else None
        return listed is not None and listed.entry is not None and is_confirmed(entry.head, listed.entry)

    def _freshness(self, entry: CatalogEntry, slot: Slot) -> Freshness:
        return freshness(entry, slot, now_seconds=self._clock.monotonic(), boot=self._boot)

    async def _learn(self, key: ObjectKey, slot: Slot, headers: Mapping[str, str], purpose: Purpose) -> ObjectHead:
        asked = self.now(key)
        try:
            head = await self.ask(key, slot, headers=headers, purpose=purpose)
        except OriginAnswered as answer:
            told = dict(answer.headers)
            if answer.status == 404 and "x-amz-delete-marker" not in told and is_of_s3(told):
                self.remember_absence(key, slot, asked.before(answer.age_seconds), named=False)
            raise
        if head.version.etag:
            asked = asked.before(head.age_seconds)
            self._writer.add(CatalogUpdate(key, _entry(asked, head, with_checksums=CHECKSUM_MODE in headers)))
        return head


def _lacks_checksums(entry: CatalogEntry, headers: Mapping[str, str]) -> bool:
    return CHECKSUM_MODE in headers and entry.head is not None and not entry.with_checksums


def _entry(asked: ObservedAt, head: ObjectHead, *, with_checksums: bool) -> CatalogEntry:
    return CatalogEntry(asked, head, with_checksums=with_checksums, settled=is_settled(head))


def _opened(directory: Path, homes: Homes, slots: Slots, process: int, clock: Clock) -> OpenCatalog:
    opened = open_directory(directory, homes, process=process, clock=clock)
    try:
        trim(opened.listing, slots)
    except lmdb.Error as error:
        opened.close()
        raise StoreUnavailable(f"the catalog {directory} cannot be used: {error}") from error
    return opened


def is_remembered(slot: Slot, headers: Mapping[str, str]) -> bool:
    """Return True if the catalog may answer a question in `slot` that goes to the origin with these headers.

    The origin judges `x-amz-request-payer` and the expected bucket owner each time.
    """
    return slot.consistency not in ("strict", "snapshot") and (not headers or is_plainly_asked(headers))


def is_plainly_asked(headers: Mapping[str, str]) -> bool:
    """Return True if none of these headers needs the origin's judgement."""
    return all(
        (name == CHECKSUM_MODE and value.upper() == "ENABLED") or name == COPY for name, value in headers.items()
    )


def headers_of_question(
    roles: Roles | None, key: ObjectKey, number: int, slot: Slot, headers: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the headers for a question about an object's version, perhaps together with one of its blocks.

    They have COPY where another node is to answer.
    """
    if roles is None or not may_be_remembered(slot, headers):
        return headers
    return roles.headers(key, number, headers, slot.name)


def may_be_remembered(slot: Slot, headers: Mapping[str, str]) -> bool:
    """Return True if another node may answer: the slot is read-only, and it allows an answer of some age."""
    is_read_only = slot.mode == "read-only" and slot.consistency in ("ttl", "immutable")
    return is_read_only and is_plainly_asked(headers)


def answer_of(key: ObjectKey, entry: CatalogEntry, headers: Mapping[str, str]) -> ObjectHead:
    """Return what an entry says of the object, to a question with these headers. Raises for an absence."""
    if entry.head is None:
        if entry.named:
            raise s3_error("NoSuchKey", Key=key.key)
        raise OriginAnswered(404, [("content-type", "application/xml")], b"")
    if entry.with_checksums and CHECKSUM_MODE not in headers:
        return without_checksums(entry.head)
    return entry.head


def is_down(error: OriginUnreachable | OriginAnswered) -> bool:
    """Return True if the origin failed to answer; a refusal is an answer (docs/semantics.md, clause 3.5)."""
    return isinstance(error, OriginUnreachable) or error.status >= 500
