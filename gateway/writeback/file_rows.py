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

    def _put_file(self, file: StagedFile, slot: str) -> None:
        """On a slot's account, where it is not on another's already; what only the origin has is on nobody's."""
        if file.is_here:
            row = (file.name, slot, file.size_bytes, codec.pack_file(file))
            self._rows.execute("INSERT INTO files VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING", row)

    def _free(self, names: Iterable[str]) -> None:
        for name in filter(None, names):
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
            f"SELECT number, {table}.record, name, files.record FROM {table} "  # noqa: S608
            f"LEFT JOIN files ON file = name WHERE {column} = ? AND number > ? ORDER BY number",
            (value, after),
        )
        for number, record, name, file in found:
            staged = codec.unpack_file(name, file) if name is not None else None
            yield codec.unpack_part((table, value, number), number, record, staged)

    def _row(self, query: str, *values: str | int | bytes) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._rows.execute(query, values).fetchone()
        return row


def encoded(key: ObjectKey) -> bytes:
    """An object's key as the tables have it: in S3's order."""
    return text(key.key)


def text(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
