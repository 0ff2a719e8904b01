"""Token buckets that all processes of a gateway share, in memory and without a lock.

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

_LAYOUT_VERSION = 1
_HEADER = struct.Struct("=QQQd")
"""Version, number of buckets, number of processes, and the time of `Clock.monotonic` from which on times count."""

_CELL_BYTES = 8


class TokenBucket:
    """A rate in bytes per second, as one process sees the bucket of all.

    Whoever finds no debt may pass with a piece of any size, and what the bucket lacks for it becomes debt. Whoever
    finds debt takes nevertheless, and passes when the debt that it found is paid. So pieces pass in the order in which
    they were taken, and in any span of t seconds at most `rate * (t + BURST_SECONDS)` and one piece per process pass.
    """

    def __init__(
        self, rate: float, started: float, taken: memoryview[int], anchors: memoryview[float], own: int
    ) -> None:
        self._rate = rate
        self._burst = rate * BURST_SECONDS
        self._started = started
        self._taken = taken
        self._anchors = anchors
        self._own = own

    def delay_seconds(self, now: float) -> float:
        """Until the next piece may pass; 0 is now."""
        level = self._level(now, 0)
        return 0.0 if level >= 0 else -level / self._rate

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
        flowed = self._rate * (now - self._started)
        taken = sum(self._taken) - held
        level = self._burst + flowed - taken + min(self._anchors)
        if level > self._burst:
            self._anchors[self._own] = taken - flowed
        return min(level, self._burst)


class SharedBuckets:
    """The memory of some buckets, as process number `own` of `processes` has it mapped.

    ValueError when it was laid out for another number of buckets or processes, or by another version.
    """

    def __init__(self, memory: mmap.mmap, buckets: int, processes: int, own: int) -> None:
        *laid_out, self._started = _HEADER.unpack_from(memory)
        if laid_out != [_LAYOUT_VERSION, buckets, processes] or not 0 <= own < processes:
            raise ValueError("the shared memory of bandwidth is of another version or configuration")
        self._memory = memory
        self._processes = processes
        self._own = own

    @classmethod
    def attach(cls, descriptor: int, buckets: int, processes: int, own: int) -> SharedBuckets:
        """Map what `make_shared_memory` made; OSError, ValueError."""
        return cls(mmap.mmap(descriptor, _size_bytes(buckets, processes)), buckets, processes, own)

    @classmethod
    def of_one_process(cls, buckets: int, now: float) -> SharedBuckets:
        """Buckets that nobody else uses."""
        memory = mmap.mmap(-1, _size_bytes(buckets, 1))
        _lay_out(memory, buckets, 1, now)
        return cls(memory, buckets, 1, 0)

    def bucket(self, number: int, rate: float) -> TokenBucket:
        """Bucket `number`, which lets `rate` bytes per second pass: the same in all processes."""
        row_bytes = self._processes * _CELL_BYTES
        begin = _HEADER.size + 2 * number * row_bytes
        view = memoryview(self._memory)
        taken = view[begin : begin + row_bytes].cast("q")
        anchors = view[begin + row_bytes : begin + 2 * row_bytes].cast("d")
        return TokenBucket(rate, self._started, taken, anchors, self._own)


def make_shared_memory(buckets: int, processes: int, now: float) -> int:
    """A descriptor of memory for full buckets, to be inherited by the processes that share them; OSError.

    It has no name, so that nothing clears it away, and cannot shrink, so that no process dies of touching it.
    """
    descriptor = os.memfd_create("forebay-bandwidth", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size_bytes = _size_bytes(buckets, processes)
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        with mmap.mmap(descriptor, size_bytes) as memory:
            _lay_out(memory, buckets, processes, now)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _size_bytes(buckets: int, processes: int) -> int:
    return _HEADER.size + 2 * buckets * processes * _CELL_BYTES


def _lay_out(memory: mmap.mmap, buckets: int, processes: int, now: float) -> None:
    """All else is zero: nothing was taken, and every bucket was full at `now`."""
    _HEADER.pack_into(memory, 0, _LAYOUT_VERSION, buckets, processes, now)
