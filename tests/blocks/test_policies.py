"""The eviction policies over a slot in memory: what epochs, new data sets, scans and popular blocks hit."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.blocks.cache import BlockCache
from gateway.blocks.index import TOUCHES_PER_TRANSACTION, WrittenBytes
from gateway.blocks.policies import PASSING_PART, RETURNS_MIN, Eviction, Queue, ReuseDistance
from gateway.core.model import ByteRange, ObjectVersion
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix, Slots
from gateway.telemetry import metrics
from tests.support.blocks import BLOCK, KIB, MIB, TestClock, content_of, make_origin, open_cache, read, stored, whole
from tests.support.counting import by_label, counted
from tests.support.prepared_process import PreparedProcess
from tests.support.slot_simulation import BLOCK_BYTES, SlotSimulation, data_set, shuffled_epochs
from tests.support.slots import Slot

CAPACITY = 400
FITTING_HALF = 2 * CAPACITY
GOOD = 0.48
"""Of a data set of which half fits, the best that is possible without knowing the order is 0.5."""

SHAPES = pytest.mark.parametrize(("workers", "blocks_per_file"), [(1, 1), (4, 1), (2, 10)])
"""Processes that tell of their reads in batches; files that hold one block, and segments that hold several."""


def epochs(simulation: SlotSimulation, blocks: Sequence[str], count: int, seed: int) -> list[float]:
    return [simulation.read_all(epoch) for epoch in shuffled_epochs(blocks, count, seed)]


@SHAPES
@pytest.mark.parametrize("seed", range(3))
def test_epochs_that_fit_by_half_hit_by_half(workers: int, blocks_per_file: int, seed: int) -> None:
    """From the second epoch on, in whatever order; lru has a third of that at most where files hold one block."""
    simulation = SlotSimulation(Eviction.EPOCH, CAPACITY, blocks_per_file, workers)
    assert min(epochs(simulation, data_set("a", FITTING_HALF), 5, seed)[1:]) >= GOOD
    by_use = SlotSimulation(Eviction.LRU, CAPACITY, 1, workers)
    assert max(epochs(by_use, data_set("a", FITTING_HALF), 4, seed)[1:]) < 0.25


@SHAPES
@pytest.mark.parametrize("before", [1, 2, 5])
def test_another_data_set_gets_in(workers: int, blocks_per_file: int, before: int) -> None:
    """By its third epoch, however often the first was read; nobody says that it was given up."""
    simulation = SlotSimulation(Eviction.EPOCH, CAPACITY, blocks_per_file, workers)
    epochs(simulation, data_set("a", FITTING_HALF), before, seed=1)
    assert min(epochs(simulation, data_set("b", FITTING_HALF), 4, seed=2)[2:]) >= GOOD


@pytest.mark.slow
@pytest.mark.parametrize(("parts_of_capacity", "best"), [(6.0, 1 / 6), (1.2, 1 / 1.2), (0.5, 1.0)])
def test_another_data_set_of_another_size_gets_in(parts_of_capacity: float, best: float) -> None:
    """One that is much larger, one that nearly fits, one that fits."""
    simulation = SlotSimulation(Eviction.EPOCH, 1000, workers=4)
    epochs(simulation, data_set("a", 2000), 3, seed=1)
    blocks = data_set("b", int(1000 * parts_of_capacity))
    assert min(epochs(simulation, blocks, 5, seed=2)[3:]) >= 0.95 * best


def test_an_order_that_is_always_the_same_hits_as_well() -> None:
    """Where lru never hits: what is asked for has always just been evicted."""
    blocks = data_set("a", FITTING_HALF)
    simulation = SlotSimulation(Eviction.EPOCH, CAPACITY)
    assert [simulation.read_all(blocks) for _ in range(4)][1:] == pytest.approx([0.5] * 3, abs=0.02)
    by_use = SlotSimulation(Eviction.LRU, CAPACITY)
    assert [by_use.read_all(blocks) for _ in range(4)] == [0.0] * 4


def test_data_sets_read_in_turn_are_kept_side_by_side() -> None:
    """Training and validation: neither pushes the other out."""
    simulation, generator = SlotSimulation(Eviction.EPOCH, CAPACITY, workers=4), random.Random(3)
    training, validation = data_set("t", FITTING_HALF), data_set("v", CAPACITY // 5)
    found = []
    for _ in range(5):
        found.append(simulation.read_all(generator.sample(training, len(training))))
        found.append(simulation.read_all(generator.sample(validation, len(validation))))
    assert min(found[2::2]) >= 0.38  # four fifths of the room are left
    assert min(found[3::2]) >= 0.9


def test_a_slow_job_keeps_its_part_beside_a_fast_one() -> None:
    """One that reads its data set four times while the other reads its own once."""
    simulation = SlotSimulation(Eviction.EPOCH, CAPACITY, workers=4)
    fast = [name for epoch in shuffled_epochs(data_set("f", CAPACITY // 2), 16, 1) for name in epoch]
    slow = [name for epoch in shuffled_epochs(data_set("s", CAPACITY), 4, 2) for name in epoch]
    hits: dict[str, list[bool]] = {"f": [], "s": []}
    for step, name in enumerate(slow):
        for wanted in (name, *fast[2 * step : 2 * step + 2]):
            hits[wanted[0]].append(simulation.read(wanted))
    assert sum(hits["f"][len(fast) // 2 :]) >= 0.97 * len(fast) / 2
    assert sum(hits["s"][len(slow) // 2 :]) >= 0.45 * len(slow) / 2


@pytest.mark.parametrize("scanned", [CAPACITY // 2, FITTING_HALF])
def test_a_scan_between_epochs_costs_nothing(scanned: int) -> None:
    """What is read once leaves what is read again where it is, even as much as an epoch of it."""
    simulation, blocks = SlotSimulation(Eviction.EPOCH, CAPACITY, workers=4), data_set("a", FITTING_HALF)
    epochs(simulation, blocks, 3, seed=1)
    assert simulation.read_all(data_set("scan", scanned)) == 0.0
    assert min(epochs(simulation, blocks, 2, seed=2)) >= GOOD


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.7, 1.0])
def test_popularity_serves_no_worse_than_lru(exponent: float) -> None:
    """`epoch` is the default: traffic without epochs, which then shifts to other keys, must not suffer from it."""
    found: dict[Eviction, list[float]] = {}
    for eviction in (Eviction.EPOCH, Eviction.LRU):
        simulation, generator = SlotSimulation(eviction, 1000, workers=4), random.Random(1)
        weights = [1 / (rank + 1) ** exponent for rank in range(10_000)]
        ratios = []
        for name in ("x", "y"):
            names = data_set(name, 10_000)
            ratios += [simulation.read_all(generator.choices(names, weights, k=4000)) for _ in range(4)]
        found[eviction] = ratios
    for of_epoch, of_lru in zip(found[Eviction.EPOCH][1:4], found[Eviction.LRU][1:4], strict=True):
        assert of_epoch >= of_lru - 0.03
    assert found[Eviction.EPOCH][-1] >= found[Eviction.LRU][-1] - 0.03


def test_what_fits_is_never_evicted() -> None:
    """Whatever the policy: without need nothing goes."""
    for eviction in Eviction:
        simulation = SlotSimulation(eviction, CAPACITY, workers=4)
        assert epochs(simulation, data_set("a", CAPACITY), 4, seed=1)[1:] == [1.0] * 3
        assert simulation.written == CAPACITY


READS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 59)), max_size=300)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(Eviction), READS, st.integers(4, 40), st.integers(1, 4), st.integers(1, 3))
def test_books_are_exact(
    eviction: Eviction, reads: list[tuple[int, int]], capacity: int, blocks_per_file: int, workers: int
) -> None:
    """Whatever is read: no more is kept than there is room for, and what the queues hold is what is counted."""
    simulation = SlotSimulation(eviction, capacity, blocks_per_file, workers, told_after=5)
    for name, number in reads:
        simulation.read(f"{name}/{number}")
        state, files = simulation.book.state, simulation.book.files.values()
        for queue in Queue:
            assert state.queue_bytes[queue] == sum(file.disk_bytes for file in files if file.queue == queue)
        assert state.evictable_bytes <= capacity * BLOCK_BYTES
        assert simulation.book.state == type(state).unpack(state.pack())


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(st.integers(100, 600), st.floats(1.5, 5.0), st.integers(0, 2**32))
def test_epochs_hit_by_what_fits(capacity: int, times: float, seed: int) -> None:
    """For any size of slot and data set: all but the small queue's part of the room hits."""
    simulation = SlotSimulation(Eviction.EPOCH, capacity, workers=2)
    found = epochs(simulation, data_set("a", int(capacity * times)), 4, seed)
    assert min(found[1:]) >= (1 - 1 / PASSING_PART - 0.025) / times


@pytest.mark.parametrize("told_after", [CAPACITY // 2, CAPACITY])
def test_hits_may_be_told_of_late(told_after: int) -> None:
    """What the first data set hit is told of when the second is being read already; that one gets in all the same."""
    simulation = SlotSimulation(Eviction.EPOCH, CAPACITY, workers=4, told_after=told_after)
    assert min(epochs(simulation, data_set("a", FITTING_HALF), 3, seed=1)[1:]) >= GOOD
    assert min(epochs(simulation, data_set("b", FITTING_HALF), 4, seed=2)[2:]) >= GOOD


@pytest.mark.slow
def test_a_few_blocks_read_all_the_time_do_not_keep_the_old_alive() -> None:
    """An index, beside the epochs: it comes back all the time, and the data set that was given up does not."""
    simulation, generator = SlotSimulation(Eviction.EPOCH, 1000, workers=4), random.Random(7)
    index = data_set("index", 10)

    def with_index(blocks: Sequence[str]) -> list[str]:
        return [
            name for block in blocks for name in ((block, generator.choice(index)) if block[-1] == "0" else (block,))
        ]

    found = [
        simulation.read_all(with_index(epoch))
        for name in ("a", "b")
        for epoch in shuffled_epochs(data_set(name, 2000), 4, seed=len(name))
    ]
    assert min(found[1:4]) >= GOOD
    assert found[7] >= GOOD


EPOCH = 10_000


def read_epoch(returns: ReuseDistance, order_before: list[int], order: list[int], begun: int) -> None:
    """Every block comes back once; `order_before` says where it was read in the epoch before."""
    last_used = {block: begun - EPOCH + at * EPOCH // len(order_before) for at, block in enumerate(order_before)}
    for at, block in enumerate(order):
        returns.add(begun + at * EPOCH // len(order), last_used[block])


def test_nothing_is_known_at_first() -> None:
    """Without returns there is nothing to protect."""
    assert ReuseDistance().kept_since(123) is None


def test_a_few_returns_protect_everything() -> None:
    """Until there are enough of them to tell how old the oldest is."""
    returns = ReuseDistance()
    for number in range(RETURNS_MIN // 4):
        returns.add(20_000 + number, 10_000 + number)
        assert returns.kept_since(20_000 + number) == 0


@pytest.mark.slow
@given(st.integers(0, 2**32))
def test_what_the_epoch_before_has_read_is_kept_and_nothing_much_older(seed: int) -> None:
    """At the end of an epoch, no block of it and few of the one before may go; two epochs before that, all may."""
    generator, blocks = random.Random(seed), list(range(400))
    orders = [generator.sample(blocks, len(blocks)) for _ in range(7)]
    returns = ReuseDistance()
    for number in range(1, 7):
        read_epoch(returns, orders[number - 1], orders[number], number * EPOCH)
    kept_since = returns.kept_since(7 * EPOCH)
    assert kept_since is not None
    assert 2.8 * EPOCH <= kept_since <= 5 * EPOCH + EPOCH // 20


def test_what_stopped_coming_back_is_kept_for_as_long_as_it_took() -> None:
    """And not for ever: then lru decides again."""
    generator, blocks = random.Random(1), list(range(400))
    returns = ReuseDistance()
    read_epoch(returns, generator.sample(blocks, 400), generator.sample(blocks, 400), EPOCH)
    assert returns.kept_since(2 * EPOCH + EPOCH // 2) is not None
    assert returns.kept_since(4 * EPOCH) is None


def test_a_block_that_was_away_while_nothing_came_back_is_of_another_data_set() -> None:
    """From then on only what comes back with it counts."""
    returns = ReuseDistance()
    for number in range(100):
        returns.add(20_000 + number, 10_000 + number)
    for number in range(RETURNS_MIN):
        returns.add(40_000 + number, 30_000 + number)
    kept_since = returns.kept_since(40_100)
    assert kept_since is not None
    assert 25_000 < kept_since <= 30_000


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5000)), max_size=50))
def test_it_survives_being_written_down(steps: list[tuple[int, int]]) -> None:
    """What is packed and unpacked says the same."""
    returns, position = ReuseDistance(), 10_000
    for step, age in steps:
        position += step
        returns.add(position, position - age)
        assert ReuseDistance.unpack(returns.pack()) == returns


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


@pytest.mark.slow
@pytest.mark.parametrize("small_object_bytes_max", [0, SMALL])
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


@pytest.mark.slow
async def test_epochs_hit_by_half_however_seldom_uses_are_flushed(tmp_path: Path) -> None:
    """What evicts enters the uses noted before it: another data set is in by its third epoch, flushes however late."""
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


@pytest.mark.slow
async def test_each_slot_follows_its_own_policy(tmp_path: Path) -> None:
    """The same reads, in order, in two slots that take half of the room each: lru never hits, epoch by half."""
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


async def test_another_policy_takes_over_what_is_there(tmp_path: Path) -> None:
    """After a change of the settings everything is served from where it lay, and evicted as the new policy says."""
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


@pytest.mark.slow
async def test_what_is_warmed_takes_the_place_of_what_was_read_longest_ago(tmp_path: Path) -> None:
    """Whoever warms a data set means it: the slot's policy does not hold what was read before against it."""
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


async def test_objects_larger_than_the_slot_keeps_are_served_and_not_kept(tmp_path: Path) -> None:
    """And counted; smaller ones beside them are kept, and what was kept before goes on being served."""
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


@pytest.mark.parametrize("small_object_bytes_max", [0, SMALL])
async def test_no_more_is_written_in_a_day_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_object_bytes_max: int
) -> None:
    """By all processes together, across a restart; then everything is served and nothing kept, until midnight UTC."""
    monkeypatch.setattr(WrittenBytes, "since", lambda *_: 0)  # test_index_size.py counts what the index takes
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


async def test_what_is_kept_is_hit_though_nothing_more_may_be_written(tmp_path: Path) -> None:
    """A read over many blocks takes those that are there from here, and the runs between them from the origin."""
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


@pytest.mark.slow
async def test_the_books_of_the_queues_are_exact_after_everything(tmp_path: Path) -> None:
    """What the index counts in each queue is what its files take, packed or not, whatever was read and deleted."""
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
