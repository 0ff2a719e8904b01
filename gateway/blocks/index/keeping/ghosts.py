"""Blocks that have left, remembered. Pure.

Each slot has a table of places; a block's place follows from its id, and whoever comes later takes it. So what is
remembered is bounded without a queue, and costs one record written when a block leaves and one read when one enters.
Of more blocks than there are places, the same ones are always remembered: one in `rarity`, by their ids.
"""

from __future__ import annotations

import struct

PLACES = 1 << 18

_KEY = struct.Struct(">HI")
_GHOST = struct.Struct("<IBQ")
_ID = struct.Struct("<III")


def rarity(blocks: int) -> int:
    """One block in so many is remembered in a slot that holds `blocks`: room for 16 times as many in the table."""
    return max(1, 16 * blocks // PLACES)


def is_remembered(block_id: bytes, one_in: int) -> bool:
    return int(_ID.unpack_from(block_id)[1]) % one_in == 0


def place(slot: int, block_id: bytes) -> bytes:
    """The key of a block's place in its slot's table."""
    return _KEY.pack(slot, _ID.unpack_from(block_id)[0] % PLACES)


def pack_ghost(block_id: bytes, eviction: int, mark: int) -> bytes:
    """`mark` is what the policy of the number `eviction` wants to know of the block when it comes back."""
    return _GHOST.pack(_check(block_id), eviction, mark)


def unpack_ghost(block_id: bytes, eviction: int, packed: bytes | None) -> int | None:
    """The mark; None when the place is another block's, or tells of another policy's time."""
    if packed is None:
        return None
    check, of, mark = _GHOST.unpack(packed)
    return int(mark) if (check, of) == (_check(block_id), eviction) else None


def _check(block_id: bytes) -> int:
    return int(_ID.unpack_from(block_id)[2])
