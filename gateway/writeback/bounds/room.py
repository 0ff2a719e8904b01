"""What the disk under the buffer has room for, and what of that is spoken for by bodies that are arriving.

What bodies that are arriving now will take lies in shared memory, as nothing of it is worth keeping (`Reservations`):

    for each slot that writes back, in the order of the configuration: 8 bytes for each worker slot

A worker writes its own numbers only, so no lock is needed: it adds what it wants first and looks at the sum then, so
that of two that want the last room at once at least one sees both. A worker that is killed leaves its numbers to its
successor, which clears them. The file is made anew when nobody has it open (opening.py): so its order of slots is
everybody's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gateway.durable import map_shared, set_aside
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
        """Whether there was any."""
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


class Reservations:
    """The numbers as one worker slot sees and changes them. OSError when the disk does not take the file."""

    def __init__(self, path: Path, worker: int, slots: Sequence[str]) -> None:
        self._rows = {slot: row * WORKER_SLOTS for row, slot in enumerate(slots)}
        self._worker = worker
        self._map = map_shared(path, max(1, len(slots)) * WORKER_SLOTS * _CELL_BYTES)
        self._cells = memoryview(self._map).cast("Q")
        for first in self._rows.values():
            self._cells[first + worker] = 0

    def add(self, slot: str, count: int) -> None:
        """This worker's bodies will take so many bytes more, or, negative, less."""
        self._cells[self._rows[slot] + self._worker] += count

    def total(self, slot: str) -> int:
        """What those of all workers will take."""
        first = self._rows[slot]
        return sum(self._cells[first : first + WORKER_SLOTS])

    def total_of_all(self) -> int:
        """The same, of all slots."""
        return sum(self._cells)

    def close(self) -> None:
        self._cells.release()
        self._map.close()
