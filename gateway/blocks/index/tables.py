"""The index's LMDB tables, and typed reading of them inside a transaction.

blocks      block id → BlockRecord
files       file → FileRecord
contents    (file, block id) → nothing: which blocks lie in a file
access      (slot, queue, tick, file) → nothing: the files of each slot's queues in order
objects     (object id, block id) → nothing: the blocks of one object
reserved    (worker, file) → bytes and slot: what fills in progress will take
fills       fill key → FillHolder: which process leads a fill
doomed      (worker, file) → nothing: files that left the index and are to be unlinked
slots       slot name → its number, given once
usage       slot number → SlotState: what it takes, and what its policy knows
ghosts      (slot, place) → what is remembered of a block that has left
pins        prefix → its number
survey      directory of data files → bytes in it that the index does not know yet
counters    next tick, fingerprint of the slots
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

import lmdb

Table: TypeAlias = Any
"""An LMDB named database: an opaque handle."""


@dataclass(frozen=True, slots=True)
class Tables:
    """A handle of each table."""

    blocks: Table
    files: Table
    contents: Table
    access: Table
    objects: Table
    reserved: Table
    fills: Table
    doomed: Table
    slots: Table
    usage: Table
    ghosts: Table
    pins: Table
    survey: Table
    counters: Table

    @classmethod
    def open(cls, environment: lmdb.Environment) -> Tables:
        """Open all of them, made where they do not exist."""
        return cls(*(environment.open_db(table.name.encode()) for table in fields(cls)))


TABLES_MAX = len(fields(Tables))


def get(transaction: lmdb.Transaction, table: Table, key: bytes) -> bytes | None:
    return cast("bytes | None", transaction.get(key, db=table))


def items(transaction: lmdb.Transaction, table: Table, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Keys and values in order, from the key `start` on."""
    cursor = transaction.cursor(db=table)
    if start and not cursor.set_range(start):
        return iter(())
    return cast("Iterator[tuple[bytes, bytes]]", cursor.iternext())


def keys(transaction: lmdb.Transaction, table: Table, prefix: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """The keys that begin with `prefix`, in order; those behind `after`."""
    cursor = transaction.cursor(db=table)
    if not cursor.set_range(max(prefix, after + b"\0" if after else b"")):
        return
    for key in cast("Iterator[bytes]", cursor.iternext(values=False)):
        if not key.startswith(prefix):
            return
        yield key


def has_prefix(transaction: lmdb.Transaction, table: Table, prefix: bytes) -> bool:
    """Whether there is a key that begins with `prefix`."""
    cursor = transaction.cursor(db=table)
    return bool(cursor.set_range(prefix)) and cast(bytes, cursor.key()).startswith(prefix)


def clear_prefix(transaction: lmdb.Transaction, table: Table, prefix: bytes) -> None:
    for key in list(keys(transaction, table, prefix)):
        transaction.delete(key, db=table)
