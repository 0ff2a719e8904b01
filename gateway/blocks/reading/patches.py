"""Patches: small parts of large blocks, for readers that touch an object here and there.

A patch is a block like any other, of a finer grid: filled, shared, packed, verified and evicted by itself. A block is
filled as a whole when much of it is wanted at once and no more than that lies before it, when the reads before came
just before, and when so many of its patches are there that the touches are no longer few. What patches have brought is
then fetched once more: a quarter of a block at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.blocks import layout
from gateway.blocks.filling.single_flight import SingleFlight
from gateway.blocks.index.index import BlockIndex
from gateway.blocks.layout import Block
from gateway.blocks.reading.wanted import Wanted
from gateway.objects import ByteRange

PATCH_BYTES = 128 * 1024
"""Two chunks: what a read of a few KiB costs the origin, and a 64 KiB read that lies across a boundary."""

MUCH = 8
"""Who wants an eighth of a block wants the block, unless he would wait for more than he wants before it."""

MANY = 4
"""A quarter of a block in patches is no random touch any more."""

_RUN_PATCHES = 2


def are_used(block_size_bytes: int) -> bool:
    """Whether blocks of this size are large enough to have patches."""
    return block_size_bytes >= MUCH * PATCH_BYTES and block_size_bytes % PATCH_BYTES == 0


def first_fetched(first: int, last: int | None, block_size_bytes: int) -> ByteRange:
    """What a read of bytes `first` to `last` (None: the end) of an object begins with, if nothing is known of it."""
    skipped, wanted = first % block_size_bytes, block_size_bytes if last is None else last - first + 1
    whole = not are_used(block_size_bytes) or is_much(
        skipped, min(wanted, block_size_bytes - skipped), block_size_bytes
    )
    size = block_size_bytes if whole else PATCH_BYTES
    return ByteRange(first // size * size, first // size * size + size - 1)


def is_much(skipped_bytes: int, wanted_bytes: int, block_bytes: int) -> bool:
    """Whether so many bytes of a block, behind so many that nobody asked for, are reason enough to fill it."""
    return wanted_bytes * MUCH >= block_bytes and skipped_bytes <= wanted_bytes


@dataclass(slots=True)
class Patches:
    """Those of one reader's range, in blocks that `are_used` for. Those that it has fetched ahead go to `fetched`."""

    index: BlockIndex
    fetches: SingleFlight
    wanted: Wanted
    fetched: set[bytes]
    _judged: bytes = b""
    _whole: bool = False

    def at(self, position: int, block: Block) -> Block | None:
        """The patch to read from at a position of a block that is not here; None: the block is to be filled.

        The range's other patches in the block are on their way then. StoreUnavailable as the index raises it.
        """
        patch = self._patch(position // PATCH_BYTES)
        if self._is_coming(patch):
            return patch
        if self._is_filled_whole(block):
            return None
        self._fetch_behind(patch, block)
        return patch

    def hold(self, block: Block) -> bool:
        """Whether all that the range wants of a block is there in patches."""
        wanted = self.wanted.part_in(block)
        return wanted != block.range and all(self._present(layout.block_numbers(wanted, PATCH_BYTES)))

    def _is_filled_whole(self, block: Block) -> bool:
        if self._judged != block.id:
            self._judged, self._whole = block.id, self._judge(block)
        return self._whole

    def _judge(self, block: Block) -> bool:
        wanted, answer = self.wanted.part_in(block), self.wanted.answer
        if answer is not None and wanted.first == self.wanted.range.first:
            return answer.range.first == block.offset and answer.range.stop >= block.range.stop
        skipped = wanted.first - block.offset
        if block.length <= 2 * PATCH_BYTES or is_much(skipped, wanted.length, block.length):
            return True
        numbers = layout.block_numbers(block.range, PATCH_BYTES)
        present = self._present(numbers)
        at = skipped // PATCH_BYTES
        if at == 0 and block.offset and self._is_coming(self.wanted.block_before(block)):
            return True
        if at >= _RUN_PATCHES and all(present[at - _RUN_PATCHES : at]):
            return True
        return sum(present) * MANY >= len(present)

    def _fetch_behind(self, patch: Block, block: Block) -> None:
        """Have the patches behind this one on their way that the range wants too."""
        for number in layout.block_numbers(self.wanted.part_in(block), PATCH_BYTES):
            other = self._patch(number)
            if other.offset > patch.offset and self.index.lookup(other.id) is None:
                self.fetched.add(other.id)
                self.fetches.start_ahead(other, self.wanted.slot, self.wanted.headers, self.wanted)

    def _present(self, numbers: range) -> list[bool]:
        return self.index.present(self._patch(number).id for number in numbers)

    def _is_coming(self, block: Block) -> bool:
        return self.index.lookup(block.id) is not None or self.fetches.has(block, self.wanted.headers)

    def _patch(self, number: int) -> Block:
        return layout.block_at(self.wanted.version, number, PATCH_BYTES, self.wanted.ids)
