"""How a pending object gets to the origin, whatever the origin does: never lost, never over somebody else's write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event as note
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.writeback.flushing.upload_state import (
    CLOCKS_APART_SECONDS,
    PARTS_AT_ONCE,
    Again,
    Begin,
    Begun,
    Delete,
    Event,
    Finish,
    Finished,
    Flush,
    Head,
    Headed,
    Instruction,
    Keep,
    Lost,
    PartFailed,
    PartSent,
    Refused,
    SendPart,
    Settle,
    StartOver,
    Wait,
    with_part_sent,
)
from gateway.writeback.journal.records import Base, PendingObject, State
from tests.support.writeback import key, part, pending

OURS = "ours"


def single(**changed: object) -> PendingObject:
    return replace(pending(key("k"), OURS), sequence=1, **changed)  # type: ignore[arg-type]


def multipart(count: int, **changed: object) -> PendingObject:
    parts = tuple(part(number, f"{OURS}{number}") for number in range(1, count + 1))
    return replace(pending(key("k"), parts=parts, multipart=True), sequence=1, **changed)  # type: ignore[arg-type]


def play(flush: Flush, *events: Event) -> Sequence[Instruction]:
    instructions = flush.begin()
    for one in events:
        instructions = flush.after(one)
    return instructions


def test_an_object_is_put_where_nothing_else_lies() -> None:
    """Look, send under the condition of what was seen, look again, done."""
    flush = Flush(single())
    assert flush.begin() == [Head()]
    assert flush.after(Headed(None)) == [Finish(None)]
    assert flush.object.state is State.SENDING
    assert flush.after(Finished(flush.object.etag)) == [Head()]
    assert flush.after(Headed(flush.object.etag)) == [Settle(flush.object.etag)]
    assert flush.ended


def test_parts_go_side_by_side_and_complete_comes_last() -> None:
    """A bounded number at once, each of them once."""
    flush = Flush(multipart(PARTS_AT_ONCE + 2))
    assert play(flush, Headed(None)) == [Begin()]
    first = flush.after(Begun("o"))
    assert [one.part.number for one in first if isinstance(one, SendPart)] == list(range(1, PARTS_AT_ONCE + 1))
    sent = [one.part.number for one in first if isinstance(one, SendPart)]
    last: Sequence[Instruction] = []
    while sent:
        number = sent.pop()
        last = flush.after(PartSent("o", number, f"e{number}"))
        sent += [one.part.number for one in last if isinstance(one, SendPart)]
    assert last == [Finish(None)]


def test_what_the_origin_has_is_not_sent_again() -> None:
    """After a restart only the parts that are missing there are sent."""
    object_ = multipart(3, origin_upload_id="o")
    object_ = with_part_sent(with_part_sent(object_, PartSent("o", 1, "e1")), PartSent("o", 3, "e3"))
    sent = play(Flush(object_), Headed(None))
    assert [(one.origin_upload_id, one.part.number) for one in sent if isinstance(one, SendPart)] == [("o", 2)]


@pytest.mark.parametrize("base", [Base(absent=True), Base(('"other"',))])
def test_somebody_elses_write_is_a_conflict(base: Base) -> None:
    """Kept, whatever it is; also where it is of the same bytes: it may be different in all else."""
    for found in ('"theirs"', single().etag):
        flush = Flush(single(base=base))
        assert play(flush, Headed(found)) == [Keep(found)]
        assert flush.object.state is State.CONFLICT
    assert play(Flush(single(base=Base(('"old"',)))), Headed(None)) == [Keep(None)]


def test_a_lost_answer_is_decided_by_what_lies_there() -> None:
    """Ours: done. What was there before: once more. Else somebody else's."""
    sending = single(state=State.SENDING, base=Base(('"old"',)))
    assert play(Flush(sending), Headed(sending.etag)) == [Settle(sending.etag)]
    assert play(Flush(sending), Headed('"old"')) == [Finish('"old"')]
    assert play(Flush(sending), Headed('"theirs"')) == [Keep('"theirs"')]


def test_the_same_bytes_as_before_are_sent_all_the_same() -> None:
    """A lost answer says nothing where the key had these bytes already: what else was written with them counts too."""
    sending = single(state=State.SENDING)
    sending = replace(sending, base=Base((sending.etag,)))
    assert play(Flush(sending), Headed(sending.etag)) == [Finish(sending.etag)]


def test_an_upload_that_the_origin_has_forgotten_is_begun_anew() -> None:
    """NoSuchUpload where the key is as before: all parts are sent again, and the old upload is cleared away."""
    flush = Flush(with_part_sent(multipart(1, origin_upload_id="gone"), PartSent("gone", 1, "e1")))
    assert play(flush, Headed(None)) == [Finish(None)]
    assert flush.after(Refused("NoSuchUpload")) == [StartOver(), Wait(1, "NoSuchUpload")]
    assert flush.after(Again()) == [Head()]
    assert flush.after(Headed(None)) == [Begin()]
    assert [type(one) for one in flush.after(Begun("new"))] == [SendPart]
    assert flush.after(PartSent("gone", 1, "late")) == []
    assert flush.after(PartSent("new", 1, "e1")) == [Finish(None)]


def test_an_upload_that_is_gone_because_it_is_complete_is_done() -> None:
    """NoSuchUpload after a Complete whose answer was lost: the ETag decides."""
    flush = Flush(with_part_sent(multipart(1, origin_upload_id="o"), PartSent("o", 1, "e1")))
    play(flush, Headed(None), Lost("reset"), Again(), Headed(None), Refused("NoSuchUpload"), Again())
    assert flush.after(Headed(flush.object.etag)) == [Settle(flush.object.etag)]


def test_failures_are_waited_out_for_ever() -> None:
    """However often, and whatever they are: nothing is given up."""
    flush = Flush(single())
    flush.begin()
    for count in range(1, 1000):
        failure = Refused("AccessDenied") if count % 2 else Lost("no answer")
        assert [type(one) for one in flush.after(failure)] == [Wait]
        assert flush.after(Again()) == [Head()]
        assert not flush.ended


def test_one_failure_of_several_parts_counts_once() -> None:
    """The others that fail with it say nothing new; those that come through count."""
    flush = Flush(multipart(3, origin_upload_id="o"))
    play(flush, Headed(None))
    assert flush.after(PartFailed("o", 1, "reset")) == [Wait(1, "reset")]
    assert flush.after(PartFailed("o", 3, "reset")) == []
    assert flush.after(PartSent("o", 2, "e2")) == []
    assert [one.number for one in flush.object.parts if one.origin_etag] == [2]


def test_what_others_write_after_ours_stays() -> None:
    """The origin has taken ours, and has something else by now: ours is done, and what follows it will see."""
    flush = Flush(single())
    play(flush, Headed(None), Finished(None))
    assert flush.after(Headed('"theirs"')) == [Settle(flush.object.etag)]


def test_an_object_that_the_origin_does_not_show_is_kept() -> None:
    """It said 200 and has nothing: the bytes are not given up."""
    flush = Flush(single())
    play(flush, Headed(None), Finished(None))
    assert flush.after(Headed(None)) == [Keep(None)]


def test_an_origin_that_could_not_be_asked_may_have_what_is_older() -> None:
    """What was there before the absorb began is overwritten, as if it had been seen; what came later is a conflict."""
    unknown = single(base=Base(known=False, asked_at=10_000.0))
    older = Headed('"old"', 10_000.0 - CLOCKS_APART_SECONDS - 1)
    assert play(Flush(unknown), older) == [Finish('"old"')]
    assert play(Flush(unknown), Headed(None)) == [Finish(None)]
    own = single(base=Base(('"own"',), known=False, asked_at=10_000.0))
    assert play(Flush(own), Headed('"own"', 9_999.0)) == [Finish('"own"')]
    assert play(Flush(unknown), Headed('"new"', 10_001.0)) == [Keep('"new"')]


def test_a_tombstone_is_sent_until_it_is_taken() -> None:
    """A DELETE asks for no condition."""
    flush = Flush(replace(pending(key("k"), deleted=True), sequence=1))
    assert flush.begin() == [Delete()]
    assert flush.after(Lost("reset")) == [Wait(1, "reset")]
    assert flush.after(Again()) == [Delete()]
    assert flush.after(Finished(None)) == [Settle(None)]


@dataclass
class _Origin:
    """One key of an origin that honours conditions, and what is under way to it."""

    etag: str | None
    history: list[str | None] = field(default_factory=list)
    uploads: dict[str, set[int]] = field(default_factory=dict)
    count: int = 0

    def write(self, etag: str | None) -> None:
        self.history.append(etag)
        self.etag = etag


@dataclass
class _World:
    """The origin, the journal's word on the object, and somebody else who writes the key."""

    origin: _Origin
    journal: PendingObject
    data: st.DataObject
    outcome: Instruction | None = None
    overwritten: list[str | None] = field(default_factory=list)

    def carry_out(self, instruction: Instruction) -> Event | None:
        """What comes of an instruction, the answer lost or refused now and then. None: nothing is answered."""
        fate = self.data.draw(st.sampled_from(["done", "done", "done", "lost before", "lost after", "refused"]))
        match instruction:
            case Head():
                return Lost("h") if fate.startswith("lost") else Headed(self.origin.etag)
            case Wait():
                return Again()
            case StartOver():
                parts = [replace(one, origin_etag=None) for one in self.journal.parts]
                self.journal = replace(self.journal, origin_upload_id=None, parts=parts)
                return None
            case Settle() | Keep():
                self.outcome = instruction
                return None
        if fate == "lost before":
            return _failed(instruction, Lost("before"))
        if fate == "refused":
            return _failed(instruction, Refused("AccessDenied"))
        done = self._at_the_origin(instruction)
        return _failed(instruction, Lost("after")) if fate == "lost after" else done

    def _at_the_origin(self, instruction: Instruction) -> Event:
        origin = self.origin
        match instruction:
            case Begin():
                origin.count += 1
                name = f"o{origin.count}"
                origin.uploads[name] = set()
                self.journal = replace(self.journal, origin_upload_id=name)
                return Begun(name)
            case SendPart():
                if instruction.origin_upload_id not in origin.uploads:
                    return _failed(instruction, Refused("NoSuchUpload"))
                origin.uploads[instruction.origin_upload_id].add(instruction.part.number)
                sent = PartSent(instruction.origin_upload_id, instruction.part.number, "e")
                self.journal = with_part_sent(self.journal, sent)
                return sent
            case Finish():
                return self._finish(instruction)
        raise AssertionError(instruction)

    def _finish(self, instruction: Finish) -> Event:
        origin, upload_id = self.origin, self.journal.origin_upload_id
        if self.journal.multipart and origin.uploads.get(upload_id or "") != {one.number for one in self.journal.parts}:
            return Refused("NoSuchUpload")
        if origin.etag != instruction.expected:
            return Refused("PreconditionFailed")
        self.overwritten.append(origin.etag)
        origin.write(self.journal.etag)
        origin.uploads.pop(upload_id or "", None)
        return Finished(self.journal.etag)


def _failed(instruction: Instruction, failure: Lost | Refused) -> Event:
    if not isinstance(instruction, SendPart):
        return failure
    reason, code = (failure.reason, None) if isinstance(failure, Lost) else (failure.code, failure.code)
    return PartFailed(instruction.origin_upload_id, instruction.part.number, reason, code)


@settings(max_examples=250, deadline=None)
@given(data=st.data(), parts=st.integers(0, 5), existed=st.booleans())
def test_nothing_is_lost_whatever_happens(data: st.DataObject, parts: int, existed: bool) -> None:
    """Lost answers, refusals, kills and other writers in any order: the object ends at the origin or as a conflict.

    What others have written since the absorb is never overwritten.
    """
    object_ = multipart(parts) if parts else single()
    old = '"old"' if existed else None
    world = _World(_Origin(old), replace(object_, base=Base.exactly(old)), data)
    outside: list[str | None] = []
    flush = Flush(world.journal)
    queue = list(flush.begin())
    for turn in range(200):
        if flush.ended and not queue:
            break
        happening = data.draw(st.sampled_from(["go on"] * 12 + ["kill", "outside", "lifecycle"])) if turn < 100 else ""
        if happening == "kill":
            flush = Flush(world.journal)
            queue = list(flush.begin())
        elif happening == "outside":
            outside.append(f'"outside {turn}"')
            world.origin.write(outside[-1])
        elif happening == "lifecycle":
            world.origin.uploads.clear()
        instruction = queue.pop(data.draw(st.integers(0, len(queue) - 1)) if turn < 100 else 0)
        if isinstance(instruction, Finish):
            world.journal = replace(world.journal, state=State.SENDING)
        answer = world.carry_out(instruction)
        if answer is not None:
            queue += flush.after(answer)
    note(type(world.outcome).__name__)
    assert set(world.overwritten) <= {old, object_.etag}
    if isinstance(world.outcome, Settle):
        assert object_.etag in world.origin.history
    elif isinstance(world.outcome, Keep):
        assert outside
    else:
        raise AssertionError("neither at the origin nor a conflict")
