"""Gathering pieces in a buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError
from gateway.origin.receive_buffer import (
    BUFFERS_KEPT_BYTES_MAX,
    GATHERING_SECONDS_MAX,
    Buffers,
    ReceiveBuffer,
    gathered,
)


async def given_as(
    pieces: Sequence[bytes], failure: Exception | None = None, pause: float = 0.0
) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(pause)
    if failure is not None:
        raise failure


async def gather(pieces: AsyncIterator[bytes], landing: ReceiveBuffer) -> list[bytes]:
    return [bytes(view) async for view in gathered(pieces, landing)]


@given(
    pieces=st.lists(st.binary(max_size=300), max_size=20),
    size=st.integers(1, 200),
    enough=st.integers(1, 300),
)
def test_the_bytes_are_the_same_in_pieces_worth_having(pieces: list[bytes], size: int, enough: int) -> None:
    """None is empty, none longer than the buffer, and only the last is shorter than what is worth it."""
    views = asyncio.run(gather(given_as(pieces), ReceiveBuffer(size, enough)))
    assert b"".join(views) == b"".join(pieces)
    assert all(0 < len(view) <= size for view in views)
    assert all(len(view) >= min(enough, size) for view in views[:-1])


async def test_what_came_before_a_failure_is_given_first() -> None:
    """Nothing that was paid for is lost."""
    views = gathered(given_as([b"abc", b"de"], OriginBodyError("broke off")), ReceiveBuffer(9, 9))
    assert bytes(await anext(views)) == b"abcde"
    with pytest.raises(OriginBodyError, match="broke off"):
        await anext(views)


def test_slow_bytes_do_not_wait_for_a_whole_buffer() -> None:
    """When the next ones come after a while, all are given."""
    landing = ReceiveBuffer(9, 9)
    views = asyncio.run(gather(given_as([b"a", b"b", b"c"], pause=GATHERING_SECONDS_MAX), landing))
    assert views[0] == b"ab"


def test_a_buffer_given_back_is_lent_again() -> None:
    """To the next who wants one of its size, and to one at a time."""
    buffers = Buffers()
    large, small = buffers.take(1024**2), buffers.take(256 * 1024)
    assert (len(large), len(small)) == (1024**2, 256 * 1024)
    buffers.give_back(large)
    assert buffers.take(256 * 1024) is not large
    assert buffers.take(1024**2) is large
    assert buffers.take(1024**2) is not large


def test_little_is_kept() -> None:
    """What many fetches at once needed is not held for ever."""
    buffers = Buffers()
    lent = [buffers.take(1024**2) for _ in range(2 * BUFFERS_KEPT_BYTES_MAX // 1024**2)]
    for buffer in lent:
        buffers.give_back(buffer)
    known = {id(buffer) for buffer in lent}
    again = [buffers.take(1024**2) for _ in lent]
    assert sum(id(buffer) in known for buffer in again) == BUFFERS_KEPT_BYTES_MAX // 1024**2
