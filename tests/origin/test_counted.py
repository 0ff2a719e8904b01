"""Bytes to and from the origin are counted, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from gateway.clock import SystemClock
from gateway.origin.client import OriginRequest, Purpose, StreamedBody
from gateway.origin.counted import CountedOrigin
from gateway.origin.memory import MemoryOrigin


class Counted:
    """A memory origin with one object, behind a counter."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.memory = MemoryOrigin(SystemClock())
        self.memory.put("b", "k", b"0123456789")
        self.origin = CountedOrigin(self.memory, self._count)

    def _count(self, direction: str, purpose: str, count: int) -> None:
        self.bytes[direction, purpose] += count


def test_what_is_read_is_counted_by_purpose() -> None:
    """Streamed or as a whole; the answer is the origin's own."""

    async def run() -> None:
        counted = Counted()
        async with await counted.origin.send(OriginRequest("GET", "b", "k", purpose=Purpose.WARM)) as response:
            assert (response.status, response.headers["content-length"]) == (200, "10")
            assert b"".join([piece async for piece in response.stream()]) == b"0123456789"
        async with await counted.origin.send(OriginRequest("GET", "b", "k")) as response:
            assert await response.read(100) == b"0123456789"
        assert counted.bytes == {("read", "warm"): 10, ("read", "live"): 10}

    asyncio.run(run())


async def chunks() -> AsyncIterator[bytes]:
    yield b"abc"
    yield b"defg"


@pytest.mark.parametrize("body", [b"abcdefg", "streamed"])
def test_what_is_written_is_counted(body: bytes | str) -> None:
    """In memory or streamed; it arrives whole."""

    async def run() -> None:
        counted = Counted()
        sent = body if isinstance(body, bytes) else StreamedBody(chunks(), 7)
        async with await counted.origin.send(OriginRequest("PUT", "b", "new", body=sent)) as response:
            assert response.status == 200
        assert counted.bytes["write", "live"] == 7
        async with await counted.origin.send(OriginRequest("GET", "b", "new")) as response:
            assert await response.read(100) == b"abcdefg"

    asyncio.run(run())


def test_a_reader_that_stops_half_way_is_counted_so_far_and_gives_the_answer_back() -> None:
    """Closing the stream closes the origin's."""

    async def run() -> None:
        counted = Counted()
        async with await counted.origin.send(OriginRequest("GET", "b", "k")) as response:
            stream = response.stream()
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]  # a generator, as readers rely on
        assert 0 < counted.bytes["read", "live"] <= 10

    asyncio.run(run())
