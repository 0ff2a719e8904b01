"""How a write gets to the origin, whatever the origin does: never lost, never over somebody else's write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event as report
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.clock import Moment
from gateway.core.errors import CredentialsUnavailable, OriginBodyError, OriginUnreachable
from gateway.writeback.flushing.requests import kind_of_error, refusal_of
from gateway.writeback.flushing.state import (
    CLOCKS_APART_SECONDS,
    DIFFERENT,
    GUESSED_BYTES_MAX,
    OTHERS,
    PARTS_AT_ONCE,
    RESTARTS_MAX,
    UNUSED_SECONDS,
    Aborted,
    Ask,
    AwaitFiles,
    Begun,
    Compare,
    Compared,
    Completed,
    Delete,
    End,
    Event,
    Expire,
    Finish,
    Finished,
    Forget,
    FoundObject,
    Headed,
    Instruction,
    JournalNote,
    Kind,
    LookedFor,
    Lost,
    MarkConflict,
    OriginReply,
    PartFailed,
    PartSent,
    Progress,
    Rest,
    SendPart,
    Settle,
    Wait,
    WriteRefused,
    kind_of,
)
from gateway.writeback.journal.buckets import DATED_EARLIER_SECONDS_MAX, Conditions, Honoured
from gateway.writeback.journal.records import UPLOAD_LOOK_SECONDS, CreateAttempt, ExpectedVersion, State, Write
from tests.support.loop_steps import longest_step
from tests.support.writeback import key, part, pending, upload

OURS = "ours"
ALL = Conditions(Honoured.YES, Honoured.YES, Honoured.YES, 1.0)
REFUSED = WriteRefused("PreconditionFailed")
NONE = Conditions(Honoured.REFUSED, Honoured.REFUSED, Honoured.REFUSED, 1.0)


def single(**changed: object) -> Write:
    return replace(pending(key("k"), OURS), sequence=1, **changed)  # type: ignore[arg-type]


def multipart(count: int, **changed: object) -> Write:
    parts = tuple(part(number, f"{OURS}{number}") for number in range(1, count + 1))
    return replace(pending(key("k"), parts=parts, multipart=True), sequence=1, **changed)  # type: ignore[arg-type]


def tombstone(**changed: object) -> Write:
    return replace(pending(key("k"), deleted=True), sequence=1, expected=ExpectedVersion(('"old"',)), **changed)  # type: ignore[arg-type]


def opened(count: int = 0, **changed: object) -> Write:
    parts = tuple(part(number, f"{OURS}{number}") for number in range(1, count + 1))
    return replace(upload("u", key("k")), parts=parts, touched=Moment(0.0), **changed)  # type: ignore[arg-type]


def with_part_sent(write: Write, event: PartSent) -> Write:
    """The write, one of whose parts the origin has."""
    parts = [replace(one, origin_etag=event.etag) if one.number == event.number else one for one in write.parts]
    return replace(write, parts=parts)


def sent(write: Write, *numbers: int) -> Write:
    """One of which the origin has these parts."""
    for number in numbers:
        write = with_part_sent(write, PartSent(write.origin_upload_id or "", number, f"e{number}"))
    return write


def play(progress: Progress, *events: Event) -> Sequence[Instruction]:
    instructions = progress.begin()
    for one in events:
        instructions = progress.after(one)
    return instructions


def begun(write: Write, origin_upload_id: str = "o") -> Begun:
    return Begun(replace(write, origin_upload_id=origin_upload_id))


@pytest.mark.parametrize(
    ("code", "status", "waits"),
    [
        ("SlowDown", 503, True),
        ("TooManyRequests", 429, True),
        ("InternalError", 500, True),
        ("HTTP 502", 502, True),
        ("RequestTimeout", 400, True),
        ("OperationAborted", 409, True),
        ("ConditionalRequestConflict", 409, True),
        ("NotImplemented", 501, False),
        ("AccessDenied", 403, False),
        ("InvalidAccessKeyId", 403, False),
        ("NoSuchBucket", 404, False),
        ("MethodNotAllowed", 405, False),
        ("InvalidRequest", 400, False),
        ("EntityTooLarge", 400, False),
    ],
)
def test_what_the_bucket_answers_for_now_needs_nobody(code: str, status: int, waits: bool) -> None:
    """What it refuses until somebody changes something does."""
    refusal, progress = refusal_of(status, code), Progress(single(), ALL)
    [*_, wait] = play(progress, refusal)
    if not isinstance(wait, Wait):  # it is looked what is there, and sent once more
        progress.after(Headed(None))
        [*_, wait] = progress.after(refusal)
    assert isinstance(wait, Wait)
    assert wait.waits_for_bucket is waits


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (OriginUnreachable("no answer"), True),
        (OriginBodyError("it ended early"), True),
        (CredentialsUnavailable("there is no key"), False),
        (OSError("the disk does not give the bytes"), False),
    ],
)
def test_a_bucket_that_does_not_answer_needs_nobody(error: Exception, waits: bool) -> None:
    """A key that is missing and a disk that fails do."""
    [*_, wait] = play(Progress(single(), ALL), Lost(str(error), kind_of_error(error)))
    assert isinstance(wait, Wait)
    assert wait.waits_for_bucket is waits


# Acknowledged writes


def test_an_object_is_put_where_nothing_else_lies() -> None:
    """Look, send under the condition of what was seen, done."""
    progress = Progress(single())
    assert progress.begin() == [Ask.HEAD]
    assert progress.after(Headed(None)) == [Finish(None)]
    assert progress.write.state is State.PUBLISHING
    assert progress.after(Finished(progress.write.etag)) == [Settle(progress.write.etag)]


def test_where_conditions_are_honoured_one_says_it_all() -> None:
    """One request for an object, or a deletion, of which it is known exactly what the key has."""
    for version, etag in ((ExpectedVersion(absent=True), None), (ExpectedVersion(('"old"',)), '"old"')):
        write = single(expected=version)
        assert play(Progress(write, ALL)) == [Finish(etag)]
        assert play(Progress(write, ALL), Finished(write.etag)) == [Settle(write.etag)]
    assert play(Progress(tombstone(), ALL), Finished(None)) == [Settle(None)]
    for unclear in (
        ExpectedVersion(('"a"', '"b"')),
        ExpectedVersion(('"a"',), absent=True),
        ExpectedVersion(('"a"', '"b"'), known=False, asked_at=1.0),
    ):
        assert play(Progress(single(expected=unclear), ALL)) == [Ask.HEAD]
    for honoured in (Honoured.UNKNOWN, Honoured.IGNORED, Honoured.REFUSED):
        assert play(Progress(single(), replace(ALL, put=honoured))) == [Ask.HEAD]
        assert play(Progress(tombstone(), replace(ALL, delete=honoured))) == [Ask.HEAD]


def test_a_bucket_that_only_creates_is_looked_at_before_it_overwrites() -> None:
    """What is new goes under its condition, without a look; what replaces something goes without, behind a look."""
    creates = replace(ALL, put=Honoured.CREATES)
    assert play(Progress(single(expected=ExpectedVersion(absent=True)), creates)) == [Finish(None)]
    replaces = single(expected=ExpectedVersion(('"old"',)))
    assert play(Progress(replaces, creates)) == [Ask.HEAD]
    assert play(Progress(replaces, creates), Headed('"old"')) == [Finish('"old"', is_conditional=False)]


def test_what_was_seen_last_is_expected_first_or_nothing() -> None:
    """Whether that was so is for the condition to say; what would be sent in vain is large only after a look."""
    for seen, etag in ((ExpectedVersion(('"a"',), known=False), '"a"'), (ExpectedVersion(known=False), None)):
        guessed = single(expected=seen, size_bytes=GUESSED_BYTES_MAX)
        assert play(Progress(guessed, ALL)) == [Finish(etag)]
        assert play(Progress(replace(guessed, size_bytes=GUESSED_BYTES_MAX + 1), ALL)) == [Ask.HEAD]
        assert play(Progress(guessed, ALL), WriteRefused("PreconditionFailed")) == [Ask.HEAD]
        assert play(Progress(guessed)) == [Ask.HEAD]
    remembered = single(expected=ExpectedVersion(absent=True, known=False), size_bytes=GUESSED_BYTES_MAX + 1)
    assert play(Progress(remembered, ALL)) == [Finish(None)]


def test_that_a_bucket_refuses_conditions_is_learned_when_it_takes_a_request_without() -> None:
    """By the kind of request; had it been about something else, nothing is learned."""
    cases: Sequence[tuple[Write, Kind]] = ((single(), "put"), (tombstone(), "delete"))
    for write, kind in cases:
        progress = Progress(write, ALL)
        assert play(progress, WriteRefused("NotImplemented")) == [Ask.HEAD]
        expected = next(iter(write.expected.etags), None)
        [again] = progress.after(Headed(expected))
        assert isinstance(again, Finish | Delete)
        assert not again.is_conditional
        etag = None if write.deleted else write.etag
        assert progress.after(Finished(etag)) == [JournalNote.LEARN, Settle(etag)]
        assert kind_of(write) == kind
    other = Progress(single(), ALL)
    assert play(other, WriteRefused("NotImplemented"), Headed(None), WriteRefused("NotImplemented")) == [
        JournalNote.UNMARK,
        Wait("NotImplemented", is_away=False),
    ]


def test_parts_go_side_by_side_and_complete_comes_last() -> None:
    """A bounded number at once, each of them once."""
    progress = Progress(multipart(PARTS_AT_ONCE + 2), ALL)
    assert play(progress, Headed(None)) == [Ask.BEGIN]
    first = progress.after(begun(progress.write))
    numbers = [one.part.number for one in first if isinstance(one, SendPart)]
    assert numbers == list(range(1, PARTS_AT_ONCE + 1))
    last: Sequence[Instruction] = []
    while numbers:
        number = numbers.pop()
        last = progress.after(PartSent("o", number, f"e{number}"))
        numbers += [one.part.number for one in last if isinstance(one, SendPart)]
    assert last == [Finish(None)]


def test_what_a_part_takes_does_not_grow_with_their_number() -> None:
    """Of an object of many parts, too, what is done when one of them is sent is as much as of few."""
    progress = Progress(multipart(2000), ALL)
    play(progress, Headed(None))
    under_way = list(progress.after(begun(progress.write)))
    with longest_step() as longest:
        while isinstance(first := under_way.pop(0), SendPart):
            longest.end()
            under_way += progress.after(PartSent("o", first.part.number, f"e{first.part.number}"))
    assert isinstance(first, Finish)
    assert [one.origin_etag for one in progress.write.parts] == [f"e{number}" for number in range(1, 2001)]
    assert longest.lines < 100, longest


def test_where_conditions_are_not_honoured_a_look_comes_right_before_complete() -> None:
    """Sending parts takes a while."""
    progress = Progress(sent(multipart(1, origin_upload_id="o"), 1))
    assert progress.begin() == [Ask.HEAD]
    assert progress.after(Headed('"theirs"')) == [MarkConflict(OTHERS)]


def test_what_the_origin_has_is_not_sent_again() -> None:
    """After a restart only the parts that are missing there are sent."""
    write = sent(multipart(3, origin_upload_id="o"), 1, 3)
    [one] = play(Progress(write))
    assert isinstance(one, SendPart)
    assert (one.origin_upload_id, one.part.number) == ("o", 2)


@pytest.mark.parametrize("expected", [ExpectedVersion(absent=True), ExpectedVersion(('"other"',))])
def test_somebody_elses_write_is_a_conflict(expected: ExpectedVersion) -> None:
    """Kept, whatever it is; also where it is of the same bytes: it may be different in all else."""
    for found in ('"theirs"', single().etag):
        assert play(Progress(single(expected=expected)), Headed(found)) == [MarkConflict(OTHERS)]
    assert play(Progress(single(expected=ExpectedVersion(('"old"',)))), Headed(None)) == [MarkConflict(OTHERS)]
    assert play(Progress(tombstone()), Headed('"theirs"')) == [MarkConflict(OTHERS)]


@pytest.mark.parametrize("code", ["PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"])
def test_a_condition_that_fails_says_that_it_is_looked_at(code: str) -> None:
    """What lies there decides; where it is as expected after all, it is sent again, once, and then later."""
    progress = Progress(single(), ALL)
    assert play(progress, WriteRefused(code)) == [Ask.HEAD]
    assert progress.after(Headed('"theirs"')) == [MarkConflict(OTHERS)]
    progress = Progress(single(), ALL)
    assert play(progress, WriteRefused(code), Headed(None)) == [Finish(None)]
    assert progress.after(WriteRefused(code))[-1] == Wait(code, is_away=False)


def test_a_lost_answer_is_decided_by_what_lies_there() -> None:
    """Ours: done. What was there before: once more. Of the same length: compared. Else somebody else's."""
    for conditions in (Conditions(), ALL, NONE):
        doubtful = single(state=State.PUBLISHING, expected=ExpectedVersion(('"old"',)))
        done = Settle(doubtful.etag)
        assert play(Progress(doubtful, conditions), Headed(doubtful.etag)) == [done]
        [again] = play(Progress(doubtful, conditions), Headed('"old"'))
        assert isinstance(again, Finish)
        assert again.expected == '"old"'
        assert play(Progress(doubtful, conditions), Headed('"theirs"', size_bytes=99)) == [MarkConflict(OTHERS)]
        progress = Progress(doubtful, conditions)
        assert play(progress, Headed('"opaque"', size_bytes=doubtful.size_bytes)) == [Compare('"opaque"')]
        assert progress.after(Compared(True)) == [Settle('"opaque"')]
        assert play(Progress(doubtful, conditions), Headed('"x"', size_bytes=doubtful.size_bytes), Compared(False)) == [
            MarkConflict(OTHERS)
        ]


def test_the_same_bytes_as_before_are_sent_all_the_same() -> None:
    """A lost answer says nothing where the key had these bytes already: what else was written with them counts too."""
    doubtful = single(state=State.PUBLISHING)
    doubtful = replace(doubtful, expected=ExpectedVersion((doubtful.etag,)))
    assert play(Progress(doubtful), Headed(doubtful.etag)) == [Finish(doubtful.etag)]


def test_an_upload_that_the_origin_has_forgotten_is_begun_anew() -> None:
    """All parts are sent again, and the old upload is cleared away."""
    gone = sent(multipart(1, origin_upload_id="gone"), 1)
    for code in ("NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall"):
        assert play(Progress(gone, ALL), WriteRefused(code)) == [JournalNote.START_OVER, Wait(code, is_away=False)]
        often = Progress(replace(gone, restarts=RESTARTS_MAX), ALL)
        told = [JournalNote.START_OVER, Wait(f"{code}: its words", is_away=False)]
        assert play(often, WriteRefused(code, words="its words")) == told
        [_, wait] = play(Progress(replace(gone, restarts=RESTARTS_MAX), ALL), WriteRefused(code))
        assert isinstance(wait, Wait)
        assert wait.refused_with == code
        assert not wait.waits_for_bucket
    progress = Progress(multipart(1), ALL)
    assert play(progress, Headed(None)) == [Ask.BEGIN]
    assert [type(one) for one in progress.after(begun(progress.write, "new"))] == [SendPart]
    assert progress.after(PartSent("gone", 1, "late")) == []
    assert progress.after(PartSent("new", 1, "e1")) == [Finish(None)]


def test_an_upload_that_is_gone_because_it_is_complete_is_done() -> None:
    """NoSuchUpload after a Complete whose answer was lost: the ETag decides."""
    doubtful = sent(multipart(1, origin_upload_id="o", state=State.PUBLISHING), 1)
    assert play(Progress(doubtful, ALL), Headed(None), WriteRefused("NoSuchUpload"))[-1] == Wait(
        "NoSuchUpload", is_away=False
    )
    [over] = play(Progress(doubtful, ALL), Headed(doubtful.etag))
    assert isinstance(over, Settle)


def test_one_failure_of_several_parts_counts_once() -> None:
    """The others that fail with it say nothing new, nor do those that come through."""
    progress = Progress(multipart(3, origin_upload_id="o"))
    play(progress, Headed(None))
    assert progress.after(PartFailed("o", 1, Lost("reset"))) == [Wait("reset", is_away=True)]
    assert progress.after(PartFailed("o", 3, Lost("reset"))) == []
    assert progress.after(PartSent("o", 2, "e2")) == []


MISSING, THERE = LookedFor(2, 7, "s3://b/a"), LookedFor(0, 7)
AWAITED = AwaitFiles("waits for 2 files of 7 that it names, such as s3://b/a")


def test_a_manifest_is_sent_when_its_files_are_there() -> None:
    """They are looked for before anything is written down of its publication; missing ones are no failure."""
    progress = Progress(single(), ALL, names_files=True)
    assert progress.begin() == [Ask.LOOK_FOR_FILES]
    assert progress.after(MISSING) == [AWAITED]
    assert progress.write.state is State.COMMITTED
    progress = Progress(single(), ALL, names_files=True)
    assert play(progress, THERE) == [Finish(None)]
    assert progress.after(Finished(progress.write.etag)) == [Settle(progress.write.etag)]


def test_where_conditions_are_not_honoured_a_look_comes_behind_that_for_the_files() -> None:
    """It may have taken long: what was seen under the key before says nothing any more."""
    for conditions in (Conditions(), NONE):
        progress = Progress(single(), conditions, names_files=True)
        assert play(progress, Headed(None), THERE) == [Ask.HEAD]
        assert progress.after(Headed('"theirs"')) == [MarkConflict(OTHERS)]


def test_the_parts_of_a_manifest_go_ahead() -> None:
    """They are not visible. So it is where the client waits for the origin to complete it."""
    progress = Progress(multipart(1, origin_upload_id="o"), ALL, names_files=True)
    assert [type(one) for one in play(progress, Headed(None))] == [SendPart]
    assert progress.after(PartSent("o", 1, "e1")) == [Ask.LOOK_FOR_FILES]
    assert progress.after(THERE) == [Finish(None)]
    write = sent(waiting(origin_upload_id="o"), 1, 2)
    assert play(Progress(write, names_files=True)) == [Ask.LOOK_FOR_FILES]
    assert play(Progress(write, names_files=True), THERE) == [Ask.COMPLETE]
    assert play(Progress(write, names_files=True), MISSING) == [AWAITED]


def test_files_that_cannot_be_looked_for_hold_a_manifest_up() -> None:
    """That is a failure like any other; a manifest that may be there already is looked at first, and not taken back."""
    assert play(Progress(single(), ALL, names_files=True), Lost("reset")) == [Wait("reset", is_away=True)]
    refused = WriteRefused("AccessDenied")
    assert play(Progress(single(), ALL, names_files=True), refused) == [Wait("AccessDenied", is_away=False)]
    doubtful = single(state=State.PUBLISHING)
    assert play(Progress(doubtful, ALL, names_files=True), Headed(doubtful.etag)) == [Settle(doubtful.etag)]
    assert play(Progress(doubtful, ALL, names_files=True), Headed(None), MISSING) == [AWAITED]
    assert play(Progress(tombstone(), ALL, names_files=True)) == [Delete('"old"')]


def test_an_origin_that_could_not_be_asked_may_have_what_is_older() -> None:
    """What was there before the absorb began is overwritten, as if it had been seen; what came later is a conflict."""
    unknown = single(expected=ExpectedVersion(known=False, asked_at=10_000.0))
    asked = Moment(11_000.0)
    older = Headed('"old"', 1000.0 + CLOCKS_APART_SECONDS + 1, moment=asked)
    newer = Headed('"new"', 1000.0 + CLOCKS_APART_SECONDS - 1, moment=asked)
    assert play(Progress(unknown, ALL), REFUSED, older) == [Finish('"old"')]
    assert play(Progress(unknown, ALL), REFUSED, Headed(None, moment=asked)) == [Finish(None)]
    assert play(Progress(unknown, ALL), REFUSED, newer) == [MarkConflict(OTHERS)]
    own = single(expected=ExpectedVersion(('"own"',), known=False, asked_at=10_000.0))
    assert play(Progress(own, ALL)) == [Finish('"own"')]
    assert play(Progress(own), Headed('"own"', 1.0, moment=asked)) == [Finish('"own"')]
    clock_has_gone_back = Headed('"old"', 1e9, moment=Moment(9_000.0))
    assert play(Progress(unknown, ALL), REFUSED, clock_has_gone_back) == [MarkConflict(OTHERS)]


def test_an_absence_that_a_proxy_may_have_told_comes_first_and_proves_nothing() -> None:
    """The condition says so; if it does not hold, an older version is what was there, and a newer one another's."""
    unproven = single(expected=ExpectedVersion(absent=True, known=False, asked_at=10_000.0))
    asked = Moment(11_000.0)
    older = Headed('"old"', 1000.0 + CLOCKS_APART_SECONDS + 1, moment=asked)
    newer = Headed('"new"', 1000.0 + CLOCKS_APART_SECONDS - 1, moment=asked)
    assert play(Progress(unproven, ALL)) == [Finish(None)]
    assert play(Progress(unproven, ALL), REFUSED, older) == [Finish('"old"')]
    assert play(Progress(unproven, ALL), REFUSED, newer) == [MarkConflict(OTHERS)]
    assert play(Progress(unproven), older) == [Finish('"old"')]


def test_within_one_boot_the_monotonic_clock_tells() -> None:
    """Whatever the wall clock was set to meanwhile; and to a few seconds, where the origin tells its time."""
    expected = ExpectedVersion(known=False, asked_at=10_000.0, asked=Moment(10_000.0, 50.0, "boot"))
    for wall in (0.0, 10_030.0, 1e9):
        asked = Moment(wall, 80.0, "boot")
        older, newer = Headed('"old"', 36.0, moment=asked), Headed('"new"', 29.0, moment=asked)
        assert play(Progress(single(expected=expected), ALL), REFUSED, older) == [Finish('"old"')]
        assert play(Progress(single(expected=expected), ALL), REFUSED, newer) == [MarkConflict(OTHERS)]


def test_a_deletion_ends_where_nothing_is() -> None:
    """Whoever has removed it."""
    assert play(Progress(tombstone()), Headed(None)) == [Settle(None)]
    for conditions in (Conditions(), ALL, NONE):
        assert play(Progress(replace(tombstone(), expected=ExpectedVersion(absent=True)), conditions)) == [Ask.HEAD]
    doubtful = tombstone(state=State.PUBLISHING)
    assert play(Progress(doubtful, ALL), Headed(None)) == [Settle(None)]
    assert play(Progress(doubtful, ALL), Headed('"old"')) == [Delete('"old"')]
    assert play(Progress(doubtful, ALL), Headed('"theirs"')) == [MarkConflict(OTHERS)]


# Open uploads


def test_an_upload_that_its_client_has_completed_or_ended_meanwhile_is_looked_at_anew() -> None:
    """At once; parts that are still on their way first come to their end."""
    progress = Progress(opened(2, origin_upload_id="o"))
    progress.begin()
    assert progress.after(PartSent("o", 1, "e", State.COMMITTED)) == []
    assert progress.after(PartSent("o", 2, "e", State.COMMITTED)) == [Rest(0.0)]
    progress = Progress(opened(1))
    progress.begin()
    assert progress.after(Begun(replace(progress.write, origin_upload_id="o", state=State.COMMITTED))) == [Rest(0.0)]


def test_an_object_of_parts_may_be_younger_than_it_is_dated() -> None:
    """S3 dates it by the beginning of its upload: others may have completed it after the write."""
    write = single(expected=ExpectedVersion(known=False, asked_at=1000.0, asked=Moment(1000.0, 10.0, "boot")))
    now = Moment(1100.0, 110.0, "boot")
    for etag, age_seconds, is_others in (
        ('"x"', 1000.0, False),
        ('"x-2"', 1000.0, True),
        ('"x-2"', DATED_EARLIER_SECONDS_MAX + 100.0, True),
        ('"x-2"', DATED_EARLIER_SECONDS_MAX + 200.0, False),
    ):
        [found] = play(Progress(write, ALL), REFUSED, Headed(etag, age_seconds, moment=now))
        assert isinstance(found, MarkConflict) == is_others
    seen = replace(write, expected=replace(write.expected, etags=('"x-2"',)))
    assert play(Progress(seen, ALL)) == [Finish('"x-2"')]
    assert play(Progress(seen), Headed('"x-2"', 1000.0, moment=now)) == [Finish('"x-2"')]


@pytest.mark.parametrize("boot", ["before", ""])
def test_nothing_is_ended_by_a_clock_that_a_boot_has_set(boot: str) -> None:
    """The wall clock may be days ahead until it is set: only what this boot has seen counts for what is final. `boot`
    is that of when its client was here last; a version of before has not written it down."""
    touched = Moment(1000.0, 10.0, boot) if boot else Moment(1000.0)
    there = replace(upload("u", key("k")), parts=(), origin_upload_id="o", touched=touched)
    days = 1000.0 + 7 * 86_400.0
    assert play(Progress(there, now=Moment(days, 20.0, "now"))) == [Rest(UPLOAD_LOOK_SECONDS - 20.0)]
    (end,) = play(Progress(there, now=Moment(days, 86_400.0, "now")))
    assert isinstance(end, Expire)
    asked = CreateAttempt(0, touched, touched)
    perhaps = replace(there, state=State.ABORTING, asked=asked)
    assert play(Progress(perhaps, now=Moment(days, 20.0, "now"))) == [Rest(UPLOAD_LOOK_SECONDS)]
    assert play(Progress(perhaps, now=Moment(days, UNUSED_SECONDS, "now"))) == [Ask.FIND]


def test_an_idle_upload_is_asked_for_now_and_then_and_expires() -> None:
    """The next look is never later than its expiry."""
    there = opened(origin_upload_id="o")
    assert play(Progress(there, now=Moment(10.0))) == [Rest(UPLOAD_LOOK_SECONDS - 10.0)]
    assert play(Progress(there, now=Moment(UPLOAD_LOOK_SECONDS))) == [Ask.FIND]
    assert play(Progress(there, now=Moment(UPLOAD_LOOK_SECONDS)), FoundObject(True)) == [Rest(UPLOAD_LOOK_SECONDS)]
    [gone] = play(Progress(there, now=Moment(UPLOAD_LOOK_SECONDS)), FoundObject(False))
    assert isinstance(gone, Expire)
    [over] = play(Progress(there, now=Moment(1000.0), expiry_seconds=1000.0))
    assert isinstance(over, Expire)
    assert play(Progress(there, now=Moment(900.0), expiry_seconds=1000.0), FoundObject(True)) == [Rest(100.0)]


def test_a_clock_that_is_set_forward_ends_no_upload() -> None:
    """How long it was left alone tells the clock that nobody sets."""
    there = replace(opened(origin_upload_id="o"), touched=Moment(0.0, 500.0, "boot"))
    assert play(Progress(there, now=Moment(1e6, 510.0, "boot"))) == [Rest(UPLOAD_LOOK_SECONDS - 10.0)]


# Completes that a client waits for


def waiting(**changed: object) -> Write:
    made = replace(opened(2, origin_upload_id="o"), state=State.PUBLISHING, etag='"made-2"', sequence=1)
    return replace(made, **changed)  # type: ignore[arg-type]


def test_the_origin_completes_while_the_client_waits() -> None:
    """What is missing there is sent before."""
    progress = Progress(sent(waiting(), 1), ALL)
    assert [type(one) for one in progress.begin()] == [SendPart]
    assert progress.after(PartSent("o", 2, "e", State.PUBLISHING)) == [Ask.COMPLETE]
    assert progress.after(Finished(None)) == [Completed('"made-2"')]


def test_its_refusal_is_the_clients_answer() -> None:
    """The upload is open still. A condition that fails is believed where the upload is there: else it was carried out
    before."""
    whole = sent(waiting(), 1, 2)
    assert play(Progress(whole), WriteRefused("AccessDenied")) == [OriginReply("AccessDenied", is_over=True)]
    for said in ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"):
        progress = Progress(whole)
        assert play(progress, WriteRefused(said)) == [Ask.FIND]
        assert progress.after(FoundObject(True)) == [OriginReply(said, is_over=True)]
    for code in ("NotImplemented", "AccessDenied"):  # nobody may look whether it is there
        refused = [WriteRefused("PreconditionFailed"), WriteRefused(code)]
        assert play(Progress(whole), *refused) == [OriginReply("PreconditionFailed", is_over=True)]
    progress = Progress(whole)
    play(progress, WriteRefused("PreconditionFailed"), FoundObject(False))
    assert progress.after(Headed('"made-2"')) == [Completed('"made-2"')]


def test_a_lost_answer_is_told_as_such_and_found_out() -> None:
    """Nobody is told that it has failed who does not know."""
    whole = sent(waiting(), 1, 2)
    assert play(Progress(whole), Lost("reset"), Headed('"made-2"')) == [Completed('"made-2"')]
    assert play(Progress(whole), Lost("reset"), Headed('"x"')) == [OriginReply("ServiceUnavailable", is_over=False)]
    asked = replace(whole, answer="ServiceUnavailable")
    assert play(Progress(asked)) == [Ask.FIND]
    assert play(Progress(asked), FoundObject(False), Headed('"made-2"')) == [Completed('"made-2"')]
    assert play(Progress(asked), FoundObject(False), Headed('"theirs"')) == [
        JournalNote.START_OVER,
        OriginReply("NoSuchUpload", is_over=True),
    ]
    [rest] = play(Progress(asked, now=Moment(1.0)), FoundObject(True))
    assert isinstance(rest, Rest)
    assert play(Progress(asked, now=Moment(1e6)), FoundObject(True)) == [
        OriginReply("ServiceUnavailable", is_over=True)
    ]


# Uploads to be aborted


def test_what_is_to_be_aborted_is() -> None:
    """Or, where only key and time are known, looked for."""
    there = replace(opened(origin_upload_id="o"), state=State.ABORTING)
    assert play(Progress(there)) == [Ask.ABORT]
    assert play(Progress(there), Aborted()) == [Forget()]
    assert play(Progress(there), WriteRefused("AccessDenied")) == [Wait("AccessDenied", is_away=False)]
    suspect = replace(opened(), state=State.ABORTING, asked=CreateAttempt(0, Moment(0.0), Moment(0.0)), began_at=0.0)
    assert play(Progress(suspect)) == [Ask.SEEK]
    [forgotten] = play(Progress(suspect, now=Moment(1.0)), WriteRefused("NotImplemented"))
    assert isinstance(forgotten, Forget)
    assert forgotten.reason is not None
    assert play(Progress(suspect, now=Moment(1.0)), WriteRefused("AccessDenied")) == [
        Wait("AccessDenied", is_away=False)
    ]
    [late] = play(Progress(suspect, now=Moment(1e6)), WriteRefused("AccessDenied"))
    assert isinstance(late, Forget)


# All of it, at an origin that does anything


@dataclass
class _Origin:
    """One key of an origin of some dialect."""

    does: Mapping[str, str]
    opaque: bool
    etag: str | None
    count: int = 0
    uploads: dict[str, set[int]] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    ours: set[str] = field(default_factory=set)
    """ETags under which ours have been there."""
    bytes_of: dict[str, str] = field(default_factory=dict)
    damaged: bool = False

    def fails(self, kind: str, condition: bool, expected: str | None) -> WriteRefused | None:
        """What becomes of a request under a condition."""
        if not condition or self.does[kind] == "ignored":
            return None
        if self.does[kind] == "refused" or (self.does[kind] == "creates" and expected is not None):
            return WriteRefused("NotImplemented")
        if self.etag == expected:
            return None
        return WriteRefused("NoSuchKey" if self.etag is None and expected is not None else "PreconditionFailed")

    def take(self, write: Write, *, damaging: bool) -> str:
        """It has ours now, or what has become of it."""
        self.count += 1
        self.damaged |= damaging
        etag = f'"made {self.count}"' if self.opaque or damaging else write.etag
        self.etag, self.bytes_of[etag] = etag, "damaged" if damaging else OURS
        self.ours.add(etag)
        return etag


@dataclass
class _World:
    """The origin, the journal's word on the write, and others who write the key."""

    origin: _Origin
    journal: Write
    data: st.DataObject
    seen: set[str | None]
    """What may be overwritten or deleted: what was there when the write was absorbed."""

    names_files: bool = False
    are_files_there: bool = False
    calm: bool = False
    outcome: End | None = None
    others: list[str | None] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)

    def draw(self, *choices: str) -> str:
        return choices[0] if self.calm else self.data.draw(st.sampled_from(choices))

    def others_write(self, turn: int) -> None:
        """Something, nothing, or the very bytes of ours."""
        what = self.draw("object", "nothing", "the same")
        etag = {"object": f'"outside {turn}"', "nothing": None, "the same": self.journal.etag}[what]
        if self.journal.deleted and what == "the same":
            etag = f'"outside {turn}"'
        self.others.append(etag)
        self.origin.etag = etag
        if etag is not None:
            self.origin.bytes_of[etag] = OURS if what == "the same" else "theirs"
            if what == "the same":
                self.origin.ours.discard(etag)

    def restart(self, conditions: Conditions) -> Progress:
        return Progress(self.journal, conditions, names_files=self.names_files)

    def carry_out(self, instruction: Instruction) -> Event | None:
        """What comes of an instruction, the answer lost or refused now and then. None: nothing is answered."""
        match instruction:
            case JournalNote.UNMARK:
                self.journal = replace(self.journal, state=State.COMMITTED)
            case JournalNote.START_OVER:
                parts = [replace(one, origin_etag=None) for one in self.journal.parts]
                self.journal = replace(self.journal, origin_upload_id=None, parts=parts)
            case Finish() | Delete():
                self.journal = replace(self.journal, state=State.PUBLISHING)
        if isinstance(instruction, JournalNote):
            return None
        if isinstance(instruction, End):
            self.outcome = instruction
            return None
        fate = self.draw("done", "done", "done", "lost before", "lost after", "refused")
        if fate == "lost before":
            return _failed(instruction, Lost("before"))
        if fate == "refused":
            return _failed(instruction, WriteRefused("AccessDenied"))
        done = self._at_the_origin(instruction)
        return _failed(instruction, Lost("after")) if fate == "lost after" else done

    def _at_the_origin(self, instruction: Instruction) -> Event:
        origin = self.origin
        match instruction:
            case Ask.HEAD:
                size_bytes = self.journal.size_bytes if self.draw("same", "other") == "same" else 99
                if origin.etag is not None and origin.bytes_of.get(origin.etag) == OURS:
                    size_bytes = self.journal.size_bytes
                return Headed(origin.etag, size_bytes=size_bytes)
            case Ask.BEGIN:
                return self._begin()
            case SendPart():
                return self._send_part(instruction)
            case Ask.LOOK_FOR_FILES:
                self.are_files_there |= self.draw("there", "missing") == "there"
                return THERE if self.are_files_there else MISSING
            case Compare():
                if origin.etag != instruction.etag:
                    return Compared(None)
                return Compared(origin.bytes_of.get(instruction.etag) == OURS)
            case Finish():
                return self._finish(instruction)
            case Delete():
                return self._delete(instruction)
        raise AssertionError(instruction)

    def _begin(self) -> Event:
        self.origin.count += 1
        name = f"o{self.origin.count}"
        self.origin.uploads[name] = set()
        self.journal = replace(self.journal, origin_upload_id=name)
        return Begun(self.journal)

    def _send_part(self, send: SendPart) -> Event:
        upload = self.origin.uploads.get(send.origin_upload_id)
        if upload is None:
            return _failed(send, WriteRefused("NoSuchUpload"))
        upload.add(send.part.number)
        event = PartSent(send.origin_upload_id, send.part.number, "e", self.journal.state)
        if send.origin_upload_id == self.journal.origin_upload_id:
            self.journal = with_part_sent(self.journal, event)
        return event

    def _finish(self, finish: Finish) -> Event:
        write, kind = self.journal, "complete" if self.journal.multipart else "put"
        name = write.origin_upload_id or ""
        if write.multipart and self.origin.uploads.get(name) != {one.number for one in write.parts}:
            return WriteRefused("NoSuchUpload")
        failed = self.origin.fails(kind, finish.is_conditional, finish.expected)
        if failed is not None:
            return failed
        self._overwrites()
        if self.names_files and not self.are_files_there:
            self.wrongs.append("a manifest is there before its files")
        self.origin.uploads.pop(name, None)
        etag = self.origin.take(write, damaging=self.draw("whole", "whole", "whole", "damaged") == "damaged")
        return Finished(None if self.draw("told", "told", "untold") == "untold" else etag)

    def _delete(self, delete: Delete) -> Event:
        failed = self.origin.fails("delete", delete.is_conditional, delete.expected)
        if failed is not None:
            return failed
        self._overwrites()
        if delete.expected not in self.seen:
            self.wrongs.append("what was not seen is to be deleted")
        self.origin.etag = None
        return Finished(None)

    def _overwrites(self) -> None:
        """Where the origin judges no condition, others may come between the look and the request: nobody can help
        that, and in this world they do not."""
        there = self.origin.etag
        if self.journal.deleted and there is None:
            return
        if there not in self.seen and there not in self.origin.ours:
            self.wrongs.append(f"what others have done is undone: {there}")


def _failed(instruction: Instruction, failure: Lost | WriteRefused) -> Event:
    if not isinstance(instruction, SendPart):
        return failure
    return PartFailed(instruction.origin_upload_id, instruction.part.number, failure)


KNOWN = {
    "honoured": Honoured.YES,
    "ignored": Honoured.IGNORED,
    "refused": Honoured.REFUSED,
    "creates": Honoured.CREATES,
}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    what=st.sampled_from(["object", "upload", "tombstone"]),
    parts=st.integers(1, 5),
    existed=st.booleans(),
    does=st.fixed_dictionaries({kind: st.sampled_from(sorted(KNOWN)) for kind in ("put", "complete", "delete")}),
    is_probed=st.booleans(),
    opaque=st.booleans(),
    names_files=st.booleans(),
)
def test_nothing_is_lost_whatever_happens(
    data: st.DataObject,
    what: str,
    parts: int,
    existed: bool,
    does: dict[str, str],
    is_probed: bool,
    opaque: bool,
    names_files: bool,
) -> None:
    """Lost answers, refusals, restarts and other writers in any order, at origins of every dialect: the write ends at
    the origin, or as a conflict, and never stays without a next step.

    A manifest does not become visible before its files were found. What others have written since the absorb is never
    overwritten or deleted; a conflict is with others, or about damage.
    """
    old = '"old"' if existed or what == "tombstone" else None
    write = {"object": single(), "upload": multipart(parts), "tombstone": tombstone()}[what]
    write = replace(write, expected=ExpectedVersion.exactly(old))
    origin = _Origin(does, opaque, old)
    if old is not None:
        origin.bytes_of[old] = "old"
    world = _World(origin, write, data, {old}, names_files)
    conditions = (
        Conditions(*(KNOWN[does[kind]] for kind in ("put", "complete", "delete"))) if is_probed else Conditions()
    )
    how = does[{"object": "put", "upload": "complete", "tombstone": "delete"}[what]]
    is_held_off = how == "honoured" or (how == "creates" and old is None)
    progress = world.restart(conditions)
    queue = list(progress.begin())
    for turn in range(400):
        world.calm = turn >= 120
        happening = world.draw(*["go on"] * 12, "restart", "others", "lifecycle")
        if happening == "restart":
            progress = world.restart(conditions)
            queue = list(progress.begin())
        elif happening == "others" and (is_held_off or not _is_change_on_its_way(queue)):
            world.others_write(turn)
        elif happening == "lifecycle":
            origin.uploads.clear()
        if not queue:
            raise AssertionError(f"stuck without an end: {progress}")
        instruction = queue.pop(0 if world.calm else data.draw(st.integers(0, len(queue) - 1)))
        answer = world.carry_out(instruction)
        if answer is not None:
            queue += progress.after(answer)
        assert not world.wrongs
        if isinstance(world.outcome, Settle | MarkConflict):
            break
        if world.outcome is not None and not any(isinstance(one, SendPart) for one in queue):
            assert isinstance(world.outcome, Wait | Rest | AwaitFiles)
            world.outcome = None
            progress = world.restart(conditions)
            queue = list(progress.begin())
    report(type(world.outcome).__name__)
    _check(world)


def _is_change_on_its_way(queue: Sequence[Instruction]) -> bool:
    return any(isinstance(one, Finish | Delete) for one in queue)


def _check(world: _World) -> None:
    origin, write = world.origin, world.journal
    if isinstance(world.outcome, Settle):
        are_our_bytes = any(origin.bytes_of.get(one or "") == OURS for one in world.others)
        assert write.deleted or origin.ours or are_our_bytes
    elif isinstance(world.outcome, MarkConflict):
        assert world.others or origin.damaged
        assert world.outcome.reason in (OTHERS, DIFFERENT)
        # Where the origin does not tell its ETag, others' object may be taken for what it has made of ours.
        assert world.outcome.reason != DIFFERENT or origin.damaged or world.others
    else:
        raise AssertionError(f"neither at the origin nor a conflict: {world.outcome}")
