"""A journal that contradicts itself is not worked with: nothing is removed, hidden or overwritten on its word."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, BufferUnavailable, StartupError
from gateway.writeback.journal.integrity_check import check_journal
from gateway.writeback.journal.journal import Journal
from gateway.writeback.opening import FORMAT, recover
from tests.support.flushing import Buffer
from tests.support.writeback import key

FLIPS = int(os.environ.get("FOREBAY_JOURNAL_FLIPS", "40"))
SEED = int(os.environ.get("FOREBAY_JOURNAL_SEED", random.SystemRandom().randrange(2**32)))
OBJECTS = [f"k{number:02}" for number in range(20)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A buffer in which everything is in the journal itself, and nothing in its log."""
    directory = tmp_path_factory.mktemp("written") / "writeback"
    directory.mkdir()
    (directory / "FORMAT").write_bytes(FORMAT)

    async def write() -> None:
        buffer = Buffer(directory)
        for name in OBJECTS:
            await buffer.put(key(name), name.encode())
        await buffer.upload(key("model"), [300, 100])
        await buffer.close()

    asyncio.run(write())
    with closing(sqlite3.connect(directory / "journal")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return directory


@pytest.fixture
def buffer(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "writeback")


def files(directory: Path) -> Mapping[str, bytes]:
    """All in which something is; SQLite makes its -shm anew whenever it likes."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != "journal-shm")
    return {str(path.relative_to(directory)): path.read_bytes() for path in found if path.stat().st_size}


def readable(directory: Path, name: str) -> bool:
    """Whether an object is found; damage that is told of counts as found."""
    journal = Journal(directory, lambda _: None)
    try:
        return journal.read(lambda tx: tx.writes.latest(key(name))) is not None
    except BufferDamaged:
        return True
    finally:
        journal.close()


def change(buffer: Path, statement: str) -> None:
    with closing(sqlite3.connect(buffer / "journal")) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        assert connection.execute(statement).rowcount > 0


def test_a_whole_journal_is_taken_as_it_is(buffer: Path) -> None:
    """Asked twice, and nothing is changed by asking."""
    before = files(buffer)
    check_journal(buffer)
    check_journal(buffer)
    assert files(buffer) == before
    assert recover(buffer, Moment(0.0)).pending == len(OBJECTS) + 1


def test_no_flipped_bit_hides_an_object_or_removes_its_bytes(written: Path, tmp_path: Path) -> None:
    """8.6 Anywhere in it: it is refused with all that is there, or everything is found, or told to be damaged."""
    print(f"FOREBAY_JOURNAL_SEED={SEED} FOREBAY_JOURNAL_FLIPS={FLIPS}")
    dice, refused = random.Random(SEED), 0
    staged = {name for name in files(written) if name.startswith("staged/")}
    for number in range(FLIPS):
        spoiled = shutil.copytree(written, tmp_path / f"{number}")
        content = bytearray((spoiled / "journal").read_bytes())
        at = dice.randrange(len(content))
        content[at] ^= 1 << dice.randrange(8)
        (spoiled / "journal").write_bytes(content)
        before = files(spoiled)
        try:
            recover(spoiled, Moment(0.0))
        except StartupError:
            refused += 1
            assert files(spoiled).keys() == before.keys(), at
        else:
            assert [name for name in [*OBJECTS, "model"] if not readable(spoiled, name)] == [], at
        assert staged <= files(spoiled).keys(), at
        shutil.rmtree(spoiled)
    print(f"{refused} refused")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE sqlite_schema SET sql = replace(sql, 'place INTEGER', 'plane INTEGER') WHERE name = 'writes'",
        "DELETE FROM sqlite_schema WHERE name = 'writes_by_key'",
        "DELETE FROM sqlite_schema WHERE name = 'files_insert'",
    ],
)
def test_other_tables_than_ours_are_refused(buffer: Path, statement: str) -> None:
    """Also where SQLite itself has nothing against them. The message says what to do."""
    change(buffer, statement)
    before = files(buffer)
    with pytest.raises(StartupError, match=r"damaged: .*forebay writeback export"):
        recover(buffer, Moment(0.0))
    assert files(buffer) == before


@pytest.mark.parametrize("table", ["files", "writes", "usage"])
def test_text_that_is_no_text_is_damage(buffer: Path, table: str) -> None:
    """A flipped bit in the name of a slot: refused, and nothing is changed."""
    change(buffer, f"UPDATE {table} SET slot = CAST(x'f36c6f74' AS TEXT)")
    before = files(buffer)
    with pytest.raises(StartupError, match="nothing was changed"):
        recover(buffer, Moment(0.0))
    assert files(buffer) == before


def test_what_is_no_database_is_refused(buffer: Path) -> None:
    """Somebody has written over its beginning."""
    with (buffer / "journal").open("r+b") as file:
        file.write(b"\0" * 4096)
    with pytest.raises(StartupError, match="nothing was changed"):
        recover(buffer, Moment(0.0))


def test_a_disk_that_does_not_let_it_be_read_is_no_damage(buffer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be there again tomorrow: the gateway starts without it."""

    def broken(_: str) -> sqlite3.Connection:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR | 1 << 8
        raise error

    monkeypatch.setattr("gateway.writeback.journal.integrity_check.connect_reading", broken)
    with pytest.raises(BufferUnavailable, match="disk I/O error"):
        recover(buffer, Moment(0.0))


def test_a_file_is_known_by_whatever_refers_to_it(buffer: Path) -> None:
    """Its own row may be the one that is damaged."""
    change(buffer, "UPDATE files SET name = replace(name, 'w0/', 'w1/')")
    staged = {name for name in files(buffer) if name.startswith("staged/")}
    assert recover(buffer, Moment(0.0)).removed_files == 0
    assert staged <= files(buffer).keys()
