"""What a start does about a full disk: it uses what was set aside, or is refused, where acknowledged writes are."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gateway.config import Settings
from gateway.core.clock import Moment
from gateway.core.errors import BufferUnavailable, StartupError, StoreUnavailable
from gateway.serve import claim as claims
from gateway.serve.claim import closed_mark, disable_directory, recover_buffer
from gateway.writeback.journal.journal import Journal
from gateway.writeback.opening import may_hold, recover
from gateway.writeback.room import ReserveFile
from tests.support.cache_directory import begun
from tests.support.settings import load
from tests.support.writeback import key, part, pending

CONFIG = """
[origin]
endpoint_url = "http://127.0.0.1:9"
access_key_id = "a"
secret_access_key = "b"
[cache]
directory = "{}"
persistent = true
[[slots]]
name = "back"
prefix = "s3://bucket/"
write = "back"
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a gateway whose buffer is in order, and has its reserve."""
    monkeypatch.setattr(claims, "SHARED_MEMORY", tmp_path)
    begun(tmp_path / "cache")
    settings = load(tmp_path, CONFIG.format(tmp_path / "cache")).settings
    assert recover_buffer(settings) is None
    ReserveFile(tmp_path / "cache" / "writeback").keep()
    return settings


@pytest.fixture
def buffer(settings: Settings) -> Path:
    return settings.cache.directory / "writeback"


def acknowledge(buffer: Path) -> None:
    journal = Journal(buffer, lambda _: None)
    try:
        asyncio.run(journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), parts=[part(1, "")]))))
    finally:
        journal.close()


def fill(monkeypatch: pytest.MonkeyPatch, *, reserve_suffices: bool = False) -> None:
    """The disk has no room, unless that of the reserve is enough, and opens no journal without any."""
    real = recover

    def check(directory: Path, _size_bytes: int) -> None:
        if not reserve_suffices or (directory / "writeback" / "ballast").exists():
            raise OSError(errno.ENOSPC, "No space left on device")

    def recover_with_room(directory: Path, now: Moment) -> object:
        try:
            check(directory.parent, 1)
        except OSError:
            raise BufferUnavailable("disk I/O error") from None
        return real(directory, now)

    monkeypatch.setattr(claims, "check_room", check)
    monkeypatch.setattr("gateway.writeback.opening.recover", recover_with_room)


def test_what_was_set_aside_is_used_before_anything_is_opened(
    settings: Settings, buffer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite removes its log at the end of a stop in order: the next start needs room for another."""
    acknowledge(buffer)
    fill(monkeypatch, reserve_suffices=True)
    assert recover_buffer(settings) is None
    assert not (buffer / "ballast").exists()


def test_where_there_is_room_nothing_is_given_up(settings: Settings, buffer: Path) -> None:
    """It is for later."""
    acknowledge(buffer)
    assert recover_buffer(settings) is None
    assert (buffer / "ballast").exists()


def test_without_room_a_start_does_not_do_without_acknowledged_writes(
    settings: Settings, buffer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, with what to do; what lies there is untouched, and the next gateway forgets nothing."""
    acknowledge(buffer)
    fill(monkeypatch)
    before = (buffer / "journal").read_bytes()
    with pytest.raises(StartupError, match=r"is full .*disk I/O error.* make 4 MiB of room or more"):
        recover_buffer(settings)
    assert (buffer / "journal").read_bytes() == before
    assert not closed_mark(settings.cache.directory).exists()


def test_without_room_and_with_nothing_to_lose_it_does(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are slower (8.3), and right."""
    fill(monkeypatch)
    assert recover_buffer(settings) == "disk I/O error"
    assert closed_mark(settings.cache.directory).exists()


def caused_by(cause: Exception) -> StoreUnavailable:
    error = StoreUnavailable("the directory cannot be opened")
    error.__cause__ = BufferUnavailable("the journal cannot be opened")
    error.__cause__.__cause__ = cause
    return error


def of_sqlite(name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = name
    return error


NO_ROOM: Sequence[Exception] = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    of_sqlite("SQLITE_FULL"),
    of_sqlite("SQLITE_IOERR_SHMSIZE"),
)


@pytest.mark.parametrize("cause", NO_ROOM, ids=str)
def test_what_failed_for_want_of_room_counts_though_there_is_some_by_now(
    settings: Settings, buffer: Path, cause: Exception
) -> None:
    """Others may remove their files at any moment."""
    acknowledge(buffer)
    with pytest.raises(StartupError, match="is full"):
        disable_directory(settings.cache.directory, caused_by(cause))


@pytest.mark.parametrize("cause", [OSError(errno.EIO, "Input/output error"), of_sqlite("SQLITE_IOERR_READ")], ids=str)
def test_a_disk_that_fails_is_done_without(settings: Settings, buffer: Path, cause: Exception) -> None:
    """What was acknowledged stays on it (8.5)."""
    acknowledge(buffer)
    assert disable_directory(settings.cache.directory, caused_by(cause)) == "the directory cannot be opened"
    assert (buffer / "ballast").exists()


def _nothing(_buffer: Path) -> None: ...


def _no_journal(buffer: Path) -> None:
    (buffer / "journal").unlink()


def _never_written(buffer: Path) -> None:
    os.truncate(buffer / "journal", 0)


def _an_unreadable_log(buffer: Path) -> None:
    (buffer / "journal-wal").write_bytes(b"x" * 100)
    (buffer / "journal").write_bytes(b"no journal" * 1000)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (_nothing, False),
        (_no_journal, False),
        (_never_written, False),
        (acknowledge, True),
        (_an_unreadable_log, True),
    ],
)
def test_what_a_buffer_may_hold_is_told_without_opening_it(
    buffer: Path, harm: Callable[[Path], None], expected: bool
) -> None:
    """In doubt it holds something. Nothing is made that needs room."""
    harm(buffer)
    names = {path.name for path in buffer.iterdir()}
    assert may_hold(buffer) is expected
    assert {path.name for path in buffer.iterdir()} - names <= {"journal-shm"}


def test_what_is_in_the_log_only_is_held(buffer: Path) -> None:
    """A gateway that was killed leaves it so."""
    journal = Journal(buffer, lambda _: None)
    try:
        asyncio.run(journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), parts=[part(1, "")]))))
        assert may_hold(buffer)
    finally:
        journal.close()
