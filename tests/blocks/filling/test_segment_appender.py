"""Segments: what is appended is found, whatever is evicted, dropped, killed or torn in between."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.blocks import layout, store
from gateway.blocks.block_file import read_verified
from gateway.blocks.layout import Block, BlockSettings
from gateway.blocks.opening import OpenDirectory, open_directory, rebuild
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.blocks.store import RECORDS_MAX, BlockStore, SmallBlock
from gateway.core.errors import BlockDamaged, StoreUnavailable
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.policy.slots import Prefix, Slots
from tests.support.blocks import KIB, MIB, block_files
from tests.support.slots import Slot

SLOTS = Slots([Slot("a", Prefix("b", "a/"), capacity_bytes=500 * KIB)])
CAPACITY = 2 * MIB


class Killed(BaseException):
    """Stands for the end of the process."""


def small(key: str, size_bytes: int, seed: int = 0) -> SmallBlock:
    version = ObjectVersion(ObjectKey("b", key), f'"{seed}"', size_bytes)
    content = random.Random(f"{key} {seed}").randbytes(size_bytes)
    return SmallBlock(layout.block_at(version, 0, 1024 * KIB), memoryview(content))


def opened_at(directory: Path, capacity_bytes: int = CAPACITY, worker: int = 0) -> OpenDirectory:
    return open_directory(BlockSettings(directory, capacity_bytes, slots=SLOTS), worker)


def kill(opened: OpenDirectory) -> None:
    """Close what the kernel would, and nothing more."""
    opened.blocks.index.close()
    opened.locks.close()
    opened.worker_locks.give_back_own()


def append_all(appender: SegmentAppender, slot: str, blocks: list[SmallBlock]) -> None:
    while blocks:
        blocks = blocks[appender.append(slot, blocks).blocks :]


def stored(opened: OpenDirectory, block: Block) -> bytes | None:
    """What the directory has of a block; None where it has none, or a damaged one."""
    extent = opened.blocks.index.lookup(block.id)
    if extent is None:
        return None
    file = opened.blocks.store.open_published(extent)
    try:
        return bytes(read_verified(file.descriptor, extent, 0, extent.length))
    except BlockDamaged:
        return None
    finally:
        file.close()


def assert_exact(opened: OpenDirectory, directory: Path) -> None:
    """Files and accounts are the same thing, each file with the blocks that the index says lie in it."""
    index = opened.blocks.index
    files = {file.file: file for file in index.files()}
    sizes = {path.name: layout.in_pages(path.stat().st_size) for path in block_files(directory)}
    assert {name: file.disk_bytes for name, file in files.items()} == sizes
    usage = index.usage()
    assert (usage.used_bytes, usage.reserved_bytes) == (sum(sizes.values()), 0)
    lying = {name: {one.block_id for one in index.blocks() if one.extent.file == name} for name in files}
    assert {name: len(blocks) for name, blocks in lying.items()} == {name: file.blocks for name, file in files.items()}
    assert {block.block_id for block in index.blocks()} == set().union(*lying.values())
    assert usage.blocks == sum(file.blocks for file in files.values())
    assert usage.used_bytes + usage.unsurveyed_bytes <= opened.blocks.capacity.total_bytes


def complete(opened: OpenDirectory) -> None:
    for _ in rebuild(opened.blocks, SLOTS):
        pass


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A function replaced by what `make` makes of it."""
    function = getattr(owner, name)
    setattr(owner, name, make(function))
    try:
        yield
    finally:
        setattr(owner, name, function)


def not_cleaning_up() -> AbstractContextManager[None]:
    """A killed process handles no exceptions."""
    return replaced(SegmentAppender, "_give_up", lambda _: lambda *_: None)


def dying(owner: Any, name: str, *, after: bool) -> AbstractContextManager[None]:
    """The process ends before or after a method of a class."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def ended(*arguments: Any, **keywords: Any) -> Any:
            if after:
                function(*arguments, **keywords)
            raise Killed

        return ended

    return replaced(owner, name, make)


def torn(written: int, then: BaseException) -> AbstractContextManager[None]:
    """The disk takes so many bytes, then this happens."""
    left = written

    def pwritev(descriptor: int, buffers: list[Any], offset: int) -> int:
        nonlocal left
        if not left:
            raise then
        taken = b"".join(buffers)[:left]
        left -= len(taken)
        return os.pwrite(descriptor, taken, offset)

    return replaced(os, "pwritev", lambda _: pwritev)


def meanwhile(owner: Any, name: str, what: Callable[[], None]) -> AbstractContextManager[None]:
    """Something happens just before the first call of a method."""
    pending = [what]

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def first(*arguments: Any, **keywords: Any) -> Any:
            if pending:
                pending.pop()()
            return function(*arguments, **keywords)

        return first

    return replaced(owner, name, make)


class Packing(RuleBasedStateMachine):
    """Anything may be evicted or dropped, the process may die at any step, and the machine may lose its index.

    A second appender stands for another process, which has segments of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp()) / "c"
        self.known: dict[bytes, SmallBlock] = {}
        self._open()

    def _blocks(self, sizes: list[int], slot: str) -> list[SmallBlock]:
        blocks = []
        for size in sizes:
            block = small(f"{slot}/{len(self.known)}", size, len(self.known))
            self.known[block.block.id] = block
            blocks.append(block)
        return blocks

    @rule(
        worker=st.integers(0, 1),
        slot=st.sampled_from(["a", "default"]),
        sizes=st.lists(st.integers(1, 90_000), min_size=1, max_size=8),
    )
    def append(self, worker: int, slot: str, sizes: list[int]) -> None:
        blocks = self._blocks(sizes, slot)
        append_all(self.appenders[worker], slot, blocks)
        assert stored(self.opened, blocks[-1].block) == bytes(blocks[-1].content)

    @rule(data=st.data(), worker=st.integers(0, 1))
    def append_again(self, data: st.DataObject, worker: int) -> None:
        """What is there already, perhaps: it lies in one place all the same."""
        if self.known:
            block = self.known[data.draw(st.sampled_from(sorted(self.known)))]
            append_all(self.appenders[worker], "default", [block])
            assert stored(self.opened, block.block) == bytes(block.content)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        cached = sorted(record.block_id for record in self.opened.blocks.index.blocks())
        if cached:
            block_id = data.draw(st.sampled_from(cached))
            extent = self.opened.blocks.index.lookup(block_id)
            assert extent is not None
            assert self.opened.blocks.drop(block_id, extent.file)

    @rule(
        worker=st.integers(0, 1),
        name=st.sampled_from(sorted(["reserve", "append", "commit", "extend"])),
        after=st.booleans(),
    )
    def die_while_appending(self, worker: int, name: str, after: bool) -> None:
        """Before or after any step of it: what was under way is gone, and counted right."""
        blocks = self._blocks([40_000, 10], "default")
        owner: Any = BlockStore if name == "append" else type(self.opened.blocks.index)
        with not_cleaning_up(), dying(owner, name, after=after):
            try:
                append_all(self.appenders[worker], "default", blocks)
            except Killed:
                pass
            else:
                return  # it did not come to this step
        self._restart()

    @rule(worker=st.integers(0, 1), written=st.integers(0, 30_000))
    def fail_to_write(self, worker: int, written: int) -> None:
        """A full disk takes a part and no more: nothing is kept, and what was written is counted."""
        with torn(written, OSError(errno.ENOSPC, "no room")), pytest.raises(StoreUnavailable):
            append_all(self.appenders[worker], "default", self._blocks([60_000], "default"))

    @rule(worker=st.integers(0, 1), written=st.integers(0, 30_000))
    def die_while_writing(self, worker: int, written: int) -> None:
        with not_cleaning_up(), torn(written, Killed()), pytest.raises(Killed):
            append_all(self.appenders[worker], "default", self._blocks([60_000], "default"))
        self._restart()

    @rule()
    def restart_orderly(self) -> None:
        self.opened.close()
        self._open()

    @rule()
    def lose_the_index(self) -> None:
        """An unclean boot: all that is whole is found again."""
        before = {record.block_id for record in self.opened.blocks.index.blocks()}
        kill(self.opened)
        (self.directory / "BOOT").write_text("another boot\n")
        self._open()
        complete(self.opened)
        assert {record.block_id for record in self.opened.blocks.index.blocks()} >= before

    def _restart(self) -> None:
        kill(self.opened)
        self._open()

    def _open(self) -> None:
        self.opened = opened_at(self.directory)
        self.appenders = [SegmentAppender(self.opened.blocks) for _ in range(2)]

    @invariant()
    def accounts_are_exact(self) -> None:
        assert_exact(self.opened, self.directory)

    @invariant()
    def every_block_that_is_there_is_right(self) -> None:
        for record in self.opened.blocks.index.blocks():
            known = self.known[record.block_id]
            assert stored(self.opened, known.block) == bytes(known.content)

    def teardown(self) -> None:
        self.opened.close()
        shutil.rmtree(self.directory.parent)


TestPacking = Packing.TestCase
TestPacking.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_blocks_of_an_open_segment_are_read_while_it_grows(tmp_path: Path) -> None:
    """One file for many, each found as soon as `append` has returned, also by those who opened the file before."""
    opened = opened_at(tmp_path / "c", 512 * MIB)
    appender = SegmentAppender(opened.blocks)
    first = small("first", 70_000)
    append_all(appender, "default", [first])
    extent = opened.blocks.index.lookup(first.block.id)
    assert extent is not None
    file = opened.blocks.store.open_published(extent)
    for number in range(20):
        later = small(f"k{number}", 30_000 + number)
        append_all(appender, "default", [later])
        found = opened.blocks.index.lookup(later.block.id)
        assert found is not None
        assert found.file == extent.file
        assert read_verified(file.descriptor, found, 0, found.length) == later.content
    assert read_verified(file.descriptor, extent, 0, extent.length) == first.content
    file.close()
    assert len(block_files(tmp_path / "c")) == 1
    opened.close()


def test_segments_end_at_their_bounds(tmp_path: Path) -> None:
    """Neither more records than one transaction should enter, nor more bytes than a part of the cache."""
    opened = opened_at(tmp_path / "c", 256 * MIB)
    append_all(
        SegmentAppender(opened.blocks), "default", [small(f"t{number}", 10) for number in range(2 * RECORDS_MAX + 88)]
    )
    assert sorted(file.blocks for file in opened.blocks.index.files()) == sorted([RECORDS_MAX, RECORDS_MAX, 88])
    append_all(SegmentAppender(opened.blocks), "default", [small(f"k{number}", 100 * KIB) for number in range(25)])
    large = [file for file in opened.blocks.index.files() if file.blocks < 30]
    assert sorted(file.blocks for file in large) == [5, 10, 10]
    assert all(file.disk_bytes <= MIB for file in large)
    opened.close()


def test_a_segment_evicted_under_the_hands_of_who_appends_is_begun_anew(tmp_path: Path) -> None:
    """Before the bytes are written, or after: the blocks land in another segment, and nothing stays behind."""
    opened = opened_at(tmp_path / "c")
    appender = SegmentAppender(opened.blocks)
    append_all(appender, "default", [small("first", 1000)])

    def evict_all() -> None:
        for record in list(opened.blocks.index.blocks()):
            opened.blocks.drop(record.block_id, record.extent.file)

    for name in ("append", "extend"):
        owner: Any = opened.blocks.store if name == "append" else opened.blocks.index
        with meanwhile(type(owner), name, evict_all):
            block = small(name, 2000)
            append_all(appender, "default", [block])
        assert stored(opened, block.block) == bytes(block.content)
        assert_exact(opened, tmp_path / "c")
        assert len(block_files(tmp_path / "c")) == 1
    opened.close()


def test_a_walk_ends_at_the_first_record_that_is_not_whole(tmp_path: Path) -> None:
    """Cut anywhere, it gives the records that lie wholly before the cut; an object that looks like one is none."""
    inner = store.place("x", 0, [small("inner", 500)])
    forged = SmallBlock(small("forged", 5000).block, memoryview(b"".join(inner.buffers).ljust(5000, b"\0")))
    blocks = [small("one", 1), small("two", 70_000), forged, small("four", 64)]
    placed = store.place("f", 0, blocks)
    path = tmp_path / "f"
    stops = [record.extent.offset + record.extent.length for record in placed.blocks]
    whole = b"".join(placed.buffers)
    assert len(whole) == placed.stop
    rng = random.Random(20261121)
    cuts = {0, 1, placed.stop, *stops, *(stop - 1 for stop in stops), *(rng.randrange(placed.stop) for _ in range(60))}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with path.open("rb") as file:
            found = list(store.walk("f", file.fileno(), cut))
        expected = [record for record, stop in zip(placed.blocks, stops, strict=True) if stop <= cut]
        assert [(block.id, extent) for block, extent in found] == [(one.block_id, one.extent) for one in expected], cut
