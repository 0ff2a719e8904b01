"""Sub-blocks: a few bytes of a large block cost the origin little, unless the touches are many or in a row."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from gateway.blocks.plan import SUB_BLOCK_BYTES, first_fetched
from gateway.core.model import ByteRange
from gateway.origin.client import Purpose
from gateway.telemetry import metrics
from tests.support.blocks import (
    KIB,
    MIB,
    content_of,
    make_origin,
    open_cache,
    read,
    stored,
    take,
    until,
)
from tests.support.counting import counted
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Hold

BLOCK = 4 * MIB
PATCHES = BLOCK // SUB_BLOCK_BYTES


def fetched_bytes(origin: MemoryOrigin) -> int:
    ranges = [call.headers["range"].removeprefix("bytes=").split("-") for call in origin.calls]
    return sum(int(last) - int(first) + 1 for first, last in ranges)


def span(first: int, length: int) -> ByteRange:
    return ByteRange(first, first + length - 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_random_touch_costs_little(tmp_path: Path, seed: int) -> None:
    """Cold 4 KiB reads here and there: at most 256 KiB from the origin for each, and the second read is a hit."""
    rng = random.Random(seed)

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 40 * BLOCK)
        places = [number * 2 * BLOCK + rng.randrange(2 * BLOCK - 4 * KIB) for number in range(20)]
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK) as cache:
            for place in places:
                assert await read(cache, version, span(place, 4 * KIB)) == content_of(
                    origin, version, span(place, 4 * KIB)
                )
            await cache.settle()
            assert fetched_bytes(origin) <= len(places) * 256 * KIB
            asked = origin.count()
            for place in places:
                reader = await cache.open_range(version, span(place, 4 * KIB))
                assert reader.outcome == "hit"
                assert await take(reader) == content_of(origin, version, span(place, 4 * KIB))
            assert origin.count() == asked

    asyncio.run(scenario())


def test_a_read_over_several_patches_is_fetched_at_once(tmp_path: Path) -> None:
    """Its sub-blocks are all on their way when the first one is; together they are what was asked for."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 4 * BLOCK)
        wanted = span(BLOCK + 7 * SUB_BLOCK_BYTES - 5, 2 * SUB_BLOCK_BYTES)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK) as cache:
            reader = await cache.open_range(version, wanted)
            assert reader.outcome == "miss"
            assert await take(reader) == content_of(origin, version, wanted)
            await cache.settle()
            assert fetched_bytes(origin) == 3 * SUB_BLOCK_BYTES
            assert counted(metrics.CACHE_HIT_BYTES) == 0
            longer = span(wanted.first, wanted.length + SUB_BLOCK_BYTES)
            reader = await cache.open_range(version, longer)
            assert reader.outcome == "partial"
            assert await take(reader) == content_of(origin, version, longer)

    asyncio.run(scenario())


def test_touches_that_grow_dense_bring_the_block(tmp_path: Path) -> None:
    """When a quarter of a block is there in sub-blocks, the next touch fetches it, and all of it is a hit then."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 4 * BLOCK)
        touches = [span(BLOCK + number * SUB_BLOCK_BYTES, KIB) for number in range(2, PATCHES, 3)]
        random.Random(1).shuffle(touches)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK) as cache:
            for touch in touches:
                await read(cache, version, touch)
                await cache.settle()
            assert fetched_bytes(origin) == PATCHES // 4 * SUB_BLOCK_BYTES + BLOCK
            reader = await cache.open_range(version, span(BLOCK, BLOCK))
            assert reader.outcome == "hit"
            assert await take(reader) == content_of(origin, version, span(BLOCK, BLOCK))

    asyncio.run(scenario())


def test_small_reads_one_after_another_bring_blocks(tmp_path: Path) -> None:
    """A sequential reader of small ranges soon reads from whole blocks, each asked for once, the next ones ahead."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 6 * BLOCK)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK) as cache:
            for first in range(0, version.size_bytes, 64 * KIB):
                piece = span(first, 64 * KIB)
                assert await read(cache, version, piece) == content_of(origin, version, piece)
                await cache.settle()
            assert fetched_bytes(origin) == version.size_bytes + 2 * SUB_BLOCK_BYTES
            assert origin.count() == 6 + 2

    asyncio.run(scenario())


@pytest.mark.parametrize(("skipped", "length"), [(0, BLOCK // 8), (BLOCK // 8, BLOCK // 8), (BLOCK // 2, BLOCK // 2)])
def test_who_wants_much_of_a_block_gets_the_block(tmp_path: Path, skipped: int, length: int) -> None:
    """An eighth of a block and more is one request for the block, where not more than that lies before it."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 4 * BLOCK)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK) as cache:
            await read(cache, version, span(BLOCK + skipped, length))
            await cache.settle()
            assert [call.headers["range"] for call in origin.calls] == [f"bytes={BLOCK}-{2 * BLOCK - 1}"]

    asyncio.run(scenario())


def test_a_range_deep_in_a_block_does_not_wait_for_what_lies_before_it(tmp_path: Path) -> None:
    """Its sub-blocks are asked for, all at once, and nothing before them."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 4 * BLOCK)
        wanted = span(BLOCK + 20 * SUB_BLOCK_BYTES, 9 * SUB_BLOCK_BYTES)
        released = asyncio.Event()
        origin.inject(lambda call: call.purpose is Purpose.READAHEAD, Hold(released), times=None)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK) as cache:
            reader = await cache.open_range(version, wanted)
            await until(lambda: origin.count() == 9)
            released.set()
            assert await take(reader) == content_of(origin, version, wanted)
            await cache.settle()
            assert fetched_bytes(origin) == wanted.length

    asyncio.run(scenario())


def test_a_block_on_its_way_is_shared_by_small_reads(tmp_path: Path) -> None:
    """Who wants a few bytes of a block that is being filled waits for them there."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK) as cache:
            filling = await cache.open_range(version, span(0, BLOCK))
            assert await read(cache, version, span(3 * MIB, KIB)) == content_of(origin, version, span(3 * MIB, KIB))
            assert await take(filling) == content_of(origin, version)
            assert origin.count() == 1

    asyncio.run(scenario())


def test_warming_up_brings_whole_blocks(tmp_path: Path) -> None:
    """What sub-blocks hold of a block does not make it warm."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 2 * BLOCK)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK) as cache:
            await read(cache, version, span(MIB, KIB))
            for piece in cache.pieces(version, "default"):
                assert await cache.fetch(version, piece, slot="default", purpose=Purpose.WARM) == (BLOCK, True)

    asyncio.run(scenario())


def test_random_ranges_of_any_size_are_right(tmp_path: Path) -> None:
    """Sub-blocks, blocks and fills in any mixture give exactly the object's bytes."""
    rng = random.Random(7)

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 5 * BLOCK + 333_333)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=BLOCK, capacity_bytes=256 * MIB) as cache:

            async def one() -> None:
                first = rng.randrange(version.size_bytes)
                length = min(int(2 ** rng.uniform(0, 23)), version.size_bytes - first)
                assert await read(cache, version, span(first, length)) == content_of(
                    origin, version, span(first, length)
                )

            for _ in range(20):
                await asyncio.gather(*(one() for _ in range(8)))
            await cache.settle()

    asyncio.run(scenario())


def test_a_first_look_is_a_patch_only_where_little_is_asked() -> None:
    """The whole object, a range to the end and large ranges begin with a block; small blocks have no sub-blocks."""
    block = 8 * MIB
    assert first_fetched(0, None, block) == span(0, block)
    assert first_fetched(block + 300 * KIB, block + 301 * KIB, block) == span(block + 256 * KIB, SUB_BLOCK_BYTES)
    assert first_fetched(block + 5, block + MIB + 4, block) == span(block, block)
    assert first_fetched(block + 6 * MIB, block + 7 * MIB, block) == span(block + 6 * MIB, SUB_BLOCK_BYTES)
    assert first_fetched(70 * KIB, 71 * KIB, 64 * KIB) == span(64 * KIB, 64 * KIB)
