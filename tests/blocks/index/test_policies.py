"""The eviction policies over a slot in memory: what epochs, new data sets, scans and popular blocks hit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.blocks.policies import PASSING_PART, Eviction, Queue
from tests.support.slot_simulation import BLOCK_BYTES, SlotSimulation, data_set, shuffled_epochs

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
