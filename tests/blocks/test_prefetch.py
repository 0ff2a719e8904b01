"""Readahead: the window grows with a run, over requests and processes, and random reads cause none."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks import plan, spans
from gateway.blocks.block_file import BlockFile, BlockLease, ChunkChecksums, lease_of
from gateway.blocks.cache import BlockCache
from gateway.blocks.dependencies import PROCESS_AHEAD_BYTES
from gateway.blocks.directory import DiskThreads
from gateway.blocks.layout import CHUNK_BYTES, BlockIds, Extent, block_at
from gateway.blocks.page_cache import Residency
from gateway.blocks.plan import mark_ahead, window_blocks_max
from gateway.blocks.reader import REFILLS_MAX
from gateway.blocks.spans import BlocksAhead, PieceVerifier
from gateway.core.errors import BlockDamaged
from gateway.core.model import ByteRange, ObjectVersion
from gateway.origin.client import Purpose
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    block_files,
    bytes_of,
    content_of,
    make_origin,
    open_cache,
    read,
    stored,
    take,
    whole,
)
from tests.support.counting import counted
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Hold
from tests.support.waiting import until


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


async def test_the_window_of_a_long_range_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole object begins with a few blocks and has more on their way with every byte read, up to the setting."""
    monkeypatch.setattr(plan, "FIRST_WINDOW_BYTES", 4 * BLOCK)
    monkeypatch.setattr(plan, "GROWTH", 2)
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


async def test_reading_block_after_block_runs_ahead(tmp_path: Path) -> None:
    """One request after another for neighbouring blocks: soon each finds its block there, and the run doubles."""
    origin = make_origin()
    version = stored(origin, "a", 40 * BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        outcomes = [await read_block(cache, version, number) for number in range(40)]
        assert outcomes == ["miss"] * 3 + ["hit"] * 37
        assert sorted(blocks_asked(origin)) == list(range(40))
        assert blocks_asked(origin, Purpose.LIVE) == [0, 1, 2]


async def test_parts_read_at_once_run_ahead(tmp_path: Path) -> None:
    """A client that reads parts side by side, in whatever order they arrive, has the next ones on their way."""
    origin = make_origin()
    version = stored(origin, "a", 24 * BLOCK)
    async with open_cache(tmp_path / "c", origin, readahead_bytes=6 * BLOCK) as cache:
        first = [5, 1, 0, 7, 3, 2, 6, 4]
        await asyncio.gather(*(read_block(cache, version, number) for number in first))
        await read_block(cache, version, 8)
        assert set(blocks_asked(origin)) == set(range(15))


async def test_a_run_is_seen_over_processes(tmp_path: Path) -> None:
    """Neighbouring blocks that another worker has read count for the run."""
    origin = make_origin()
    version = stored(origin, "a", 12 * BLOCK)
    async with open_cache(tmp_path / "c", origin, worker=0, readahead_bytes=0) as one:
        for number in range(4):
            await read_block(one, version, number)
    async with open_cache(tmp_path / "c", origin, worker=1) as two:
        await read_block(two, version, 4)
    assert blocks_asked(origin) == list(range(9))


async def test_reading_what_is_there_fetches_nothing(tmp_path: Path) -> None:
    """A run of cached blocks is no reason to fetch what nobody asks for."""
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_random_reads_waste_nothing(tmp_path: Path, seed: int) -> None:
    """Blocks read in random order, far from each other, bring no block that was not asked for."""
    origin = make_origin()
    version = stored(origin, "a", 256 * BLOCK)
    numbers = [3 * number for number in range(80)]
    random.Random(seed).shuffle(numbers)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=128 * MIB) as cache:
        for number in numbers:
            await read_block(cache, version, number)
    assert blocks_asked(origin) == numbers


async def test_a_small_slot_is_not_flooded(tmp_path: Path) -> None:
    """Readahead never fetches more than a quarter of what the slot can have: it would push out what comes next."""
    origin = make_origin()
    version = stored(origin, "a", 64 * BLOCK)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=8 * (BLOCK + 4 * KIB)) as cache:
        assert await read(cache, version) == content_of(origin, version)
        assert blocks_asked(origin) == list(range(64))


@pytest.mark.slow
@pytest.mark.parametrize("length", [64 * BLOCK, 3 * BLOCK])
async def test_what_was_fetched_ahead_stays_until_it_is_read(tmp_path: Path, length: int) -> None:
    """However slow the reader: that it comes to a block fetched for it is no sign that blocks come back soon."""
    origin = make_origin()
    version = stored(origin, "a", 63 * BLOCK)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=8 * (BLOCK + 4 * KIB)) as cache:
        for first in range(0, version.size_bytes, length):
            reader = await cache.open_range(version, ByteRange(first, min(first + length, version.size_bytes) - 1))
            async with aclosing(reader.body()) as body:
                async for _ in body:
                    await cache.settle()
        assert blocks_asked(origin) == list(range(63))


async def test_readers_who_wait_go_first(tmp_path: Path) -> None:
    """However long the window, half of the fills are left to those who wait for a first byte."""
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


BLOCKS = 6
SIZE = BLOCKS * BLOCK - 1000


@asynccontextmanager
async def unverified(directory: Path, **settings: Any) -> AsyncIterator[tuple[BlockCache, MemoryOrigin, ObjectVersion]]:
    """A cache of which another process has filled an object's blocks: none of them is open or verified here."""
    origin = make_origin()
    version = stored(origin, "k", SIZE)
    async with open_cache(directory, origin) as cache:
        await read(cache, version)
    async with open_cache(directory, origin, **settings) as cache:
        yield cache, origin, version


def is_intact(cache: BlockCache, version: ObjectVersion, number: int) -> bool:
    tools = cache._dependencies
    extent = tools.directory.index.lookup(block_at(version, number, BLOCK, BlockIds(version)).id)
    assert extent is not None
    file = tools.open_files.get(extent.file)
    if file is None:
        return False
    with file:
        return file.file.intact(extent, 0, extent.length)


def room(cache: BlockCache) -> int:
    return cache._dependencies.ahead_room.left_bytes


def ahead_of(reader: Any) -> BlocksAhead:
    ahead: BlocksAhead = reader._blocks_ahead
    return ahead


async def test_the_next_block_is_verified_while_the_client_has_this_one(tmp_path: Path, verified: list[str]) -> None:
    """Every block is verified once, and the next one without being asked for."""
    async with unverified(tmp_path) as (cache, origin, version):
        verified.clear()
        reader = await cache.open_range(version, whole(version))
        async with aclosing(reader.body()) as body:
            taken = bytes_of(await anext(body))
            await until(lambda: is_intact(cache, version, 1))
            async for piece in body:
                taken += bytes_of(piece)
        assert taken == content_of(origin, version)
        assert len(verified) == len(set(verified)) == BLOCKS
        assert room(cache) == PROCESS_AHEAD_BYTES


async def test_a_client_that_takes_its_time_has_one_block_read_for_it(tmp_path: Path) -> None:
    """Of many such clients, each has little in the page cache that it has not come to."""
    async with unverified(tmp_path) as (cache, _, version):
        reader = await cache.open_range(version, whole(version))
        async with aclosing(reader.body()) as body:
            for number in range(BLOCKS - 1):
                await anext(body)
                await until(lambda number=number: is_intact(cache, version, number + 1))  # type: ignore[misc]
                await until(lambda: all(piece.verifying.done() for piece in ahead_of(reader)._pieces.values()))  # type: ignore[union-attr]
                assert number + 2 == BLOCKS or not is_intact(cache, version, number + 2)
        assert room(cache) == PROCESS_AHEAD_BYTES


async def test_a_reader_that_had_to_wait_has_more_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is slower than the client gets more to do at a time, up to a bound."""
    monkeypatch.setattr(spans, "READER_AHEAD_BYTES", 3 * BLOCK)
    gate = threading.Event()
    verify = BlockFile.verify_unread

    def gated(file: BlockFile, *arguments: Any, **keywords: Any) -> None:
        gate.wait()
        verify(file, *arguments, **keywords)

    async with unverified(tmp_path) as (cache, origin, version):
        reader = await cache.open_range(version, whole(version))
        async with aclosing(reader.body()) as body:
            taken = bytes_of(await anext(body))
            await until(lambda: is_intact(cache, version, 1))
            taken += bytes_of(await anext(body))
            await until(lambda: is_intact(cache, version, 2))
            monkeypatch.setattr(BlockFile, "verify_unread", gated)
            taken += bytes_of(await anext(body))  # of block 2; what block 3 needs waits at the gate
            assert len(ahead_of(reader)._pieces) == 1
            coming = asyncio.ensure_future(anext(body))
            await until(lambda: not ahead_of(reader)._pieces)  # the reader waits for block 3
            gate.set()
            taken += bytes_of(await coming)
            assert ahead_of(reader)._depth == 2
            async for piece in body:
                taken += bytes_of(piece)
                assert ahead_of(reader)._depth <= 3
        assert taken == content_of(origin, version)


async def test_a_block_found_damaged_ahead_is_read_again_from_the_origin(tmp_path: Path) -> None:
    """1.4 Not one byte of it is sent, and the others are."""
    async with unverified(tmp_path) as (cache, origin, version):
        for path in block_files(tmp_path)[:REFILLS_MAX]:
            with path.open("r+b") as file:
                file.seek(-7, 2)
                file.write(b"damaged")
        assert await read(cache, version) == content_of(origin, version)
        assert counted(metrics.CACHE_DAMAGED) == REFILLS_MAX
        assert await read(cache, version) == content_of(origin, version)
        assert counted(metrics.CACHE_DAMAGED) == REFILLS_MAX
        assert room(cache) == PROCESS_AHEAD_BYTES


async def test_a_block_whose_file_is_gone_is_read_again_from_the_origin(tmp_path: Path) -> None:
    """What could not be opened ahead is found out where the reader comes to it."""
    async with unverified(tmp_path) as (cache, origin, version):
        for path in block_files(tmp_path)[1:]:
            path.unlink()
        assert await read(cache, version) == content_of(origin, version)


async def test_without_room_nothing_is_read_ahead(tmp_path: Path) -> None:
    """However many readers there are, what is read for them before they come to it is bounded."""
    async with unverified(tmp_path) as (cache, origin, version):
        cache._dependencies.ahead_room.left_bytes = BLOCK - 1
        reader = await cache.open_range(version, whole(version))
        async with aclosing(reader.body()) as body:
            taken = bytes_of(await anext(body))
            assert not ahead_of(reader)._pieces
            async for piece in body:
                taken += bytes_of(piece)
        assert taken == content_of(origin, version)
        assert room(cache) == BLOCK - 1


async def test_a_client_that_leaves_gives_back_the_room(tmp_path: Path) -> None:
    """Nothing is read on for it, and the room is whole again."""
    async with unverified(tmp_path) as (cache, _, version):
        reader = await cache.open_range(version, whole(version))
        async with aclosing(reader.body()) as body:
            await anext(body)
            [piece] = ahead_of(reader)._pieces.values()
            assert room(cache) < PROCESS_AHEAD_BYTES
        assert not piece.has_reader()
        assert room(cache) == PROCESS_AHEAD_BYTES


async def test_a_range_that_ends_early_has_nothing_read_behind_its_end(tmp_path: Path) -> None:
    """Blocks behind the range are nobody's."""
    async with unverified(tmp_path) as (cache, origin, version):
        byte_range = ByteRange(10, BLOCK + 10)
        reader = await cache.open_range(version, byte_range)
        assert await take(reader) == content_of(origin, version, byte_range)
        assert not is_intact(cache, version, 2)


async def test_what_was_just_fetched_for_the_reader_is_not_verified_ahead(tmp_path: Path, verified: list[str]) -> None:
    """It is sent as it was written: only the one block that was there is."""
    origin = make_origin()
    version = stored(origin, "k", SIZE)
    async with open_cache(tmp_path, origin) as cache:
        await read(cache, version, ByteRange(0, BLOCK - 1))
    verified.clear()
    async with open_cache(tmp_path, origin) as cache:
        reader = await cache.open_range(version, whole(version))
        async with aclosing(reader.body()) as body:
            taken = bytes_of(await anext(body))
            await until(lambda: len(block_files(tmp_path)) == BLOCKS)
            async for piece in body:
                taken += bytes_of(piece)
                assert not ahead_of(reader)._pieces
        assert taken == content_of(origin, version)


async def test_the_first_reader_of_a_block_fetched_ahead_gets_it_as_it_was_written(
    tmp_path: Path, verified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it waits to be written to the device. Whoever comes after it has it checked, for all that follow."""
    monkeypatch.setattr(Residency, "unwritten", lambda *_: True)
    origin = make_origin()
    version = stored(origin, "a", 40 * BLOCK)
    async with open_cache(tmp_path, origin) as cache:
        for number in range(8):
            await read_block(cache, version, number)
        wanted, verified[:] = ByteRange(8 * BLOCK, 9 * BLOCK - 1), []
        assert await read(cache, version, wanted) == content_of(origin, version, wanted)
        assert not verified
        assert await read(cache, version, wanted) == content_of(origin, version, wanted)
        assert verified


PIECE = 2 * CHUNK_BYTES
LENGTH = 4 * PIECE
CONTENT = os.urandom(LENGTH)


class Bench:
    """A block in a file, and a verifier over it."""

    def __init__(self, path: Path, *, damaged_at: int | None = None) -> None:
        checksums = ChunkChecksums(LENGTH)
        checksums.update(CONTENT)
        content = bytearray(CONTENT)
        if damaged_at is not None:
            content[damaged_at] ^= 1
        path.write_bytes(content)
        self.file = lease_of(os.open(path, os.O_RDONLY))
        self.threads = DiskThreads(2)
        self.extent = Extent("f", 0, LENGTH, bytes(checksums.packed))
        self.verifier = PieceVerifier(self.file, self.extent, self.threads)

    def intact(self, position: int, count: int) -> bool:
        return self.file.file.intact(self.extent, position, count)

    def close(self) -> None:
        self.verifier.stop()
        self.threads.shut_down()
        self.file.close()


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions that the disk threads verified, in order."""
    seen: list[int] = []
    verify = BlockFile.verify

    def noting(file: BlockFile, extent: Extent, position: int, count: int) -> None:
        seen.append(position)
        verify(file, extent, position, count)

    monkeypatch.setattr(BlockFile, "verify", noting)
    return seen


def on_bench(bench: Bench, steps: Callable[[Bench], Any]) -> None:
    async def scenario() -> None:
        try:
            await steps(bench)
        finally:
            bench.close()

    asyncio.run(scenario())


def test_what_was_begun_ahead_is_not_done_twice(tmp_path: Path, looked_at: list[int]) -> None:
    """Every piece is looked at once, and only what was asked for counts as verified."""

    async def steps(bench: Bench) -> None:
        for position in range(0, LENGTH, PIECE):
            left = LENGTH - position - PIECE
            await bench.verifier.verify(position, PIECE, reads_on=True)
            assert bench.intact(position, PIECE)
            assert not left or not bench.intact(position + PIECE, 1)
            if left:
                bench.verifier.resume(position + PIECE, PIECE, reads_on=True)

    on_bench(Bench(tmp_path / "f"), steps)
    assert looked_at == list(range(0, LENGTH, PIECE))


def test_a_reader_that_goes_elsewhere_gets_what_it_asks_for(tmp_path: Path, looked_at: list[int]) -> None:
    """What was begun for another place does not stand in for it."""

    async def steps(bench: Bench) -> None:
        bench.verifier.resume(PIECE, PIECE, reads_on=False)
        await bench.verifier.verify(2 * PIECE, PIECE, reads_on=False)
        assert bench.intact(2 * PIECE, PIECE)

    on_bench(Bench(tmp_path / "f"), steps)
    assert sorted(looked_at) == [PIECE, 2 * PIECE]


def test_what_is_verified_and_in_memory_is_not_begun(tmp_path: Path, looked_at: list[int]) -> None:
    """A warm block costs nothing ahead."""

    async def steps(bench: Bench) -> None:
        bench.file.file.verify(bench.extent, 0, LENGTH)
        looked_at.clear()
        bench.verifier.resume(PIECE, PIECE, reads_on=False)

    on_bench(Bench(tmp_path / "f"), steps)
    assert looked_at == []


def test_damage_found_ahead_is_raised_where_the_reader_comes_to_it(tmp_path: Path) -> None:
    """Not before: the piece in hand is good."""

    async def steps(bench: Bench) -> None:
        await bench.verifier.verify(0, PIECE, reads_on=True)
        bench.verifier.resume(PIECE, PIECE, reads_on=False)
        with pytest.raises(BlockDamaged):
            await bench.verifier.verify(PIECE, PIECE, reads_on=False)
        assert bench.intact(0, PIECE)
        assert not bench.intact(PIECE, 1)

    on_bench(Bench(tmp_path / "f", damaged_at=PIECE + 7), steps)


def test_damage_that_nobody_comes_to_is_no_failure(tmp_path: Path) -> None:
    """The reader has left: whoever reads the piece finds it out again. Nothing is logged as never looked at."""
    complaints: list[object] = []

    async def steps(bench: Bench) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        bench.verifier.resume(PIECE, PIECE, reads_on=False)
        bench.verifier.stop()
        bench.threads.shut_down()
        for _ in range(3):
            await asyncio.sleep(0)

    on_bench(Bench(tmp_path / "f", damaged_at=PIECE + 7), steps)
    assert complaints == []


@pytest.mark.parametrize("is_verified", [False, True])
def test_it_is_known_whether_anything_had_to_be_verified(tmp_path: Path, is_verified: bool) -> None:
    """So that the blocks behind are verified, too, before the reader comes to them."""

    async def steps(bench: Bench) -> None:
        if is_verified:
            bench.file.file.verify(bench.extent, 0, LENGTH)
        bench.verifier.resume(PIECE, PIECE, reads_on=True)
        assert bench.verifier.has_worked != is_verified

    on_bench(Bench(tmp_path / "f"), steps)


def test_a_piece_that_was_begun_is_not_begun_again(tmp_path: Path, looked_at: list[int]) -> None:
    """A reader that is told of the next piece twice has it verified once."""

    async def steps(bench: Bench) -> None:
        bench.verifier.resume(PIECE, PIECE, reads_on=True)
        bench.verifier.resume(PIECE, PIECE, reads_on=True)
        await bench.verifier.verify(PIECE, PIECE, reads_on=True)

    on_bench(Bench(tmp_path / "f"), steps)
    assert looked_at == [PIECE]


def test_a_reader_that_leaves_at_once_takes_no_file_from_others(tmp_path: Path) -> None:
    """The piece ahead is verified in its own file, or not at all: not in the file that has got the number since."""

    async def steps(bench: Bench) -> None:
        number = bench.file.descriptor
        bench.verifier.resume(PIECE, PIECE, reads_on=False)
        bench.verifier.stop()
        bench.file.close()  # the client has left before the work ahead came to run
        others = [leased_file(tmp_path / f"tenant-{name}") for name in "bcdefgh"]
        for _ in range(3):
            await asyncio.sleep(0)
        bench.threads.shut_down()
        more = [leased_file(tmp_path / f"tenant-{name}") for name in "ijk"]
        numbers = [other.descriptor for other in (*others, *more)]
        assert len(set(numbers)) == len(numbers)
        for name, other in zip("bcdefghijk", (*others, *more), strict=True):
            assert os.pread(other.descriptor, 64, 0) == f"tenant-{name}".encode()
            other.close()
        assert number > 0

    on_bench(Bench(tmp_path / "f"), steps)


def leased_file(path: Path) -> BlockLease:
    path.write_text(path.name)
    return lease_of(os.open(path, os.O_RDONLY))
