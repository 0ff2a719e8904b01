"""The journal's tables (SQLite) and their version.

    node       this node's id, and how often its buffer was recovered: with a write's `id`, its identity
    writes     a write, from CreateMultipartUpload, PutObject or DeleteObject to its end
    parts      (write, number) → a part of it, its file
    files      a staged file's name → its length, MD5, and the slot that it counts for
    freed      names of staged files without references, until they are removed
    usage      a slot → the bytes of its files, and how many of its acknowledged writes are not at the origin
    profiles   a bucket → the facts learned of it
    origin     a key → the last change by this gateway at the origin, and when
    checkpoints, checkpoint_objects   groups of objects (checkpoints.py)
    local_usage    a slot → the bytes and writes that are kept only here

Of `writes`: `state` is records.State; `pending` is 1 for acknowledged writes that the origin does not have; `sequence`
is the place in the order of writes, once there is one, `since_sequence` that of the first write that it replaced, or
its own. `due_at` is when the reconciler looks at it (seconds since 1970); NULL while it waits: for the write with
`after_sequence`, for a person, or for the process that handles it. `attempts` counts the failures in a row for which a
person may be needed, since `failing_since` (NULL: only the bucket is away); `last_error` is the latest. `priority` is
records.Priority. `damaged` is 1 for a write whose bytes or row are damaged. `behind` is set of markers: the prefix
whose earlier writes they wait for.

Keys of objects are blobs of UTF-8, so that they sort in S3's order. `place` is the key's hash slot
(pending_key_filter.py); `slot` is the key's. `sent` is 1 for parts that the origin has. A part that only the origin has
names no file (`""`). Triggers keep `usage` whenever files or writes change.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from urllib.parse import quote

from gateway.core.errors import StartupError

VERSION = 1

CONVERSIONS: Mapping[int, Callable[[sqlite3.Connection], None]] = {}
"""The steps from each older version that this one reads to the next. Version 1 is the first."""

_APPLICATION_ID = 0x464F5242
"""`FORB`: marks the file as a journal of Forebay."""

_FILE_MODE = 0o600

BUSY_SECONDS_MAX = 5.0
"""Commits take milliseconds, seconds on a bad disk: a process that holds the journal longer was stopped during one."""

_TABLES = """
CREATE TABLE node (name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE files (
  name TEXT PRIMARY KEY, slot TEXT NOT NULL, size_bytes INTEGER NOT NULL, record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE freed (name TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
CREATE TABLE usage (
  slot TEXT PRIMARY KEY, staged_bytes INTEGER NOT NULL, objects INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE writes (
  id INTEGER PRIMARY KEY AUTOINCREMENT, upload_id TEXT UNIQUE, bucket TEXT NOT NULL, key BLOB NOT NULL,
  place INTEGER NOT NULL, slot TEXT NOT NULL, state INTEGER NOT NULL, pending INTEGER NOT NULL, sequence INTEGER,
  since_sequence INTEGER, after_sequence INTEGER, due_at REAL, attempts INTEGER NOT NULL, failing_since REAL,
  last_error TEXT, priority INTEGER NOT NULL, damaged INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
  behind BLOB, record BLOB NOT NULL
) STRICT;
CREATE INDEX writes_by_key ON writes (bucket, key, sequence) WHERE state < 5;
CREATE INDEX writes_by_place ON writes (place) WHERE pending = 1;
CREATE INDEX writes_by_slot ON writes (slot, sequence) WHERE sequence IS NOT NULL;
CREATE UNIQUE INDEX writes_by_sequence ON writes (sequence) WHERE sequence IS NOT NULL;
CREATE INDEX writes_by_after ON writes (after_sequence) WHERE after_sequence IS NOT NULL;
CREATE INDEX writes_due ON writes (slot, bucket, priority, due_at) WHERE due_at IS NOT NULL AND state < 5;
CREATE INDEX writes_open ON writes (bucket, key, upload_id) WHERE upload_id IS NOT NULL AND pending = 0 AND state < 3;
CREATE INDEX writes_ended ON writes (due_at) WHERE state = 5;
CREATE INDEX writes_aborting ON writes (id) WHERE state = 4;
CREATE INDEX writes_markers ON writes (bucket, behind, sequence) WHERE behind IS NOT NULL AND state < 5;
CREATE INDEX writes_in_conflict ON writes (sequence) WHERE state = 3;
CREATE INDEX writes_failing ON writes (sequence) WHERE attempts > 0 OR damaged = 1;
CREATE TABLE parts (
  write_id INTEGER NOT NULL, number INTEGER NOT NULL, file TEXT NOT NULL, sent INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (write_id, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX parts_sent ON parts (write_id) WHERE sent = 1;
CREATE INDEX parts_unsent ON parts (write_id, number) WHERE sent = 0;
CREATE INDEX parts_by_file ON parts (file);
CREATE TABLE profiles (bucket TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE origin (
  bucket TEXT NOT NULL, key BLOB NOT NULL, at REAL NOT NULL, record BLOB NOT NULL, PRIMARY KEY (bucket, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX origin_by_time ON origin (at);
CREATE TABLE checkpoints (
  id INTEGER PRIMARY KEY, bucket TEXT NOT NULL, prefix BLOB NOT NULL, run BLOB NOT NULL, slot TEXT NOT NULL,
  step INTEGER, layout TEXT NOT NULL, began_at REAL NOT NULL, ordinal INTEGER NOT NULL,
  save_order INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX checkpoints_by_name ON checkpoints (bucket, prefix);
CREATE INDEX checkpoints_by_run ON checkpoints (bucket, run, save_order);
CREATE INDEX checkpoints_by_slot ON checkpoints (slot, save_order);
CREATE UNIQUE INDEX checkpoints_by_order ON checkpoints (save_order);
CREATE TABLE checkpoint_objects (
  bucket TEXT NOT NULL, key BLOB NOT NULL, checkpoint_id INTEGER NOT NULL, rank INTEGER, write_id INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL, began_at REAL NOT NULL, acknowledged_at REAL NOT NULL, durable_at REAL,
  PRIMARY KEY (bucket, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX checkpoint_objects_in ON checkpoint_objects (checkpoint_id, acknowledged_at);
CREATE INDEX checkpoint_objects_left ON checkpoint_objects (checkpoint_id) WHERE durable_at IS NULL;
CREATE INDEX writes_local ON writes (slot, sequence) WHERE state = -1;
CREATE TABLE local_usage (
  slot TEXT PRIMARY KEY, size_bytes INTEGER NOT NULL, objects INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""
_TRIGGERS = """
CREATE TRIGGER files_insert AFTER INSERT ON files BEGIN
  INSERT INTO usage VALUES (new.slot, 0, 0) ON CONFLICT (slot) DO NOTHING;
  UPDATE usage SET staged_bytes = staged_bytes + new.size_bytes WHERE slot = new.slot;
END;
CREATE TRIGGER files_delete AFTER DELETE ON files BEGIN
  UPDATE usage SET staged_bytes = staged_bytes - old.size_bytes WHERE slot = old.slot;
END;
CREATE TRIGGER writes_insert AFTER INSERT ON writes WHEN new.pending = 1 BEGIN
  INSERT INTO usage VALUES (new.slot, 0, 0) ON CONFLICT (slot) DO NOTHING;
  UPDATE usage SET objects = objects + 1 WHERE slot = new.slot;
END;
CREATE TRIGGER writes_update AFTER UPDATE OF pending ON writes WHEN new.pending <> old.pending BEGIN
  INSERT INTO usage VALUES (new.slot, 0, 0) ON CONFLICT (slot) DO NOTHING;
  UPDATE usage SET objects = objects + new.pending - old.pending WHERE slot = new.slot;
END;
CREATE TRIGGER writes_delete AFTER DELETE ON writes WHEN old.pending = 1 BEGIN
  UPDATE usage SET objects = objects - 1 WHERE slot = old.slot;
END;
CREATE TRIGGER local_insert AFTER INSERT ON writes WHEN new.state = -1 BEGIN
  INSERT INTO local_usage VALUES (new.slot, 0, 0) ON CONFLICT (slot) DO NOTHING;
  UPDATE local_usage SET size_bytes = size_bytes + new.size_bytes, objects = objects + 1 WHERE slot = new.slot;
END;
CREATE TRIGGER local_update AFTER UPDATE OF state, size_bytes ON writes
WHEN (new.state = -1 OR old.state = -1) AND (new.state <> old.state OR new.size_bytes <> old.size_bytes) BEGIN
  INSERT INTO local_usage VALUES (new.slot, 0, 0) ON CONFLICT (slot) DO NOTHING;
  UPDATE local_usage SET
    size_bytes = size_bytes + new.size_bytes * (new.state = -1) - old.size_bytes * (old.state = -1),
    objects = objects + (new.state = -1) - (old.state = -1)
  WHERE slot = new.slot;
END;
CREATE TRIGGER local_delete AFTER DELETE ON writes WHEN old.state = -1 BEGIN
  UPDATE local_usage SET size_bytes = size_bytes - old.size_bytes, objects = objects - 1 WHERE slot = old.slot;
END;
"""


def connect(path: str) -> sqlite3.Connection:
    """Return a connection whose commits survive a power cut, and whose reads never wait. OSError, sqlite3.Error.

    SQLite gives its -wal and -shm the mode of the file itself.
    """
    _create_file(path)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS_MAX, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def connect_reading(path: str, *, without_log: bool = False) -> sqlite3.Connection:
    """Return a read-only connection to a journal that others have open. sqlite3.Error.

    `without_log` ignores the log, and needs no room for a log and its index.
    """
    how = "mode=ro&immutable=1" if without_log else "mode=ro"
    return sqlite3.connect(f"file:{quote(path)}?{how}", uri=True, isolation_level=None, check_same_thread=False)


def _create_file(path: str) -> None:
    """Create the file if it is missing, and never open an existing one.

    Closing a second descriptor of a file that SQLite has open in this process drops its locks (POSIX): the next process
    to close the file would take itself for the last, and remove the log that others write to.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE))


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables of a new journal, or convert an older one, in one transaction.

    A kill leaves the old version or the new one. Raise StartupError for any other version, which stays as it is.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        if is_new(connection):
            create(connection)
        else:
            for version in range(check_version(connection), VERSION):
                CONVERSIONS[version](connection)
                connection.execute(f"PRAGMA user_version = {version + 1}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def is_new(connection: sqlite3.Connection) -> bool:
    return _pragma(connection, "user_version") == 0 and _pragma(connection, "schema_version") == 0


def check_version(connection: sqlite3.Connection) -> int:
    """Return the journal's version. Raise StartupError if this code cannot read it, or if it is no journal."""
    version, readable = _pragma(connection, "user_version"), (*CONVERSIONS, VERSION)
    if version not in readable or _pragma(connection, "application_id") != _APPLICATION_ID:
        reads = " and ".join(map(str, readable))
        raise StartupError(
            f"the write-back journal has version {version}, this version of Forebay reads {reads}: what it holds is "
            "untouched; run the version that wrote it until everything is flushed"
        )
    return version


def has_our_tables(connection: sqlite3.Connection) -> bool:
    """Tell whether tables, indexes and triggers are, to the letter, those of this version. An older one has others."""
    if check_version(connection) != VERSION:
        return True
    with closing(sqlite3.connect(":memory:")) as new:
        create(new)
        return _statements(connection) == _statements(new)


def _statements(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    return set(connection.execute("SELECT name, tbl_name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))


def create(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty journal."""
    for statement in filter(str.strip, _TABLES.split(";")):
        connection.execute(statement)
    for trigger in filter(str.strip, _TRIGGERS.split("END;")):
        connection.execute(f"{trigger}END")
    connection.execute("INSERT INTO node VALUES ('id', ?), ('epoch', 0), ('sequence', 0)", (secrets.token_hex(8),))
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value
