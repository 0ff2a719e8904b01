"""Pages with what is pending in them, against the model of a listing of what the bucket will hold."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.metadata.listing.index import Found
from gateway.metadata.listing.pages import END, ListRequest, SortedKeys, take
from gateway.metadata.listing.records import numbered, unpack
from gateway.operations.absorbing.listing import pending_entry
from gateway.operations.absorbing.merging import Merging
from gateway.operations.absorbing.pending_rows import Fate, PendingRows, pending_rows
from gateway.s3.list_result import EntryForm, ListedEntry
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.schema import prepare
from tests.support import listing_model as model
from tests.support.writeback import PlainPresence, key, pending

WANTED = st.builds(
    ListRequest,
    prefix=model.TEXT.map(str.encode),
    delimiter=model.TEXT.map(str.encode),
    limit=st.integers(0, 8),
    after=model.TEXT.map(str.encode),
)
WRITES = st.dictionaries(model.KEY, st.booleans(), max_size=30)
"""Pending keys; False is a tombstone."""

FORM = EntryForm("", None, "<StorageClass>STANDARD</StorageClass>")


class Bucket:
    """An origin's bucket and a journal, between which flushes happen when somebody looks away."""

    def __init__(self, book: Book, origin: set[str], writes: Mapping[str, bool], flushes: Iterator[bool]) -> None:
        self._book = book
        self._flushes = flushes
        self.origin = dict.fromkeys(origin, "at the origin")
        self.waiting: dict[str, int] = {}
        for name, is_put in writes.items():
            stored = book.put(pending(key(name), name) if is_put else pending(key(name), deleted=True))
            self.waiting[name] = stored.sequence

    def union(self) -> set[bytes]:
        """What it holds when everything is flushed: the same whatever has been."""
        latest = {name: self._book.latest(key(name)) for name in self.waiting}
        there = {name for name, one in latest.items() if one is not None and not one.deleted}
        gone = {name for name, one in latest.items() if one is not None and one.deleted}
        return {name.encode() for name in (set(self.origin) - gone) | there}

    def flush_some(self) -> None:
        for name in sorted(self.waiting):
            if next(self._flushes, False):
                stored = self._book.object(self.waiting.pop(name))
                assert stored is not None
                if stored.deleted:
                    self.origin.pop(name, None)
                else:
                    self.origin[name] = "flushed"
                self._book.settle(stored.sequence, None if stored.deleted else stored.etag, 0.0)

    async def look(self, wanted: ListRequest, count: int) -> PendingRows:
        found = pending_rows(self._book, "bucket", wanted, min(count, 3))
        self.flush_some()
        return found

    async def ask(self, wanted: ListRequest) -> Found:
        entries = [ListedEntry(one.encode(), said, '"e"', 1, FORM) for one, said in sorted(self.origin.items())]
        listed, forms = numbered(sorted(entries))
        page = take(SortedKeys(listed), wanted, END)
        assert page is not None
        self.flush_some()
        return Found(page, forms)


@contextmanager
def a_book() -> Iterator[Book]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        prepare(connection)
        yield Book(connection, PlainPresence())
    finally:
        connection.close()


@settings(max_examples=150, deadline=None)
@given(model.KEYS, WRITES, WANTED, st.lists(st.booleans(), max_size=120))
def test_every_page_is_that_of_the_flushed_bucket(
    origin: set[str], writes: dict[str, bool], wanted: ListRequest, flushes: list[bool]
) -> None:
    """Order, limit, common prefixes and truncation, page by page, whatever is flushed in between."""
    with a_book() as book:
        bucket = Bucket(book, origin, writes, iter(flushes))
        union = bucket.union()
        while True:
            found = asyncio.run(Merging(wanted, bucket.look, bucket.ask, pending_entry).page())
            assert model.said(found) == model.page(union, wanted)
            if not found.is_truncated:
                break
            wanted = model.following(wanted, found)
        assert bucket.union() == union


def test_a_page_behind_which_everything_is_deleted_is_the_last() -> None:
    """However many tombstones there are: what the origin still has behind the page does not count."""
    with a_book() as book:
        names = "bcdefghijklm"
        bucket = Bucket(book, {"a", *names}, dict.fromkeys(names, False), iter(()))
        page = asyncio.run(Merging(ListRequest(limit=1), bucket.look, bucket.ask, pending_entry).page())
        assert model.said(page) == ([b"a"], [], False)


def test_a_pending_object_takes_the_place_of_the_origins() -> None:
    """Its ETag, size and date are listed; of the others those of the origin, with their forms."""
    with a_book() as book:
        bucket = Bucket(book, {"a", "b", "c"}, {"b": True, "c": False, "d": True}, iter(()))
        merging = Merging(ListRequest(limit=10), bucket.look, bucket.ask, pending_entry)
        page = asyncio.run(merging.page())
        said = [unpack(name, record, merging.forms) for name, record in page.keys]
        assert [(one.key, one.modified) for one in said] == [
            (b"a", "at the origin"),
            (b"b", "1970-01-01T00:01:39.000Z"),
            (b"d", "1970-01-01T00:01:39.000Z"),
        ]
        assert (said[1].etag, said[1].size_bytes) == (pending(key("b"), "b").etag, 1)
        assert [one.form for one in said] == [FORM, FORM, FORM]


def test_common_prefixes_are_skipped_and_not_read() -> None:
    """Thousands of keys below a common prefix cost as much as one."""
    with a_book() as book:
        for number in range(3000):
            book.put(pending(key(f"{number % 3}/{number}"), deleted=number % 3 == 1))
        book.put(pending(key("z"), "z"))
        unpacked: list[int] = []
        listing = book.listing

        def counted(bucket: str, start: bytes, stop: bytes | None, count_max: int) -> object:
            found = listing(bucket, start, stop, count_max)
            unpacked.append(len(found))
            return found

        book.listing = counted  # type: ignore[method-assign, assignment]
        rows = pending_rows(book, "bucket", ListRequest(delimiter=b"/"), 10)
        assert [(row.name, row.fate) for row in rows.rows] == [
            (b"0/", Fate.LISTED),
            (b"1/", Fate.UNSURE),
            (b"2/", Fate.LISTED),
            (b"z", Fate.LISTED),
        ]
        assert rows.end is None
        assert sum(unpacked) < 200


def test_nothing_outside_of_the_range_is_read() -> None:
    """An empty range in front of many keys is answered without stepping over them."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    prepare(connection)
    book = Book(connection, PlainPresence())
    for number in range(2000):
        book.put(pending(key(f"b/{number}"), deleted=True))
    steps: list[None] = []
    connection.set_progress_handler(lambda: steps.append(None), 10)
    assert list(book.listing("bucket", b"a/", b"a0", 1000)) == []
    connection.close()
    assert len(steps) < 50
