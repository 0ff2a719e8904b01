"""Count the requests of the S3 port, which end in several places."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import KW_ONLY, dataclass, field

from gateway.core.model import MissReason
from gateway.telemetry import metrics
from gateway.telemetry.metric_kinds import LATENCY_BUCKETS_SECONDS

CLIENT_LEFT = "client-left"
"""The status of a request whose client left before the answer was complete."""

BROKEN_OFF = "broken-off"
"""The status of a request whose answer failed behind its head."""


def count_request(
    operation: str,
    slot: str,
    status: str,
    cache: str | None,
    seconds: float,
    sent_bytes: int = 0,
    received_bytes: int = 0,
    credential: str | None = None,
) -> None:
    """Count a request that is over. `status` is the HTTP status, CLIENT_LEFT or BROKEN_OFF; bytes are those of bodies.

    `credential` is a configured access key, or stands for all others.
    """
    metrics.REQUESTS.add(1, operation, slot, status, cache or "none")
    metrics.REQUEST_SECONDS.observe(seconds, operation)
    if credential is not None:
        metrics.CALLER_REQUESTS.add(1, credential)
    if sent_bytes:
        metrics.SENT_BYTES.add(sent_bytes, operation, slot)
        if credential is not None:
            metrics.CALLER_SENT_BYTES.add(sent_bytes, credential)
    if received_bytes:
        metrics.RECEIVED_BYTES.add(received_bytes, operation, slot)
        if credential is not None:
            metrics.CALLER_RECEIVED_BYTES.add(received_bytes, credential)


def count_refusal(status: int) -> None:
    """Count a request that the server refused unread: it is no HTTP, or too many connections are open."""
    metrics.REQUESTS.add(1, "Unknown", "none", str(status), "none")


@dataclass(eq=False, slots=True)
class AnswerTally:
    """Sums prepared answers of one kind in this process: the shared memory of metrics costs more than all the rest.

    With `is_known` the catalog has answered; without, the origin was asked. With a `reason`, the bytes were missing for
    that. `lay` adds the sums to the metrics.
    """

    operation: str
    slot: str
    status: str
    _: KW_ONLY
    is_known: bool
    credential: str = "none"
    reason: MissReason | None = None
    _count: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _sent_bytes: int = field(default=0, init=False)
    _buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_SECONDS) + 1), init=False)

    @property
    def cache(self) -> str:
        return "hit" if self.reason is None else "miss"

    def add(self, seconds: float, sent_bytes: int, answers: int = 1) -> None:
        """Add answers that took so long each, and have so many bytes together."""
        self._count += answers
        self._seconds += seconds * answers
        self._sent_bytes += sent_bytes
        self._buckets[bisect_left(LATENCY_BUCKETS_SECONDS, seconds)] += answers

    def lay(self) -> None:
        if not self._count:
            return
        metrics.REQUESTS.add(self._count, self.operation, self.slot, self.status, self.cache)
        if self.reason is not None:
            metrics.MISSES.add(self._count, self.operation, self.slot, self.reason)
        else:
            metrics.PREPARED_REQUESTS.add(self._count, self.operation, self.slot)
        metrics.CALLER_REQUESTS.add(self._count, self.credential)
        metrics.REQUEST_SECONDS.add(self._buckets, self._seconds, self.operation)
        if self.is_known:
            metrics.CATALOG_LOOKUPS.add(self._count, self.slot, "hit")
        if self._sent_bytes:
            metrics.SENT_BYTES.add(self._sent_bytes, self.operation, self.slot)
            metrics.CALLER_SENT_BYTES.add(self._sent_bytes, self.credential)
            of_cache = metrics.CACHE_HIT_BYTES if self.reason is None else metrics.CACHE_MISS_BYTES
            of_cache.add(self._sent_bytes, self.slot)
        self._count, self._seconds, self._sent_bytes = 0, 0.0, 0
        self._buckets = [0] * len(self._buckets)
