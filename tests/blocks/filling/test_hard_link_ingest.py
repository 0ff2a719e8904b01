"""Files that came another way, as staged parts do, become blocks without being copied."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.blocks.block_file import ChunkChecksums
from gateway.blocks.layout import BlockSettings
from gateway.blocks.opening import open_directory
from gateway.blocks.store import BlockStore, IngestedFile, describe
from gateway.core.errors import StoreUnavailable
from gateway.core.model import ByteRange, ObjectVersion
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    KIB,
    block_files,
    content_of,
    drop_page_cache,
    make_origin,
    open_cache,
    read,
    stored,
)
from tests.support.counting import counted
from tests.support.memory_origin import MemoryOrigin


def staged(
    directory: Path, origin: MemoryOrigin, version: ObjectVersion, first: int, stop: int, behind: bytes = b"trailer"
) -> IngestedFile:
    """A part, and `behind` its bytes what is no part of the object."""
    directory.mkdir(exist_ok=True)
    path = directory / f"part-{first}"
    content = content_of(origin, version, ByteRange(first, stop - 1))
    path.write_bytes(content + behind)
    return IngestedFile(path, version, first, len(content))


@pytest.mark.parametrize("part_bytes", [4 * BLOCK, 4 * BLOCK + 1000, 3 * BLOCK + 64 * KIB, 10 * BLOCK])
def test_parts_become_blocks(tmp_path: Path, part_bytes: int) -> None:
    """Every block that lies wholly in a part is served from it, whatever the parts' boundaries; the rest is fetched."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 10 * BLOCK + 100)
        async with open_cache(tmp_path / "c", origin, readahead_bytes=0) as cache:
            entered = 0
            for first in range(0, version.size_bytes, part_bytes):
                part = staged(tmp_path / "s", origin, version, first, min(first + part_bytes, version.size_bytes))
                entered += await cache.ingest(part)
                part.path.unlink()
            starts = range(0, version.size_bytes, BLOCK)
            cut = {n for n in range(part_bytes, version.size_bytes, part_bytes) if n % BLOCK}
            spanning = sum(any(start < n < start + BLOCK for n in cut) for start in starts)
            assert entered == cache.usage().blocks == len(starts) - spanning
            asked = origin.count()
            assert await read(cache, version) == content_of(origin, version)
            assert origin.count() - asked == spanning

    asyncio.run(scenario())


def test_known_checksums_are_used_and_hold_the_file_to_them(tmp_path: Path) -> None:
    """Where they are given for the right chunks nothing is read at adoption; a byte that differs later is a miss."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 3 * BLOCK)
        part = staged(tmp_path / "s", origin, version, 0, 3 * BLOCK)
        sums = ChunkChecksums(3 * BLOCK)
        sums.update(bytearray(content_of(origin, version)))
        with part.path.open("r+b") as file:
            file.seek(BLOCK + 5)
            file.write(b"!")
        offered = replace(part, checksums=lambda: bytes(sums.packed))
        async with open_cache(tmp_path / "c", origin) as cache:
            assert await cache.ingest(offered) == 3
            assert await read(cache, version) == content_of(origin, version)
            assert counted(metrics.CACHE_DAMAGED) == 1

    asyncio.run(scenario())


def test_bytes_of_an_adopted_file_are_verified(tmp_path: Path) -> None:
    """Harm that comes to it is found like in any other block file."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 4 * BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            assert await cache.ingest(staged(tmp_path / "s", origin, version, 0, 4 * BLOCK)) == 4
            [file] = block_files(tmp_path / "c")
            with file.open("r+b") as opened:
                opened.seek(random.randrange(4 * BLOCK))
                byte = opened.read(1)
                opened.seek(-1, os.SEEK_CUR)
                opened.write(bytes([byte[0] ^ 1]))
            drop_page_cache(file)
            assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert counted(metrics.CACHE_DAMAGED) == 1
            assert cache.usage().blocks == 4

    asyncio.run(scenario())


def test_an_adopted_file_is_counted_and_evicted_as_one(tmp_path: Path) -> None:
    """Its room comes back when the file goes, with all blocks in it; until the last of them it stays."""

    async def scenario() -> None:
        origin = make_origin()
        version, other = stored(origin, "k", 4 * BLOCK), stored(origin, "other", 2 * BLOCK)
        async with open_cache(tmp_path / "c", origin, capacity_bytes=5 * BLOCK, readahead_bytes=0) as cache:
            await cache.ingest(staged(tmp_path / "s", origin, version, 0, 4 * BLOCK))
            taken_bytes = 4 * BLOCK + 4096  # what is behind the bytes takes a page
            assert cache.usage().used_bytes == taken_bytes
            record = next(cache._dependencies.directory.index.blocks())
            assert cache._dependencies.directory.drop(record.block_id, record.extent.file)
            assert (cache.usage().blocks, cache.usage().used_bytes) == (3, taken_bytes)
            await read(cache, other)
            await cache.settle()
            assert counted(metrics.CACHE_EVICTED_BLOCKS) == 3
            assert cache.usage().used_bytes == 2 * (BLOCK + 4096)

    asyncio.run(scenario())


def test_what_is_there_already_is_not_entered_twice(tmp_path: Path) -> None:
    """Blocks that a reader has fetched meanwhile stay; a file that brings nothing new takes no room."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 2 * BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            await read(cache, version, ByteRange(0, 9))
            await cache.settle()
            part = staged(tmp_path / "s", origin, version, 0, 2 * BLOCK)
            assert await cache.ingest(part) == 1
            assert await cache.ingest(part) == 0
            assert len(block_files(tmp_path / "c")) == 2
            assert await read(cache, version) == content_of(origin, version)

    asyncio.run(scenario())


def test_a_file_without_a_whole_block_is_left_alone(tmp_path: Path) -> None:
    """Small parts in the middle of large blocks bring nothing."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 4 * BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            assert await cache.ingest(staged(tmp_path / "s", origin, version, 100, 2000)) == 0
            assert cache.usage().blocks == 0

    asyncio.run(scenario())


def test_what_lies_behind_the_bytes_is_no_part_of_the_object(tmp_path: Path) -> None:
    """However much of it there is: no block reaches into it, with checksums for all of it or without."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 4 * BLOCK)
        part = staged(tmp_path / "s", origin, version, 0, 2 * BLOCK - 7, b"#" * 2 * BLOCK)
        sums = ChunkChecksums(4 * BLOCK)
        sums.update(bytearray(part.path.read_bytes()) + b"#" * 7)
        async with open_cache(tmp_path / "c", origin) as cache:
            assert await cache.ingest(part) == 1
            assert await cache.ingest(replace(part, checksums=lambda: bytes(sums.packed))) == 0
            assert await read(cache, version) == content_of(origin, version)

    asyncio.run(scenario())


def test_a_file_that_was_cut_is_not_adopted(tmp_path: Path) -> None:
    """Even where the checksums of all that was in it are known."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        part = staged(tmp_path / "s", origin, version, 0, BLOCK)
        os.truncate(part.path, BLOCK - 1)
        async with open_cache(tmp_path / "c", origin) as cache:
            with pytest.raises(StoreUnavailable, match="shorter"):
                await cache.ingest(replace(part, checksums=lambda: bytes(BLOCK // (64 * KIB) * 4)))
            assert (cache.usage().blocks, cache.usage().reserved_bytes) == (0, 0)

    asyncio.run(scenario())


def test_what_cannot_be_linked_changes_nothing(tmp_path: Path) -> None:
    """A staging area on another file system, say: the room is free again, and the file is where it was."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        part = staged(Path("/dev/shm") / tmp_path.name, origin, version, 0, BLOCK)
        try:
            async with open_cache(tmp_path / "c", origin) as cache:
                with pytest.raises(StoreUnavailable, match="linked"):
                    await cache.ingest(part)
                assert (cache.usage().blocks, cache.usage().reserved_bytes) == (0, 0)
            assert part.path.exists()
        finally:
            part.path.unlink()
            part.path.parent.rmdir()

    asyncio.run(scenario())


@pytest.mark.parametrize("step", ["link", "commit"])
def test_a_process_killed_while_it_adopts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before or after the link: the next one to open the directory clears up, and the staged file is untouched."""
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    settings = BlockSettings(tmp_path / "c", 64 * BLOCK, BLOCK)
    opened = open_directory(settings, 0)
    adoption = describe(staged(tmp_path / "s", origin, version, 0, BLOCK), "default", BLOCK)
    assert adoption is not None
    link = BlockStore.link

    def linked_or_not(store: BlockStore, source: Path, file: str) -> None:
        if step == "commit":
            link(store, source, file)
        opened.blocks.index.close()  # nothing that comes after it reaches the disk
        monkeypatch.setattr(BlockStore, "unlink", lambda *_: None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BlockStore, "link", linked_or_not)
        with pytest.raises(BaseException):  # noqa: B017 - whatever a dead process would have raised
            opened.blocks.ingest(adoption)
    monkeypatch.undo()
    opened.locks.close()
    opened.worker_locks.give_back_own()
    assert len(block_files(tmp_path / "c")) == (1 if step == "commit" else 0)
    again = open_directory(settings, 0)
    usage = again.blocks.index.usage()
    assert (usage.blocks, usage.used_bytes, usage.reserved_bytes) == (0, 0, 0)
    assert block_files(tmp_path / "c") == []
    assert adoption.source.exists()
    again.close()
