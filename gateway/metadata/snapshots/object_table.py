"""Objects on their way into the order of their keys, in an LMDB environment of their own that one process uses.

    entries  key → record (listing/records.py)
    templates    number → what records say in common

Nothing is durable about it: a process that is killed can be gone on with, a machine that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import lmdb

from gateway.core.errors import SnapshotError
from gateway.metadata.listing.pages import Listed
from gateway.metadata.listing.records import pack, pack_template, unpack_template
from gateway.metadata.listing.store import Cursor, Table
from gateway.s3.list_result import EntryTemplate, ListedEntry

TEMPLATES_MAX = 2**16

_MAP_BYTES = 256 * 2**30
"""Address space, and no memory: a thousand million objects and more."""


class ObjectTable:
    """The environment. All of it blocks; lmdb.Error when the disk does not take it."""

    def __init__(self, path: Path) -> None:
        self._environment = lmdb.open(
            str(path),
            map_size=_MAP_BYTES,
            max_dbs=2,
            max_readers=1024,
            subdir=False,
            lock=False,
            sync=False,
            mode=0o600,
            lib_version=1,
        )
        try:
            self._entries: Table = self._environment.open_db(b"entries")
            self._templates: Table = self._environment.open_db(b"forms")
            with self._environment.begin() as transaction:
                self.templates = [unpack_template(packed) for _, packed in transaction.cursor(db=self._templates)]
        except BaseException:
            self._environment.close()
            raise
        self._numbers = {template: number for number, template in enumerate(self.templates)}

    def close(self) -> None:
        self._environment.close()

    def append(self, entries: Sequence[ListedEntry]) -> None:
        """Add objects, in order and behind all that are there; SnapshotError otherwise. All of them or none."""
        with self._environment.begin(write=True) as transaction:
            rows = self._rows(transaction, entries)
            _, added = transaction.cursor(db=self._entries).putmulti(rows, append=True)
            if added != len(rows):  # keys that are not behind the last one are passed over
                raise SnapshotError("the objects did not come in the order of their keys")

    def insert(self, entries: Sequence[ListedEntry]) -> int | None:
        """Add objects in any order; the number in `entries` of the first whose key is there already."""
        with self._environment.begin(write=True) as transaction:
            for number, (key, record) in enumerate(self._rows(transaction, entries)):
                if not transaction.put(key, record, db=self._entries, overwrite=False):
                    return number
        return None

    def add_missing(self, entries: Sequence[ListedEntry]) -> None:
        """Add those objects whose keys are not there yet, in any order."""
        with self._environment.begin(write=True) as transaction:
            rows = sorted(self._rows(transaction, entries))
            transaction.cursor(db=self._entries).putmulti(rows, overwrite=False)

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        """Return the first `count` keys and records of [start, stop), in order."""
        with self._environment.begin() as transaction:
            cursor: Cursor = transaction.cursor(db=self._entries)
            # An empty key is none for LMDB; "\0" is the least there is.
            if not cursor.set_range(start or b"\0"):
                return []
            return [row for row in islice(cursor, count) if row[0] < stop]

    def count(self) -> int:
        with self._environment.begin() as transaction:
            return int(transaction.stat(self._entries)["entries"])

    def last_key(self) -> bytes | None:
        """Return the greatest key."""
        with self._environment.begin() as transaction:
            cursor: Cursor = transaction.cursor(db=self._entries)
            return bytes(cursor.key()) if cursor.last() else None

    def _rows(self, transaction: lmdb.Transaction, entries: Sequence[ListedEntry]) -> list[Listed]:
        return [(entry.key, pack(entry, self._number(transaction, entry.template))) for entry in entries]

    def _number(self, transaction: lmdb.Transaction, template: EntryTemplate) -> int:
        number = self._numbers.get(template)
        if number is None:
            number = len(self.templates)
            if number >= TEMPLATES_MAX:
                raise SnapshotError(
                    f"owner, storage class and checksums of the objects differ in more than {TEMPLATES_MAX} ways"
                )
            transaction.put(number.to_bytes(2, "big"), pack_template(template), db=self._templates)
            self.templates.append(template)
            self._numbers[template] = number
        return number
