"""The index's LMDB tables, and typed reading of them inside a transaction.

blocks   block key → where the block lies. A row whose file the index has no more, or remembers only, counts for nothing
files    file key → FileRecord
queues   (slot, queue, sequence, file key) → nothing: the files of each slot's queues in order
state    a letter, then:
    s  slot name → its number, given once
    a  slot number → SlotAccount
    r  (worker, file) → bytes and slot: what files that are being written will take
    u  (worker, file) → bytes: files that left the index and are to be unlinked, and what is counted for them
    p  pin number → its prefix
    b  directory of data files → bytes in it that the index does not know yet
    c  name → totals, counters and marks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

import lmdb

Table: TypeAlias = Any
"""An LMDB named database: an opaque handle."""

SLOTS, ACCOUNTS, RESERVED = b"s", b"a", b"r"
PENDING_UNLINKS, PINS, REBUILD, COUNTERS = b"u", b"p", b"b", b"c"


@dataclass(frozen=True, slots=True)
class Tables:
    """A handle of each table."""

    blocks: Table
    files: Table
    queues: Table
    state: Table

    @classmethod
    def open(cls, environment: lmdb.Environment) -> Tables:
        """Open all of them, made where they do not exist."""
        return cls(*(environment.open_db(table.name.encode()) for table in fields(cls)))


TABLES_MAX = len(fields(Tables))


def get(transaction: lmdb.Transaction, table: Table, key: bytes) -> bytes | None:
    return cast("bytes | None", transaction.get(key, db=table))


def items(
    transaction: lmdb.Transaction, table: Table, prefix: bytes = b"", start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """The keys that begin with `prefix` and their values, in order, from the key `start` on."""
    cursor = transaction.cursor(db=table)
    start = max(prefix, start)
    if start and not cursor.set_range(start):
        return
    for key, value in cast("Iterator[tuple[bytes, bytes]]", cursor.iternext()):
        if not key.startswith(prefix):
            return
        yield key, value


def first_key(transaction: lmdb.Transaction, table: Table, prefix: bytes) -> bytes | None:
    """The first key that begins with `prefix`."""
    cursor = transaction.cursor(db=table)
    if not cursor.set_range(prefix):
        return None
    key = cast(bytes, cursor.key())
    return key if key.startswith(prefix) else None


def size_bytes(transaction: lmdb.Transaction, of: Tables) -> int:
    """What the pages of all tables take: what is free for reuse, or only kept for readers, is not among them."""
    pages, page_bytes = 0, 0
    for table in fields(of):
        facts = transaction.stat(getattr(of, table.name))
        pages += facts["branch_pages"] + facts["leaf_pages"] + facts["overflow_pages"]
        page_bytes = facts["psize"]
    return pages * page_bytes
