"""Buffers that fetches borrow."""

from __future__ import annotations

from gateway.blocks.large_block_fetch import BUFFERS_KEPT_BYTES_MAX, Buffers
from tests.support.blocks import KIB, MIB


def test_a_buffer_given_back_is_lent_again() -> None:
    """To the next who wants one of its size, and to one at a time."""
    buffers = Buffers()
    large, small = buffers.take(MIB), buffers.take(256 * KIB)
    assert (len(large), len(small)) == (MIB, 256 * KIB)
    buffers.give_back(large)
    assert buffers.take(256 * KIB) is not large
    assert buffers.take(MIB) is large
    assert buffers.take(MIB) is not large


def test_little_is_kept() -> None:
    """What many fetches at once needed is not held for ever."""
    buffers = Buffers()
    lent = [buffers.take(MIB) for _ in range(2 * BUFFERS_KEPT_BYTES_MAX // MIB)]
    for buffer in lent:
        buffers.give_back(buffer)
    known = {id(buffer) for buffer in lent}
    again = [buffers.take(MIB) for _ in lent]
    assert sum(id(buffer) in known for buffer in again) == BUFFERS_KEPT_BYTES_MAX // MIB
