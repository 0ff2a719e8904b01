"""Files and index changed together, in the order that survives a kill between any two steps.

    a fill    reserve (index) → partial file → rename → commit (index)
    a removal drop from the index, the file doomed → unlink → forget the doomed

So a file without a block is always named by `reserved` or `doomed`, and a block without a file never begins to exist
(somebody else may remove one: the reader then drops the block). All of this blocks and belongs on the index thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.blocks import layout
from gateway.blocks.index import BlockIndex, Step
from gateway.blocks.layout import Block, Extent
from gateway.blocks.open_file import OpenFile
from gateway.blocks.records import BlockRecord, Reservation
from gateway.blocks.store import BlockStore
from gateway.errors import StoreUnavailable


@dataclass(frozen=True, slots=True)
class FillFile:
    """The partial file of one fill, room for it reserved."""

    block: Block
    reservation: Reservation
    file: OpenFile
    data_offset: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """What had to go."""

    blocks: int
    size_bytes: int


class BlockDirectory:
    """The blocks of a cache directory, as one worker process changes them."""

    def __init__(self, store: BlockStore, index: BlockIndex, capacity_bytes: int) -> None:
        self.store = store
        self.index = index
        self._capacity_bytes = capacity_bytes

    def begin(self, block: Block) -> tuple[FillFile, Evicted]:
        """Make room for a block and create its file; StoreUnavailable when either cannot be."""
        file = layout.file_name(block.id, secrets.token_hex(8))
        reservation = Reservation(block.id, file, layout.file_bytes(block))
        evicted = self._reserve(reservation)
        try:
            partial = self.store.create_partial(file)
        except StoreUnavailable:
            self.index.release(file)
            raise
        return FillFile(block, reservation, partial, layout.data_offset(block)), evicted

    def finish(self, filled: FillFile, checksums: bytes) -> Extent | None:
        """Write the header, publish the file, enter the block.

        None when another process was first with the same block: its file is as good, and ours is gone.
        """
        block, file = filled.block, filled.reservation.file
        self.store.write(filled.file, layout.pack_header(block, checksums), 0)
        self.store.publish(file)
        extent = Extent(file, filled.data_offset, block.length, checksums)
        if self.index.commit(filled.reservation, layout.object_id(block.version.key), extent):
            return extent
        self._remove([file])
        return None

    def abandon(self, filled: FillFile) -> None:
        """Remove what a failed fill has written and give its room back."""
        self.store.unlink(filled.reservation.file)
        self.index.release(filled.reservation.file)

    def drop(self, block_id: bytes, file: str) -> bool:
        """Remove a block, if it still lies in `file`."""
        dropped = self.index.drop(block_id, file)
        if dropped:
            self._remove([file])
        return dropped

    def drop_object(self, object_id: bytes) -> None:
        """Remove every block of every version of an object."""
        done = False
        while not done:
            done = self._settle(self.index.drop_object(object_id))

    def shrink(self) -> Evicted:
        """Evict down to the capacity."""
        blocks = size_bytes = 0
        while True:
            step = self.index.shrink(self._capacity_bytes)
            blocks += len(step.doomed)
            size_bytes += _size_bytes(step.doomed)
            if self._settle(step) or not step.doomed:
                return Evicted(blocks, size_bytes)

    def recover(self, worker: int) -> None:
        """Clear up after a worker slot whose process is gone."""
        for file in self.index.leftovers(worker):
            self.store.unlink(file)
        self.store.clean_slot(worker)
        self.index.forget_slot(worker)

    def _reserve(self, reservation: Reservation) -> Evicted:
        blocks = size_bytes = 0
        while True:
            step = self.index.reserve(reservation, self._capacity_bytes)
            blocks += len(step.doomed)
            size_bytes += _size_bytes(step.doomed)
            if self._settle(step):
                return Evicted(blocks, size_bytes)
            if not step.doomed:
                raise StoreUnavailable(f"no room for {reservation.disk_bytes} bytes: all there is is being filled")

    def _settle(self, step: Step) -> bool:
        self._remove([record.extent.file for record in step.doomed])
        return step.done

    def _remove(self, files: Sequence[str]) -> None:
        if files:
            for file in files:
                self.store.unlink(file)
            self.index.forget_doomed(files)


def _size_bytes(records: Iterable[BlockRecord]) -> int:
    return sum(record.disk_bytes for record in records)
