"""The lowest layer of the journal's rows: staged files, by whom they are referred to, and how rows are read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gateway.objects import ObjectKey
from gateway.s3.xml import PARTS_COUNT_MAX
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec
from gateway.writeback.journal.records import Part
from gateway.writeback.presence import News

STARTABLE, URGENT = 1, 2
"""What may be flushed, and of that, what somebody waits for (schema.py)."""


class FileRows:
    """One transaction's view. `freed` are the names of the files that nothing refers to any more.

    `news`: what there is more of to do for whoever flushes.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._rows = connection
        self.freed: list[str] = []
        self.news: set[News] = set()

    def knows_file(self, name: str) -> bool:
        """Whether anything refers to a staged file: its own row, or, where that is damaged, a part's."""
        return self._row("SELECT 1 FROM files WHERE name = ?", name) is not None or self._is_referred_to(name)

    def file(self, name: str) -> StagedFile | None:
        row = self._row("SELECT record FROM files WHERE name = ?", name)
        return codec.unpack_file(name, row[0]) if row else None

    def _put_file(self, file: StagedFile, slot: str) -> None:
        """On a slot's account, where it is not on another's already; what only the origin has is on nobody's."""
        if file.is_here:
            row = (file.name, slot, file.size_bytes, codec.pack_file(file))
            self._rows.execute("INSERT INTO files VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING", row)

    def _free(self, names: Iterable[str]) -> None:
        for name in filter(None, names):
            if self._is_referred_to(name):
                continue
            self._rows.execute("DELETE FROM files WHERE name = ?", (name,))
            self._rows.execute("INSERT OR IGNORE INTO freed VALUES (?)", (name,))
            self.freed.append(name)

    def _is_referred_to(self, name: str) -> bool:
        query = "SELECT 1 FROM parts WHERE file = ? UNION ALL SELECT 1 FROM pieces WHERE file = ?"
        return self._row(query, name, name) is not None

    def left_behind(self) -> Sequence[str]:
        """Files that nothing refers to any more, and that are perhaps not removed yet."""
        found = self._rows.execute("SELECT name FROM freed WHERE name NOT IN (SELECT name FROM files)")
        return [name for (name,) in found]

    def removed(self, names: Iterable[str]) -> None:
        """They are gone: whoever comes need not remove them."""
        for name in names:
            self._rows.execute("DELETE FROM freed WHERE name = ?", (name,))

    def _files(self, table: str, column: str, value: str | int) -> list[str]:
        found = self._rows.execute(f"SELECT DISTINCT file FROM {table} WHERE {column} = ?", (value,))  # noqa: S608
        return [name for (name,) in found.fetchall()]

    def _parts_of(
        self, table: str, column: str, value: str | int, after: int, until: int = PARTS_COUNT_MAX
    ) -> Iterator[Part]:
        found = self._rows.execute(
            f"SELECT number, {table}.record, name, files.record FROM {table} LEFT JOIN files ON file = name "  # noqa: S608
            f"WHERE {column} = ? AND number > ? AND number <= ? ORDER BY number",
            (value, after, until),
        )
        for number, record, name, file in found:
            staged = codec.unpack_file(name, file) if name is not None else None
            yield codec.unpack_part((table, value, number), number, record, staged)

    def _distinct(self, query: str) -> Sequence[str]:
        """What a query finds that gives the next value behind another, or None: a look per value."""
        found: list[str] = []
        while (row := self._row(query, found[-1] if found else "")) is not None and row[0] is not None:
            found.append(row[0])
        return found

    def _row(self, query: str, *values: str | int | bytes) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._rows.execute(query, values).fetchone()
        return row


def encoded(key: ObjectKey) -> bytes:
    """An object's key as the tables have it: in S3's order."""
    return text(key.key)


def decoded(key: bytes) -> str:
    """And back."""
    return key.decode("utf-8", "surrogatepass")


def text(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
