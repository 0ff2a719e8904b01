"""Which blocks were used since the index was last told: in memory, so that a hit writes nothing."""

from __future__ import annotations

from collections import OrderedDict

BLOCKS_NOTED_MAX = 65_536


class AccessLog:
    """Blocks in the order of their last use; beyond BLOCKS_NOTED_MAX the oldest uses are forgotten. Event loop only."""

    def __init__(self) -> None:
        self._noted: OrderedDict[bytes, None] = OrderedDict()

    def note(self, block_id: bytes) -> None:
        self._noted[block_id] = None
        self._noted.move_to_end(block_id)
        if len(self._noted) > BLOCKS_NOTED_MAX:
            self._noted.popitem(last=False)

    def take(self, count_max: int) -> list[bytes]:
        """Up to `count_max` of the blocks, the oldest use first; they are the caller's now."""
        count = min(count_max, len(self._noted))
        return [self._noted.popitem(last=False)[0] for _ in range(count)]
