"""Checks at the start that the journal is whole, before it is read, or anything is sent or removed on its word.

SQLite does not checksum its pages. A changed row is found when it is read (codec.py); but a row that an index has lost
escapes its readers, and files without references are removed.

SQLite takes the first frame of its log with a wrong checksum for the end of the log
(https://www.sqlite.org/fileformat2.html#walformat): right after a power cut, but if a bit has flipped, everything
committed behind it is silently lost. The two can be told apart, because every commit is synced before the next begins:
a torn end holds at most one commit.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gateway.core.errors import BufferDamaged, BufferUnavailable
from gateway.writeback.journal.schema import check_version, connect_reading, has_our_tables, is_new

_HEADER = struct.Struct(">IIIIIIII")
_FRAME_HEADER = struct.Struct(">IIIIII")
_MAGIC = 0x377F0682
_VERSION = 3007000
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame's place in the log, its header, and its bytes."""

    offset: int
    commits: bool
    salts: tuple[int, int]
    checksum: tuple[int, int]
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
    big_endian = bool(magic & 1)
    header_holds = magic & ~1 == _MAGIC and _sum(content[:24], (0, 0), big_endian) == (first, second)
    if not header_holds:
        _refuse_if_commits(path, 0, _frames(content, _likely_page_bytes(page_bytes)))
        return
    _check_frames(path, _frames(content, page_bytes), (salts[0], salts[1]), (first, second), big_endian)


def _check_frames(
    path: Path, frames: list[_Frame], salts: tuple[int, int], running: tuple[int, int], big_endian: bool
) -> None:
    current = [frame for frame in frames if frame.salts == salts]
    for number, frame in enumerate(frames):
        running = _sum(frame.page, _sum(frame.summed, running, big_endian), big_endian)
        if frame.salts != salts or frame.checksum != running:
            behind = [one for one in current if one.offset >= frame.offset]
            damaged = [frame] if frame.salts != salts and behind else []
            _refuse_if_commits(path, number, [*damaged, *behind])
            return


def _refuse_if_commits(path: Path, number: int, frames: list[_Frame]) -> None:
    commits = sum(frame.commits for frame in frames)
    if commits > 1:
        raise BufferDamaged(
            f"the write-back journal's log {path} is damaged in frame {number}, with {commits} commits from there on"
        )


def _frames(content: memoryview, page_bytes: int) -> list[_Frame]:
    """Return all frames that the log has room for, whichever generation wrote them."""
    step = _FRAME_HEADER.size + page_bytes
    offsets = range(_HEADER.size, len(content) - step + 1, step)
    return [_frame(content[offset : offset + step], offset) for offset in offsets]


def _frame(content: memoryview, offset: int) -> _Frame:
    _, size_after_commit, *rest = _FRAME_HEADER.unpack_from(content)
    salts, checksum = (rest[0], rest[1]), (rest[2], rest[3])
    return _Frame(offset, size_after_commit != 0, salts, checksum, content[:8], content[_FRAME_HEADER.size :])


def _likely_page_bytes(page_bytes: int) -> int:
    return page_bytes if page_bytes in {512 << n for n in range(8)} else 4096


def _sum(content: memoryview, running: tuple[int, int], big_endian: bool) -> tuple[int, int]:
    first, second = running
    words = struct.unpack(f"{'>' if big_endian else '<'}{len(content) // 4}I", content)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second


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
