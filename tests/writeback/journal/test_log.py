"""A journal whose log is damaged is refused; one that a power cut has cut short is not."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from gateway.core.errors import BufferDamaged
from gateway.writeback.journal.integrity_check import check_log
from gateway.writeback.journal.journal import Journal
from tests.support.writeback import key, pending

COMMITS = 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a killed process leaves it: its log holds every commit."""
    directory, copy = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("copy")

    async def write() -> None:
        journal = Journal(directory, lambda _: None)
        for number in range(COMMITS):
            await journal.change(lambda tx, number=number: tx.writes.acknowledge(pending(key(f"k{number}"), "x")))  # type: ignore[misc]
        shutil.copytree(directory, copy, dirs_exist_ok=True)
        journal.close()

    asyncio.run(write())
    return copy


def there(directory: Path) -> int:
    """How many of the commits SQLite finds; they must be the first ones."""
    journal = Journal(directory, lambda _: None)
    try:
        found = journal.read(lambda tx: [one.key.key for one in tx.writes.waiting(0, 100)])
    finally:
        journal.close()
    assert found == [f"k{number}" for number in range(len(found))]
    return len(found)


def test_a_whole_log_is_whole(written: Path, tmp_path: Path) -> None:
    """And so is none, and an empty one."""
    check_log(written / "journal-wal")
    assert there(Path(shutil.copytree(written, tmp_path / "copy"))) == COMMITS
    check_log(tmp_path / "none")
    (tmp_path / "empty").write_bytes(b"")
    check_log(tmp_path / "empty")


@pytest.mark.slow
def test_no_flipped_bit_loses_more_than_the_last_commit_unseen(written: Path, tmp_path: Path) -> None:
    """8.6 Anywhere in the log: it is refused, or SQLite finds all of the commits, or all but the last."""
    whole, refused = (written / "journal-wal").read_bytes(), 0
    dice = random.Random(5)
    offsets = [*range(56), *(dice.randrange(len(whole)) for _ in range(150))]
    for number, offset in enumerate(offsets):
        directory = Path(shutil.copytree(written, tmp_path / str(number)))
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << dice.randrange(8)
        (directory / "journal-wal").write_bytes(flipped)
        try:
            check_log(directory / "journal-wal")
        except BufferDamaged:
            refused += 1
            continue
        assert there(directory) >= COMMITS - 1, offset
    assert refused > len(offsets) // 2


@pytest.mark.slow
@pytest.mark.parametrize("step", [3989, 997])
def test_a_log_that_was_cut_short_is_whole(written: Path, tmp_path: Path, step: int) -> None:
    """At any length: what was synced is there, and of the rest nothing is said."""
    whole = (written / "journal-wal").read_bytes()
    for length in range(0, len(whole), step):
        path = tmp_path / "journal-wal"
        path.write_bytes(whole[:length])
        check_log(path)


def test_a_torn_last_commit_is_the_end(written: Path, tmp_path: Path) -> None:
    """Pages of the last commit that were written in another order than they stand in: no damage."""
    whole = bytearray((written / "journal-wal").read_bytes())
    page = len(whole) - 4096
    whole[page : page + 100] = bytes(100)
    (tmp_path / "journal-wal").write_bytes(whole)
    check_log(tmp_path / "journal-wal")


def test_what_a_log_held_before_it_began_anew_is_no_commit(tmp_path: Path) -> None:
    """SQLite writes over its log from the beginning once all of it is in the database: older frames stay behind it."""

    async def write() -> None:
        journal = Journal(tmp_path, lambda _: None)
        for number in range(40):
            await journal.change(lambda tx, number=number: tx.writes.acknowledge(pending(key(f"k{number}"), "x")))  # type: ignore[misc]
        journal._writer.execute("PRAGMA wal_checkpoint(FULL)")
        await journal.change(lambda tx: tx.writes.acknowledge(pending(key("new"), "x")))
        check_log(tmp_path / "journal-wal")
        journal.close()

    asyncio.run(write())
