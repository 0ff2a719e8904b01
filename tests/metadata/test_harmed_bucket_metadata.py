"""Small answers whose file was harmed, is locked, or lies on a disk that fails: misses, and nothing worse."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gateway.metadata import bucket_metadata
from gateway.metadata.bucket_metadata import (
    PAUSE_SECONDS,
    WAITING_MAX,
    BucketAnswer,
    BucketMetadataCache,
    BucketQuery,
    RawDisk,
)
from gateway.metadata.opening import ANSWERS
from tests.support.small_answers import ANSWER, World, keep, known, playing


@pytest.mark.parametrize("value", ["text", 5, 1.5, None, bytearray(b"x"), object()])
def test_nothing_but_bytes_goes_in(tmp_path: Path, value: object) -> None:
    """Neither as a key nor as a value: what diskcache would pickle is a mistake, and says so."""
    disk = RawDisk(str(tmp_path))
    with pytest.raises(TypeError, match="only bytes"):
        disk.store(value, read=False)
    with pytest.raises(TypeError, match="only bytes"):
        disk.put(value)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["value", "file", "key", "text", "number"])
async def test_a_planted_pickle_is_a_miss_and_is_never_opened(tmp_path: Path, form: str) -> None:
    """Whatever a row of the file claims to be, only bytes are read: no code runs, no other file is read or removed."""
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    (tmp_path / "bomb").write_bytes(bomb)
    forms: dict[str, dict[str, object]] = {
        "value": {"mode": 4, "value": bomb},
        "file": {"mode": 4, "value": None, "filename": "../bomb"},
        "key": {"raw": 0, "key": pickle.dumps(Bomb(tmp_path / "exploded"))},
        "text": {"mode": 3, "value": None, "filename": "../bomb"},
        "number": {"value": 5},
    }
    columns = forms[form]
    async with playing(tmp_path) as (world, answers):
        await keep(answers)
        with closing(sqlite3.connect(world.database, isolation_level=None)) as connection:
            changes = ", ".join(f"{name} = ?" for name in columns)
            connection.execute(f"UPDATE Cache SET {changes}", list(columns.values()))
        assert await known(answers) is None
        await keep(answers)
        assert await known(answers) == ANSWER
    assert world.troubles == {}
    assert (tmp_path / "bomb").read_bytes() == bomb
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists(), "the bomb is one"


def no_database(path: Path) -> None:
    path.write_bytes(b"no database" * 4096)


def flipped(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[24:] = bytes(byte ^ 0x5A for byte in whole[24:])
    path.write_bytes(whole)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def another_database(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE Settings (key TEXT NOT NULL UNIQUE, value)")
        connection.execute("CREATE TABLE Cache (a, b)")


def odd_settings(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO Settings VALUES ('get', 1), ('disk_x', 2), ('sqlite_x y', 3)")


HARMS = [no_database, flipped, cut, another_database]


async def recovers(world: World, answers: BucketMetadataCache) -> None:
    """Harmed: nobody sees an error or another answer, and soon answers are kept again."""
    for _ in range(3):
        assert await known(answers) in (None, ANSWER)
        await keep(answers)
        world.pass_seconds(PAUSE_SECONDS)
    assert await known(answers) == ANSWER
    assert "damaged" in world.troubles


@pytest.mark.parametrize("harm", HARMS)
async def test_a_file_harmed_while_it_is_open_is_begun_anew(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Garbage, flipped bits, a cut, another database in its place: a miss that is counted, and then a new file."""
    async with playing(tmp_path) as (world, answers):
        for number in range(20):
            await keep(answers, BucketQuery("HeadBucket", str(number)), BucketAnswer(200, [], b"x" * 3000))
        await keep(answers)
        harm(world.database)
        await recovers(world, answers)


@pytest.mark.parametrize("harm", [*HARMS, odd_settings])
async def test_a_file_harmed_before_it_is_opened_is_begun_anew(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """The same, and settings in it that diskcache would act on."""
    async with playing(tmp_path) as (world, answers):
        await keep(answers)
    harm(world.database)
    async with playing(tmp_path) as (world, answers):
        await recovers(world, answers)


async def test_a_file_that_is_removed_is_made_again(tmp_path: Path) -> None:
    """By hand, or by another process that found it harmed: what is kept next, both see."""
    async with playing(tmp_path) as (world, answers):
        second = world.answers()
        await keep(answers)
        assert await known(second) == ANSWER
        shutil.rmtree(world.directory / ANSWERS)
        assert await known(second) is None
        await keep(answers)
        assert await known(second) == await known(answers) == ANSWER
        await second.close()
    assert world.troubles == {}


async def test_a_directory_that_cannot_be_made_is_a_miss(tmp_path: Path) -> None:
    """Nothing is remembered, nothing fails, and the disk is left alone for a while."""
    (tmp_path / ANSWERS).write_bytes(b"a file")
    async with playing(tmp_path) as (world, answers):
        for _ in range(3):
            await keep(answers)
            assert await known(answers) is None
        (world.directory / ANSWERS).unlink()
        assert await known(answers) is None
        world.pass_seconds(PAUSE_SECONDS)
        await keep(answers)
        assert await known(answers) == ANSWER
    assert set(world.troubles) == {"unavailable"}


async def test_a_locked_file_is_a_miss(tmp_path: Path) -> None:
    """While another process is in a transaction without end: opened already, or not yet."""
    async with playing(tmp_path) as (world, answers):
        await keep(answers)
        late = world.answers()
        with closing(sqlite3.connect(world.database, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            for user in (answers, late):
                assert await known(user) is None
                world.pass_seconds(PAUSE_SECONDS)
                await keep(user)
                world.pass_seconds(PAUSE_SECONDS)
            other.execute("ROLLBACK")
        for user in (answers, late):
            assert await known(user) == ANSWER
        await late.close()
    assert world.troubles == {"unavailable": 4}


async def test_a_file_that_another_process_is_opening_is_a_miss(tmp_path: Path) -> None:
    """Nobody waits for it, however long it takes."""
    async with playing(tmp_path) as (world, answers):
        (world.directory / ANSWERS).mkdir()
        with (world.directory / ANSWERS / "opening.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert await known(answers) is None
        world.pass_seconds(PAUSE_SECONDS)
        await keep(answers)
        assert await known(answers) == ANSWER
    assert world.troubles == {"unavailable": 1}


async def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks goes on without it; what waits for it is bounded."""
    monkeypatch.setattr(bucket_metadata, "RECALL_SECONDS_MAX", 0.01)
    hanging = threading.Event()
    async with playing(tmp_path) as (world, answers):
        monkeypatch.setattr(answers._file, "get", lambda place: hanging.wait() or None)
        recalled = [known(answers) for _ in range(WAITING_MAX + 10)]
        assert await asyncio.gather(*recalled) == [None] * len(recalled)
        assert answers._thread.waiting <= WAITING_MAX
        world.pass_seconds(PAUSE_SECONDS)
        assert await known(answers) is None
        assert answers._thread.waiting <= WAITING_MAX
        hanging.set()
    assert set(world.troubles) == {"unavailable"}
