"""Which way a block is filled: small ones are packed, the others get a file of their own."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.blocks.filling.coalescing import Fill
from gateway.blocks.filling.fill import BlockFiller
from gateway.blocks.filling.small_fills import SmallFiller


@dataclass(frozen=True, slots=True)
class Filler:
    """Does the work of every `Fill`; `at_once` what can be done of it without waiting, as of SmallFiller."""

    large: BlockFiller
    small: SmallFiller
    packed_bytes_max: int

    async def __call__(self, fill: Fill) -> None:
        await (self.small(fill) if fill.block.length <= self.packed_bytes_max else self.large(fill))

    def at_once(self, fill: Fill) -> bool:
        return fill.block.length <= self.packed_bytes_max and self.small.at_once(fill)
