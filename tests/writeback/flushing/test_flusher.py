"""Pending objects reach the origin as the client sent them, once, in order, whatever fails on the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from gateway.s3.requests import Operation
from gateway.writeback.flushing.flush_requests import IN_MEMORY_BYTES_MAX
from gateway.writeback.flushing.flusher import AGAIN_SECONDS, FLUSHES_PER_SLOT
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Base, Fixed, Part, PendingObject, State
from gateway.writeback.news import LOOK_SECONDS, QUICK_SECONDS, QUIET_SECONDS
from tests.support.flushing import HEADERS, PART_BYTES, Buffer, with_buffer
from tests.support.journal_steps import steps_of_reads
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, Answer, Hold, Unreachable, on
from tests.support.memory_origin.store import StoredObject
from tests.support.writeback import key, pending


@pytest.mark.parametrize("size", [0, 1, IN_MEMORY_BYTES_MAX, IN_MEMORY_BYTES_MAX + 1, 3_000_000])
def test_an_object_arrives_as_it_was_put(tmp_path: Path, size: int) -> None:
    """Bytes, ETag, headers and checksums; then nothing of it is left here."""
    content = os.urandom(size)

    async def scenario(buffer: Buffer) -> None:
        stored = await buffer.put(key("é/a b"), content)
        buffer.start()
        await buffer.flushed()
        assert buffer.origin.data("bucket", "é/a b") == content
        assert HEADERS.items() <= buffer.stored(key("é/a b")).items()
        assert buffer.observer.published == [("é/a b", stored.etag)]

    with_buffer(tmp_path, scenario)


def test_an_upload_arrives_in_its_own_parts(tmp_path: Path) -> None:
    """With the part boundaries and numbers of the client, so that the ETag is the one that it was told."""

    async def scenario(buffer: Buffer) -> None:
        stored = await buffer.upload(key("model"), [PART_BYTES, PART_BYTES + 17, 3])
        buffer.start()
        await buffer.flushed()
        assert buffer.origin.count(Operation.UPLOAD_PART) == 3
        assert buffer.bucket.object("model").etag == stored.etag
        assert HEADERS.items() <= buffer.stored(key("model")).items()
        assert not buffer.bucket.uploads

    with_buffer(tmp_path, scenario)


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
def test_failures_are_waited_out(tmp_path: Path, operation: Operation, effect: Answer | Unreachable) -> None:
    """Whatever the origin answers, or does not, at any step: in the end it has the object, and nothing else."""

    async def scenario(buffer: Buffer) -> None:
        if operation is Operation.HEAD_OBJECT and isinstance(effect, Answer) and effect.status == 404:
            return  # a HEAD has no code: a bucket that is gone is found out by the next step
        stored = await buffer.upload(key("model"), [PART_BYTES, 3])
        buffer.origin.inject(on(operation), effect, times=3)
        buffer.start()
        await buffer.flushed()
        assert buffer.bucket.object("model").etag == stored.etag
        assert buffer.observer.failures
        assert not buffer.observer.conflicts

    with_buffer(tmp_path, scenario)


@pytest.mark.parametrize("effect", [Unreachable(), Unreachable(late=True), Answer(500, late=True)], ids=str)
def test_a_lost_answer_to_a_put_is_found_out(tmp_path: Path, effect: Answer | Unreachable) -> None:
    """It is there once, and what was done is not done over somebody else's write."""

    async def scenario(buffer: Buffer) -> None:
        await buffer.put(key("k"), b"ours")
        buffer.origin.inject(on(Operation.PUT_OBJECT), effect)
        buffer.start()
        await buffer.flushed()
        assert buffer.origin.data("bucket", "k") == b"ours"

    with_buffer(tmp_path, scenario)


def test_the_same_object_of_somebody_else_leaves_no_upload_of_ours(tmp_path: Path) -> None:
    """Its ETag is the one that our Complete, whose answer was lost, would have made: it is ours then, or as good."""

    async def scenario(buffer: Buffer) -> None:
        stored = await buffer.upload(key("model"), [PART_BYTES, 3])
        buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable())
        buffer.start()
        await buffer.until(lambda: bool(buffer.observer.failures))
        buffer.bucket.put(StoredObject("model", BytesContent(b"the same"), stored.etag, 0.0))
        await buffer.flushed()
        await buffer.until(lambda: not buffer.bucket.uploads)

    with_buffer(tmp_path, scenario)


ERROR = b"<Error><Code>InternalError</Code><Message>m</Message></Error>"


@pytest.mark.parametrize("body", [ERROR, b"<?xml version='1.0'?>" + ERROR, b"  " + ERROR, b"<Nothing/>", b""])
def test_a_complete_that_ends_in_an_error_is_none(tmp_path: Path, body: bytes) -> None:
    """A 200 with `<Error>` is a failure; so is one that says nothing."""

    async def scenario(buffer: Buffer) -> None:
        answer = Answer(200, "", {"content-type": "application/xml"}, body)
        buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), answer)
        stored = await buffer.upload(key("model"), [PART_BYTES, 3])
        buffer.start()
        await buffer.flushed()
        assert buffer.bucket.object("model").etag == stored.etag
        assert len(buffer.observer.failures) == 1

    with_buffer(tmp_path, scenario)


def test_an_empty_etag_of_an_origin_is_made_good(tmp_path: Path) -> None:
    """Some answer Complete without one: what HEAD shows counts."""

    async def scenario(buffer: Buffer) -> None:
        buffer.origin.inject(
            on(Operation.COMPLETE_MULTIPART_UPLOAD), AlterBody(lambda _: b"<R><ETag></ETag></R>"), times=None
        )
        stored = await buffer.upload(key("model"), [3])
        buffer.start()
        await buffer.flushed()
        assert buffer.observer.published == [("model", stored.etag)]

    with_buffer(tmp_path, scenario)


def test_an_upload_that_the_origin_has_dropped_is_sent_again(tmp_path: Path) -> None:
    """A lifecycle rule aborted it meanwhile: all parts go once more, in a new one."""

    async def scenario(buffer: Buffer) -> None:
        stored = await buffer.upload(key("model"), [PART_BYTES, 3], origin_upload_id="long gone")
        buffer.start()
        await buffer.flushed()
        assert buffer.bucket.object("model").etag == stored.etag
        assert not buffer.bucket.uploads

    with_buffer(tmp_path, scenario)


def test_what_others_have_written_is_not_overwritten(tmp_path: Path) -> None:
    """A change since the absorb began, at any moment before the flush, is a conflict: both are kept."""

    async def scenario(buffer: Buffer) -> None:
        await buffer.put(key("early"), b"ours")
        buffer.origin.put("bucket", "early", b"theirs")
        held, reached = asyncio.Event(), asyncio.Event()
        buffer.origin.inject(on(Operation.PUT_OBJECT, key="late"), Hold(held, reached))
        await buffer.put(key("late"), b"ours")
        buffer.start()
        await buffer.until(reached.is_set)
        buffer.origin.put("bucket", "late", b"theirs")
        held.set()
        await buffer.until(lambda: len(buffer.observer.conflicts) == 2)
        assert [buffer.origin.data("bucket", name) for name in ("early", "late")] == [b"theirs", b"theirs"]
        assert [one.state for one in buffer.left()] == [State.CONFLICT, State.CONFLICT]
        assert len(list(buffer.staging.names())) == 2
        await buffer.put(key("other"), b"goes on")
        await buffer.until(lambda: "other" in buffer.bucket.objects)
        assert len(buffer.observer.conflicts) == 2

    with_buffer(tmp_path, scenario)


def test_an_origin_without_conditions_is_written_after_a_look(tmp_path: Path) -> None:
    """Where it says that it knows none, the look a moment before has to do."""

    async def scenario(buffer: Buffer) -> None:
        refusal = Answer(501, "NotImplemented")
        buffer.origin.inject(lambda call: "if-none-match" in call.headers, refusal, times=None)
        await buffer.put(key("a"), b"one")
        buffer.start()
        await buffer.flushed()
        await buffer.put(key("b"), b"two")
        await buffer.flushed()
        assert (buffer.origin.data("bucket", "a"), buffer.origin.data("bucket", "b")) == (b"one", b"two")
        assert buffer.observer.failures == []

    with_buffer(tmp_path, scenario)


def test_the_last_of_many_writes_is_what_counts(tmp_path: Path) -> None:
    """Also when one of them is just being sent: the origin ends with the last, and sees few of the others."""

    async def scenario(buffer: Buffer) -> None:
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

    with_buffer(tmp_path, scenario)


def test_what_is_overwritten_while_its_parts_are_sent_ends(tmp_path: Path) -> None:
    """It leaves nothing at the origin: its upload there is aborted, and the new object arrives."""

    async def scenario(buffer: Buffer) -> None:
        held, reached = asyncio.Event(), asyncio.Event()
        buffer.origin.inject(on(Operation.UPLOAD_PART), Hold(held, reached))
        await buffer.upload(key("k"), [PART_BYTES, PART_BYTES])
        buffer.start()
        await buffer.until(reached.is_set)
        await buffer.put(key("k"), b"new")
        held.set()
        await buffer.flushed()
        await buffer.until(lambda: not buffer.bucket.uploads)
        assert buffer.origin.data("bucket", "k") == b"new"
        assert not buffer.observer.damages

    with_buffer(tmp_path, scenario)


def test_a_delete_comes_after_what_was_being_sent(tmp_path: Path) -> None:
    """The late flush of an object that was deleted meanwhile does not bring it back."""

    async def scenario(buffer: Buffer) -> None:
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

    with_buffer(tmp_path, scenario)


def test_a_kill_at_any_request_loses_and_leaves_nothing(tmp_path: Path) -> None:
    """Killed while any request of the flush is under way, or its answer lost: the successor ends it, once."""
    steps = [
        Operation.HEAD_OBJECT,
        Operation.CREATE_MULTIPART_UPLOAD,
        Operation.UPLOAD_PART,
        Operation.COMPLETE_MULTIPART_UPLOAD,
    ]

    async def scenario(buffer: Buffer) -> None:
        for number, operation in enumerate(steps):
            at = key(f"k{number}")
            held, reached = asyncio.Event(), asyncio.Event()
            buffer.origin.inject(on(operation, key=at.key), Hold(held, reached))
            stored = await buffer.upload(at, [PART_BYTES, 3])
            buffer.start()
            await buffer.until(reached.is_set)
            await buffer.kill()
            buffer.start()
            await buffer.flushed()
            await buffer.kill()
            assert buffer.bucket.object(at.key).etag == stored.etag
        assert not buffer.bucket.uploads
        assert not buffer.observer.conflicts

    with_buffer(tmp_path, scenario)


def test_damaged_bytes_never_leave(tmp_path: Path) -> None:
    """A flipped bit, a cut file, a missing one: reported, kept, and nothing of it at the origin."""

    async def scenario(buffer: Buffer) -> None:
        for name in ("flipped", "cut", "missing"):
            pending = await buffer.put(key(name), os.urandom(IN_MEMORY_BYTES_MAX + 70_000))
            path = buffer.staging.path(pending.parts[0].file)
            if name == "missing":
                path.unlink()
            elif name == "cut":
                os.truncate(path, 1000)
            else:
                with path.open("r+b") as file:
                    file.seek(IN_MEMORY_BYTES_MAX + 69_000)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))
        await buffer.put(key("whole"), b"fine")
        buffer.start()
        await buffer.until(lambda: len(buffer.left()) == 3 and len(buffer.observer.damages) == 3)
        assert list(buffer.bucket.objects) == ["whole"]

    with_buffer(tmp_path, scenario)


def test_a_slot_that_gets_nowhere_keeps_no_other_waiting(tmp_path: Path) -> None:
    """However much of it is pending and refused."""

    async def scenario(buffer: Buffer) -> None:
        buffer.origin.inject(lambda call: (call.key or "").startswith("no/"), Answer(403, "AccessDenied"), times=None)
        for number in range(3 * FLUSHES_PER_SLOT):
            await buffer.put(key(f"no/{number}"), b"x", fixed=Fixed(key(f"no/{number}"), {}, "refused"))
        buffer.start()
        await buffer.until(lambda: len(buffer.observer.failures) > FLUSHES_PER_SLOT)
        await buffer.put(key("yes"), b"y")
        await buffer.until(lambda: len(buffer.left()) == 3 * FLUSHES_PER_SLOT)
        assert list(buffer.bucket.objects) == ["yes"]

    with_buffer(tmp_path, scenario)


def test_what_is_refused_keeps_nothing_else_of_its_slot_waiting(tmp_path: Path) -> None:
    """Objects that fail give way while they wait for their next try."""

    async def scenario(buffer: Buffer) -> None:
        buffer.origin.inject(lambda call: (call.key or "").startswith("no/"), Answer(403, "AccessDenied"), times=None)
        for number in range(3 * FLUSHES_PER_SLOT):
            await buffer.put(key(f"no/{number}"), b"x")
        await buffer.put(key("yes"), b"y")
        buffer.start()
        await buffer.until(lambda: len(buffer.left()) == 3 * FLUSHES_PER_SLOT)
        assert list(buffer.bucket.objects) == ["yes"]

    with_buffer(tmp_path, scenario)


def test_an_origin_with_other_etags_is_believed(tmp_path: Path) -> None:
    """A bucket that encrypts makes ETags that are no MD5: the object is done when the origin shows what it answered."""

    async def scenario(buffer: Buffer) -> None:
        buffer.origin.inject(on(Operation.PUT_OBJECT), AlterHeaders({"etag": '"opaque"'}), times=None)
        await buffer.put(key("k"), b"x")
        buffer.start()
        await buffer.flushed()
        assert buffer.observer.published == [("k", '"opaque"')]

    with_buffer(tmp_path, scenario)


def test_what_somebody_waits_for_goes_first(tmp_path: Path) -> None:
    """A deletion, and what was hurried, with all places taken and much before them; each key in its own order."""

    async def scenario(buffer: Buffer) -> None:
        held, reached = asyncio.Event(), asyncio.Event()
        buffer.origin.inject(on(Operation.PUT_OBJECT, key="held"), Hold(held, reached), times=None)
        buffer.origin.inject(lambda call: (call.key or "").startswith("k"), Hold(held, reached), times=None)
        for number in range(3 * FLUSHES_PER_SLOT):
            await buffer.put(key(f"k{number}"), b"x")
        await buffer.put(key("gone"), b"x")
        await buffer.put(key("hurried"), b"x")
        buffer.start()
        await buffer.until(reached.is_set)
        await buffer.delete(key("gone"))
        await buffer.journal.change(lambda book: book.hurry(key("hurried")))
        await buffer.until(lambda: len(buffer.left()) == 3 * FLUSHES_PER_SLOT)
        assert buffer.origin.data("bucket", "hurried") == b"x"
        assert "gone" not in buffer.bucket.objects
        held.set()
        await buffer.flushed()

    with_buffer(tmp_path, scenario)


def test_what_others_commit_is_soon_on_its_way(tmp_path: Path) -> None:
    """Within milliseconds of what another process acknowledges while there is much, within a tenth of a second of
    what comes after nothing for a long time."""

    async def scenario(buffer: Buffer) -> None:
        buffer.start()
        await buffer.clock.advance(0.0)  # it has begun
        await buffer.clock.advance(60.0)
        other = Journal(tmp_path, lambda _: None)
        try:
            for number, seconds in ((1, QUIET_SECONDS), (2, QUICK_SECONDS)):
                file = buffer.stage(b"x")
                at = Fixed(key(f"k{number}"), {}, "slot")
                new = PendingObject(0, at, Base(absent=True), 1.0, file.etag, 1, (Part(1, file, 1.0),))
                await other.change(partial(_put, new=[new]))
                asked = buffer.origin.count(Operation.HEAD_OBJECT)
                await buffer.clock.advance(seconds)
                assert buffer.origin.count(Operation.HEAD_OBJECT) > asked
        finally:
            other.close()

    with_buffer(tmp_path, scenario)


def _put(book: Book, new: Sequence[PendingObject]) -> None:
    for one in new:
        book.put(one)


def test_without_news_nothing_is_asked(tmp_path: Path) -> None:
    """An idle gateway compares a few bytes now and then; the journal is read once a second."""

    async def scenario(buffer: Buffer) -> None:
        buffer.start()
        await buffer.put(key("k"), b"x")
        await buffer.flushed()
        with steps_of_reads(buffer.journal) as counted:
            await buffer.clock.advance(100 * LOOK_SECONDS)
        assert 1 <= len(counted) <= 101

    with_buffer(tmp_path, scenario)


def test_a_look_costs_what_it_starts(tmp_path: Path) -> None:
    """However many objects are pending: the first look, one that finds all places taken, and one with a place."""
    steps: dict[int, list[int]] = {}

    async def scenario(buffer: Buffer, count: int) -> None:
        held, reached = asyncio.Event(), asyncio.Event()
        buffer.origin.inject(on(Operation.HEAD_OBJECT), Hold(held, reached))
        buffer.origin.inject(on(Operation.HEAD_OBJECT), Hold(asyncio.Event(), asyncio.Event()), times=None)
        many = [pending(key(f"k{number:05}"), f"{number}") for number in range(count)]
        await buffer.journal.change(partial(_put, new=many))
        with steps_of_reads(buffer.journal) as counted:
            buffer.start()
            await buffer.until(reached.is_set)
            await buffer.clock.advance(LOOK_SECONDS)
        steps[count] = [max(counted), sum(counted)]

    for count in (50, 3000):
        directory = tmp_path / str(count)
        directory.mkdir()
        with_buffer(directory, lambda buffer: scenario(buffer, count))  # noqa: B023
    for few, many in zip(steps[50], steps[3000], strict=True):
        assert many <= few * 1.2 + 200


def test_a_damaged_row_stops_nothing_else(tmp_path: Path) -> None:
    """It is reported, kept, and never believed; what was acknowledged before and after it is flushed."""

    async def scenario(buffer: Buffer) -> None:
        stored = [await buffer.put(key(name), b"x") for name in ("before", "damaged", "after")]
        buffer.journal._writer.execute("UPDATE objects SET record = x'00' WHERE sequence = ?", (stored[1].sequence,))
        buffer.start()
        await buffer.until(lambda: set(buffer.bucket.objects) == {"before", "after"})
        await buffer.until(lambda: buffer.observer.damages == ["damaged"])
        await buffer.clock.advance(2 * AGAIN_SECONDS)
        assert buffer.observer.damages == ["damaged"]
        assert buffer.journal.read(lambda book: book.has_object(stored[1].sequence))

    with_buffer(tmp_path, scenario)
