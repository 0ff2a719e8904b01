"""Own writes that the index has not caught up with: a mark per key, in an environment that nothing else writes to.

    pending  the index's word on this key does not count: it is being written, or was
    settled  the index has caught up; kept as long as an older page of the origin may still be on its way into it
    counter  one number for all: what happens later has a greater one, whatever clocks say

A write begins and ends its mark. A page that the origin was asked for at number n tells what every write has left that
ended at n or before. A killed process leaves its marks pending: they are asked about each time, until the next start.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

import lmdb

from gateway.metadata.listing.overlay import Written
from gateway.metadata.listing.places import END

PAGE_SECONDS_MAX = 300.0
"""A page of the origin that takes longer to come is not learned."""

WRITE_SECONDS_MAX = 86_400.0
"""A write without an answer for so long has none to come: whoever sent it was killed."""

PENDING_MAX = 100_000
"""More, and all that is known of a bucket is given up instead."""

_SWEPT_AT_ONCE = 64
_MAP_BYTES = 1024**3
_PENDING = struct.Struct("<HQd")
_SETTLED = struct.Struct("<Qd")
_NUMBER = struct.Struct("<Q")
_COUNTER = b"number"

Table: TypeAlias = Any
"""An LMDB named database: an opaque handle."""

Cursor: TypeAlias = Any
"""Rows come as bytes: the environment is not opened with buffers."""


class Marks:
    """One process's view of them. Reading takes microseconds, everything else blocks for tens of them."""

    def __init__(self, directory: Path) -> None:
        self._environment = lmdb.open(
            str(directory),
            map_size=_MAP_BYTES,
            max_dbs=4,
            max_readers=1024,
            sync=False,
            mode=0o600,
            subdir=True,
            lib_version=1,
        )
        self._pending: Table = self._environment.open_db(b"pending")
        self._settled: Table = self._environment.open_db(b"settled")
        self._counter: Table = self._environment.open_db(b"counter")
        self._environment.reader_check()
        self._swept_pending = b""
        self._swept_settled = b""

    def now(self) -> int:
        """The number of the last thing that happened."""
        with self._environment.begin() as transaction:
            return self._number(transaction)

    def begin(self, bucket: str, keys: Sequence[bytes], seconds: float) -> bool:
        """Writes of these keys are about to be sent; False when there are too many marks, though these are set."""
        with self._environment.begin(write=True) as transaction:
            number = self._next(transaction)
            for key in keys:
                place = _place(bucket, key)
                in_flight, _, _ = self._mark(transaction, place)
                self._put(transaction, place, in_flight + 1, number, seconds)
            return int(transaction.stat(self._pending)["entries"]) <= PENDING_MAX

    def end(self, bucket: str, keys: Sequence[bytes], seconds: float) -> None:
        """The writes have been answered, or never will be."""
        with self._environment.begin(write=True) as transaction:
            number = self._next(transaction)
            for key in keys:
                place = _place(bucket, key)
                in_flight, _, _ = self._mark(transaction, place)
                self._put(transaction, place, max(in_flight - 1, 0), number, seconds)

    @contextmanager
    def pending(self, bucket: str) -> Iterator[Written]:
        """The keys on which the index's word does not count, as they are at one moment."""
        with self._environment.begin() as transaction:

            def written(start: bytes, stop: bytes, count: int) -> list[bytes]:
                rows = _rows(transaction, self._pending, bucket, start, stop)
                return [key for key, _ in islice(rows, count)]

            yield written

    def not_told(self, bucket: str, start: bytes, stop: bytes, asked: int, seconds: float) -> set[bytes]:
        """The keys in [start, stop) whose writes the origin may not have known of when it was asked at number `asked`.

        `seconds` is the time now.
        """
        with self._environment.begin() as transaction:
            keys = {
                key
                for key, mark in _rows(transaction, self._pending, bucket, start, stop)
                if not _is_over(mark, asked, seconds)
            }
            settled = _rows(transaction, self._settled, bucket, start, stop)
            keys.update(key for key, mark in settled if _SETTLED.unpack(mark)[0] > asked)
            return keys

    def settle(self, bucket: str, start: bytes, stop: bytes, asked: int, seconds: float) -> None:
        """The index knows of [start, stop) what the origin said when it was asked at number `asked`."""
        with self._environment.begin() as transaction:
            rows = _rows(transaction, self._pending, bucket, start, stop)
            over = [key for key, mark in rows if _is_over(mark, asked, seconds)]
        if not over:
            return
        with self._environment.begin(write=True) as transaction:
            for key in over:
                self._settle(transaction, _place(bucket, key), asked, seconds)
            self._sweep_settled(transaction, seconds)

    def sweep(self, seconds: float, is_known: Callable[[str, bytes], bool]) -> None:
        """Give up a few old marks on keys of which the index says nothing (`is_known` of bucket and key)."""
        with self._environment.begin(write=True) as transaction:
            for place, mark in self._next_rows(transaction):
                in_flight, _, since = _PENDING.unpack(mark)
                bucket, key = _parts(place)
                if not in_flight and seconds - since > PAGE_SECONDS_MAX and not is_known(bucket, key):
                    transaction.delete(place, db=self._pending)
            self._sweep_settled(transaction, seconds)

    def recover(self) -> None:
        """Nobody writes, and no page is on its way: to be called by the first process that opens them."""
        with self._environment.begin(write=True) as transaction:
            transaction.drop(self._settled, delete=False)
            cursor = transaction.cursor(db=self._pending)
            for place, mark in list(cursor):
                _, number, _ = _PENDING.unpack(mark)
                self._put(transaction, place, 0, number, 0.0)

    def close(self, *, sync: bool = False) -> None:
        if sync:
            self._environment.sync(True)
        self._environment.close()

    def _settle(self, transaction: lmdb.Transaction, place: bytes, asked: int, seconds: float) -> None:
        mark = cast("bytes | None", transaction.get(place, db=self._pending))
        if mark is not None and _is_over(mark, asked, seconds):
            transaction.put(place, _SETTLED.pack(_PENDING.unpack(mark)[1], seconds), db=self._settled)
            transaction.delete(place, db=self._pending)

    def _sweep_settled(self, transaction: lmdb.Transaction, seconds: float) -> None:
        """A few of those that no page on its way can be older than."""
        cursor = transaction.cursor(db=self._settled)
        for _ in range(_SWEPT_AT_ONCE):
            if not cursor.set_range(self._swept_settled) and not cursor.first():
                return
            self._swept_settled = bytes(cursor.key()) + b"\0"
            if seconds - _SETTLED.unpack(cursor.value())[1] > PAGE_SECONDS_MAX:
                cursor.delete()

    def _next_rows(self, transaction: lmdb.Transaction) -> list[tuple[bytes, bytes]]:
        cursor: Cursor = transaction.cursor(db=self._pending)
        if not cursor.set_range(self._swept_pending) and not cursor.first():
            return []
        rows = list(islice(cursor, _SWEPT_AT_ONCE))
        self._swept_pending = rows[-1][0] + b"\0"
        return rows

    def _mark(self, transaction: lmdb.Transaction, place: bytes) -> tuple[int, int, float]:
        mark = transaction.get(place, db=self._pending)
        return (0, 0, 0.0) if mark is None else cast("tuple[int, int, float]", _PENDING.unpack(mark))

    def _put(self, transaction: lmdb.Transaction, place: bytes, in_flight: int, number: int, seconds: float) -> None:
        transaction.put(place, _PENDING.pack(in_flight, number, seconds), db=self._pending)

    def _number(self, transaction: lmdb.Transaction) -> int:
        counter = transaction.get(_COUNTER, db=self._counter)
        return 0 if counter is None else int(_NUMBER.unpack(counter)[0])

    def _next(self, transaction: lmdb.Transaction) -> int:
        number = self._number(transaction) + 1
        transaction.put(_COUNTER, _NUMBER.pack(number), db=self._counter)
        return number


def _is_over(mark: bytes, asked: int, seconds: float) -> bool:
    """Whether the write had ended when the origin was asked."""
    in_flight, number, since = _PENDING.unpack(mark)
    return number <= asked and (not in_flight or seconds - since > WRITE_SECONDS_MAX)


def _place(bucket: str, key: bytes) -> bytes:
    return bucket.encode() + b"\0" + key


def _parts(place: bytes) -> tuple[str, bytes]:
    bucket, _, key = place.partition(b"\0")
    return bucket.decode(), key


def _rows(
    transaction: lmdb.Transaction, table: Table, bucket: str, start: bytes, stop: bytes
) -> Iterator[tuple[bytes, bytes]]:
    """Key and mark of [start, stop), in order."""
    cursor: Cursor = transaction.cursor(db=table)
    skip, end = len(_place(bucket, b"")), _place(bucket, stop or END)
    if not cursor.set_range(_place(bucket, start)):
        return
    for place, mark in cursor:
        if place >= end:
            return
        yield place[skip:], mark
