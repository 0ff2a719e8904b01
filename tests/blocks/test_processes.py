"""Several processes on one directory, and processes that are killed at any point."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from pathlib import Path

import pytest

from gateway.blocks import layout
from gateway.blocks.fetch_locks import FetchLocks, lock_of_place
from gateway.origin.client import Purpose
from tests.support.block_worker import objects
from tests.support.blocks import (
    KIB,
    MIB,
    block_files,
    content_of,
    make_origin,
    open_cache,
    partial_files,
    read,
    stored,
    whole,
)
from tests.support.prepared_process import PreparedProcess
from tests.support.waiting import until

CAPACITY = MIB
SEED = 20261121
KILLS = int(os.environ.get("FOREBAY_BLOCK_KILLS", "4"))
SECONDS_MAX = 120 + 10 * KILLS
KILLS_AMONG_THE_SAME = 4
ROOT = Path(__file__).parents[2]


def start(directory: Path, slot: int, seed: int, *, reads: int = 60, die_at: int = 0) -> subprocess.Popen[str]:
    arguments = [directory, slot, seed, reads, CAPACITY, die_at]
    return PreparedProcess(["tests.support.block_worker", *arguments], stdout=subprocess.PIPE)


def ending(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    return output.strip()


async def check(directory: Path) -> None:
    """The accounts fit the disk, the disk fits the capacity, and every block holds the object's bytes."""
    async with open_cache(directory, make_origin(), capacity_bytes=CAPACITY, block_size_bytes=64 * KIB) as cache:
        usage = cache.usage()
        indexed = {file.file: file.disk_bytes for file in cache._dependencies.directory.index.files()}
        assert indexed == {path.name: layout.in_pages(path.stat().st_size) for path in block_files(directory)}
        assert (usage.used_bytes, usage.reserved_bytes) == (sum(indexed.values()), 0)
        assert usage.blocks == sum(1 for _ in cache._dependencies.directory.index.blocks())
        assert usage.used_bytes <= CAPACITY
        assert partial_files(directory) == []
    origin = make_origin()
    async with open_cache(directory, origin, capacity_bytes=CAPACITY, block_size_bytes=64 * KIB) as cache:
        for version in objects(origin):
            assert await read(cache, version) == content_of(origin, version)


@pytest.mark.slow
def test_two_processes_share_one_directory(tmp_path: Path) -> None:
    """Both read right bytes while both fill and evict; together they keep the capacity."""
    workers = [start(tmp_path / "c", slot, SEED + slot, reads=150) for slot in range(2)]
    assert [ending(worker) for worker in workers] == ["done 0", "done 0"]
    asyncio.run(check(tmp_path / "c"))


@pytest.mark.slow
async def test_what_one_process_fetched_another_serves(tmp_path: Path) -> None:
    """A block that one worker has filled is a hit in every other."""
    assert ending(start(tmp_path / "c", 3, SEED)) == "done 0"
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, capacity_bytes=CAPACITY, block_size_bytes=64 * KIB) as cache:
        index = cache._dependencies.directory.index
        cached = {record.block_id for record in index.blocks()}
        hits = 0
        for version in objects(origin):
            for block in layout.blocks_of(version, whole(version), 64 * KIB):
                if block.id in cached:
                    assert await read(cache, version, block.range) == content_of(origin, version, block.range)
                    hits += 1
        assert hits == len(cached) > 0
        assert origin.count() == 0


async def test_a_warm_up_waits_for_a_first_read_of_the_only_worker(tmp_path: Path) -> None:
    """So the origin is asked once for the same bytes, though the table of locks does not have the read's."""
    origin = make_origin()
    version = stored(origin, "k", 64 * KIB)
    async with open_cache(
        tmp_path / "c", origin, worker=1, small_object_bytes_max=MIB, has_one_worker=True
    ) as background:
        heartbeats = background._dependencies.opened.heartbeats
        heartbeats.beat(0)
        worker = FetchLocks(tmp_path / "c/shared", 0, heartbeats, has_one_worker=True)
        try:
            place = lock_of_place(layout.object_id(version.key), 0, {})
            assert worker.take_unlisted(place)
            warm_up = background.fetch(version, whole(version), slot="default", purpose=Purpose.WARM)
            warming = asyncio.create_task(warm_up)
            await until(worker.others_fetch)
            for _ in range(10):
                await asyncio.sleep(0)
            assert origin.count() == 0
            worker.release(place)
            assert await warming == (64 * KIB, True)
            assert origin.count() == 1
        finally:
            worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("round_number", [0, 1])
def test_a_killed_process_leaves_no_wrong_byte_and_no_leak(tmp_path: Path, round_number: int) -> None:
    """SIGKILL at a random step, a neighbour at work: the bytes are right, the accounts exact, nothing is left over."""
    rng = random.Random(SEED + round_number)
    directory = tmp_path / "c"
    neighbour = start(directory, 1, rng.randrange(2**30), reads=100)
    for _ in range(3):
        die_at = rng.randrange(1, 600)
        assert ending(start(directory, 0, rng.randrange(2**30), die_at=die_at)) in ("died", "done 0"), die_at
    assert ending(neighbour) == "done 0"
    asyncio.run(check(directory))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_kills_at_every_kind_of_step(tmp_path: Path) -> None:
    """The same, many times over one directory, so that what one kill leaves is what the next process starts from."""
    rng = random.Random(SEED)
    for _ in range(KILLS):
        killed = start(tmp_path / "c", 0, rng.randrange(2**30), die_at=rng.randrange(1, 400))
        assert ending(killed) in ("died", "done 0")
        asyncio.run(check(tmp_path / "c"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_kills_among_processes_that_share_fills(tmp_path: Path) -> None:
    """Processes that want the same blocks, one killed at random steps over and over: nobody is stuck, no byte wrong."""
    rng = random.Random(SEED)
    for _ in range(-(-KILLS // KILLS_AMONG_THE_SAME)):
        seed = rng.randrange(2**30)
        neighbours = [start(tmp_path / "c", slot, seed, reads=150) for slot in (1, 2)]
        for _ in range(KILLS_AMONG_THE_SAME):
            killed = start(tmp_path / "c", 0, seed, die_at=rng.randrange(1, 400))
            assert ending(killed) in ("died", "done 0")
        assert [ending(neighbour) for neighbour in neighbours] == ["done 0", "done 0"]
        asyncio.run(check(tmp_path / "c"))
