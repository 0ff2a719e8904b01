"""A snapshot's objects in an LMDB environment of their own: whole keys in order, with the listing index's records.

    entries  key → record (listing/records.py)
    forms    number → what records say in common

Written once, then only read, without locks: whoever has it open, and however many, none of them changes a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path

import lmdb

from gateway.errors import SnapshotError, SnapshotUnusable
from gateway.metadata.listing.pages import Listed
from gateway.metadata.listing.records import pack, pack_form, unpack, unpack_form
from gateway.metadata.listing.store import Cursor, Table
from gateway.s3.list_result import EntryForm, ListedEntry

FORMS_MAX = 2**16
READ_AT_ONCE = 1024
"""Objects read or written together: a few milliseconds."""

_MAP_BYTES = 256 * 2**30
"""Address space, and no memory: a thousand million objects and more."""


class Keys:
    """The objects as they are read for pages of listings (`listing.pages.Keys`)."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        cursor = self._cursor
        # An empty key is none for LMDB; "\0" is the least there is.
        if count <= 0 or start >= stop or not cursor.set_range(start or b"\0"):
            return []
        rows: list[Listed] = [cursor.item()] if count == 1 else list(islice(cursor, count))
        if rows and rows[-1][0] >= stop:
            rows = [row for row in rows if row[0] < stop]
        return rows


class SnapshotData:
    """The environment. Threads may read at the same time; one alone writes, before anybody reads."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self._environment = lmdb.open(
            str(path),
            map_size=_MAP_BYTES if writable else 0,
            max_dbs=2,
            max_readers=1024,
            subdir=False,
            create=writable,
            readonly=not writable,
            lock=False,
            sync=False,
            mode=0o600,
            lib_version=1,
        )
        try:
            self._entries: Table = self._environment.open_db(b"entries", create=writable)
            self._forms: Table = self._environment.open_db(b"forms", create=writable)
            with self._environment.begin() as transaction:
                self.forms = [unpack_form(packed) for _, packed in transaction.cursor(db=self._forms)]
        except BaseException:
            self._environment.close()
            raise
        self._numbers = {form: number for number, form in enumerate(self.forms)}

    def close(self) -> None:
        """No transaction may be open any more."""
        self._environment.close()

    # Reading.

    def record(self, key: bytes) -> bytes | None:
        """What is kept of an object; None: there is no such object. Microseconds: it may run on the event loop."""
        if not key:
            return None
        with self._environment.begin() as transaction:
            found: bytes | None = transaction.get(key, db=self._entries)
            return found

    def entry(self, key: bytes, record: bytes) -> ListedEntry:
        """A record, unpacked; SnapshotUnusable when it is none."""
        try:
            return unpack(key, record, self.forms)
        except (IndexError, ValueError) as error:
            raise SnapshotUnusable(f"a snapshot's record is damaged: {error}") from error

    @contextmanager
    def keys(self) -> Iterator[Keys]:
        """All objects, as long as the context lasts."""
        with self._environment.begin() as transaction:
            yield Keys(transaction.cursor(db=self._entries))

    def part(self, start: bytes, stop: bytes, count: int = READ_AT_ONCE) -> list[ListedEntry]:
        """The first `count` objects of [start, stop), in order. Blocks."""
        with self.keys() as keys:
            return [self.entry(key, record) for key, record in keys.read(start, stop, count)]

    def count(self) -> int:
        """How many objects there are."""
        with self._environment.begin() as transaction:
            return int(transaction.stat(self._entries)["entries"])

    def last_key(self) -> bytes | None:
        """The greatest key."""
        with self._environment.begin() as transaction:
            cursor: Cursor = transaction.cursor(db=self._entries)
            return bytes(cursor.key()) if cursor.last() else None

    def totals(self) -> tuple[int, str]:
        """The sum of all sizes in bytes, and the digest (manifest.py). Blocks for microseconds per object."""
        size_bytes, digest, place = 0, sha256(), b""
        while part := self.part(place, b"\xff"):
            size_bytes += sum(one.size_bytes for one in part)
            digest.update(b"".join([b"%b\0%b\0%d\n" % (one.key, one.etag.encode(), one.size_bytes) for one in part]))
            place = part[-1].key + b"\0"
        return size_bytes, digest.hexdigest()

    # Writing.

    def append(self, entries: Sequence[ListedEntry]) -> None:
        """Add objects, in order and behind all that are there. Blocks.

        SnapshotError when they are not in order, lmdb.Error when the disk does not take them: then none of them is
        there.
        """
        with self._environment.begin(write=True) as transaction:
            rows = [(entry.key, pack(entry, self._number(transaction, entry.form))) for entry in entries]
            _, added = transaction.cursor(db=self._entries).putmulti(rows, append=True)
            if added != len(rows):  # what is not behind the last one is passed over
                raise SnapshotError("the objects did not come in the order of their keys")

    def insert(self, entries: Sequence[ListedEntry]) -> int | None:
        """Add objects in any order; the place in `entries` of the first whose key is there already. Blocks."""
        with self._environment.begin(write=True) as transaction:
            for place, entry in enumerate(entries):
                record = pack(entry, self._number(transaction, entry.form))
                if not transaction.put(entry.key, record, db=self._entries, overwrite=False):
                    return place
        return None

    def sync(self) -> None:
        """All that was written survives a power cut when this returns. Blocks."""
        self._environment.sync(True)

    def _number(self, transaction: lmdb.Transaction, form: EntryForm) -> int:
        number = self._numbers.get(form)
        if number is None:
            number = len(self.forms)
            if number >= FORMS_MAX:
                raise SnapshotError(f"the objects are of more than {FORMS_MAX} kinds (owner, storage class, checksums)")
            transaction.put(number.to_bytes(2, "big"), pack_form(form), db=self._forms)
            self.forms.append(form)
            self._numbers[form] = number
        return number
