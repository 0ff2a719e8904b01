"""Keys written through this gateway that the index has not caught up with. Nothing else writes to their environment.

    dirty    the index's word on this key does not count: it is being written, or was
    clean    the index has caught up; kept as long as an older page of the origin may still be on its way into it
    numbers  `number`: one for all; what happens later has a greater one, whatever clocks say
             `floor`: what the origin was asked for at a lower number may contradict keys that are kept no more

A write begins and ends in a dirty key. A page that the origin was asked for at number n tells what every write has left
that ended at n or before. A killed process leaves its keys in flight: they are asked about each time, until the next
start. Keys are let go of by `ListingStore.sweep`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import lmdb

from gateway.disk.lmdb_environment import NEW_ENGINE, Cursor, Table, open_environment
from gateway.metadata.listing.pages import END, Keys, Listed, ListRequest, Page, Record, key_successor

PAGE_SECONDS_MAX = 300.0
"""Seconds for which written keys are kept, as a page of the origin may still contradict their truth."""

WRITE_SECONDS_MAX = 86_400.0
"""Seconds after which a write without an answer counts as over: its sender was killed."""

DIRTY_KEYS_MAX = 100_000
"""Limit above which the oldest are dropped, with the index's knowledge around them (`ListingStore.sweep`)."""

REFUSED_FROM = 2
"""Multiple of DIRTY_KEYS_MAX that is never exceeded: a further write voids the index of its whole bucket instead."""

WRITTEN_MAX = 256
"""Written keys between two others: with more, it is not known what lies there."""

ROWS_AT_ONCE = 512
"""In one transaction: about a millisecond."""

_MAP_BYTES = 1024**3
_DIRTY = struct.Struct("<HQd")
_CLEAN = struct.Struct("<Qd")
_NUMBER = struct.Struct("<Q")
_LAST, _FLOOR = b"number", b"floor"
_IN_FLIGHT_MAX = 2**16 - 1


@dataclass(slots=True)
class OwnWrite:
    """A write of these keys, from before it is sent until its answer is over.

    `is_noted`: they are dirty until the index has caught up. Otherwise all that is known of the bucket must be voided.
    """

    bucket: str
    keys: Sequence[bytes]
    is_noted: bool = False


@dataclass(frozen=True, slots=True)
class WrittenKey:
    """A row: what happened to the key last got `number`, at `seconds`; `in_flight` writes of it have not ended."""

    bucket: str
    key: bytes
    in_flight: int
    number: int
    seconds: float

    def is_over(self, seconds: float) -> bool:
        return not self.in_flight or seconds - self.seconds > WRITE_SECONDS_MAX


class DirtyKeys:
    """One process's view of them. Reading takes microseconds, everything else blocks for tens of them."""

    def __init__(self, directory: Path) -> None:
        self._environment, tables = open_environment(
            directory, (b"dirty", b"clean", b"numbers"), map_bytes=_MAP_BYTES, engine=NEW_ENGINE
        )
        self._dirty, self._clean, self._numbers = tables
        self._swept: dict[Table, bytes] = {}

    # --- own writes and pages -------------------------------------------------------------------------------------

    def now(self) -> int:
        with self._environment.begin() as transaction:
            return self._number(transaction, _LAST)

    def floor(self) -> int:
        """Return the number below which the origin was asked too early for its answer to be learned."""
        with self._environment.begin() as transaction:
            return self._number(transaction, _FLOOR)

    def begin(self, write: OwnWrite, seconds: float) -> None:
        """Note a write before it is sent, unless there are too many dirty keys already."""
        with self._environment.begin(write=True) as transaction:
            if self._count(transaction, self._dirty) + len(write.keys) > REFUSED_FROM * DIRTY_KEYS_MAX:
                return
            self._count_writes(transaction, write, 1, seconds)
        write.is_noted = True

    def end(self, write: OwnWrite, seconds: float) -> None:
        """Note that a write was answered, or never will be."""
        if not write.is_noted:
            return
        with self._environment.begin(write=True) as transaction:
            self._count_writes(transaction, write, -1, seconds)

    @contextmanager
    def written(self, bucket: str) -> Iterator[Written]:
        """Yield a view, of one moment, of the keys on which the index's word does not count."""
        with self._environment.begin() as transaction:

            def written(start: bytes, stop: bytes, count: int) -> list[bytes]:
                rows = _rows(transaction, self._dirty, bucket, start, stop)
                return [key for key, _ in islice(rows, count)]

            yield written

    def not_told(self, bucket: str, start: bytes, stop: bytes, asked: int, seconds: float) -> set[bytes]:
        """Return the keys in [start, stop) whose writes the origin may not have known of when asked at number `asked`.

        `seconds` is the time now.
        """
        with self._environment.begin() as transaction:
            keys = {
                key
                for key, value in _rows(transaction, self._dirty, bucket, start, stop)
                if not _was_over(value, asked, seconds)
            }
            clean = _rows(transaction, self._clean, bucket, start, stop)
            keys.update(key for key, value in clean if _CLEAN.unpack(value)[0] > asked)
            return keys

    def settle(self, bucket: str, start: bytes, stop: bytes, asked: int, seconds: float) -> None:
        """Note that the index knows what the origin said of [start, stop) when asked at number `asked`."""
        with self._environment.begin() as transaction:
            rows = _rows(transaction, self._dirty, bucket, start, stop)
            over = iter([_row_key(bucket, key) for key, value in rows if _was_over(value, asked, seconds)])
        while row_keys := list(islice(over, ROWS_AT_ONCE)):
            with self._environment.begin(write=True) as transaction:
                for row_key in row_keys:
                    value = transaction.get(row_key, db=self._dirty)
                    if value is not None and _was_over(value, asked, seconds):
                        transaction.put(row_key, _CLEAN.pack(_DIRTY.unpack(value)[1], seconds), db=self._clean)
                        transaction.delete(row_key, db=self._dirty)

    # --- letting go -------------------------------------------------------------------------------------------------

    def crowd(self) -> float:
        """Return the number of dirty keys or of clean ones, whichever is larger, as a fraction of DIRTY_KEYS_MAX."""
        with self._environment.begin() as transaction:
            return max(self._count(transaction, table) for table in (self._dirty, self._clean)) / DIRTY_KEYS_MAX

    def next_rows(self) -> tuple[list[WrittenKey], list[WrittenKey]]:
        """Return the next few dirty and clean keys, going round."""
        with self._environment.begin() as transaction:
            dirty = [_written_key(*row) for row in self._next(transaction, self._dirty)]
            clean = [_written_key(*row) for row in self._next(transaction, self._clean)]
            return dirty, clean

    def raise_floor(self, number: int) -> None:
        with self._environment.begin(write=True) as transaction:
            if number > self._number(transaction, _FLOOR):
                transaction.put(_FLOOR, _NUMBER.pack(number), db=self._numbers)

    def let_go(self, dirty: Iterable[WrittenKey], clean: Iterable[WrittenKey]) -> None:
        """Delete these keys, except those written again meanwhile.

        Their numbers must not be above the floor, no answer to a question asked below the floor may be landing, and the
        index must not contain the dirty ones.
        """
        with self._environment.begin(write=True) as transaction:
            for table, keys in ((self._dirty, dirty), (self._clean, clean)):
                for one in keys:
                    row_key = _row_key(one.bucket, one.key)
                    value = transaction.get(row_key, db=table)
                    if value is not None and _written_key(row_key, value) == one:
                        transaction.delete(row_key, db=table)

    def recover(self) -> None:
        """End all writes and forget clean keys. Only the first process that opens the tables may call this."""
        with self._environment.begin(write=True) as transaction:
            transaction.drop(self._clean, delete=False)
            cursor = transaction.cursor(db=self._dirty)
            for row_key, value in list(cursor):
                _, number, _ = _DIRTY.unpack(value)
                self._put(transaction, row_key, 0, number, 0.0)

    def close(self, *, sync: bool = False) -> None:
        if sync:
            self._environment.sync(True)
        self._environment.close()

    def _next(self, transaction: lmdb.Transaction, table: Table) -> list[tuple[bytes, bytes]]:
        cursor: Cursor = transaction.cursor(db=table)
        rows = list(islice(cursor, ROWS_AT_ONCE)) if cursor.set_range(self._swept.get(table, b"")) else []
        is_end = len(rows) < ROWS_AT_ONCE  # then from the beginning: keys that come behind would lead us on for ever
        self._swept[table] = b"" if is_end else rows[-1][0] + b"\0"
        return rows

    def _count_writes(self, transaction: lmdb.Transaction, write: OwnWrite, change: int, seconds: float) -> None:
        """Change how many writes of these keys are in flight. The number goes on by one for each, so that it counts."""
        number = self._number(transaction, _LAST) + max(len(write.keys), 1)
        transaction.put(_LAST, _NUMBER.pack(number), db=self._numbers)
        for key in write.keys:
            row_key = _row_key(write.bucket, key)
            value = transaction.get(row_key, db=self._dirty)
            in_flight = 0 if value is None else int(_DIRTY.unpack(value)[0])
            self._put(transaction, row_key, in_flight + change, number, seconds)

    def _put(self, transaction: lmdb.Transaction, row_key: bytes, in_flight: int, number: int, seconds: float) -> None:
        row = _DIRTY.pack(min(max(in_flight, 0), _IN_FLIGHT_MAX), number, seconds)
        transaction.put(row_key, row, db=self._dirty)

    def _count(self, transaction: lmdb.Transaction, table: Table) -> int:
        return int(transaction.stat(table)["entries"])

    def _number(self, transaction: lmdb.Transaction, name: bytes) -> int:
        number = transaction.get(name, db=self._numbers)
        return 0 if number is None else int(_NUMBER.unpack(number)[0])


def _was_over(value: bytes, asked: int, seconds: float) -> bool:
    in_flight, number, since = _DIRTY.unpack(value)
    return number <= asked and (not in_flight or seconds - since > WRITE_SECONDS_MAX)


def _row_key(bucket: str, key: bytes) -> bytes:
    return bucket.encode() + b"\0" + key


def _written_key(row_key: bytes, value: bytes) -> WrittenKey:
    bucket, _, key = row_key.partition(b"\0")
    if len(value) == _CLEAN.size:
        return WrittenKey(bucket.decode(), key, 0, *_CLEAN.unpack(value))
    return WrittenKey(bucket.decode(), key, *_DIRTY.unpack(value))


def _rows(
    transaction: lmdb.Transaction, table: Table, bucket: str, start: bytes, stop: bytes
) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of [start, stop), in order."""
    cursor: Cursor = transaction.cursor(db=table)
    skip, end = len(_row_key(bucket, b"")), _row_key(bucket, stop or END)
    if not cursor.set_range(_row_key(bucket, start)):
        return
    for row_key, value in cursor:
        if row_key >= end:
            return
        yield row_key[skip:], value


class Written(Protocol):
    def __call__(self, start: bytes, stop: bytes, count: int) -> list[bytes]:
        """Return the first `count` written keys of [start, stop), in order."""


class Overlaid:
    """Keys of the index, corrected by written keys.

    Truth replaces the index's record of a written key: a record, or None if there is no such object. A written key
    whose truth is not known yet is left out and noted. `is_unknown`: there were too many of them.
    """

    def __init__(self, keys: Keys, written: Written, truths: Mapping[bytes, Record | None]) -> None:
        self._keys = keys
        self._written = written
        self._truths = truths
        self._without_truth: dict[bytes, None] = {}
        self.is_unknown = False

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        found: list[Listed] = []
        while len(found) < count:
            below = self._keys.read(start, stop, count)
            end = key_successor(below[-1][0]) if len(below) == count else stop
            found += self._merged(below, self._between(start, end))
            if end == stop:
                break
            start = end
        return found[:count]

    def needed(self, wanted: ListRequest, page: Page) -> list[bytes]:
        """Return the noted keys without a truth that may change the page.

        A common prefix that another key causes is listed whatever becomes of them.
        """
        listed = frozenset(page.prefixes)
        end = key_successor(page.last) if page.is_truncated else wanted.stop
        return [key for key in self._without_truth if key < end and wanted.rolled_up(key) not in listed]

    def _between(self, start: bytes, stop: bytes) -> list[bytes]:
        found = self._written(start, stop, WRITTEN_MAX)
        self.is_unknown |= len(found) == WRITTEN_MAX
        return found

    def _merged(self, below: list[Listed], written: Iterable[bytes]) -> list[Listed]:
        merged = dict(below)
        for key in written:
            merged.pop(key, None)
            if key not in self._truths:
                self._without_truth[key] = None
                continue
            record = self._truths[key]
            if record is not None:
                merged[key] = record
        return sorted(merged.items())
