"""The index in LMDB, shared by all workers. Reading takes microseconds: it may run on the event loop.

    entries  bucket number, key → record (records.py)
    ranges   bucket number, start → stop, and when it was learned (ranges.py)
    templates    number → common part of records
    buckets  name → number

Unsynced while in use, as the catalog is: an unclean boot drops everything (opening.py). The origin can always
repeat its content, so that trouble with the disk is a miss.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice, takewhile
from pathlib import Path
from threading import Lock
from typing import cast

import lmdb

from gateway.core.model import ObjectKey
from gateway.disk.lmdb_environment import NEW_ENGINE, open_environment
from gateway.disk.lmdb_environment import Cursor as Cursor
from gateway.disk.lmdb_environment import Table as Table
from gateway.metadata.entries import InvalidationEpochs, ObservedAt
from gateway.metadata.listing import dirty_keys
from gateway.metadata.listing.dirty_keys import PAGE_SECONDS_MAX, DirtyKeys, WrittenKey
from gateway.metadata.listing.pages import END, Listed, key_successor
from gateway.metadata.listing.ranges import Batch, Interval, including, is_known_better, without
from gateway.metadata.listing.records import (
    OWN_TEMPLATE,
    pack_template,
    plain,
    template_of,
    unpack_template,
    with_own_template,
    with_template,
    without_template,
)
from gateway.s3.list_result import EntryTemplate

NUMBER_BYTES = 4
"""Length of a bucket's number, which precedes each key."""

_OBSERVED = struct.Struct("<QdI")


class View:
    """A bucket's part of the index at one moment."""

    def __init__(self, transaction: lmdb.Transaction, entries: Table, ranges: Table, number: bytes) -> None:
        self.transaction = transaction
        self.number = number
        self._entries: Cursor = transaction.cursor(db=entries)
        self._ranges: Cursor = transaction.cursor(db=ranges)
        self._ranges_table = ranges

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        """As `pages.Keys.read`."""
        cursor, number = self._entries, self.number
        end = number + stop
        if count <= 0 or start >= stop or not cursor.set_range(number + start):
            return []
        if count == 1:
            row_key, record = cursor.item()
            return [(row_key[NUMBER_BYTES:], record)] if row_key < end else []
        rows: list[Listed] = list(islice(cursor, count))
        if rows and rows[-1][0] >= end:
            rows = [row for row in rows if row[0] < end]
        return [(row_key[NUMBER_BYTES:], record) for row_key, record in rows]

    def keys(self, start: bytes, stop: bytes, count: int) -> list[bytes]:
        """As `read`, without what is said of them."""
        cursor, number = self._entries, self.number
        end = number + stop
        if start >= stop or not cursor.set_range(number + start):
            return []
        rows = islice(cursor.iternext(keys=True, values=False), count)
        return [row[NUMBER_BYTES:] for row in takewhile(lambda row: row < end, rows)]

    def intervals(self, start: bytes) -> Iterator[Interval]:
        """In order, from the one that ends at or behind `start`, or the one before."""
        cursor = self._ranges
        found = cursor.set_range(self.number + start)
        if not (cursor.prev() or cursor.first() if found else cursor.last()):
            return
        for row_key, value in cursor:
            if row_key[:NUMBER_BYTES] > self.number:
                return
            if row_key[:NUMBER_BYTES] == self.number:
                epoch, seconds, boot = _OBSERVED.unpack_from(value)
                learned = ObservedAt(epoch, seconds, boot)
                yield Interval(row_key[NUMBER_BYTES:], value[_OBSERVED.size :], learned)

    def touching(self, start: bytes, stop: bytes, *, overlapping: bool = False) -> Iterator[Interval]:
        """Yield the intervals that overlap [start, stop) or, unless `overlapping`, touch it with an end."""
        for one in self.intervals(start):
            if one.start > stop or (overlapping and one.start == stop):
                return
            if one.stop > start or (one.stop == start and not overlapping):
                yield one

    def rewrite(self, before: Sequence[Interval], after: Sequence[Interval]) -> None:
        """Change the ranges table from one to the other."""
        for gone in {one.start for one in before} - {one.start for one in after}:
            self.transaction.delete(self.number + gone, db=self._ranges_table)
        same = set(before)
        for one in after:
            if one not in same:
                observed = one.observed_at
                value = _OBSERVED.pack(observed.epoch, observed.seconds, observed.boot) + one.stop
                self.transaction.put(self.number + one.start, value, db=self._ranges_table)

    def forget(self, start: bytes, stop: bytes) -> None:
        """Take [start, stop) for not known any more."""
        around = list(self.touching(start, stop))
        self.rewrite(around, without(around, start, stop))


SIZE_BYTES_MAX = 32 * 1024**3
"""Limit of the entries' size: about 300 million keys."""

LANDED_PER_TRANSACTION = 512
"""Half a millisecond, or one and a half on a slow machine."""

TEMPLATES_MAX = 4096
"""Forms with a number. Entries of any other have it in their record: larger, and no end."""

UNKNOWN_BOOT = 0
"""Boot number of S3 Inventory entries: older than all own writes, believed where no write is known. A real boot has
this number once in 2 to the 32."""

_SWEEPS_IN_PEACE = 8
"""With few dirty keys every so many sweeps do."""

_PART_WORK = 8
"""Fixed cost of a batch, in keys."""

_MAP_BYTES_OVER_SIZE = 2
_PAGE_BYTES = 4096
_NODE_BYTES = 10
_SWEPT_PER_TRANSACTION = 2 * LANDED_PER_TRANSACTION


class ListingStore:
    """One process's view of the index."""

    def __init__(
        self,
        directory: Path,
        epochs: InvalidationEpochs,
        dirty: DirtyKeys,
        *,
        told: Callable[[ObjectKey, bytes | None], None],
        size_bytes_max: int = SIZE_BYTES_MAX,
    ) -> None:
        """Have `told` hear of each key that has changed, in the thread that lands it: what is listed now, or None."""
        self._told = told
        self._epochs = epochs
        self._dirty = dirty
        self._size_bytes_max = size_bytes_max
        self._swept = b""
        self._sweeps = 0
        self._numbers: dict[str, bytes] = {}
        self._templates_lock = Lock()
        self._templates: list[EntryTemplate] = []
        self._template_numbers: dict[EntryTemplate, int] = {}
        self._environment, tables = open_environment(
            directory,
            (b"entries", b"ranges", b"templates", b"buckets"),
            map_bytes=size_bytes_max * _MAP_BYTES_OVER_SIZE,
            engine=NEW_ENGINE,
        )
        self._entries, self._ranges, self._templates_table, self._buckets = tables

    @contextmanager
    def view(self, bucket: str) -> Iterator[View | None]:
        """Yield a read view of a bucket; None if it is unknown."""
        with self._environment.begin() as transaction:
            yield self._view(transaction, bucket)

    def templates(self, numbers: Iterable[int]) -> list[EntryTemplate]:
        """Forms by number, as far as these are needed; IndexError when one is not there."""
        highest = max(numbers, default=-1)
        if highest >= len(self._templates):
            self._know_templates()
        if highest >= len(self._templates):
            raise IndexError("a record of the listing index names a template that is not there")
        return self._templates

    def all_templates(self) -> list[EntryTemplate]:
        """Every template that there is now, by number."""
        self._know_templates()
        return list(self._templates)

    def land(self, batches: Sequence[Batch], seconds: float) -> tuple[list[Batch], list[bytes]]:
        """Write the beginning of the batches. Blocks for about a millisecond.

        Returns the rest, for the next call, and the known keys whose date, ETag or size changed or that no longer
        exist. Keys that were written since the origin was asked (dirty_keys.py) stay as they are. A batch is dropped if
        the origin was asked below the floor, before a write of the bucket, or before the index's own knowledge.
        `seconds` is the time now. Raises lmdb.Error when the disk cannot take it.
        """
        landed, changed, work = list[Batch](), list[bytes](), 0
        self._know_templates()
        with self._environment.begin(write=True) as transaction:
            left = deque(batch for batch in batches if self._may_be_kept(batch))
            if self._size_bytes(transaction) >= self._size_bytes_max:
                self._sweep(transaction)
            while left and work < LANDED_PER_TRANSACTION:
                batch = left.popleft()
                reach, found = self._land(transaction, batch, seconds)
                part = batch.until(reach)
                if reach < batch.stop:
                    left.appendleft(batch.beginning_at(reach))
                landed.append(part)
                changed += found
                work += len(part.listed) + _PART_WORK
        for part in landed:
            self._dirty.settle(part.bucket, part.start, part.stop, part.asked.number, seconds)
        return list(left), changed

    def put_truths(self, batches: Sequence[Batch], seconds: float) -> None:
        """Keep what the origin has said of single keys that were written, where their range is known, and not since.

        A batch is of one key, and has one entry or none. Blocks; raises lmdb.Error.
        """
        self._know_templates()
        with self._environment.begin(write=True) as transaction:
            kept = [batch for batch in batches if self._may_be_kept(batch)]
            for batch in kept:
                view = self._view(transaction, batch.bucket)
                if view is None:
                    continue
                around = list(view.touching(batch.start, batch.stop, overlapping=True))
                if around and not is_known_better(around, batch.start, batch.stop, batch.asked.observed_at):
                    self._land_entries(view, batch, seconds)
        for batch in kept:
            self._dirty.settle(batch.bucket, batch.start, batch.stop, batch.asked.number, seconds)

    def forget(self, bucket: str, start: bytes, stop: bytes) -> None:
        """Take [start, stop) for not known any more. Blocks where anything of it is known; raises lmdb.Error."""
        with self.view(bucket) as view:
            if view is None or not any(view.touching(start, stop, overlapping=True)):
                return
        with self._environment.begin(write=True) as transaction:
            if (view := self._view(transaction, bucket)) is not None:
                view.forget(start, stop)

    def sweep(self, seconds: float) -> None:
        """Let go of a few dirty keys that the index says nothing of, and of clean ones that no page can be older than.

        Where there are more than DIRTY_KEYS_MAX, also of the oldest that the index does say something of: it forgets
        what lies between them. `seconds` is the time now. Blocks for a few milliseconds; raises lmdb.Error.
        """
        crowd, latest = self._dirty.crowd(), self._dirty.now() - dirty_keys.DIRTY_KEYS_MAX // 4
        self._sweeps += 1
        if crowd <= 0.5 and self._sweeps % _SWEEPS_IN_PEACE:
            return

        def is_old(one: WrittenKey) -> bool:
            return seconds - one.seconds > PAGE_SECONDS_MAX or (crowd > 0.5 and one.number <= latest)

        dirty, clean = self._dirty.next_rows()
        dirty = [one for one in dirty if one.is_over(seconds) and is_old(one)]
        clean = [one for one in clean if is_old(one)]
        if not dirty and not clean:
            return
        # First no process lands anything that may contradict them: a landing has ended when we hold the lock.
        self._dirty.raise_floor(max(one.number for one in (*dirty, *clean)))
        with self._environment.begin(write=True) as transaction:
            if crowd > 1:
                for bucket, start, stop in _spans(dirty):
                    if (view := self._view(transaction, bucket)) is not None:
                        view.forget(start, stop)
            dirty = [one for one in dirty if not self._is_known(transaction, one)]
        self._dirty.let_go(dirty, clean)

    def buckets(self) -> list[str]:
        """Every bucket that something was known of."""
        with self._environment.begin() as transaction:
            return [name.decode() for name, _ in transaction.cursor(db=self._buckets)]

    def statistics(self) -> dict[str, int]:
        """`keys` in the index, void ones included, and `size_bytes` that they take."""
        with self._environment.begin() as transaction:
            keys = int(transaction.stat(self._entries)["entries"])
            return {"keys": keys, "size_bytes": self._size_bytes(transaction)}

    def close(self, *, sync: bool = False) -> None:
        if sync:
            self._environment.sync(True)
        self._environment.close()

    def _land(self, transaction: lmdb.Transaction, batch: Batch, seconds: float) -> tuple[bytes, list[bytes]]:
        """Up to where it came, and what has changed."""
        view = self._view(transaction, batch.bucket, create=True)
        if view is None:
            raise RuntimeError("a bucket that was given a number has one")
        around = list(view.touching(batch.start, batch.stop))
        if is_known_better(around, batch.start, batch.stop, batch.asked.observed_at):
            return batch.stop, []
        reach, changed = self._land_entries(view, batch, seconds)
        new = Interval(batch.start, reach, batch.asked.observed_at)
        view.rewrite(around, including(around, new, merge_seconds=batch.merge_seconds))
        return reach, changed

    def _may_be_kept(self, batch: Batch) -> bool:
        """To be asked within the transaction that keeps it: `sweep` waits for that."""
        asked = batch.asked
        if asked.observed_at.epoch != self._epochs.of_bucket(batch.bucket):
            return False
        return (
            asked.number >= self._dirty.floor() or asked.observed_at.boot == UNKNOWN_BOOT
        )  # keys may be let go of below

    def _land_entries(self, view: View, batch: Batch, seconds: float) -> tuple[bytes, list[bytes]]:
        transaction, number = view.transaction, view.number
        known = view.read(batch.start, batch.stop, LANDED_PER_TRANSACTION)
        told = list(islice(batch.listed, LANDED_PER_TRANSACTION))
        reach = batch.stop
        for listed in (known, told):
            if len(listed) == LANDED_PER_TRANSACTION:
                reach = min(reach, key_successor(listed[-1][0]))
        told = self._with_our_templates(transaction, batch.templates, told)
        if known == told:
            return reach, []
        new = {key: record for key, record in told if key < reach}
        old = {key: record for key, record in known if key < reach}
        kept = self._dirty.not_told(batch.bucket, batch.start, reach, batch.asked.number, seconds)
        if not old:
            _put_new(transaction, self._entries, [(number + key, new[key]) for key in new if key not in kept])
            return reach, []
        changed = []
        for key in sorted(old.keys() | new.keys()):
            if key in kept or old.get(key) == new.get(key):
                continue
            if key in old and (key not in new or without_template(old[key]) != without_template(new[key])):
                changed.append(key)
                now = new.get(key)
                self._told(ObjectKey(batch.bucket, key.decode()), None if now is None else plain(now))
            if key in new:
                transaction.put(number + key, new[key], db=self._entries)
            else:
                transaction.delete(number + key, db=self._entries)
        return reach, changed

    def _is_known(self, transaction: lmdb.Transaction, one: WrittenKey) -> bool:
        view, epoch = self._view(transaction, one.bucket), self._epochs.of_bucket(one.bucket)
        around = [] if view is None else view.touching(one.key, key_successor(one.key), overlapping=True)
        return any(within.observed_at.epoch == epoch for within in around)

    def _view(self, transaction: lmdb.Transaction, bucket: str, *, create: bool = False) -> View | None:
        number = self._number(transaction, bucket, create=create)
        return None if number is None else View(transaction, self._entries, self._ranges, number)

    def _number(self, transaction: lmdb.Transaction, bucket: str, *, create: bool) -> bytes | None:
        known = self._numbers.get(bucket)
        if known is not None:
            return known
        number = cast("bytes | None", transaction.get(bucket.encode(), db=self._buckets))
        if number is None and create:
            number = int(transaction.stat(self._buckets)["entries"]).to_bytes(NUMBER_BYTES, "big")
            transaction.put(bucket.encode(), number, db=self._buckets)
            return number  # remembered when it is there for good
        if number is not None and not create:
            self._numbers[bucket] = number
        return number

    def _with_our_templates(
        self, transaction: lmdb.Transaction, templates: Sequence[EntryTemplate], listed: list[Listed]
    ) -> list[Listed]:
        """With the index's numbers in place of those into `templates`, or with the template itself."""
        numbers = [self._template_number(transaction, template) for template in templates]
        if numbers == list(range(len(numbers))):
            return listed
        ours = []
        for key, record in listed:
            local = template_of(record)
            if numbers[local] == OWN_TEMPLATE:
                ours.append((key, with_own_template(record, templates[local])))
            else:
                ours.append((key, with_template(record, numbers[local])))
        return ours

    def _template_number(self, transaction: lmdb.Transaction, template: EntryTemplate) -> int:
        known = self._template_numbers.get(template)
        if known is not None:
            return known
        packed, known_count = pack_template(template), len(self._templates)
        rows: Cursor = transaction.cursor(db=self._templates_table)
        if rows.set_range(_template_key(known_count)):  # templates of this open transaction are not remembered
            for row_key, other in rows:
                if other == packed:
                    return int.from_bytes(row_key, "big")
        count = int(transaction.stat(self._templates_table)["entries"])
        if count >= TEMPLATES_MAX:
            return OWN_TEMPLATE
        transaction.put(_template_key(count), packed, db=self._templates_table)
        return count

    def _know_templates(self) -> None:
        """Read those that have come since; they never go."""
        with self._templates_lock, self._environment.begin() as transaction:
            rows: Cursor = transaction.cursor(db=self._templates_table)
            if rows.set_range(_template_key(len(self._templates))):
                for _, packed in rows:
                    template = unpack_template(packed)
                    self._template_numbers.setdefault(template, len(self._templates))
                    self._templates.append(template)

    def _size_bytes(self, transaction: lmdb.Transaction) -> int:
        table = transaction.stat(self._entries)
        return int(table["psize"]) * int(table["branch_pages"] + table["leaf_pages"] + table["overflow_pages"])

    def _sweep(self, transaction: lmdb.Transaction) -> None:
        """Make room for others, going round through all keys: any can be asked for again."""
        cursor: Cursor = transaction.cursor(db=self._entries)
        if not cursor.set_range(self._swept) and not cursor.first():
            return
        row_keys = [row_key for row_key, _ in islice(cursor.iternext(values=True), _SWEPT_PER_TRANSACTION)]
        self._swept = key_successor(row_keys[-1])
        for row_key in row_keys:
            transaction.delete(row_key, db=self._entries)
        first, last = row_keys[0], row_keys[-1]
        for number, start, stop in _parts_by_bucket(first, last):
            View(transaction, self._entries, self._ranges, number).forget(start, stop)


def _template_key(number: int) -> bytes:
    return number.to_bytes(2, "big")


def _spans(keys: Sequence[WrittenKey]) -> Iterator[tuple[str, bytes, bytes]]:
    """Bucket, start and stop of what lies between keys of one directory; `keys` are in order."""
    for (bucket, _), group in groupby(keys, lambda one: (one.bucket, one.key.rpartition(b"/")[0])):
        together = list(group)
        yield bucket, together[0].key, key_successor(together[-1].key)


def _parts_by_bucket(first: bytes, last: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield the row_keys from `first` to `last` as bucket number, start and stop."""
    lowest = int.from_bytes(first[:NUMBER_BYTES], "big")
    highest = int.from_bytes(last[:NUMBER_BYTES], "big")
    for bucket in range(lowest, highest + 1):
        start = first[NUMBER_BYTES:] if bucket == lowest else b""
        stop = key_successor(last[NUMBER_BYTES:]) if bucket == highest else END
        yield bucket.to_bytes(NUMBER_BYTES, "big"), start, stop


def _put_new(transaction: lmdb.Transaction, table: Table, rows: Sequence[tuple[bytes, bytes]]) -> None:
    """Insert new rows, in order, with no existing rows between them.

    LMDB fills a page completely only if rows come behind all others on it, else it leaves the page half empty for good.
    So this takes out the rows that follow on the page first and puts them back behind.
    """
    if not rows:
        return
    cursor: Cursor = transaction.cursor(db=table)
    following, size_bytes = [], 0
    if cursor.set_range(rows[-1][0]):
        for row in cursor:
            following.append(row)
            size_bytes += len(row[0]) + len(row[1]) + _NODE_BYTES
            if size_bytes > _PAGE_BYTES:
                break
    for row_key, _ in following:
        transaction.delete(row_key, db=table)
    append = not cursor.last() or bytes(cursor.key()) < rows[0][0]
    cursor.putmulti(rows, append=append)
    cursor.putmulti(following, append=append)
