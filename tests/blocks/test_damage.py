"""Whatever happens to block files behind the cache's back: no reader ever gets a wrong byte."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from gateway.blocks.block_file import BlockFile
from gateway.blocks.cache import BlockCache
from gateway.blocks.disk_health import PAUSE_SECONDS
from gateway.blocks.layout import Extent
from gateway.blocks.page_cache import Residency
from gateway.blocks.scrubber import PASSED_OVER_BYTES, Scrubber, ScrubPass, ScrubSettings, load_pass, save_pass
from gateway.blocks.scrubber import PAUSE_SECONDS as SCRUBBER_PAUSE_SECONDS
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
from tests.support.counting import counted, on_count
from tests.support.memory_origin import MemoryOrigin
from tests.support.page_cache import page_out
from tests.support.waiting import until

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
async def test_damaged_blocks_give_no_wrong_byte(tmp_path: Path, damage: Damage, cold: bool) -> None:
    """Flipped, torn, swapped or missing blocks are dropped, fetched again, and the reader notices nothing."""
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


async def test_damage_after_a_restart_is_found(tmp_path: Path) -> None:
    """The first read finds damage done between two opens, in the header and in the data."""
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


async def test_damage_in_the_middle_of_a_read_is_mended_where_the_reader_stands(tmp_path: Path) -> None:
    """Bytes already given stay given; the rest of the block comes from the origin."""
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


async def test_a_disk_that_cannot_be_read_leaves_the_origin_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO on every read: dropped, tried again, and then served past the cache: never an error, never a loop."""
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


async def test_a_disk_that_gives_back_other_bytes_leaves_the_origin_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8.2 What is written comes back wrong, again and again: the read goes on from the origin, byte by right byte."""

    def other_bytes(*_: object) -> memoryview:
        raise BlockDamaged("not what was written")

    origin = make_origin()
    version = stored(origin, "a", 3 * MIB)
    async with open_cache(tmp_path / "c", origin) as cache:
        monkeypatch.setattr("gateway.blocks.spans.read_verified", other_bytes)
        monkeypatch.setattr(Residency, "unwritten", lambda *_: False)
        assert await take(await cache.open_range(version, whole(version))) == content_of(origin, version)


async def test_no_descriptors_left_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMFILE says nothing about the block: it stays, and the range comes from the origin."""
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


async def test_bytes_that_left_memory_are_checked_again_whoever_fetched_them_back(
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


def evict(cache: BlockCache, path: Path) -> None:
    """Have the kernel take a file's pages, as it does when memory is short."""
    with cache._dependencies.open_files._leases[path.name].share() as lease:
        pages = lease.file._pages
        assert pages is not None
        page_out(pages._address, path.stat().st_size // 4096 * 4096)
    drop_page_cache(path)


async def test_a_fill_harmed_in_memory_is_found_when_it_is_over(tmp_path: Path) -> None:
    """1.4 What this process has written is not taken for granted: the file may have changed before it was published."""
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


async def test_a_read_brings_no_other_bytes_into_memory(tmp_path: Path) -> None:
    """The kernel's own readahead is off: what is worth reading ahead is known here."""
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


PERIOD_SECONDS = 1000.0
FAST = 64.0 * MIB
HEADER_BYTES = 4096


@asynccontextmanager
async def scrubbing(cache: BlockCache, tmp_path: Path, bytes_per_second: float = FAST) -> AsyncIterator[Scrubber]:
    scrubber = cache.scrubber(ScrubSettings(tmp_path / "scrub.json", PERIOD_SECONDS, bytes_per_second))
    task = asyncio.create_task(scrubber.run())
    try:
        yield scrubber
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def filled(cache: BlockCache, origin: MemoryOrigin, count: int) -> list[ObjectVersion]:
    versions = [stored(origin, f"k{n}", BLOCK + 1000 * n, seed=n) for n in range(count)]
    for version in versions:
        await read(cache, version)
    await cache.settle()
    return versions


def make_cold(directory: Path) -> list[Path]:
    files = block_files(directory)
    for path in files:
        drop_page_cache(path)
    return files


def in_memory(path: Path) -> bool:
    with path.open("rb") as file:
        return Residency().resident(file.fileno(), 4096, path.stat().st_size - 4096)


@pytest.mark.parametrize("damage", [flip_bit, truncate, zero_the_end], ids=lambda damage: damage.__name__)
async def test_what_rots_on_the_disk_is_dropped_before_anybody_reads_it(tmp_path: Path, damage: Damage) -> None:
    """1.4 Bad blocks go, good ones stay; readers get every byte."""
    origin, rng = make_origin(), random.Random(5)
    async with open_cache(tmp_path / "c", origin) as cache:
        versions = await filled(cache, origin, 10)
        blocks = cache.usage().blocks
        files = block_files(tmp_path / "c")
        victims = rng.sample([path for path in files if path.stat().st_size > 200 * KIB], 3)
        for victim in victims:
            harm_the_data(damage, rng, victim)
        make_cold(tmp_path / "c")
        async with scrubbing(cache, tmp_path) as scrubber:
            await until(lambda: counted(metrics.SCRUB_PASSES) == 1)
            assert scrubber.progress is not None
            assert (scrubber.progress.blocks, scrubber.progress.dropped_blocks) == (blocks, 3)
            assert scrubber.progress.part_done == 1.0
        assert (counted(metrics.CACHE_DAMAGED), cache.usage().blocks) == (3, blocks - 3)
        assert not any(victim.exists() for victim in victims)
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
        assert counted(metrics.CACHE_DAMAGED) == 3


def harm_the_data(damage: Damage, rng: random.Random, path: Path) -> None:
    """Not the header: nobody reads that once the block is in the index."""
    before = path.read_bytes()
    while (after := path.read_bytes()) == before or after[:HEADER_BYTES] != before[:HEADER_BYTES]:
        path.write_bytes(before)
        damage(rng, [path])


async def test_one_bad_object_of_many_packed_ones_goes_alone(tmp_path: Path) -> None:
    """1.4 The others in its segment stay."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, small_object_bytes_max=MIB) as cache:
        versions = [stored(origin, f"k{n}", 50_000 + n, seed=n) for n in range(20)]
        for version in versions:
            await read(cache, version)
        await cache.settle()
        segment = max(block_files(tmp_path / "c"), key=lambda path: path.stat().st_size)
        with segment.open("r+b") as file:
            file.seek(segment.stat().st_size // 2 + 30_000)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        make_cold(tmp_path / "c")
        async with scrubbing(cache, tmp_path):
            await until(lambda: counted(metrics.SCRUB_PASSES) == 1)
        assert (counted(metrics.CACHE_DAMAGED), cache.usage().blocks) == (1, 19)
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)


async def test_memory_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrubber leaves cold pages cold; it does not read pages in memory, which tell nothing about the disk."""
    read_bytes: list[float] = []
    on_count(monkeypatch, metrics.SCRUB_BYTES, read_bytes.append)
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin) as cache:
        await filled(cache, origin, 6)
        files = make_cold(tmp_path / "c")
        warm = files[::2]
        for path in warm:
            path.read_bytes()
        async with scrubbing(cache, tmp_path):
            await until(lambda: counted(metrics.SCRUB_PASSES) == 1)
        assert [in_memory(path) for path in files] == [path in warm for path in files]
        assert counted(metrics.SCRUB_BYTES) < sum(path.stat().st_size for path in files if path not in warm)
        assert read_bytes.count(0) == len(warm)


async def test_it_keeps_its_pace(tmp_path: Path) -> None:
    """No more bytes a second than the setting, over the whole pass."""
    origin, clock = make_origin(), TestClock()
    async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
        await filled(cache, origin, 8)
        make_cold(tmp_path / "c")
        started = clock.monotonic()
        async with scrubbing(cache, tmp_path, bytes_per_second=1.0 * MIB):
            await until(lambda: counted(metrics.SCRUB_PASSES) == 1)
        seconds = clock.monotonic() - started
        assert counted(metrics.SCRUB_BYTES) > 8 * BLOCK
        assert seconds == pytest.approx(counted(metrics.SCRUB_BYTES) / MIB, rel=0.1, abs=0.1)
        assert PASSED_OVER_BYTES < BLOCK


async def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """A pass that is broken off, by a restart or a kill, begins with the block behind the last."""
    origin, clock = make_origin(), TestClock()
    async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
        await filled(cache, origin, 12)
        total = cache.usage().blocks
    looked_at = 0
    for restart in range(3):
        make_cold(tmp_path / "c")
        async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
            async with scrubbing(cache, tmp_path) as scrubber:
                wanted = looked_at + 5 if restart < 2 else total
                await until(lambda: counted(metrics.SCRUB_BLOCKS) >= wanted)  # noqa: B023
                if restart == 2:
                    await until(lambda: counted(metrics.SCRUB_PASSES) == 1)
            assert scrubber.progress is not None
            looked_at = int(counted(metrics.SCRUB_BLOCKS))
            assert scrubber.progress.blocks == looked_at
    assert looked_at == total


async def test_one_pass_each_period(tmp_path: Path) -> None:
    """Counted from the start of the last one, over restarts; a clock set back delays by one period at most."""
    origin, clock = make_origin(), TestClock()
    async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
        await filled(cache, origin, 2)
        async with scrubbing(cache, tmp_path):
            await until(lambda: counted(metrics.SCRUB_PASSES) == 1)
        async with scrubbing(cache, tmp_path):
            await until(lambda: clock.longest_sleep() > PERIOD_SECONDS / 2)
            clock.advance(PERIOD_SECONDS / 2)
            assert 0 < clock.longest_sleep() <= PERIOD_SECONDS / 2
            assert counted(metrics.SCRUB_PASSES) == 1
            clock.advance(PERIOD_SECONDS / 2)
            await until(lambda: counted(metrics.SCRUB_PASSES) == 2)
        save_pass(tmp_path / "scrub.json", ScrubPass(clock.now() + 1e9, clock.now() + 1e9))
        async with scrubbing(cache, tmp_path):
            await until(lambda: clock.longest_sleep() > PERIOD_SECONDS / 2)
            clock.advance(PERIOD_SECONDS)
            await until(lambda: counted(metrics.SCRUB_PASSES) == 3)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"started_at": "x"}', b"\xff" * 100])
def test_a_place_that_makes_no_sense_is_a_new_pass(tmp_path: Path, content: bytes) -> None:
    """The file is harmed, or of another version: everything is looked at."""
    (tmp_path / "scrub.json").write_bytes(content)
    assert load_pass(tmp_path / "scrub.json") is None
    save_pass(tmp_path / "scrub.json", ScrubPass(5.0, None, "ab" * 32, 3, 4, 5))
    assert load_pass(tmp_path / "scrub.json") == ScrubPass(5.0, None, "ab" * 32, 3, 4, 5)


async def test_it_waits_while_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cannot be read are no reason to empty the cache: the disk is left alone, then the pass goes on."""
    origin, clock = make_origin(), TestClock()
    async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
        await filled(cache, origin, 10)
        blocks = cache.usage().blocks
        make_cold(tmp_path / "c")

        def refuse(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        async with scrubbing(cache, tmp_path):
            with monkeypatch.context() as patched:
                patched.setattr(os, "preadv", refuse)
                await until(lambda: not cache.isolation.readable)
                await until(lambda: clock.longest_sleep() == SCRUBBER_PAUSE_SECONDS)
                seen = counted(metrics.SCRUB_BLOCKS)
                assert seen < blocks
                for _ in range(100):
                    clock.advance(PAUSE_SECONDS)
                    await asyncio.sleep(0)
                assert counted(metrics.SCRUB_BLOCKS) == seen
            await pass_until(clock, lambda: counted(metrics.SCRUB_PASSES) == 1)
        assert cache.usage().blocks >= blocks - 3
