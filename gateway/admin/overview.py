"""Everything that the dashboard shows, in one document: one question a second is all that an open page costs."""

from __future__ import annotations

import asyncio
import platform
import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.backends import Backends
from gateway.admin.callers import CallersApi
from gateway.admin.history import CountsHistory, counts_of
from gateway.admin.jobs import job_documents
from gateway.admin.operations import TOKEN, flag_of, operation
from gateway.admin.responses import flag
from gateway.admin.slots import SlotsApi
from gateway.admin.status import StatusApi
from gateway.admin.troubles import troubles
from gateway.api import documents as to
from gateway.core.errors import BufferUnavailable, SnapshotError, StoreUnavailable
from gateway.policy.slots import Prefix
from gateway.telemetry.metric_kinds import LATENCY_BUCKETS_SECONDS
from gateway.telemetry.metric_reading import MetricReading

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
        self,
        status: StatusApi,
        slots: SlotsApi,
        lent: Backends,
        metrics_directory: Path,
        callers: CallersApi,
        history: CountsHistory,
    ) -> None:
        self._status = status
        self._slots = slots
        self._lent = lent
        self._directory = metrics_directory
        self._callers = callers
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
        slots = self._slots.since_last(reading, status.writeback)
        checkpoints, problems, uploads = await self._unflushed()
        return to.Overview(
            host=platform.node(),
            status=status,
            troubles=[to.TroubleDocument(**one._asdict()) for one in troubles(status)],
            counts=counts_of(reading),
            history=[],
            latency_buckets_seconds=list(LATENCY_BUCKETS_SECONDS),
            link=slots.link,
            slots=slots.slots,
            callers=self._callers.since_last(reading),
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
