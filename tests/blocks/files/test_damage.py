"""Whatever happens to block files behind the cache's back: no reader ever gets a wrong byte."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.blocks.block_file import BlockFile
from gateway.blocks.cache import BlockCache
from gateway.blocks.layout import Extent
from gateway.blocks.page_cache import Residency
from gateway.core.errors import BlockDamaged
from gateway.core.model import ByteRange, FileSpan, ObjectVersion
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    PacedOrigin,
    TestClock,
    block_files,
    bytes_of,
    content_of,
    disk_state,
    drop_page_cache,
    make_origin,
    open_cache,
    partial_files,
    pass_until,
    read,
    stored,
    take,
    whole,
)
from tests.support.counting import counted
from tests.support.page_cache import page_out

Damage = Callable[[random.Random, list[Path]], None]


def flip_bit(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice(files)
    position = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def truncate(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice(files)
    os.truncate(path, rng.randrange(path.stat().st_size))


def zero_the_end(rng: random.Random, files: list[Path]) -> None:
    """As after a power cut: the length is right, pages are not."""
    path = rng.choice(files)
    size = path.stat().st_size
    kept = rng.randrange(size)
    os.truncate(path, kept)
    os.truncate(path, size)


def swap(rng: random.Random, files: list[Path]) -> None:
    one, other = rng.sample(files, 2)
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def unlink(rng: random.Random, files: list[Path]) -> None:
    rng.choice(files).unlink()


DAMAGES: list[Damage] = [flip_bit, truncate, zero_the_end, swap, unlink]


@pytest.mark.parametrize("cold", [False, True], ids=["in memory", "from the device"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_blocks_give_no_wrong_byte(tmp_path: Path, damage: Damage, cold: bool) -> None:
    """Flipped, torn, swapped or missing blocks are dropped, fetched again, and the reader notices nothing."""

    async def scenario() -> None:
        rng = random.Random(f"{damage.__name__} {cold}")
        origin = make_origin()
        versions = [stored(origin, f"k{n}", 3 * BLOCK + 5000 * n, seed=n) for n in range(3)]
        async with open_cache(tmp_path / "c", origin) as cache:
            for version in versions:
                await read(cache, version)
            await cache.settle()
            blocks = cache.usage().blocks
            rounds = 4 if cold else 15
            for _ in range(rounds):
                files = block_files(tmp_path / "c")
                damage(rng, files)
                if damage in (swap, unlink):
                    cache._dependencies.open_files.close()  # an open file is what it was, whatever its name means
                if cold:
                    for path in block_files(tmp_path / "c"):
                        drop_page_cache(path)
                for version in versions:
                    first = rng.randrange(version.size_bytes)
                    asked = ByteRange(first, rng.randrange(first, version.size_bytes))
                    assert await read(cache, version, asked) == content_of(origin, version, asked)
                for version in versions:
                    assert await read(cache, version) == content_of(origin, version)
                await cache.settle()
                assert cache.usage().blocks == blocks
            assert counted(metrics.CACHE_DAMAGED) >= rounds * 3 // 4
            assert counted(metrics.CACHE_STORE_UNAVAILABLE) == 0

    asyncio.run(scenario())


def test_damage_after_a_restart_is_found(tmp_path: Path) -> None:
    """What happened while nobody looked is found by the first read, header or data."""

    async def scenario() -> None:
        rng = random.Random(11)
        origin = make_origin()
        version = stored(origin, "k", 6 * BLOCK)
        for damage in DAMAGES:
            async with open_cache(tmp_path / "c", origin) as cache:
                await read(cache, version)
                await cache.settle()
            damage(rng, block_files(tmp_path / "c"))
            async with open_cache(tmp_path / "c", origin) as cache:
                assert await read(cache, version) == content_of(origin, version)
        assert counted(metrics.CACHE_DAMAGED) >= 4

    asyncio.run(scenario())


def test_damage_in_the_middle_of_a_read_is_mended_where_the_reader_stands(tmp_path: Path) -> None:
    """Bytes already given stay given; the rest of the block comes from the origin."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 4 * MIB)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            await read(cache, version)
            await cache.settle()
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            [path] = block_files(tmp_path / "c")
            reader = await cache.open_range(version, whole(version))
            taken = bytearray()
            async with aclosing(reader.body()) as body:
                async for piece in body:
                    if not taken:
                        os.truncate(path, 2 * MIB)
                    taken += bytes_of(piece)
            assert (reader.outcome, bytes(taken)) == ("hit", content_of(origin, version))
            assert counted(metrics.CACHE_DAMAGED) == 1
            await cache.settle()
            assert (await cache.open_range(version, whole(version))).outcome == "hit"

    asyncio.run(scenario())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("after_writes", [0, 2])
def test_a_disk_that_takes_no_bytes_leaves_the_origin_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, after_writes: int
) -> None:
    """Full or broken, at once or in mid-block: every byte arrives, nothing is cached, room is given back."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 3 * MIB)
        writes = 0
        pwrite = os.pwrite

        def failing(descriptor: int, content: bytes, offset: int) -> int:
            nonlocal writes
            writes += 1
            if writes > after_writes:
                raise OSError(code, os.strerror(code))
            return pwrite(descriptor, content, offset)

        clock = TestClock()
        async with open_cache(tmp_path / "c", origin, block_size_bytes=MIB, readahead_bytes=0, clock=clock) as cache:
            monkeypatch.setattr(os, "pwrite", failing)
            asked = ByteRange(100 * KIB, 3 * MIB - 1)
            assert await read(cache, version, asked) == content_of(origin, version, asked)
            await cache.settle()
            assert (cache.usage().blocks, cache.usage().reserved_bytes) == (0, 0)
            assert counted(metrics.CACHE_STORE_UNAVAILABLE) == 1
            monkeypatch.undo()
            await pass_until(clock, lambda: disk_state() == "well")
            await read(cache, version)
            await cache.settle()
            assert cache.usage().blocks == 3

    asyncio.run(scenario())


def test_a_disk_that_cannot_be_read_leaves_the_origin_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO on every read: dropped, tried again, and then served past the cache: never an error, never a loop."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 3 * BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            await read(cache, version)
            await cache.settle()

        def failing(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        async with open_cache(tmp_path / "c", origin) as cache:
            monkeypatch.setattr(os, "preadv", failing)
            assert await read(cache, version) == content_of(origin, version)
            monkeypatch.undo()

    asyncio.run(scenario())


def test_a_disk_that_gives_back_other_bytes_leaves_the_origin_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8.2 What is written comes back wrong, again and again: the read goes on from the origin, byte by right byte."""

    def other_bytes(*_: object) -> memoryview:
        raise BlockDamaged("not what was written")

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 3 * MIB)
        async with open_cache(tmp_path / "c", origin) as cache:
            monkeypatch.setattr("gateway.blocks.spans.read_verified", other_bytes)
            monkeypatch.setattr(Residency, "unwritten", lambda *_: False)
            assert await take(await cache.open_range(version, whole(version))) == content_of(origin, version)

    asyncio.run(scenario())


def test_no_descriptors_left_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMFILE says nothing about the block: it stays, and the range comes from the origin."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            await read(cache, version)
            await cache.settle()

            def failing(*_: object, **__: object) -> int:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            cache._dependencies.open_files.close()
            with monkeypatch.context() as patched:
                patched.setattr(os, "open", failing)
                reader = await cache.open_range(version, whole(version))
            assert await take(reader) == content_of(origin, version)
            assert (counted(metrics.CACHE_STORE_UNAVAILABLE), counted(metrics.CACHE_DAMAGED), cache.usage().blocks) == (
                1,
                0,
                1,
            )

    asyncio.run(scenario())


def test_bytes_that_left_memory_are_checked_again_whoever_fetched_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified once is not verified for ever: what another reader brought back from the device is read and checked."""
    checked: list[tuple[int, int]] = []

    verify = BlockFile.verify

    def verify_and_tell(file: BlockFile, extent: Extent, position: int, count: int) -> None:
        verify(file, extent, position, count)
        checked.append((position, count))

    monkeypatch.setattr(BlockFile, "verify", verify_and_tell)

    async def checks_of(cache: BlockCache, version: ObjectVersion, asked: ByteRange) -> int:
        """How many pieces were read and checked; all of them left as they lie in the file."""
        checked.clear()
        spans: list[FileSpan] = []
        await take(await cache.open_range(version, asked), spans)
        assert sum(span.count for span in spans) == asked.length
        return len(checked)

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 4 * MIB)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            await read(cache, version)
            await cache.settle()
            [path] = block_files(tmp_path / "c")
            assert await checks_of(cache, version, ByteRange(0, 4 * MIB - 1)) == 3  # of 1, 1 and 2 MiB
            assert await checks_of(cache, version, ByteRange(0, 4 * MIB - 1)) == 0
            evict(cache, path)
            assert await checks_of(cache, version, ByteRange(0, MIB - 1)) == 1
            path.read_bytes()
            assert await checks_of(cache, version, ByteRange(0, MIB - 1)) == 0
            assert await checks_of(cache, version, ByteRange(2 * MIB, 3 * MIB - 1)) == 1
            assert await checks_of(cache, version, ByteRange(2 * MIB, 3 * MIB - 1)) == 0

    asyncio.run(scenario())


def evict(cache: BlockCache, path: Path) -> None:
    """Have the kernel take a file's pages, as it does when memory is short."""
    with cache._dependencies.open_files._leases[path.name].share() as lease:
        pages = lease.file._pages
        assert pages is not None
        page_out(pages._address, path.stat().st_size // 4096 * 4096)
    drop_page_cache(path)


def test_a_fill_harmed_in_memory_is_found_when_it_is_over(tmp_path: Path) -> None:
    """1.4 What this process has written is not taken for granted: the file may have changed before it was published."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", MIB)
        pace = PacedOrigin(origin, pause_after=512 * KIB)
        async with open_cache(tmp_path / "c", pace, block_size_bytes=MIB) as cache:
            reader = await cache.open_range(version, ByteRange(0, 256 * KIB - 1))
            assert len(await take(reader)) == 256 * KIB
            await pace.paused.wait()
            [path] = partial_files(tmp_path / "c")
            with path.open("r+b") as file:
                file.seek(8192)
                file.write(b"harmed")
            pace.go.set()
            await cache.settle()
            assert block_files(tmp_path / "c")
            assert await read(cache, version) == content_of(origin, version)
            assert counted(metrics.CACHE_DAMAGED) == 1

    asyncio.run(scenario())


def test_a_read_brings_no_other_bytes_into_memory(tmp_path: Path) -> None:
    """The kernel's own readahead is off: what is worth reading ahead is known here."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "k", 4 * MIB)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            await read(cache, version)
            await cache.settle()
        [path] = block_files(tmp_path / "c")
        drop_page_cache(path)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            for first in (0, 64 * KIB, 128 * KIB):
                await read(cache, version, ByteRange(first, first + 999))
            with path.open("rb") as file:
                assert Residency().resident(file.fileno(), 4096, 192 * KIB)
                assert not Residency().resident(file.fileno(), 4096 + 192 * KIB, 64 * KIB)

    asyncio.run(scenario())
