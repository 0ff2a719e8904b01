"""Tables of the journal, as one transaction reads and changes them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any, TypeAlias

from gateway.core.model import ObjectKey

PENDING = "pending = 1 AND state < 5"
OPEN = "upload_id IS NOT NULL AND pending = 0 AND state < 3"
"""Conditions for acknowledged writes and for open uploads, as the indices have them."""

BEHIND_ALL = b"\xff"
"""No byte of UTF-8 is as great."""

Value: TypeAlias = str | int | float | bytes | None


class Table:
    """One or several tables within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._rows = connection

    def _all(self, query: str, *values: Value) -> list[tuple[Any, ...]]:
        return self._rows.execute(query, values).fetchall()

    def _row(self, query: str, *values: Value) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._rows.execute(query, values).fetchone()
        return row

    def _column(self, query: str, *values: Value) -> list[Any]:
        """Return the first column of all rows."""
        return [row[0] for row in self._rows.execute(query, values)]

    def _value(self, query: str, *values: Value) -> Any:
        """Return the first column of the first row; None without a row."""
        row = self._row(query, *values)
        return None if row is None else row[0]

    def _change(self, statement: str, *values: Value) -> int:
        """Return the number of rows that a statement has changed."""
        return self._rows.execute(statement, values).rowcount

    def _insert(self, statement: str, *values: Value) -> int:
        """Return the id of the row that a statement has inserted."""
        return int(self._rows.execute(statement, values).lastrowid or 0)

    def _put(self, table: str, *row: Value) -> None:
        """Insert a row, or replace the one with the same key."""
        self._rows.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks(row)})", row)


def marks(values: Iterable[object]) -> str:
    return ",".join("?" for _ in values)


def at(key: ObjectKey) -> tuple[str, bytes]:
    """Return an object's bucket and key as the tables have them: in S3's order."""
    return key.bucket, text(key.key)


def decoded(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


def text(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def keys_under(prefix: str) -> tuple[bytes, bytes]:
    """Return the first key that may begin with a prefix, and the first behind all that do."""
    start = text(prefix)
    return start, start + BEHIND_ALL


def directories(key: str) -> list[bytes]:
    """Return the prefixes of a key that end with a slash, and the empty one."""
    whole = text(key)
    return [b"", *(whole[: stop + 1] for stop, byte in enumerate(whole) if byte == ord("/"))]
