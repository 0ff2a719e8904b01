"""Reports pending objects, open uploads and the journal's size as metrics: every ten seconds, less often if looks take
long."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferUnavailable
from gateway.telemetry import metrics
from gateway.writeback.admin.queries import PendingQueries, UploadStats
from gateway.writeback.checkpoints.state import CheckpointState

LOOK_SECONDS = 10.0

STATES = ("conflict", "damaged", "failing", CheckpointState.WAITING.value)

_SHARE = 50.0
"""The pause after a look is at least this many times its length: a look reads each open upload and its parts."""


class PendingMonitor:
    """Sets the metrics of one buffer, in the process that flushes it; of `slots` also without pending writes."""

    def __init__(self, queries: PendingQueries, slots: Collection[str], clock: Clock) -> None:
        self._queries = queries
        self._clock = clock
        self._slots = slots
        self._told = set[str]()

    async def run(self) -> None:
        while True:
            began = self._clock.monotonic()
            with suppress(BufferUnavailable):  # the journal's writers report it
                await self._look()
            await self._clock.sleep(max(LOOK_SECONDS, _SHARE * (self._clock.monotonic() - began)))

    async def _look(self) -> None:
        problems = await self._queries.problems_by_slot()
        conflicts = await self._queries.oldest_conflicts_by_slot()
        uploads = await self._queries.uploads_by_slot()
        now = Moment.of(self._clock)
        self._told |= {*self._slots, *problems, *uploads}
        for slot in self._told:
            for state, objects in zip(STATES, problems.get(slot, (0, 0, 0, 0)), strict=True):
                metrics.WRITEBACK_NOT_FLUSHED.set(objects, slot, state)
            metrics.WRITEBACK_OLDEST_CONFLICT_SECONDS.set(_since(conflicts.get(slot), now), slot)
            stats = uploads.get(slot, UploadStats())
            metrics.WRITEBACK_OPEN_UPLOADS.set(stats.uploads, slot)
            metrics.WRITEBACK_OPEN_UPLOAD_BYTES.set(stats.size_bytes, slot)
            metrics.WRITEBACK_OPEN_UPLOAD_IDLE.set(_since(stats.touched, now), slot)
        journal = await self._queries.journal()
        metrics.WRITEBACK_REMEMBERED.set(journal.ended_uploads, "ended-upload")
        metrics.WRITEBACK_REMEMBERED.set(journal.own_writes, "own-write")
        metrics.WRITEBACK_JOURNAL_BYTES.set(journal.size_bytes)


def _since(moment: Moment | None, now: Moment) -> float:
    return max(0.0, now.since(moment)[0]) if moment is not None else 0.0
