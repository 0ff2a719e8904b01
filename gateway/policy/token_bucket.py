"""Token buckets that all processes of a gateway share, and the cells in memory that they share without a lock.

A bucket's level follows from cells that have one writer each, and from the time. So no process can break another's view
or hold one up, wherever it is stopped or killed (docs/decisions/0007-origin-meter.md has the proof):

    taken[p]    all bytes that process p has taken
    anchor[p]   tells when p last saw the bucket full: `all bytes taken by then - rate * the time then`
    level       burst + rate * time - sum(taken) + min(anchors), at most the burst

A cell is one aligned word, which the processors that Forebay runs on write and read as a whole.

The rate of an `AdjustableBucket` changes while it is used. `rate * time` is then the sum of the flows at each rate, and
each change is a record: the new rate, its time, and the flow until then. Each process writes records in cells of its
own, two in turn, so that a reader never finds one half written; the latest of all processes counts.
"""

from __future__ import annotations

import mmap
import os
import struct
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, fcntl

BURST_SECONDS = 0.1
"""An idle bucket saves up this much of its rate. It also makes up for late timers."""

_SWITCH_SECONDS_MAX, _SWITCH_BYTES_MAX = 2.0, 8 * 1024**2
"""The most that a process takes from a bucket after the next one was made, before it changes to that."""

_LAYOUT_VERSION = 2
_HEADER = struct.Struct("=QQQd")
"""Version, number of rows, number of processes, and the `Clock.monotonic` time from which times count."""

_CELL_BYTES = 8

ROWS_OF_BUCKET = 2
"""Bytes taken, and anchors."""

_RECORD_ROWS = 3
ROWS_OF_ADJUSTABLE_BUCKET = ROWS_OF_BUCKET + 2 + 2 * _RECORD_ROWS
"""In addition, for each process: the time of its latest change, the number of that record, and the records."""


class TokenBucket:
    """A rate in bytes per second, as one process sees the bucket of all.

    Without debt a piece of any size may pass, and what the bucket lacks for it becomes debt. With debt, a piece is
    taken too, and passes when the debt before it is paid. So pieces pass in the order in which they were taken, and in
    any span of t seconds at most `rate * (t + BURST_SECONDS)` and one piece per process pass.
    """

    def __init__(
        self, rate: float, started: float, taken: memoryview[int], anchors: memoryview[float], own: int
    ) -> None:
        self.rate = rate
        self.burst = rate * BURST_SECONDS
        self._started = started
        self._taken = taken
        self._anchors = anchors
        self._own = own

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

    def begin_as(self, before: TokenBucket, now: float) -> None:
        """Start with the level of `before`. No process may use this bucket yet; both have the same processes."""
        flowed = self._flowed(now)  # first: it learns rate and burst
        level = min(before.level(now), self.burst)
        self._taken[:] = before._taken
        anchor = level - self.burst - flowed + sum(self._taken)
        for process in range(len(self._anchors)):
            self._anchors[process] = anchor

    def continue_from(self, before: TokenBucket) -> None:
        """Change to this bucket: count what this process took from `before` since this one was made.

        An implausible amount means that the two buckets are unrelated.
        """
        count = before._taken[self._own] - self._taken[self._own]
        if abs(count) <= before.rate * _SWITCH_SECONDS_MAX + _SWITCH_BYTES_MAX:
            self.take(count)

    def _flowed(self, now: float) -> float:
        return self.rate * (now - self._started)

    def _level(self, now: float, held: int) -> float:
        """Return the level without `held` bytes of those taken. If the bucket was full, note that."""
        # Order matters: the time first. Bytes taken after it make the level too low, never too high.
        flowed = self._flowed(now)
        taken = sum(self._taken) - held
        level = self.burst + flowed - taken + min(self._anchors)
        if level > self.burst:
            self._anchors[self._own] = taken - flowed
        return min(level, self.burst)


class AdjustableBucket(TokenBucket):
    """A bucket whose rate any process may change at any time; others keep to the new one from their next look.

    A lower rate makes a smaller burst, too: a process that has just used up the old burst waits for it at the new rate.
    """

    def __init__(
        self,
        rate: float,
        started: float,
        taken: memoryview[int],
        anchors: memoryview[float],
        changes: tuple[memoryview[float], memoryview[int], list[memoryview[float]]],
        own: int,
    ) -> None:
        """`rate` holds until the first change."""
        super().__init__(rate, started, taken, anchors, own)
        self._changed_at, self._which, self._records = changes
        self._known = 0.0, rate, started, 0.0
        """The last change: its time, the rate, since when it counts, and the flow until then."""

    def begin_as(self, before: TokenBucket, now: float) -> None:
        """Start with the level of any bucket, at the rate that `before` has by now."""
        before.level(now)
        self.change_rate(before.rate, now)
        self.level(now)  # learns that
        super().begin_as(before, now)

    def change_rate(self, rate: float, now: float) -> None:
        """Set the rate in bytes per second from now on. The latest change of all processes counts."""
        flowed = self._flowed(now)
        if now <= self._known[0]:  # another process has just changed it
            return
        own, record = self._own, 1 - self._which[self._own]
        for row, value in zip(self._record(record), (rate, now, flowed), strict=True):
            row[own] = value
        self._which[own] = record
        self._changed_at[own] = now

    def changed_at(self) -> float:
        """Return when the rate was last changed; 0: never."""
        return max(self._changed_at)

    def _flowed(self, now: float) -> float:
        changed_at = max(self._changed_at)
        if changed_at != self._known[0]:
            self._learn(changed_at)
        _, rate, since, before = self._known
        return before + rate * max(0.0, now - since)

    def _learn(self, changed_at: float) -> None:
        """Read the record that a process has just announced. The next look finds what it writes meanwhile."""
        process = list(self._changed_at).index(changed_at) if changed_at in self._changed_at else self._own
        rate, since, before = (row[process] for row in self._record(self._which[process]))
        if since == changed_at:
            self._known = changed_at, rate, since, before
            self.rate, self.burst = rate, rate * BURST_SECONDS

    def _record(self, number: int) -> list[memoryview[float]]:
        return self._records[number * _RECORD_ROWS : (number + 1) * _RECORD_ROWS]


class SharedCells:
    """Rows of cells, one for each process, as process number `own` of `processes` has them mapped.

    ValueError when they were laid out for another number of rows or processes, or by another version.
    """

    def __init__(self, memory: mmap.mmap, rows: int, processes: int, own: int) -> None:
        *laid_out, self._started = _HEADER.unpack_from(memory)
        if laid_out != [_LAYOUT_VERSION, rows, processes] or not 0 <= own < processes:
            raise ValueError("the shared memory of bandwidth is of another version or configuration")
        self.processes = processes
        self.own = own
        cells = memoryview(memory)[_HEADER.size : _size_bytes(rows, processes)]
        self._whole_numbers = cells.cast("q")
        self._numbers = cells.cast("d")

    @classmethod
    def attach(cls, descriptor: int, rows: int, processes: int, own: int) -> SharedCells:
        """Map the memory of `make_shared_memory`; OSError, ValueError."""
        return cls(mmap.mmap(descriptor, _size_bytes(rows, processes)), rows, processes, own)

    @classmethod
    def of_one_process(cls, rows: int, now: float) -> SharedCells:
        memory = mmap.mmap(-1, _size_bytes(rows, 1))
        _lay_out(memory, rows, 1, now)
        return cls(memory, rows, 1, 0)

    def bucket(self, row: int, rate: float) -> TokenBucket:
        """Return the bucket in a row and the next one, with `rate` bytes per second: the same in all processes."""
        return TokenBucket(rate, self._started, self.whole_numbers(row), self.numbers(row + 1), self.own)

    def adjustable_bucket(self, row: int, rate: float) -> AdjustableBucket:
        """Return the bucket in a row and those after it, `ROWS_OF_ADJUSTABLE_BUCKET` in all; `rate` until a change."""
        first = row + ROWS_OF_BUCKET
        records = [self.numbers(first + 2 + number) for number in range(2 * _RECORD_ROWS)]
        changes = self.numbers(first), self.whole_numbers(first + 1), records
        return AdjustableBucket(rate, self._started, self.whole_numbers(row), self.numbers(row + 1), changes, self.own)

    def whole_numbers(self, row: int) -> memoryview[int]:
        """Return a row of whole numbers, a cell for each process."""
        return self._whole_numbers[row * self.processes : (row + 1) * self.processes]

    def numbers(self, row: int) -> memoryview[float]:
        return self._numbers[row * self.processes : (row + 1) * self.processes]

    def column(self, row: int, rows: int, process: int) -> memoryview[int]:
        """Return the whole numbers of one process in some rows."""
        return self._whole_numbers[row * self.processes + process : (row + rows) * self.processes : self.processes]

    def column_of_numbers(self, row: int, rows: int, process: int) -> memoryview[float]:
        return self._numbers[row * self.processes + process : (row + rows) * self.processes : self.processes]


def make_shared_memory(rows: int, processes: int, now: float) -> int:
    """Return a descriptor of memory for cells, for the processes that share them to inherit; OSError.

    It has no name, so that nothing removes it, and cannot shrink, so that no process dies of touching it.
    """
    descriptor = os.memfd_create("forebay-bandwidth", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size_bytes = _size_bytes(rows, processes)
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        with mmap.mmap(descriptor, size_bytes) as memory:
            _lay_out(memory, rows, processes, now)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _size_bytes(rows: int, processes: int) -> int:
    return _HEADER.size + rows * processes * _CELL_BYTES


def _lay_out(memory: mmap.mmap, rows: int, processes: int, now: float) -> None:
    """Write the header. Zeros elsewhere mean: nothing taken, every bucket full at `now`, nothing waiting."""
    _HEADER.pack_into(memory, 0, _LAYOUT_VERSION, rows, processes, now)
