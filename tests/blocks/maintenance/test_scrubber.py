"""The scrubber: what rots on the disk while nobody reads it is found and dropped, at a bounded cost."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.blocks.cache import BlockCache
from gateway.blocks.disk_health import PAUSE_SECONDS
from gateway.blocks.page_cache import Residency
from gateway.blocks.scrubber import (
    PASSED_OVER_BYTES,
    Scrubber,
    ScrubPass,
    ScrubSettings,
    load_pass,
    save_pass,
)
from gateway.blocks.scrubber import PAUSE_SECONDS as SCRUBBER_PAUSE_SECONDS
from gateway.core.model import ObjectVersion
from gateway.telemetry import metrics
from tests.blocks.files.test_damage import Damage, flip_bit, truncate, zero_the_end
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    TestClock,
    block_files,
    content_of,
    drop_page_cache,
    make_origin,
    open_cache,
    pass_until,
    read,
    stored,
    until,
)
from tests.support.counting import counted, on_count
from tests.support.memory_origin import MemoryOrigin

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
def test_what_rots_on_the_disk_is_dropped_before_anybody_reads_it(tmp_path: Path, damage: Damage) -> None:
    """1.4 Bad blocks go, good ones stay; readers get every byte."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def harm_the_data(damage: Damage, rng: random.Random, path: Path) -> None:
    """Not the header: nobody reads that once the block is in the index."""
    before = path.read_bytes()
    while (after := path.read_bytes()) == before or after[:HEADER_BYTES] != before[:HEADER_BYTES]:
        path.write_bytes(before)
        damage(rng, [path])


def test_one_bad_object_of_many_packed_ones_goes_alone(tmp_path: Path) -> None:
    """1.4 The others in its segment stay."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_memory_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cold is cold again, what was in memory still is, and is not read: it tells nothing about the disk."""
    read_bytes: list[float] = []
    on_count(monkeypatch, metrics.SCRUB_BYTES, read_bytes.append)

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_it_keeps_its_pace(tmp_path: Path) -> None:
    """No more bytes a second than the setting, over the whole pass."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """A pass that is broken off, by a restart or a kill, begins with the block behind the last."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_one_pass_each_period(tmp_path: Path) -> None:
    """Counted from the start of the last one, over restarts; a clock set back delays by one period at most."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"started_at": "x"}', b"\xff" * 100])
def test_a_place_that_makes_no_sense_is_a_new_pass(tmp_path: Path, content: bytes) -> None:
    """The file is harmed, or of another version: everything is looked at."""
    (tmp_path / "scrub.json").write_bytes(content)
    assert load_pass(tmp_path / "scrub.json") is None
    save_pass(tmp_path / "scrub.json", ScrubPass(5.0, None, "ab" * 32, 3, 4, 5))
    assert load_pass(tmp_path / "scrub.json") == ScrubPass(5.0, None, "ab" * 32, 3, 4, 5)


def test_it_waits_while_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cannot be read are no reason to empty the cache: the disk is left alone, then the pass goes on."""

    async def scenario() -> None:
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

    asyncio.run(scenario())
