"""Checks at the start that the journal is whole, before it is read, or anything is sent or removed on its word.

SQLite does not checksum its pages. A changed row is found when it is read (codec.py); but a row that an index has lost
escapes its readers, and files without references are removed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from gateway.core.errors import BufferDamaged, BufferUnavailable
from gateway.writeback.journal.log import check_log
from gateway.writeback.journal.schema import check_version, connect_reading, has_our_tables, is_new

_TOLD_MAX = 3

_OF_THE_DISK = frozenset(
    {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM}
)
"""Errors that do not come from the journal's content."""


def check_journal(directory: Path) -> bool:
    """Check, without changes, that pages, tables, indexes and log fit each other. Return False without a journal.

    BufferDamaged when they do not, StartupError for another version, BufferUnavailable when the disk does not let it be
    read. Blocks: half a second for 100,000 pending objects.
    """
    check_log(directory / "journal-wal")
    journal = directory / "journal"
    if not journal.exists():
        return False
    try:
        with closing(connect_reading(str(journal))) as connection:
            connection.text_factory = lambda raw: raw.decode(errors="replace")  # messages quote what is damaged
            if is_new(connection):
                return False
            check_version(connection)
            found = _findings(connection)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_DISK:
            raise BufferUnavailable(f"the write-back journal in {directory} cannot be read: {error}") from error
        found = [str(error)]
    if found:
        raise BufferDamaged(f"the write-back journal in {directory} is damaged: {'; '.join(found)}")
    return True


def _findings(connection: sqlite3.Connection) -> list[str]:
    told = [text for (text,) in connection.execute(f"PRAGMA integrity_check({_TOLD_MAX})")]
    found = [" ".join(text.split()) for text in told if text != "ok"]
    if not found and not has_our_tables(connection):
        return ["its tables are not those of its version"]
    return found or list(_without_text(connection))[:_TOLD_MAX]


def _without_text(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield text columns that hold no text: SQLite does not check that, and readers would fail on it."""
    connection.text_factory = bytes
    tables = [
        name for (name,) in connection.execute("SELECT CAST(name AS BLOB) FROM sqlite_schema WHERE type = 'table'")
    ]
    for table in (name.decode() for name in tables):
        columns = [
            name.decode() for _, name, kind, *_ in connection.execute(f"PRAGMA table_info({table})") if kind == b"TEXT"
        ]
        for row in connection.execute(f"SELECT {', '.join(columns)} FROM {table}") if columns else ():
            if not all(_is_text(value) for value in row):
                yield f"a row of {table} holds text that is none"


def _is_text(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True
