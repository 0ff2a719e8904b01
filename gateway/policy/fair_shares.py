"""Decides which slot passes a contended link next: weighted max-min fair shares of its bandwidth, in one direction.

A slot's *virtual time* is the bytes that it has passed while any slot waited for the link, divided by its weight. The
waiting slot with the lowest goes first (start-time fair queueing), so slots which always wait advance together: each
gets bytes in proportion to its weight, and slots that do not wait leave their shares to the others. The *floor* is the
lowest virtual time that any slot has waited with; it never falls. A slot that was idle starts near it, with at most
CREDIT_SECONDS saved up; a slot that was ahead of others owes at most DEBT_SECONDS.

All of it follows from cells that have one writer each (shared/arena.py), for each direction:

    fresh[p]        until when the list of process p counts
    contended[p]    until when p is known to wait for the link
    floor[p]        the floor as p knows it; the greatest counts
    count[p]        the number of entries in its list
    list[p][n]      a slot with waiting pieces in p, for the link or for the slot's own ceiling; their best rank
    virtual[p][n]   the virtual time of that slot, as p knows it
    passed[s][p]    bytes of slot s that p has passed while any slot waited, each divided by the weight at that time
    anchor[s][p]    added by p to the virtual time of s, which lay too far below the floor; the greatest counts

A process that is stopped or killed stops counting as waiting HOLD_SECONDS later, and others may run ahead of it when
the link's bucket is nearly full. Until then the bucket saves up what they leave, so it costs them next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.policy.token_bucket import TokenBucket
from gateway.shared.arena import SharedCells

LOOK_SECONDS = 0.004
"""Seconds between two looks at what all processes wait for."""

HOLD_SECONDS = 0.1
"""Seconds for which a process counts as waiting. It says so anew in half of that."""

CREDIT_SECONDS = 0.1
"""The most that an idle slot may catch up with: its share in this time."""

DEBT_SECONDS = 1.0
"""The most that a slot that was ahead of others, by its guarantee, must let pass: their shares in this time."""

_FULL = 0.9
"""The part of its burst from which on the link's bucket is so full that the process whose turn it is must be absent.
Others may then be HOLD_SECONDS ahead of it, after which it does not count as waiting any more."""

_LOOKING_MAX = 0.05
"""The most of a process's time that looks take, by estimate."""

_ENTRY_SECONDS, _SLOT_SECONDS, _OWN_SLOT_SECONDS, _CELL_SECONDS = 0.15e-6, 0.5e-6, 3e-6, 0.05e-6
"""The estimated time of a look for each entry of a list, for each waiting slot, for each of this process's own, and for
each process's cell in these."""

_INTERVAL_SECONDS_MAX = 0.025
"""However long a look takes. Two of these must pass before the link's bucket is full."""

_RANK, _AT_LINK, _NEEDY, _SLOT_SHIFT = 0b111, 0b1000, 0b10000, 5
"""An entry of a list: its slot is under its guarantee (needy), and is held back by the link, not by its own ceiling."""

_FIRST_ROWS = 4
_FRESH, _CONTENDED, _FLOOR, _COUNT = range(_FIRST_ROWS)


def rows_of(slots: int) -> int:
    return _FIRST_ROWS + 4 * slots


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A process's slot with waiting pieces: `rank` of the best, 0 goes first. `is_at_link`: no own ceiling holds it."""

    slot: int
    rank: int
    is_at_link: bool


class FairShares:
    """One direction, as one process sees it. Slots are numbers from 0 on, `guarantees` are buckets of some of them.

    Without a `link` none waits for it, and the other processes learn only ranks. Weights, guarantees and link may be
    replaced at any time; the number of weights stays.
    """

    def __init__(
        self,
        cells: SharedCells,
        first_row: int,
        weights: Sequence[int],
        guarantees: dict[int, TokenBucket],
        link: TokenBucket | None,
    ) -> None:
        slots, row = len(weights), first_row + _FIRST_ROWS
        self.link = link
        self.weights = weights
        self.guarantees = guarantees
        self._cells = cells
        self._own = cells.own
        self._fresh = cells.numbers(first_row + _FRESH)
        self._contended = cells.numbers(first_row + _CONTENDED)
        self._floors = cells.numbers(first_row + _FLOOR)
        self._counts = cells.whole_numbers(first_row + _COUNT)
        self._lists = [cells.column(row, slots, process) for process in range(cells.processes)]
        self._virtuals = [cells.column_of_numbers(row + slots, slots, process) for process in range(cells.processes)]
        self._first_passed, self._first_anchor = row + 2 * slots, row + 3 * slots
        self._told: dict[int, int] = {}
        """The place of each slot's entry in this process's list."""

        self._rows: dict[int, tuple[memoryview[float], memoryview[float]]] = {}
        self._virtual: dict[int, float] = {}
        """Virtual times of slots that wait for the link, by the last look and what this process has passed since."""

        self._best_elsewhere: dict[int, int] = {}
        self._needy: set[int] = set()
        self._weight_waiting = 0
        self._floor = 0.0
        self._next_look_at = -math.inf
        self.interval_seconds = LOOK_SECONDS

    # What this process says

    def tell(self, entry: QueueEntry, now: float) -> None:
        """Tell the other processes that pieces of a slot wait: they look at that before they pass something."""
        if entry.is_at_link:
            self._look(now)
        self._write(entry, now)
        self._counts[self._own] = len(self._told)
        self._fresh[self._own] = now + HOLD_SECONDS
        if entry.is_at_link:
            self._contended[self._own] = now + HOLD_SECONDS

    def tell_all(self, entries: Iterable[QueueEntry], now: float) -> None:
        """Tell the other processes that exactly these still wait."""
        is_contended = False
        self._told.clear()
        for entry in entries:
            self._write(entry, now)
            is_contended = is_contended or entry.is_at_link
        self._counts[self._own] = len(self._told)
        self._fresh[self._own] = now + HOLD_SECONDS if self._told else 0.0
        self._contended[self._own] = now + HOLD_SECONDS if is_contended else 0.0

    def _write(self, entry: QueueEntry, now: float) -> None:
        code = entry.slot << _SLOT_SHIFT | entry.rank
        place = self._told.setdefault(entry.slot, len(self._told))
        if entry.is_at_link:
            self._virtuals[self._own][place] = self._lifted(entry.slot)
            code |= _AT_LINK | (_NEEDY if self._is_needy(entry.slot, now) else 0)
        self._lists[self._own][place] = code

    # What may pass

    def is_contended(self, now: float) -> bool:
        """Return whether any slot waits for the link, or has just done so."""
        return max(self._contended) > now

    def passes(self, slot: int, rank: Callable[[], int], count: int, now: float) -> bool:
        """Let `count` bytes pass the link if it is their turn; otherwise take nothing, and return False."""
        link = self.link
        if link is None:
            return True
        level = link.level(now)
        if level < 0:
            return False
        if self.is_contended(now):
            if not self._is_turn(slot, rank(), level >= _FULL * link.burst, now):
                return False
            self._count(slot, count, now)
        link.take(count)
        return True

    def charge(self, slot: int, count: int, now: float) -> None:
        """Charge for `count` bytes that pass without waiting."""
        if self.link is not None:
            if self.is_contended(now):
                self._count(slot, count, now)
            self.link.take(count)

    def release(self, slot: int, count: int) -> None:
        """Give back `count` bytes that had their turn, but did not pass."""
        if self.link is not None:
            self.link.release(count)
            self._cells_of(slot)[0][self._own] -= count / self.weights[slot]

    def is_outranked(self, slot: int, rank: int, now: float) -> bool:
        """Return whether another process has a better waiting piece of the slot."""
        self._look(now)
        return self._best_elsewhere.get(slot, rank) < rank

    def next_of(self, slots: Sequence[int], now: float) -> Sequence[int]:
        """Return those of some waiting slots whose turn it may be, in their order."""
        link = self.link
        if link is None or not slots:
            return slots
        level = link.level(now)
        if level < 0:
            return []
        self._look(now)
        limit = self._limit(is_full=level >= _FULL * link.burst)
        found = [(slot not in self._needy, self._virtual.get(slot, self._floor), slot) for slot in slots]
        return [slot for is_satisfied, virtual, slot in sorted(found) if not is_satisfied or virtual <= limit]

    def _is_turn(self, slot: int, rank: int, is_full: bool, now: float) -> bool:
        self._look(now)
        virtual = self._lifted(slot)
        if is_full:
            return self._is_needy(slot, now) or virtual <= self._limit(is_full=True)
        if self._best_elsewhere.get(slot, rank) < rank:
            return False
        if self._is_needy(slot, now):
            return True
        if len(self._needy) > (slot in self._needy):
            return False
        return virtual <= self._limit()

    def _is_needy(self, slot: int, now: float) -> bool:
        guarantee = self.guarantees.get(slot)
        return guarantee is not None and guarantee.level(now) >= 0

    def _limit(self, *, is_full: bool = False) -> float:
        """Return the greatest virtual time that may pass: above the lowest, as no process looks all the time."""
        slack_seconds = 2 * self.interval_seconds + (HOLD_SECONDS if is_full else 0.0)
        return min(self._virtual.values(), default=math.inf) + slack_seconds * self._speed()

    def _speed(self, slot: int | None = None) -> float:
        assert self.link is not None  # noqa: S101 - nobody asks otherwise
        more = self.weights[slot] if slot is not None and slot not in self._virtual else 0
        return self.link.rate / max(1, self._weight_waiting + more)

    def _count(self, slot: int, count: int, now: float) -> None:
        guarantee = self.guarantees.get(slot)
        if guarantee is not None:
            level = guarantee.level(now)
            if level > -guarantee.burst:  # what the slot has beyond its guarantee does not count against it for longer
                guarantee.take(count)
                level -= count
            if level < 0:
                self._needy.discard(slot)
        if self._virtual_of(slot) <= self._floor + DEBT_SECONDS * self._speed(slot):
            self._cells_of(slot)[0][self._own] += count / self.weights[slot]
            self._know(slot, self._virtual_of(slot))

    def _lifted(self, slot: int) -> float:
        """Return the slot's virtual time, which begins near the floor if it was idle."""
        virtual = self._virtual_of(slot)
        least = self._floor - CREDIT_SECONDS * self._speed(slot)
        if virtual < least:
            _, anchors = self._cells_of(slot)
            anchors[self._own] = max(anchors) + least - virtual
            virtual = least
            self._know(slot, virtual)
        return virtual

    def _know(self, slot: int, virtual: float) -> None:
        """Store the slot's new virtual time."""
        if slot in self._virtual:
            self._virtual[slot] = virtual
        place = self._told.get(slot)
        if place is not None:
            self._virtuals[self._own][place] = virtual

    def _virtual_of(self, slot: int) -> float:
        passed, anchors = self._cells_of(slot)
        return sum(passed) + max(anchors)

    def _cells_of(self, slot: int) -> tuple[memoryview[float], memoryview[float]]:
        found = self._rows.get(slot)
        if found is None:
            passed = self._cells.numbers(self._first_passed + slot)
            found = self._rows[slot] = passed, self._cells.numbers(self._first_anchor + slot)
        return found

    def _look(self, now: float) -> None:
        """Look at what all processes wait for, if the last look was some time ago."""
        if now < self._next_look_at:
            return
        others, entries = dict[int, float](), 0
        for process, until in enumerate(self._fresh):
            count = self._counts[process] if until > now and process != self._own else 0
            if count:
                codes, virtuals = self._lists[process][:count].tolist(), self._virtuals[process][:count].tolist()
                others.update(zip(codes, virtuals, strict=True))
                entries += count
        best, virtual, needy = dict[int, int](), dict[int, float](), set[int]()
        for code, at in others.items():
            slot, rank = code >> _SLOT_SHIFT, code & _RANK
            if rank < best.get(slot, _RANK + 1):
                best[slot] = rank
            if code & _AT_LINK:
                virtual[slot] = max(at, virtual.get(slot, at))
                if code & _NEEDY:
                    needy.add(slot)
        own = self._lists[self._own][: len(self._told)].tolist()
        for code in own:
            if code & _AT_LINK:
                slot = code >> _SLOT_SHIFT
                virtual[slot] = self._virtual_of(slot)
                if self._is_needy(slot, now):
                    needy.add(slot)
        self._best_elsewhere, self._virtual, self._needy = best, virtual, needy
        self._weight_waiting = sum(map(self.weights.__getitem__, virtual))
        self._floor = max(self._floors)
        lowest = min(virtual.values(), default=self._floor)
        if lowest > self._floor:
            self._floor = self._floors[self._own] = lowest
        looking = entries * _ENTRY_SECONDS + len(virtual) * _SLOT_SECONDS
        looking += len(own) * (_OWN_SLOT_SECONDS + len(self._fresh) * _CELL_SECONDS)
        self.interval_seconds = min(max(LOOK_SECONDS, looking / _LOOKING_MAX), _INTERVAL_SECONDS_MAX)
        self._next_look_at = now + self.interval_seconds
