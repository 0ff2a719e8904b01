"""The blocks behind the one in hand are read and verified before the reader comes to them: bounded, and unnoticed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks import spans
from gateway.blocks.block_file import BlockFile
from gateway.blocks.cache import BlockCache
from gateway.blocks.dependencies import PROCESS_AHEAD_BYTES
from gateway.blocks.layout import BlockIds, block_at
from gateway.blocks.reader import REFILLS_MAX
from gateway.blocks.spans import BlocksAhead
from gateway.core.model import ByteRange, ObjectVersion
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    block_files,
    bytes_of,
    content_of,
    make_origin,
    open_cache,
    read,
    stored,
    take,
    until,
    whole,
)
from tests.support.counting import counted
from tests.support.memory_origin import MemoryOrigin

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


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


def test_the_next_block_is_verified_while_the_client_has_this_one(tmp_path: Path, verified: list[str]) -> None:
    """Every block is verified once, and the next one without being asked for."""

    async def scenario() -> None:
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

    run(scenario)


def test_a_client_that_takes_its_time_has_one_block_read_for_it(tmp_path: Path) -> None:
    """Of many such clients, each has little in the page cache that it has not come to."""

    async def scenario() -> None:
        async with unverified(tmp_path) as (cache, _, version):
            reader = await cache.open_range(version, whole(version))
            async with aclosing(reader.body()) as body:
                for number in range(BLOCKS - 1):
                    await anext(body)
                    await until(lambda number=number: is_intact(cache, version, number + 1))  # type: ignore[misc]
                    await until(lambda: all(piece.verifying.done() for piece in ahead_of(reader)._pieces.values()))  # type: ignore[union-attr]
                    assert number + 2 == BLOCKS or not is_intact(cache, version, number + 2)
            assert room(cache) == PROCESS_AHEAD_BYTES

    run(scenario)


def test_a_reader_that_had_to_wait_has_more_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is slower than the client gets more to do at a time, up to a bound."""
    monkeypatch.setattr(spans, "READER_AHEAD_BYTES", 3 * BLOCK)
    gate = threading.Event()
    verify = BlockFile.verify_unread

    def gated(file: BlockFile, *arguments: Any, **keywords: Any) -> None:
        gate.wait()
        verify(file, *arguments, **keywords)

    async def scenario() -> None:
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

    run(scenario)


def test_a_block_found_damaged_ahead_is_read_again_from_the_origin(tmp_path: Path) -> None:
    """1.4 Not one byte of it is sent, and the others are."""

    async def scenario() -> None:
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

    run(scenario)


def test_a_block_whose_file_is_gone_is_read_again_from_the_origin(tmp_path: Path) -> None:
    """What could not be opened ahead is found out where the reader comes to it."""

    async def scenario() -> None:
        async with unverified(tmp_path) as (cache, origin, version):
            for path in block_files(tmp_path)[1:]:
                path.unlink()
            assert await read(cache, version) == content_of(origin, version)

    run(scenario)


def test_without_room_nothing_is_read_ahead(tmp_path: Path) -> None:
    """However many readers there are, what is read for them before they come to it is bounded."""

    async def scenario() -> None:
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

    run(scenario)


def test_a_client_that_leaves_gives_back_the_room(tmp_path: Path) -> None:
    """Nothing is read on for it, and the room is whole again."""

    async def scenario() -> None:
        async with unverified(tmp_path) as (cache, _, version):
            reader = await cache.open_range(version, whole(version))
            async with aclosing(reader.body()) as body:
                await anext(body)
                [piece] = ahead_of(reader)._pieces.values()
                assert room(cache) < PROCESS_AHEAD_BYTES
            assert not piece.has_reader()
            assert room(cache) == PROCESS_AHEAD_BYTES

    run(scenario)


def test_a_range_that_ends_early_has_nothing_read_behind_its_end(tmp_path: Path) -> None:
    """Blocks behind the range are nobody's."""

    async def scenario() -> None:
        async with unverified(tmp_path) as (cache, origin, version):
            byte_range = ByteRange(10, BLOCK + 10)
            reader = await cache.open_range(version, byte_range)
            assert await take(reader) == content_of(origin, version, byte_range)
            assert not is_intact(cache, version, 2)

    run(scenario)


def test_what_was_just_fetched_for_the_reader_is_not_verified_ahead(tmp_path: Path, verified: list[str]) -> None:
    """It is sent as it was written: only the one block that was there is."""

    async def scenario() -> None:
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

    run(scenario)
