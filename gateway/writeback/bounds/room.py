"""What the disk under the buffer has room for, and what of that is spoken for by bodies that are arriving.

What bodies that are arriving now will take lies in shared memory, as nothing of it is worth keeping (`Reservations`):

    for each slot that writes back: its name in 64 bytes, and 8 bytes for each worker slot

A worker writes its own numbers only, so no lock is needed: it adds what it wants first and looks at the sum then, so
that of two that want the last room at once at least one sees both. A worker that is killed leaves its numbers to its
successor, which clears them. Slots may come and go: who looks for rows holds a lock on the file. It is made anew when
nobody has it open (opening.py).
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.disk.atomic_write import map_shared, set_aside
from gateway.writeback.files.trailer import checksums_bytes

DISK_LOOK_SECONDS = 0.05

MARGIN_BYTES = 8 * 1024 * 1024
"""Left free by bodies, for the journal: what takes things out of the buffer must be written down, too."""


def on_disk(size_bytes: int) -> int:
    """What bodies of so many bytes take, with their checksums; but for the rest of each file's last page, and its
    footer, which the margin has for some hundreds that arrive at once, and still room for the journal.
    """
    return size_bytes + checksums_bytes(size_bytes)


class DiskRoom:
    """Of one directory. Event loop only: a look takes microseconds on a local disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._free_bytes = 0
        self._looked_at = float("-inf")

    def takes(self, size_bytes: int, now: float) -> bool:
        """Whether so much fits beside the margin; `now` is of the monotonic clock. OSError as the disk says it."""
        if not self._looked_at <= now < self._looked_at + DISK_LOOK_SECONDS:
            self._free_bytes, self._looked_at = _free_bytes(self._path), now
        return self._free_bytes - MARGIN_BYTES >= size_bytes


class ReserveFile:
    """Room set aside beside the journal, given up when the disk is full: what leaves the buffer must be noted, too.

    Otherwise a disk that somebody else has filled would keep the flush from telling the journal what the origin has,
    and so from giving any room back. The log grows to a few megabytes and is then written over from its start: so much
    is enough for any number of changes. Of one buffer, in the process that flushes. Blocks.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ballast"

    def keep(self) -> None:
        """Set the room aside, where it is not and there is some; else later."""
        with suppress(OSError):
            is_there = self._path.exists() and self._path.stat().st_size == MARGIN_BYTES
            if not is_there and _free_bytes(self._path.parent) >= 2 * MARGIN_BYTES:
                set_aside(self._path, MARGIN_BYTES)

    def give_up(self) -> bool:
        try:
            os.unlink(self._path)
        except OSError:
            return False
        return True


def _free_bytes(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


WORKER_SLOTS = 257
"""S3 workers have 0 to 255, the background process 256."""

_CELL_BYTES = 8


_NAME_BYTES = 64
_ROW_BYTES = _NAME_BYTES + WORKER_SLOTS * _CELL_BYTES


class Reservations:
    """The numbers as one worker slot sees and changes them. OSError when the disk does not take the file."""

    def __init__(self, path: Path, worker: int, slots: Sequence[str]) -> None:
        self._path = path
        self._worker = worker
        self._map = map_shared(path, _ROW_BYTES)
        self._rows: dict[str, memoryview[int]] = {}
        self._in_use: list[weakref.ref[memoryview[int]]] = []
        """Rows that others have, some in mappings of before."""

        self._is_closed = False
        self.follow(slots)
        for number in range(len(self._map) // _ROW_BYTES):
            self._row(number)[worker] = 0

    def follow(self, slots: Sequence[str]) -> None:
        """Have a row for each of these. Those of slots that are gone may be taken by others, once nothing arrives in
        them. Whoever has a row keeps it."""
        with _locked(self._path) as size_bytes:
            self._map = map_shared(self._path, max(size_bytes, _ROW_BYTES))
            count = len(self._map) // _ROW_BYTES
            names = [self._name(number) for number in range(count)]
            free = [n for n in range(count) if names[n] not in slots and not any(self._row(n))]
            for slot in slots:
                if slot not in names:
                    number = free.pop() if free else len(names)
                    if number == len(names):
                        names.append("")
                        self._map = map_shared(self._path, len(names) * _ROW_BYTES)
                    names[number] = slot
                    self._set_name(number, slot)
            self._rows = {slot: self._row(names.index(slot)) for slot in slots}

    def row(self, slot: str) -> memoryview[int]:
        """The numbers of a slot, to be added to; it stays that of those who have it."""
        row = self._rows[slot]
        self._in_use = [one for one in self._in_use if one() is not None]
        self._in_use.append(weakref.ref(row))
        return row

    def add(self, row: memoryview[int], count: int) -> None:
        """This worker's bodies will take so many bytes more, or, negative, less. Nothing once it is closed: what it
        leaves behind is cleared by whoever has its number next."""
        if not self._is_closed:
            row[self._worker] += count

    def total_of_all(self) -> int:
        return sum(sum(self._row(number)) for number in range(len(self._map) // _ROW_BYTES))

    def close(self) -> None:
        """Let go of the file. Nobody may look at a row any more."""
        self._is_closed = True
        for row in (*self._rows.values(), *(one() for one in self._in_use)):
            if row is not None:
                row.release()
        self._map.close()

    def _row(self, number: int) -> memoryview[int]:
        first = number * _ROW_BYTES + _NAME_BYTES
        return memoryview(self._map)[first : first + WORKER_SLOTS * _CELL_BYTES].cast("q")

    def _name(self, number: int) -> str:
        return self._map[number * _ROW_BYTES : number * _ROW_BYTES + _NAME_BYTES].rstrip(b"\0").decode()

    def _set_name(self, number: int, name: str) -> None:
        self._map[number * _ROW_BYTES : number * _ROW_BYTES + _NAME_BYTES] = name.encode().ljust(_NAME_BYTES, b"\0")


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The size of the file, while no other process looks for rows in it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
