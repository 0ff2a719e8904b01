"""Files and index changed together, in the order that survives a kill between any two steps.

    a fill    partial file, locked → reserve (index) → rename → commit (index) → unlock
    a removal drop from the index, the file doomed → unlink → forget the doomed

So a file without a block is named by `reserved` or `doomed`, or lies in the slot's own directory of partial files; and
a block without a file never begins to exist
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
from gateway.blocks.records import BlockRecord, FillHolder, Reservation
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

    def begin(
        self, block: Block, fill_key: bytes, succeeds: FillHolder | None = None
    ) -> tuple[FillFile, Evicted] | None:
        """Create a block's file, make room for it, and lead its fill; StoreUnavailable when this cannot be.

        None when the block is there by now, or another process leads the fill. `succeeds` is a leader seen dead.
        """
        file = layout.file_name(block.id, secrets.token_hex(8))
        reservation = Reservation(block.id, fill_key, file, layout.file_bytes(block))
        partial = self.store.create_partial(file)
        try:
            evicted = self._reserve(reservation, succeeds)
        except BaseException:
            self._undo(partial, file)
            self.index.release(reservation)
            raise
        if evicted is None:
            self._undo(partial, file)
            return None
        return FillFile(block, reservation, partial, layout.data_offset(block)), evicted

    def record_checksums(self, filled: FillFile, packed: bytearray, recorded_bytes: int) -> None:
        """Write what is new among the chunks' checksums: always before the bytes that complete these chunks.

        So the file's length tells other processes which chunks are complete, and their checksums are there to be
        compared.
        """
        new = memoryview(packed)[recorded_bytes:].tobytes()
        self.store.write(filled.file, new, layout.checksums_offset(filled.block) + recorded_bytes)

    def finish(self, filled: FillFile, checksums: bytes) -> Extent | None:
        """Write the header, publish the file, enter the block.

        None when another process was first with the same block: its file is as good, and ours is gone.
        """
        block, file = filled.block, filled.reservation.file
        self.store.write(filled.file, layout.pack_header(block, checksums), 0)
        self.store.publish(file)
        extent = Extent(file, filled.data_offset, block.length, checksums)
        committed = self.index.commit(filled.reservation, layout.object_id(block.version.key), extent)
        self.store.unlock(filled.file)
        if committed:
            return extent
        self._remove([file])
        return None

    def abandon(self, filled: FillFile) -> None:
        """Remove what a failed fill has written, give its room back, and let others try."""
        try:
            self.store.unlink(filled.reservation.file)
            self.index.release(filled.reservation)
        finally:
            self.store.unlock(filled.file)
            self.store.wake_watchers(filled.file)

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

    def _undo(self, partial: OpenFile, file: str) -> None:
        partial.release()
        self.store.unlink(file)

    def _reserve(self, reservation: Reservation, succeeds: FillHolder | None) -> Evicted | None:
        blocks = size_bytes = 0
        while True:
            step = self.index.reserve(reservation, self._capacity_bytes, succeeds)
            if step is None:
                return None
            if succeeds is not None:
                self._bury(succeeds)
                succeeds = None
            blocks += len(step.doomed)
            size_bytes += _size_bytes(step.doomed)
            if self._settle(step):
                return Evicted(blocks, size_bytes)
            if not step.doomed:
                raise StoreUnavailable(f"no room for {reservation.disk_bytes} bytes: all there is is being filled")

    def _bury(self, dead: FillHolder) -> None:
        """Remove the file of a dead leader, whose room is ours now."""
        self.store.unlink_of(dead.worker, dead.file)
        self.index.forget_doomed([dead.file])

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
