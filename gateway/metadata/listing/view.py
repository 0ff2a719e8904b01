"""One bucket's keys and ranges in LMDB, as they are in one transaction."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice

import lmdb

from gateway.metadata.environment import Cursor as Cursor
from gateway.metadata.environment import Table as Table
from gateway.metadata.listing.intervals import Interval
from gateway.metadata.listing.pages import Listed
from gateway.metadata.records import Learned

NUMBER_BYTES = 4
"""Of a bucket's number, in front of each place."""

_LEARNED = struct.Struct("<QdI")


class View:
    """A bucket's part of the index at one moment."""

    def __init__(self, transaction: lmdb.Transaction, entries: Table, ranges: Table, number: bytes) -> None:
        self._entries: Cursor = transaction.cursor(db=entries)
        self._ranges: Cursor = transaction.cursor(db=ranges)
        self._number = number

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        """As `pages.Keys.read`."""
        cursor, number = self._entries, self._number
        end = number + stop
        if count <= 0 or start >= stop or not cursor.set_range(number + start):
            return []
        if count == 1:
            place, record = cursor.item()
            return [(place[NUMBER_BYTES:], record)] if place < end else []
        rows: list[Listed] = list(islice(cursor, count))
        if rows and rows[-1][0] >= end:
            rows = [row for row in rows if row[0] < end]
        return [(place[NUMBER_BYTES:], record) for place, record in rows]

    def intervals(self, start: bytes) -> Iterator[Interval]:
        """In order, from the one that ends at or behind `start`, or the one before."""
        cursor = self._ranges
        found = cursor.set_range(self._number + start)
        if not (cursor.prev() or cursor.first() if found else cursor.last()):
            return
        for place, value in cursor:
            if place[:NUMBER_BYTES] > self._number:
                return
            if place[:NUMBER_BYTES] == self._number:
                yield _interval(place[NUMBER_BYTES:], value)


def touching(view: View, start: bytes, stop: bytes, *, overlapping: bool = False) -> Iterator[Interval]:
    """The intervals that overlap [start, stop) or, unless `overlapping`, end or begin where it begins or ends."""
    for one in view.intervals(start):
        if one.start > stop or (overlapping and one.start == stop):
            return
        if one.stop > start or (one.stop == start and not overlapping):
            yield one


def rewrite(
    transaction: lmdb.Transaction, ranges: Table, number: bytes, before: Sequence[Interval], after: Sequence[Interval]
) -> None:
    """Change the ranges table from one to the other."""
    for gone in {one.start for one in before} - {one.start for one in after}:
        transaction.delete(number + gone, db=ranges)
    same = set(before)
    for one in after:
        if one not in same:
            transaction.put(number + one.start, _value(one), db=ranges)


def _value(interval: Interval) -> bytes:
    learned = interval.learned
    return _LEARNED.pack(learned.generation, learned.seconds, learned.boot) + interval.stop


def _interval(start: bytes, value: bytes) -> Interval:
    generation, seconds, boot = _LEARNED.unpack_from(value)
    return Interval(start, value[_LEARNED.size :], Learned(generation, seconds, boot))
