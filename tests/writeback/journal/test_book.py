"""What the journal says is what a model of S3 says, after any history of writes, and every file is accounted for."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.errors import BufferDamaged
from gateway.objects import ObjectKey
from gateway.writeback.journal.book import ENDED_KEPT_SECONDS, Book
from gateway.writeback.journal.records import Base, Ended, Part, PendingObject, State, Upload
from gateway.writeback.journal.schema import prepare
from gateway.writeback.journal.usage_rows import Usage
from gateway.writeback.presence import PLACES, place_of
from tests.support.writeback import PlainPresence, fixed, key, part, pending, staged, upload

KEYS = [key(name) for name in ("a", "a/b", "é", "z")]


@pytest.fixture
def book() -> Iterator[Book]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    prepare(connection)
    yield Book(connection, PlainPresence())
    connection.close()


def test_a_part_replaces_the_one_of_its_number(book: Book) -> None:
    """The client sees the later part, and the earlier one's file is given back."""
    book.open_upload(upload("u", KEYS[0]))
    first, second = part(1, "first"), part(1, "second")
    assert book.put_part("u", first)
    assert book.put_part("u", second)
    assert list(book.parts("u")) == [second]
    assert book.freed == [first.file.name]


def test_a_part_of_no_upload_is_refused(book: Book) -> None:
    """NoSuchUpload, for uploads that never were and for those that are over; nothing is kept of it."""
    assert not book.put_part("u", part(1, "p"))
    book.open_upload(upload("u", KEYS[0]))
    book.abort(Ended("u", KEYS[0], 0.0, None))
    assert not book.put_part("u", part(1, "p"))
    assert not book.knows_file(part(1, "p").file.name)


def test_complete_keeps_the_chosen_parts_and_gives_the_others_back(book: Book) -> None:
    """The parts that Complete lists are the object; its upload is over, and remembered."""
    book.open_upload(upload("u", KEYS[0]))
    parts = [part(number, f"p{number}") for number in (1, 2, 5)]
    for one in parts:
        book.put_part("u", one)
    ended = Ended("u", KEYS[0], 7.0, '"e-2"', [(1, "x"), (5, "y")])
    stored = book.complete(pending(KEYS[0], parts=(parts[0], parts[2]), multipart=True), ended)
    assert stored is not None
    assert book.latest(KEYS[0]) == stored
    assert book.complete(stored, ended) is None
    assert list(stored.parts) == [parts[0], parts[2]]
    assert book.freed == [parts[1].file.name]
    assert book.upload("u") is None
    assert book.ended("u") == ended
    book.forget_ended(7.0 + ENDED_KEPT_SECONDS + 1)
    assert book.ended("u") is None


def test_an_overwritten_object_is_given_up_with_its_upload_at_the_origin(book: Book) -> None:
    """Of a hundred overwrites the last is pending; what the origin holds of the others is to be aborted there."""
    for number in range(100):
        object_ = pending(KEYS[0], f"v{number}", origin_upload_id=f"o{number}")
        book.put(replace(object_, base=Base((f'"{number}"',))))
    latest = book.latest(KEYS[0])
    assert latest is not None
    assert latest.etag == staged("v99").etag
    assert latest.base == Base(('"0"',))
    assert len(book.waiting(0, 1000)) == 1
    assert len(book.freed) == 99
    assert set(book.orphan_ids(1000)) == {f"o{number}" for number in range(99)}


def test_orphans_are_known_by_their_ids(book: Book) -> None:
    """Until the origin has none such any more."""
    book.put(pending(key("k"), "a", multipart=True, origin_upload_id="o"))
    assert not book.is_orphan("o")
    book.put(pending(key("k"), "b"))
    assert book.is_orphan("o")
    book.forget_orphan("o")
    assert not book.is_orphan("o")


def test_the_newest_is_what_was_acknowledged_last(book: Book) -> None:
    """Of what is still pending; nothing has the sequence 0."""
    assert book.newest() == 0
    first, second = book.put(pending(key("b"), "b")), book.put(pending(key("a"), deleted=True))
    assert book.newest() == second.sequence > first.sequence
    book.drop(second.sequence)
    assert book.newest() == first.sequence


def test_what_may_have_reached_the_origin_is_settled_before_what_follows(book: Book) -> None:
    """An object that is being sent is not given up when it is overwritten, and its successor expects its version."""
    sent = book.put(pending(KEYS[0], "one"))
    book.change(replace(sent, state=State.SENDING))
    following = book.put(pending(KEYS[0], "two"))
    assert [one.sequence for one in book.waiting(0, 10)] == [sent.sequence, following.sequence]
    book.settle(sent.sequence, '"one"', 50.0)
    earliest = book.earliest(KEYS[0])
    assert earliest is not None
    assert (earliest.sequence, earliest.base) == (following.sequence, Base(('"one"',)))


@pytest.mark.parametrize(("asked_at", "expected"), [(40.0, '"own"'), (60.0, '"other"')])
def test_what_this_gateway_has_written_since_is_no_surprise(book: Book, asked_at: float, expected: str) -> None:
    """The flush expects what an own flush has left since the origin was asked; what was asked later holds."""
    settled = book.put(pending(KEYS[0], "one"))
    book.settle(settled.sequence, '"own"', 50.0)
    stored = book.put(replace(pending(KEYS[0], "two"), base=Base(('"other"',), asked_at=asked_at)))
    assert stored.base.etags == (expected,)


def test_a_copy_keeps_the_files_that_it_shares(book: Book) -> None:
    """Files go with the last object that is made of them."""
    one = part(1, "shared")
    first, second = book.put(pending(KEYS[0], parts=(one,))), book.put(pending(KEYS[1], parts=(one,)))
    book.settle(first.sequence, None, 50.0)
    assert book.freed == []
    assert book.knows_file(one.file.name)
    book.drop(second.sequence)
    assert book.freed == [one.file.name]
    assert not book.knows_file(one.file.name)


def test_sequences_are_never_given_twice(book: Book) -> None:
    """Also when the last one is gone: what a sequence means is for ever."""
    first = book.put(pending(KEYS[0]))
    book.drop(first.sequence)
    assert book.put(pending(KEYS[0])).sequence > first.sequence


def test_uploads_are_listed_in_order(book: Book) -> None:
    """By key in the order of UTF-8, then by id; from behind any pair, and under any prefix."""
    names = [("b", "u1"), ("a/1", "u2"), ("a/1", "u3"), ("é", "u4"), ("a/2", "u5")]
    for name, upload_id in names:
        book.open_upload(upload(upload_id, key(name)))
    listed = [(one.fixed.key.key, one.upload_id) for one in book.uploads("bucket")]
    assert listed == [("a/1", "u2"), ("a/1", "u3"), ("a/2", "u5"), ("b", "u1"), ("é", "u4")]
    assert [one.upload_id for one in book.uploads("bucket", "a/", ("a/1", "u2"))] == ["u3", "u5"]
    assert list(book.uploads("other")) == []


@pytest.mark.parametrize("table", ["files", "uploads", "parts", "objects", "pieces"])
def test_a_changed_row_is_never_believed(book: Book, table: str) -> None:
    """A flipped bit in any record, or a record under another key, is BufferDamaged."""
    book.open_upload(upload("u", KEYS[0]))
    book.put_part("u", part(1, "p"))
    stored = book.put(pending(KEYS[1], parts=(part(1, "q"),)))
    packed = bytearray(book._rows.execute(f"SELECT record FROM {table}").fetchone()[0])
    packed[len(packed) // 2] ^= 1
    book._rows.execute(f"UPDATE {table} SET record = ?", (bytes(packed),))
    with pytest.raises(BufferDamaged):
        _read_everything(book, stored.sequence)


def _read_everything(book: Book, sequence: int) -> None:
    book.upload("u")
    list(book.parts("u"))
    book.object(sequence)


@dataclass
class _Open:
    """An upload as the model sees it."""

    key: ObjectKey
    origin_upload_id: str | None
    parts: dict[int, Part]


class Histories(RuleBasedStateMachine):
    """Random histories of uploads, writes, copies, deletes and flushes, against dictionaries."""

    @initialize()
    def begin(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        prepare(self.connection)
        self.presence = PlainPresence()
        self.book = Book(self.connection, self.presence)
        self.uploads: dict[str, _Open] = {}
        self.pending: dict[ObjectKey, list[PendingObject]] = {}
        self.orphans: set[str] = set()
        self.made: set[str] = set()
        self.own: dict[ObjectKey, Base] = {}
        self.count = 0

    def new(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def new_part(self, number: int) -> Part:
        made = part(number, self.new())
        self.made.add(made.file.name)
        return made

    @rule(at=st.sampled_from(KEYS), begun=st.booleans())
    def create(self, at: ObjectKey, begun: bool) -> None:
        upload_id, origin_upload_id = self.new(), self.new() if begun else None
        self.book.open_upload(Upload(upload_id, fixed(at), Base(), 1.0))
        if origin_upload_id is not None:
            assert self.book.begun_at_origin(upload_id, at, origin_upload_id) == origin_upload_id
        self.uploads[upload_id] = _Open(at, origin_upload_id, {})

    @precondition(lambda self: self.uploads)
    @rule(data=st.data(), number=st.integers(1, 4))
    def store(self, data: st.DataObject, number: int) -> None:
        upload_id = data.draw(st.sampled_from(sorted(self.uploads)))
        stored = self.new_part(number)
        assert self.book.put_part(upload_id, stored)
        self.uploads[upload_id].parts[number] = stored

    @precondition(lambda self: self.uploads)
    @rule(data=st.data(), number=st.integers(1, 4))
    def store_at_origin(self, data: st.DataObject, number: int) -> None:
        """A part for which there was no room here."""
        upload_id = data.draw(st.sampled_from(sorted(self.uploads)))
        made = part(number, self.new())
        stored = replace(made, file=replace(made.file, name="", checksums=b""), origin_etag=made.file.etag)
        assert self.book.put_part(upload_id, stored)
        self.uploads[upload_id].parts[number] = stored

    @precondition(lambda self: any(one.parts for one in self.uploads.values()))
    @rule(data=st.data())
    def origin_has_part(self, data: st.DataObject) -> None:
        upload_id = data.draw(st.sampled_from(sorted(name for name, one in self.uploads.items() if one.parts)))
        number = data.draw(st.sampled_from(sorted(self.uploads[upload_id].parts)))
        sent = replace(self.uploads[upload_id].parts[number], origin_etag='"at the origin"')
        self.book.sent(upload_id, sent)
        self.book.sent(upload_id, replace(self.new_part(number), origin_etag='"of a part that was replaced"'))
        self.uploads[upload_id].parts[number] = sent

    @precondition(lambda self: any(one.parts for one in self.uploads.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        upload_id = data.draw(st.sampled_from(sorted(name for name, one in self.uploads.items() if one.parts)))
        open_ = self.uploads.pop(upload_id)
        numbers = data.draw(st.lists(st.sampled_from(sorted(open_.parts)), min_size=1, unique=True).map(sorted))
        chosen = tuple(open_.parts[number] for number in numbers)
        if not all(one.file.is_here for one in chosen):
            self.book.completed_at_origin(Ended(upload_id, open_.key, 60.0, '"made there"'))
            self.own[open_.key] = Base(('"made there"',))
            return
        object_ = pending(open_.key, parts=chosen, multipart=True, origin_upload_id=open_.origin_upload_id)
        completed = self.book.complete(object_, Ended(upload_id, open_.key, 1.0, object_.etag))
        assert completed is not None
        self.entered(completed)

    @precondition(lambda self: self.uploads)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        upload_id = data.draw(st.sampled_from(sorted(self.uploads)))
        open_ = self.uploads.pop(upload_id)
        self.book.abort(Ended(upload_id, open_.key, 1.0, None))
        self.orphaned(open_.origin_upload_id)

    @rule(at=st.sampled_from(KEYS))
    def put(self, at: ObjectKey) -> None:
        self.entered(self.book.put(pending(at, parts=(self.new_part(1),))))

    @rule(at=st.sampled_from(KEYS))
    def delete(self, at: ObjectKey) -> None:
        self.entered(self.book.put(pending(at, deleted=True)))

    @precondition(lambda self: any(self.pending.values()))
    @rule(data=st.data(), to=st.sampled_from(KEYS))
    def copy(self, data: st.DataObject, to: ObjectKey) -> None:
        source = data.draw(st.sampled_from(sorted((at for at, one in self.pending.items() if one), key=str)))
        to_other_slot = replace(fixed(to), slot="other")
        self.entered(self.book.put(replace(self.pending[source][-1], fixed=to_other_slot, origin_upload_id=None)))

    def orphaned(self, *ids: str | None) -> None:
        self.orphans |= {one for one in ids if one is not None}

    def entered(self, stored: PendingObject) -> None:
        earlier = self.pending.setdefault(stored.key, [])
        kept = [one for one in earlier if one.state is State.SENDING]
        self.orphaned(*(one.origin_upload_id for one in earlier if one not in kept))
        expected = next((one.base for one in earlier if one not in kept), self.own.get(stored.key, stored.base))
        assert stored.base == expected
        self.pending[stored.key] = [*kept, stored]

    @precondition(lambda self: any(self.pending.values()))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        first = self.first(data)
        sending = replace(first, state=State.SENDING)
        self.book.change(sending)
        self.pending[first.key][0] = sending

    @precondition(lambda self: any(self.pending.values()))
    @rule(data=st.data(), etag=st.sampled_from([None, '"e"']))
    def settle(self, data: st.DataObject, etag: str | None) -> None:
        self.gone(self.first(data), Base.exactly(etag))

    @precondition(lambda self: any(one and one[0].state is not State.SENDING for one in self.pending.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        first = self.first(data, lambda one: one.state is not State.SENDING)
        self.orphaned(first.origin_upload_id)
        self.gone(first, None)

    def gone(self, first: PendingObject, base: Base | None) -> None:
        if base is None:
            self.book.drop(first.sequence)
        else:
            self.book.settle(first.sequence, base.etags[0] if base.etags else None, 50.0)
            self.own[first.key] = base
        following = self.pending[first.key][1:]
        self.pending[first.key] = [replace(one, base=base or first.base) for one in following[:1]] + following[1:]

    def first(self, data: st.DataObject, wanted: object = None) -> PendingObject:
        test = wanted if callable(wanted) else (lambda _: True)
        found = {at: one[0] for at, one in self.pending.items() if one and test(one[0])}
        return found[data.draw(st.sampled_from(sorted(found, key=str)))]

    @rule()
    def origin_forgets_orphans(self) -> None:
        for origin_upload_id in self.book.orphan_ids(1000):
            self.book.forget_orphan(origin_upload_id)
        self.orphans.clear()

    @invariant()
    def agrees(self) -> None:
        for at in KEYS:
            mine = self.pending.get(at, [])
            assert self.book.latest(at) == (mine[-1] if mine else None)
            assert not mine or self.presence.may_be(at)
        every = sorted((one for found in self.pending.values() for one in found), key=lambda one: one.sequence)
        assert [self.book.object(one.sequence) for one in self.book.waiting(0, 1000)] == every
        shown = sorted((found[-1] for found in self.pending.values() if found), key=lambda one: one.key.key.encode())
        assert [one.sequence for one in self.book.listing("bucket", b"", None, 100)] == [one.sequence for one in shown]
        for upload_id, open_ in self.uploads.items():
            assert {one.number: one for one in self.book.parts(upload_id)} == open_.parts
        assert set(self.book.orphan_ids(1000)) == self.orphans
        assert self.book.places() == {place_of(one.key) for one in every}

    @invariant()
    def every_file_is_accounted_for(self) -> None:
        used = {one.file.name for open_ in self.uploads.values() for one in open_.parts.values() if one.file.is_here}
        used |= {one.file.name for found in self.pending.values() for each in found for one in each.parts}
        assert {name for name in self.made if self.book.knows_file(name)} == used
        assert used.isdisjoint(self.book.freed)

    @invariant()
    def the_counters_say_what_there_is(self) -> None:
        counted = {slot: usage for slot, usage in self.book.usages().items() if usage != Usage()}
        assert counted == self.book.counted()
        every = [one for found in self.pending.values() for one in found]
        kept = [one.file for open_ in self.uploads.values() for one in open_.parts.values()]
        kept += [one.file for each in every for one in each.parts]
        sizes = {file.name: file.size_bytes for file in kept if file.is_here}
        assert sum(usage.staged_bytes for usage in counted.values()) == sum(sizes.values())
        assert sum(usage.objects for usage in counted.values()) == len(every)
        waiting = [one.acknowledged_at for one in every if one.state is not State.CONFLICT]
        oldest = [at for slot in counted if (at := self.book.oldest(slot)) is not None]
        assert min(oldest, default=None) == min(waiting, default=None)

    def teardown(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()


Histories.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


def test_places_fit_the_file() -> None:
    """Whatever a key is called."""
    assert all(0 <= place_of(key(name)) < PLACES for name in ("", "\ud800", "x" * 1024))
