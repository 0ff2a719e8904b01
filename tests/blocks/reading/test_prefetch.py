"""Readahead: the window grows with a run, over requests and processes, and random reads cause none."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.blocks import plan
from gateway.blocks.cache import BlockCache
from gateway.blocks.plan import mark_ahead, window_blocks_max
from gateway.core.model import ByteRange, ObjectVersion
from gateway.origin.client import Purpose
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    bytes_of,
    content_of,
    make_origin,
    open_cache,
    read,
    stored,
    take,
    until,
)
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Hold


def blocks_asked(origin: MemoryOrigin, purpose: Purpose | None = None) -> list[int]:
    """The numbers of the blocks that the origin was asked for, in order."""
    calls = [call for call in origin.calls if purpose is None or call.purpose is purpose]
    return [int(call.headers["range"].removeprefix("bytes=").partition("-")[0]) // BLOCK for call in calls]


async def read_block(cache: BlockCache, version: ObjectVersion, number: int) -> str:
    """Read one block to its end as a client does, from its file where it lies whole; the outcome."""
    reader = await cache.open_range(version, ByteRange(number * BLOCK, (number + 1) * BLOCK - 1))
    if reader.whole() is None:
        await take(reader)
    await reader.aclose()
    await cache.settle()
    return reader.outcome


def test_the_window_of_a_long_range_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole object begins with a few blocks and has more on their way with every byte read, up to the setting."""
    monkeypatch.setattr(plan, "FIRST_WINDOW_BYTES", 4 * BLOCK)
    monkeypatch.setattr(plan, "GROWTH", 2)

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 64 * BLOCK)
        released = asyncio.Event()
        origin.inject(lambda call: call.purpose is Purpose.READAHEAD, Hold(released), times=None)
        async with open_cache(tmp_path / "c", origin, readahead_bytes=10 * BLOCK) as cache:
            reader = await cache.open_range(version, ByteRange(0, 64 * BLOCK - 1))
            async with aclosing(reader.body()) as body:
                read_bytes = len(bytes_of(await anext(body)))
                await until(lambda: origin.count() == 1 + 4)
                released.set()
                async for piece in body:
                    last = read_bytes // BLOCK + 10
                    if 30 * BLOCK <= read_bytes < 31 * BLOCK:
                        await until(lambda: max(blocks_asked(origin)) == last)  # noqa: B023 - it is over before the next
                    assert max(blocks_asked(origin)) <= last
                    read_bytes += len(bytes_of(piece))
            assert blocks_asked(origin) == list(range(64))

    asyncio.run(scenario())


def test_reading_block_after_block_runs_ahead(tmp_path: Path) -> None:
    """One request after another for neighbouring blocks: soon each finds its block there, and the run doubles."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 40 * BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            outcomes = [await read_block(cache, version, number) for number in range(40)]
            assert outcomes == ["miss"] * 3 + ["hit"] * 37
            assert sorted(blocks_asked(origin)) == list(range(40))
            assert blocks_asked(origin, Purpose.LIVE) == [0, 1, 2]

    asyncio.run(scenario())


def test_parts_read_at_once_run_ahead(tmp_path: Path) -> None:
    """A client that reads parts side by side, in whatever order they arrive, has the next ones on their way."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 24 * BLOCK)
        async with open_cache(tmp_path / "c", origin, readahead_bytes=6 * BLOCK) as cache:
            first = [5, 1, 0, 7, 3, 2, 6, 4]
            await asyncio.gather(*(read_block(cache, version, number) for number in first))
            await read_block(cache, version, 8)
            assert set(blocks_asked(origin)) == set(range(15))

    asyncio.run(scenario())


def test_a_run_is_seen_over_processes(tmp_path: Path) -> None:
    """Neighbouring blocks that another worker has read count for the run."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 12 * BLOCK)
        async with open_cache(tmp_path / "c", origin, worker=0, readahead_bytes=0) as one:
            for number in range(4):
                await read_block(one, version, number)
        async with open_cache(tmp_path / "c", origin, worker=1) as two:
            await read_block(two, version, 4)
        assert blocks_asked(origin) == list(range(9))

    asyncio.run(scenario())


def test_reading_what_is_there_fetches_nothing(tmp_path: Path) -> None:
    """A run of cached blocks is no reason to fetch what nobody asks for."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 12 * BLOCK)
        async with open_cache(tmp_path / "c", origin, readahead_bytes=0) as cache:
            await read(cache, version, ByteRange(0, 6 * BLOCK - 1))
            await cache.settle()
        async with open_cache(tmp_path / "c", origin) as cache:
            for number in range(6):
                await read_block(cache, version, number)
            await read(cache, version, ByteRange(0, 6 * BLOCK - 1))
            await cache.settle()
        assert sorted(blocks_asked(origin)) == list(range(6))

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_random_reads_waste_nothing(tmp_path: Path, seed: int) -> None:
    """Blocks read in random order, far from each other, bring no block that was not asked for."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 256 * BLOCK)
        numbers = [3 * number for number in range(80)]
        random.Random(seed).shuffle(numbers)
        async with open_cache(tmp_path / "c", origin, capacity_bytes=128 * MIB) as cache:
            for number in numbers:
                await read_block(cache, version, number)
        assert blocks_asked(origin) == numbers

    asyncio.run(scenario())


def test_a_small_slot_is_not_flooded(tmp_path: Path) -> None:
    """Readahead never fetches more than a quarter of what the slot can have: it would push out what comes next."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 64 * BLOCK)
        async with open_cache(tmp_path / "c", origin, capacity_bytes=8 * (BLOCK + 4 * KIB)) as cache:
            assert await read(cache, version) == content_of(origin, version)
            assert blocks_asked(origin) == list(range(64))

    asyncio.run(scenario())


@pytest.mark.parametrize("length", [64 * BLOCK, 3 * BLOCK])
def test_what_was_fetched_ahead_stays_until_it_is_read(tmp_path: Path, length: int) -> None:
    """However slow the reader: that it comes to a block fetched for it is no sign that blocks come back soon."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 63 * BLOCK)
        async with open_cache(tmp_path / "c", origin, capacity_bytes=8 * (BLOCK + 4 * KIB)) as cache:
            for first in range(0, version.size_bytes, length):
                reader = await cache.open_range(version, ByteRange(first, min(first + length, version.size_bytes) - 1))
                async with aclosing(reader.body()) as body:
                    async for _ in body:
                        await cache.settle()
            assert blocks_asked(origin) == list(range(63))

    asyncio.run(scenario())


def test_readers_who_wait_go_first(tmp_path: Path) -> None:
    """However long the window, half of the fills are left to those who wait for a first byte."""

    async def scenario() -> None:
        memory = make_origin()
        version, other = stored(memory, "a", 64 * BLOCK), stored(memory, "b", BLOCK)
        released = asyncio.Event()
        memory.inject(lambda call: call.purpose is Purpose.READAHEAD, Hold(released), times=None)
        async with open_cache(tmp_path / "c", memory, fills_max=4) as cache:
            reader = await cache.open_range(version, ByteRange(0, 64 * BLOCK - 1))
            async with aclosing(reader.body()) as body:
                await anext(body)
                await until(lambda: memory.count() == 3)
                assert await read(cache, other) == content_of(memory, other)
                released.set()

    asyncio.run(scenario())


def test_marks_are_bounded() -> None:
    """What was fetched ahead and never read is forgotten in time, the oldest first."""
    marks: OrderedDict[bytes, None] = OrderedDict()
    names = [number.to_bytes(4, "big") for number in range(5000)]
    for name in names:
        mark_ahead(marks, name)
    assert 0 < len(marks) < len(names)
    assert list(marks) == names[-len(marks) :]


def test_the_window_is_given_in_bytes() -> None:
    """It is as many blocks as fit, one at least, a quarter of the slot at most; 0 bytes are none."""
    assert window_blocks_max(128 * MIB, 8 * MIB, 1024 * MIB) == 16
    assert window_blocks_max(128 * MIB, 8 * MIB, 64 * MIB) == 2
    assert window_blocks_max(4 * MIB, 8 * MIB, 1024 * MIB) == 1
    assert window_blocks_max(0, 8 * MIB, 1024 * MIB) == 0
