"""Takes every write to its end: looks at what is due, and starts a task for each (flush_task.py).

Only one process of a gateway does this. When a write is due (`due_at`), a task of its own looks at it, and ends when
nothing can be done for now: writes that failed, or wait, take no place. No failure makes it give a write up.

lanes.py decides how many are under way at once, and how often an origin that is not working is tried.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, BufferUnavailable
from gateway.core.model import ObjectKey
from gateway.origin.client import IS_AWAITED
from gateway.policy.slots import DEFAULT_SLOT, Prefix
from gateway.writeback.checkpoints.manifests import may_be_understood
from gateway.writeback.flushing.condition_probe import ConditionProbes
from gateway.writeback.flushing.flush_task import FlushDependencies, FlushTask, Superseded, taken_up
from gateway.writeback.flushing.lanes import BESIDE_ANSWERS_SECONDS, SLOW_SECONDS, Lane
from gateway.writeback.flushing.state import End, Progress, Settle, Wait
from gateway.writeback.journal.journal import JournalGC
from gateway.writeback.journal.records import Priority, State
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.turns import RETRY_SECONDS_MAX, UPLOAD_SECONDS_MAX, Due
from gateway.writeback.order import is_marker
from gateway.writeback.pending_key_filter import ChangeNotifier

AGAIN_SECONDS = 60.0
"""Seconds between two corrections of due times. The reconciler also corrects them when the clock is set."""

AHEAD_AGAIN_SECONDS = 1.0
"""The pause while a due time is later than any can be: other processes write times that they read before the clock was
set, and between two looks it may be set and set back."""

_NEIGHBOURS = 128
"""Writes due at about the same time, more than fail in a row (`AWAY_AFTER_AMONG_OTHERS`). A write that has failed only
once was due lately, as those that failed often sleep long: so it is soon found among many that the origin does not
serve."""

_UNEXPECTED_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Attempts:
    """Requests under way to the origin now. `is_away`: an origin has failed several requests in a row.

    `longest_seconds` counts from the start of the first, None: there is none.
    """

    longest_seconds: float | None = None
    is_away: bool = False


class Reconciler:
    """The reconciler of one buffer."""

    def __init__(self, dependencies: FlushDependencies, rng: random.Random | None = None) -> None:
        self._dependencies = dependencies
        self._journal = dependencies.journal
        self._clock = dependencies.clock
        self._rng = rng or random.Random()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._runs: dict[int, FlushTask] = {}
        self._notifier = ChangeNotifier(dependencies.journal.pending_keys.version, dependencies.clock)
        self._gc = JournalGC(dependencies.journal, dependencies.clock)
        self._probes = ConditionProbes(dependencies.journal, dependencies.requests, dependencies.clock)
        self._again_at = 0.0
        self._is_ahead = False
        self._wall_ahead_seconds = 0.0

    def prioritise(self, prefix: Prefix) -> None:
        """Ask origins that were away again. Failed writes under a prefix are due (`Turns.try_now`).

        Those that fail at this moment will be soon.
        """
        for (_, bucket), lane in self._lanes.items():
            if not prefix.bucket or prefix.bucket == bucket:
                lane.prioritise()
        for run in self._runs.values():
            if prefix.covers(*run.write.key):
                run.is_awaited = True
                run.prioritise_parts()
        self._notifier.notify()

    def scratch_slots(self) -> frozenset[str]:
        return frozenset(name for name, one in self._dependencies.slots.items() if one.write == "scratch")

    def attempts(self, prefix: Prefix) -> Attempts:
        now = self._clock.monotonic()
        writes = [(run.write, run.began) for run in self._runs.values()]
        began = [at for one, at in writes if one.is_acknowledged and prefix.covers(one.key.bucket, one.key.key)]
        is_away = any(lane.is_away for (_, bucket), lane in self._lanes.items() if prefix.bucket in ("", bucket))
        return Attempts(now - min(began) if began else None, is_away)

    def awaiting_files(self, covers: Callable[[ObjectKey], bool]) -> Mapping[int, int]:
        """Return the covered manifests that wait for files: ids of their writes → numbers of missing files."""
        found = self._dependencies.manifests.waiting(covers)
        living = self._journal.read(lambda tx: tx.turns.living(list(found))) if found else set()
        self._dependencies.manifests.forget(found.keys() - living)
        return {one: missing for one, missing in found.items() if one in living}

    async def run(self) -> None:
        """Reconcile until cancelled. While the journal cannot be used, try again."""
        tidying = asyncio.create_task(self._gc.run())
        try:
            with suppress(BufferUnavailable):
                await self._journal.change(lambda tx: tx.begin_epoch(self._clock.now()))
            async with self._notifier.watching():
                while True:
                    with suppress(BufferUnavailable):  # the journal's writers report it
                        await self._set_right()
                        if not self._journal.has_failed:  # else results could not be recorded
                            self._journal.read(self.look)
                    await self._notifier.wait()
        finally:
            await self._stop(tidying)

    def look(self, tx: JournalTransaction) -> None:
        """Start tasks for what is due, and cancel those of writes that have ended."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        if self._tasks:
            living = tx.turns.living(list(self._tasks))
            for write_id in self._tasks.keys() - living:
                if write_id not in self._runs or not self._runs[write_id].is_ending:
                    self._tasks[write_id].cancel()
            for write_id in tx.turns.urgent(list(self._runs)):
                self._runs[write_id].is_urgent = True
                self._runs[write_id].prioritise_parts()
        lanes = tx.turns.lanes()
        self._is_ahead = any(_is_ahead(first_due_at, now) for first_due_at in lanes.values())
        for name, first_due_at in lanes.items():
            due = {priority for priority, at in first_due_at.items() if at <= now}
            if not due:
                continue
            lane = self._lanes.get(name) or self._lanes.setdefault(name, Lane())
            for priority in lane.priorities():
                room = lane.room(priority, monotonic) if priority in due else 0
                for one in self._chosen(tx, name, lane, priority, now, room) if room > 0 else ():
                    lane.begin(priority, one.id, monotonic)
                    self._tasks[one.id] = asyncio.create_task(self._take_up(name[0], lane, priority, one))
                    self._notifier.notify_at(monotonic + SLOW_SECONDS)

    async def drain(self) -> None:
        """Finish the running tasks, and start no others."""
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _chosen(
        self, tx: JournalTransaction, name: tuple[str, str], lane: Lane, priority: Priority, now: float, room: int
    ) -> Sequence[Due]:
        """Choose what has waited longest. If that may fail, also take, or take instead, a later write.

        Of some neighbours that is the one with the fewest failures.
        """
        count_max = room + len(self._tasks) + 1
        found = [one for one in tx.turns.due(name, priority, now, count_max) if one.id not in self._tasks]
        if len(found) <= room or not lane.is_mixed(priority, self._clock.monotonic()):
            return found[:room]
        first, last = found[0].due_at, tx.turns.due(name, priority, now, 1, newest=True)[0].due_at
        until = self._rng.choice((first, last, *(self._rng.uniform(first, last) for _ in range(2))))
        behind = tx.turns.due(name, priority, until, count_max + _NEIGHBOURS, newest=True)
        chosen = sorted((one for one in behind if one.id not in self._tasks), key=lambda one: one.attempts)[:1]
        return [*chosen, *(one for one in found if one not in chosen)][:room]

    async def _set_right(self) -> None:
        now, monotonic = self._clock.now(), self._clock.monotonic()
        was_set = abs(now - monotonic - self._wall_ahead_seconds) > 1.0
        since_seconds = monotonic - self._again_at + AGAIN_SECONDS
        if was_set or since_seconds >= (AHEAD_AGAIN_SECONDS if self._is_ahead else AGAIN_SECONDS):
            self._again_at, self._wall_ahead_seconds = monotonic + AGAIN_SECONDS, now - monotonic
            moment = Moment.of(self._clock)
            await self._journal.change(lambda tx: tx.set_right(moment))

    async def _take_up(self, slot: str, lane: Lane, priority: Priority, due: Due) -> None:
        try:
            outcome = await self._run(slot, lane, due)
            if isinstance(outcome, Wait) and outcome.is_away:
                lane.unanswered(priority, due.id, self._clock.monotonic(), self._rng)
                self._notifier.notify_at(self._clock.monotonic() + BESIDE_ANSWERS_SECONDS)
            else:
                lane.answered(priority, self._clock.monotonic(), is_done=isinstance(outcome, Settle))
        except Superseded:
            pass
        except BufferDamaged as error:
            await self._quarantine(slot, due, str(error))
        except Exception as error:  # noqa: BLE001 - it is told, and tried again: nothing may stop a write for good
            self._dependencies.log.not_looked_after(str(due.key), slot, repr(error))
            await self._clock.sleep(_UNEXPECTED_PAUSE_SECONDS)
        finally:
            lane.end(priority, due.id)
            self._tasks.pop(due.id, None)
            self._runs.pop(due.id, None)
            self._gc.needed = True
            self._notifier.notify()

    async def _run(self, slot: str, lane: Lane, due: Due) -> End | None:
        found = await taken_up(self._journal, due.id)
        if found is None:
            return None
        write, turn = found
        order = self._dependencies.slots.get(slot, DEFAULT_SLOT)  # a slot may be gone from the configuration
        markers = order.markers if order.manifests == "checked" and order is not DEFAULT_SLOT else ()
        is_last = write.behind is not None or (write.in_order and is_marker(write.key.key, order.markers))
        progress = Progress(
            write,
            await self._probes.conditions(write, order.prefix.key_prefix),
            Moment.of(self._clock),
            order.upload_expiry_seconds,
            names_files=is_marker(write.key.key, markers) and may_be_understood(write.key),
            awaits_others=is_last and self._dependencies.manifests.others is not None,
            is_scratch=order.write == "scratch",
            is_room_wanted=write.state is State.OPEN and turn.priority is Priority.URGENT,
        )
        run = FlushTask(self._dependencies, self._probes, lane, self._rng, progress, turn, self._notifier)
        self._runs[due.id] = run
        IS_AWAITED.set(lambda: run.is_hurried)  # this task's own
        return await run.run()

    async def _quarantine(self, slot: str, due: Due, reason: str) -> None:
        with suppress(BufferUnavailable):
            if due.id in self._journal.read(lambda tx: tx.turns.living([due.id])):  # else its files went with the write
                await self._journal.change(lambda tx: tx.turns.quarantine(due.id, reason))
                self._dependencies.log.damaged(due.id, str(due.key), slot, reason)

    async def _stop(self, tidying: asyncio.Task[None]) -> None:
        running = [*self._tasks.values(), *self._probes.tasks, tidying]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _is_ahead(first_due_at: Mapping[Priority, float], now: float) -> bool:
    latest = {
        Priority.SMALL: 1.0,
        Priority.LARGE: 1.0,
        Priority.URGENT: RETRY_SECONDS_MAX,
        Priority.RETRY: RETRY_SECONDS_MAX,
    }
    return any(at > now + latest.get(priority, UPLOAD_SECONDS_MAX) for priority, at in first_due_at.items())
