"""Pending writes reach the origin as the client sent them, once, in order, whatever fails on the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from gateway.core.clock import Moment
from gateway.origin.client import OriginRequest
from gateway.s3.requests import Operation
from gateway.writeback.checkpoints.layouts import member_of, rules_of
from gateway.writeback.flushing.reconciler import AGAIN_SECONDS
from gateway.writeback.flushing.state import OTHERS, UNTOLD
from gateway.writeback.journal.buckets import Honoured
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import ExpectedVersion, Part, State, Turn, Write, WriteSpec
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.pending_key_filter import LOOK_SECONDS, QUICK_SECONDS, QUIET_SECONDS
from gateway.writeback.pending_reader import IN_MEMORY_BYTES_MAX
from tests.support.flushing import HEADERS, PART_BYTES, Buffer
from tests.support.journal_steps import steps_of_reads
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import AlterBody, Answer, Call, Delay, Hold, Unreachable, on
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import StoredObject
from tests.support.writeback import key

R = TypeVar("R")


class Torn:
    """An origin that takes in no part's bytes before it is told to; `torn` are the keys whose sender went away."""

    def __init__(self, origin: MemoryOrigin) -> None:
        self._origin = origin
        self.reached = asyncio.Event()
        self.torn: list[str | None] = []

    async def send(self, request: OriginRequest) -> MemoryResponse:
        if dict(request.query).get("partNumber") is not None and self._is_stuck(request):
            self.reached.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.torn.append(request.key)
                raise
        return await self._origin.send(request)

    def _is_stuck(self, request: OriginRequest) -> bool:
        return not self.torn

    async def aclose(self) -> None:
        return


def turn_of(buffer: Buffer, write: Write) -> Turn:
    found = buffer.journal.read(lambda tx: tx.turns.of(write.id))
    assert found is not None
    return found


@pytest.mark.parametrize("size", [0, 1, IN_MEMORY_BYTES_MAX, IN_MEMORY_BYTES_MAX + 1, 3_000_000])
async def test_an_object_arrives_as_it_was_put(buffer: Buffer, size: int) -> None:
    """Bytes, ETag, headers and checksums; then nothing of it is left here."""
    content = os.urandom(size)
    stored = await buffer.put(key("é/a b"), content)
    buffer.start()
    await buffer.flushed()
    assert buffer.origin.data("bucket", "é/a b") == content
    assert HEADERS.items() <= buffer.stored(key("é/a b")).items()
    assert buffer.observer.published == [("é/a b", stored.etag)]


async def test_a_small_object_costs_one_request(buffer: Buffer) -> None:
    """Where its bucket honours conditions, and one says all that is to be known of the key."""
    await buffer.learn()
    etag = buffer.origin.put("bucket", "old", b"old")
    for name in ("a", "b"):
        await buffer.put(key(name), b"x")
    await buffer.put(key("old"), b"new", expected=ExpectedVersion((etag,)))
    buffer.start()
    await buffer.flushed()
    assert [call.operation for call in buffer.origin.calls] == [Operation.PUT_OBJECT] * 3
    assert buffer.origin.data("bucket", "old") == b"new"


async def test_an_upload_arrives_in_its_own_parts(buffer: Buffer) -> None:
    """With the part boundaries and numbers of the client, so that the ETag is the one that it was told."""
    stored = await buffer.upload(key("model"), [PART_BYTES, PART_BYTES + 17, 3])
    buffer.start()
    await buffer.flushed()
    assert buffer.origin.count(Operation.UPLOAD_PART) == 3
    assert buffer.bucket.object("model").etag == stored.etag
    assert HEADERS.items() <= buffer.stored(key("model")).items()
    assert not buffer.bucket.uploads


@pytest.mark.parametrize(
    "operation",
    [
        Operation.HEAD_OBJECT,
        Operation.CREATE_MULTIPART_UPLOAD,
        Operation.UPLOAD_PART,
        Operation.COMPLETE_MULTIPART_UPLOAD,
    ],
)
@pytest.mark.parametrize(
    "effect",
    [
        Unreachable(),
        Unreachable(late=True),
        Answer(503, "SlowDown"),
        Answer(500, "InternalError", late=True),
        Answer(403, "AccessDenied"),
        Answer(404, "NoSuchBucket"),
    ],
    ids=str,
)
async def test_failures_are_waited_out(buffer: Buffer, operation: Operation, effect: Answer | Unreachable) -> None:
    """Whatever the origin answers, or does not, at any step: in the end it has the object, and nothing else."""
    if operation is Operation.HEAD_OBJECT and isinstance(effect, Answer) and effect.status < 500:
        return  # a HEAD has no code: it is found out by GET, or by the next step
    stored = await buffer.upload(key("model"), [PART_BYTES, 3])
    buffer.origin.inject(on(operation), effect, times=3)
    buffer.start()
    await buffer.flushed()
    assert buffer.bucket.object("model").etag == stored.etag
    assert buffer.observer.failures
    assert not buffer.observer.conflicts


@pytest.mark.parametrize("effect", [Unreachable(), Unreachable(late=True), Answer(500, late=True)], ids=str)
@pytest.mark.parametrize("honoured", list(Honoured), ids=lambda one: one.name)
async def test_a_lost_answer_to_a_put_is_found_out(
    buffer: Buffer, honoured: Honoured, effect: Answer | Unreachable
) -> None:
    """It is there once, and what was done is not done over somebody else's write."""
    await buffer.learn(honoured)
    stored = await buffer.put(key("k"), b"ours")
    buffer.origin.inject(on(Operation.PUT_OBJECT, key="k"), effect)
    buffer.start()
    await buffer.flushed()
    assert buffer.origin.data("bucket", "k") == b"ours"
    is_there = effect != Unreachable()
    assert buffer.origin.count(Operation.PUT_OBJECT, key="k") == (1 if is_there else 2)
    assert buffer.observer.published == [("k", stored.etag)]


async def test_a_plain_refusal_leaves_nothing_in_doubt(buffer: Buffer) -> None:
    """What was answered 403 has not happened: the write gives way to the next one. What was lost may have: it stays,
    and the next one waits."""
    await buffer.learn()
    buffer.origin.inject(on(Operation.PUT_OBJECT, key="refused"), Answer(403, "AccessDenied"))
    buffer.origin.inject(on(Operation.PUT_OBJECT, key="lost"), Unreachable())
    refused, lost = await buffer.put(key("refused"), b"1"), await buffer.put(key("lost"), b"1")
    buffer.start()
    await buffer.at_once(lambda: len(buffer.observer.failures) == 2)
    await buffer.kill()
    states = [buffer.journal.read(lambda tx: tx.writes.whole(one.id)) for one in (refused, lost)]  # noqa: B023
    assert [one.state for one in states if one is not None] == [State.COMMITTED, State.PUBLISHING]
    for name in ("refused", "lost"):
        await buffer.put(key(name), b"2")
    assert sorted(one.key.key for one in buffer.left()) == ["lost", "lost", "refused"]
    buffer.start()
    await buffer.flushed()
    assert [buffer.origin.data("bucket", name) for name in ("refused", "lost")] == [b"2", b"2"]


async def test_what_a_refused_write_expects_is_what_was_there_before(buffer: Buffer) -> None:
    """Others write the very bytes that were refused: they are not taken for ours."""
    await buffer.learn()
    buffer.origin.inject(on(Operation.PUT_OBJECT), Answer(403, "AccessDenied"))
    await buffer.put(key("k"), b"the same")
    buffer.start()
    await buffer.at_once(lambda: bool(buffer.observer.failures))
    buffer.origin.put("bucket", "k", b"the same", {"x-amz-meta-by": "others"})
    await buffer.until(lambda: bool(buffer.observer.conflicts))
    assert buffer.bucket.object("k").headers == {"x-amz-meta-by": "others"}


async def test_the_same_object_of_somebody_else_leaves_no_upload_of_ours(buffer: Buffer) -> None:
    """Its ETag is the one that our Complete, whose answer was lost, would have made: it is ours then, or as good."""
    stored = await buffer.upload(key("model"), [PART_BYTES, 3])
    buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable())
    buffer.start()
    await buffer.until(lambda: bool(buffer.observer.failures))
    buffer.bucket.put(StoredObject("model", BytesContent(b"the same"), stored.etag, 0.0))
    await buffer.flushed()
    await buffer.until(lambda: not buffer.bucket.uploads)


ERROR = b"<Error><Code>InternalError</Code><Message>m</Message></Error>"


@pytest.mark.parametrize("body", [ERROR, b"<?xml version='1.0'?>" + ERROR, b"  " + ERROR, b"<Nothing/>", b""])
async def test_a_complete_that_ends_in_an_error_is_none(buffer: Buffer, body: bytes) -> None:
    """A 200 with `<Error>` is a failure; so is one that says nothing."""
    answer = Answer(200, "", {"content-type": "application/xml"}, body)
    buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), answer)
    stored = await buffer.upload(key("model"), [PART_BYTES, 3])
    buffer.start()
    await buffer.flushed()
    assert buffer.bucket.object("model").etag == stored.etag
    assert len(buffer.observer.failures) == 1


async def test_an_empty_etag_of_an_origin_is_made_good(buffer: Buffer) -> None:
    """Some answer Complete without one: what HEAD shows counts."""
    empty = AlterBody(lambda _: b"<R><ETag></ETag></R>")
    buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), empty, times=None)
    stored = await buffer.upload(key("model"), [3])
    buffer.start()
    await buffer.flushed()
    assert buffer.observer.published == [("model", stored.etag)]


async def test_what_the_origin_says_it_has_and_does_not_show_is_kept(buffer: Buffer) -> None:
    """Its bytes are not given up for an answer."""
    answer = Answer(200, "", {"content-type": "application/xml"}, b"<R><ETag></ETag></R>")
    buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), answer)
    stored = await buffer.upload(key("model"), [3])
    buffer.start()
    await buffer.until(lambda: buffer.observer.failures == [UNTOLD])
    assert turn_of(buffer, stored).failing_since is None
    assert len(list(buffer.staging.names())) == 1
    await buffer.flushed()
    assert buffer.observer.published == [("model", stored.etag)]


async def test_an_upload_that_the_origin_has_dropped_is_sent_again(buffer: Buffer) -> None:
    """A lifecycle rule aborted it meanwhile: all parts go once more, in a new one."""
    stored = await buffer.upload(key("model"), [PART_BYTES, 3], origin_upload_id="long gone")
    buffer.start()
    await buffer.flushed()
    assert buffer.bucket.object("model").etag == stored.etag
    assert not buffer.bucket.uploads


@pytest.mark.parametrize("honoured", [Honoured.UNKNOWN, Honoured.YES], ids=lambda one: one.name)
async def test_what_others_have_written_is_not_overwritten(buffer: Buffer, honoured: Honoured) -> None:
    """A change since the absorb began, at any moment before the flush, is a conflict that says why: both are kept."""
    await buffer.learn(honoured)
    early = await buffer.put(key("early"), b"ours")
    buffer.origin.put("bucket", "early", b"theirs")
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.PUT_OBJECT, key="late"), Hold(held, reached))
    late = await buffer.put(key("late"), b"ours")
    buffer.start()
    await buffer.until(reached.is_set)
    buffer.origin.put("bucket", "late", b"theirs")
    held.set()
    await buffer.until(lambda: len(buffer.observer.conflicts) == 2)
    assert [buffer.origin.data("bucket", name) for name in ("early", "late")] == [b"theirs", b"theirs"]
    assert [one.state for one in buffer.left()] == [State.CONFLICT, State.CONFLICT]
    assert [turn_of(buffer, one).last_error for one in (early, late)] == [OTHERS, OTHERS]
    assert len(list(buffer.staging.names())) == 2
    await buffer.put(key("other"), b"goes on")
    await buffer.until(lambda: "other" in buffer.bucket.objects)
    assert len(buffer.observer.conflicts) == 2


@pytest.mark.parametrize("lost", [False, True])
async def test_a_deletion_that_was_answered_503_removes_nothing_that_others_write(buffer: Buffer, lost: bool) -> None:
    """They write the key after the failure: what they wrote stays, and a person decides."""
    await buffer.learn()
    etag = buffer.origin.put("bucket", "k", b"old")
    effect = Unreachable(late=True) if lost else Answer(503, "SlowDown")
    buffer.origin.inject(on(Operation.DELETE_OBJECT), effect)
    gone = Write(WriteSpec(key("k"), {}, "slot"), ExpectedVersion((etag,)), 1.0, deleted=True, acknowledged_at=1.0)
    await buffer.journal.change(lambda tx: tx.writes.acknowledge(gone))
    buffer.start()
    await buffer.at_once(lambda: bool(buffer.observer.failures))
    buffer.origin.put("bucket", "k", b"theirs")
    await buffer.until(lambda: buffer.observer.conflicts == ["k"])
    assert buffer.origin.data("bucket", "k") == b"theirs"


async def test_an_origin_without_conditions_is_written_after_a_look(buffer: Buffer) -> None:
    """Where it says that it knows none, the look a moment before has to do; that is learned, and asked no more."""
    await buffer.learn()
    refusal = Answer(501, "NotImplemented")
    buffer.origin.inject(lambda call: "if-none-match" in call.headers, refusal, times=None)
    await buffer.put(key("a"), b"one")
    buffer.start()
    await buffer.flushed()
    await buffer.put(key("b"), b"two")
    await buffer.flushed()
    assert (buffer.origin.data("bucket", "a"), buffer.origin.data("bucket", "b")) == (b"one", b"two")
    assert buffer.observer.failures == []
    capabilities = buffer.journal.read(lambda tx: tx.buckets.capabilities("bucket"))
    assert capabilities is not None
    assert (capabilities.conditions.put, capabilities.conditions.complete) == (Honoured.REFUSED, Honoured.YES)
    assert buffer.origin.count(Operation.PUT_OBJECT, key="b") == 1


async def test_the_last_of_many_writes_is_what_counts(buffer: Buffer) -> None:
    """Also when one of them is just being sent: the origin ends with the last, and sees few of the others."""
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.PUT_OBJECT), Hold(held, reached))
    await buffer.put(key("k"), b"0")
    buffer.start()
    await buffer.until(reached.is_set)
    for number in range(1, 100):
        await buffer.put(key("k"), b"%d" % number)
    held.set()
    await buffer.flushed()
    assert buffer.origin.data("bucket", "k") == b"99"
    assert buffer.origin.count(Operation.PUT_OBJECT) == 2
    assert not buffer.observer.conflicts


async def test_what_is_kept_here_from_now_on_is_cut_off_in_its_transfer(buffer: Buffer) -> None:
    """Of a checkpoint that is superseded: its upload at the origin is aborted; what comes behind it does not wait."""
    torn, shard = Torn(buffer.origin), key("run/step-1/a.pt")
    await buffer.upload(shard, [PART_BYTES, PART_BYTES], member=member_of(shard, rules_of(None)))
    await buffer.put(key("run/latest"), b"of no checkpoint", behind="run/")
    buffer.start(torn)
    await buffer.until(torn.reached.is_set)
    assert await buffer.journal.change(lambda tx: tx.local.keep_here(1, 1.0)) == 1
    await buffer.until(lambda: bool(torn.torn))
    await buffer.until(lambda: "run/latest" in buffer.bucket.objects)
    await buffer.until(lambda: not buffer.bucket.uploads)
    await buffer.until(lambda: len(buffer.left()) == 1)
    [left] = buffer.left()
    assert (left.state, left.origin_upload_id) == (State.LOCAL, None)
    assert all(part.origin_etag is None for part in buffer.journal.read(lambda tx: list(tx.parts.of(left.id))))
    assert list(buffer.bucket.objects) == ["run/latest"]
    assert await buffer.journal.change(lambda tx: tx.local.send_after_all(left.id, buffer.clock.now()))
    await buffer.flushed()
    assert sorted(buffer.bucket.objects) == ["run/latest", "run/step-1/a.pt"]
    assert not buffer.observer.damages
    assert not buffer.observer.failures


@pytest.mark.parametrize("what", ["overwritten", "deleted", "aborted"])
async def test_what_is_not_wanted_any_more_is_cut_off_in_its_transfer(buffer: Buffer, what: str) -> None:
    """It leaves nothing at the origin: its upload there is aborted, and what came instead of it arrives."""
    torn = Torn(buffer.origin)
    if what == "aborted":
        now = buffer.clock.now()
        opened = Write(WriteSpec(key("k"), HEADERS, "slot"), ExpectedVersion(absent=True), now, upload_id="u")
        await buffer.journal.change(lambda tx: tx.uploads.begin(opened))
        part = Part(1, buffer.stage(os.urandom(PART_BYTES)), now)
        await buffer.journal.change(lambda tx: tx.uploads.put_part("u", part, Moment(now)))
    else:
        await buffer.upload(key("k"), [PART_BYTES, PART_BYTES])
    buffer.start(torn)
    await buffer.until(torn.reached.is_set)
    if what == "overwritten":
        await buffer.put(key("k"), b"new")
    elif what == "deleted":
        gone = Write(
            WriteSpec(key("k"), {}, "slot"), ExpectedVersion(absent=True), 1.0, deleted=True, acknowledged_at=1.0
        )
        assert await buffer.journal.change(lambda tx: tx.writes.write_tombstone(gone)) is None
    else:
        assert await buffer.journal.change(lambda tx: tx.uploads.abort("u", Moment(buffer.clock.now())))
    await buffer.until(lambda: bool(torn.torn))
    await buffer.flushed()
    await buffer.until(lambda: not buffer.bucket.uploads)
    assert list(buffer.bucket.objects) == (["k"] if what == "overwritten" else [])
    assert not buffer.observer.damages
    assert not buffer.observer.failures


async def test_a_delete_comes_after_what_was_being_sent(buffer: Buffer) -> None:
    """The late flush of an object that was deleted meanwhile does not bring it back."""
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.PUT_OBJECT), Hold(held, reached))
    await buffer.put(key("k"), b"0")
    buffer.start()
    await buffer.until(reached.is_set)
    await buffer.delete(key("k"))
    held.set()
    await buffer.flushed()
    assert "k" not in buffer.bucket.objects
    assert buffer.observer.published[-1] == ("k", None)


async def test_a_kill_at_any_request_loses_and_leaves_nothing(buffer: Buffer) -> None:
    """Killed while any request of the flush is under way, or its answer lost: the successor ends it, once."""
    steps = [
        Operation.HEAD_OBJECT,
        Operation.CREATE_MULTIPART_UPLOAD,
        Operation.UPLOAD_PART,
        Operation.COMPLETE_MULTIPART_UPLOAD,
    ]
    for number, operation in enumerate(steps):
        at = key(f"k{number}")
        held, reached = asyncio.Event(), asyncio.Event()
        buffer.origin.inject(on(operation, key=at.key), Hold(held, reached))
        stored = await buffer.upload(at, [PART_BYTES, 3], upload_id=at.key)
        buffer.start()
        await buffer.until(reached.is_set)
        await buffer.kill()
        buffer.start()
        await buffer.flushed()
        await buffer.kill()
        assert buffer.bucket.object(at.key).etag == stored.etag
    assert not buffer.bucket.uploads
    assert not buffer.observer.conflicts


async def test_nothing_is_over_before_it_is_published(buffer: Buffer) -> None:
    """A process that is killed in between is followed by one that publishes again, and sends nothing again."""
    reached, publish = asyncio.Event(), buffer.observer.publish

    async def never(write: Write, etag: str | None) -> None:
        reached.set()
        await asyncio.Event().wait()

    buffer.observer.publish = never  # type: ignore[method-assign]
    stored = await buffer.put(key("k"), b"x")
    buffer.start()
    await buffer.until(reached.is_set)
    await buffer.kill()
    assert [one.id for one in buffer.left()] == [stored.id]
    buffer.observer.publish = publish  # type: ignore[method-assign]
    buffer.start()
    await buffer.flushed()
    assert buffer.observer.published == [("k", stored.etag)]
    assert buffer.origin.count(Operation.PUT_OBJECT) == 1


async def test_every_object_that_arrives_is_told(buffer: Buffer) -> None:
    """Also where the next look at the journal comes between the commit that ends it and who waits for that."""
    change = buffer.journal.change

    async def looked_at_behind(step: Callable[[JournalTransaction], R]) -> R:
        outcome = await change(step)
        if hasattr(buffer, "reconciler"):
            buffer.journal.read(buffer.reconciler.look)
        return outcome

    names = [f"{number}" for number in range(20)]
    for name in names:
        await buffer.put(key(name), b"x")
    buffer.journal.change = looked_at_behind  # type: ignore[method-assign]
    buffer.start()
    await buffer.flushed()
    await buffer.still()
    assert sorted(name for name, *_ in buffer.observer.settlements) == sorted(names)


async def test_what_others_commit_is_soon_on_its_way(tmp_path: Path, buffer: Buffer) -> None:
    """Within milliseconds of what another process acknowledges while there is much, within a tenth of a second of
    what comes after nothing for a long time."""
    buffer.start()
    await buffer.put(key("first"), b"x")
    await buffer.flushed()  # it has begun
    await buffer.clock.advance(AGAIN_SECONDS / 2)
    other = Journal(tmp_path, lambda _: None)
    try:
        for number, seconds in ((1, QUIET_SECONDS), (2, QUICK_SECONDS)):
            file = buffer.stage(b"x")
            at = WriteSpec(key(f"k{number}"), {}, "slot")
            part = Part(1, file, 1.0)
            new = Write(
                at,
                ExpectedVersion(absent=True),
                1.0,
                etag=file.etag,
                size_bytes=1,
                parts=(part,),
                acknowledged_at=1.0,
            )
            await other.change(partial(lambda tx, new: tx.writes.acknowledge(new), new=new))
            asked = buffer.origin.count(Operation.HEAD_OBJECT)
            await buffer.clock.advance(seconds)
            await buffer.at_once(lambda: buffer.origin.count(Operation.HEAD_OBJECT) > asked)  # noqa: B023
    finally:
        other.close()


async def test_without_news_nothing_is_asked(buffer: Buffer) -> None:
    """An idle gateway compares a few bytes now and then; the journal is read once a second."""
    buffer.start()
    await buffer.put(key("k"), b"x")
    await buffer.flushed()
    with steps_of_reads(buffer.journal) as counted:
        await buffer.clock.advance(100 * LOOK_SECONDS)
    assert 1 <= len(counted) <= 101


async def test_a_clock_that_was_set_back_keeps_nothing_waiting(buffer: Buffer) -> None:
    """What was due by the clock of before is looked at soon, and not after a year."""
    stored = await buffer.put(key("k"), b"x")
    far = Turn(buffer.clock.now() + 365 * 24 * 3600.0, 1)
    seen = turn_of(buffer, stored)
    await buffer.journal.change(lambda tx: tx.turns.wait(stored.id, seen, far))
    buffer.start()
    await buffer.flushed()


@pytest.mark.slow
@pytest.mark.parametrize("hurried", [False, True])
async def test_what_is_acknowledged_by_a_clock_that_was_just_set_back_is_flushed_soon(
    buffer: Buffer, hurried: bool
) -> None:
    """A worker has read the clock, and commits what it read after the flushing process has noticed that it was set."""
    await buffer.learn()
    buffer.start()
    await buffer.passes(2 * AGAIN_SECONDS, step=1.0)
    read_before = buffer.clock.now()
    buffer.clock.set_wall(-600.0)
    await buffer.passes(LOOK_SECONDS + QUIET_SECONDS)
    await buffer.put(key("k"), b"x", acknowledged_at=read_before)
    if hurried:
        await buffer.journal.change(lambda tx: tx.turns.prioritise(key("k"), read_before))
    assert await buffer.passes(2 * LOOK_SECONDS + QUIET_SECONDS, lambda: "k" in buffer.bucket.objects)


async def test_a_clock_that_is_set_and_set_back_keeps_nothing_waiting(buffer: Buffer) -> None:
    """Between two looks: the process that flushes sees nothing of it but what was written meanwhile."""
    await buffer.learn()
    buffer.start()
    await buffer.passes(2 * AGAIN_SECONDS, step=1.0)
    await buffer.put(key("k"), b"x", acknowledged_at=buffer.clock.now() + 3600.0)
    assert await buffer.passes(2 * LOOK_SECONDS + QUIET_SECONDS, lambda: "k" in buffer.bucket.objects)


async def test_who_observes_is_told_what_the_origin_has_and_how_long_that_took(buffer: Buffer) -> None:
    """Of the attempt that succeeded: its version, and its seconds; of a deletion no version."""
    await buffer.learn()
    first_at = 0.0

    def is_second(call: Call) -> bool:
        nonlocal first_at
        count = buffer.origin.count(Operation.PUT_OBJECT)
        first_at = first_at or (buffer.clock.monotonic() if count == 1 else 0.0)
        return call.operation is Operation.PUT_OBJECT and count == 2

    buffer.origin.inject(on(Operation.PUT_OBJECT), Answer(503, "SlowDown"))
    buffer.origin.inject(is_second, Delay(20.0))
    await buffer.put(key("k"), b"x")
    buffer.start()
    await buffer.until(lambda: bool(buffer.observer.settlements))
    assert buffer.observer.failures
    [(name, etag, seconds)] = buffer.observer.settlements
    assert (name, etag) == ("k", buffer.bucket.object("k").etag)
    assert first_at > 0
    assert 20.0 <= seconds < buffer.clock.monotonic() - first_at  # not since the attempt that failed
    await buffer.delete(key("k"))
    await buffer.until(lambda: len(buffer.observer.settlements) == 2)
    assert buffer.observer.settlements[1][:2] == ("k", None)


async def test_nothing_is_sent_while_the_journal_takes_nothing(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the origin has then could not be noted. When it takes changes again, all goes on."""
    await buffer.learn()
    await buffer.put(key("k"), b"x")
    buffer.journal._failure = "disk I/O error"
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_reopen", lambda *_: False)
        buffer.start()
        await buffer.until(lambda: buffer.clock.monotonic() > 100.0)
    assert (buffer.origin.count(), buffer.observer.mishaps) == (0, [])
    await buffer.flushed()
