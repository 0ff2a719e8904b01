"""What one reader wants: a range of a version, on whose account, for what; and the blocks that it lies in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.blocks import layout
from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.blocks.layout import Block
from gateway.objects import ByteRange, ObjectVersion
from gateway.origin.client import Purpose

BLOCKS_LOOKED_UP_MAX = 1024
"""Of a longer range no more than the first are looked at: a 5 TiB object must not hold up the event loop."""


@dataclass(slots=True, eq=False)
class Wanted:
    """Of one reader, and fills know the reader by it. `headers` go along with what is asked of the origin for it.

    `answer` is what the origin has said already, where the version was not known before. An object that is `too_large`
    is larger than those that its slot keeps.
    """

    numbers: range = field(init=False)
    """Of the blocks that the range lies in."""
    version: ObjectVersion
    range: ByteRange
    slot: str
    headers: Mapping[str, str]
    purpose: Purpose
    answer: UnpinnedResponse | None
    block_size_bytes: int
    too_large: bool
    ids: hashlib.blake2b = field(init=False)

    def __post_init__(self) -> None:
        self.ids = layout.block_ids(self.version)
        self.numbers = layout.block_numbers(self.range, self.block_size_bytes)

    @property
    def blocks_of_object(self) -> int:
        """How many blocks the whole object has."""
        return -(-self.version.size_bytes // self.block_size_bytes)

    def block(self, number: int) -> Block:
        return layout.block_at(self.version, number, self.block_size_bytes, self.ids)

    def block_before(self, block: Block) -> Block:
        return self.block(block.offset // self.block_size_bytes - 1)

    def part_in(self, block: Block) -> ByteRange:
        """What is wanted of a block that the range touches."""
        return ByteRange(max(self.range.first, block.offset), min(self.range.last, block.range.last))
