"""Checks at the start that the journal is whole, before it is read, or anything is sent or removed on its word.

SQLite does not checksum its pages. A changed row is found when it is read (rows.py); but a row that an index has lost
escapes its readers, and files without references are removed.

SQLite takes the first frame of its log with a wrong checksum for the end of the log
(https://www.sqlite.org/fileformat2.html#walformat): right after a power cut, but if a bit has flipped, everything
committed behind it is silently lost. The two can be told apart, because every commit is synced before the next begins:
a torn end holds at most one commit.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from gateway.core.errors import BufferDamaged, BufferUnavailable
from gateway.writeback.journal.schema import check_version, connect_reading, has_our_tables, is_new

_HEADER = struct.Struct(">IIIIIIII")
_FRAME_HEADER = struct.Struct(">IIIIII")
_MAGIC = 0x377F0682
_PAGE_BYTES = 4096
_MASK = 0xFFFFFFFF

_TOLD_MAX = 3

_OF_THE_DISK = frozenset(
    {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM}
)
"""Errors that do not come from the journal's content."""


class _Frame(NamedTuple):
    """A frame of the log: whether it ends a commit, the log's generation, its checksum, and what that is of."""

    commits: bool
    salts: list[int]
    checksum: list[int]
    summed: memoryview
    page: memoryview


def check_log(path: Path) -> None:
    """Raise BufferDamaged when the log holds commits that SQLite would not see. Changes nothing; blocks."""
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return
    if len(content) < _HEADER.size:
        return
    magic, _, page_bytes, _, *salts, first, second = _HEADER.unpack_from(content)
    order = ">" if magic & 1 else "<"
    running = [first, second]
    if magic & ~1 != _MAGIC or _sum(content[:24], [0, 0], order) != running:
        likely_bytes = page_bytes if page_bytes in {512 << n for n in range(8)} else _PAGE_BYTES
        _refuse_if_commits(path, 0, _frames(content, likely_bytes))
        return
    frames = _frames(content, page_bytes)
    for number, frame in enumerate(frames):
        running = _sum(frame.page, _sum(frame.summed, running, order), order)
        if frame.salts != salts or frame.checksum != running:
            behind = [one for one in frames[number:] if one.salts == salts]
            damaged = [frame] if frame.salts != salts and behind else []
            _refuse_if_commits(path, number, [*damaged, *behind])
            return


def _refuse_if_commits(path: Path, number: int, frames: Sequence[_Frame]) -> None:
    commits = sum(frame.commits for frame in frames)
    if commits > 1:
        raise BufferDamaged(
            f"the write-back journal's log {path} is damaged in frame {number}, with {commits} commits from there on"
        )


def _frames(content: memoryview, page_bytes: int) -> list[_Frame]:
    """Return all frames that the log has room for, whichever generation wrote them."""
    found, step = list[_Frame](), _FRAME_HEADER.size + page_bytes
    for offset in range(_HEADER.size, len(content) - step + 1, step):
        _, size_after_commit, *rest = _FRAME_HEADER.unpack_from(content, offset)
        summed, page = content[offset : offset + 8], content[offset + _FRAME_HEADER.size : offset + step]
        found.append(_Frame(size_after_commit != 0, rest[:2], rest[2:], summed, page))
    return found


def _sum(content: memoryview, running: list[int], order: str) -> list[int]:
    first, second = running
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return [first, second]


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
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for table in tables:
        columns = [name for _, name, kind, *_ in connection.execute(f"PRAGMA table_info({table})") if kind == "TEXT"]
        as_bytes = ", ".join(f"CAST({name} AS BLOB)" for name in columns)
        for row in connection.execute(f"SELECT {as_bytes} FROM {table}") if columns else ():
            try:
                for value in row:
                    (value or b"").decode()
            except UnicodeDecodeError:
                yield f"a row of {table} holds text that is none"
