"""Reports pending objects, open uploads and the journal's size as metrics: every ten seconds, less often if looks take
long."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from gateway.core.clock import Clock, Moment
from gateway.writeback.admin.queries import PendingQueries, UploadStats, look_repeatedly
from gateway.writeback.checkpoints.state import CheckpointState

LOOK_SECONDS = 10.0

STATES = ("conflict", "damaged", "failing", CheckpointState.WAITING.value)


class PendingObserver(Protocol):
    """For metrics."""

    def not_flushed(self, slot: str, state: str, objects: int) -> None:
        """Report the number of a slot's objects in one of `STATES`."""

    def oldest_conflict(self, slot: str, age_seconds: float) -> None:
        """Report the seconds since the oldest write in conflict was acknowledged; 0 without a conflict."""

    def uploads_open(self, slot: str, uploads: int, size_bytes: int, idle_seconds: float) -> None:
        """Report open uploads, the bytes of their parts here, and the seconds since the idlest was touched."""

    def journal_holds(self, ended_uploads: int, own_writes: int, size_bytes: int) -> None:
        """Report the records of ended uploads and of own writes, and the size of the journal's files."""


class PendingMonitor:
    """Monitors one buffer, in the process that flushes it. Reports on `slots` even while nothing is pending in them."""

    def __init__(
        self, queries: PendingQueries, slots: Collection[str], clock: Clock, observer: PendingObserver
    ) -> None:
        self._queries = queries
        self._clock = clock
        self._observer = observer
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
                self._observer.not_flushed(slot, state, objects)
            self._observer.oldest_conflict(slot, _since(conflicts.get(slot), now))
            stats = uploads.get(slot, UploadStats())
            self._observer.uploads_open(slot, stats.uploads, stats.size_bytes, _since(stats.touched, now))
        self._observer.journal_holds(*await self._queries.journal())


def _since(moment: Moment | None, now: Moment) -> float:
    return max(0.0, now.since(moment)[0]) if moment is not None else 0.0
