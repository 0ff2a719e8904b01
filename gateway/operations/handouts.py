"""Which nodes have just got a block from this process, so that the next ones can ask them.

A block that all nodes want at once would take the bandwidth of one node as often as there are nodes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.core.model import ObjectVersion

SENT_AT_ONCE = 4
"""A block that is being sent to so many nodes is not sent to another one if others have it."""

TAKERS_NAMED_MAX = 3
_BLOCKS_MAX = 4096

BlockName = tuple[ObjectVersion, int]
"""A version, and the number of a block of it."""


@dataclass(slots=True)
class _Handout:
    sending: int = 0
    takers: deque[str] = field(default_factory=lambda: deque(maxlen=TAKERS_NAMED_MAX + 1))
    """Addresses, the last one last; one more than are named, as the asker itself may be among them."""


class Handouts:
    """Counts what one process sends now, and remembers who got it, for the last blocks. Event loop only."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockName, _Handout] = OrderedDict()

    def others(self, block: BlockName, asker: str) -> Sequence[str]:
        """Return the addresses that an asker is to ask instead; none: send it the block."""
        handout = self._blocks.get(block)
        if handout is None or handout.sending < SENT_AT_ONCE:
            return ()
        return [taker for taker in reversed(handout.takers) if taker != asker][:TAKERS_NAMED_MAX]

    def begin(self, block: BlockName) -> None:
        """Count a block that is being sent; `end` follows."""
        handout = self._blocks.get(block)
        if handout is None:
            handout = self._blocks[block] = _Handout()
        self._blocks.move_to_end(block)
        handout.sending += 1
        while len(self._blocks) > _BLOCKS_MAX and not next(iter(self._blocks.values())).sending:
            self._blocks.popitem(last=False)

    def end(self, block: BlockName, taker: str) -> None:
        """Note that a block is no longer being sent; `taker` is who has got all of it, or empty."""
        handout = self._blocks[block]
        handout.sending -= 1
        if taker and taker not in handout.takers:
            handout.takers.append(taker)
