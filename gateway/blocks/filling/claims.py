"""Who fetches a small block: a table of claims in memory that all processes share.

A fill of its own row and file in the index, as large blocks have, would cost more than fetching 100 KB. So a process
claims a cell, which the object and the place in it choose, and whoever finds it claimed waits at the claimant's bell
until it is free, then looks into the index. The claimant rings only where somebody has said that he waits.

    cell   u64: 0, or 1 bit somebody waits, 15 bits worker slot + 1, 48 bits tag of the fill key
    count  u64, one for each worker slot behind the cells: how many claims it has, written by its process alone

The process that made a claim holds a lock on its bell, `slots/w<n>.bell`: the kernel takes it back from a killed one,
and closes the file, which wakes those who watch it. Claims are a courtesy: where two blocks want one cell, the second
is fetched without, and might be fetched twice. A cell is changed under a lock on its eight bytes, held for the moment:
this may run on the event loop.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.blocks import layout
from gateway.blocks.files.store import FILE_MODE
from gateway.blocks.filling.audience import audience
from gateway.blocks.layout import Block
from gateway.errors import StoreUnavailable

CELLS = 65_536
_CELL_BYTES = 8
WORKERS_MAX = 512
FILE_BYTES = (CELLS + WORKERS_MAX) * _CELL_BYTES
_TAG_BITS = 48
_TAG = (1 << _TAG_BITS) - 1
_AWAITED = 1 << 63
_SPREAD = 40_503
"""65,536 over the golden ratio: neighbouring parts of an object have cells far from each other."""


@dataclass(frozen=True, slots=True)
class Place:
    """A cell, and what tells a fill from others there."""

    cell: int
    tag: int

    def held_by(self, worker: int) -> int:
        """What the cell holds while a worker has it for this key and nobody waits."""
        return (worker + 1) << _TAG_BITS | self.tag


def place_of_fill(block: Block, headers: Mapping[str, str], cell: int | None = None) -> Place:
    """Where it is claimed that a block is fetched for all whose requests have these headers. `cell`: if it is known."""
    readers = audience(headers)
    if cell is None:
        cell = _cell(layout.object_id(block.version.key), block.offset, readers)
    return Place(cell, (_number(block.id) ^ _number(readers)) & _TAG)


def place_of_look(object_id: bytes, offset: int, headers: Mapping[str, str]) -> Place:
    """Where it is claimed that somebody finds out of which block an object's bytes from `offset` on are.

    In the cell in which the fill of that block is to be claimed, whichever it is.
    """
    readers = audience(headers)
    tag = _number(object_id[8:]) ^ offset ^ _number(readers)
    return Place(_cell(object_id, offset, readers), tag & _TAG)


def _cell(object_id: bytes, offset: int, readers: bytes) -> int:
    return (_number(object_id) + offset // layout.CHUNK_BYTES * _SPREAD + _number(readers[8:])) % CELLS


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


class Claims:
    """The table and the bells, as one worker process uses them. Opening and closing blocks."""

    def __init__(self, directory: Path, worker: int) -> None:
        self.worker = worker
        self._slots = directory / "slots"
        self._table = _open_table(directory / "claims")
        self._map = mmap.mmap(self._table, FILE_BYTES)
        self._cells = memoryview(self._map).cast("Q")
        self._bells: dict[int, int] = {}
        fcntl.flock(self.bell(worker), fcntl.LOCK_EX)

    def close(self) -> None:
        """Idempotent."""
        self._cells.release()
        self._map.close()
        table, self._table = self._table, -1
        if table >= 0:
            os.close(table)
        while self._bells:
            os.close(self._bells.popitem()[1])

    def claim(self, place: Place, dead: int | None = None) -> int | None:
        """The worker that has the claim now: this one, or one to be waited for; None when another block has the cell.

        `dead` had the claim and was seen dead.
        """
        self._lock(place.cell)
        try:
            held = self._cells[place.cell] & ~_AWAITED
            holder = (held >> _TAG_BITS) - 1
            if held and held & _TAG != place.tag and holder != dead:
                return None
            if held and holder not in (self.worker, dead):
                return holder
            if holder != self.worker:
                self._cells[place.cell] = place.held_by(self.worker) | (self._cells[place.cell] & _AWAITED)
                self._cells[CELLS + self.worker] += 1
            return self.worker
        finally:
            self._unlock(place.cell)

    def holder(self, place: Place) -> int | None:
        """The worker that has a claim now, dead or alive; None: nobody."""
        held = self._cells[place.cell] & ~_AWAITED
        return (held >> _TAG_BITS) - 1 if held and held & _TAG == place.tag else None

    def await_release(self, place: Place, holder: int) -> bool:
        """Say that somebody waits for a claim; False when it is there no more."""
        self._lock(place.cell)
        try:
            held = self._cells[place.cell]
            if held & ~_AWAITED != place.held_by(holder):
                return False
            self._cells[place.cell] = held | _AWAITED
            return True
        finally:
            self._unlock(place.cell)

    def release(self, place: Place) -> None:
        """Give a claim back, and tell those who wait."""
        self._replace(place, 0)

    def exchange(self, place: Place, other: Place) -> None:
        """Give a claim back, and tell those who wait; have another one, of the same cell, instead."""
        self._replace(place, other.held_by(self.worker))

    def _replace(self, place: Place, content: int) -> None:
        self._lock(place.cell)
        try:
            held = self._cells[place.cell]
            if held & ~_AWAITED != place.held_by(self.worker):
                return
            self._cells[place.cell] = content
            if not content:
                self._cells[CELLS + self.worker] -= 1
        finally:
            self._unlock(place.cell)
        if held & _AWAITED:
            self._ring(self.worker)

    def forget(self, worker: int) -> None:
        """Give back every claim of a worker slot whose process is gone, or has just begun."""
        held_by = worker + 1
        self._cells[CELLS + worker] = 0
        claimed = [cell for cell, held in enumerate(self._cells[:CELLS].tolist()) if held]
        for cell in claimed:
            self._lock(cell)
            try:
                if (self._cells[cell] & ~_AWAITED) >> _TAG_BITS == held_by:
                    self._cells[cell] = 0
            finally:
                self._unlock(cell)
        self._ring(worker)

    def others_claim(self) -> bool:
        """Whether other processes fetch small blocks now."""
        return any(count for worker, count in enumerate(self._cells[CELLS:]) if worker != self.worker)

    def lives(self, worker: int) -> bool:
        """Whether a process has a worker slot's bell."""
        try:
            fcntl.flock(self.bell(worker), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.bell(worker), fcntl.LOCK_UN)
        return False

    def bell(self, worker: int) -> int:
        """The descriptor of a worker slot's bell, to be watched; it stays open until `close`.

        StoreUnavailable when it cannot be opened.
        """
        descriptor = self._bells.get(worker)
        if descriptor is None:
            # For writing only one's own: that it is closed shall mean that its process is gone.
            flags = (os.O_RDWR if worker == self.worker else os.O_RDONLY) | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                descriptor = self._bells[worker] = os.open(self._slots / f"w{worker}.bell", flags, FILE_MODE)
            except OSError as error:
                raise StoreUnavailable(f"a worker's bell cannot be opened: {error}") from error
        return descriptor

    def _ring(self, worker: int) -> None:
        # A file system gone read-only: those who wait look for themselves a little later.
        with suppress(OSError, StoreUnavailable):
            os.utime(self.bell(worker))

    def _lock(self, cell: int) -> None:
        fcntl.lockf(self._table, fcntl.LOCK_EX, _CELL_BYTES, cell * _CELL_BYTES)

    def _unlock(self, cell: int) -> None:
        fcntl.lockf(self._table, fcntl.LOCK_UN, _CELL_BYTES, cell * _CELL_BYTES)


def _open_table(path: Path) -> int:
    """The file, whole on disk: a page that could not be backed would kill the process that touches it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
