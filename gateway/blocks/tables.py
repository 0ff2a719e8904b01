"""Typed reading of LMDB tables inside a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias, cast

import lmdb

Table: TypeAlias = Any
"""An LMDB named database: an opaque handle."""


def get(transaction: lmdb.Transaction, table: Table, key: bytes) -> bytes | None:
    return cast("bytes | None", transaction.get(key, db=table))


def items(transaction: lmdb.Transaction, table: Table) -> Iterator[tuple[bytes, bytes]]:
    return cast("Iterator[tuple[bytes, bytes]]", transaction.cursor(db=table).iternext())


def keys(transaction: lmdb.Transaction, table: Table, prefix: bytes = b"") -> Iterator[bytes]:
    """The keys that begin with `prefix`, in order."""
    cursor = transaction.cursor(db=table)
    if not cursor.set_range(prefix):
        return
    for key in cast("Iterator[bytes]", cursor.iternext(values=False)):
        if not key.startswith(prefix):
            return
        yield key


def clear_prefix(transaction: lmdb.Transaction, table: Table, prefix: bytes) -> None:
    for key in list(keys(transaction, table, prefix)):
        transaction.delete(key, db=table)
