"""Reading ranges: what is asked of the origin, what comes from the disk, and when bytes begin to flow."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.blocks.plan import SUB_BLOCK_BYTES, first_fetched
from gateway.blocks.reader import RangeReader
from gateway.core.errors import OriginAnswered, OriginUnreachable
from gateway.core.model import ByteRange, FileSpan, ObjectKey, ObjectVersion
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix, Slots
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    BUCKET,
    KIB,
    MIB,
    TestClock,
    block_files,
    by_last_use,
    content_of,
    make_origin,
    open_cache,
    partial_files,
    read,
    stored,
    take,
    whole,
)
from tests.support.counting import counted
from tests.support.descriptors import open_descriptors
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Hold, Unreachable, on
from tests.support.slots import Slot
from tests.support.waiting import until

GET = on(Operation.GET_OBJECT)


async def test_a_second_read_comes_from_disk(tmp_path: Path) -> None:
    """What was read once is not asked of the origin again, and the reader is told so."""
    origin = make_origin()
    version = stored(origin, "a", 1_000_000)
    async with open_cache(tmp_path / "c", origin) as cache:
        first = await cache.open_range(version, whole(version))
        assert (first.outcome, await take(first)) == ("miss", content_of(origin, version))
        await cache.settle()
        asked = origin.count()
        second = await cache.open_range(version, whole(version))
        assert (second.outcome, await take(second)) == ("hit", content_of(origin, version))
        assert origin.count() == asked == 4
    assert (
        counted(metrics.CACHE_MISS_BYTES),
        counted(metrics.CACHE_HIT_BYTES),
        counted(metrics.CACHE_FILLS, outcome="filled"),
    ) == (1_000_000, 1_000_000, 4)


async def test_a_partly_cached_range_fetches_only_what_is_missing(tmp_path: Path) -> None:
    """A range with some blocks on disk is `partial`, and only the missing blocks are asked for."""
    origin = make_origin()
    version = stored(origin, "a", 4 * BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await read(cache, version, ByteRange(BLOCK, 2 * BLOCK - 1))
        await cache.settle()
        reader = await cache.open_range(version, ByteRange(10, 3 * BLOCK - 1))
        assert reader.outcome == "partial"
        assert await take(reader) == content_of(origin, version, ByteRange(10, 3 * BLOCK - 1))
        asked = sorted(call.headers["range"] for call in origin.calls)
        assert asked == sorted(f"bytes={n * BLOCK}-{(n + 1) * BLOCK - 1}" for n in (0, 1, 2))


@pytest.mark.slow
@given(data=st.data(), size=st.integers(1, 5 * BLOCK))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_gives_exactly_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int
) -> None:
    """Whatever range, cold or warm: exactly the object's bytes."""
    ranges = data.draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).map(sorted), min_size=1, max_size=4)
    )

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", size)
        async with open_cache(tmp_path_factory.mktemp("c"), origin, block_size_bytes=128 * KIB) as cache:
            for first, last in ranges:
                asked = ByteRange(first, last)
                assert await read(cache, version, asked) == content_of(origin, version, asked)

    asyncio.run(scenario())


async def test_warm_bytes_leave_as_one_span_per_block(tmp_path: Path) -> None:
    """Verified bytes in memory never pass through the interpreter: one span for each block's share of the range."""
    origin = make_origin()
    version = stored(origin, "a", 3 * BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await read(cache, version)
        await cache.settle()
        await read(cache, version)  # what has just been filled is verified by its first reader
        spans: list[FileSpan] = []
        reader = await cache.open_range(version, ByteRange(100, 3 * BLOCK - 101))
        await take(reader, spans)
        assert [span.count for span in spans] == [BLOCK - 100, BLOCK, BLOCK - 100]


async def test_a_version_that_is_gone_is_the_callers_to_know(tmp_path: Path) -> None:
    """412 from the origin reaches the caller before a reply has begun, and leaves nothing on disk."""
    origin = make_origin()
    version = stored(origin, "a", BLOCK)
    stored(origin, "a", BLOCK + 1, seed=1)
    async with open_cache(tmp_path / "c", origin) as cache:
        with pytest.raises(OriginAnswered) as caught:
            await cache.open_range(version, whole(version))
        assert caught.value.status == 412
        assert b"PreconditionFailed" in caught.value.body
        await cache.settle()
        assert cache.usage().used_bytes == 0
    assert partial_files(tmp_path / "c") == block_files(tmp_path / "c") == []


async def test_versions_never_mix(tmp_path: Path) -> None:
    """Blocks of an old version are not served for a new one, nor the other way round."""
    origin = make_origin()
    old = stored(origin, "a", 2 * BLOCK, seed=1)
    async with open_cache(tmp_path / "c", origin) as cache:
        await read(cache, old)
        new = ObjectVersion(old.key, origin.put(BUCKET, "a", b"n" * 2 * BLOCK), 2 * BLOCK)
        assert await read(cache, new) == b"n" * 2 * BLOCK
        await cache.settle()
        await cache.invalidate(ObjectKey(BUCKET, "a"))
        assert cache.usage().blocks == 0
    assert block_files(tmp_path / "c") == []


async def test_an_unreachable_origin_is_told_and_blocks_stay_readable(tmp_path: Path) -> None:
    """With the origin away, what is on disk is served and a miss says why it cannot be."""
    origin = make_origin()
    here, away = stored(origin, "here", BLOCK), stored(origin, "away", BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await read(cache, here)
        await cache.settle()
        origin.inject(GET, Unreachable(), times=None)
        assert await read(cache, here) == content_of(origin, here)
        with pytest.raises(OriginUnreachable):
            await cache.open_range(away, whole(away))


async def test_a_reader_of_an_evicted_block_goes_on(tmp_path: Path) -> None:
    """Eviction unlinks; who reads the file reads on."""
    origin = make_origin()
    version, other = stored(origin, "a", BLOCK), stored(origin, "b", BLOCK)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=BLOCK + 4096) as cache:
        await read(cache, version)
        await cache.settle()
        reader = await cache.open_range(version, whole(version))
        await read(cache, other)
        await cache.settle()
        assert reader.outcome == "hit"
        assert await take(reader) == content_of(origin, version)
        assert [path.name[:64] for path in block_files(tmp_path / "c")] == [
            record.block_id.hex() for record in cache._dependencies.directory.index.blocks()
        ]


async def test_descriptors_go_back_however_a_reader_ends(tmp_path: Path) -> None:
    """Read to the end, closed half-way, never begun, cancelled: no descriptor stays open."""
    origin = make_origin()
    version = stored(origin, "a", 4 * BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await read(cache, version)
        await cache.settle()
        before = len(open_descriptors())
        await read(cache, version)
        await _read_one_piece(await cache.open_range(version, whole(version)))
        await (await cache.open_range(version, whole(version))).aclose()
        unread = (await cache.open_range(version, whole(version))).body()
        await unread.aclose()
        del unread
        task = asyncio.create_task(read(cache, version))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(open_descriptors()) == before


async def _read_one_piece(reader: RangeReader) -> None:
    async with aclosing(reader.body()) as body:
        await anext(body)


async def test_uses_reach_the_index_in_batches(tmp_path: Path) -> None:
    """A hit writes nothing; within the flush interval the order of use is in the index."""
    origin, clock = make_origin(), TestClock()
    one, two = stored(origin, "1", BLOCK), stored(origin, "2", BLOCK)
    slots = Slots([Slot("default", Prefix(""), eviction="lru")])
    async with open_cache(tmp_path / "c", origin, clock=clock, slots=slots) as cache:
        await read(cache, one)
        await cache.settle()
        await read(cache, two)
        await cache.settle()
        index = cache._dependencies.directory.index
        oldest = by_last_use(index)[0]
        await read(cache, one)
        assert by_last_use(index)[0] == oldest
        clock.advance(1.0)
        await until(lambda: by_last_use(index)[0] != oldest)


async def test_a_range_outside_of_the_object_is_the_callers_mistake(tmp_path: Path) -> None:
    """Ranges are clamped by whoever knows HTTP; here a wrong one is refused."""
    origin = make_origin()
    version = stored(origin, "a", MIB)
    async with open_cache(tmp_path / "c", origin) as cache:
        with pytest.raises(ValueError, match="outside"):
            await cache.open_range(version, ByteRange(0, MIB))


async def test_a_block_that_has_arrived_is_a_hit_before_it_is_published(tmp_path: Path) -> None:
    """A reader that comes right behind the first one is told the truth: its bytes come from this node."""
    origin = make_origin()
    version = stored(origin, "a", 100_000)
    async with open_cache(tmp_path / "c", origin) as cache:
        await take(await cache.open_range(version, whole(version)))
        second = await cache.open_range(version, whole(version))
        assert (second.outcome, await take(second)) == ("hit", content_of(origin, version))
    assert (counted(metrics.CACHE_MISS_BYTES), counted(metrics.CACHE_HIT_BYTES)) == (100_000, 100_000)


LARGE_BLOCK = 4 * MIB
PATCHES = LARGE_BLOCK // SUB_BLOCK_BYTES


def fetched_bytes(origin: MemoryOrigin) -> int:
    ranges = [call.headers["range"].removeprefix("bytes=").split("-") for call in origin.calls]
    return sum(int(last) - int(first) + 1 for first, last in ranges)


def span(first: int, length: int) -> ByteRange:
    return ByteRange(first, first + length - 1)


@pytest.mark.parametrize("seed", range(5))
async def test_a_random_touch_costs_little(tmp_path: Path, seed: int) -> None:
    """Cold 4 KiB reads here and there: at most 256 KiB from the origin for each, and the second read is a hit."""
    rng = random.Random(seed)
    origin = make_origin()
    version = stored(origin, "a", 40 * LARGE_BLOCK)
    places = [number * 2 * LARGE_BLOCK + rng.randrange(2 * LARGE_BLOCK - 4 * KIB) for number in range(20)]
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK) as cache:
        for place in places:
            assert await read(cache, version, span(place, 4 * KIB)) == content_of(origin, version, span(place, 4 * KIB))
        await cache.settle()
        assert fetched_bytes(origin) <= len(places) * 256 * KIB
        asked = origin.count()
        for place in places:
            reader = await cache.open_range(version, span(place, 4 * KIB))
            assert reader.outcome == "hit"
            assert await take(reader) == content_of(origin, version, span(place, 4 * KIB))
        assert origin.count() == asked


async def test_a_read_over_several_patches_is_fetched_at_once(tmp_path: Path) -> None:
    """Its sub-blocks are all on their way when the first one is; together they are what was asked for."""
    origin = make_origin()
    version = stored(origin, "a", 4 * LARGE_BLOCK)
    wanted = span(LARGE_BLOCK + 7 * SUB_BLOCK_BYTES - 5, 2 * SUB_BLOCK_BYTES)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK) as cache:
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


async def test_touches_that_grow_dense_bring_the_block(tmp_path: Path) -> None:
    """When a quarter of a block is there in sub-blocks, the next touch fetches it, and all of it is a hit then."""
    origin = make_origin()
    version = stored(origin, "a", 4 * LARGE_BLOCK)
    touches = [span(LARGE_BLOCK + number * SUB_BLOCK_BYTES, KIB) for number in range(2, PATCHES, 3)]
    random.Random(1).shuffle(touches)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK) as cache:
        for touch in touches:
            await read(cache, version, touch)
            await cache.settle()
        assert fetched_bytes(origin) == PATCHES // 4 * SUB_BLOCK_BYTES + LARGE_BLOCK
        reader = await cache.open_range(version, span(LARGE_BLOCK, LARGE_BLOCK))
        assert reader.outcome == "hit"
        assert await take(reader) == content_of(origin, version, span(LARGE_BLOCK, LARGE_BLOCK))


async def test_small_reads_one_after_another_bring_blocks(tmp_path: Path) -> None:
    """A sequential reader of small ranges soon reads from whole blocks, each asked for once, the next ones ahead."""
    origin = make_origin()
    version = stored(origin, "a", 6 * LARGE_BLOCK)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK) as cache:
        for first in range(0, version.size_bytes, 64 * KIB):
            piece = span(first, 64 * KIB)
            assert await read(cache, version, piece) == content_of(origin, version, piece)
            await cache.settle()
        assert fetched_bytes(origin) == version.size_bytes + 2 * SUB_BLOCK_BYTES
        assert origin.count() == 6 + 2


@pytest.mark.parametrize(
    ("skipped", "length"),
    [(0, LARGE_BLOCK // 8), (LARGE_BLOCK // 8, LARGE_BLOCK // 8), (LARGE_BLOCK // 2, LARGE_BLOCK // 2)],
)
async def test_who_wants_much_of_a_block_gets_the_block(tmp_path: Path, skipped: int, length: int) -> None:
    """An eighth of a block and more is one request for the block, where not more than that lies before it."""
    origin = make_origin()
    version = stored(origin, "a", 4 * LARGE_BLOCK)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK) as cache:
        await read(cache, version, span(LARGE_BLOCK + skipped, length))
        await cache.settle()
        assert [call.headers["range"] for call in origin.calls] == [f"bytes={LARGE_BLOCK}-{2 * LARGE_BLOCK - 1}"]


async def test_a_range_deep_in_a_block_does_not_wait_for_what_lies_before_it(tmp_path: Path) -> None:
    """Its sub-blocks are asked for, all at once, and nothing before them."""
    origin = make_origin()
    version = stored(origin, "a", 4 * LARGE_BLOCK)
    wanted = span(LARGE_BLOCK + 20 * SUB_BLOCK_BYTES, 9 * SUB_BLOCK_BYTES)
    released = asyncio.Event()
    origin.inject(lambda call: call.purpose is Purpose.READAHEAD, Hold(released), times=None)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK) as cache:
        reader = await cache.open_range(version, wanted)
        await until(lambda: origin.count() == 9)
        released.set()
        assert await take(reader) == content_of(origin, version, wanted)
        await cache.settle()
        assert fetched_bytes(origin) == wanted.length


async def test_a_block_on_its_way_is_shared_by_small_reads(tmp_path: Path) -> None:
    """Who wants a few bytes of a block that is being filled waits for them there."""
    origin = make_origin()
    version = stored(origin, "a", LARGE_BLOCK)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK) as cache:
        filling = await cache.open_range(version, span(0, LARGE_BLOCK))
        assert await read(cache, version, span(3 * MIB, KIB)) == content_of(origin, version, span(3 * MIB, KIB))
        assert await take(filling) == content_of(origin, version)
        assert origin.count() == 1


async def test_warming_up_brings_whole_blocks(tmp_path: Path) -> None:
    """What sub-blocks hold of a block does not make it warm."""
    origin = make_origin()
    version = stored(origin, "a", 2 * LARGE_BLOCK)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK) as cache:
        await read(cache, version, span(MIB, KIB))
        for piece in cache.pieces(version, "default"):
            assert await cache.fetch(version, piece, slot="default", purpose=Purpose.WARM) == (LARGE_BLOCK, True)


async def test_random_ranges_of_any_size_are_right(tmp_path: Path) -> None:
    """Sub-blocks, blocks and fills in any mixture give exactly the object's bytes."""
    rng = random.Random(7)
    origin = make_origin()
    version = stored(origin, "a", 5 * LARGE_BLOCK + 333_333)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=LARGE_BLOCK, capacity_bytes=256 * MIB) as cache:

        async def one() -> None:
            first = rng.randrange(version.size_bytes)
            length = min(int(2 ** rng.uniform(0, 23)), version.size_bytes - first)
            assert await read(cache, version, span(first, length)) == content_of(origin, version, span(first, length))

        for _ in range(20):
            await asyncio.gather(*(one() for _ in range(8)))
        await cache.settle()


def test_a_first_look_is_a_patch_only_where_little_is_asked() -> None:
    """The whole object, a range to the end and large ranges begin with a block; small blocks have no sub-blocks."""
    block = 8 * MIB
    assert first_fetched(0, None, block) == span(0, block)
    assert first_fetched(block + 300 * KIB, block + 301 * KIB, block) == span(block + 256 * KIB, SUB_BLOCK_BYTES)
    assert first_fetched(block + 5, block + MIB + 4, block) == span(block, block)
    assert first_fetched(block + 6 * MIB, block + 7 * MIB, block) == span(block + 6 * MIB, SUB_BLOCK_BYTES)
    assert first_fetched(70 * KIB, 71 * KIB, 64 * KIB) == span(64 * KIB, 64 * KIB)
