"""Slots on one cache directory: what is guaranteed, what is lent, what is on whose account."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.blocks import layout
from gateway.blocks.cache import BlockCache
from gateway.blocks.directory import FillFile
from gateway.blocks.eviction import VICTIMS_PER_TRANSACTION
from gateway.blocks.layout import Block, BlockSettings
from gateway.blocks.opening import OpenDirectory, account_late, move_between_slots, open_directory, rebuild
from gateway.blocks.policies import SlotAccount
from gateway.core.errors import StartupError, StoreUnavailable
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.policy.slots import Prefix, Slots
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    KIB,
    block_files,
    by_last_use,
    make_origin,
    open_cache,
    partial_files,
    stored,
    take,
    whole,
)
from tests.support.counting import by_label, counted
from tests.support.fill_worker import FillWorker
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Hold, on
from tests.support.slots import Slot

FILE = BLOCK + 4096
"""What a whole block takes on disk, header included."""


def slots(guarantee_a: int = 4 * FILE, limit_a: int | None = None, limit_b: int | None = None) -> Slots:
    return Slots(
        [
            Slot("a", Prefix.parse("s3://train/a/"), capacity_bytes=guarantee_a, capacity_limit_bytes=limit_a),
            Slot("b", Prefix.parse("s3://train/b/"), capacity_limit_bytes=limit_b),
        ]
    )


async def read_in(cache: BlockCache, slot: str, *versions: ObjectVersion) -> None:
    for version in versions:
        await take(await cache.open_range(version, whole(version), slot=slot))
        await cache.settle()


def objects(origin: MemoryOrigin, prefix: str, count: int) -> list[ObjectVersion]:
    return [stored(origin, f"{prefix}/{n}", BLOCK) for n in range(count)]


def blocks_of(cache: BlockCache) -> dict[str, int]:
    return {slot: usage.blocks for slot, usage in cache.usage().slots.items() if usage.blocks}


async def test_a_guarantee_survives_any_scan(tmp_path: Path) -> None:
    """What a slot holds within its guarantee is not evicted by others, however much they read."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, capacity_bytes=10 * FILE, slots=slots()) as cache:
        mine = objects(origin, "a", 4)
        await read_in(cache, "a", *mine)
        await read_in(cache, "b", *objects(origin, "b", 30))
        assert blocks_of(cache) == {"a": 4, "b": 6}
        assert by_label(metrics.CACHE_EVICTED_BLOCKS, "slot") == {"b": 24}
        asked = origin.count()
        await read_in(cache, "a", *mine)
        assert origin.count() == asked


async def test_idle_room_is_lent_and_comes_back(tmp_path: Path) -> None:
    """Others fill what a slot is guaranteed while it does not need it, and give it back when it does."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, capacity_bytes=10 * FILE, slots=slots()) as cache:
        await read_in(cache, "b", *objects(origin, "b", 12))
        assert blocks_of(cache) == {"b": 10}
        await read_in(cache, "a", *objects(origin, "a", 4))
        assert blocks_of(cache) == {"a": 4, "b": 6}


async def test_slots_without_guarantees_end_up_with_equal_parts(tmp_path: Path) -> None:
    """Beyond the guarantees the room is shared by need, and nobody's scan takes it all."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, capacity_bytes=10 * FILE, slots=slots(0)) as cache:
        await read_in(cache, "b", *objects(origin, "b", 12))
        await read_in(cache, "a", *objects(origin, "a", 12))
        assert blocks_of(cache) == {"a": 5, "b": 5}
        await read_in(cache, "default", *objects(origin, "c", 12))
        assert sorted(blocks_of(cache).values()) == [3, 3, 4]


async def test_a_limit_holds_while_there_is_room(tmp_path: Path) -> None:
    """A slot at its limit evicts its own, and others' blocks stay."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, capacity_bytes=100 * FILE, slots=slots(limit_b=3 * FILE)) as cache:
        await read_in(cache, "a", *objects(origin, "a", 5))
        await read_in(cache, "b", *objects(origin, "b", 10))
        assert blocks_of(cache) == {"a": 5, "b": 3}


async def test_a_slot_for_which_nothing_is_left_reads_past_the_cache(tmp_path: Path) -> None:
    """With all room guaranteed to others and used by them, a read is still right, and nobody loses a block."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, capacity_bytes=4 * FILE, slots=slots()) as cache:
        await read_in(cache, "a", *objects(origin, "a", 4))
        await read_in(cache, "b", *objects(origin, "b", 2))
        assert blocks_of(cache)["a"] == 4
        assert (by_label(metrics.CACHE_NOT_KEPT, "reason"), counted(metrics.CACHE_STORE_UNAVAILABLE)) == (
            {"room": 2},
            0,
        )


@pytest.mark.parametrize("limit", [None, 2 * FILE])
async def test_another_configuration_moves_blocks_to_their_new_slots(tmp_path: Path, limit: int | None) -> None:
    """After a survey every byte is on the account that the slots of now give it, within its limit; no block is lost."""
    origin = make_origin()
    in_a, in_b = objects(origin, "a", 3), objects(origin, "b", 3)
    async with open_cache(tmp_path / "c", origin) as cache:
        await read_in(cache, "default", *in_a, *in_b)
        assert blocks_of(cache) == {"default": 6}
    async with open_cache(tmp_path / "c", origin, slots=slots(limit_b=limit)) as cache:
        before = cache.usage()
        assert before.blocks == 6
        await cache.rebuild_index()
        kept = 3 if limit is None else 2
        assert blocks_of(cache) == {"a": 3, "b": kept}
        assert cache.usage().used_bytes == (3 + kept) * FILE
        asked = origin.count()
        await read_in(cache, "a", *in_a)
        await read_in(cache, "b", *in_b[3 - kept :])
        assert origin.count() == asked


async def test_a_survey_that_is_broken_off_is_carried_on(tmp_path: Path) -> None:
    """Whoever opens the directory next finishes it; what was moved before stays moved."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin) as cache:
        await read_in(cache, "default", *objects(origin, "a", 20))
    async with open_cache(tmp_path / "c", origin, slots=slots()) as cache:
        steps = rebuild(cache._dependencies.directory, slots())
        for _ in range(9):
            next(steps)
    async with open_cache(tmp_path / "c", origin, slots=slots()) as cache:
        moved = blocks_of(cache)
        assert 0 < moved["a"] < 20
        await cache.rebuild_index()
        assert blocks_of(cache) == {"a": 20}


async def test_slots_change_while_the_cache_is_open(tmp_path: Path) -> None:
    """Blocks go to the accounts of now, and beyond a new limit they are evicted; those that come count there."""
    origin, now, prefix = make_origin(), Slots(), Prefix.parse("s3://train/a/")
    async with open_cache(tmp_path / "c", origin, slots=now) as cache:

        async def change(*slots: Slot) -> None:
            now.apply_settings(slots)
            await cache.apply_settings(64 * BLOCK)
            await cache.move_between_slots()

        await read_in(cache, "default", *objects(origin, "a", 20))
        assert blocks_of(cache) == {"default": 20}
        await change(Slot("a", prefix))
        assert blocks_of(cache) == {"a": 20}
        await change(Slot("a", prefix, capacity_limit_bytes=10 * FILE))
        assert blocks_of(cache) == {"a": 10}
        await read_in(cache, "a", *objects(origin, "a/more", 5))
        assert blocks_of(cache) == {"a": 10}
        await change()
        assert blocks_of(cache) == {"default": 10}


async def test_no_fill_waits_for_all_that_a_lowered_capacity_evicts(tmp_path: Path) -> None:
    """It evicts a little more than it brings; the rest goes in steps, while others read."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, slots=Slots()) as cache:
        await read_in(cache, "default", *objects(origin, "a", 40))
        await cache.apply_settings(10 * FILE)
        await read_in(cache, "default", *objects(origin, "b", 3))
        assert blocks_of(cache) == {"default": 37}, "each that comes lets two go"
        await cache.move_between_slots()
        assert blocks_of(cache) == {"default": 10}
        await cache.apply_settings(20 * FILE)
        await read_in(cache, "default", *objects(origin, "c", 30))
        assert blocks_of(cache) == {"default": 20}


async def test_what_is_fetched_while_slots_change_goes_to_the_account_of_now(tmp_path: Path) -> None:
    """It began on that of before."""
    origin, now = make_origin(), Slots()
    async with open_cache(tmp_path / "c", origin, slots=now) as cache:
        await read_in(cache, "default", *objects(origin, "a", 3))
        late = stored(origin, "a/late", BLOCK)
        reader = await cache.open_range(late, whole(late), slot="default")
        now.apply_settings([Slot("a", Prefix.parse("s3://train/a/"))])
        await cache.apply_settings(64 * BLOCK)
        moving = asyncio.create_task(cache.move_between_slots())
        await asyncio.sleep(0)
        await take(reader)
        await cache.settle()
        await moving
        assert blocks_of(cache) == {"a": 4}


@pytest.mark.parametrize(("size_bytes", "blocks"), [(1000, 1), (12 * BLOCK, 12)])
async def test_what_is_fetched_after_slots_have_changed_goes_to_the_account_of_now(
    tmp_path: Path, size_bytes: int, blocks: int
) -> None:
    """The read began before; who moved what lay there could not know of it."""
    origin, now, answered = make_origin(), Slots(), asyncio.Event()
    async with open_cache(tmp_path / "c", origin, slots=now, fills_max=1, small_object_bytes_max=BLOCK - 1) as cache:
        late = stored(origin, "a/late", size_bytes)
        asked = asyncio.Event()
        origin.inject(on(Operation.GET_OBJECT), Hold(answered, asked))
        reading = asyncio.create_task(read_in(cache, "default", late))
        await asked.wait()
        now.apply_settings([Slot("a", Prefix.parse("s3://train/a/"))])
        await cache.apply_settings(64 * BLOCK)
        directory = cache._dependencies.directory
        begun = move_between_slots(directory, now)
        for _ in rebuild(directory, now):
            pass
        answered.set()
        await reading
        await cache.settle()
        account_late(directory, now, begun)
        assert blocks_of(cache) == {"a": blocks}


def test_a_process_that_comes_later_leaves_the_accounts_to_the_others(tmp_path: Path) -> None:
    """Slots were changed, and not all keep to them yet: who starts meanwhile changes nothing of the accounts."""
    settings = BlockSettings(tmp_path / "c", 64 * BLOCK, BLOCK, slots=slots())
    with FillWorker(tmp_path / "c", 1, "http://127.0.0.1:9"):
        opened = open_directory(settings, 0)
        with opened.blocks.index.reading() as transaction:
            assert not transaction.unindexed()
        opened.close()


async def test_files_on_disk_are_what_the_accounts_say(tmp_path: Path) -> None:
    """Usage is counted in whole pages, as the disk counts."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, slots=slots()) as cache:
        await read_in(cache, "a", stored(origin, "a/odd", 100_001), stored(origin, "a/one", 1))
        await read_in(cache, "b", stored(origin, "b/odd", 70_000))
        on_disk = sum(path.stat().st_blocks * 512 for path in block_files(tmp_path / "c"))
        assert cache.usage().used_bytes == on_disk
        used = cache.usage().slots
        assert used["a"].used_bytes + used["b"].used_bytes == on_disk


PAGE = 4096


def small_block(key: str, size_bytes: int) -> Block:
    version = ObjectVersion(ObjectKey("b", key), '"e"', size_bytes)
    return layout.block_at(version, 0, 64 * KIB)


def begin(opened: OpenDirectory, block: Block) -> FillFile:
    begun = opened.blocks.begin(block, slot_of(block))
    assert begun is not None
    return begun


def fill_now(opened: OpenDirectory, block: Block) -> None:
    filled = begin(opened, block)
    opened.blocks.store.write(filled.file, b"x" * block.length, filled.data_offset)
    opened.blocks.finish(filled, filled.file, b"\0" * 4)
    filled.file.close()


def kill(opened: OpenDirectory) -> None:
    """End as SIGKILL would: the kernel takes the lock back, nothing else happens."""
    opened.blocks.index.close()
    opened.locks.close()
    opened.worker_locks.give_back_own()


SLOTS = Slots(
    [
        Slot("a", Prefix.parse("s3://b/a"), capacity_bytes=6 * PAGE, eviction="lru"),
        Slot("b", Prefix.parse("s3://b/b"), capacity_bytes=3 * PAGE, capacity_limit_bytes=9 * PAGE, eviction="lru"),
        Slot("default", Prefix(""), eviction="lru"),
    ]
)
GUARANTEED = {"a": 6 * PAGE, "b": 3 * PAGE, "default": 0}
LIMITS = {"b": 9 * PAGE}


def slot_of(block: Block) -> str:
    return SLOTS.find("b", block.version.key.key).name


class Accounts(RuleBasedStateMachine):
    """A model of what each slot has cached, in the order of use, against the directory."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.capacity = 20 * PAGE
        self.model: dict[str, OrderedDict[bytes, int]] = {slot: OrderedDict() for slot in GUARANTEED}
        self.fills: list[FillFile] = []
        self.opened = self._open()

    def _open(self) -> OpenDirectory:
        return open_directory(BlockSettings(self.directory, self.capacity, 64 * KIB, slots=SLOTS), 0)

    def _slot_with(self, block_id: bytes) -> str | None:
        return next((slot for slot, blocks in self.model.items() if block_id in blocks), None)

    def _reserved(self, slot: str | None = None) -> int:
        fills = [filled.reservation for filled in self.fills]
        return sum(reservation.disk_bytes for reservation in fills if slot in (None, reservation.slot))

    def _taken(self, slot: str) -> int:
        return sum(self.model[slot].values()) + self._reserved(slot)

    def _follow_evictions(self) -> None:
        """What went was the oldest of a slot that had more than it is guaranteed, and no more than was needed."""
        left = {block.block_id for block in self.opened.blocks.index.blocks()}
        crowded = sum(map(self._taken, self.model)) > self.capacity
        last = 0
        for slot, blocks in self.model.items():
            over_limit = self._taken(slot) > LIMITS.get(slot, self.capacity)
            while blocks and next(iter(blocks)) not in left:
                assert over_limit or (crowded and self._taken(slot) > GUARANTEED[slot])
                last = max(last, blocks.popitem(last=False)[1])
            assert set(blocks) <= left
        taken = sum(map(self._taken, self.model))
        assert (
            not last
            or any(self._taken(slot) + last > limit for slot, limit in LIMITS.items())
            or (taken + last > self.capacity)
        )

    @rule(prefix=st.sampled_from("abc"), number=st.integers(0, 5), pages=st.integers(1, 8))
    def begin(self, prefix: str, number: int, pages: int) -> None:
        block = small_block(f"{prefix}{number}", pages * PAGE - 1)
        slot, needed = slot_of(block), (pages + 1) * PAGE
        if self._slot_with(block.id) is not None:
            assert self.opened.blocks.begin(block, slot) is None
            return
        try:
            filled = begin(self.opened, block)
        except StoreUnavailable:
            assert self._cannot_have(slot, needed)
        else:
            assert filled.reservation.disk_bytes == needed
            self.fills.append(filled)
        self._follow_evictions()

    def _cannot_have(self, slot: str, needed: int) -> bool:
        """Even with everything evicted that may be."""
        if self._reserved(slot) + needed > LIMITS.get(slot, self.capacity):
            return True
        others = sum(
            max(self._reserved(other), min(self._taken(other), GUARANTEED[other]))
            for other in self.model
            if other != slot
        )
        return self._reserved(slot) + needed + others > self.capacity

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        filled = self.fills.pop(data.draw(st.integers(0, len(self.fills) - 1)))
        self.opened.blocks.store.write(filled.file, b"x" * filled.block.length, filled.data_offset)
        extent = self.opened.blocks.finish(filled, filled.file, b"\0" * 4)
        filled.file.close()
        blocks = self.model[slot_of(filled.block)]
        assert (extent is None) == (filled.block.id in blocks)
        blocks.setdefault(filled.block.id, filled.reservation.disk_bytes)

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        filled = self.fills.pop(data.draw(st.integers(0, len(self.fills) - 1)))
        self.opened.blocks.discard(filled.reservation)
        filled.file.close()

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot, blocks in self.model.items() if blocks]))
        block_id = data.draw(st.sampled_from(list(self.model[slot])))
        extent = self.opened.blocks.index.lookup(block_id)
        assert extent is not None
        assert not self.opened.blocks.drop(block_id, extent.file + "-other")
        assert self.opened.blocks.drop(block_id, extent.file)
        del self.model[slot][block_id]

    @rule(prefix=st.sampled_from("abc"), number=st.integers(0, 5))
    def drop_object(self, prefix: str, number: int) -> None:
        self.opened.blocks.drop_object(layout.object_id(ObjectKey("b", f"{prefix}{number}")))
        for pages in range(1, 9):
            block = small_block(f"{prefix}{number}", pages * PAGE - 1)
            self.model[slot_of(block)].pop(block.id, None)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        cached = [(slot, block_id) for slot, blocks in self.model.items() for block_id in blocks]
        used = data.draw(st.lists(st.sampled_from(cached), unique=True))
        extents = [self.opened.blocks.index.lookup(block_id) for _, block_id in used]
        files = [extent.file for extent in extents if extent is not None]
        index = self.opened.blocks.index
        for file in (*files, "never heard of"):
            index.accesses.note(file)
        index.touch()
        assert not len(index.accesses)
        for slot, block_id in used:
            self.model[slot].move_to_end(block_id)

    @rule(orderly=st.booleans(), capacity=st.integers(9, 30))
    def restart(self, orderly: bool, capacity: int) -> None:
        if orderly:
            self.opened.close()
        else:
            kill(self.opened)
        for filled in self.fills:
            filled.file.close()
        self.fills = []
        self.capacity = capacity * PAGE
        self.opened = self._open()
        self._follow_evictions()

    @invariant()
    def the_accounts_are_right(self) -> None:
        usage = self.opened.blocks.index.usage()
        for slot, blocks in self.model.items():
            used = usage.slots.get(slot, SlotAccount())
            assert (used.blocks, used.used_bytes, used.pinned_bytes) == (len(blocks), sum(blocks.values()), 0)
            assert used.reserved_bytes == self._reserved(slot)
            assert used.used_bytes + used.reserved_bytes <= LIMITS.get(slot, self.capacity)
        assert usage.used_bytes + usage.reserved_bytes <= self.capacity
        order = by_last_use(self.opened.blocks.index)
        for blocks in self.model.values():
            assert [block_id for block_id in order if block_id in blocks] == list(blocks)

    @invariant()
    def the_disk_holds_what_the_accounts_say_and_nothing_else(self) -> None:
        indexed = sorted(record.extent.file for record in self.opened.blocks.index.blocks())
        assert sorted(path.name for path in block_files(self.directory)) == indexed
        writing = sorted(filled.reservation.file for filled in self.fills)
        assert sorted(path.name for path in partial_files(self.directory)) == writing

    def teardown(self) -> None:
        for filled in self.fills:
            filled.file.close()
        self.opened.close()
        shutil.rmtree(self.directory)


TestAccounts = pytest.mark.slow(Accounts.TestCase)
TestAccounts.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_a_block_that_never_fits_evicts_nothing(tmp_path: Path) -> None:
    """Asking for more than the capacity is refused before anything is thrown away for it."""
    opened = open_directory(BlockSettings(tmp_path / "c", 10 * PAGE, 64 * KIB), 0)
    fill_now(opened, small_block("k1", PAGE))
    with pytest.raises(StoreUnavailable):
        begin(opened, small_block("k2", 10 * PAGE))
    assert opened.blocks.index.usage().blocks == 1
    opened.close()


def test_room_is_made_in_transactions_of_bounded_size(tmp_path: Path) -> None:
    """However many small blocks must go for a large one, no transaction takes more than its share, and all go."""
    opened = open_directory(BlockSettings(tmp_path / "c", 400 * PAGE, 4096 * KIB), 0)
    for number in range(200):
        fill_now(opened, small_block(f"k{number}", PAGE))
    version = ObjectVersion(ObjectKey("b", "large"), '"e"', 390 * PAGE)
    before = metrics.CACHE_EVICTED_BLOCKS.value("default")
    filled = begin(opened, layout.block_at(version, 0, 4096 * KIB))
    assert metrics.CACHE_EVICTED_BLOCKS.value("default") - before == 196
    assert VICTIMS_PER_TRANSACTION < 196
    assert len(block_files(tmp_path / "c")) == 4
    opened.blocks.discard(filled.reservation)
    filled.file.close()
    opened.close()


def test_a_worker_is_one_living_process(tmp_path: Path) -> None:
    """A second process with the same number is refused, and the first is not disturbed."""
    opened = open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 0)
    with pytest.raises(StartupError, match="another process runs as worker 0"):
        open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 0)
    fill_now(opened, small_block("k1", PAGE))
    opened.close()


def test_a_slot_that_is_used_no_more_is_cleared_up_by_any_other(tmp_path: Path) -> None:
    """After fewer workers are started than before, nothing that the others had begun holds room."""
    dead = open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 7)
    filled = begin(dead, small_block("k1", PAGE))
    filled.file.close()
    kill(dead)
    assert len(partial_files(tmp_path / "c")) == 1
    opened = open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 0)
    assert opened.blocks.index.usage().reserved_bytes == 0
    assert partial_files(tmp_path / "c") == []
    opened.close()
