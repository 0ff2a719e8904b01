"""What is the matter with pending objects, as this process knows it: one state for status, lists, metrics and waiting.

A conflict is in the journal; that a flush fails, and that bytes are damaged, is found out anew after a restart, and so
is only here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from gateway.clock import Clock
from gateway.objects import ObjectKey
from gateway.writeback.flushing.flush import FlushObserver
from gateway.writeback.journal.records import PendingObject

ALARMS_MAX = 10_000
"""With more, those that have failed longest ago make room: they will be back, for they are tried again."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An object that could not be flushed. Times in seconds since 1970; `failures` are those in a row."""

    sequence: int
    key: ObjectKey
    slot: str
    reason: str
    failures: int
    since: float
    last_at: float
    is_damaged: bool = False


class Alarms:
    """The methods of `flush.FlushObserver`; passes on what it is told."""

    def __init__(self, then: FlushObserver, clock: Clock) -> None:
        self._then = then
        self._clock = clock
        self._alarms: dict[int, Alarm] = {}

    def __iter__(self) -> Iterator[Alarm]:
        """Every one, what has failed longest ago first."""
        return iter(list(self._alarms.values()))

    def __len__(self) -> int:
        return len(self._alarms)

    def of(self, sequence: int) -> Alarm | None:
        """What is the matter with an object; None: nothing that is known here."""
        return self._alarms.get(sequence)

    def forget(self, sequences: Collection[int]) -> None:
        """They are pending no more, or are to be tried again."""
        for sequence in sequences:
            self._alarms.pop(sequence, None)

    # Of flush.FlushObserver.

    def settled(self, pending: PendingObject) -> None:
        self.forget([pending.sequence])
        self._then.settled(pending)

    def failing(self, pending: PendingObject, failures: int, reason: str) -> None:
        self._put(pending, reason, failures)
        self._then.failing(pending, failures, reason)

    def goes_on(self, pending: PendingObject) -> None:
        self.forget([pending.sequence])
        self._then.goes_on(pending)

    def conflict(self, pending: PendingObject) -> None:
        self.forget([pending.sequence])
        self._then.conflict(pending)

    def damaged(self, pending: PendingObject, reason: str) -> None:
        self._put(pending, reason, 1, is_damaged=True)
        self._then.damaged(pending, reason)

    def _put(self, pending: PendingObject, reason: str, failures: int, *, is_damaged: bool = False) -> None:
        now = self._clock.now()
        before = self._alarms.pop(pending.sequence, None)
        since = before.since if before is not None else now
        slot = pending.fixed.slot
        self._alarms[pending.sequence] = Alarm(
            pending.sequence, pending.key, slot, reason, failures, since, now, is_damaged
        )
        if len(self._alarms) > ALARMS_MAX:
            del self._alarms[next((one.sequence for one in self if not one.is_damaged), next(iter(self._alarms)))]
