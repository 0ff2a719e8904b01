"""The index answers look-ups on the event loop."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.blocks import index as index_module
from gateway.blocks import layout
from gateway.blocks.directory import FREE_LOOK_SECONDS, GIVEN_BACK_TIMES, Reserve
from gateway.blocks.eviction import Capacity, Holdings, Share
from gateway.blocks.index import ROWS_LOOKED_AT_MAX, WrittenBytes
from gateway.blocks.layout import BlockSettings, Rows
from gateway.blocks.opening import OpenDirectory, open_directory
from gateway.blocks.policies import Queue, SlotAccount
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.blocks.store import SmallBlock
from gateway.blocks.transaction import IndexTransaction
from gateway.core.errors import BufferUnavailable, NotKept, StoreUnavailable
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.policy.slots import Prefix, Slots
from tests.support.appending import append_all, calls_of, small_blocks
from tests.support.blocks import BLOCK, BUCKET, KIB, MIB, block_files, content_of, make_origin, open_cache, read, stored
from tests.support.slots import Slot

_KEY = ObjectKey("b", "a")


def opened_with_versions(directory: Path, count: int) -> OpenDirectory:
    """Open a directory that has `count` versions of one object."""
    opened = open_directory(BlockSettings(directory, 64 * MIB, 64 * KIB), 0)
    versions = (ObjectVersion(_KEY, f'"{number}"', 100) for number in range(count))
    blocks = [SmallBlock(layout.block_at(version, 0, 64 * KIB), memoryview(bytes(100))) for version in versions]
    append_all(SegmentAppender(opened.blocks), blocks)
    return opened


def evict_all(opened: OpenDirectory) -> None:
    """All files, whose blocks' rows stay until they are swept."""
    index = opened.blocks.index
    for file in list(index.files()):
        with index.writing() as transaction:
            transaction.evict(file)


def test_an_object_is_known_while_a_block_of_it_is_there(tmp_path: Path) -> None:
    """Not longer, although rows of it may be left; and nobody else is."""
    opened = opened_with_versions(tmp_path / "c", 3)
    index, known = opened.blocks.index, layout.object_id(_KEY)
    assert index.has_object(known)
    assert not index.has_object(layout.object_id(ObjectKey("b", "b")))
    evict_all(opened)
    assert not index.has_object(known)
    opened.close()


def test_an_object_with_many_blocks_on_their_way_out_costs_no_more(tmp_path: Path) -> None:
    """The event loop asks: what it costs has a bound, however many rows there are."""
    known, calls = layout.object_id(_KEY), []
    for count in (2 * ROWS_LOOKED_AT_MAX, 20 * ROWS_LOOKED_AT_MAX):
        opened = opened_with_versions(tmp_path / str(count), count)
        evict_all(opened)
        calls.append(calls_of(lambda index=opened.blocks.index: index.has_object(known)))  # type: ignore[misc]
        opened.close()
    assert calls[0] == calls[1]


def account(taken_bytes: int) -> SlotAccount:
    account = SlotAccount()
    account.queue_bytes[Queue.MAIN] = taken_bytes
    return account


def holdings(taken: list[int], shares: list[Share]) -> Holdings:
    """Slots by their numbers, which are their names too."""
    found = Holdings(Capacity(1000, {str(slot): share for slot, share in enumerate(shares)}))
    for slot, taken_bytes in enumerate(taken):
        found.update(slot, account(taken_bytes), str(slot))
    return found


def test_who_is_within_its_guarantee_gives_nothing() -> None:
    """However little room there is: what is guaranteed is not borrowed."""
    assert list(holdings([40, 0], [Share(40), Share()]).borrowers()) == []


def test_who_has_borrowed_most_yields_first() -> None:
    """The example of the module's docstring: a is within its guarantee, b has borrowed more than c."""
    assert list(holdings([30, 60, 30], [Share(40), Share(), Share()]).borrowers()) == [1, 2]


def test_a_slot_at_its_limit_is_known() -> None:
    """Others may have borrowed more."""
    assert holdings([30, 60], [Share(0, 25), Share()]).over_limit() == [0]


def test_the_order_is_asked_for_again_and_again() -> None:
    """Whether the one before was gone through or broken off, and while what slots hold changes."""
    found = holdings([30, 60, 50], [Share(), Share(), Share()])
    assert next(found.borrowers()) == 1
    assert list(found.borrowers()) == [1, 2, 0]
    found.update(1, account(10))
    assert list(found.borrowers()) == [2, 0, 1]
    found.update(1, account(60))
    found.update(1, account(60))
    assert list(found.borrowers()) == [1, 2, 0]


@st.composite
def crowded(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """What slots hold, what they are guaranteed, and what fits: all guarantees together do."""
    guarantees = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
    taken = [draw(st.integers(0, 300)) for _ in guarantees]
    return taken, guarantees, sum(guarantees) + draw(st.integers(0, 100))


@given(crowded())
def test_evicting_as_told_ends_with_everybody_at_their_due(case: tuple[list[int], list[int], int]) -> None:
    """It always ends, within the capacity; who was within its guarantee gave nothing; nobody fell below it.

    And it is fair: whoever gave something has borrowed no less afterwards than anybody else, but for one byte.
    """
    before, guarantees, capacity = case
    taken, found = list(before), holdings(before, [Share(guaranteed) for guaranteed in guarantees])
    while sum(taken) > capacity:
        slot = next(found.borrowers())
        taken[slot] -= 1
        found.update(slot, account(taken[slot]))
    borrowed = [count - guaranteed for count, guaranteed in zip(taken, guarantees, strict=True)]
    for slot in range(len(taken)):
        if taken[slot] < before[slot]:
            assert 0 <= borrowed[slot] >= max(borrowed) - 1


@given(crowded(), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), max_size=30))
def test_what_is_kept_up_to_date_is_what_is_read_anew(
    case: tuple[list[int], list[int], int], changes: list[tuple[int, int]]
) -> None:
    """Sums and order, after any changes."""
    taken, guarantees, _ = case
    shares = [Share(guaranteed) for guaranteed in guarantees]
    found = holdings(taken, shares)
    for slot, count in changes:
        if slot < len(taken):
            taken[slot] = count
            found.update(slot, account(count))
    anew = holdings(taken, shares)
    assert found.kept_bytes == anew.kept_bytes
    assert [found[slot].borrowed_bytes for slot in found.borrowers()] == [
        anew[slot].borrowed_bytes for slot in anew.borrowers()
    ]


WHOLE = Capacity(100 * MIB)


class Disk:
    """As much free as a test says."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.looks = 0
        self.time = 0.0

    def look(self) -> int:
        self.looks += 1
        return self.free_bytes

    def kept_free(self, size_bytes: int, promised_bytes: int = 0) -> Reserve:
        kept = Reserve(self.look, lambda: promised_bytes, lambda: self.time)
        kept.size_bytes = size_bytes
        return kept


def test_where_nobody_has_a_right_the_disk_is_not_looked_at() -> None:
    """A cache without write-back slots pays nothing."""
    disk = Disk(0)
    assert disk.kept_free(0).capacity_for(MIB, lambda: 0, WHOLE) is WHOLE
    assert disk.looks == 0


def test_fills_go_on_as_far_as_the_room_goes() -> None:
    """One look serves for a moment: what was granted since is counted, so that a burst does not go too far."""
    disk = Disk(50 * MIB)
    kept = disk.kept_free(40 * MIB, promised_bytes=MIB)
    granted = [kept.capacity_for(MIB, lambda: 30 * MIB, WHOLE) is WHOLE for _ in range(10)]
    assert granted == [True] * 9 + [False]
    disk.time += FREE_LOOK_SECONDS
    disk.free_bytes += 10 * MIB
    assert kept.capacity_for(MIB, lambda: 30 * MIB, WHOLE) is WHOLE


@given(free=st.integers(0, 100), size=st.integers(1, 100), needed=st.integers(1, 10), used=st.integers(0, 100))
def test_what_is_missing_is_given_back_step_by_step(free: int, size: int, needed: int, used: int) -> None:
    """A fill makes room for itself at least as far as there is none, and never for more than twice itself."""
    capacity = Disk(free).kept_free(size).capacity_for(needed, lambda: used, Capacity(1000))
    if free >= size + needed:
        assert capacity.total_bytes == 1000
    else:
        gone = used + needed - capacity.total_bytes
        assert gone == min(size + needed - free, GIVEN_BACK_TIMES * needed, used + needed)


@pytest.mark.slow
async def test_the_cache_never_takes_what_others_have_a_right_to(tmp_path: Path) -> None:
    """It replaces its own blocks instead; it grows when the right is used up, and yields when others fill the disk."""
    disk_bytes, rights = 20 * BLOCK, [10 * BLOCK]

    def held_bytes() -> int:
        return sum(path.stat().st_size for path in block_files(tmp_path))

    origin = make_origin()
    origin.create_bucket(BUCKET)
    versions = [stored(origin, f"k{n}", BLOCK // 2, n) for n in range(60)]
    async with open_cache(tmp_path, origin) as cache:
        cache._dependencies.directory.reserve_of_others._free_bytes = lambda: disk_bytes - held_bytes()
        cache.keep_free(lambda: rights[0])
        for version in versions[:30]:
            assert await read(cache, version) == content_of(origin, version)
            assert held_bytes() <= disk_bytes - rights[0]
        assert held_bytes() > 8 * BLOCK
        assert cache.usage().blocks < 30
        rights[0] = 0
        cache.keep_free(lambda: rights[0])
        for version in versions[:30]:
            await read(cache, version)
        await cache.settle()
        assert cache.usage().blocks == 30
        rights[0] = 15 * BLOCK
        cache.keep_free(lambda: rights[0])
        for version in versions[30:]:
            assert await read(cache, version) == content_of(origin, version)
        assert held_bytes() <= disk_bytes - rights[0]


async def test_rights_that_cannot_be_looked_at_stay_as_they_were(tmp_path: Path) -> None:
    """The cache goes on."""

    def unreadable() -> int:
        raise BufferUnavailable("the journal cannot be read")

    async with open_cache(tmp_path, make_origin()) as cache:
        cache.keep_free(lambda: MIB)
        cache.keep_free(unreadable)
        assert cache._dependencies.directory.reserve_of_others.size_bytes == MIB


CAPACITY_BYTES = 4 * MIB


@contextmanager
def sticking(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """These files cannot be removed."""
    unlink = os.unlink

    def refuse(path: Any, **keywords: Any) -> None:
        if os.path.basename(path) in names:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        yield


def open_lru(directory: Path, worker: int = 0) -> OpenDirectory:
    slots = Slots([Slot("default", Prefix(""), eviction="lru")])
    return open_directory(BlockSettings(directory, CAPACITY_BYTES, 64 * 1024, slots=slots), worker)


def on_disk(directory: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in block_files(directory))


def fill(opened: OpenDirectory, prefix: str) -> None:
    """More than fits, whatever is refused."""
    appender = SegmentAppender(opened.blocks)
    for number in range(200):
        with suppress(StoreUnavailable):
            append_all(appender, small_blocks(f"{prefix}{number}/", 1, 40_000))


def counted(opened: OpenDirectory) -> int:
    usage = opened.blocks.index.usage()
    return usage.used_bytes + usage.reserved_bytes + usage.pending_unlink_bytes


@pytest.mark.slow
def test_what_cannot_be_unlinked_stays_counted_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is filled beside it the capacity holds, also after a restart; once it can be removed, it is."""
    directory = tmp_path / "c"
    opened = open_lru(directory)
    fill(opened, "a")
    stuck = [path.name for path in block_files(directory)][:20]
    with sticking(monkeypatch, *stuck):
        fill(opened, "b")
        assert {path.name for path in block_files(directory)} >= set(stuck)
        assert on_disk(directory) <= CAPACITY_BYTES
        assert counted(opened) == on_disk(directory)
        with pytest.raises(StoreUnavailable):
            opened.blocks.retry_unlinks()
        opened.close()
        opened = open_lru(directory, worker=1)
        fill(opened, "c")
        assert counted(opened) == on_disk(directory) <= CAPACITY_BYTES
    opened.blocks.retry_unlinks()
    assert not {path.name for path in block_files(directory)} & set(stuck)
    assert opened.blocks.index.usage().pending_unlink_bytes == 0
    fill(opened, "d")
    assert counted(opened) == on_disk(directory) > CAPACITY_BYTES * 0.9
    opened.close()


def test_room_that_was_made_in_vain_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill that fails because what went for it could not be removed holds no room."""
    directory = tmp_path / "c"
    opened = open_lru(directory)
    fill(opened, "a")
    with sticking(monkeypatch, *(path.name for path in block_files(directory))):
        fill(opened, "b")
        assert opened.blocks.index.usage().reserved_bytes == 0
    opened.close()


@pytest.mark.parametrize("worker", [0, 5])
def test_what_a_killed_process_could_not_remove_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: int
) -> None:
    """By its successor, or by another process; a directory in which something sticks can be opened."""
    directory = tmp_path / "c"
    opened = open_lru(directory)
    fill(opened, "a")
    stuck = block_files(directory)[0].name
    with opened.blocks.index.writing() as transaction:
        file = transaction.file(stuck)
        assert file is not None
        transaction.evict(file)
    opened.blocks.index.close()  # as SIGKILL would
    opened.locks.close()
    opened.worker_locks.give_back_own()
    with sticking(monkeypatch, stuck):
        opened = open_lru(directory, worker)
        assert opened.blocks.index.usage().pending_unlink_bytes == file.disk_bytes
        assert counted(opened) == on_disk(directory)
    opened.blocks.retry_unlinks()
    assert counted(opened) == on_disk(directory)
    assert stuck not in {path.name for path in block_files(directory)}
    opened.close()


MAP_BYTES = 2 * MIB
ROUNDS = 40
BLOCKS = 1000


def used_on_disk(directory: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in block_files(directory))


def held(opened: OpenDirectory, prefix: str) -> int:
    return sum(opened.blocks.index.present([small.block.id for small in small_blocks(prefix, BLOCKS)]))


@pytest.mark.slow
def test_an_index_at_its_limit_evicts_as_for_lack_of_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny blocks, a small map, room on the disk: what came last is there, round after round."""
    monkeypatch.setattr(index_module, "MAP_BYTES", MAP_BYTES)
    opened = open_directory(BlockSettings(tmp_path / "c", 1024 * MIB, 64 * 1024), 0)
    appender = SegmentAppender(opened.blocks)
    for number in range(ROUNDS):
        append_all(appender, small_blocks(f"{number}/", BLOCKS))
        assert held(opened, f"{number}/") == BLOCKS
    usage = opened.blocks.index.usage()
    assert 4 * BLOCKS <= usage.blocks < ROUNDS * BLOCKS
    assert usage.used_bytes == used_on_disk(tmp_path / "c")
    with opened.blocks.index.reading() as transaction:
        assert transaction.size_bytes() <= MAP_BYTES
    opened.close()


@pytest.mark.slow
def test_a_map_that_is_full_all_the_same_is_recovered_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MDB_MAP_FULL where blocks are entered: others go, these are kept, and what is counted is what is there."""
    monkeypatch.setattr(index_module, "SHED_FROM", 0.0)
    opened = open_directory(BlockSettings(tmp_path / "c", 1024 * MIB, 64 * 1024), 0)
    appender, put_rows = SegmentAppender(opened.blocks), IndexTransaction.put_rows

    def put(transaction: IndexTransaction, rows: Rows) -> None:
        if transaction.totals.blocks > 6 * BLOCKS:
            raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached")
        put_rows(transaction, rows)

    monkeypatch.setattr(IndexTransaction, "put_rows", put)
    for number in range(15):
        append_all(appender, small_blocks(f"{number}/", BLOCKS))
        assert held(opened, f"{number}/") == BLOCKS
    usage = opened.blocks.index.usage()
    assert 4 * BLOCKS <= usage.blocks <= 6 * BLOCKS + 256
    assert usage.used_bytes == used_on_disk(tmp_path / "c")
    assert usage.reserved_bytes == 0
    opened.close()


def test_a_map_that_a_reader_holds_costs_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MDB_MAP_FULL in an index that is small: nothing that goes would help."""
    opened = open_directory(BlockSettings(tmp_path / "c", 1024 * MIB, 64 * 1024), 0)
    appender = SegmentAppender(opened.blocks)
    append_all(appender, small_blocks("k", 50))

    def full(*_: object) -> None:
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached")

    with monkeypatch.context() as patched:
        patched.setattr(IndexTransaction, "put_rows", full)
        with pytest.raises(StoreUnavailable):
            append_all(appender, small_blocks("l", 50))
        with pytest.raises(StoreUnavailable):
            opened.blocks.try_index()  # what the probe does: it takes no index for well that takes nothing
    assert opened.blocks.index.usage().blocks == 50
    opened.blocks.try_index()
    opened.close()


def test_a_failed_append_leaves_its_segment_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when the error and all that refers to it are collected: an open file keeps its room."""
    opened = open_directory(BlockSettings(tmp_path / "c", 1024 * MIB, 64 * 1024), 0)
    appender = SegmentAppender(opened.blocks, has_local_readers=True)
    for error in (StoreUnavailable("the disk is full"), NotKept("room", "no room")):
        append_all(appender, small_blocks(f"{error}/", 1))
        [segment] = appender._open.values()
        lease = segment.unsealed
        assert lease is not None

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(type(appender.directory), "reserve", fails)
            with pytest.raises(type(error)):
                appender.append("default", small_blocks("l", 1, 40_000))
        assert not lease.is_open
    opened.close()


@pytest.mark.slow
def test_the_limit_holds_for_each_slot_by_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that brings block after block makes room by itself: one with few blocks keeps them."""
    monkeypatch.setattr(index_module, "MAP_BYTES", MAP_BYTES)
    slots = Slots([Slot("a", Prefix.parse("s3://b/a")), Slot("b", Prefix.parse("s3://b/b"))])
    opened = open_directory(BlockSettings(tmp_path / "c", 1024 * MIB, 64 * 1024, slots=slots), 0)
    appender = SegmentAppender(opened.blocks)
    append_all(appender, small_blocks("a", BLOCKS), "a")
    for number in range(ROUNDS):
        append_all(appender, small_blocks(f"b{number}/", BLOCKS), "b")
    assert held(opened, "a") == BLOCKS
    assert held(opened, f"b{ROUNDS - 1}/") == BLOCKS
    opened.close()


@pytest.mark.slow
def test_rows_of_evicted_blocks_do_not_pile_up(tmp_path: Path) -> None:
    """Long after what was read once is gone, the index is not much larger than what is there."""
    settings = BlockSettings(
        tmp_path / "c", 4 * MIB, 64 * 1024, slots=Slots([Slot("default", Prefix(""), eviction="lru")])
    )
    opened = open_directory(settings, 0)
    appender = SegmentAppender(opened.blocks)
    for number in range(60):
        append_all(appender, small_blocks(f"{number}/", BLOCKS))
        with opened.blocks.index.reading() as transaction:
            assert transaction.stale_rows() <= transaction.totals.blocks + BLOCKS
    assert opened.blocks.index.usage().blocks == len(list(opened.blocks.index.blocks()))
    opened.close()


def fill_one(directory: Path, slots: int, pins: int) -> int:
    """The work of keeping a batch in a full directory, with so many slots that hold something, and so many pins."""
    policy = Slots([Slot(f"s{number}", Prefix.parse(f"s3://b/s{number}/")) for number in range(slots)])
    opened = open_directory(BlockSettings(directory, 16 * MIB, 64 * 1024, slots=policy), 0)
    for number in range(pins):
        opened.blocks.pins.add(f"s3://b/pinned{number}/")
    appender = SegmentAppender(opened.blocks)
    for number in range(slots):
        append_all(appender, small_blocks(f"s{number}/", 1), f"s{number}")
    append_all(appender, small_blocks("s0/filling", 800, 60_000), "s0")
    batches = [small_blocks(f"s0/{number}/", 20) for number in range(8)]
    append_all(appender, batches[0], "s0")
    work = min(calls_of(lambda batch=batch: append_all(appender, batch, "s0")) for batch in batches[1:])  # type: ignore[misc]
    opened.close()
    return work


@pytest.mark.slow
def test_a_fill_costs_the_same_however_many_slots_and_pins_there_are(tmp_path: Path) -> None:
    """Counted in calls of functions, in a directory where something must go for what comes."""
    assert fill_one(tmp_path / "many", 150, 150) <= 1.1 * fill_one(tmp_path / "few", 1, 1)


def test_a_file_of_many_blocks_is_evicted_like_one_of_few(tmp_path: Path) -> None:
    """However many lie in it, one transaction takes it out, in the same time: others wait for its lock."""
    work = []
    for records in (4, 1024):
        opened = open_directory(BlockSettings(tmp_path / str(records), 1024 * MIB, 64 * 1024), 0)
        append_all(SegmentAppender(opened.blocks), small_blocks("k", records))
        [file] = opened.blocks.index.files()
        assert file.blocks == records
        opened.blocks.configured_capacity = type(opened.blocks.configured_capacity)(0)
        work.append(calls_of(opened.blocks.shrink))
        assert opened.blocks.index.usage().blocks == 0
        assert held(opened, "k") == 0
        assert block_files(tmp_path / str(records)) == []
        opened.close()
    assert work[1] <= 1.1 * work[0]


def test_what_the_index_writes_counts_among_the_writes_of_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trickling blocks cost more of the disk than their bytes, and no more than may be written is."""
    monkeypatch.setattr(WrittenBytes, "since", lambda *_: 20_000)
    settings = BlockSettings(tmp_path / "c", 1024 * MIB, 64 * 1024, daily_writes_bytes=2 * MIB)
    opened = open_directory(settings, 0, lambda: 1_000_000.0)
    appender, kept = SegmentAppender(opened.blocks), 0
    with suppress(NotKept):
        while kept < 1000:
            append_all(appender, small_blocks(f"{kept}/", 1))
            kept += 1
    assert MIB < opened.blocks.written_today_bytes() <= 2 * MIB
    assert 20 < kept < 100
    opened.close()


def test_what_this_thread_writes_is_told_by_the_kernel(tmp_path: Path) -> None:
    """Where it counts at all: not for files in memory."""
    written = WrittenBytes()
    mark = written.mark()
    (tmp_path / "file").write_bytes(b"x" * MIB)
    assert written.since(mark) in (0, MIB)
    assert written.since(written.mark()) == 0
