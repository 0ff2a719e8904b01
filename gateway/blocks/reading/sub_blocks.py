"""Sub-blocks: small parts of large blocks, for readers that touch an object here and there.

A sub-block is a block like any other, of a finer grid: fetched, shared, packed, verified and evicted by itself. A block
is fetched as a whole when much of it is asked for at once and no more than that lies before it, when the reads before
came just before, and when so many of its sub-blocks are there that the touches are no longer few. What sub-blocks have
brought is then fetched once more: a quarter of a block at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.blocks import layout
from gateway.blocks.filling.single_flight import SingleFlight
from gateway.blocks.index.index import BlockIndex
from gateway.blocks.layout import Block
from gateway.blocks.reading.sources import ReadRequest
from gateway.objects import ByteRange

SUB_BLOCK_BYTES = 128 * 1024
"""Two chunks: what a read of a few KiB costs the origin, and a 64 KiB read that lies across a boundary."""

MUCH = 8
"""Who wants an eighth of a block wants the block, unless he would wait for more than he wants before it."""

MANY = 4
"""A quarter of a block in sub-blocks is no random touch any more."""

_RUN_SUB_BLOCKS = 2


def are_used(block_size_bytes: int) -> bool:
    """Whether blocks of this size are large enough to have sub-blocks."""
    return block_size_bytes >= MUCH * SUB_BLOCK_BYTES and block_size_bytes % SUB_BLOCK_BYTES == 0


def first_fetched(first: int, last: int | None, block_size_bytes: int) -> ByteRange:
    """What a read of bytes `first` to `last` (None: the end) of an object begins with, if nothing is known of it."""
    skipped, request = first % block_size_bytes, block_size_bytes if last is None else last - first + 1
    whole = not are_used(block_size_bytes) or is_much(
        skipped, min(request, block_size_bytes - skipped), block_size_bytes
    )
    size = block_size_bytes if whole else SUB_BLOCK_BYTES
    return ByteRange(first // size * size, first // size * size + size - 1)


def is_much(skipped_bytes: int, wanted_bytes: int, block_bytes: int) -> bool:
    """Whether so many bytes of a block, behind so many that nobody asked for, are reason enough to fill it."""
    return wanted_bytes * MUCH >= block_bytes and skipped_bytes <= wanted_bytes


@dataclass(slots=True)
class SubBlocks:
    """Those of one reader's range, in blocks that `are_used` for. Those that it has fetched ahead go to `fetched`."""

    index: BlockIndex
    fetches: SingleFlight
    request: ReadRequest
    fetched: set[bytes]
    _judged: bytes = b""
    _whole: bool = False

    def at(self, position: int, block: Block) -> Block | None:
        """The sub-block to read from at a position of a block that is not here; None: the block is to be filled.

        The range's other sub-blocks in the block are on their way then. StoreUnavailable as the index raises it.
        """
        sub_block = self._sub_block(position // SUB_BLOCK_BYTES)
        if self._is_coming(sub_block):
            return sub_block
        if self._is_filled_whole(block):
            return None
        self._fetch_behind(sub_block, block)
        return sub_block

    def hold(self, block: Block) -> bool:
        """Whether all that the range wants of a block is there in sub-blocks."""
        asked = self.request.part_in(block)
        return asked != block.range and all(self._present(layout.block_numbers(asked, SUB_BLOCK_BYTES)))

    def _is_filled_whole(self, block: Block) -> bool:
        if self._judged != block.id:
            self._judged, self._whole = block.id, self._judge(block)
        return self._whole

    def _judge(self, block: Block) -> bool:
        asked, answer = self.request.part_in(block), self.request.answer
        if answer is not None and asked.first == self.request.range.first:
            return answer.range.first == block.offset and answer.range.stop >= block.range.stop
        skipped = asked.first - block.offset
        if block.length <= 2 * SUB_BLOCK_BYTES or is_much(skipped, asked.length, block.length):
            return True
        numbers = layout.block_numbers(block.range, SUB_BLOCK_BYTES)
        present = self._present(numbers)
        at = skipped // SUB_BLOCK_BYTES
        if at == 0 and block.offset and self._is_coming(self.request.block_before(block)):
            return True
        if at >= _RUN_SUB_BLOCKS and all(present[at - _RUN_SUB_BLOCKS : at]):
            return True
        return sum(present) * MANY >= len(present)

    def _fetch_behind(self, sub_block: Block, block: Block) -> None:
        """Have the sub-blocks behind this one on their way that the range wants too."""
        for number in layout.block_numbers(self.request.part_in(block), SUB_BLOCK_BYTES):
            other = self._sub_block(number)
            if other.offset > sub_block.offset and self.index.lookup(other.id) is None:
                self.fetched.add(other.id)
                self.fetches.start_ahead(other, self.request.slot, self.request.headers, self.request)

    def _present(self, numbers: range) -> list[bool]:
        return self.index.present(self._sub_block(number).id for number in numbers)

    def _is_coming(self, block: Block) -> bool:
        return self.index.lookup(block.id) is not None or self.fetches.has(block, self.request.headers)

    def _sub_block(self, number: int) -> Block:
        return layout.block_at(self.request.version, number, SUB_BLOCK_BYTES, self.request.ids)
