"""What the index takes: a budget that eviction keeps, and work that does not grow with slots, pins and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest

from gateway.blocks import index as index_module
from gateway.blocks.index import WrittenBytes
from gateway.blocks.layout import BlockRecord, BlockSettings
from gateway.blocks.opening import OpenDirectory, open_directory
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.blocks.transaction import IndexTransaction
from gateway.core.errors import NotKept, StoreUnavailable
from gateway.policy.slots import Prefix, Slots
from tests.support.appending import append_all, calls_of, small_blocks
from tests.support.blocks import MIB, block_files
from tests.support.slots import Slot

MAP_BYTES = 2 * MIB
ROUNDS = 40
BLOCKS = 1000


def used_on_disk(directory: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in block_files(directory))


def held(opened: OpenDirectory, prefix: str) -> int:
    return sum(opened.blocks.index.present([small.block.id for small in small_blocks(prefix, BLOCKS)]))


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


def test_a_map_that_is_full_all_the_same_is_recovered_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MDB_MAP_FULL where blocks are entered: others go, these are kept, and what is counted is what is there."""
    monkeypatch.setattr(index_module, "SHED_FROM", 0.0)
    opened = open_directory(BlockSettings(tmp_path / "c", 1024 * MIB, 64 * 1024), 0)
    appender, put_rows = SegmentAppender(opened.blocks), IndexTransaction.put_rows

    def put(transaction: IndexTransaction, blocks: Sequence[BlockRecord]) -> None:
        if transaction.totals.blocks > 6 * BLOCKS:
            raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached")
        put_rows(transaction, blocks)

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
