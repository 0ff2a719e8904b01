"""The counts of the last quarter of an hour, for the dashboard's charts: kept whether or not a page is open."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path

import structlog

from gateway.api import documents as to
from gateway.telemetry import metrics
from gateway.telemetry.metric_reading import MetricReading
from gateway.telemetry.request_counts import BROKEN_OFF

HISTORY_SECONDS = 900
SAMPLE_SECONDS = 5

_log = structlog.get_logger("forebay.history")


class CountsHistory:
    """Bounded: some 180 samples."""

    def __init__(self, metrics_directory: Path) -> None:
        self._directory = metrics_directory
        self._samples: deque[to.Counts] = deque(maxlen=HISTORY_SECONDS // SAMPLE_SECONDS + 1)

    def samples(self) -> list[to.Counts]:
        """Return the samples, the oldest first."""
        return list(self._samples)

    async def keep(self) -> None:
        """Take a sample every SAMPLE_SECONDS until cancelled. One that fails is a gap in the charts."""
        while True:
            try:
                self._samples.append(counts_of(await asyncio.to_thread(MetricReading, self._directory)))
            except OSError as error:
                _log.warning("the counts for the dashboard's charts cannot be read", error=str(error))
            await asyncio.sleep(SAMPLE_SECONDS)


def counts_of(reading: MetricReading) -> to.Counts:
    """Return sums since the gateway started (two make a rate), and how often each latency occurred."""
    statuses = reading.by_labels(("status",), metrics.REQUESTS)
    origin_statuses = reading.by_labels(("status",), metrics.ORIGIN_REQUESTS)
    moved = reading.by_labels(("direction", "purpose"), metrics.ORIGIN_BYTES)
    return to.Counts(
        at=time.time(),
        requests=_sum(statuses),
        request_seconds=reading.total(metrics.REQUEST_SECONDS),
        failed=sum(int(count) for (status,), count in statuses.items() if status[:1] == "5" or status == BROKEN_OFF),
        in_flight=int(reading.total(metrics.REQUESTS_IN_FLIGHT)),
        sent_bytes=int(reading.total(metrics.SENT_BYTES)),
        received_bytes=int(reading.total(metrics.RECEIVED_BYTES)),
        hit_bytes=int(reading.total(metrics.CACHE_HIT_BYTES)),
        miss_bytes=int(reading.total(metrics.CACHE_MISS_BYTES)),
        misses={reason: int(count) for (reason,), count in reading.by_labels(("reason",), metrics.MISSES).items()},
        origin_requests=_sum(origin_statuses),
        origin_failed=sum(
            int(count)
            for (status,), count in origin_statuses.items()
            if status[:1] == "5" or status in ("429", "unreachable")
        ),
        origin_read_bytes=int(sum(count for (way, _), count in moved.items() if way == "read")),
        origin_written_bytes=int(sum(count for (way, _), count in moved.items() if way == "write")),
        flush_bytes=int(moved.get(("write", "flush"), 0.0)),
        flushed_objects=int(reading.total(metrics.WRITEBACK_FLUSHED_OBJECTS)),
        served_latencies=reading.buckets(metrics.REQUEST_SECONDS, "operation", lambda _: True),
        origin_latencies=reading.buckets(metrics.ORIGIN_REQUEST_SECONDS, "purpose", lambda one: one != "flush"),
        flush_latencies=reading.buckets(metrics.ORIGIN_REQUEST_SECONDS, "purpose", lambda one: one == "flush"),
    )


def _sum(counts: dict[tuple[str, ...], float]) -> int:
    return int(sum(counts.values()))
