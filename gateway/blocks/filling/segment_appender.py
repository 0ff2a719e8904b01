"""Appending small blocks to this process's segments: room, bytes and index entries for many of them at once.

    room reserved (index) → bytes written behind what is there → blocks entered and room counted (index)

Each slot has one segment at a time that this process appends to; which, only this process knows. So nobody else ever
appends to it, a restarted process begins others, and sealing one is to forget it. The file is not kept open: it may be
evicted like any other, and is gone then. All of this blocks and belongs on the index thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from gateway.blocks import layout
from gateway.blocks.directory import BlockDirectory, Evicted
from gateway.blocks.files import segments
from gateway.blocks.files.segments import RECORDS_MAX, SEGMENT_BYTES_MAX, Placed, SmallBlock
from gateway.blocks.index.records import Reservation
from gateway.errors import StoreUnavailable

PARTS_OF_CAPACITY = 256
"""A segment takes at most this part of what its slot may take: policies need files that are small beside it."""

_ROUNDS_MAX = 100
"""Each is lost to a process that evicts the segment under our hands: so many in a row never happen."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """What blocks of one segment have in common: slot, `wanted` and pin, as of records.Reservation."""

    slot: str
    wanted: bool
    pin: int


@dataclass(slots=True)
class _Segment:
    """The segment that a slot's blocks are appended to now."""

    file: str
    room_bytes: int
    size_bytes: int = 0
    records: int = 0

    @property
    def new(self) -> bool:
        return self.records == 0

    def fitting(self, blocks: Sequence[SmallBlock]) -> int:
        """How many of the blocks there is room for; in a new segment for one at least."""
        room_bytes = self.room_bytes - self.size_bytes
        count = 0
        for small in blocks[: RECORDS_MAX - self.records]:
            room_bytes -= small.record_bytes
            if room_bytes < 0:
                break
            count += 1
        return max(count, self.new)


@dataclass(frozen=True, slots=True)
class Appended:
    """How many blocks were appended, and what had to go for them."""

    blocks: int
    evicted: Evicted


@dataclass(slots=True)
class SegmentAppender:
    """One process's segments."""

    directory: BlockDirectory
    _open: dict[_Alike, _Segment] = field(default_factory=dict)

    def append(self, slot: str, blocks: Sequence[SmallBlock], wanted: bool = False) -> Appended:
        """Keep the first of the blocks, as many as one segment has room for.

        StoreUnavailable when there is no room for them on the slot's account, or the disk takes nothing.
        """
        numbers = self.directory.pins.of_each(small.block.version.key for small in blocks)
        alike = _Alike(slot, wanted, numbers[0])
        blocks = blocks[: sum(1 for _ in takewhile(lambda number: number == alike.pin, numbers))]
        for _ in range(_ROUNDS_MAX):
            segment = self._open.pop(alike, None)
            count = segment.fitting(blocks) if segment is not None else 0
            if segment is None or count == 0:
                segment = _Segment(segments.new_name(), self._segment_bytes(slot))
                count = segment.fitting(blocks)
            appended = self._append(alike, segment, blocks[:count])
            if appended is not None:
                return appended
        raise StoreUnavailable("other processes evict what is written all the time")

    def _segment_bytes(self, slot: str) -> int:
        capacity = self.directory.capacity
        limit_bytes = capacity.share(slot).limit_bytes
        available_bytes = capacity.total_bytes if limit_bytes is None else limit_bytes
        return min(SEGMENT_BYTES_MAX, available_bytes // PARTS_OF_CAPACITY)

    def _append(self, alike: _Alike, segment: _Segment, blocks: Sequence[SmallBlock]) -> Appended | None:
        """None when the segment was evicted; then, and when this fails, nothing is appended to it any more."""
        placed = segments.place(segment.file, segment.size_bytes, blocks)
        taken_bytes = layout.in_pages(placed.stop) - layout.in_pages(segment.size_bytes)
        reservation = Reservation(
            segment.file, alike.slot, taken_bytes, wanted=alike.wanted, pin=alike.pin, blocks=len(blocks)
        )
        evicted = self.directory.reserve(reservation)
        try:
            kept = self._write(alike, segment, placed, reservation)
        except BaseException:
            self._give_up(segment, reservation)
            raise
        return Appended(len(blocks), evicted) if kept else None

    def _write(self, alike: _Alike, segment: _Segment, placed: Placed, reservation: Reservation) -> bool:
        directory = self.directory
        if not directory.store.append(segment.file, placed.buffers, segment.size_bytes, new=segment.new):
            directory.index.release(reservation)
            return False
        if not segment.new and not directory.extend(reservation, placed.blocks):
            return False
        if segment.new and not directory.commit(reservation, placed.blocks):
            return True  # other processes have just kept every one of the blocks
        segment.size_bytes = placed.stop
        segment.records += len(placed.blocks)
        self._open[alike] = segment
        return True

    def _give_up(self, segment: _Segment, reservation: Reservation) -> None:
        """After a failed write: what has come of it is counted."""
        if segment.new:
            self.directory.discard(reservation)
        else:
            self.directory.count_appended(segment.file)
