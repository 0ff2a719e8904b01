"""Memory that all processes of a gateway share without a lock, laid out once at its start: rows with a cell for each.

A cell is one aligned word with one writer, which the processors that Forebay runs on write and read as a whole. So no
process can break another's view or hold one up, wherever it is stopped or killed.

What slots, credentials and classes of callers keep here lies by number. A name keeps its number while settings change;
so a change moves nothing, and never replaces the memory.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, fcntl
from typing import Self

from gateway.core.errors import StartupError

_LAYOUT_VERSION = 3
_HEADER = struct.Struct("=QQQd")
"""Version, number of rows, number of processes, and the `Clock.monotonic` time from which times count."""

_CELL_BYTES = 8
_NAME = "forebay-shared"

NAMES_MORE = 64
"""Names for which a running gateway has room, beyond twice those of its start."""


def names_max(count: int, more: int = NAMES_MORE) -> int:
    """Return the limit of slots, say, for a running gateway that was started with `count`."""
    return 2 * count + more


@dataclass(frozen=True, slots=True)
class Numbering:
    """The numbers of all names of one kind, from 1 to `most`. 0 stands for names without a number."""

    most: int
    of: Mapping[str, int] = field(default_factory=dict)
    """Also of names that are gone, the longest gone first, while no other name needs their number."""

    @classmethod
    def begin(cls, names: Collection[str], more: int = NAMES_MORE) -> Self:
        return cls(names_max(len(names), more)).changed(names)

    def changed(self, names: Collection[str]) -> Self:
        """Return the numbers of these names, which keep theirs. ValueError: there are more than `most`."""
        if len(names) > self.most:
            raise ValueError(f"more than {self.most} names")
        gone = [name for name in self.of if name not in names]
        found = {name: self.of[name] for name in names if name in self.of}
        unused = iter(sorted(set(range(1, self.most + 1)) - set(self.of.values())))
        for name in names:
            if name not in found:
                number = next(unused, 0)
                found[name] = number or self.of[gone.pop(0)]
        return type(self)(self.most, {**{name: self.of[name] for name in gone}, **found})


class SharedCells:
    """Rows of cells, one for each process, as process number `own` of `processes` has them mapped.

    ValueError when they were laid out for another number of rows or processes, or by another version.
    """

    def __init__(self, memory: mmap.mmap, rows: int, processes: int, own: int) -> None:
        *laid_out, started = _HEADER.unpack_from(memory)
        if laid_out != [_LAYOUT_VERSION, rows, processes] or not 0 <= own < processes:
            raise ValueError("the shared memory of this gateway is of another version or configuration")
        self.started: float = started
        self.processes = processes
        self.own = own
        cells = memoryview(memory)[_HEADER.size : _size_bytes(rows, processes)]
        self._whole_numbers = cells.cast("q")
        self._numbers = cells.cast("d")
        self._generations = self.whole_numbers(rows)

    @classmethod
    def attach(cls, descriptor: int, rows: int, processes: int, own: int) -> SharedCells:
        """Map the memory of `make_shared_memory`; OSError, ValueError."""
        return cls(mmap.mmap(descriptor, _size_bytes(rows, processes)), rows, processes, own)

    @classmethod
    def of_one_process(cls, rows: int, now: float) -> SharedCells:
        memory = mmap.mmap(-1, _size_bytes(rows, 1))
        _lay_out(memory, rows, 1, now)
        return cls(memory, rows, 1, 0)

    def part(self, row: int, rows: int) -> SharedCells:
        """Return the view of some rows, which counts them from 0."""
        found = object.__new__(SharedCells)
        found.started, found.processes, found.own = self.started, self.processes, self.own
        found._generations = self._generations
        begin, end = (number * self.processes for number in (row, row + rows))
        found._whole_numbers, found._numbers = self._whole_numbers[begin:end], self._numbers[begin:end]
        return found

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

    # The generation of the settings in force

    def is_latest(self, generation: int) -> bool:
        """Return whether no process has newer settings: only those decide what all keep to."""
        return max(self._generations) <= generation

    def follow(self, generation: int) -> None:
        """Note that this process keeps to the settings of a generation, and what they decide is here."""
        self._generations[self.own] = generation


def make_shared_memory(rows: int, processes: int, now: float) -> int:
    """Return a descriptor of memory for cells, for the processes that share them to open; OSError.

    It has no name, so that nothing removes it, and is there as a whole, so that no process dies of touching it.
    """
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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


def path_of(descriptor: int) -> str:
    """Return a path by which processes open a descriptor of this one. StartupError where none could."""
    try:
        process = os.readlink("/proc/self")  # of another namespace than `getpid`, perhaps: pid_namespaces(7)
    except OSError as error:
        raise StartupError("/proc is not mounted here: all processes find the memory that they share there") from error
    return f"/proc/{process}/fd/{descriptor}"


def _size_bytes(rows: int, processes: int) -> int:
    return _HEADER.size + (rows + 1) * processes * _CELL_BYTES


def _lay_out(memory: mmap.mmap, rows: int, processes: int, now: float) -> None:
    """Write the header. Zeros elsewhere mean: nothing taken, nothing waiting, settings as at the start."""
    _HEADER.pack_into(memory, 0, _LAYOUT_VERSION, rows, processes, now)
