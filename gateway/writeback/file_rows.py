"""The lowest layer of the journal's rows: staged files, by whom they are referred to, and how rows are read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.objects import ObjectKey
from gateway.writeback import codec
from gateway.writeback.records import Part
from gateway.writeback.staged_file import StagedFile


class FileRows:
    """One transaction's view. `freed` are the names of the files that nothing refers to any more."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._rows = connection
        self.freed: list[str] = []

    def knows_file(self, name: str) -> bool:
        """Whether anything refers to a staged file."""
        return self._row("SELECT 1 FROM files WHERE name = ?", name) is not None

    def file(self, name: str) -> StagedFile | None:
        row = self._row("SELECT record FROM files WHERE name = ?", name)
        return codec.unpack_file(name, row[0]) if row else None

    def staged_bytes(self) -> int:
        """What all files take that something refers to."""
        return sum(
            codec.unpack_file(name, record).size_bytes for name, record in self._rows.execute("SELECT * FROM files")
        )

    def _put_file(self, file: StagedFile) -> None:
        self._rows.execute("INSERT OR IGNORE INTO files VALUES (?, ?)", (file.name, codec.pack_file(file)))

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            if self._row(
                "SELECT 1 FROM parts WHERE file = ? UNION ALL SELECT 1 FROM pieces WHERE file = ?", name, name
            ):
                continue
            self._rows.execute("DELETE FROM files WHERE name = ?", (name,))
            self.freed.append(name)

    def _files(self, table: str, column: str, value: str | int) -> list[str]:
        found = self._rows.execute(f"SELECT DISTINCT file FROM {table} WHERE {column} = ?", (value,))  # noqa: S608
        return [name for (name,) in found.fetchall()]

    def _parts_of(self, table: str, column: str, value: str | int, after: int) -> Iterator[Part]:
        found = self._rows.execute(
            f"SELECT number, {table}.record, name, files.record FROM {table} JOIN files ON file = name "  # noqa: S608
            f"WHERE {column} = ? AND number > ? ORDER BY number",
            (value, after),
        )
        for number, record, name, file in found:
            yield codec.unpack_part((table, value, number), number, record, codec.unpack_file(name, file))

    def _row(self, query: str, *values: str | int | bytes) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._rows.execute(query, values).fetchone()
        return row


def encoded(key: ObjectKey) -> bytes:
    """An object's key as the tables have it: in S3's order."""
    return text(key.key)


def text(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
