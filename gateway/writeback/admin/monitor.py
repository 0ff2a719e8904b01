"""What is pending, what is open and what is remembered, as metrics: looked at every ten seconds, or less often where
that takes long."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Protocol

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferUnavailable
from gateway.writeback.admin.queries import PendingQueries, UploadStats
from gateway.writeback.checkpoints.state import CheckpointState

LOOK_SECONDS = 10.0

STATES = ("conflict", "damaged", "failing", CheckpointState.WAITING.value)

_SHARE = 50.0
"""A look may take this part of the time: it reads a row of each open upload, and of each of its parts."""


class PendingObserver(Protocol):
    """For metrics."""

    def not_flushed(self, slot: str, state: str, objects: int) -> None:
        """So many objects of a slot are in one of `STATES`."""

    def oldest_conflict(self, slot: str, age_seconds: float) -> None:
        """Since the oldest write that is in conflict was acknowledged; 0: there is none."""

    def uploads_open(self, slot: str, uploads: int, size_bytes: int, idle_seconds: float) -> None:
        """So many uploads, and so much of them here; since the last part of the one that was left alone longest."""

    def journal_holds(self, ended_uploads: int, own_writes: int, size_bytes: int) -> None:
        """What is remembered of what is over, and the size of the journal's files."""


class PendingMonitor:
    """Of one buffer; in the process that flushes it. `slots` are told of also while nothing is pending in them."""

    def __init__(
        self, queries: PendingQueries, slots: Collection[str], clock: Clock, observer: PendingObserver
    ) -> None:
        self._queries = queries
        self._clock = clock
        self._observer = observer
        self._slots = slots
        self._told = set[str]()

    async def run(self) -> None:
        """For ever."""
        while True:
            began = self._clock.monotonic()
            with suppress(BufferUnavailable):  # whoever writes to the journal learns of it
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
                self._observer.not_flushed(slot, state, objects)
            self._observer.oldest_conflict(slot, _since(conflicts.get(slot), now))
            stats = uploads.get(slot, UploadStats())
            self._observer.uploads_open(slot, stats.uploads, stats.size_bytes, _since(stats.touched, now))
        journal = await self._queries.journal()
        self._observer.journal_holds(journal.ended_uploads, journal.own_writes, journal.size_bytes)


def _since(moment: Moment | None, now: Moment) -> float:
    return max(0.0, now.since(moment)[0]) if moment is not None else 0.0
