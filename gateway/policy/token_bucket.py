"""Token buckets that all processes of a gateway share, at rates that change while they are used.

A bucket's level follows from cells that have one writer each (shared/arena.py), and from the time
(docs/decisions/0007-origin-meter.md has the proof):

    taken[p]    all bytes that process p has taken
    anchor[p]   tells when p last saw the bucket full: `all bytes taken by then - the flow until then`
    level       burst + flow - sum(taken) + min(anchors), at most the burst

The flow is what has flowed in at each rate. Each change of the rate is a record: the new rate, its time, and the flow
until then. Each process writes records in cells of its own, two in turn, so that a reader never finds one half written;
the latest of all processes counts.
"""

from __future__ import annotations

from gateway.shared.arena import SharedCells

BURST_SECONDS = 0.1
"""An idle bucket saves up this much of its rate. It also makes up for late timers."""

_RECORD_ROWS = 3
_EARLIEST = 1e-300
"""No change is earlier: 0 stands for a bucket that no process has made yet."""

ROWS_OF_BUCKET = 4 + 2 * _RECORD_ROWS
"""For each process: bytes taken, anchor, the time of its latest change, the number of that record, and the records."""


class TokenBucket:
    """A rate in bytes per second, as one process sees the bucket of all. Any process may change it at any time.

    Without debt a piece of any size may pass, and what the bucket lacks for it becomes debt. With debt, a piece is
    taken too, and passes when the debt before it is paid. So pieces pass in the order in which they were taken, and in
    any span of t seconds at most `rate * (t + BURST_SECONDS)` and one piece per process pass. A lower rate makes a
    smaller burst, too: a process that has just used up the old burst waits for it at the new rate.
    """

    def __init__(self, cells: SharedCells, row: int, rate: float) -> None:
        """Give it `rate` from the start of the gateway on, unless it has a rate already."""
        self._own = cells.own
        self._taken = cells.whole_numbers(row)
        self._anchors = cells.numbers(row + 1)
        self._changed_at = cells.numbers(row + 2)
        self._which = cells.whole_numbers(row + 3)
        self._records = [cells.numbers(row + 4 + number) for number in range(2 * _RECORD_ROWS)]
        self._known: tuple[float, float, float, float] = 0.0, rate, cells.started, 0.0
        """The last change: its time, the rate, since when it counts, and the flow until then."""

        self._changes = b""
        """The times of the changes of all processes, as far as the last one is known."""

        self.rate, self.burst = rate, rate * BURST_SECONDS
        if not max(self._changed_at):
            self._write(rate, cells.started, 0.0)
        self._learn(self._changed_at.tobytes())

    def delay_seconds(self, now: float) -> float:
        """Return the seconds until the next piece may pass; 0 is now."""
        level = self._level(now, 0)
        return 0.0 if level >= 0 else -level / self.rate

    def level(self, now: float) -> float:
        """Return the bytes that it holds, a burst at most; below zero is debt."""
        return self._level(now, 0)

    def take(self, count: int) -> None:
        """Charge `count` bytes, which pass now or when the debt is paid."""
        self._taken[self._own] += count

    def release(self, count: int) -> None:
        """Give back `count` bytes that were taken and did not pass."""
        self._taken[self._own] -= count

    def passed(self, count: int, now: float) -> None:
        """Note that `count` bytes taken before pass only now: no more than a burst was saved up meanwhile."""
        self._level(now, count)

    def taken_bytes(self) -> int:
        return sum(self._taken)

    def change_rate(self, rate: float, now: float) -> None:
        """Set the rate in bytes per second from now on. The latest change of all processes counts."""
        flowed = self._flowed(now)
        if now > self._known[0]:  # otherwise another process has just changed it
            self._write(rate, now, flowed)

    def set_rate(self, rate: float, now: float) -> None:
        """Change the rate unless it is that already."""
        self._flowed(now)  # learns it
        if self.rate != rate:
            self.change_rate(rate, now)

    def _write(self, rate: float, now: float, flowed: float) -> None:
        own, record = self._own, 1 - self._which[self._own]
        for row, value in zip(self._record(record), (rate, now, flowed), strict=True):
            row[own] = value
        self._which[own] = record
        self._changed_at[own] = max(now, _EARLIEST)

    def _level(self, now: float, held: int) -> float:
        """Return the level without `held` bytes of those taken. If the bucket was full, note that."""
        # Order matters: the time first. Bytes taken after it make the level too low, never too high.
        flowed = self._flowed(now)
        taken = sum(self._taken) - held
        level = self.burst + flowed - taken + min(self._anchors)
        if level > self.burst:
            self._anchors[self._own] = taken - flowed
        return min(level, self.burst)

    def _flowed(self, now: float) -> float:
        changes = self._changed_at.tobytes()
        if changes != self._changes:
            self._learn(changes)
        _, rate, since, before = self._known
        return before + rate * max(0.0, now - since)

    def _learn(self, changes: bytes) -> None:
        """Read the record that a process has just announced. The next look finds what it writes meanwhile."""
        changed_at = max(self._changed_at)
        process = list(self._changed_at).index(changed_at) if changed_at in self._changed_at else self._own
        rate, since, before = (row[process] for row in self._record(self._which[process]))
        if max(since, _EARLIEST) == changed_at:
            self._changes, self._known = changes, (changed_at, rate, since, before)
            self.rate, self.burst = rate, rate * BURST_SECONDS

    def _record(self, number: int) -> list[memoryview[float]]:
        return self._records[number * _RECORD_ROWS : (number + 1) * _RECORD_ROWS]
