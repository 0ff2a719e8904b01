"""Token buckets that all processes of a gateway share, and the cells in memory that they share without a lock.

What a bucket holds follows from cells that have one writer each, and from the time. So no process can break another's
view or hold one up, wherever it is stopped or killed (docs/decisions/0007-origin-meter.md has the proof):

    taken[p]    the bytes that process p has taken in all
    anchor[p]   bytes that say when p last saw the bucket full: `taken in all then - rate * the time then`
    level       burst + rate * time - sum(taken) + min(anchors), at most the burst

A cell is one aligned word, which the processors that Forebay runs on write and read as a whole.
"""

from __future__ import annotations

import mmap
import os
import struct
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, fcntl

BURST_SECONDS = 0.1
"""What an idle bucket saves up: this much of its rate. It also makes good for timers that ring late."""

_LAYOUT_VERSION = 2
_HEADER = struct.Struct("=QQQd")
"""Version, number of rows, number of processes, and the time of `Clock.monotonic` from which on times count."""

_CELL_BYTES = 8

ROWS_OF_BUCKET = 2
"""What was taken, and the anchors."""


class TokenBucket:
    """A rate in bytes per second, as one process sees the bucket of all.

    Whoever finds no debt may pass with a piece of any size, and what the bucket lacks for it becomes debt. Whoever
    finds debt takes nevertheless, and passes when the debt that it found is paid. So pieces pass in the order in which
    they were taken, and in any span of t seconds at most `rate * (t + BURST_SECONDS)` and one piece per process pass.
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
        """Until the next piece may pass; 0 is now."""
        level = self._level(now, 0)
        return 0.0 if level >= 0 else -level / self.rate

    def level(self, now: float) -> float:
        """The bytes that it holds, a burst at most; less than nothing is debt."""
        return self._level(now, 0)

    def take(self, count: int) -> None:
        """`count` bytes pass, now or when the debt is paid: they are on the account."""
        self._taken[self._own] += count

    def give_back(self, count: int) -> None:
        """`count` bytes that were taken did not pass."""
        self._taken[self._own] -= count

    def passed(self, count: int, now: float) -> None:
        """`count` bytes that were taken before pass only now: what was saved up meanwhile is no more than a burst."""
        self._level(now, count)

    def _level(self, now: float, held: int) -> float:
        """What the bucket held, had `held` bytes not been taken yet. Where it was full, that is noted down."""
        # The order matters: the time first. What is read after it makes the level less than it was then, not more.
        flowed = self.rate * (now - self._started)
        taken = sum(self._taken) - held
        level = self.burst + flowed - taken + min(self._anchors)
        if level > self.burst:
            self._anchors[self._own] = taken - flowed
        return min(level, self.burst)


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
        """Map what `make_shared_memory` made; OSError, ValueError."""
        return cls(mmap.mmap(descriptor, _size_bytes(rows, processes)), rows, processes, own)

    @classmethod
    def of_one_process(cls, rows: int, now: float) -> SharedCells:
        """Cells that nobody else uses."""
        memory = mmap.mmap(-1, _size_bytes(rows, 1))
        _lay_out(memory, rows, 1, now)
        return cls(memory, rows, 1, 0)

    def bucket(self, row: int, rate: float) -> TokenBucket:
        """The bucket in a row and the next one, which lets `rate` bytes per second pass: the same in all processes."""
        return TokenBucket(rate, self._started, self.whole_numbers(row), self.numbers(row + 1), self.own)

    def whole_numbers(self, row: int) -> memoryview[int]:
        """A row of whole numbers, a cell for each process."""
        return self._whole_numbers[row * self.processes : (row + 1) * self.processes]

    def numbers(self, row: int) -> memoryview[float]:
        """The same of fractions."""
        return self._numbers[row * self.processes : (row + 1) * self.processes]

    def column(self, row: int, rows: int, process: int) -> memoryview[int]:
        """The whole numbers of one process in some rows."""
        return self._whole_numbers[row * self.processes + process : (row + rows) * self.processes : self.processes]

    def column_of_numbers(self, row: int, rows: int, process: int) -> memoryview[float]:
        """The same of fractions."""
        return self._numbers[row * self.processes + process : (row + rows) * self.processes : self.processes]


def make_shared_memory(rows: int, processes: int, now: float) -> int:
    """A descriptor of memory for cells, to be inherited by the processes that share them; OSError.

    It has no name, so that nothing clears it away, and cannot shrink, so that no process dies of touching it.
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
    """All else is zero: nothing was taken, every bucket was full at `now`, and nobody waits."""
    _HEADER.pack_into(memory, 0, _LAYOUT_VERSION, rows, processes, now)
