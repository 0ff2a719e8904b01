"""The disk's room under the buffer, and the part of it that arriving bodies have reserved.

Reservations lie in shared memory, as none is worth keeping (`Reservations`):

    for each slot that writes back: its name in 64 bytes, and 8 bytes for each worker slot

A worker writes only its own numbers, so it needs no lock: it adds its bytes first and looks at the sum then, so that of
two that want the last room at least one sees both. A killed worker leaves its numbers to its successor, which clears
them. Slots come and go: a worker that looks for rows locks the file. opening.py makes it anew when no process has it
open.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gateway.disk.atomic_write import map_shared, set_aside
from gateway.writeback.staged_file import checksums_bytes

DISK_LOOK_SECONDS = 0.05

MARGIN_BYTES = 8 * 1024 * 1024
"""Bytes of the disk kept free for the journal: what leaves the buffer must be written down, too."""


def on_disk(size_bytes: int) -> int:
    """Return the bytes that bodies take with their checksums.

    The rest of each file's last page, and its footer, fit into the margin for some hundreds that arrive at once, with
    room left for the journal.
    """
    return size_bytes + checksums_bytes(size_bytes)


class DiskRoom:
    """The room in one directory. Event loop only: a look takes microseconds on a local disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._free_bytes = 0
        self._looked_at = float("-inf")

    def takes(self, size_bytes: int, now: float) -> bool:
        """Return whether `size_bytes` fit beside the margin; `now` is monotonic. Raises the disk's OSError."""
        if not self._looked_at <= now < self._looked_at + DISK_LOOK_SECONDS:
            self._free_bytes, self._looked_at = _free_bytes(self._path), now
        return self._free_bytes - MARGIN_BYTES >= size_bytes


class ReserveFile:
    """Room beside the journal, given up when the disk is full: the journal must record what leaves the buffer.

    On a disk that others have filled, the flush could otherwise not record what the origin has, and so free no room.
    The log grows to a few megabytes and is then written over from its start, so this is always enough. For one buffer,
    in the process that flushes. Blocks.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ballast"

    def keep(self) -> None:
        """Set the room aside if it is missing and the disk has twice as much; else later."""
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

_NAME_BYTES = 64
_ROW_BYTES = _NAME_BYTES + WORKER_SLOTS * 8
_NAME_CELLS, _ROW_CELLS = _NAME_BYTES // 8, _ROW_BYTES // 8


class Reservations:
    """The reservations as one worker slot sees and changes them. OSError when the disk does not take the file."""

    def __init__(self, path: Path, worker: int, slots: Sequence[str]) -> None:
        self._path = path
        self._worker = worker
        self._map_file(_ROW_BYTES)
        self._rows: dict[str, int] = {}
        self.apply_settings(slots)
        for row in self._all_rows():
            self._numbers(row)[worker] = 0

    def apply_settings(self, slots: Sequence[str]) -> None:
        """Keep a row for each of these slots; holders keep theirs. Rows of other slots are reused once empty."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # no other process looks for rows meanwhile
            self._map_file(max(os.fstat(descriptor).st_size, _ROW_BYTES))
            names = [self._map[at : at + _NAME_BYTES].rstrip(b"\0").decode() for at in map(_start, self._all_rows())]
            free = [row for row in self._all_rows() if names[row] not in slots and not any(self._numbers(row))]
            for slot in slots:
                if slot not in names:
                    row = free.pop() if free else len(names)
                    if row == len(names):
                        names.append("")
                        self._map_file(len(names) * _ROW_BYTES)
                    names[row] = slot
                    self._map[_start(row) : _start(row) + _NAME_BYTES] = slot.encode().ljust(_NAME_BYTES, b"\0")
            self._rows = {slot: names.index(slot) for slot in slots}
        finally:
            os.close(descriptor)

    def row(self, slot: str) -> int:
        """Return the row of a slot, for `add` and `total`. It stays the slot's while it has reservations."""
        return self._rows[slot]

    def add(self, row: int, count: int) -> None:
        """Add bytes (may be negative) to this worker's reservations; not once closed: a successor clears them."""
        if not self._map.closed:
            self._cells[row * _ROW_CELLS + _NAME_CELLS + self._worker] += count

    def total(self, row: int) -> int:
        return sum(self._numbers(row))

    def total_of_all(self) -> int:
        return sum(map(self.total, self._all_rows()))

    def close(self) -> None:
        self._cells.release()
        self._map.close()

    def _map_file(self, size_bytes: int) -> None:
        self._map = map_shared(self._path, size_bytes)
        self._cells = memoryview(self._map).cast("q")

    def _all_rows(self) -> range:
        return range(len(self._map) // _ROW_BYTES)

    def _numbers(self, row: int) -> memoryview[int]:
        first = row * _ROW_CELLS + _NAME_CELLS
        return self._cells[first : first + WORKER_SLOTS]


def _start(row: int) -> int:
    return row * _ROW_BYTES
