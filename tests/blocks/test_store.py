"""Segments: what is appended is found, whatever is evicted, dropped, killed or torn in between."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.blocks import layout, small_block_fetch, store
from gateway.blocks.block_file import ChunkChecksums, read_verified
from gateway.blocks.layout import Block, BlockSettings, Reservation
from gateway.blocks.opening import OpenDirectory, open_directory, rebuild
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.blocks.store import RECORDS_MAX, BlockStore, IngestedFile, SmallBlock, describe
from gateway.core.errors import BlockDamaged, StoreUnavailable
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.policy.slots import Prefix, Slots
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    block_files,
    content_of,
    drop_page_cache,
    make_origin,
    open_cache,
    read,
    stored,
)
from tests.support.counting import counted
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot

SLOTS = Slots([Slot("a", Prefix("b", "a/"), capacity_bytes=500 * KIB)])
CAPACITY = 2 * MIB
SEGMENTS = 32
"""As many segments fill a directory here: they have room for more than one batch."""


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


def append_all(appender: SegmentAppender, slot: str, blocks: list[SmallBlock], *, others_come: bool = False) -> None:
    while blocks:
        blocks = blocks[appender.append(slot, blocks) :]
    if not others_come:
        appender.give_back()


def ahead_bytes(*appenders: SegmentAppender) -> int:
    return sum(segment.ahead_bytes for one in appenders for segment in one._open.values())


def kept_content(opened: OpenDirectory, block: Block) -> bytes | None:
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


def assert_exact(opened: OpenDirectory, directory: Path, ahead_bytes: int = 0) -> None:
    """Files and accounts are the same thing, each file with the blocks that the index says lie in it."""
    index = opened.blocks.index
    files = {file.file: file for file in index.files()}
    sizes = {path.name: layout.in_pages(path.stat().st_size) for path in block_files(directory)}
    assert {name: file.disk_bytes for name, file in files.items()} == sizes
    usage = index.usage()
    assert (usage.used_bytes, usage.reserved_bytes) == (sum(sizes.values()), ahead_bytes)
    lying = {name: {one.block_id for one in index.blocks() if one.extent.file == name} for name in files}
    assert {name: len(blocks) for name, blocks in lying.items()} == {name: file.blocks for name, file in files.items()}
    assert {block.block_id for block in index.blocks()} == set().union(*lying.values())
    assert usage.blocks == sum(file.blocks for file in files.values())
    assert usage.used_bytes + ahead_bytes + usage.unsurveyed_bytes <= opened.blocks.capacity.total_bytes


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
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(small_block_fetch, "PARTS_OF_CAPACITY", SEGMENTS)
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
        assert kept_content(self.opened, blocks[-1].block) == bytes(blocks[-1].content)

    @rule(worker=st.integers(0, 1), count=st.integers(16, 40), size=st.integers(1, 900))
    def append_many(self, worker: int, count: int, size: int) -> None:
        """Append so many blocks that the index sets room aside for later ones, too."""
        blocks = self._blocks([size] * count, "default")
        append_all(self.appenders[worker], "default", blocks, others_come=True)
        assert kept_content(self.opened, blocks[-1].block) == bytes(blocks[-1].content)

    @rule(worker=st.integers(0, 1))
    def give_back(self, worker: int) -> None:
        self.appenders[worker].give_back()

    @rule(data=st.data(), worker=st.integers(0, 1))
    def append_again(self, data: st.DataObject, worker: int) -> None:
        """What is there already, perhaps: it lies in one place all the same."""
        if self.known:
            block = self.known[data.draw(st.sampled_from(sorted(self.known)))]
            append_all(self.appenders[worker], "default", [block])
            assert kept_content(self.opened, block.block) == bytes(block.content)

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
        assert_exact(self.opened, self.directory, ahead_bytes(*self.appenders))

    @invariant()
    def every_block_that_is_there_is_right(self) -> None:
        for record in self.opened.blocks.index.blocks():
            known = self.known[record.block_id]
            assert kept_content(self.opened, known.block) == bytes(known.content)

    def teardown(self) -> None:
        self.opened.close()
        self.patches.undo()
        shutil.rmtree(self.directory.parent)


TestPacking = pytest.mark.slow(Packing.TestCase)
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


def test_a_batch_is_written_a_little_at_a_time(tmp_path: Path) -> None:
    """No write is long enough for the kernel to take its largest pages for it."""
    opened, sizes = opened_at(tmp_path / "c", 4096 * MIB), list[int]()

    def noting(write: Callable[..., int]) -> Callable[..., int]:
        def pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            sizes.append(sum(map(len, buffers)))
            return write(descriptor, buffers, offset)

        return pwritev

    blocks = [small(f"k{number}", 100 * KIB) for number in range(30)]
    with replaced(os, "pwritev", noting):
        append_all(SegmentAppender(opened.blocks), "default", blocks)
    assert max(sizes) <= MIB
    assert len(sizes) == 3
    assert all(kept_content(opened, one.block) == bytes(one.content) for one in blocks)
    opened.close()


def test_room_for_several_batches_is_set_aside_at_once_and_what_is_left_given_back(tmp_path: Path) -> None:
    """It counts as written only as far as it is."""
    opened, reserved = opened_at(tmp_path / "c", 4096 * MIB), list[int]()
    appender, index = SegmentAppender(opened.blocks), opened.blocks.index

    def noting(reserve: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            reserved.append(arguments[1].disk_bytes)
            return reserve(*arguments, **keywords)

        return noted

    with replaced(type(index), "reserve", noting):
        for batch in range(4):
            blocks = [small(f"k{batch}/{number}", 20_000) for number in range(20)]
            append_all(appender, "default", blocks, others_come=True)
            assert_exact(opened, tmp_path / "c", ahead_bytes(appender))
        assert len(reserved) == 1
        assert ahead_bytes(appender) > 0
        append_all(appender, "default", [small("last", 1)])
        append_all(appender, "default", [small("one more", 10_000)])
    assert_exact(opened, tmp_path / "c")
    assert index.usage().used_bytes <= opened.blocks.written_today_bytes() < reserved[0]
    opened.close()


def test_what_has_room_for_one_batch_alone_is_kept(tmp_path: Path) -> None:
    """The index takes a block even if it cannot set more room aside."""
    opened = opened_at(tmp_path / "c", 64 * MIB)
    held = Reservation("x", "default", 64 * MIB - 64 * KIB)
    opened.blocks.reserve(held)
    blocks = [small(f"k{number}", 1000) for number in range(20)]
    append_all(SegmentAppender(opened.blocks), "default", blocks)
    assert all(kept_content(opened, one.block) == bytes(one.content) for one in blocks)
    opened.blocks.index.release(held)
    assert_exact(opened, tmp_path / "c")
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
        assert kept_content(opened, block.block) == bytes(block.content)
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


def staged(
    directory: Path, origin: MemoryOrigin, version: ObjectVersion, first: int, stop: int, behind: bytes = b"trailer"
) -> IngestedFile:
    """A part, and `behind` its bytes what is no part of the object."""
    directory.mkdir(exist_ok=True)
    path = directory / f"part-{first}"
    content = content_of(origin, version, ByteRange(first, stop - 1))
    path.write_bytes(content + behind)
    return IngestedFile(path, version, first, len(content))


@pytest.mark.parametrize("part_bytes", [4 * BLOCK, 4 * BLOCK + 1000, 3 * BLOCK + 64 * KIB, 10 * BLOCK])
async def test_parts_become_blocks(tmp_path: Path, part_bytes: int) -> None:
    """Every block that lies wholly in a part is served from it, whatever the parts' boundaries; the rest is fetched."""
    origin = make_origin()
    version = stored(origin, "k", 10 * BLOCK + 100)
    async with open_cache(tmp_path / "c", origin, readahead_bytes=0) as cache:
        entered = 0
        for first in range(0, version.size_bytes, part_bytes):
            part = staged(tmp_path / "s", origin, version, first, min(first + part_bytes, version.size_bytes))
            entered += await cache.ingest(part)
            part.path.unlink()
        starts = range(0, version.size_bytes, BLOCK)
        cut = {n for n in range(part_bytes, version.size_bytes, part_bytes) if n % BLOCK}
        spanning = sum(any(start < n < start + BLOCK for n in cut) for start in starts)
        assert entered == cache.usage().blocks == len(starts) - spanning
        asked = origin.count()
        assert await read(cache, version) == content_of(origin, version)
        assert origin.count() - asked == spanning


async def test_known_checksums_are_used_and_hold_the_file_to_them(tmp_path: Path) -> None:
    """Where they are given for the right chunks nothing is read at adoption; a byte that differs later is a miss."""
    origin = make_origin()
    version = stored(origin, "k", 3 * BLOCK)
    part = staged(tmp_path / "s", origin, version, 0, 3 * BLOCK)
    sums = ChunkChecksums(3 * BLOCK)
    sums.update(bytearray(content_of(origin, version)))
    with part.path.open("r+b") as file:
        file.seek(BLOCK + 5)
        file.write(b"!")
    offered = replace(part, checksums=lambda: bytes(sums.packed))
    async with open_cache(tmp_path / "c", origin) as cache:
        assert await cache.ingest(offered) == 3
        assert await read(cache, version) == content_of(origin, version)
        assert counted(metrics.CACHE_DAMAGED) == 1


async def test_bytes_of_an_adopted_file_are_verified(tmp_path: Path) -> None:
    """Harm that comes to it is found like in any other block file."""
    origin = make_origin()
    version = stored(origin, "k", 4 * BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        assert await cache.ingest(staged(tmp_path / "s", origin, version, 0, 4 * BLOCK)) == 4
        [file] = block_files(tmp_path / "c")
        with file.open("r+b") as opened:
            opened.seek(random.randrange(4 * BLOCK))
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))
        drop_page_cache(file)
        assert await read(cache, version) == content_of(origin, version)
        await cache.settle()
        assert counted(metrics.CACHE_DAMAGED) == 1
        assert cache.usage().blocks == 4


async def test_an_adopted_file_is_counted_and_evicted_as_one(tmp_path: Path) -> None:
    """Its room comes back when the file goes, with all blocks in it; until the last of them it stays."""
    origin = make_origin()
    version, other = stored(origin, "k", 4 * BLOCK), stored(origin, "other", 2 * BLOCK)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=5 * BLOCK, readahead_bytes=0) as cache:
        await cache.ingest(staged(tmp_path / "s", origin, version, 0, 4 * BLOCK))
        taken_bytes = 4 * BLOCK + 4096  # what is behind the bytes takes a page
        assert cache.usage().used_bytes == taken_bytes
        record = next(cache._dependencies.directory.index.blocks())
        assert cache._dependencies.directory.drop(record.block_id, record.extent.file)
        assert (cache.usage().blocks, cache.usage().used_bytes) == (3, taken_bytes)
        await read(cache, other)
        await cache.settle()
        assert counted(metrics.CACHE_EVICTED_BLOCKS) == 3
        assert cache.usage().used_bytes == 2 * (BLOCK + 4096)


async def test_what_is_there_already_is_not_entered_twice(tmp_path: Path) -> None:
    """Blocks that a reader has fetched meanwhile stay; a file that brings nothing new takes no room."""
    origin = make_origin()
    version = stored(origin, "k", 2 * BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await read(cache, version, ByteRange(0, 9))
        await cache.settle()
        part = staged(tmp_path / "s", origin, version, 0, 2 * BLOCK)
        assert await cache.ingest(part) == 1
        assert await cache.ingest(part) == 0
        assert len(block_files(tmp_path / "c")) == 2
        assert await read(cache, version) == content_of(origin, version)


async def test_a_file_without_a_whole_block_is_left_alone(tmp_path: Path) -> None:
    """Small parts in the middle of large blocks bring nothing."""
    origin = make_origin()
    version = stored(origin, "k", 4 * BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        assert await cache.ingest(staged(tmp_path / "s", origin, version, 100, 2000)) == 0
        assert cache.usage().blocks == 0


async def test_what_lies_behind_the_bytes_is_no_part_of_the_object(tmp_path: Path) -> None:
    """However much of it there is: no block reaches into it, with checksums for all of it or without."""
    origin = make_origin()
    version = stored(origin, "k", 4 * BLOCK)
    part = staged(tmp_path / "s", origin, version, 0, 2 * BLOCK - 7, b"#" * 2 * BLOCK)
    sums = ChunkChecksums(4 * BLOCK)
    sums.update(bytearray(part.path.read_bytes()) + b"#" * 7)
    async with open_cache(tmp_path / "c", origin) as cache:
        assert await cache.ingest(part) == 1
        assert await cache.ingest(replace(part, checksums=lambda: bytes(sums.packed))) == 0
        assert await read(cache, version) == content_of(origin, version)


async def test_a_file_that_was_cut_is_not_adopted(tmp_path: Path) -> None:
    """Even where the checksums of all that was in it are known."""
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    part = staged(tmp_path / "s", origin, version, 0, BLOCK)
    os.truncate(part.path, BLOCK - 1)
    async with open_cache(tmp_path / "c", origin) as cache:
        with pytest.raises(StoreUnavailable, match="shorter"):
            await cache.ingest(replace(part, checksums=lambda: bytes(BLOCK // (64 * KIB) * 4)))
        assert (cache.usage().blocks, cache.usage().reserved_bytes) == (0, 0)


async def test_what_cannot_be_linked_changes_nothing(tmp_path: Path) -> None:
    """A staging area on another file system, say: the room is free again, and the file is where it was."""
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    part = staged(Path("/dev/shm") / tmp_path.name, origin, version, 0, BLOCK)
    try:
        async with open_cache(tmp_path / "c", origin) as cache:
            with pytest.raises(StoreUnavailable, match="linked"):
                await cache.ingest(part)
            assert (cache.usage().blocks, cache.usage().reserved_bytes) == (0, 0)
        assert part.path.exists()
    finally:
        part.path.unlink()
        part.path.parent.rmdir()


@pytest.mark.parametrize("step", ["link", "commit"])
def test_a_process_killed_while_it_adopts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before or after the link: the next one to open the directory clears up, and the staged file is untouched."""
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    settings = BlockSettings(tmp_path / "c", 64 * BLOCK, BLOCK)
    opened = open_directory(settings, 0)
    adoption = describe(staged(tmp_path / "s", origin, version, 0, BLOCK), "default", BLOCK)
    assert adoption is not None
    link = BlockStore.link

    def linked_or_not(store: BlockStore, source: Path, file: str) -> None:
        if step == "commit":
            link(store, source, file)
        opened.blocks.index.close()  # nothing that comes after it reaches the disk
        monkeypatch.setattr(BlockStore, "unlink", lambda *_: None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BlockStore, "link", linked_or_not)
        with pytest.raises(BaseException):  # noqa: B017 - whatever a dead process would have raised
            opened.blocks.ingest(adoption)
    monkeypatch.undo()
    opened.locks.close()
    opened.worker_locks.give_back_own()
    assert len(block_files(tmp_path / "c")) == (1 if step == "commit" else 0)
    again = open_directory(settings, 0)
    usage = again.blocks.index.usage()
    assert (usage.blocks, usage.used_bytes, usage.reserved_bytes) == (0, 0, 0)
    assert block_files(tmp_path / "c") == []
    assert adoption.source.exists()
    again.close()
