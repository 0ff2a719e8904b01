"""What bodies that are arriving now will take, over all workers: in shared memory, as nothing of it is worth keeping.

    for each slot that writes back, in the order of the configuration: 8 bytes for each worker slot

A worker writes its own numbers only, so no lock is needed: it adds what it wants first and looks at the sum then, so
that of two that want the last room at once at least one sees both. A worker that is killed leaves its numbers to its
successor, which clears them. The file is made anew when nobody has it open (opening.py): so its order of slots is
everybody's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

WORKER_SLOTS = 257
"""S3 workers have 0 to 255, the background process 256."""

_CELL_BYTES = 8
_FILE_MODE = 0o600


class Reservations:
    """The numbers as one worker slot sees and changes them. OSError when the disk does not take the file."""

    def __init__(self, path: Path, worker: int, slots: Sequence[str]) -> None:
        self._rows = {slot: row * WORKER_SLOTS for row, slot in enumerate(slots)}
        self._worker = worker
        size_bytes = max(1, len(slots)) * WORKER_SLOTS * _CELL_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)  # a page that could not be backed would kill the process
            self._map = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
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
