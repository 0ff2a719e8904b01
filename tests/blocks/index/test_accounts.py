"""The directory's accounts: usage is exact, capacity holds, no file is forgotten, in whatever order things happen."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.blocks import layout
from gateway.blocks.directory import Evicted, FillFile
from gateway.blocks.eviction import VICTIMS_PER_TRANSACTION, SlotUsage
from gateway.blocks.layout import Block, BlockSettings
from gateway.blocks.opening import OpenDirectory, open_directory
from gateway.core.errors import StartupError, StoreUnavailable
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.policy.slots import Prefix, Slots
from tests.support.blocks import KIB, block_files, by_last_use, partial_files
from tests.support.slots import Slot

PAGE = 4096


def small_block(key: str, size_bytes: int) -> Block:
    version = ObjectVersion(ObjectKey("b", key), '"e"', size_bytes)
    return layout.block_at(version, 0, 64 * KIB)


def begin(opened: OpenDirectory, block: Block) -> tuple[FillFile, Evicted]:
    """Of a fill."""
    begun = opened.blocks.begin(block, slot_of(block))
    assert begun is not None
    return begun


def fill_now(opened: OpenDirectory, block: Block) -> None:
    filled, _ = begin(opened, block)
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
            filled, _ = begin(self.opened, block)
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
            used = usage.slots.get(slot, SlotUsage())
            assert used == SlotUsage(len(blocks), sum(blocks.values()), self._reserved(slot))
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


TestAccounts = Accounts.TestCase
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
    filled, evicted = begin(opened, layout.block_at(version, 0, 4096 * KIB))
    assert evicted.blocks == {"default": 196}
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
    filled, _ = begin(dead, small_block("k1", PAGE))
    filled.file.close()
    kill(dead)
    assert len(partial_files(tmp_path / "c")) == 1
    opened = open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 0)
    assert opened.blocks.index.usage().reserved_bytes == 0
    assert partial_files(tmp_path / "c") == []
    opened.close()
