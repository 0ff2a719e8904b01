"""The journal's tables (SQLite), and their version.

    files      a staged file's name → its length, MD5, checksums; the slot on whose account it is
    freed      names of staged files that nothing refers to any more, until they are removed
    usage      a slot → what its files take, and how many objects and tombstones of it are pending
    uploads    an open upload's id → what Create fixed
    parts      (upload, number) → a part, its file
    objects    a sequence → a pending object or tombstone; its bucket and key
    pieces     (sequence, number) → a part of a pending object, its file
    ended      an upload's id → how it ended
    completing an open upload's id → the Complete that the origin is being asked for
    intents    a token → an upload that the origin is being asked to begin
    orphans    uploads of the origin that are to be aborted there
    profiles   a bucket → what its ETags are
    origin     a key → what the origin has under it by our own doing, and since when

Keys of objects are blobs of UTF-8, so that they come in S3's order. `place` is the key's place in presence.py;
`startable` is 0 for what waits for a person, 2 for what somebody waits for; `sent` is 1 for parts that the origin has,
or cannot have yet; `slot` is the key's; `suspect` is 1 where the process that has asked is dead, or does not know. A
part that only the origin has names no file (`""`). Triggers keep `usage`: whatever changes files or objects changes it,
too. Other sizes and slots are what the records say, for sums.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from urllib.parse import quote

from gateway.errors import StartupError

VERSION = 1

_APPLICATION_ID = 0x464F5242
"""`FORB`: the file says of itself that it is a journal of Forebay."""

_FILE_MODE = 0o600

BUSY_SECONDS_MAX = 5.0
"""Commits take milliseconds, seconds on a bad disk: who holds the journal longer is stopped in the midst of one."""
_TABLES = """
CREATE TABLE files (
  name TEXT PRIMARY KEY, slot TEXT NOT NULL, size_bytes INTEGER NOT NULL, record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE freed (name TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
CREATE TABLE usage (
  slot TEXT PRIMARY KEY, staged_bytes INTEGER NOT NULL, objects INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE uploads (
  upload_id TEXT PRIMARY KEY, bucket TEXT NOT NULL, key BLOB NOT NULL, slot TEXT NOT NULL, record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX uploads_by_key ON uploads (bucket, key, upload_id);
CREATE TABLE parts (
  upload_id TEXT NOT NULL, number INTEGER NOT NULL, file TEXT NOT NULL, slot TEXT NOT NULL, sent INTEGER NOT NULL,
  record BLOB NOT NULL, PRIMARY KEY (upload_id, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX parts_unsent ON parts (slot, upload_id, number) WHERE sent = 0;
CREATE INDEX parts_by_file ON parts (file);
CREATE TABLE objects (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT, bucket TEXT NOT NULL, key BLOB NOT NULL, place INTEGER NOT NULL,
  slot TEXT NOT NULL, startable INTEGER NOT NULL, size_bytes INTEGER NOT NULL, record BLOB NOT NULL
) STRICT;
CREATE INDEX objects_by_key ON objects (bucket, key, sequence);
CREATE INDEX objects_by_place ON objects (place);
CREATE INDEX objects_in_conflict ON objects (sequence) WHERE startable = 0;
CREATE INDEX objects_by_slot ON objects (slot, startable, sequence);
CREATE TABLE pieces (
  sequence INTEGER NOT NULL, number INTEGER NOT NULL, file TEXT NOT NULL, sent INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (sequence, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX pieces_sent ON pieces (sequence) WHERE sent = 1;
CREATE INDEX pieces_by_file ON pieces (file);
CREATE TABLE ended (upload_id TEXT PRIMARY KEY, ended_at REAL NOT NULL, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX ended_by_time ON ended (ended_at);
CREATE TABLE completing (
  upload_id TEXT PRIMARY KEY, asked_at REAL NOT NULL, record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE profiles (bucket TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE origin (
  bucket TEXT NOT NULL, key BLOB NOT NULL, at REAL NOT NULL, record BLOB NOT NULL, PRIMARY KEY (bucket, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX origin_by_time ON origin (at);
CREATE TABLE intents (
  token TEXT PRIMARY KEY, worker INTEGER NOT NULL, suspect INTEGER NOT NULL, bucket TEXT NOT NULL, key BLOB NOT NULL,
  record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX intents_by_key ON intents (bucket, key);
CREATE TABLE orphans (origin_upload_id TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""

_COUNTED = (("files", "staged_bytes", "size_bytes"), ("objects", "objects", "1"))
"""A table, the column of `usage` that sums it up, and what a row of it counts for."""

_TRIGGER = """
CREATE TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN
  INSERT INTO usage VALUES ({row}.slot, 0, 0) ON CONFLICT (slot) DO NOTHING;
  UPDATE usage SET {column} = {column} {sign} {amount} WHERE slot = {row}.slot;
END
"""


def connect(path: str) -> sqlite3.Connection:
    """A connection whose commits survive a power cut, and whose reads wait for no writer. OSError, sqlite3.Error.

    SQLite gives its -wal and -shm the mode of the file itself.
    """
    _create_file(path)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS_MAX, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def connect_reading(path: str) -> sqlite3.Connection:
    """A connection that changes nothing, to a journal that others have open. sqlite3.Error."""
    return sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)


def _create_file(path: str) -> None:
    """Where there is none. To close a second descriptor of a file that SQLite has open in this process drops its locks
    (POSIX): who closes the file next would take himself for the last, and remove the log that others write to.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE))


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables of a new journal; StartupError for one of another version, which stays as it is."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if is_new(connection):
            _create(connection)
        else:
            check_version(connection)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def is_new(connection: sqlite3.Connection) -> bool:
    """Whether nothing has ever been written to it."""
    return _pragma(connection, "user_version") == 0 and _pragma(connection, "schema_version") == 0


def check_version(connection: sqlite3.Connection) -> None:
    """StartupError for a journal of another version, or what is none."""
    version = _pragma(connection, "user_version")
    if version != VERSION or _pragma(connection, "application_id") != _APPLICATION_ID:
        raise StartupError(
            f"the write-back journal has version {version}, this version of Forebay reads {VERSION}: what it holds "
            "is untouched; run the version that wrote it until everything is flushed"
        )


def has_our_tables(connection: sqlite3.Connection) -> bool:
    """Whether tables, indexes and triggers are, to the letter, those that `prepare` makes."""
    with closing(sqlite3.connect(":memory:")) as new:
        _create(new)
        return _statements(connection) == _statements(new)


def _statements(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    return set(connection.execute("SELECT name, tbl_name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))


def _create(connection: sqlite3.Connection) -> None:
    for statement in filter(str.strip, _TABLES.split(";")):
        connection.execute(statement)
    for statement in _triggers():
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _triggers() -> Iterator[str]:
    for table, column, of_row in _COUNTED:
        for event, row, sign in (("INSERT", "new", "+"), ("DELETE", "old", "-")):
            amount = of_row if of_row.isdecimal() else f"{row}.{of_row}"
            yield _TRIGGER.format(table=table, event=event, row=row, sign=sign, column=column, amount=amount)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value
