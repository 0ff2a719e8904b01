"""A journal of version 2 becomes one of this version: what is pending belongs to its checkpoints from then on."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, StartupError
from gateway.writeback.journal import migration, schema
from gateway.writeback.journal.integrity_check import check_journal
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.schema import VERSION, check_version, connect, create, has_our_tables, prepare
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.writeback import PlainPresence, key, pending, upload

STRIDE = int(os.environ.get("FOREBAY_MIGRATION_STRIDE", "3"))
"""A process is killed before one in so many statements."""

SHARD, MARKER = "run/step-5/__1_0.distcp", "run/step-5/.metadata"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of version 2 with two objects of a checkpoint, one of none, a tombstone, an upload, a damaged row."""
    with closing(connect(str(tmp_path / "journal"))) as connection:
        connection.execute("BEGIN")
        create(connection)
        # No write names a checkpoint, as none did in version 2.
        tx = JournalTransaction(connection, PlainPresence())
        for name in (SHARD, MARKER, "other", "run/step-6/damaged"):
            tx.acknowledge(replace(pending(key(name), f"file-of-{name}"), began_at=50.0, acknowledged_at=60.0))
        tx.acknowledge(pending(key("run/step-7/gone"), deleted=True))
        tx.open_upload(upload("u", key("run/step-5/open")))
        connection.execute("UPDATE writes SET record = x'00' WHERE key = ?", (b"run/step-6/damaged",))
        for what in ("TRIGGER local_insert", "TRIGGER local_update", "TRIGGER local_delete", "INDEX writes_local"):
            connection.execute(f"DROP {what}")
        for table in ("checkpoints", "checkpoint_objects", "local_usage"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("PRAGMA user_version = 2")
        connection.execute("COMMIT")
    return tmp_path / "journal"


def opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def test_each_version_is_known_by_its_tables(path: Path) -> None:
    """Before and after; a second start changes nothing."""
    assert check_journal(path.parent)
    with closing(opened(path)) as connection:
        assert (check_version(connection), has_our_tables(connection)) == (2, True)
        prepare(connection)
        assert (check_version(connection), has_our_tables(connection)) == (VERSION, True)
        before = list(connection.iterdump())
        prepare(connection)
        assert list(connection.iterdump()) == before
        connection.execute("DROP INDEX checkpoint_objects_in")
        assert not has_our_tables(connection)


@pytest.mark.parametrize("rows_at_once", [1, 2, 1000])
def test_what_is_pending_belongs_to_its_checkpoint(
    path: Path, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the known layouts, however much it is; settled later, it is durable. A damaged row is as damaged as before."""
    monkeypatch.setattr(migration, "_ROWS_AT_ONCE", rows_at_once)
    with closing(opened(path)) as connection:
        prepare(connection)
        tx = JournalTransaction(connection, PlainPresence())
        query = "SELECT key, rank, began_at, acknowledged_at, durable_at FROM checkpoint_objects ORDER BY key"
        assert connection.execute(query).fetchall() == [
            (MARKER.encode(), None, 50.0, 60.0, None),
            (SHARD.encode(), 1, 50.0, 60.0, None),
        ]
        assert connection.execute("SELECT prefix, step, layout, slot FROM checkpoints").fetchall() == [
            (b"run/step-5/", 5, "dcp", "slot")
        ]
        shard = tx.latest(key(SHARD))
        assert shard is not None
        assert shard.member is not None
        tx.settle(shard.id, '"e"', Moment(70.0))
        assert connection.execute(query).fetchall()[1] == (SHARD.encode(), 1, 50.0, 60.0, 70.0)
        with pytest.raises(BufferDamaged):
            tx.latest(key("run/step-6/damaged"))


def test_what_goes_wrong_leaves_it_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is one transaction, up to its very end."""

    def fail(connection: sqlite3.Connection) -> None:
        migration.find_checkpoints(connection)
        assert check_version(connection) == VERSION
        raise sqlite3.OperationalError("disk I/O error")

    with closing(opened(path)) as connection:
        before = list(connection.iterdump())
        monkeypatch.setattr(schema, "find_checkpoints", fail)
        with pytest.raises(sqlite3.OperationalError):
            prepare(connection)
        assert (list(connection.iterdump()), check_version(connection)) == (before, 2)


def test_a_process_opens_it_as_its_own(path: Path) -> None:
    """As at the first start of a new version."""
    with closing(Journal(path.parent, lambda _: None)) as journal:
        assert journal.read(lambda tx: tx.counts()) == (5, 1)


def test_version_3_has_the_same_tables(tmp_path: Path) -> None:
    """Only its number changes: what is pending is as it was."""
    with closing(connect(str(tmp_path / "journal"))) as connection:
        connection.execute("BEGIN")
        create(connection, 3)
        JournalTransaction(connection, PlainPresence()).acknowledge(pending(key(SHARD), "file"))
        connection.execute("COMMIT")
        assert (check_version(connection), has_our_tables(connection)) == (3, True)
        before = connection.execute("SELECT * FROM writes").fetchall()
        prepare(connection)
        assert (check_version(connection), has_our_tables(connection)) == (VERSION, True)
        assert connection.execute("SELECT * FROM writes").fetchall() == before
        write = JournalTransaction(connection, PlainPresence()).latest(key(SHARD))
        assert write is not None
        assert not write.is_etag_local


class _Failing:
    """A connection whose `left`th statement fails."""

    def __init__(self, real: sqlite3.Connection, left: int) -> None:
        self._real = real
        self.left = left

    def execute(self, statement: str, *values: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise sqlite3.OperationalError("disk I/O error")
        return self._real.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_statement_that_fails_leaves_it_as_it_was(path: Path) -> None:
    """Whichever it is; the next start makes it whole."""
    with closing(opened(path)) as connection:
        before = list(connection.iterdump())
        for number in range(2, 10_000):  # the first one is BEGIN
            failing = _Failing(connection, number)
            try:
                prepare(cast(sqlite3.Connection, failing))
            except sqlite3.OperationalError:
                assert not connection.in_transaction
                assert list(connection.iterdump()) == before, number
                assert check_version(connection) == 2
                continue
            break
        assert number > 25
        assert (check_version(connection), has_our_tables(connection)) == (VERSION, True)
        assert JournalTransaction(connection, PlainPresence()).counts() == (5, 1)


@pytest.mark.slow
def test_a_kill_leaves_one_version_or_the_other(path: Path) -> None:
    """At any statement, with all that SQLite has written by then."""
    with closing(opened(path)) as connection:
        before = list(connection.iterdump())
    counted = 0
    for number in range(1 + random.SystemRandom().randrange(STRIDE), 10_000, STRIDE):
        if not _killed(path, number):
            break
        counted += STRIDE
        check_journal(path.parent)
        with closing(opened(path)) as connection:
            assert (check_version(connection), has_our_tables(connection)) == (2, True)
            assert list(connection.iterdump()) == before, number
    assert counted > 25
    check_journal(path.parent)
    with closing(opened(path)) as connection:
        assert (check_version(connection), has_our_tables(connection)) == (VERSION, True)
        assert JournalTransaction(connection, PlainPresence()).counts() == (5, 1)


def _killed(path: Path, number: int) -> bool:
    """Whether a process that migrates is killed before its `number`th statement; else it comes to its end."""
    child = os.fork()
    if child == 0:
        try:
            connection, left = opened(path), number

            def count(_: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            connection.set_trace_callback(count)
            prepare(connection)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_journal_of_yet_another_version_stays_as_it_is(path: Path) -> None:
    """Neither newer ones nor what is no journal of ours."""
    for pragma in ("user_version = 1", f"user_version = {VERSION + 1}", "user_version = 0", "application_id = 7"):
        with closing(opened(path)) as connection:
            connection.execute(f"PRAGMA {pragma}")
            before = list(connection.iterdump())
            with pytest.raises(StartupError, match="is untouched"):
                prepare(connection)
            assert list(connection.iterdump()) == before
            connection.execute("PRAGMA user_version = 2")
