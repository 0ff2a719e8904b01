"""The journal as a stream of records, for a second copy of it elsewhere.

    head      version of the stream, node, epoch, which records it has
    record    one row of one table, with its identity: table, and the values of its key columns
    …
    end       how many there were

Each is framed: its length (u32), then, as every row of the journal (codec.py), a CRC32C of the frame's place and what
follows, a JSON object, and the row's own record. The place is (`stream`, node, epoch, number in the stream), so that a
frame that is missing, comes twice, or is of another stream is found as damage is. Staged files go their own way.

A write is named among all nodes by (node, `id`), and its place in the node's order by (node, epoch, `sequence`): ids
and sequences are given once in a node's life, in whichever epoch, and upload ids begin with the node's id.
"""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.core.errors import BufferDamaged
from gateway.writeback.journal import codec, schema

VERSION = 1

_LENGTH_BYTES = 4

_WITHOUT_RECORD = frozenset({"checkpoints", "checkpoint_objects"})
"""Tables whose rows are columns alone: the frame vouches for them."""

_NEW = "writes.sequence IS NULL OR writes.sequence > :since"
_TABLES = {
    "files": (
        "FROM files WHERE :since = 0 OR name IN "
        f"(SELECT file FROM parts JOIN writes ON writes.id = write_id WHERE {_NEW})"
    ),
    "writes": f"FROM writes WHERE {_NEW} ORDER BY writes.sequence, id",
    "parts": f"FROM parts JOIN writes ON writes.id = write_id WHERE {_NEW} ORDER BY write_id, number",
    "profiles": "FROM profiles",
    "origin": "FROM origin",
    "checkpoints": "FROM checkpoints",
    "checkpoint_objects": "FROM checkpoint_objects",
}
"""The tables that make up a journal's content, and their rows to send. `usage` follows from them by the triggers."""


def records(connection: sqlite3.Connection, since: int = 0) -> Iterator[bytes]:
    """Yield the frames of a journal as it is at the first of them.

    Memory is bounded; until the last is taken, that snapshot is held, and the journal's log grows. Nothing else may use
    the connection meanwhile. With `since`, a sequence, yield only the writes acknowledged after it, with their rows,
    and open uploads in any case. It does not tell which earlier writes have ended. BufferDamaged for a row without a
    record (a damaged record is sent as it is, and found by its reader); sqlite3.Error.
    """
    connection.execute("BEGIN")
    try:
        yield from _frames(connection, since)
    finally:
        connection.execute("ROLLBACK")


def _frames(connection: sqlite3.Connection, since: int) -> Iterator[bytes]:
    node = dict(connection.execute("SELECT name, value FROM node").fetchall())
    last_id = connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'writes'").fetchone()[0] or 0
    head = {"stream": VERSION, "journal": schema.VERSION, "node": node, "last_id": last_id, "since": since}
    yield _frame(("stream",), head)
    place, number = (node["id"], node["epoch"]), 0
    for table, which in _TABLES.items():
        names = _columns(connection, table)
        columns = ", ".join(f"{table}.{name}" for name in names)
        for row in connection.execute(f"SELECT {columns} {which}", {"since": since}):
            number += 1
            *columns_found, record = (*row, b"") if table in _WITHOUT_RECORD else row
            if not isinstance(record, bytes):
                raise BufferDamaged(f"a row of the journal's table {table} has no record")
            yield _frame(("stream", *place, number), {"table": table, "row": _as_json(columns_found)}, record)
    yield _frame(("stream", *place, number + 1), {"end": number})


def apply(connection: sqlite3.Connection, frames: Iterable[bytes]) -> int:
    """Fill an empty journal (`schema.prepare`) with the records of a stream, in one transaction; return their number.

    The journal is that node's then, and continues its ids and sequences. BufferDamaged if a frame is damaged or not the
    next one, or the end is missing: then the journal stays empty. ValueError for a journal that is not empty, or a
    stream of another version. sqlite3.Error.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        count = _apply(connection, iter(frames))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    return count


def _apply(connection: sqlite3.Connection, frames: Iterator[bytes]) -> int:
    if any(connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in _TABLES):
        raise ValueError("the journal is not empty")
    head, _ = _unframe(("stream",), next(frames, b""))
    if (head["stream"], head["journal"]) != (VERSION, schema.VERSION):
        raise ValueError(f"the stream has version {head['stream']}, of a journal of version {head['journal']}")
    node, number = head["node"], 0
    connection.executemany("UPDATE node SET value = ? WHERE name = ?", [(value, name) for name, value in node.items()])
    columns = {table: len(_columns(connection, table)) for table in _TABLES}
    for frame in frames:
        number += 1
        said, record = _unframe(("stream", node["id"], node["epoch"], number), frame)
        if "end" in said:
            break
        marks = ", ".join("?" * columns[said["table"]])
        row = _from_json(said["row"]) + ([] if said["table"] in _WITHOUT_RECORD else [record])
        connection.execute(f"INSERT INTO {said['table']} VALUES ({marks})", row)
    else:
        raise BufferDamaged(f"the stream of {node['id']} ends behind {number} records")
    if next(frames, None) is not None:
        raise BufferDamaged(f"the stream of {node['id']} goes on behind its end")
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'writes'")
    connection.execute("INSERT INTO sqlite_sequence VALUES ('writes', ?)", (head["last_id"],))
    return number - 1


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]


def _frame(place: codec.Place, said: dict[str, Any], record: bytes = b"") -> bytes:
    packed = codec.pack(place, said, record)
    return len(packed).to_bytes(_LENGTH_BYTES, "little") + packed


def _unframe(place: codec.Place, frame: bytes) -> tuple[dict[str, Any], bytes]:
    packed = frame[_LENGTH_BYTES:]
    if int.from_bytes(frame[:_LENGTH_BYTES], "little") != len(packed):
        raise BufferDamaged(f"the frame {place!r} is cut short")
    return codec.unpack(place, packed)


def _as_json(values: list[Any]) -> list[Any]:
    """Encode bytes: the keys of objects."""
    return [[base64.b64encode(one).decode()] if isinstance(one, bytes) else one for one in values]


def _from_json(values: list[Any]) -> list[Any]:
    return [base64.b64decode(one[0]) if isinstance(one, list) else one for one in values]
