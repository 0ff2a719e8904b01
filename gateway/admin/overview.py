"""Everything that the dashboard shows, in one document: one question a second is all that an open page costs.

Its charts show the counts of the last quarter of an hour, kept whether or not a page is open.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections import deque
from pathlib import Path

import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.backends import Backends
from gateway.admin.jobs import job_documents
from gateway.admin.operations import TOKEN, flag, flag_of, operation
from gateway.admin.slots import SlotsApi
from gateway.admin.status import StatusApi
from gateway.admin.troubles import troubles
from gateway.api import documents as to
from gateway.core.errors import BufferUnavailable, SnapshotError, StoreUnavailable
from gateway.policy.slots import Prefix
from gateway.telemetry import metrics
from gateway.telemetry.metric_kinds import LATENCY_BUCKETS_SECONDS
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


FRESH_SECONDS = 0.5
"""A document so old is given again: several open pages cost as much as one."""

JOBS_SHOWN = 20
"""The most finished jobs shown; running ones are all shown."""

REQUESTS_SHOWN = 8
CHECKPOINTS_READ = 200
CHECKPOINTS_SHOWN = 40
PROBLEMS_SHOWN = 20
UPLOADS_SHOWN = 20

_NEED_HELP = ("failed", "conflict", "stalled")


class OverviewApi:
    def __init__(
        self, status: StatusApi, slots: SlotsApi, lent: Backends, metrics_directory: Path, history: CountsHistory
    ) -> None:
        self._status = status
        self._slots = slots
        self._lent = lent
        self._directory = metrics_directory
        self._history = history
        self._lock = asyncio.Lock()
        self._made_at = float("-inf")
        self._made: to.Overview | None = None

    @operation(
        "GET /api/v1/overview",
        "What the dashboard shows, in one document.",
        to.Overview,
        {**TOKEN, 400: "history is neither true nor false."},
        parameters=[flag_of("history", "true: with the counts of the last 15 minutes")],
    )
    async def show(self, request: Request) -> Response:
        async with self._lock:
            now = time.monotonic()
            if self._made is None or now - self._made_at >= FRESH_SECONDS:
                self._made, self._made_at = await self._make(), now
            made = self._made
        history = self._history.samples() if flag(request, "history") else []
        body = made.model_copy(update={"history": history}).model_dump_json(exclude_unset=True)
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    async def _make(self) -> to.Overview:
        reading = await asyncio.to_thread(MetricReading, self._directory)
        status = await self._status.status(reading)
        slots, callers = self._slots.since_last(reading, status.writeback)
        checkpoints, problems, uploads = await self._unflushed()
        return to.Overview(
            host=platform.node(),
            status=status,
            troubles=list(troubles(status)),
            counts=counts_of(reading),
            history=[],
            latency_buckets_seconds=list(LATENCY_BUCKETS_SECONDS),
            link=slots.link,
            slots=slots.slots,
            callers=callers,
            requests=await self._status.recent_requests(REQUESTS_SHOWN),
            jobs=self._jobs(),
            snapshots=await self._snapshots(),
            checkpoints=checkpoints,
            problems=problems,
            uploads=uploads,
        )

    def _jobs(self) -> list[to.JobDocument]:
        """Return those that run, then those that are over, the newest first."""
        jobs = job_documents(self._lent.jobs)[::-1] if self._lent.jobs is not None else []
        ended = [job for job in jobs if job.state != "running"]
        return [job for job in jobs if job.state == "running"] + ended[:JOBS_SHOWN]

    async def _snapshots(self) -> list[to.SnapshotDocument]:
        try:
            return await self._lent.snapshots.all() if self._lent.snapshots is not None else []
        except (SnapshotError, StoreUnavailable):  # the command and the log say why
            return []

    async def _unflushed(self) -> tuple[list[to.Checkpoint], list[to.PendingObject], list[to.OpenUploadDocument]]:
        """Return checkpoints (first those that need help, then the newest), stuck objects, and open uploads."""
        backend, everything = self._lent.writeback, Prefix.parse("s3://")
        if backend is None:
            return [], [], []
        try:
            found = (await backend.checkpoints(everything, "", CHECKPOINTS_READ, ())).checkpoints
            problems = (await backend.problems(everything, "", PROBLEMS_SHOWN)).objects
            uploads = (await backend.uploads(everything, "", UPLOADS_SHOWN)).uploads
        except BufferUnavailable:  # the status says so
            return [], [], []
        found = sorted(found, key=lambda one: (one.state in _NEED_HELP, one.last_at or 0.0), reverse=True)
        shown = [one.model_copy(update={"ranks_seen": one.ranks_seen[:64]}) for one in found[:CHECKPOINTS_SHOWN]]
        return shown, problems, uploads
