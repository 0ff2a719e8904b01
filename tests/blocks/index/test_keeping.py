"""What the cache keeps, through the cache itself: policies, warming, objects too large, the writes of a day."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from gateway.blocks.cache import BlockCache
from gateway.blocks.index import TOUCHES_PER_TRANSACTION, WrittenBytes
from gateway.blocks.policies import Queue
from gateway.core.model import ByteRange, ObjectVersion
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix, Slots
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    TestClock,
    content_of,
    make_origin,
    open_cache,
    read,
    stored,
    whole,
)
from tests.support.counting import by_label, counted
from tests.support.prepared_process import PreparedProcess
from tests.support.slots import Slot

SMALL = 64 * KIB
FILE = SMALL + 4096
DAY = 86_400
ROOT = Path(__file__).parents[2]


def slots(eviction: Literal["epoch", "lru"], kept_object_bytes_max: int | None = None) -> Slots:
    return Slots([Slot("default", Prefix(""), eviction=eviction, kept_object_bytes_max=kept_object_bytes_max)])


async def epoch(cache: BlockCache, versions: Sequence[ObjectVersion], seed: int, *, flush_every: int = 20) -> float:
    """Each version read once, in a random order; the part that hits. The index learns of uses every so many reads."""
    generator, hits = random.Random(seed), 0
    for count, version in enumerate(generator.sample(list(versions), len(versions))):
        reader = await cache.open_range(version, whole(version))
        async for _ in reader.body():
            pass
        hits += reader.outcome == "hit"
        await cache.settle()
        if count % flush_every == flush_every - 1:
            await cache.flush_accesses()
    return hits / len(versions)


class Team:
    """Processes that read epochs together."""

    def __init__(self, directory: Path, workers: int, capacity_bytes: int, small_object_bytes_max: int) -> None:
        numbers = [(worker, workers, capacity_bytes, small_object_bytes_max) for worker in range(workers)]
        self._processes = [
            PreparedProcess(
                ["tests.support.epoch_worker", directory, *one], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for one in numbers
        ]
        assert self._lines() == ["open"] * workers

    def epoch(self, name: str, count: int, seed: int) -> float:
        """The part of the reads that hit."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{name} {count} {seed}\n")
            process.stdin.flush()
        return sum(map(int, self._lines())) / count

    def close(self) -> None:
        for process in self._processes:
            process.communicate(timeout=60)
            assert process.returncode == 0

    def _lines(self) -> list[str]:
        return [process.stdout.readline().strip() for process in self._processes if process.stdout is not None]


@pytest.mark.parametrize("small_object_bytes_max", [0, pytest.param(SMALL, marks=pytest.mark.slow)])
def test_epochs_that_fit_by_half_hit_by_half_whoever_reads(tmp_path: Path, small_object_bytes_max: int) -> None:
    """Two processes, one index: from the second epoch on, and by the third for another data set; a restart between."""
    count = 256
    found = []
    for name in ("a", "b"):
        team = Team(tmp_path / "c", 2, count // 2 * FILE, small_object_bytes_max)
        found += [team.epoch(name, count, seed) for seed in range(3)]
        team.close()
    assert min(found[1], found[2], found[5]) >= 0.48, found
    assert found[0] == found[3] == 0.0


def test_epochs_hit_by_half_however_seldom_uses_are_flushed(tmp_path: Path) -> None:
    """What evicts enters the uses noted before it: another data set is in by its third epoch, flushes however late."""

    async def scenario() -> None:
        origin, found = make_origin(), []
        async with open_cache(
            tmp_path / "c",
            origin,
            capacity_bytes=100 * FILE,
            block_size_bytes=SMALL,
            slots=slots("epoch"),
            small_object_bytes_max=0,
        ) as cache:
            for name in ("a", "b"):
                versions = [stored(origin, f"{name}{n}", SMALL) for n in range(200)]
                found += [await epoch(cache, versions, seed, flush_every=120) for seed in range(3)]
        assert min(found[1], found[2], found[5]) >= 0.45, found

    asyncio.run(scenario())


def test_each_slot_follows_its_own_policy(tmp_path: Path) -> None:
    """The same reads, in order, in two slots that take half of the room each: lru never hits, epoch by half."""

    async def scenario() -> None:
        origin = make_origin()
        policy = Slots(
            [
                Slot("l", Prefix.parse("s3://train/l/"), eviction="lru", capacity_bytes=40 * FILE),
                Slot("e", Prefix.parse("s3://train/e/"), eviction="epoch", capacity_bytes=40 * FILE),
            ]
        )
        hits = {"l": 0, "e": 0}
        async with open_cache(
            tmp_path / "c", origin, capacity_bytes=80 * FILE, block_size_bytes=SMALL, slots=policy
        ) as cache:
            for _ in range(3):
                for slot in hits:
                    for version in [stored(origin, f"{slot}/{n}", SMALL) for n in range(80)]:
                        reader = await cache.open_range(version, whole(version), slot=slot)
                        async for _ in reader.body():
                            pass
                        hits[slot] += reader.outcome == "hit"
                        await cache.settle()
                    await cache.flush_accesses()
        assert hits["l"] == 0
        assert hits["e"] >= 2 * 80 * 0.45

    asyncio.run(scenario())


def test_another_policy_takes_over_what_is_there(tmp_path: Path) -> None:
    """After a change of the settings everything is served from where it lay, and evicted as the new policy says."""

    async def scenario() -> None:
        origin = make_origin()
        versions = [stored(origin, f"k{n}", SMALL) for n in range(30)]
        for eviction in ("epoch", "lru", "epoch"):
            async with open_cache(
                tmp_path / "c", origin, capacity_bytes=20 * FILE, block_size_bytes=SMALL, slots=slots(eviction)
            ) as cache:
                before = cache.usage().blocks
                for version in versions:
                    assert await read(cache, version) == content_of(origin, version)
                    await cache.settle()
                assert cache.usage().used_bytes <= 20 * FILE
                assert cache.usage().blocks >= max(before, 19)

    asyncio.run(scenario())


def test_what_is_warmed_takes_the_place_of_what_was_read_longest_ago(tmp_path: Path) -> None:
    """Whoever warms a data set means it: the slot's policy does not hold what was read before against it."""

    async def scenario() -> None:
        origin = make_origin()
        old = [stored(origin, f"old/{n}", SMALL) for n in range(100)]
        new = [stored(origin, f"new/{n}", SMALL) for n in range(40)]
        async with open_cache(
            tmp_path / "c", origin, capacity_bytes=50 * FILE, block_size_bytes=SMALL, slots=slots("epoch")
        ) as cache:
            for seed in range(3):
                await epoch(cache, old, seed)
            for version in new:
                assert (await cache.fetch(version, whole(version), slot="default", purpose=Purpose.WARM))[1]
                await cache.settle()
            assert await epoch(cache, new, 9) == 1.0

    asyncio.run(scenario())


def test_objects_larger_than_the_slot_keeps_are_served_and_not_kept(tmp_path: Path) -> None:
    """And counted; smaller ones beside them are kept, and what was kept before goes on being served."""

    async def scenario() -> None:
        origin = make_origin()
        small, large = stored(origin, "small", BLOCK), stored(origin, "large", 4 * BLOCK + 17)
        async with open_cache(tmp_path / "c", origin) as cache:
            await read(cache, large, ByteRange(BLOCK, 2 * BLOCK - 1))
            await cache.settle()
        async with open_cache(tmp_path / "c", origin, slots=slots("epoch", BLOCK)) as cache:
            for version in (small, large, small, large):
                assert await read(cache, version) == content_of(origin, version)
                await cache.settle()
            assert cache.usage().blocks == 2
            assert by_label(metrics.CACHE_NOT_KEPT, "reason") == {"size": 4}
            assert (
                counted(metrics.CACHE_HIT_BYTES),
                counted(metrics.CACHE_FILLS, outcome="failed"),
                counted(metrics.CACHE_STORE_UNAVAILABLE),
            ) == (3 * BLOCK, 0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("small_object_bytes_max", [0, SMALL])
def test_no_more_is_written_in_a_day_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_object_bytes_max: int
) -> None:
    """By all processes together, across a restart; then everything is served and nothing kept, until midnight UTC."""
    monkeypatch.setattr(WrittenBytes, "since", lambda *_: 0)  # test_index_size.py counts what the index takes

    async def scenario() -> None:
        origin, clock = make_origin(), TestClock()
        clock.time = 1000.0 * DAY + 100
        versions = [stored(origin, f"k{n}", SMALL - 200) for n in range(30)]
        more: dict[str, Any] = {
            "block_size_bytes": SMALL,
            "daily_writes_bytes": 10 * FILE,
            "small_object_bytes_max": small_object_bytes_max,
        }
        for worker in range(2):
            async with open_cache(tmp_path / "c", origin, clock=clock, worker=worker, **more) as cache:
                for version in versions[: 15 + worker]:
                    assert await read(cache, version) == content_of(origin, version)
                    await cache.settle()
                assert cache.usage().used_bytes <= 10 * FILE
                assert cache.usage().blocks >= 10
                kept = cache.usage().blocks
        assert by_label(metrics.CACHE_NOT_KEPT, "reason") == {"write-budget": 15 - kept + 16 - kept}
        clock.advance(DAY)
        async with open_cache(tmp_path / "c", origin, clock=clock, **more) as cache:
            for version in versions:
                assert await read(cache, version) == content_of(origin, version)
                await cache.settle()
            assert 20 <= cache.usage().blocks < 30

    asyncio.run(scenario())


def test_what_is_kept_is_hit_though_nothing_more_may_be_written(tmp_path: Path) -> None:
    """A read over many blocks takes those that are there from here, and the runs between them from the origin."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "large", 8 * BLOCK)
        async with open_cache(tmp_path / "c", origin, readahead_bytes=0) as cache:
            for number in (2, 5):
                await read(cache, version, ByteRange(number * BLOCK, (number + 1) * BLOCK - 1))
            await cache.settle()
        async with open_cache(tmp_path / "c", origin, daily_writes_bytes=1) as cache:
            before, missed_before = origin.count(), counted(metrics.CACHE_MISS_BYTES)
            assert await read(cache, version) == content_of(origin, version)
            assert origin.count() == before + 3
            assert counted(metrics.CACHE_HIT_BYTES) == 2 * BLOCK
            assert counted(metrics.CACHE_MISS_BYTES) - missed_before == 6 * BLOCK

    asyncio.run(scenario())


def test_what_is_used_meanwhile_has_its_turn_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telling the index what was used comes to an end under load, however much is used while it is told."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(tmp_path / "c", origin) as cache:
            index, told = cache._dependencies.directory.index, 0

            def touch() -> None:
                nonlocal told
                told += 1
                index.accesses.take(TOUCHES_PER_TRANSACTION)
                index.accesses.note(f"file-{told}")

            monkeypatch.setattr(index, "touch", touch)
            for number in range(TOUCHES_PER_TRANSACTION + 1):
                index.accesses.note(str(number))
            await asyncio.wait_for(cache.flush_accesses(), 10)
            assert told == 2
            monkeypatch.undo()

    asyncio.run(scenario())


def test_the_books_of_the_queues_are_exact_after_everything(tmp_path: Path) -> None:
    """What the index counts in each queue is what its files take, packed or not, whatever was read and deleted."""

    async def scenario() -> None:
        origin, generator = make_origin(), random.Random(4)
        sizes = [generator.choice((3000, SMALL, 3 * SMALL + 5)) for _ in range(60)]
        versions = [stored(origin, f"k{n}", size) for n, size in enumerate(sizes)]
        async with open_cache(
            tmp_path / "c", origin, capacity_bytes=2 * MIB, block_size_bytes=SMALL, small_object_bytes_max=8 * KIB
        ) as cache:
            for _ in range(300):
                version = generator.choice(versions)
                await read(cache, version)
                if generator.random() < 0.1:
                    await cache.settle()
                    await cache.flush_accesses()
                    await cache.invalidate(generator.choice(versions).key)
            await cache.settle()
            index = cache._dependencies.directory.index
            with index.reading() as transaction:
                state = transaction.account(transaction.slots()["default"])
            files = list(index.files())
            for queue in Queue:
                assert state.queue_bytes[queue] == sum(file.disk_bytes for file in files if file.queue == queue)
            assert state.blocks == sum(file.blocks for file in files) == cache.usage().blocks

    asyncio.run(scenario())
