"""Everything that the dashboard shows, in one document: one question a second is all that an open page costs."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.admin_backends import Holders
from gateway.admin.callers import CallersApi
from gateway.admin.history import CountsHistory, counts_of
from gateway.admin.requests import RequestsApi
from gateway.admin.responses import flag, problem
from gateway.admin.slots import SlotsApi
from gateway.admin.troubles import troubles
from gateway.core.errors import BufferUnavailable, SnapshotError, StoreUnavailable
from gateway.policy.slots import Prefix
from gateway.telemetry.metric_kinds import LATENCY_BUCKETS_SECONDS
from gateway.telemetry.metric_reading import MetricReading

FRESH_SECONDS = 0.5
"""A document so old is given again: several open pages cost as much as one."""

JOBS_SHOWN = 20
"""Of those that are over; those that run are all shown."""

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
        status: Callable[[MetricReading], Awaitable[dict[str, Any]]],
        slots: SlotsApi,
        lent: Holders,
        metrics_directory: Path,
        requests: RequestsApi,
        callers: CallersApi,
        history: CountsHistory,
    ) -> None:
        """`status` gives the document of `/api/v1/status`."""
        self._status = status
        self._slots = slots
        self._lent = lent
        self._directory = metrics_directory
        self._requests = requests
        self._callers = callers
        self._history = history
        self._lock = asyncio.Lock()
        self._made_at = float("-inf")
        self._document: dict[str, Any] = {}

    async def show(self, request: Request) -> Response:
        """`?history=true`: with the counts of the last quarter of an hour."""
        async with self._lock:
            now = time.monotonic()
            if now - self._made_at >= FRESH_SECONDS:
                self._document = await self._made()
                self._made_at = now
        try:
            with_history = flag(request, "history")
        except ValueError as error:
            return problem(400, str(error))
        document = self._document | {"history": self._history.samples() if with_history else []}
        return Response(orjson.dumps(document), headers={"cache-control": "no-store"}, media_type="application/json")

    async def _made(self) -> dict[str, Any]:
        reading = await asyncio.to_thread(MetricReading, self._directory)
        status = await self._status(reading)
        return {
            "host": platform.node(),
            "status": status,
            "troubles": [one._asdict() for one in troubles(status)],
            "counts": counts_of(reading),
            "latency_buckets_seconds": LATENCY_BUCKETS_SECONDS,
            **self._slots.since_last(reading, status["writeback"]),
            "callers": self._callers.since_last(reading),
            "requests": await self._requests.document(REQUESTS_SHOWN),
            "jobs": self._jobs(),
            "snapshots": await self._snapshots(),
            **await self._unflushed(),
        }

    def _jobs(self) -> list[dict[str, Any]]:
        """Those that run, then those that are over, the newest first; none while the cache directory is not open."""
        jobs = self._lent.jobs.documents()[::-1]
        ended = [job for job in jobs if job["state"] != "running"]
        return [job for job in jobs if job["state"] == "running"] + ended[:JOBS_SHOWN]

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
