"""The directory's accounts: usage is exact, capacity holds, no file is forgotten, in whatever order things happen."""

from __future__ import annotations

import secrets
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
from gateway.blocks.index import VICTIMS_PER_TRANSACTION
from gateway.blocks.layout import Block
from gateway.blocks.opening import OpenDirectory, open_directory
from gateway.blocks.settings import BlockSettings
from gateway.errors import StartupError, StoreUnavailable
from gateway.objects import ObjectKey, ObjectVersion
from tests.support.blocks import KIB, block_files, partial_files

PAGE = 4096


def small_block(number: int, size_bytes: int) -> Block:
    version = ObjectVersion(ObjectKey("b", f"k{number}"), '"e"', size_bytes)
    return layout.block_at(version, 0, 64 * KIB)


def begin(opened: OpenDirectory, block: Block) -> tuple[FillFile, Evicted]:
    """A fill that no other shares."""
    begun = opened.blocks.begin(block, block.id + secrets.token_bytes(16))
    assert begun is not None
    return begun


def fill_now(opened: OpenDirectory, block: Block) -> None:
    filled, _ = begin(opened, block)
    opened.blocks.store.write(filled.file, b"x" * block.length, filled.data_offset)
    opened.blocks.finish(filled, b"\0" * 4)
    filled.file.release()


def kill(opened: OpenDirectory) -> None:
    """End as SIGKILL would: the kernel takes the lock back, nothing else happens."""
    opened.blocks.index.close()
    opened._slots.give_back_own()


class Accounts(RuleBasedStateMachine):
    """A model of what is cached, in the order of use, against the directory."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.capacity = 20 * PAGE
        self.model: OrderedDict[bytes, int] = OrderedDict()
        self.fills: list[FillFile] = []
        self.opened = self._open()

    def _open(self) -> OpenDirectory:
        return open_directory(BlockSettings(self.directory, self.capacity, 64 * KIB), 0)

    def _evict_to(self, room: int) -> None:
        while self.model and sum(self.model.values()) > room:
            self.model.popitem(last=False)

    @property
    def reserved(self) -> int:
        return sum(filled.reservation.disk_bytes for filled in self.fills)

    @rule(number=st.integers(0, 12), pages=st.integers(1, 8))
    def begin(self, number: int, pages: int) -> None:
        block = small_block(number, pages * PAGE - 1)
        needed = (pages + 1) * PAGE
        if block.id in self.model:
            assert self.opened.blocks.begin(block, block.id) is None
            return
        if self.reserved + needed > self.capacity:
            with pytest.raises(StoreUnavailable):
                begin(self.opened, block)
            return
        filled, _ = begin(self.opened, block)
        assert filled.reservation.disk_bytes == needed
        self.fills.append(filled)
        self._evict_to(self.capacity - self.reserved)

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        filled = self.fills.pop(data.draw(st.integers(0, len(self.fills) - 1)))
        self.opened.blocks.store.write(filled.file, b"x" * filled.block.length, filled.data_offset)
        extent = self.opened.blocks.finish(filled, b"\0" * 4)
        filled.file.release()
        assert (extent is None) == (filled.block.id in self.model)
        self.model.setdefault(filled.block.id, filled.reservation.disk_bytes)

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        filled = self.fills.pop(data.draw(st.integers(0, len(self.fills) - 1)))
        self.opened.blocks.abandon(filled)
        filled.file.release()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(list(self.model)))
        extent = self.opened.blocks.index.lookup(block_id)
        assert extent is not None
        assert not self.opened.blocks.drop(block_id, extent.file + "-other")
        assert self.opened.blocks.drop(block_id, extent.file)
        del self.model[block_id]

    @rule(number=st.integers(0, 12))
    def drop_object(self, number: int) -> None:
        key = ObjectKey("b", f"k{number}")
        self.opened.blocks.drop_object(layout.object_id(key))
        for pages in range(1, 9):
            self.model.pop(small_block(number, pages * PAGE - 1).id, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        used = data.draw(st.lists(st.sampled_from(list(self.model)), unique=True))
        self.opened.blocks.index.touch([*used, b"never heard of" * 2])
        for block_id in used:
            self.model.move_to_end(block_id)

    @rule(orderly=st.booleans(), capacity=st.integers(5, 30))
    def restart(self, orderly: bool, capacity: int) -> None:
        if orderly:
            self.opened.close()
        else:
            kill(self.opened)
        for filled in self.fills:
            filled.file.release()
        self.fills = []
        self.capacity = capacity * PAGE
        self.opened = self._open()
        self._evict_to(self.capacity)

    @invariant()
    def the_accounts_are_right(self) -> None:
        index = self.opened.blocks.index
        usage = index.usage()
        assert usage.blocks == len(self.model)
        assert usage.used_bytes == sum(self.model.values())
        assert usage.reserved_bytes == self.reserved
        assert usage.used_bytes + usage.reserved_bytes <= self.capacity
        assert index.by_last_use() == list(self.model)

    @invariant()
    def the_disk_holds_what_the_accounts_say_and_nothing_else(self) -> None:
        indexed = sorted(record.extent.file for record in self.opened.blocks.index.records())
        assert sorted(path.name for path in block_files(self.directory)) == indexed
        writing = sorted(filled.reservation.file for filled in self.fills)
        assert sorted(path.name for path in partial_files(self.directory)) == writing

    def teardown(self) -> None:
        for filled in self.fills:
            filled.file.release()
        self.opened.close()
        shutil.rmtree(self.directory)


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_block_that_never_fits_evicts_nothing(tmp_path: Path) -> None:
    """Asking for more than the capacity is refused before anything is thrown away for it."""
    opened = open_directory(BlockSettings(tmp_path / "c", 10 * PAGE, 64 * KIB), 0)
    fill_now(opened, small_block(1, PAGE))
    with pytest.raises(StoreUnavailable):
        begin(opened, small_block(2, 10 * PAGE))
    assert opened.blocks.index.usage().blocks == 1
    opened.close()


def test_room_is_made_in_transactions_of_bounded_size(tmp_path: Path) -> None:
    """However many small blocks must go for a large one, no transaction takes more than its share, and all go."""
    opened = open_directory(BlockSettings(tmp_path / "c", 400 * PAGE, 4096 * KIB), 0)
    for number in range(200):
        fill_now(opened, small_block(number, PAGE))
    version = ObjectVersion(ObjectKey("b", "large"), '"e"', 390 * PAGE)
    filled, evicted = begin(opened, layout.block_at(version, 0, 4096 * KIB))
    assert evicted.blocks == 196 > VICTIMS_PER_TRANSACTION
    assert len(block_files(tmp_path / "c")) == 4
    opened.blocks.abandon(filled)
    filled.file.release()
    opened.close()


def test_a_slot_belongs_to_one_living_process(tmp_path: Path) -> None:
    """A second process on the same slot is refused, and the first is not disturbed."""
    opened = open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 0)
    with pytest.raises(StartupError, match="worker slot 0"):
        open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 0)
    fill_now(opened, small_block(1, PAGE))
    opened.close()


def test_a_slot_that_is_used_no_more_is_cleared_up_by_any_other(tmp_path: Path) -> None:
    """After fewer workers are started than before, nothing that the others had begun holds room."""
    dead = open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 7)
    filled, _ = begin(dead, small_block(1, PAGE))
    filled.file.release()
    kill(dead)
    assert len(partial_files(tmp_path / "c")) == 1
    opened = open_directory(BlockSettings(tmp_path / "c", 100 * PAGE, 64 * KIB), 0)
    assert opened.blocks.index.usage().reserved_bytes == 0
    assert partial_files(tmp_path / "c") == []
    opened.close()
