"""The origin's first answer: taken once by whoever can use it, and held by nobody after that."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.blocks.fetch_locks import lock_of_place
from gateway.blocks.origin_gets import UnpinnedGet, UnpinnedResponse
from gateway.core.model import ByteRange
from tests.blocks.filling.test_fetch_locks import processes
from tests.support.memory_origin.response import MemoryResponse


class Response(MemoryResponse):
    """One that can be watched."""


@pytest.fixture
def look(tmp_path: Path) -> Iterator[UnpinnedGet]:
    with processes(tmp_path, 1) as opened:
        yield UnpinnedGet(opened.locks[0], lock_of_place(b"p" * 16, 0, {}), asyncio.Semaphore(1), lambda _: None)


@pytest.mark.parametrize(
    ("first", "last", "fits"), [(100, 299, True), (100, 150, True), (101, 299, False), (100, 300, False)]
)
def test_it_is_taken_once_by_who_wants_its_first_bytes(look: UnpinnedGet, first: int, last: int, fits: bool) -> None:
    """Its body must begin with them and hold all; whoever comes second, or closes it after that, gets nothing."""
    response = Response(206)
    answer = UnpinnedResponse(look, ByteRange(100, 299), response)
    assert answer.take(ByteRange(first, last)) is (response if fits else None)
    assert answer.take(ByteRange(100, 299)) is (None if fits else response)
    asyncio.run(answer.aclose())
    assert not response.closed


@pytest.mark.parametrize("taken", [False, True])
def test_a_reader_that_keeps_it_keeps_no_response(look: UnpinnedGet, taken: bool) -> None:
    """Readers go on for minutes: what has come of a body nobody uses must not wait for their end in memory."""
    response = Response(206)
    gone = weakref.ref(response)
    answer = UnpinnedResponse(look, ByteRange(100, 299), response)
    if taken:
        answer.take(answer.range)
    asyncio.run(answer.aclose())
    assert response.closed is not taken
    del response
    assert gone() is None
    assert answer.take(answer.range) is None
