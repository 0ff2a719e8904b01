"""The journal of a buffer, read from a copy: nothing is written to its directory, which may be a read-only mount.

Of a stopped gateway the files are copied, the log with them, and SQLite recovers the copy. Of a running one SQLite's
backup makes a consistent copy.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gateway.core.errors import BufferDamaged, BufferUnavailable, StartupError
from gateway.core.model import ObjectKey
from gateway.writeback.journal import codec, schema
from gateway.writeback.journal.log import check_log
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.rows import OPEN
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.offline_export.manifest import Unreadable

_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""SQLite's messages quote what is damaged, and Python takes them for UTF-8."""

JOURNAL = "journal"
_LOG = "journal-wal"


class JournalCopy:
    """A copy of a buffer's journal, to read. `warnings` name the parts that are unreliable."""

    def __init__(self, connection: sqlite3.Connection, warnings: list[str]) -> None:
        self._connection = connection
        self._book = JournalTransaction(connection)
        self.warnings = warnings

    @classmethod
    def of_stopped(cls, buffer: Path, scratch: Path) -> JournalCopy:
        """Copy the journal of a buffer that no process writes to; `scratch` is an empty directory.

        OSError; BufferUnavailable, also for a journal of another version.
        """
        warnings = []
        for name in (JOURNAL, _LOG):
            if (buffer / name).exists():
                shutil.copyfile(buffer / name, scratch / name)
        try:
            check_log(scratch / _LOG)
        except BufferDamaged as error:
            warnings.append(f"{error}: what was acknowledged from there on is not found")
        return cls._of(scratch, warnings)

    @classmethod
    def of_running(cls, buffer: Path, scratch: Path) -> JournalCopy:
        try:
            source = schema.connect_reading(str(buffer / JOURNAL))
            target = sqlite3.connect(scratch / JOURNAL)
            try:
                source.backup(target)
            finally:
                target.close()
                source.close()
        except _UNREADABLE as error:
            raise BufferUnavailable(f"the write-back journal in {buffer} cannot be copied: {error}") from error
        return cls._of(scratch, [])

    @classmethod
    def _of(cls, scratch: Path, warnings: list[str]) -> JournalCopy:
        connection = sqlite3.connect(scratch / JOURNAL)
        try:
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.isolation_level = None
            schema.prepare(connection)
            [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
        except (*_UNREADABLE, StartupError) as error:
            connection.close()
            told = "; ".join([f"the write-back journal cannot be read: {error}", *warnings])
            raise BufferUnavailable(told) from error
        if found != "ok":
            warnings.append(f"the write-back journal is damaged, what it has lost is not found: {found}")
        return cls(connection, warnings)

    def close(self) -> None:
        self._connection.close()

    def totals(self) -> tuple[int, int]:
        """Return the numbers of objects and bytes that `objects` will yield, as far as can be read."""
        objects = size_bytes = 0
        for one in self.objects(with_parts=False):
            if isinstance(one, Write) and not one.deleted:
                objects += 1
                size_bytes += one.size_bytes
        return objects, size_bytes

    def objects(self, *, with_parts: bool = True) -> Iterator[Write | Unreadable]:
        """Yield pending writes in the order of acknowledgement, with an `Unreadable` in place of each damaged one.

        If pages of the journal are damaged, the writes behind them come last, in reverse order.
        """
        pending = "SELECT id, sequence, bucket, key, record FROM writes WHERE pending = 1 AND sequence > ?"
        last = 0
        try:
            # One by one: in a page of rows, an unreadable one would take the others with it.
            for row in self._connection.execute(f"{pending} ORDER BY sequence", (0,)):
                last = row[1]
                yield self._object(row, with_parts)
        except _UNREADABLE as error:
            self._warn(error)
            with suppress(*_UNREADABLE):  # nothing between the two can be read
                for row in self._connection.execute(f"{pending} ORDER BY sequence DESC", (last,)):
                    yield self._object(row, with_parts)

    def uploads(self) -> Iterator[tuple[Write, int, int]]:
        """Yield open uploads with the number of their parts, and these parts' bytes."""
        try:
            found = f"SELECT id, record FROM writes WHERE {OPEN} ORDER BY key"  # noqa: S608
            for write_id, record in self._connection.execute(found):
                sizes = [part.file.size_bytes for part in self._book.parts.of(write_id)]
                yield codec.unpack_write(write_id, record), len(sizes), sum(sizes)
        except (*_UNREADABLE, BufferDamaged) as error:
            self._warn(error)

    def knows_file(self, name: str) -> bool:
        """Return whether a readable row names a staged file."""
        try:
            return self._book.files.knows(name)
        except _UNREADABLE:
            return False

    def _object(self, row: tuple[int, int, str, bytes, bytes], with_parts: bool) -> Write | Unreadable:
        write_id, sequence, bucket, key, record = row
        try:
            plain = codec.unpack_write(write_id, record)
            found = self._book.writes.whole(write_id) if with_parts else plain
            return found if found is not None else plain
        except (*_UNREADABLE, BufferDamaged) as error:
            return Unreadable(sequence, ObjectKey(bucket, key.decode(errors="replace")), str(error))

    def _warn(self, error: Exception) -> None:
        warning = f"the write-back journal cannot be read as a whole: {error}"
        if warning not in self.warnings:
            self.warnings.append(warning)


def refuse_without_journal(buffer: Path) -> None:
    """Raise StartupError without a journal: SQLite would make a new, empty one."""
    if not (buffer / JOURNAL).exists():
        raise StartupError(f"{buffer} holds no write-back journal")
    if (buffer / JOURNAL).stat().st_size == 0 and not (buffer / _LOG).exists():
        raise StartupError(f"the write-back journal in {buffer} is empty, and its log is missing")
