"""What each change of the journal promises; whatever histories they make, test_book_histories.py holds them to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from gateway.clock import Moment
from gateway.errors import BufferDamaged, InConflict
from gateway.objects import ObjectKey
from gateway.writeback.journal import book as book_module
from gateway.writeback.journal import rows
from gateway.writeback.journal.book import (
    ASKED_SECONDS_MAX,
    CARRIED_OUT_SECONDS,
    ENDED_KEPT_SECONDS,
    RETRY_SECONDS_MAX,
    UPLOAD_SECONDS_MAX,
    Book,
)
from gateway.writeback.journal.records import (
    DATED_EARLIER_SECONDS_MAX,
    OWN_DOING_KEPT_SECONDS,
    Asked,
    Base,
    Conditions,
    Ended,
    Honoured,
    OwnDoing,
    Priority,
    Profile,
    State,
    Turn,
    Write,
)
from gateway.writeback.journal.schema import prepare
from gateway.writeback.presence import PLACES, place_of
from tests.support.writeback import PlainPresence, key, part, pending, staged, upload

KEYS = [key(name) for name in ("a", "a/b", "é", "z")]
NOW = 1000.0
LANE = ("slot", "bucket")


@pytest.fixture
def book() -> Iterator[Book]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        yield Book(connection, PlainPresence())


def of(write: Write | None) -> Write:
    assert write is not None
    return write


def turn(book: Book, write: Write) -> Turn:
    found = book.turn(write.id)
    assert found is not None
    return found


def made_of(opened: Write, *numbers: int) -> Write:
    """What Complete says of an upload, of parts that are called as they are numbered."""
    parts = [part(number, f"p{number}") for number in numbers]
    new = pending(opened.key, parts=parts, multipart=True)
    return replace(new, upload_id=opened.upload_id, completed_of="these parts")


def opened_with(book: Book, at: ObjectKey, *numbers: int, upload_id: str = "u") -> Write:
    opened = book.open_upload(upload(upload_id, at))
    for number in numbers:
        assert book.put_part(upload_id, part(number, f"p{number}"), NOW)
    return opened


# Uploads and their parts


def test_a_part_replaces_the_one_of_its_number(book: Book) -> None:
    """The client sees the later part, and the earlier one's file is given back."""
    opened = book.open_upload(upload("u", KEYS[0]))
    first, second = part(1, "first"), part(1, "second")
    assert book.put_part("u", first, NOW)
    assert book.put_part("u", second, NOW)
    assert list(book.parts(opened.id)) == [second]
    assert book.freed == [first.file.name]


def test_a_part_of_no_upload_is_refused(book: Book) -> None:
    """NoSuchUpload, for uploads that never were and for those that are over; nothing is kept of it."""
    assert not book.put_part("u", part(1, "p"), NOW)
    book.open_upload(upload("u", KEYS[0]))
    book.abort("u", NOW)
    assert not book.put_part("u", part(1, "p"), NOW)
    assert not book.knows_file(part(1, "p").file.name)


def test_a_part_has_its_upload_be_looked_at(book: Book) -> None:
    """It may go ahead; but not where the upload has just failed, which has a time of its own."""
    opened = opened_with(book, KEYS[0], 1)
    assert turn(book, opened).due_at == NOW
    assert of(book.upload("u")).touched == Moment(NOW)
    seen = turn(book, opened)
    book.wait(opened.id, seen, Turn(NOW + 60, 3, NOW, "refused", Priority.UPLOAD))
    book.put_part("u", part(2, "p2"), NOW + 1)
    assert turn(book, opened).due_at == NOW + 60
    assert [one.number for one in book.unsent_parts(opened.id, 10)] == [1, 2]
    assert [one.number for one in book.unsent_parts(opened.id, 1)] == [1]


def test_what_the_origin_is_completing_is_not_aborted(book: Book) -> None:
    """Nor expires; but what has not been asked for yet may be, for it waits, and what nobody knows the outcome of."""
    before = book.acknowledge(pending(KEYS[0], "before"))
    opened = opened_with(book, KEYS[0], 1)
    assert book.complete_at_origin(replace(made_of(opened, 1), asked_as="a"))
    assert not book.is_being_completed(of(book.upload("u")))
    book.settle(before.id, '"before"', NOW)
    assert book.is_being_completed(of(book.upload("u")))
    assert not book.abort("u", NOW)
    assert len(list(book.parts(opened.id))) == 1
    book.answer(opened.id, "ServiceUnavailable", is_over=False)
    assert book.abort("u", NOW)
    assert book.upload("u") is None


def test_complete_keeps_the_chosen_parts_and_gives_the_others_back(book: Book) -> None:
    """The parts that Complete lists are the object; its upload is over, and remembered; the row is the same one."""
    opened = opened_with(book, KEYS[0], 1, 2, 5)
    made = made_of(opened, 1, 5)
    stored = of(book.complete(made))
    assert stored.id == opened.id
    assert book.latest(KEYS[0]) == replace(stored, parts=())
    assert list(book.parts(stored.id)) == list(made.parts)
    assert book.complete(made) is None
    assert book.freed == ["p2"]
    assert book.upload("u") is None
    expected = Ended("u", KEYS[0], made.acknowledged_at, made.etag, "these parts", made.checksums)
    assert book.ended("u") == expected
    book.settle(stored.id, made.etag, NOW)
    assert book.ended("u") == expected
    book.forget_ended(made.acknowledged_at + ENDED_KEPT_SECONDS + 1)
    assert book.ended("u") is None


@pytest.mark.parametrize("at_origin", [False, True])
def test_a_part_that_was_replaced_meanwhile_makes_no_object(book: Book, *, at_origin: bool) -> None:
    """Complete names the bytes that it has seen: with others it would be another object."""
    opened = opened_with(book, KEYS[0], 1)
    made = made_of(opened, 1)
    book.put_part("u", part(1, "later"), NOW)
    assert not (book.complete_at_origin(made) if at_origin else book.complete(made))
    assert of(book.upload("u")).state is State.OPEN


def test_of_two_uploads_that_were_begun_for_one_write_the_first_counts(book: Book) -> None:
    """The other one is to go, and so is one for a write that is over, or is a person's to decide."""
    opened, asked = book.open_upload(upload("u", KEYS[0])), Asked(0, Moment(NOW))
    first, second, third = (book.ask(KEYS[0], "slot", asked) for _ in range(3))
    assert of(book.begun(opened.id, "o1", first)).origin_upload_id == "o1"
    assert of(book.begun(opened.id, "o2", second)).origin_upload_id == "o1"
    assert [one.origin_upload_id for one in book.aborting()] == ["o2", None]
    book.abort("u", NOW)
    assert book.begun(opened.id, "o3", third) is None
    assert {one.origin_upload_id for one in book.aborting()} == {"o1", "o2", "o3"}
    assert all(turn(book, one).due_at is not None for one in book.aborting())


def test_what_a_dead_process_asked_for_is_suspected_once(book: Book) -> None:
    """Of its own worker slot; and looked for when it has been carried out, or never will be."""
    mine, other = (book.ask(KEYS[0], "slot", Asked(worker, Moment(NOW))) for worker in (1, 2))
    assert [turn(book, one).due_at for one in book.asked(KEYS[0])] == [None, None]
    book.suspect_all(Moment(NOW + 5), 1)
    book.suspect_all(Moment(NOW + 9), 1)
    assert of(book.write(mine)).asked == Asked(1, Moment(NOW), Moment(NOW + 5))
    assert turn(book, of(book.write(mine))).due_at == NOW + 5 + CARRIED_OUT_SECONDS
    assert of(book.write(other)).asked == Asked(2, Moment(NOW))
    book.suspect_all(Moment(NOW + 9))
    assert of(book.write(other)).asked == Asked(2, Moment(NOW), Moment(NOW + 9))


def test_uploads_are_listed_in_order(book: Book) -> None:
    """By key in the order of UTF-8, then by id; from behind any pair, and under any prefix."""
    names = [("b", "u1"), ("a/1", "u2"), ("a/1", "u3"), ("é", "u4"), ("a/2", "u5")]
    for name, upload_id in names:
        book.open_upload(upload(upload_id, key(name)))
    listed = [(one.fixed.key.key, one.upload_id) for one in book.uploads("bucket")]
    assert listed == [("a/1", "u2"), ("a/1", "u3"), ("a/2", "u5"), ("b", "u1"), ("é", "u4")]
    assert [one.upload_id for one in book.uploads("bucket", "a/", ("a/1", "u2"))] == ["u3", "u5"]
    assert list(book.uploads("other")) == []


# What is pending, and what follows it


def test_an_overwritten_object_is_given_up_with_its_upload_at_the_origin(book: Book) -> None:
    """Of a hundred overwrites the last is pending; what the origin holds of the others is to be aborted there."""
    for number in range(100):
        object_ = pending(KEYS[0], f"v{number}", origin_upload_id=f"o{number}")
        book.acknowledge(replace(object_, base=Base((f'"{number}"',))))
    latest = of(book.latest(KEYS[0]))
    assert latest.etag == staged("v99").etag
    assert latest.base == Base(('"0"',))
    assert len(book.waiting(0, 1000)) == 1
    assert len(book.freed) == 99
    assert {one.origin_upload_id for one in book.aborting()} == {f"o{number}" for number in range(99)}


def test_uploads_that_are_to_go_are_known_until_the_origin_has_none_such(book: Book) -> None:
    """They are nobody else's, who lists the origin's uploads of the key."""
    assert not book.are_any_aborting()
    book.acknowledge(pending(KEYS[0], "a", origin_upload_id="o"))
    book.acknowledge(pending(KEYS[0], "b"))
    assert book.origin_upload_ids(KEYS[0]) == {"o", None}
    [doomed] = book.aborting()
    assert book.are_any_aborting()
    book.forget(doomed.id)
    assert book.origin_upload_ids(KEYS[0]) == {None}
    assert not book.are_any_aborting()


def test_only_what_is_to_go_is_forgotten(book: Book) -> None:
    """An acknowledged write is no upload of the origin's."""
    stored = book.acknowledge(pending(KEYS[0], "a"))
    book.forget(stored.id)
    assert book.latest(KEYS[0]) is not None


def test_the_newest_is_what_was_acknowledged_last(book: Book) -> None:
    """Of what is still pending; nothing has the sequence 0."""
    assert book.newest() == 0
    first, second = book.acknowledge(pending(key("b"), "b")), book.acknowledge(pending(key("a"), deleted=True))
    assert book.newest() == second.sequence > first.sequence
    book.discard(second.id, NOW, only_conflict=False)
    assert book.newest() == first.sequence


def test_what_may_have_reached_the_origin_is_settled_before_what_follows(book: Book) -> None:
    """An object that is being sent is not given up when it is overwritten, and its successor expects its version."""
    sent = book.acknowledge(pending(KEYS[0], "one"))
    assert book.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    following = book.acknowledge(pending(KEYS[0], "two"))
    assert [one.sequence for one in book.waiting(0, 10)] == [sent.sequence, following.sequence]
    assert turn(book, following) == Turn(None, after_sequence=sent.sequence)
    book.settle(sent.id, '"one"', NOW)
    assert of(book.earliest(KEYS[0])) == replace(following, base=Base(('"one"',)), parts=())
    assert turn(book, following).due_at == NOW


def test_what_is_not_as_it_was_taken_for_is_not_changed(book: Book) -> None:
    """Somebody else was there before."""
    sent = book.acknowledge(pending(KEYS[0], "one"))
    assert not book.change(replace(sent, state=State.COMMITTED), State.PUBLISHING)
    book.settle(sent.id, None, NOW)
    assert not book.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)


@pytest.mark.parametrize(("asked_at", "expected"), [(40.0, '"own"'), (60.0, '"other"')])
def test_what_this_gateway_has_written_since_is_no_surprise(book: Book, asked_at: float, expected: str) -> None:
    """The flush expects what an own flush has left since the origin was asked; what was asked later holds."""
    settled = book.acknowledge(pending(KEYS[0], "one"))
    book.settle(settled.id, '"own"', 50.0)
    stored = book.acknowledge(replace(pending(KEYS[0], "two"), base=Base(('"other"',), asked_at=asked_at)))
    assert stored.base.etags == (expected,)


def test_where_the_origin_could_not_be_asked_what_this_gateway_has_put_there_is_expected(book: Book) -> None:
    """And what is older than the question; who knows what a forwarded request has left."""
    unknown = Base(known=False, asked_at=60.0)
    book.did(KEYS[0], OwnDoing(50.0, '"own"'))
    assert book.acknowledge(replace(pending(KEYS[0], "one"), base=unknown)).base == replace(unknown, etags=('"own"',))
    book.did(KEYS[1], OwnDoing(70.0, known=False))
    assert book.acknowledge(replace(pending(KEYS[1], "one"), base=unknown)).base == unknown
    for own in (OwnDoing(50.0, '"own"'), OwnDoing(55.0, known=False), OwnDoing(70.0, known=False)):
        book.did(KEYS[2], own)  # a deletion, say, that was answered 503
    assert book.acknowledge(replace(pending(KEYS[2], "one"), base=unknown)).base == replace(unknown, etags=('"own"',))


def test_what_follows_a_complete_at_the_origin_expects_its_version(book: Book) -> None:
    """Acknowledged while its client was waiting, it would take it for somebody else's."""
    opened = opened_with(book, KEYS[0], 1)
    assert book.complete_at_origin(made_of(opened, 1))
    following = book.acknowledge(pending(KEYS[0], "two"))
    assert turn(book, following).after_sequence == of(book.write(opened.id)).sequence
    book.completed(opened.id, '"made there"', NOW)
    assert of(book.latest(KEYS[0])).base == Base(('"made there"',))
    assert turn(book, following).due_at == NOW
    assert book.own_doing(KEYS[0]) == OwnDoing(NOW, '"made there"')
    assert of(book.latest(KEYS[0])) == replace(following, base=Base(('"made there"',)), parts=())


def test_what_is_behind_a_complete_that_comes_to_nothing_expects_what_was_before_it(book: Book) -> None:
    """The one before has settled since, and the Complete's condition has not held."""
    sent = book.acknowledge(pending(KEYS[0], "one"))
    book.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    opened = opened_with(book, KEYS[0], 1)
    assert book.complete_at_origin(made_of(opened, 1))
    following = book.acknowledge(pending(KEYS[0], "two"))
    book.settle(sent.id, '"one"', NOW)
    book.answer(opened.id, "PreconditionFailed", is_over=True)
    assert of(book.earliest(KEYS[0])).id == following.id
    assert of(book.latest(KEYS[0])).base == Base(('"one"',))
    assert turn(book, following).due_at is not None


def test_an_upload_that_is_completed_here_after_all_keeps_nobody_waiting(book: Book) -> None:
    """It was to be completed at the origin, and has another place in the order now."""
    opened = opened_with(book, KEYS[0], 1)
    made = made_of(opened, 1)
    assert book.complete_at_origin(made)
    in_order = book.acknowledge(replace(pending(KEYS[1], "x"), in_order=True))
    assert turn(book, in_order).due_at is None
    completed = of(book.complete(made))
    assert (completed.state, completed.sequence > in_order.sequence) == (State.PUBLISHING, True)
    assert turn(book, in_order).due_at is not None


def test_an_upload_whose_complete_came_to_nothing_is_open_still(book: Book) -> None:
    """With its parts, for whoever goes on with it; while nobody knows, it is looked for."""
    opened = opened_with(book, KEYS[0], 1, 2)
    made = replace(made_of(opened, 1), conditions={"if-none-match": "*"}, asked_as="a", touched=Moment(NOW))
    assert book.complete_at_origin(made)
    assert turn(book, opened) == Turn(NOW, priority=Priority.URGENT)
    book.answer(opened.id, "ServiceUnavailable", is_over=False)
    asked = of(book.write(opened.id, with_parts=False))
    assert (asked.state, asked.answer, asked.is_completed_at_origin) == (State.PUBLISHING, "ServiceUnavailable", True)
    book.answer(opened.id, "PreconditionFailed", is_over=True)
    again = of(book.upload("u"))
    assert (again.state, again.answer, again.sequence) == (State.OPEN, "PreconditionFailed", 0)
    assert [one.number for one in book.parts(opened.id)] == [1, 2]
    assert turn(book, opened).priority is Priority.UPLOAD
    assert book.counts() == (0, 1)


def test_nothing_waits_for_ever_for_a_complete_of_which_nobody_knows(book: Book) -> None:
    """When it has left the order, what was behind it begins; and should it be found after all, that is no surprise."""
    opened = opened_with(book, KEYS[0], 1)
    book.complete_at_origin(made_of(opened, 1))
    following = book.acknowledge(replace(pending(KEYS[0], "two"), base=Base(('"old"',))))
    book.leave_order(opened.id, NOW)
    assert turn(book, following).due_at == NOW
    assert of(book.write(opened.id)).is_completed_at_origin
    book.completed(opened.id, '"made there"', NOW)
    assert of(book.latest(KEYS[0])).base == Base(('"old"', '"made there"'))
    assert book.upload("u") is None


def test_a_later_forwarded_change_is_not_taken_for_the_complete_before_it(book: Book) -> None:
    """What was done last counts."""
    opened = opened_with(book, KEYS[0], 1)
    book.complete_at_origin(made_of(opened, 1))
    book.did(KEYS[0], OwnDoing(NOW + 1, known=False))
    book.completed(opened.id, '"e"', NOW)
    assert book.own_doing(KEYS[0]) == OwnDoing(NOW + 1, known=False)


def test_a_copy_keeps_the_files_that_it_shares(book: Book) -> None:
    """Files go with the last object that is made of them."""
    one = part(1, "shared")
    first = book.acknowledge(pending(KEYS[0], parts=(one,)))
    second = book.acknowledge(pending(KEYS[1], parts=(one,)))
    book.settle(first.id, None, 50.0)
    assert book.freed == []
    assert book.knows_file(one.file.name)
    book.discard(second.id, NOW, only_conflict=False)
    assert book.freed == [one.file.name]
    assert not book.knows_file(one.file.name)


def test_sequences_are_never_given_twice(book: Book) -> None:
    """Also when the last one is gone: what a sequence means is for ever, and so is an id."""
    first = book.acknowledge(pending(KEYS[0]))
    book.discard(first.id, NOW, only_conflict=False)
    second = book.acknowledge(pending(KEYS[0]))
    assert second.sequence > first.sequence
    assert second.id > first.id


# Deletions


def test_a_deletion_of_what_the_origin_never_had_keeps_nobody_waiting(book: Book) -> None:
    """What was pending goes, with its bytes; what others may have written there meanwhile is looked at later."""
    stored = book.acknowledge(pending(KEYS[0], "x"))  # nothing was there before
    assert book.bury(pending(KEYS[0], deleted=True)) is None
    assert (book.living([stored.id]), book.freed) == (set(), ["x"])
    buried = of(book.latest(KEYS[0]))
    assert (buried.deleted, buried.base.is_nothing, turn(book, buried).priority) == (True, True, Priority.URGENT)


def test_a_deletion_behind_what_has_just_been_flushed_is_carried_out(book: Book) -> None:
    """It was pending when somebody looked: the origin has it now."""
    stored = book.acknowledge(pending(KEYS[0], "x"))
    book.settle(stored.id, stored.etag, NOW)
    assert of(book.bury(pending(KEYS[0], deleted=True))).base == Base((stored.etag,))


def test_a_deletion_of_what_the_origin_may_have_is_carried_out_there(book: Book) -> None:
    """Of something that was there before, or that is just on its way there; before all that nobody waits for."""
    book.acknowledge(replace(pending(KEYS[0], "x"), base=Base(('"old"',))))
    buried = of(book.bury(pending(KEYS[0], deleted=True)))
    assert (buried.base, turn(book, buried).priority) == (Base(('"old"',)), Priority.URGENT)
    sent = book.acknowledge(pending(KEYS[1], "y"))
    book.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    buried = of(book.bury(pending(KEYS[1], deleted=True)))
    assert turn(book, buried).after_sequence == sent.sequence
    assert of(book.latest(KEYS[1])).deleted


def test_a_deletion_decides_no_conflict(book: Book) -> None:
    """What is in conflict stays, for a person."""
    stored = book.acknowledge(pending(KEYS[0], "x"))
    book.keep(stored.id, "others")
    with pytest.raises(InConflict):
        book.bury(pending(KEYS[0], deleted=True))
    assert of(book.latest(KEYS[0])).state is State.CONFLICT


# Conflicts and damage


def test_only_what_was_acknowledged_comes_into_conflict(book: Book) -> None:
    """And nothing looks at it before somebody has decided."""
    opened = opened_with(book, KEYS[0], 1)
    assert not book.keep(opened.id, "others")
    stored = book.acknowledge(pending(KEYS[1], "x"))
    assert book.keep(stored.id, "others")
    assert turn(book, stored) == Turn(None, last_error="others")
    assert book.oldest("slot") is None
    assert not book.overwrite(opened.id, Base(), NOW)
    assert book.overwrite(stored.id, Base(('"theirs"',)), NOW)
    assert turn(book, stored) == Turn(NOW, priority=Priority.URGENT)
    assert of(book.latest(KEYS[1])).base == Base(('"theirs"',))


def test_what_may_have_arrived_is_expected_when_it_was_given_up(book: Book) -> None:
    """What follows it finds it, or what was there before it; and what comes later cannot know."""
    sent = book.acknowledge(replace(pending(KEYS[0], "one"), base=Base(('"old"',))))
    book.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    book.acknowledge(pending(KEYS[0], "two"))
    assert book.discard(sent.id, NOW, only_conflict=False)
    assert of(book.latest(KEYS[0])).base == Base(('"old"', sent.etag))
    assert book.own_doing(KEYS[0]) == OwnDoing(NOW, known=False)


def test_a_write_begun_anew_is_sent_anew(book: Book) -> None:
    """The origin's upload of no use is to go; parts that are here are sent again, others cannot be."""
    opened = opened_with(book, KEYS[0], 1)
    elsewhere = part(2, "p2")
    elsewhere = replace(elsewhere, file=replace(elsewhere.file, name=""), origin_etag='"p2"')
    book.put_part("u", elsewhere, NOW)
    book.begun(opened.id, "o", book.ask(KEYS[0], "slot", Asked(0, Moment(NOW))))
    book.part_sent(opened.id, replace(part(1, "p1"), origin_etag='"p1"'))
    assert book.unsent_parts(opened.id, 10) == []
    book.start_over(opened.id, NOW)
    assert of(book.write(opened.id)).origin_upload_id is None
    assert [one.number for one in book.unsent_parts(opened.id, 10)] == [1]
    assert [one.origin_upload_id for one in book.aborting()] == ["o"]


@pytest.mark.parametrize("table", ["files", "writes", "parts"])
def test_a_changed_row_is_never_believed(book: Book, table: str) -> None:
    """A flipped bit in any record, or a record under another key, is BufferDamaged."""
    opened = opened_with(book, KEYS[0], 1)
    stored = book.acknowledge(pending(KEYS[1], parts=(part(1, "q"),)))
    packed = bytearray(book._rows.execute(f"SELECT record FROM {table}").fetchone()[0])
    packed[len(packed) // 2] ^= 1
    book._rows.execute(f"UPDATE {table} SET record = ?", (bytes(packed),))
    with pytest.raises(BufferDamaged):
        (book.write(opened.id), book.write(stored.id))


def test_a_damaged_row_is_given_up_by_a_person_alone(book: Book) -> None:
    """Until then it is set aside, till the next start; what waits for it goes on when it is gone."""
    stored = book.acknowledge(pending(KEYS[0], "x"))
    book.change(replace(stored, state=State.PUBLISHING), State.COMMITTED)
    following = book.acknowledge(pending(KEYS[0], "y"))
    book._rows.execute("UPDATE writes SET record = zeroblob(50) WHERE id = ?", (stored.id,))
    book.set_aside(stored.id, "it is damaged")
    assert turn(book, stored) == Turn(None, last_error="it is damaged", damaged=True)
    book.begin_epoch(NOW)
    assert (turn(book, stored).due_at, turn(book, stored).damaged) == (NOW, False)
    assert turn(book, following).due_at is None
    assert book.discard(stored.id, NOW, only_conflict=True)
    assert "x" in book.freed
    assert turn(book, following).due_at == NOW
    assert book.usage("slot").objects == 1


def test_a_new_epoch_leaves_conflicts_alone(book: Book) -> None:
    """They are a person's; and each start has a number of its own."""
    stored = book.acknowledge(pending(KEYS[0], "x"))
    book.keep(stored.id, "others")
    node, epoch = book.node()
    book.begin_epoch(NOW)
    assert book.node() == (node, epoch + 1)
    assert turn(book, stored).due_at is None


# Whose turn it is


def test_what_is_due_comes_by_lane_and_priority_in_the_order_of_its_time(book: Book) -> None:
    """Nothing that waits, sleeps, is in conflict or over; a lane is a bucket of a slot."""
    small = [
        book.acknowledge(replace(pending(key(name), name), acknowledged_at=at)) for name, at in (("b", 2.0), ("a", 1.0))
    ]
    large = book.acknowledge(replace(pending(key("large"), "l"), size_bytes=2**30, acknowledged_at=1.0))
    gone = book.acknowledge(pending(key("gone"), deleted=True))
    book.wait(gone.id, turn(book, gone), Turn(NOW + 1, 1, NOW, "refused", Priority.URGENT))
    opened_with(book, key("open"), 1)
    kept = book.acknowledge(pending(key("kept"), "k"))
    book.keep(kept.id, "others")
    assert book.lanes() == [LANE]
    assert [one.key.key for one in book.due(LANE, Priority.SMALL, NOW, 10)] == ["a", "b"]
    assert [one.id for one in book.due(LANE, Priority.SMALL, NOW, 1)] == [small[1].id]
    assert [one.id for one in book.due(LANE, Priority.LARGE, NOW, 10)] == [large.id]
    assert book.due(LANE, Priority.URGENT, NOW, 10) == []
    assert [one.id for one in book.due(LANE, Priority.URGENT, NOW + 1, 10)] == [gone.id]
    assert [one.key.key for one in book.due(LANE, Priority.UPLOAD, NOW, 10)] == ["open"]
    assert book.due(("slot", "other"), Priority.SMALL, NOW, 10) == []
    assert book.living([small[0].id, kept.id, 10_000]) == {small[0].id, kept.id}


def test_who_fails_again_does_not_sleep_through_what_was_asked_meanwhile(book: Book) -> None:
    """Somebody has had it be due anew while it was looked at: what has come to nothing is looked at again at once."""
    opened = opened_with(book, KEYS[0], 1)
    seen = turn(book, opened)
    book.put_part("u", part(2, "p2"), NOW + 5)
    book.wait(opened.id, seen, Turn(NOW + 600, priority=Priority.UPLOAD))
    assert turn(book, opened).due_at == NOW + 5
    book.rest(opened.id, turn(book, opened), Turn(NOW + 600, priority=Priority.UPLOAD))
    assert turn(book, opened).due_at == NOW + 5  # its next part is due
    for number in (1, 2):
        book.part_sent(opened.id, replace(part(number, f"p{number}"), origin_etag='"e"'))
    book.rest(opened.id, turn(book, opened), Turn(NOW + 600, priority=Priority.UPLOAD))
    assert turn(book, opened).due_at == NOW + 600


def test_what_waits_for_another_is_not_woken_by_its_own_pause(book: Book) -> None:
    """It was looked at when something took its place before it."""
    sent = book.acknowledge(pending(KEYS[0], "one"))
    book.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    following = book.acknowledge(pending(KEYS[0], "two"))
    book.wait(following.id, Turn(NOW), Turn(NOW + 1, 1, NOW, "x", Priority.RETRY))
    assert turn(book, following) == Turn(None, after_sequence=sent.sequence)


def test_who_waits_for_a_write_hurries_all_that_it_waits_for(book: Book) -> None:
    """Through chains and markers; what has failed is due at once; and nothing else is hurried."""
    sent = book.acknowledge(pending(key("d/x"), "one"))
    book.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    book.wait(sent.id, turn(book, sent), Turn(NOW + 60, 3, NOW, "refused", Priority.RETRY))
    shard = book.acknowledge(pending(key("d/x"), "two"))
    marker = book.acknowledge(replace(pending(key("d/_SUCCESS"), "m"), behind="d/"))
    other = book.acknowledge(pending(key("e"), "x"))
    book.has_due = False
    seen = turn(book, sent)
    book.hurry(key("d/_SUCCESS"), NOW)
    assert book.has_due
    priorities = [turn(book, one).priority for one in (sent, shard, marker, other)]
    assert priorities == [Priority.URGENT] * 3 + [Priority.SMALL]
    assert turn(book, sent).due_at == NOW
    assert turn(book, marker).due_at is None
    book.wait(sent.id, seen, Turn(NOW + 60, 4, NOW, "refused", Priority.RETRY))
    assert turn(book, sent).priority is Priority.URGENT  # somebody waits since it was taken up


def test_what_has_failed_is_tried_now(book: Book) -> None:
    """Under a prefix, or everywhere; what has not failed, or is due, is as it was; nothing is hurried that waits."""
    failed = [book.acknowledge(pending(key(name), name)) for name in ("a/1", "a/2", "b", "ab")]
    for one in failed:
        book.wait(one.id, turn(book, one), Turn(NOW + 60, 2, NOW, "refused", Priority.RETRY))
    well = opened_with(book, key("a/3"))
    book.rest(well.id, turn(book, well), Turn(NOW + 600, priority=Priority.UPLOAD))
    book.try_now("bucket", "a/", NOW)
    assert [turn(book, one).due_at for one in failed] == [NOW, NOW, NOW + 60, NOW + 60]
    assert turn(book, well).due_at == NOW + 600
    book.try_now("other", "", NOW)
    assert turn(book, failed[2]).due_at == NOW + 60
    book.try_now("", "", NOW)
    assert {turn(book, one).due_at for one in failed} == {NOW}
    assert turn(book, failed[0]).attempts == 2


def test_a_clock_that_went_back_puts_nothing_off(book: Book) -> None:
    """What no clock of now can have said is due now; what may sleep that long sleeps on; what has ended stays. What has
    not been tried yet sleeps for no second."""
    ends = (
        NOW + RETRY_SECONDS_MAX + 1,
        NOW + RETRY_SECONDS_MAX,
        NOW + UPLOAD_SECONDS_MAX + 1,
        NOW + UPLOAD_SECONDS_MAX,
    )
    writes = [book.acknowledge(pending(key(name), name)) for name in "ab"]
    writes += [book.open_upload(upload(name, key(name))) for name in "cd"]
    for one, due_at in zip(writes, ends, strict=True):
        book.wait(one.id, turn(book, one), Turn(due_at, 1, NOW, "refused", Priority.RETRY))
    book.open_upload(upload("over", key("over")))
    book.abort("over", NOW)
    fresh = book.acknowledge(replace(pending(key("fresh"), "fresh"), acknowledged_at=NOW + 1))
    completing = opened_with(book, key("completing"), 1, upload_id="waited for")
    made = replace(made_of(completing, 1), touched=Moment(NOW + RETRY_SECONDS_MAX + 1))
    assert book.complete_at_origin(made)
    assert turn(book, fresh).due_at == NOW + 1
    book.set_right(NOW)
    assert {turn(book, one).due_at for one in (fresh, completing)} == {NOW}
    assert [turn(book, one).due_at for one in writes] == [NOW, ends[1], NOW, ends[3]]
    assert book.ended("over") is not None


def test_what_the_origin_was_asked_for_too_long_ago_is_suspected(book: Book) -> None:
    """Its process lives, and could not write down what came of it."""
    asked = [book.ask(KEYS[0], "slot", Asked(0, Moment(NOW + later))) for later in (0.0, 2.0)]
    book.set_right(Moment(NOW + ASKED_SECONDS_MAX + 1))
    suspects = [one.id for one in book.asked(KEYS[0]) if one.asked is not None and one.asked.suspect is not None]
    assert suspects == asked[:1]


# What is not kept for ever


def test_what_has_ended_is_forgotten_a_day_later_and_bounded(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at once: writers wait meanwhile. Of more than are remembered the oldest go."""
    for number in range(30):
        book.open_upload(upload(f"u{number}", KEYS[0]))
        book.abort(f"u{number}", NOW + number)
    late = NOW + ENDED_KEPT_SECONDS + 10.5
    assert book.forget_ended(late, 8)
    assert not book.forget_ended(late, 8)
    assert [number for number in range(30) if book.ended(f"u{number}")] == list(range(11, 30))
    monkeypatch.setattr(book_module, "ENDED_MAX", 5)
    while book.forget_ended(late, 8):
        pass
    assert [number for number in range(30) if book.ended(f"u{number}")] == list(range(25, 30))


def test_own_doings_are_forgotten_when_nobody_can_ask_for_them(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an upload of the key is open, somebody still can; and they are bounded even so."""
    for number in range(20):
        book.did(key(f"k{number:02}"), OwnDoing(NOW + number, '"e"'))
    book.open_upload(upload("u", key("k03")))
    late = NOW + OWN_DOING_KEPT_SECONDS + 10
    while book.forget_ended(late, 4):
        pass
    left = [number for number in range(20) if book.own_doing(key(f"k{number:02}")) is not None]
    assert left == [3, *range(10, 20)]
    monkeypatch.setattr(rows, "OWN_DOINGS_MAX", 4)
    while book.forget_ended(late, 4):
        pass
    assert [number for number in range(20) if book.own_doing(key(f"k{number:02}")) is not None] == [16, 17, 18, 19]


def test_what_is_known_of_a_buckets_conditions_outlives_what_says_nothing_of_them(book: Book) -> None:
    """An answer to a write tells of ETags, and a probe of conditions."""
    conditions = Conditions(Honoured.YES, Honoured.IGNORED, Honoured.REFUSED, 5.0)
    book.learn("bucket", Profile(True, True, 1.0, conditions))
    book.learn("bucket", Profile(False, True, 2.0))
    assert book.profile("bucket") == Profile(False, True, 2.0, conditions)
    newer = replace(conditions, put=Honoured.REFUSED, learned_at=6.0)
    book.learn("bucket", Profile(False, True, 2.0, newer))
    assert book.profiles() == [("bucket", Profile(False, True, 2.0, newer))]


def test_what_a_probe_finds_and_what_a_write_tells_do_not_undo_each_other(book: Book) -> None:
    """A write has learned meanwhile that the bucket's ETags are no MD5s."""
    book.learn("bucket", Profile(True, True, 1.0))
    book.learn("bucket", Profile(False, True, 2.0))
    found = Conditions(Honoured.YES, Honoured.YES, Honoured.YES, 3.0)
    book.learn_conditions("bucket", found)
    assert book.profile("bucket") == Profile(False, True, 2.0, found)
    book.learn_conditions("unknown", found)
    assert book.profile("unknown") is None


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (OwnDoing(NOW, '"past"'), Base(('"old"', '"past"'))),
        (OwnDoing(NOW, None), Base(('"old"',), absent=True)),
        (OwnDoing(NOW, known=False), Base(('"old"',))),
    ],
)
def test_what_this_gateway_has_put_there_past_a_pending_write_is_no_others(
    book: Book, own: OwnDoing, expected: Base
) -> None:
    """Two of its clients write a key at once: one is absorbed, the other goes through."""
    stored = book.acknowledge(replace(pending(KEYS[0], "x"), base=Base(('"old"',))))
    book.changed_past(KEYS[0], own)
    assert of(book.latest(KEYS[0])).base == expected
    assert book.own_doing(KEYS[0]) == own
    book.change(replace(stored, state=State.PUBLISHING), State.COMMITTED)
    book.changed_past(KEYS[0], OwnDoing(NOW, '"later"'))
    assert of(book.latest(KEYS[0])).base == stored.base  # it may be there: who knows which came first


def test_what_is_known_of_an_origin_and_is_damaged_is_not_known(book: Book) -> None:
    """It is learned anew; no write, and no look at the status, fails of it."""
    book.learn("bucket", Profile(True, True, 1.0))
    book.learn("other", Profile(True, True, 1.0))
    book.did(KEYS[0], OwnDoing(NOW, '"e"'))
    book._rows.execute("UPDATE profiles SET record = zeroblob(50) WHERE bucket = 'bucket'")
    book._rows.execute("UPDATE origin SET record = zeroblob(50)")
    assert book.profile("bucket") is None
    assert [bucket for bucket, _ in book.profiles()] == ["other"]
    own = book.own_doing(KEYS[0])
    assert own is not None  # the origin is asked what it has
    assert not own.known
    assert own.seconds_after(Moment(NOW + 1e9)) >= 0
    stored = book.acknowledge(pending(KEYS[0], "x"))
    assert stored.base == pending(KEYS[0], "x").base
    book.settle(stored.id, '"e"', NOW)
    assert book.own_doing(KEYS[0]) == OwnDoing(NOW, '"e"')
    book.learn("bucket", Profile(True, False, 2.0))
    assert book.profile("bucket") == Profile(True, False, 2.0)


def test_an_own_object_of_parts_is_known_as_long_as_it_may_be_taken_for_anothers(book: Book) -> None:
    """S3 dates it by the beginning of its upload, which may be days before others' of the same date are completed."""
    book.did(KEYS[0], OwnDoing.now(Moment(NOW, 5.0, "boot"), '"e-2"'))
    book.did(KEYS[1], OwnDoing.now(Moment(NOW, 5.0, "boot"), '"e"'))
    for later, left in (
        (OWN_DOING_KEPT_SECONDS + 10, 1),
        (DATED_EARLIER_SECONDS_MAX - 10, 1),
        (DATED_EARLIER_SECONDS_MAX + 10, 0),
    ):
        book.forget_ended(Moment(NOW + later, 5.0 + later, "boot"))
        assert book.own_doings() == left


def test_what_is_done_to_an_origin_and_is_damaged_is_forgotten_in_time(book: Book) -> None:
    book.did(KEYS[0], OwnDoing(NOW, '"e"'))
    book._rows.execute("UPDATE origin SET record = zeroblob(50)")
    book.forget_ended(NOW + OWN_DOING_KEPT_SECONDS + 10)
    assert book.own_doings() == 0


def test_places_fit_the_file() -> None:
    """Whatever a key is called."""
    assert all(0 <= place_of(key(name)) < PLACES for name in ("", "\ud800", "x" * 1024))
