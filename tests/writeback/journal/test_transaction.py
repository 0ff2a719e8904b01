"""What each change of the journal promises; whatever histories they make, the simulation judges."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, InConflict, PartInUse
from gateway.core.model import ObjectKey
from gateway.writeback.journal import buckets, transaction
from gateway.writeback.journal.buckets import (
    DATED_EARLIER_SECONDS_MAX,
    LAST_OWN_WRITE_KEPT_SECONDS,
    BucketCapabilities,
    Conditions,
    Honoured,
    LastOwnWrite,
)
from gateway.writeback.journal.files import Usage
from gateway.writeback.journal.records import (
    CreateAttempt,
    ExpectedVersion,
    Priority,
    State,
    Turn,
    UploadOutcome,
    Write,
)
from gateway.writeback.journal.schema import prepare
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.turns import RETRY_SECONDS_MAX, UPLOAD_SECONDS_MAX
from gateway.writeback.journal.uploads import ASKED_SECONDS_MAX, CARRIED_OUT_SECONDS
from gateway.writeback.journal.writes import ENDED_KEPT_SECONDS
from gateway.writeback.pending_key_filter import HASH_SLOTS, hash_slot_of
from tests.support.writeback import PlainPresence, key, part, pending, spec, staged, upload

KEYS = [key(name) for name in ("a", "a/b", "é", "z")]
NOW = 1000.0
LANE = ("slot", "bucket")


@pytest.fixture
def tx() -> Iterator[JournalTransaction]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        yield JournalTransaction(connection, PlainPresence())


def of(write: Write | None) -> Write:
    assert write is not None
    return write


def turn(tx: JournalTransaction, write: Write) -> Turn:
    found = tx.turns.of(write.id)
    assert found is not None
    return found


def made_of(opened: Write, *numbers: int) -> Write:
    """What Complete says of an upload, of parts that are called as they are numbered."""
    parts = [part(number, f"p{number}") for number in numbers]
    new = pending(opened.key, parts=parts, multipart=True)
    return replace(new, upload_id=opened.upload_id, completed_of="these parts")


def opened_with(tx: JournalTransaction, at: ObjectKey, *numbers: int, upload_id: str = "u") -> Write:
    opened = tx.uploads.begin(upload(upload_id, at))
    for number in numbers:
        assert tx.uploads.put_part(upload_id, part(number, f"p{number}"), Moment(NOW))
    return opened


# Uploads and their parts


def test_a_part_replaces_the_one_of_its_number(tx: JournalTransaction) -> None:
    """The client sees the later part, and the earlier one's file is given back."""
    opened = tx.uploads.begin(upload("u", KEYS[0]))
    first, second = part(1, "first"), part(1, "second")
    assert tx.uploads.put_part("u", first, Moment(NOW))
    assert tx.uploads.put_part("u", second, Moment(NOW))
    assert list(tx.parts.of(opened.id)) == [second]
    assert tx.files.freed == [first.file.name]


def test_a_part_of_no_upload_is_refused(tx: JournalTransaction) -> None:
    """NoSuchUpload, for uploads that never were and for those that are over; nothing is kept of it."""
    assert not tx.uploads.put_part("u", part(1, "p"), Moment(NOW))
    tx.uploads.begin(upload("u", KEYS[0]))
    tx.uploads.abort("u", Moment(NOW))
    assert not tx.uploads.put_part("u", part(1, "p"), Moment(NOW))
    assert not tx.files.knows(part(1, "p").file.name)


def test_a_part_has_its_upload_be_looked_at(tx: JournalTransaction) -> None:
    """It may go ahead; but not where the upload has just failed, which has a time of its own."""
    opened = opened_with(tx, KEYS[0], 1)
    assert turn(tx, opened).due_at == NOW
    assert of(tx.uploads.upload("u")).touched == Moment(NOW)
    seen = turn(tx, opened)
    tx.turns.wait(opened.id, seen, Turn(NOW + 60, 3, NOW, "refused", Priority.UPLOAD))
    tx.uploads.put_part("u", part(2, "p2"), Moment(NOW + 1))
    assert turn(tx, opened).due_at == NOW + 60
    assert [one.number for one in tx.parts.unsent(opened.id, 10)] == [1, 2]
    assert [one.number for one in tx.parts.unsent(opened.id, 1)] == [1]


def test_what_the_origin_is_completing_is_not_aborted(tx: JournalTransaction) -> None:
    """Nor expires; but what has not been asked for yet may be, for it waits, and what nobody knows the outcome of."""
    before = tx.writes.acknowledge(pending(KEYS[0], "before"))
    opened = opened_with(tx, KEYS[0], 1)
    assert tx.uploads.complete_at_origin(replace(made_of(opened, 1), asked_as="a"))
    assert not tx.uploads.is_being_completed(of(tx.uploads.upload("u")))
    tx.writes.settle(before.id, '"before"', Moment(NOW))
    assert tx.uploads.is_being_completed(of(tx.uploads.upload("u")))
    assert not tx.uploads.abort("u", Moment(NOW))
    assert len(list(tx.parts.of(opened.id))) == 1
    tx.uploads.answer(opened.id, "ServiceUnavailable", is_over=False)
    assert tx.uploads.abort("u", Moment(NOW))
    assert tx.uploads.upload("u") is None


def test_no_part_of_which_an_upload_is_being_completed_is_replaced(tx: JournalTransaction) -> None:
    """Others may come; and this one again, when it is known that the origin has not done it."""
    opened = opened_with(tx, KEYS[0], 1, 2, 4)
    assert tx.uploads.complete_at_origin(replace(made_of(opened, 1, 4), asked_as="a"))
    for number in (1, 4):
        with pytest.raises(PartInUse):
            tx.uploads.put_part("u", part(number, "later"), Moment(NOW))
    for number in (2, 3):
        assert tx.uploads.put_part("u", part(number, f"p{number}"), Moment(NOW))
    tx.uploads.answer(opened.id, "PreconditionFailed", is_over=True)
    assert tx.uploads.put_part("u", part(1, "later"), Moment(NOW))


def test_complete_keeps_the_chosen_parts_and_gives_the_others_back(tx: JournalTransaction) -> None:
    """The parts that Complete lists are the object; its upload is over, and remembered; the row is the same one."""
    opened = opened_with(tx, KEYS[0], 1, 2, 5)
    made = made_of(opened, 1, 5)
    stored = of(tx.uploads.complete(made))
    assert stored.id == opened.id
    assert tx.writes.latest(KEYS[0]) == replace(stored, parts=())
    assert list(tx.parts.of(stored.id)) == list(made.parts)
    assert tx.uploads.complete(made) is None
    assert tx.files.freed == ["p2"]
    assert tx.uploads.upload("u") is None
    expected = UploadOutcome("u", KEYS[0], made.acknowledged_at, made.etag, "these parts", made.checksums)
    assert tx.uploads.ended("u") == expected
    tx.writes.settle(stored.id, made.etag, Moment(NOW))
    assert tx.uploads.ended("u") == expected
    tx.forget_ended(Moment(made.acknowledged_at + ENDED_KEPT_SECONDS + 1))
    assert tx.uploads.ended("u") is None


@pytest.mark.parametrize("at_origin", [False, True])
def test_a_part_that_was_replaced_meanwhile_makes_no_object(tx: JournalTransaction, *, at_origin: bool) -> None:
    """Complete names the bytes that it has seen: with others it would be another object."""
    opened = opened_with(tx, KEYS[0], 1)
    made = made_of(opened, 1)
    tx.uploads.put_part("u", part(1, "later"), Moment(NOW))
    assert not (tx.uploads.complete_at_origin(made) if at_origin else tx.uploads.complete(made))
    assert of(tx.uploads.upload("u")).state is State.OPEN


def test_of_two_uploads_that_were_begun_for_one_write_the_first_counts(tx: JournalTransaction) -> None:
    """The other one is to go, and so is one for a write that is over, or is a person's to decide."""
    opened, asked = tx.uploads.begin(upload("u", KEYS[0])), CreateAttempt(0, Moment(NOW))
    first, second, third = (tx.uploads.ask(KEYS[0], "slot", asked) for _ in range(3))
    assert of(tx.uploads.begun(opened.id, "o1", first)).origin_upload_id == "o1"
    assert of(tx.uploads.begun(opened.id, "o2", second)).origin_upload_id == "o1"
    assert [one.origin_upload_id for one in tx.uploads.aborting()] == ["o2", None]
    tx.uploads.abort("u", Moment(NOW))
    assert tx.uploads.begun(opened.id, "o3", third) is None
    assert {one.origin_upload_id for one in tx.uploads.aborting()} == {"o1", "o2", "o3"}
    assert all(turn(tx, one).due_at is not None for one in tx.uploads.aborting())


def test_what_a_dead_process_asked_for_is_suspected_once(tx: JournalTransaction) -> None:
    """Of its own worker slot; and looked for when it has been carried out, or never will be."""
    mine, other = (tx.uploads.ask(KEYS[0], "slot", CreateAttempt(worker, Moment(NOW))) for worker in (1, 2))
    assert [turn(tx, one).due_at for one in tx.uploads.asked(KEYS[0])] == [None, None]
    tx.uploads.mark_all_in_doubt(Moment(NOW + 5), 1)
    tx.uploads.mark_all_in_doubt(Moment(NOW + 9), 1)
    assert of(tx.writes.whole(mine)).asked == CreateAttempt(1, Moment(NOW), Moment(NOW + 5))
    assert turn(tx, of(tx.writes.whole(mine))).due_at == NOW + 5 + CARRIED_OUT_SECONDS
    assert of(tx.writes.whole(other)).asked == CreateAttempt(2, Moment(NOW))
    tx.uploads.mark_all_in_doubt(Moment(NOW + 9))
    assert of(tx.writes.whole(other)).asked == CreateAttempt(2, Moment(NOW), Moment(NOW + 9))


def test_uploads_are_listed_in_order(tx: JournalTransaction) -> None:
    """By key in the order of UTF-8, then by id; from behind any pair, and under any prefix."""
    names = [("b", "u1"), ("a/1", "u2"), ("a/1", "u3"), ("é", "u4"), ("a/2", "u5")]
    for name, upload_id in names:
        tx.uploads.begin(upload(upload_id, key(name)))
    listed = [(one.spec.key.key, one.upload_id) for one in tx.uploads.under("bucket")]
    assert listed == [("a/1", "u2"), ("a/1", "u3"), ("a/2", "u5"), ("b", "u1"), ("é", "u4")]
    assert [one.upload_id for one in tx.uploads.under("bucket", "a/", ("a/1", "u2"))] == ["u3", "u5"]
    assert list(tx.uploads.under("other")) == []


# What is pending, and what follows it


def test_an_overwritten_object_is_given_up_with_its_upload_at_the_origin(tx: JournalTransaction) -> None:
    """Of a hundred overwrites the last is pending; what the origin holds of the others is to be aborted there."""
    for number in range(100):
        object_ = pending(KEYS[0], f"v{number}", origin_upload_id=f"o{number}")
        tx.writes.acknowledge(replace(object_, expected=ExpectedVersion((f'"{number}"',))))
    latest = of(tx.writes.latest(KEYS[0]))
    assert latest.etag == staged("v99").etag
    assert latest.expected == ExpectedVersion(('"0"',))
    assert len(tx.writes.waiting(0, 1000)) == 1
    assert len(tx.files.freed) == 99
    assert {one.origin_upload_id for one in tx.uploads.aborting()} == {f"o{number}" for number in range(99)}


def test_uploads_that_are_to_go_are_known_until_the_origin_has_none_such(tx: JournalTransaction) -> None:
    """They are nobody else's, who lists the origin's uploads of the key."""
    assert not tx.uploads.are_any_aborting()
    tx.writes.acknowledge(pending(KEYS[0], "a", origin_upload_id="o"))
    tx.writes.acknowledge(pending(KEYS[0], "b"))
    assert tx.uploads.origin_upload_ids(KEYS[0]) == {"o", None}
    [doomed] = tx.uploads.aborting()
    assert tx.uploads.are_any_aborting()
    tx.uploads.forget(doomed.id)
    assert tx.uploads.origin_upload_ids(KEYS[0]) == {None}
    assert not tx.uploads.are_any_aborting()


def test_only_what_is_to_go_is_forgotten(tx: JournalTransaction) -> None:
    """An acknowledged write is no upload of the origin's."""
    stored = tx.writes.acknowledge(pending(KEYS[0], "a"))
    tx.uploads.forget(stored.id)
    assert tx.writes.latest(KEYS[0]) is not None


def test_the_newest_is_what_was_acknowledged_last(tx: JournalTransaction) -> None:
    """Of what is still pending; nothing has the sequence 0."""
    assert tx.writes.newest() == 0
    first, second = (
        tx.writes.acknowledge(pending(key("b"), "b")),
        tx.writes.acknowledge(pending(key("a"), deleted=True)),
    )
    assert tx.writes.newest() == second.sequence > first.sequence
    tx.writes.discard(second.id, Moment(NOW), only_conflict=False)
    assert tx.writes.newest() == first.sequence


def test_what_may_have_reached_the_origin_is_settled_before_what_follows(tx: JournalTransaction) -> None:
    """An object that is being sent is not given up when it is overwritten, and its successor expects its version."""
    sent = tx.writes.acknowledge(pending(KEYS[0], "one"))
    assert tx.writes.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    following = tx.writes.acknowledge(pending(KEYS[0], "two"))
    assert [one.sequence for one in tx.writes.waiting(0, 10)] == [sent.sequence, following.sequence]
    assert turn(tx, following) == Turn(None, after_sequence=sent.sequence)
    tx.writes.settle(sent.id, '"one"', Moment(NOW))
    assert of(tx.writes.earliest(KEYS[0])) == replace(following, expected=ExpectedVersion(('"one"',)), parts=())
    assert turn(tx, following).due_at == NOW


def test_what_is_not_as_it_was_taken_for_is_not_changed(tx: JournalTransaction) -> None:
    """Somebody else was there before."""
    sent = tx.writes.acknowledge(pending(KEYS[0], "one"))
    assert not tx.writes.change(replace(sent, state=State.COMMITTED), State.PUBLISHING)
    tx.writes.settle(sent.id, None, Moment(NOW))
    assert not tx.writes.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)


@pytest.mark.parametrize(("asked_at", "expected"), [(40.0, '"own"'), (60.0, '"other"')])
def test_what_this_gateway_has_written_since_is_no_surprise(
    tx: JournalTransaction, asked_at: float, expected: str
) -> None:
    """The flush expects what an own flush has left since the origin was asked; what was asked later holds."""
    settled = tx.writes.acknowledge(pending(KEYS[0], "one"))
    tx.writes.settle(settled.id, '"own"', Moment(50.0))
    stored = tx.writes.acknowledge(
        replace(pending(KEYS[0], "two"), expected=ExpectedVersion(('"other"',), asked_at=asked_at))
    )
    assert stored.expected.etags == (expected,)


def test_where_the_origin_could_not_be_asked_what_this_gateway_has_put_there_is_expected(
    tx: JournalTransaction,
) -> None:
    """And what is older than the question; who knows what a forwarded request has left."""
    unknown = ExpectedVersion(known=False, asked_at=60.0)
    tx.buckets.record_own_write(KEYS[0], LastOwnWrite(50.0, '"own"'))
    assert tx.writes.acknowledge(replace(pending(KEYS[0], "one"), expected=unknown)).expected == replace(
        unknown, etags=('"own"',)
    )
    tx.buckets.record_own_write(KEYS[1], LastOwnWrite(70.0, known=False))
    assert tx.writes.acknowledge(replace(pending(KEYS[1], "one"), expected=unknown)).expected == unknown
    for own in (LastOwnWrite(50.0, '"own"'), LastOwnWrite(55.0, known=False), LastOwnWrite(70.0, known=False)):
        tx.buckets.record_own_write(KEYS[2], own)  # a deletion, say, that was answered 503
    assert tx.writes.acknowledge(replace(pending(KEYS[2], "one"), expected=unknown)).expected == replace(
        unknown, etags=('"own"',)
    )


def test_what_follows_a_complete_at_the_origin_expects_its_version(tx: JournalTransaction) -> None:
    """Acknowledged while its client was waiting, it would take it for somebody else's."""
    opened = opened_with(tx, KEYS[0], 1)
    assert tx.uploads.complete_at_origin(made_of(opened, 1))
    following = tx.writes.acknowledge(pending(KEYS[0], "two"))
    assert turn(tx, following).after_sequence == of(tx.writes.whole(opened.id)).sequence
    tx.uploads.completed(opened.id, '"made there"', Moment(NOW))
    assert of(tx.writes.latest(KEYS[0])).expected == ExpectedVersion(('"made there"',))
    assert turn(tx, following).due_at == NOW
    assert tx.buckets.last_own_write(KEYS[0]) == LastOwnWrite(NOW, '"made there"')
    assert of(tx.writes.latest(KEYS[0])) == replace(following, expected=ExpectedVersion(('"made there"',)), parts=())


def test_what_is_behind_a_complete_that_comes_to_nothing_expects_what_was_before_it(tx: JournalTransaction) -> None:
    """The one before has settled since, and the Complete's condition has not held."""
    sent = tx.writes.acknowledge(pending(KEYS[0], "one"))
    tx.writes.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    opened = opened_with(tx, KEYS[0], 1)
    assert tx.uploads.complete_at_origin(made_of(opened, 1))
    following = tx.writes.acknowledge(pending(KEYS[0], "two"))
    tx.writes.settle(sent.id, '"one"', Moment(NOW))
    tx.uploads.answer(opened.id, "PreconditionFailed", is_over=True)
    assert of(tx.writes.earliest(KEYS[0])).id == following.id
    assert of(tx.writes.latest(KEYS[0])).expected == ExpectedVersion(('"one"',))
    assert turn(tx, following).due_at is not None


def test_an_upload_that_is_completed_here_after_all_keeps_nobody_waiting(tx: JournalTransaction) -> None:
    """It was to be completed at the origin, and has another place in the order now."""
    opened = opened_with(tx, KEYS[0], 1)
    made = made_of(opened, 1)
    assert tx.uploads.complete_at_origin(made)
    in_order = tx.writes.acknowledge(replace(pending(KEYS[1], "x"), in_order=True))
    assert turn(tx, in_order).due_at is None
    completed = of(tx.uploads.complete(made))
    assert (completed.state, completed.sequence > in_order.sequence) == (State.PUBLISHING, True)
    assert turn(tx, in_order).due_at is not None


def test_an_upload_whose_complete_came_to_nothing_is_open_still(tx: JournalTransaction) -> None:
    """With its parts, for whoever goes on with it; while nobody knows, it is looked for."""
    opened = opened_with(tx, KEYS[0], 1, 2)
    made = replace(made_of(opened, 1), conditions={"if-none-match": "*"}, asked_as="a", touched=Moment(NOW))
    assert tx.uploads.complete_at_origin(made)
    assert turn(tx, opened) == Turn(NOW, priority=Priority.URGENT)
    tx.uploads.answer(opened.id, "ServiceUnavailable", is_over=False)
    asked = of(tx.writes.get(opened.id))
    assert (asked.state, asked.answer, asked.is_completed_at_origin) == (State.PUBLISHING, "ServiceUnavailable", True)
    tx.uploads.answer(opened.id, "PreconditionFailed", is_over=True)
    again = of(tx.uploads.upload("u"))
    assert (again.state, again.answer, again.sequence) == (State.OPEN, "PreconditionFailed", 0)
    assert [one.number for one in tx.parts.of(opened.id)] == [1, 2]
    assert turn(tx, opened).priority is Priority.UPLOAD
    assert tx.counts() == (0, 1)


def test_nothing_waits_for_ever_for_a_complete_of_which_nobody_knows(tx: JournalTransaction) -> None:
    """When it has left the order, what was behind it begins; and should it be found after all, that is no surprise."""
    opened = opened_with(tx, KEYS[0], 1)
    tx.uploads.complete_at_origin(made_of(opened, 1))
    following = tx.writes.acknowledge(replace(pending(KEYS[0], "two"), expected=ExpectedVersion(('"old"',))))
    tx.uploads.leave_order(opened.id, NOW)
    assert turn(tx, following).due_at == NOW
    assert of(tx.writes.whole(opened.id)).is_completed_at_origin
    tx.uploads.completed(opened.id, '"made there"', Moment(NOW))
    assert of(tx.writes.latest(KEYS[0])).expected == ExpectedVersion(('"old"', '"made there"'))
    assert tx.uploads.upload("u") is None


def test_a_later_forwarded_change_is_not_taken_for_the_complete_before_it(tx: JournalTransaction) -> None:
    """What was done last counts."""
    opened = opened_with(tx, KEYS[0], 1)
    tx.uploads.complete_at_origin(made_of(opened, 1))
    tx.buckets.record_own_write(KEYS[0], LastOwnWrite(NOW + 1, known=False))
    tx.uploads.completed(opened.id, '"e"', Moment(NOW))
    assert tx.buckets.last_own_write(KEYS[0]) == LastOwnWrite(NOW + 1, known=False)


def test_what_was_done_before_the_clock_went_back_was_done_before(tx: JournalTransaction) -> None:
    """A deletion by a clock that was an hour ahead is not later than the object that was completed after it."""
    opened = opened_with(tx, KEYS[0], 1)
    tx.uploads.complete_at_origin(made_of(opened, 1))
    tx.buckets.record_own_write(KEYS[0], LastOwnWrite.now(Moment(NOW + 3600.0, 10.0, "boot")))
    tx.uploads.completed(opened.id, '"e"', Moment(NOW, 17.0, "boot"))
    own = tx.buckets.last_own_write(KEYS[0])
    assert own is not None
    assert own.etag == '"e"'


def test_a_copy_keeps_the_files_that_it_shares(tx: JournalTransaction) -> None:
    """Files go with the last object that is made of them."""
    one = part(1, "shared")
    first = tx.writes.acknowledge(pending(KEYS[0], parts=(one,)))
    second = tx.writes.acknowledge(pending(KEYS[1], parts=(one,)))
    tx.writes.settle(first.id, None, Moment(50.0))
    assert tx.files.freed == []
    assert tx.files.knows(one.file.name)
    tx.writes.discard(second.id, Moment(NOW), only_conflict=False)
    assert tx.files.freed == [one.file.name]
    assert not tx.files.knows(one.file.name)


def test_sequences_are_never_given_twice(tx: JournalTransaction) -> None:
    """Also when the last one is gone: what a sequence means is for ever, and so is an id."""
    first = tx.writes.acknowledge(pending(KEYS[0]))
    tx.writes.discard(first.id, Moment(NOW), only_conflict=False)
    second = tx.writes.acknowledge(pending(KEYS[0]))
    assert second.sequence > first.sequence
    assert second.id > first.id


# Deletions


def test_a_deletion_of_what_the_origin_never_had_keeps_nobody_waiting(tx: JournalTransaction) -> None:
    """What was pending goes, with its bytes; what others may have written there meanwhile is looked at later."""
    stored = tx.writes.acknowledge(pending(KEYS[0], "x"))  # nothing was there before
    assert tx.writes.write_tombstone(pending(KEYS[0], deleted=True)) is None
    assert (tx.turns.living([stored.id]), tx.files.freed) == (set(), ["x"])
    buried = of(tx.writes.latest(KEYS[0]))
    assert (buried.deleted, buried.expected.is_nothing, turn(tx, buried).priority) == (True, True, Priority.URGENT)


def test_a_deletion_behind_what_has_just_been_flushed_is_carried_out(tx: JournalTransaction) -> None:
    """It was pending when somebody looked: the origin has it now."""
    stored = tx.writes.acknowledge(pending(KEYS[0], "x"))
    tx.writes.settle(stored.id, stored.etag, Moment(NOW))
    assert of(tx.writes.write_tombstone(pending(KEYS[0], deleted=True))).expected == ExpectedVersion((stored.etag,))


def test_a_deletion_of_what_the_origin_may_have_is_carried_out_there(tx: JournalTransaction) -> None:
    """Of something that was there before, or that is just on its way there; before all that nobody waits for."""
    tx.writes.acknowledge(replace(pending(KEYS[0], "x"), expected=ExpectedVersion(('"old"',))))
    buried = of(tx.writes.write_tombstone(pending(KEYS[0], deleted=True)))
    assert (buried.expected, turn(tx, buried).priority) == (ExpectedVersion(('"old"',)), Priority.URGENT)
    sent = tx.writes.acknowledge(pending(KEYS[1], "y"))
    tx.writes.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    tx.writes.acknowledge(pending(KEYS[1], "z"))
    buried = of(tx.writes.write_tombstone(pending(KEYS[1], deleted=True)))
    assert turn(tx, buried).after_sequence == sent.sequence
    assert of(tx.writes.latest(KEYS[1])).deleted


def test_a_deletion_decides_no_conflict(tx: JournalTransaction) -> None:
    """What is in conflict stays, for a person."""
    stored = tx.writes.acknowledge(pending(KEYS[0], "x"))
    tx.writes.keep(stored.id, "others")
    with pytest.raises(InConflict):
        tx.writes.write_tombstone(pending(KEYS[0], deleted=True))
    assert of(tx.writes.latest(KEYS[0])).state is State.CONFLICT


# Conflicts and damage


def test_only_what_was_acknowledged_comes_into_conflict(tx: JournalTransaction) -> None:
    """And nothing looks at it before somebody has decided."""
    opened = opened_with(tx, KEYS[0], 1)
    assert not tx.writes.keep(opened.id, "others")
    stored = tx.writes.acknowledge(pending(KEYS[1], "x"))
    assert tx.writes.keep(stored.id, "others")
    assert turn(tx, stored) == Turn(None, last_error="others")
    assert tx.writes.oldest("slot") is None
    assert not tx.writes.overwrite(opened.id, ExpectedVersion(), NOW)
    assert tx.writes.overwrite(stored.id, ExpectedVersion(('"theirs"',)), NOW)
    assert turn(tx, stored) == Turn(NOW, priority=Priority.URGENT)
    assert of(tx.writes.latest(KEYS[1])).expected == ExpectedVersion(('"theirs"',))


def test_what_may_have_arrived_is_expected_when_it_was_given_up(tx: JournalTransaction) -> None:
    """What follows it finds it, or what was there before it; and what comes later cannot know."""
    sent = tx.writes.acknowledge(replace(pending(KEYS[0], "one"), expected=ExpectedVersion(('"old"',))))
    tx.writes.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    tx.writes.acknowledge(pending(KEYS[0], "two"))
    assert tx.writes.discard(sent.id, Moment(NOW), only_conflict=False)
    assert of(tx.writes.latest(KEYS[0])).expected == ExpectedVersion(('"old"', sent.etag))
    assert tx.buckets.last_own_write(KEYS[0]) == LastOwnWrite(NOW, known=False)


def test_a_write_begun_anew_is_sent_anew(tx: JournalTransaction) -> None:
    """The origin's upload of no use is to go; parts that are here are sent again, others cannot be."""
    opened = opened_with(tx, KEYS[0], 1)
    elsewhere = part(2, "p2")
    elsewhere = replace(elsewhere, file=replace(elsewhere.file, name=""), origin_etag='"p2"')
    tx.uploads.put_part("u", elsewhere, Moment(NOW))
    tx.uploads.begun(opened.id, "o", tx.uploads.ask(KEYS[0], "slot", CreateAttempt(0, Moment(NOW))))
    tx.uploads.part_sent(opened.id, replace(part(1, "p1"), origin_etag='"p1"'))
    assert tx.parts.unsent(opened.id, 10) == []
    tx.writes.start_over(opened.id, NOW)
    assert of(tx.writes.whole(opened.id)).origin_upload_id is None
    assert [one.number for one in tx.parts.unsent(opened.id, 10)] == [1]
    assert [one.origin_upload_id for one in tx.uploads.aborting()] == ["o"]


@pytest.mark.parametrize("table", ["files", "writes", "parts"])
def test_a_changed_row_is_never_believed(tx: JournalTransaction, table: str) -> None:
    """A flipped bit in any record, or a record under another key, is BufferDamaged."""
    opened = opened_with(tx, KEYS[0], 1)
    stored = tx.writes.acknowledge(pending(KEYS[1], parts=(part(1, "q"),)))
    packed = bytearray(tx._rows.execute(f"SELECT record FROM {table}").fetchone()[0])
    packed[len(packed) // 2] ^= 1
    tx._rows.execute(f"UPDATE {table} SET record = ?", (bytes(packed),))
    with pytest.raises(BufferDamaged):
        (tx.writes.whole(opened.id), tx.writes.whole(stored.id))


def test_a_damaged_row_is_given_up_by_a_person_alone(tx: JournalTransaction) -> None:
    """Until then it is set aside, till the next start; what waits for it goes on when it is gone."""
    stored = tx.writes.acknowledge(pending(KEYS[0], "x"))
    tx.writes.change(replace(stored, state=State.PUBLISHING), State.COMMITTED)
    following = tx.writes.acknowledge(pending(KEYS[0], "y"))
    tx._rows.execute("UPDATE writes SET record = zeroblob(50) WHERE id = ?", (stored.id,))
    tx.turns.quarantine(stored.id, "it is damaged")
    assert turn(tx, stored) == Turn(None, last_error="it is damaged", damaged=True)
    tx.begin_epoch(NOW)
    assert (turn(tx, stored).due_at, turn(tx, stored).damaged) == (NOW, False)
    assert turn(tx, following).due_at is None
    assert tx.writes.discard(stored.id, Moment(NOW), only_conflict=True)
    assert "x" in tx.files.freed
    assert turn(tx, following).due_at == NOW
    assert tx.files.usage("slot").objects == 1


def test_a_new_epoch_leaves_conflicts_alone(tx: JournalTransaction) -> None:
    """They are a person's; and each start has a number of its own."""
    stored = tx.writes.acknowledge(pending(KEYS[0], "x"))
    tx.writes.keep(stored.id, "others")
    node, epoch = tx.node()
    tx.begin_epoch(NOW)
    assert tx.node() == (node, epoch + 1)
    assert turn(tx, stored).due_at is None


# Whose turn it is


def test_what_is_due_comes_by_lane_and_priority_in_the_order_of_its_time(tx: JournalTransaction) -> None:
    """Nothing that waits, sleeps, is in conflict or over; a lane is a bucket of a slot."""
    small = [
        tx.writes.acknowledge(replace(pending(key(name), name), acknowledged_at=at))
        for name, at in (("b", 2.0), ("a", 1.0))
    ]
    large = tx.writes.acknowledge(replace(pending(key("large"), "l"), size_bytes=2**30, acknowledged_at=1.0))
    gone = tx.writes.acknowledge(pending(key("gone"), deleted=True))
    tx.turns.wait(gone.id, turn(tx, gone), Turn(NOW + 1, 1, NOW, "refused", Priority.URGENT))
    opened_with(tx, key("open"), 1)
    kept = tx.writes.acknowledge(pending(key("kept"), "k"))
    tx.writes.keep(kept.id, "others")
    first_due_at = {Priority.URGENT: NOW + 1, Priority.SMALL: 1.0, Priority.LARGE: 1.0, Priority.UPLOAD: NOW}
    assert tx.turns.lanes() == {LANE: first_due_at}
    assert [one.key.key for one in tx.turns.due(LANE, Priority.SMALL, NOW, 10)] == ["a", "b"]
    assert [one.id for one in tx.turns.due(LANE, Priority.SMALL, NOW, 1)] == [small[1].id]
    assert [one.id for one in tx.turns.due(LANE, Priority.LARGE, NOW, 10)] == [large.id]
    assert tx.turns.due(LANE, Priority.URGENT, NOW, 10) == []
    assert [one.id for one in tx.turns.due(LANE, Priority.URGENT, NOW + 1, 10)] == [gone.id]
    assert [one.key.key for one in tx.turns.due(LANE, Priority.UPLOAD, NOW, 10)] == ["open"]
    assert tx.turns.due(("slot", "other"), Priority.SMALL, NOW, 10) == []
    assert tx.turns.living([small[0].id, kept.id, 10_000]) == {small[0].id, kept.id}


def test_who_fails_again_does_not_sleep_through_what_was_asked_meanwhile(tx: JournalTransaction) -> None:
    """Somebody has had it be due anew while it was looked at: what has come to nothing is looked at again at once."""
    opened = opened_with(tx, KEYS[0], 1)
    seen = turn(tx, opened)
    tx.uploads.put_part("u", part(2, "p2"), Moment(NOW + 5))
    tx.turns.wait(opened.id, seen, Turn(NOW + 600, priority=Priority.UPLOAD))
    assert turn(tx, opened).due_at == NOW + 5
    tx.turns.rest(opened.id, turn(tx, opened), Turn(NOW + 600, priority=Priority.UPLOAD))
    assert turn(tx, opened).due_at == NOW + 5  # its next part is due
    for number in (1, 2):
        tx.uploads.part_sent(opened.id, replace(part(number, f"p{number}"), origin_etag='"e"'))
    tx.turns.rest(opened.id, turn(tx, opened), Turn(NOW + 600, priority=Priority.UPLOAD))
    assert turn(tx, opened).due_at == NOW + 600


def test_what_waits_for_another_is_not_woken_by_its_own_pause(tx: JournalTransaction) -> None:
    """It was looked at when something took its place before it."""
    sent = tx.writes.acknowledge(pending(KEYS[0], "one"))
    tx.writes.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    following = tx.writes.acknowledge(pending(KEYS[0], "two"))
    tx.turns.wait(following.id, Turn(NOW), Turn(NOW + 1, 1, NOW, "x", Priority.RETRY))
    assert turn(tx, following) == Turn(None, after_sequence=sent.sequence)


def test_who_waits_for_a_write_hurries_all_that_it_waits_for(tx: JournalTransaction) -> None:
    """Through chains and markers; what has failed is due at once; and nothing else is hurried."""
    sent = tx.writes.acknowledge(pending(key("d/x"), "one"))
    tx.writes.change(replace(sent, state=State.PUBLISHING), State.COMMITTED)
    tx.turns.wait(sent.id, turn(tx, sent), Turn(NOW + 60, 3, NOW, "refused", Priority.RETRY))
    shard = tx.writes.acknowledge(pending(key("d/x"), "two"))
    marker = tx.writes.acknowledge(replace(pending(key("d/_SUCCESS"), "m"), behind="d/"))
    other = tx.writes.acknowledge(pending(key("e"), "x"))
    tx.turns.has_due = False
    seen = turn(tx, sent)
    tx.turns.prioritise(key("d/_SUCCESS"), NOW)
    assert tx.turns.has_due
    priorities = [turn(tx, one).priority for one in (sent, shard, marker, other)]
    assert priorities == [Priority.URGENT] * 3 + [Priority.SMALL]
    assert turn(tx, sent).due_at == NOW
    assert turn(tx, marker).due_at is None
    tx.turns.wait(sent.id, seen, Turn(NOW + 60, 4, NOW, "refused", Priority.RETRY))
    assert turn(tx, sent).priority is Priority.URGENT  # somebody waits since it was taken up


def test_who_waits_for_a_prefix_hurries_what_that_waits_for(tx: JournalTransaction) -> None:
    """A marker's files, all of them, and what they wait for; not what came after the marker, nor other directories."""
    before = tx.writes.acknowledge(pending(key("d/x"), "one"))
    files = [tx.writes.acknowledge(pending(key(f"d/{name}"), name)) for name in ("x", "y", "z")]
    marker = tx.writes.acknowledge(replace(pending(key("d/_SUCCESS"), "m"), behind="d/"))
    tx.writes.change(replace(files[1], state=State.PUBLISHING), State.COMMITTED)
    later, other = tx.writes.acknowledge(pending(key("d/later"), "l")), tx.writes.acknowledge(pending(key("e"), "e"))
    tx.turns.raise_priority("bucket", b"d/_SUCCESS", b"d/_SUCCESS\0", NOW)
    hurried = [one for one in (before, *files, marker) if tx.writes.get(one.id) is not None]
    assert {turn(tx, one).priority for one in hurried} == {Priority.URGENT}
    assert {turn(tx, one).priority for one in (later, other)} == {Priority.SMALL}


def test_who_waits_for_one_hurries_the_row_before_it(tx: JournalTransaction) -> None:
    """In a slot that keeps the order, other prefixes included; what fails there is due at once."""
    strict = [tx.writes.acknowledge(replace(pending(key(name), name), in_order=True)) for name in "abcd"]
    tx.turns.wait(strict[0].id, turn(tx, strict[0]), Turn(NOW + 60, 3, NOW, "refused", Priority.RETRY))
    tx.turns.raise_priority("bucket", b"c", b"c\0", NOW)
    assert [turn(tx, one).priority for one in strict] == [Priority.URGENT] * 3 + [Priority.SMALL]
    assert turn(tx, strict[0]).due_at == NOW


def test_what_is_hurried_hurries_what_it_comes_to_wait_for(tx: JournalTransaction) -> None:
    """A tombstone, whose client waits, behind what is just being sent; a marker whose file was sent after all."""
    sending = tx.writes.acknowledge(pending(key("k"), "x"))
    tx.writes.change(replace(sending, state=State.PUBLISHING), State.COMMITTED)
    assert turn(tx, sending).priority is Priority.SMALL
    gone = tx.writes.acknowledge(replace(pending(key("k"), ""), deleted=True, parts=(), size_bytes=0))
    assert (turn(tx, gone).priority, turn(tx, gone).due_at) == (Priority.URGENT, None)
    assert turn(tx, sending).priority is Priority.URGENT
    local = tx.writes.acknowledge(replace(pending(key("d/1"), "1"), state=State.LOCAL))
    first = tx.writes.acknowledge(pending(key("d/2"), "2"))
    tx.writes.acknowledge(replace(pending(key("d/_SUCCESS"), "m"), behind="d/"))
    tx.turns.prioritise(key("d/_SUCCESS"), NOW)
    tx.local.send_after_all(local.id, NOW, is_urgent=False)
    assert [turn(tx, one).priority for one in (first, local)] == [Priority.URGENT, Priority.SMALL]
    tx.writes.settle(first.id, '"e"', Moment(NOW))
    assert turn(tx, local).priority is Priority.URGENT


def test_what_has_failed_is_tried_now(tx: JournalTransaction) -> None:
    """Under a prefix, or everywhere; what has not failed, or is due, is as it was; nothing is hurried that waits."""
    failed = [tx.writes.acknowledge(pending(key(name), name)) for name in ("a/1", "a/2", "b", "ab")]
    for one in failed:
        tx.turns.wait(one.id, turn(tx, one), Turn(NOW + 60, 2, NOW, "refused", Priority.RETRY))
    well = opened_with(tx, key("a/3"))
    tx.turns.rest(well.id, turn(tx, well), Turn(NOW + 600, priority=Priority.UPLOAD))
    tx.turns.try_now("bucket", "a/", NOW)
    assert [turn(tx, one).due_at for one in failed] == [NOW, NOW, NOW + 60, NOW + 60]
    assert turn(tx, well).due_at == NOW + 600
    tx.turns.try_now("other", "", NOW)
    assert turn(tx, failed[2]).due_at == NOW + 60
    tx.turns.try_now("", "", NOW)
    assert {turn(tx, one).due_at for one in failed} == {NOW}
    assert turn(tx, failed[0]).attempts == 2


def test_a_clock_that_went_back_puts_nothing_off(tx: JournalTransaction) -> None:
    """What no clock of now can have said is due now; what may sleep that long sleeps on; what has ended stays. What has
    not been tried yet sleeps for no second."""
    ends = (
        NOW + RETRY_SECONDS_MAX + 1,
        NOW + RETRY_SECONDS_MAX,
        NOW + UPLOAD_SECONDS_MAX + 1,
        NOW + UPLOAD_SECONDS_MAX,
    )
    writes = [tx.writes.acknowledge(pending(key(name), name)) for name in "ab"]
    writes += [tx.uploads.begin(upload(name, key(name))) for name in "cd"]
    for one, due_at in zip(writes, ends, strict=True):
        tx.turns.wait(one.id, turn(tx, one), Turn(due_at, 1, NOW, "refused", Priority.RETRY))
    tx.uploads.begin(upload("over", key("over")))
    tx.uploads.abort("over", Moment(NOW))
    fresh = tx.writes.acknowledge(replace(pending(key("fresh"), "fresh"), acknowledged_at=NOW + 1))
    completing = opened_with(tx, key("completing"), 1, upload_id="waited for")
    made = replace(made_of(completing, 1), touched=Moment(NOW + RETRY_SECONDS_MAX + 1))
    assert tx.uploads.complete_at_origin(made)
    assert turn(tx, fresh).due_at == NOW + 1
    tx.set_right(Moment(NOW))
    assert {turn(tx, one).due_at for one in (fresh, completing)} == {NOW}
    assert [turn(tx, one).due_at for one in writes] == [NOW, ends[1], NOW, ends[3]]
    assert tx.uploads.ended("over") is not None


def test_what_the_origin_was_asked_for_too_long_ago_is_suspected(tx: JournalTransaction) -> None:
    """Its process lives, and could not write down what came of it."""
    asked = [tx.uploads.ask(KEYS[0], "slot", CreateAttempt(0, Moment(NOW + later))) for later in (0.0, 2.0)]
    tx.set_right(Moment(NOW + ASKED_SECONDS_MAX + 1))
    suspects = [
        one.id for one in tx.uploads.asked(KEYS[0]) if one.asked is not None and one.asked.in_doubt_since is not None
    ]
    assert suspects == asked[:1]


# What is not kept for ever


def test_what_has_ended_is_forgotten_a_day_later_and_bounded(
    tx: JournalTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some at once: writers wait meanwhile. Of more than are remembered the oldest go."""
    for number in range(30):
        tx.uploads.begin(upload(f"u{number}", KEYS[0]))
        tx.uploads.abort(f"u{number}", Moment(NOW + number))
    late = NOW + ENDED_KEPT_SECONDS + 10.5
    assert tx.forget_ended(Moment(late), 8)
    assert not tx.forget_ended(Moment(late), 8)
    assert [number for number in range(30) if tx.uploads.ended(f"u{number}")] == list(range(11, 30))
    monkeypatch.setattr(transaction, "ENDED_MAX", 5)
    while tx.forget_ended(Moment(late), 8):
        pass
    assert [number for number in range(30) if tx.uploads.ended(f"u{number}")] == list(range(25, 30))


def test_own_doings_are_forgotten_when_nobody_can_ask_for_them(
    tx: JournalTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an upload of the key is open, somebody still can; and they are bounded even so."""
    for number in range(20):
        tx.buckets.record_own_write(key(f"k{number:02}"), LastOwnWrite(NOW + number, '"e"'))
    tx.uploads.begin(upload("u", key("k03")))
    late = NOW + LAST_OWN_WRITE_KEPT_SECONDS + 10
    while tx.forget_ended(Moment(late), 4):
        pass
    left = [number for number in range(20) if tx.buckets.last_own_write(key(f"k{number:02}")) is not None]
    assert left == [3, *range(10, 20)]
    monkeypatch.setattr(buckets, "LAST_OWN_WRITES_MAX", 4)
    while tx.forget_ended(Moment(late), 4):
        pass
    assert [number for number in range(20) if tx.buckets.last_own_write(key(f"k{number:02}")) is not None] == [
        16,
        17,
        18,
        19,
    ]


def test_what_is_known_of_a_buckets_conditions_outlives_what_says_nothing_of_them(tx: JournalTransaction) -> None:
    """An answer to a write tells of ETags, and a probe of conditions."""
    conditions = Conditions(Honoured.CREATES, Honoured.IGNORED, Honoured.REFUSED, 5.0)
    tx.buckets.learn("bucket", BucketCapabilities(True, True, 1.0, conditions))
    tx.buckets.learn("bucket", BucketCapabilities(False, True, 2.0))
    assert tx.buckets.capabilities("bucket") == BucketCapabilities(False, True, 2.0, conditions)
    newer = replace(conditions, put=Honoured.REFUSED, learned_at=6.0)
    tx.buckets.learn("bucket", BucketCapabilities(False, True, 2.0, newer))
    assert tx.buckets.all_capabilities() == [("bucket", BucketCapabilities(False, True, 2.0, newer))]


def test_what_a_probe_finds_and_what_a_write_tells_do_not_undo_each_other(tx: JournalTransaction) -> None:
    """A write has learned meanwhile that the bucket's ETags are no MD5s."""
    tx.buckets.learn("bucket", BucketCapabilities(True, True, 1.0))
    tx.buckets.learn("bucket", BucketCapabilities(False, True, 2.0))
    found = Conditions(Honoured.YES, Honoured.YES, Honoured.YES, 3.0)
    tx.buckets.amend("bucket", conditions=found)
    assert tx.buckets.capabilities("bucket") == BucketCapabilities(False, True, 2.0, found)
    tx.buckets.amend("unknown", conditions=found)
    assert tx.buckets.capabilities("unknown") is None


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (LastOwnWrite(NOW, '"past"'), ExpectedVersion(('"old"', '"past"'))),
        (LastOwnWrite(NOW, None), ExpectedVersion(('"old"',), absent=True)),
        (LastOwnWrite(NOW, known=False), ExpectedVersion(('"old"',))),
    ],
)
def test_what_this_gateway_has_put_there_past_a_pending_write_is_no_others(
    tx: JournalTransaction, own: LastOwnWrite, expected: ExpectedVersion
) -> None:
    """Two of its clients write a key at once: one is absorbed, the other goes through."""
    stored = tx.writes.acknowledge(replace(pending(KEYS[0], "x"), expected=ExpectedVersion(('"old"',))))
    tx.writes.changed_past(KEYS[0], own)
    assert of(tx.writes.latest(KEYS[0])).expected == expected
    assert tx.buckets.last_own_write(KEYS[0]) == own
    tx.writes.change(replace(stored, state=State.PUBLISHING), State.COMMITTED)
    tx.writes.changed_past(KEYS[0], LastOwnWrite(NOW, '"later"'))
    assert of(tx.writes.latest(KEYS[0])).expected == stored.expected  # it may be there: who knows which came first


def test_what_is_known_of_an_origin_and_is_damaged_is_not_known(tx: JournalTransaction) -> None:
    """It is learned anew; no write, and no look at the status, fails of it."""
    tx.buckets.learn("bucket", BucketCapabilities(True, True, 1.0))
    tx.buckets.learn("other", BucketCapabilities(True, True, 1.0))
    tx.buckets.record_own_write(KEYS[0], LastOwnWrite(NOW, '"e"'))
    tx._rows.execute("UPDATE profiles SET record = zeroblob(50) WHERE bucket = 'bucket'")
    tx._rows.execute("UPDATE origin SET record = zeroblob(50)")
    assert tx.buckets.capabilities("bucket") is None
    assert [bucket for bucket, _ in tx.buckets.all_capabilities()] == ["other"]
    own = tx.buckets.last_own_write(KEYS[0])
    assert own is not None  # the origin is asked what it has
    assert not own.known
    assert own.seconds_after(Moment(NOW + 1e9)) >= 0
    stored = tx.writes.acknowledge(pending(KEYS[0], "x"))
    assert stored.expected == pending(KEYS[0], "x").expected
    tx.writes.settle(stored.id, '"e"', Moment(NOW))
    assert tx.buckets.last_own_write(KEYS[0]) == LastOwnWrite(NOW, '"e"')
    tx.buckets.learn("bucket", BucketCapabilities(True, False, 2.0))
    assert tx.buckets.capabilities("bucket") == BucketCapabilities(True, False, 2.0)


def test_an_own_object_of_parts_is_known_as_long_as_it_may_be_taken_for_anothers(tx: JournalTransaction) -> None:
    """S3 dates it by the beginning of its upload, which may be days before others' of the same date are completed."""
    tx.buckets.record_own_write(KEYS[0], LastOwnWrite.now(Moment(NOW, 5.0, "boot"), '"e-2"'))
    tx.buckets.record_own_write(KEYS[1], LastOwnWrite.now(Moment(NOW, 5.0, "boot"), '"e"'))
    for later, left in (
        (LAST_OWN_WRITE_KEPT_SECONDS + 10, 1),
        (DATED_EARLIER_SECONDS_MAX - 10, 1),
        (DATED_EARLIER_SECONDS_MAX + 10, 0),
    ):
        tx.forget_ended(Moment(NOW + later, 5.0 + later, "boot"))
        assert tx.buckets.own_writes_count() == left


def test_what_is_done_to_an_origin_and_is_damaged_is_forgotten_in_time(tx: JournalTransaction) -> None:
    tx.buckets.record_own_write(KEYS[0], LastOwnWrite(NOW, '"e"'))
    tx._rows.execute("UPDATE origin SET record = zeroblob(50)")
    tx.forget_ended(Moment(NOW + LAST_OWN_WRITE_KEPT_SECONDS + 10))
    assert tx.buckets.own_writes_count() == 0


def test_places_fit_the_file() -> None:
    """Whatever a key is called."""
    assert all(0 <= hash_slot_of(key(name)) < HASH_SLOTS for name in ("", "\ud800", "x" * 1024))


def test_the_counters_say_what_counting_says(tx: JournalTransaction) -> None:
    """After acknowledgements, copies, deletions, uploads, conflicts, local objects, and the ends of them all."""
    shared = part(1, "shared")
    first = tx.writes.acknowledge(pending(KEYS[0], parts=(shared,)))
    copy = tx.writes.acknowledge(replace(pending(KEYS[1], parts=(shared,)), spec=replace(spec(KEYS[1]), slot="other")))
    tx.writes.acknowledge(pending(KEYS[0], "over"))
    local = tx.writes.acknowledge(replace(pending(KEYS[2], "local"), state=State.LOCAL))
    opened_with(tx, KEYS[3], 1, 2)
    completed = of(tx.uploads.complete(made_of(opened_with(tx, KEYS[3], 3, 4, upload_id="v"), 3)))
    tombstone = tx.writes.acknowledge(pending(key("gone"), deleted=True))
    ends: list[Callable[[], object]] = [
        lambda: tx.writes.settle(first.id, '"e"', Moment(NOW)),
        lambda: tx.writes.keep(copy.id, "others"),
        lambda: tx.writes.discard(copy.id, Moment(NOW), only_conflict=True),
        lambda: tx.local.send_after_all(local.id, NOW),
        lambda: tx.uploads.abort("u", Moment(NOW)),
        lambda: tx.writes.settle(completed.id, '"e-1"', Moment(NOW)),
        lambda: tx.writes.settle(tombstone.id, None, Moment(NOW)),
    ]
    for end in (lambda: None, *ends):
        end()
        found = {slot: usage for slot, usage in tx.files.usages().items() if usage != Usage()}
        assert found == {slot: usage for slot, usage in tx.files.counted().items() if usage != Usage()}
    tx.files.recount()
    assert tx.files.usage("slot") == Usage(9, 2)
