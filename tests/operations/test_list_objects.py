"""Pages of several sources, against a model: as if all that is frozen, pending and at the origin lay in one bucket."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.clock import Moment
from gateway.metadata.joined_calls import JoinedCalls
from gateway.metadata.listing.pages import END, ListRequest, Page, SortedKeys, key_successor, prefix_end
from gateway.metadata.listing.ranges import KeyBound
from gateway.metadata.listing.records import numbered, unpack
from gateway.operations.context import BodyBuffers
from gateway.operations.list_objects import page_of
from gateway.operations.list_sources import (
    Listing,
    ObjectRows,
    PartitionedSource,
    SourceEntry,
    before,
    parts,
    pending_rows,
    seek_pending,
)
from gateway.operations.merged_page import Kind, ListSource, MergedPage
from gateway.policy.slots import Prefix, Slots
from gateway.s3.list_result import EntryTemplate, ListedEntry
from gateway.s3.listings import ListQuery
from gateway.writeback.journal.schema import prepare
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support import listing_model as model
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot
from tests.support.writeback import PlainPresence, key, pending

BUCKET = "bucket"
FROZEN = EntryTemplate("", "", "<StorageClass>FROZEN</StorageClass>")
QUERY = ListQuery(True, "", "", 1000, True, with_owner=False, start_after="")

WANTED = st.builds(
    ListRequest,
    prefix=model.TEXT.map(str.encode),
    delimiter=model.TEXT.map(str.encode),
    limit=st.integers(0, 8),
    after=model.TEXT.map(str.encode),
)
WRITES = st.dictionaries(model.KEY, st.booleans(), max_size=30)
"""Pending keys; False is a tombstone."""

SLOTS = st.dictionaries(model.TEXT, st.booleans(), max_size=3)


def slots_of(prefixes: Mapping[str, bool]) -> Slots:
    """A slot for each prefix of keys, frozen or not."""
    return Slots(
        Slot(f"s{number}", Prefix(BUCKET, prefix), "read-only", "snapshot" if frozen else "strict")
        for number, (prefix, frozen) in enumerate(prefixes.items())
    )


def is_frozen(slots: Slots, name: str) -> bool:
    return slots.find(BUCKET, name).consistency == "snapshot"


class Registry:
    """One snapshot for all slots."""

    def __init__(self, keys: Collection[str]) -> None:
        listed, templates = numbered([ListedEntry(name.encode(), "", '"f"', 1, FROZEN) for name in sorted(keys)])
        listed.sort()
        data = SimpleNamespace(keys=lambda: nullcontext(SortedKeys(listed)), templates=templates)
        self._opened = SimpleNamespace(snapshot=SimpleNamespace(data=data))

    async def opened(self, slot: Slot) -> Any:
        return self._opened

    def holding(self, opened: Any) -> Any:
        return nullcontext(opened)


class World:
    """An origin's bucket, a snapshot, and a journal from which is flushed when somebody looks away."""

    def __init__(
        self,
        tx: JournalTransaction,
        slots: Slots,
        origin: Collection[str],
        frozen: Collection[str],
        writes: Mapping[str, bool],
        flushes: Iterator[bool],
    ) -> None:
        self._book = tx
        self._flushes = flushes
        self._slots = slots
        self._frozen = {name for name in frozen if is_frozen(slots, name)}
        self.origin = MemoryOrigin(ManualClock())
        self.origin.create_bucket(BUCKET)
        for name in origin:
            self.origin.put(BUCKET, name, b"at the origin")
        self.waiting: dict[str, int] = {}
        for name, is_put in writes.items():
            if not is_frozen(slots, name):
                stored = tx.writes.acknowledge(pending(key(name), name) if is_put else pending(key(name), deleted=True))
                self.waiting[name] = stored.id
        services = SimpleNamespace(
            catalog=SimpleNamespace(joined_calls=JoinedCalls(ManualClock()), listed=lambda *_: None),
            origin=self.origin,
            slots=slots,
            snapshots=Registry(frozen),
            buffers=BodyBuffers(),
            writeback=self,
        )
        self._exchange = cast("Any", SimpleNamespace(services=services, slot=Slot("default", Prefix("")), buffer=self))

    def union(self) -> set[bytes]:
        """What there is when everything is flushed: the same whatever has been."""
        latest = {name: self._book.writes.latest(key(name)) for name in self.waiting}
        there = {name for name, one in latest.items() if one is not None and not one.deleted}
        gone = {name for name, one in latest.items() if one is not None and one.deleted}
        stored = {name for name in self.origin.buckets[BUCKET].objects if not is_frozen(self._slots, name)}
        return {name.encode() for name in (stored - gone) | there | self._frozen}

    def look(self, at: Callable[[JournalTransaction], ObjectRows]) -> ObjectRows:
        """As the buffer's; then the flush goes on."""
        found = at(self._book)
        for name in sorted(self.waiting):
            if next(self._flushes, False):
                self._flush(name)
        return found

    def _flush(self, name: str) -> None:
        stored = self._book.writes.whole(self.waiting.pop(name))
        assert stored is not None
        if stored.deleted:
            self.origin.buckets[BUCKET].remove(name)
        else:
            self.origin.put(BUCKET, name, b"flushed")
        self._book.writes.settle(stored.id, None if stored.deleted else stored.etag, Moment(0.0))

    def page(self, wanted: ListRequest) -> tuple[Page, list[EntryTemplate]]:
        """The page as the gateway makes it."""
        listing = Listing(self._exchange, BUCKET, QUERY, (), KeyBound(0.0, 0.0))
        sources: list[ListSource[SourceEntry]] = [partial(seek_pending, listing), PartitionedSource(listing).seek]
        merged = MergedPage(wanted, sources)
        with listing.held:
            asyncio.run(merged.fill())
        return page_of(merged)


@contextmanager
def a_book() -> Iterator[JournalTransaction]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        prepare(connection)
        yield JournalTransaction(connection, PlainPresence())
    finally:
        connection.close()


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SLOTS, model.KEYS, model.KEYS, WRITES, WANTED, st.lists(st.booleans(), max_size=120))
@example({"a/b": True}, {"a/c"}, set(), {}, ListRequest(b"", b"/"), [])
@example({"a/b": True}, {"a/b"}, set(), {}, ListRequest(b"", b"/"), [])
@example({"a/b": True}, set(), {"a/b"}, {}, ListRequest(b"", b"/"), [])
@example({"a/b": True, "a/bb": False}, {"a/bb/", "a/ba"}, {"a/b/", "a/bb"}, {}, ListRequest(b"a/", b"/"), [])
@example({"a/b": True}, {"a/a", "a/c"}, set(), {"a/a": False, "a/c": False}, ListRequest(b"", b"/"), [])
@example({"a/b": True}, {"a/a"}, set(), {"a/a": False, "a/c": True}, ListRequest(b"", b"/"), [])
def test_every_page_is_as_if_all_lay_in_one_bucket(
    prefixes: dict[str, bool],
    origin: set[str],
    frozen: set[str],
    writes: dict[str, bool],
    wanted: ListRequest,
    flushes: list[bool],
) -> None:
    """Order, limit, common prefixes and truncation, page by page, whatever is flushed in between."""
    slots = slots_of(prefixes)
    with a_book() as tx:
        world = World(tx, slots, origin, frozen, writes, iter(flushes))
        union = world.union()
        while True:
            found, templates = world.page(wanted)
            assert model.said(found) == model.page(union, wanted)
            for name, record in found.keys:
                said = unpack(name, record, templates)
                assert (said.template == FROZEN) == is_frozen(slots, name.decode())
            if not found.is_truncated:
                break
            wanted = model.following(wanted, found)
        assert world.union() == union


@pytest.mark.slow
@settings(max_examples=150)
@given(SLOTS, model.KEY.map(str.encode))
def test_every_place_belongs_to_the_part_of_its_slot(prefixes: dict[str, bool], name: bytes) -> None:
    """The parts follow each other without a gap, and say of each key what the slots say."""
    slots = slots_of(prefixes)
    found = parts(slots, BUCKET, b"", END)
    assert (found[0].start, found[-1].stop) == (b"", END)
    assert all(one.stop == other.start for one, other in pairwise(found))
    part = next(part for part in found if part.start <= name < part.stop)
    slot = slots.find(BUCKET, name.decode())
    assert part.slot == (slot if slot.consistency == "snapshot" else None)


@settings(max_examples=150)
@given(model.KEY.map(str.encode), st.sampled_from([key_successor, prefix_end, bytes]))
def test_the_origin_is_asked_from_before_a_place(name: bytes, hash_slot_of: Callable[[bytes], bytes]) -> None:
    """Never from behind it, which would leave something out; and from the key itself where the place is behind one."""
    place = hash_slot_of(name)
    assert before(place).encode() < place
    assert before(key_successor(name)) == name.decode()
    assert before(prefix_end(name)).encode() >= name


@pytest.mark.parametrize("place", [b"a" * 1024, b"a" * 1023 + b"\xc3\xa9", b"\xc4\x80", b"\x00"])
def test_places_at_the_edge(place: bytes) -> None:
    """Keys of the greatest length, and characters whose last byte cannot be made less."""
    asked = before(place).encode()
    assert asked < place
    assert len(asked) <= 1024


def test_a_page_behind_which_everything_is_deleted_is_the_last() -> None:
    """However many tombstones there are: what the origin still has behind the page does not count."""
    with a_book() as tx:
        names = "bcdefghijklm"
        world = World(tx, slots_of({}), {"a", *names}, (), dict.fromkeys(names, False), iter(()))
        assert model.said(world.page(ListRequest(limit=1))[0]) == ([b"a"], [], False)


def test_a_pending_object_takes_the_place_of_the_origins() -> None:
    """Its ETag, size and date are listed; of the others those of the origin."""
    with a_book() as tx:
        world = World(tx, slots_of({}), {"a", "b", "c"}, (), {"b": True, "c": False, "d": True}, iter(()))
        page, templates = world.page(ListRequest(limit=10))
        said = [unpack(name, record, templates) for name, record in page.keys]
        assert [one.key for one in said] == [b"a", b"b", b"d"]
        assert said[0].size_bytes == len(b"at the origin")
        assert [(one.modified, one.size_bytes) for one in said[1:]] == [("1970-01-01T00:01:39.000Z", 1)] * 2
        assert said[1].etag == pending(key("b"), "b").etag


def test_a_full_page_asks_the_origin_once() -> None:
    """Its IsTruncated says that there is more: nothing is asked to find that out."""
    with a_book() as tx:
        world = World(tx, slots_of({}), {f"{number:04}" for number in range(1001)}, (), {}, iter(()))
        page, _ = world.page(ListRequest(limit=1000))
        assert (len(page.keys), page.is_truncated) == (1000, True)
        assert world.origin.count() == 1


@pytest.mark.slow
def test_common_prefixes_are_skipped_and_not_read() -> None:
    """Thousands of pending keys below a common prefix cost as much as one."""
    with a_book() as tx:
        for number in range(3000):
            tx.writes.acknowledge(pending(key(f"{number % 3}/{number}"), deleted=number % 3 == 1))
        tx.writes.acknowledge(pending(key("z"), "z"))
        unpacked: list[int] = []
        listing = tx.writes.listing

        def counted(bucket: str, start: bytes, stop: bytes | None, count_max: int) -> object:
            found = listing(bucket, start, stop, count_max)
            unpacked.append(len(found))
            return found

        tx.writes.listing = counted  # type: ignore[method-assign, assignment]
        rows = pending_rows(tx, BUCKET, ListRequest(delimiter=b"/"), 10)
        assert [(row.name, row.kind) for row in rows.rows] == [
            (b"0/", Kind.PREFIX),
            (b"1/", Kind.DOUBTFUL_PREFIX),
            (b"2/", Kind.PREFIX),
            (b"z", Kind.ENTRY),
        ]
        assert rows.end is None
        assert sum(unpacked) < 200


@pytest.mark.slow
def test_nothing_outside_of_the_range_is_read() -> None:
    """An empty range in front of many keys is answered without stepping over them."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    prepare(connection)
    tx = JournalTransaction(connection, PlainPresence())
    for number in range(2000):
        tx.writes.acknowledge(pending(key(f"b/{number}"), deleted=True))
    steps: list[None] = []
    connection.set_progress_handler(lambda: steps.append(None), 10)
    assert list(tx.writes.listing(BUCKET, b"a/", b"a0", 1000)) == []
    connection.close()
    assert len(steps) < 50
