"""Everything that the dashboard shows, in one document: one question a second is all that an open page costs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway import metrics
from gateway.control.admin_backends import Holders
from gateway.control.requests import RequestsApi
from gateway.control.responses import flag, problem
from gateway.control.slots import SlotsApi
from gateway.errors import BufferUnavailable, SnapshotError, StoreUnavailable
from gateway.metric_kinds import LATENCY_BUCKETS_SECONDS
from gateway.metric_observers import BROKEN_OFF
from gateway.metric_reading import Reading
from gateway.policy.slots import Prefix

FRESH_SECONDS = 0.5
"""A document so old is given again: several open pages cost as much as one."""

HISTORY_SECONDS = 2.0
HISTORY_MAX = 150
"""Of the counts, as long as pages are open: one that is opened then shows the last five minutes at once."""

JOBS_SHOWN = 20
REQUESTS_SHOWN = 8
CHECKPOINTS_READ = 200
CHECKPOINTS_SHOWN = 40
PROBLEMS_SHOWN = 20
UPLOADS_SHOWN = 20

_NEED_HELP = ("failed", "conflict", "stalled")


class OverviewApi:
    """The endpoint."""

    def __init__(
        self,
        status: Callable[[Reading], Awaitable[dict[str, Any]]],
        slots: SlotsApi,
        lent: Holders,
        metrics_directory: Path,
        requests: RequestsApi,
    ) -> None:
        """`status` gives the document of `/api/v1/status`."""
        self._status = status
        self._slots = slots
        self._lent = lent
        self._directory = metrics_directory
        self._requests = requests
        self._lock = asyncio.Lock()
        self._made_at = float("-inf")
        self._document: dict[str, Any] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_MAX)

    async def show(self, request: Request) -> Response:
        """`?history=true`: with the counts of the last minutes."""
        async with self._lock:
            now = time.monotonic()
            if now - self._made_at >= FRESH_SECONDS:
                self._document = await self._made()
                self._made_at = now
        try:
            with_history = flag(request, "history")
        except ValueError as error:
            return problem(400, str(error))
        document = self._document | {"history": list(self._history) if with_history else []}
        return Response(orjson.dumps(document), headers={"cache-control": "no-store"}, media_type="application/json")

    async def _made(self) -> dict[str, Any]:
        reading = await asyncio.to_thread(Reading, self._directory)
        status = await self._status(reading)
        counts = {"at": time.time(), **counts_of(reading)}
        if not self._history or counts["at"] - self._history[-1]["at"] >= HISTORY_SECONDS:
            self._history.append(counts)
        return {
            "status": status,
            "counts": counts,
            "latency_buckets_seconds": LATENCY_BUCKETS_SECONDS,
            **self._slots.since_last(reading, status["writeback"]),
            "requests": await self._requests.document(REQUESTS_SHOWN),
            "jobs": self._jobs(),
            "snapshots": await self._snapshots(),
            **await self._unflushed(),
        }

    def _jobs(self) -> list[dict[str, Any]]:
        """The newest first; none while the cache directory is not open."""
        return self._lent.jobs.documents()[::-1][:JOBS_SHOWN]

    async def _snapshots(self) -> list[dict[str, Any]]:
        service = self._lent.snapshots.service
        try:
            return await service.all() if service is not None else []
        except (SnapshotError, StoreUnavailable):  # the command and the log say why
            return []

    async def _unflushed(self) -> dict[str, list[dict[str, Any]]]:
        """Checkpoints, those that somebody is to look at first, then the newest; what does not get to the origin, and
        open uploads. Nothing while the buffer cannot be read, which the status says."""
        backend, everything = self._lent.writeback.backend, Prefix.parse("s3://")
        if backend is None:
            return {"checkpoints": [], "problems": [], "uploads": []}
        try:
            found = (await backend.checkpoints(everything, "", CHECKPOINTS_READ, ()))["checkpoints"]
            problems = (await backend.problems(everything, "", PROBLEMS_SHOWN))["objects"]
            uploads = (await backend.uploads(everything, "", UPLOADS_SHOWN))["uploads"]
        except BufferUnavailable:
            return {"checkpoints": [], "problems": [], "uploads": []}
        found.sort(key=lambda one: (one["state"] in _NEED_HELP, one["last_at"] or 0.0), reverse=True)
        shown = [one | {"ranks_seen": one["ranks_seen"][:64]} for one in found[:CHECKPOINTS_SHOWN]]
        return {"checkpoints": shown, "problems": problems, "uploads": uploads}


def counts_of(reading: Reading) -> dict[str, Any]:
    """Sums since the gateway started, of which two make a rate, and how often which latency occurred."""
    statuses = reading.by_labels(("status",), metrics.REQUESTS)
    origin_statuses = reading.by_labels(("status",), metrics.ORIGIN_REQUESTS)
    moved = reading.by_labels(("direction", "purpose"), metrics.ORIGIN_BYTES)
    return {
        "requests": _sum(statuses),
        "failed": sum(int(count) for (status,), count in statuses.items() if status[:1] == "5" or status == BROKEN_OFF),
        "in_flight": int(reading.total(metrics.REQUESTS_IN_FLIGHT)),
        "sent_bytes": int(reading.total(metrics.SENT_BYTES)),
        "received_bytes": int(reading.total(metrics.RECEIVED_BYTES)),
        "hit_bytes": int(reading.total(metrics.CACHE_HIT_BYTES)),
        "miss_bytes": int(reading.total(metrics.CACHE_MISS_BYTES)),
        "misses": {reason: int(count) for (reason,), count in reading.by_labels(("reason",), metrics.MISSES).items()},
        "origin_requests": _sum(origin_statuses),
        "origin_failed": sum(
            int(count)
            for (status,), count in origin_statuses.items()
            if status[:1] == "5" or status in ("429", "unreachable")
        ),
        "origin_read_bytes": int(sum(count for (way, _), count in moved.items() if way == "read")),
        "flush_bytes": int(moved.get(("write", "flush"), 0.0)),
        "flushed_objects": int(reading.total(metrics.WRITEBACK_FLUSHED_OBJECTS)),
        "served_latencies": reading.buckets(metrics.REQUEST_SECONDS, "operation", lambda _: True),
        "origin_latencies": reading.buckets(metrics.ORIGIN_REQUEST_SECONDS, "purpose", lambda one: one != "flush"),
        "flush_latencies": reading.buckets(metrics.ORIGIN_REQUEST_SECONDS, "purpose", lambda one: one == "flush"),
    }


def _sum(counts: dict[tuple[str, ...], float]) -> int:
    return int(sum(counts.values()))
