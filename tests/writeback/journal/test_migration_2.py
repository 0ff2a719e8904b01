"""A journal of version 2 becomes one of this version: what is pending belongs to its checkpoints from then on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.clock import Moment
from gateway.errors import BufferDamaged
from gateway.writeback.journal import migration, schema
from gateway.writeback.journal.integrity_check import check_journal
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.schema import VERSION, check_version, connect, create, has_our_tables, prepare
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.writeback import PlainPresence, key, pending, upload

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
