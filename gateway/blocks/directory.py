"""Files and index changed together, in the order that survives a kill between any two steps.

    a fill       partial file, locked → reserve (index) → rename → commit (index) → unlock
    an adoption  reserve → link → commit
    an addition  reserve → append → extend (packing.py)
    a removal    drop from the index, the file doomed → unlink → forget the doomed

So a file without a block, or longer than it is counted, is named by `reserved` or `doomed`, or lies in the slot's own
directory of partial files; and a block without a file never begins to exist (somebody else may remove one: the reader
then drops the block). All of this blocks and belongs on the index thread.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.blocks import layout
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.store import BlockStore
from gateway.blocks.index.index import BlockIndex
from gateway.blocks.index.kept_free import KeptFree
from gateway.blocks.index.pins import Pins
from gateway.blocks.index.records import BlockRecord, Reservation
from gateway.blocks.index.room import Step
from gateway.blocks.index.shares import Capacity
from gateway.blocks.layout import Block, Extent
from gateway.blocks.observer import CacheObserver
from gateway.errors import NotKept, StoreUnavailable

_SECONDS_OF_A_DAY = 86_400


@dataclass(frozen=True, slots=True)
class FillFile:
    """The partial file of one fill, room for it reserved."""

    block: Block
    reservation: Reservation
    file: BlockLease
    data_offset: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """What had to go: blocks and bytes on disk, by slot."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    size_bytes: Mapping[str, int] = field(default_factory=dict)

    def tell(self, observer: CacheObserver) -> None:
        for slot, count in self.blocks.items():
            observer.evicted(slot, count, self.size_bytes[slot])


@dataclass(frozen=True, slots=True)
class Adoption:
    """A file that lies elsewhere, and the blocks in it (adoption.py)."""

    source: Path
    reservation: Reservation
    blocks: Sequence[BlockRecord]


class BlockDirectory:
    """The blocks of a cache directory, as one worker process changes them."""

    def __init__(
        self,
        store: BlockStore,
        index: BlockIndex,
        capacity: Capacity,
        pins: Pins,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.index = index
        self.capacity = capacity
        self.pins = pins
        self.on_unlink: Callable[[str], None] = _nobody
        """Told of each file that is gone, on the thread that removed it: as long as it is open, it keeps its room."""
        self.kept_free = KeptFree(store.free_bytes, lambda: index.usage().reserved_bytes)
        self._now = now

    def begin(self, block: Block, slot: str, *, wanted: bool = False) -> tuple[FillFile, Evicted] | None:
        """Create a block's file, and make room for it on a slot's account.

        None when the block is there by now. StoreUnavailable when there can be no file; NotKept when there is no room,
        or not for this.
        """
        file = layout.file_name(block.id, secrets.token_hex(8))
        pin = self.pins.of(block.version.key)
        reservation = Reservation(file, slot, layout.file_bytes(block), wanted=wanted, pin=pin)
        partial = self.store.create_partial(file)
        try:
            self.store.write(partial, layout.beginning(block), layout.MAGIC_BYTES)
            evicted = self._reserve(reservation, block.id)
        except BaseException:
            self._undo(partial, file)
            self.index.release(reservation)
            raise
        if evicted is None:
            self._undo(partial, file)
            return None
        return FillFile(block, reservation, partial, layout.data_offset(block)), evicted

    def record_checksums(self, file: BlockLease, block: Block, packed: bytearray, recorded_bytes: int) -> None:
        """Write what is new among the chunks' checksums: always before the bytes that complete these chunks.

        So the file's length tells other processes which chunks are complete, and their checksums are there to be
        compared.
        """
        new = memoryview(packed)[recorded_bytes:].tobytes()
        self.store.write(file, new, layout.checksums_offset(block) + recorded_bytes)

    def finish(self, filled: FillFile, opened: BlockLease, checksums: bytes) -> Extent | None:
        """Write the header of a fill's `opened` file, publish the file, enter the block.

        None when another process was first with the same block: its file is as good, and ours is gone.
        """
        block, file = filled.block, filled.reservation.file
        self.store.write(opened, layout.pack_header(block, checksums), 0)
        self.store.publish(file)
        extent = Extent(file, filled.data_offset, block.length, checksums)
        record = BlockRecord(block.id, layout.object_id(block.version.key), extent)
        committed = self.index.commit(filled.reservation, [record], self.capacity) > 0
        self.store.unlock(opened)
        if committed:
            return extent
        self.unlink_doomed([file])
        return None

    def abandon(self, opened: BlockLease, reservation: Reservation) -> None:
        """Remove what a failed fill has written to its file, give its room back, and let others try."""
        try:
            self.store.unlink(reservation.file)
            self.index.release(reservation)
        finally:
            self.store.unlock(opened)
            self.store.wake_watchers(opened)

    def adopt(self, adoption: Adoption) -> tuple[int, Evicted]:
        """Enter the blocks of a file that lies elsewhere, by a second name; how many, and what had to go for them.

        StoreUnavailable when there is no room, or when the file cannot be linked; nothing has changed then.
        """
        reservation = adoption.reservation
        evicted = self.reserve(reservation)
        try:
            self.store.link(adoption.source, reservation.file)
            entered = self.index.commit(reservation, adoption.blocks, self.capacity)
        except BaseException:
            self.store.unlink(reservation.file)
            self.index.release(reservation)
            raise
        if not entered:
            self.unlink_doomed([reservation.file])
        return entered, evicted

    def reserve(self, reservation: Reservation) -> Evicted:
        """Set room aside for what is no fill, others giving way; StoreUnavailable when there is none."""
        evicted = self._reserve(reservation, None)
        assert evicted is not None  # noqa: S101 - only a fill can come too late
        return evicted

    def drop(self, block_id: bytes, file: str) -> bool:
        """Remove a block, if it still lies in `file`."""
        return self._settle(self.index.drop(block_id, file))

    def drop_object(self, object_id: bytes) -> None:
        """Remove every block of every version of an object."""
        done = False
        while not done:
            done = self._settle(self.index.drop_object(object_id))

    def shrink(self) -> Evicted:
        """Evict down to the capacity and each slot's limit."""
        tally = _Tally()
        while True:
            step = self.index.shrink(self.capacity)
            tally.add(step)
            if self._settle(step) or not step.doomed:
                return tally.evicted(self.index)

    def count_appended(self, file: str) -> None:
        """Give back what this worker has reserved to append to a file, whatever part of it was written."""
        self.index.settle(self.index.worker, file, self.store.disk_bytes(file))

    def unlink_doomed(self, files: Sequence[str]) -> None:
        """Unlink what this worker has doomed."""
        if files:
            for file in files:
                self.store.unlink(file)
                self.on_unlink(file)
            self.index.forget_doomed(files)

    def written_today_bytes(self) -> int:
        """What fills were given room for since midnight UTC, in all processes."""
        with self.index.reading() as ledger:
            return ledger.written_bytes(self._day())

    def _day(self) -> int:
        return int(self._now()) // _SECONDS_OF_A_DAY

    def _undo(self, partial: BlockLease, file: str) -> None:
        partial.close()
        self.store.unlink(file)

    def _reserve(self, reservation: Reservation, block_id: bytes | None) -> Evicted | None:
        tally = _Tally()
        capacity = self._capacity_for(reservation)
        while True:
            step = self.index.reserve(reservation, capacity, day=self._day(), block_id=block_id)
            if step is None:
                return None
            tally.add(step)
            if self._settle(step):
                return tally.evicted(self.index)
            if not step.doomed:
                raise NotKept(
                    "room",
                    f"no room for {reservation.disk_bytes} bytes of slot {reservation.slot}: "
                    "all there is is being filled, is pinned, or belongs to others",
                )

    def _capacity_for(self, reservation: Reservation) -> Capacity:
        """What there is in all, less what others must find free."""
        try:
            return self.kept_free.capacity_for(reservation.disk_bytes, self._held_bytes, self.capacity)
        except OSError as error:
            raise StoreUnavailable(f"the room on the disk cannot be looked at: {error}") from error

    def _held_bytes(self) -> int:
        usage = self.index.usage()
        return usage.used_bytes + usage.reserved_bytes + usage.unsurveyed_bytes

    def _settle(self, step: Step) -> bool:
        self.unlink_doomed([record.file for record in step.doomed])
        return step.done


def _nobody(_file: str) -> None:
    """Where nobody has files open."""


class _Tally:
    """Counts what goes, by the number of its slot."""

    def __init__(self) -> None:
        self._blocks: Counter[int] = Counter()
        self._size_bytes: Counter[int] = Counter()

    def add(self, step: Step) -> None:
        for file in step.doomed:
            self._blocks[file.slot] += file.blocks
            self._size_bytes[file.slot] += file.disk_bytes

    def evicted(self, index: BlockIndex) -> Evicted:
        if not self._blocks:
            return Evicted()
        names = index.slot_names()
        return Evicted(
            {names[slot]: count for slot, count in self._blocks.items()},
            {names[slot]: count for slot, count in self._size_bytes.items()},
        )
