"""Reports pending objects, open uploads and the journal's size as metrics every 10 s, less often if looks take long."""

from __future__ import annotations

from collections.abc import Collection

from gateway.core.clock import Clock, Moment
from gateway.telemetry import metrics
from gateway.writeback.admin.queries import PendingQueries, UploadStats, look_repeatedly
from gateway.writeback.checkpoints.state import CheckpointState

LOOK_SECONDS = 10.0

STATES = ("conflict", "damaged", "failing", CheckpointState.WAITING.value)


class PendingMonitor:
    """Sets the metrics of one buffer, in the process that flushes it; of `slots` also without pending writes."""

    def __init__(self, queries: PendingQueries, slots: Collection[str], clock: Clock) -> None:
        self._queries = queries
        self._clock = clock
        self._slots = slots
        self._told = set[str]()

    async def run(self) -> None:
        await look_repeatedly(self._look, self._clock, LOOK_SECONDS)

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
        ended_uploads, own_writes, size_bytes = await self._queries.journal()
        metrics.WRITEBACK_REMEMBERED.set(ended_uploads, "ended-upload")
        metrics.WRITEBACK_REMEMBERED.set(own_writes, "own-write")
        metrics.WRITEBACK_JOURNAL_BYTES.set(size_bytes)


def _since(moment: Moment | None, now: Moment) -> float:
    return max(0.0, now.since(moment)[0]) if moment is not None else 0.0
