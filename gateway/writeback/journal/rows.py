"""Tables of the journal, as one transaction reads and changes them, and the records in their rows.

A record is JSON behind a CRC32C of the row's table, its keys and itself: SQLite does not checksum its pages. A row that
was changed without SQLite, or moved, raises BufferDamaged instead of passing for what was acknowledged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import orjson
from awscrt import checksums as crt

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import ObjectKey

PENDING = "pending = 1 AND state < 5"
OPEN = "upload_id IS NOT NULL AND pending = 0 AND state < 3"
"""Conditions for acknowledged writes and for open uploads, as the indices have them."""

AWAITED_SINCE = "CASE WHEN behind IS NULL THEN since_sequence ELSE sequence END"
"""The sequence from which on markers wait for a write: that of the first one that it replaced. A marker counts from its
own: of two markers, each could otherwise wait for the other."""

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


_CRC_BYTES = 4

Place = tuple[str | int | bytes, ...]
"""A row's table and the values of its key columns."""


def pack(place: Place, record: dict[str, Any]) -> bytes:
    head = orjson.dumps(record, default=dict)  # other mappings
    return _seal(place, len(head).to_bytes(4, "little") + head)


def unpack(place: Place, packed: object) -> Any:
    """Return the record; BufferDamaged unless it was packed for this place.

    A damaged row may give a record that is no bytes at all.
    """
    body = packed[_CRC_BYTES:] if isinstance(packed, bytes) else b""
    if len(body) < 4 or _seal(place, body) != packed:
        raise BufferDamaged(f"the journal's row {place!r} is damaged")
    stop = 4 + int.from_bytes(body[:4], "little")
    return orjson.loads(body[4:stop])


def _seal(place: Place, body: bytes) -> bytes:
    value: int = crt.crc32c(body, crt.crc32c(repr(place).encode("utf-8", "backslashreplace")))
    return value.to_bytes(_CRC_BYTES, "little") + body


def moment_record(moment: Moment | None) -> tuple[float, float, str] | None:
    return None if moment is None else (moment.at, moment.monotonic, moment.boot_id)


def as_moment(record: Sequence[Any] | None) -> Moment | None:
    return None if record is None else Moment(*record)
