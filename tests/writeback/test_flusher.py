"""Pending objects reach the origin as the client sent them, once, in order, whatever fails on the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.objects import ObjectKey
from gateway.origin.memory.faults import AlterBody, AlterHeaders, Answer, Hold, Unreachable, on
from gateway.origin.memory.origin import MemoryOrigin
from gateway.s3.etags import multipart_etag
from gateway.s3.requests import Operation
from gateway.writeback.flush import Tools
from gateway.writeback.flush_requests import IN_MEMORY_BYTES_MAX, FlushRequests
from gateway.writeback.flusher import FLUSHES_PER_SLOT, Flusher
from gateway.writeback.journal import Journal
from gateway.writeback.records import Base, Ended, Fixed, Part, PendingObject, State, Upload
from gateway.writeback.staged_file import StagedFile
from gateway.writeback.staging import Staging
from gateway.writeback.threads import BufferThreads
from tests.support.manual_clock import ManualClock
from tests.support.writeback import key, md5

PART_BYTES = 5 * 1024 * 1024
HEADERS = {"content-type": "text/plain", "x-amz-meta-step": "12", "cache-control": "no-store"}


class Observer:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.published: list[tuple[str, str | None]] = []
        self.failures: list[str] = []
        self.conflicts: list[str] = []
        self.damages: list[str] = []

    async def publish(self, pending: PendingObject, etag: str | None) -> None:
        self.published.append((pending.key.key, etag))

    def failing(self, pending: PendingObject, failures: int, reason: str) -> None:
        self.failures.append(reason)

    def conflict(self, pending: PendingObject) -> None:
        self.conflicts.append(pending.key.key)

    def damaged(self, pending: PendingObject, reason: str) -> None:
        self.damages.append(pending.key.key)


class Buffer:
    """A buffer on an origin in memory, and its flusher."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.origin = MemoryOrigin(self.clock)
        self.bucket = self.origin.create_bucket("bucket")
        self.staging = Staging(directory, 0)
        self.staging.prepare()
        self.journal = Journal(directory, self._remove)
        self.threads = BufferThreads(2)
        self.observer = Observer()
        self._flushing: asyncio.Task[None] | None = None

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self.staging.remove(name)

    def start(self) -> None:
        requests = FlushRequests(self.origin, self.staging, self.threads)
        self.flusher = Flusher(Tools(self.journal, requests, self.observer, self.observer), self.clock)
        self._flushing = asyncio.create_task(self.flusher.run())

    async def kill(self) -> None:
        """The flushing process is gone, in the middle of whatever it did."""
        assert self._flushing is not None
        self._flushing.cancel()
        await asyncio.gather(self._flushing, return_exceptions=True)

    async def close(self) -> None:
        if self._flushing is not None:
            await self.kill()
        self.threads.shut_down()
        self.journal.close()

    def stage(self, content: bytes) -> StagedFile:
        writer = self.staging.create()
        writer.write(memoryview(content))
        return self.staging.seal(writer, md5(content))

    async def put(self, at: ObjectKey, content: bytes, **changed: Any) -> PendingObject:
        file = self.stage(content)
        new = PendingObject(
            0,
            changed.get("fixed", Fixed(at, HEADERS, "slot")),
            changed.get("base", Base(absent=True)),
            1.0,
            file.etag,
            file.size_bytes,
            (Part(1, file, 1.0, changed.get("checksums", {})),),
        )
        return await self.journal.change(lambda book: book.put(new))

    async def upload(self, at: ObjectKey, sizes: list[int], origin_upload_id: str | None = None) -> PendingObject:
        fixed, files = Fixed(at, HEADERS, "slot"), [self.stage(os.urandom(size)) for size in sizes]
        parts = tuple(Part(2 * number, file, 1.0) for number, file in enumerate(files, 1))
        await self.journal.change(
            lambda book: book.open_upload(Upload("u", fixed, Base(absent=True), 1.0, origin_upload_id))
        )
        etag = multipart_etag([file.etag for file in files]) or ""
        new = PendingObject(
            0, fixed, Base(absent=True), 1.0, etag, sum(sizes), parts, True, False, "u", origin_upload_id
        )
        return await self.journal.change(lambda book: book.complete(new, Ended("u", at, 1.0, etag)))

    async def delete(self, at: ObjectKey) -> None:
        gone = PendingObject(0, Fixed(at, {}, "slot"), Base(absent=True), 1.0, "", 0, deleted=True)
        await self.journal.change(lambda book: book.put(gone))

    def left(self) -> list[PendingObject]:
        return list(self.journal.read(lambda book: book.waiting(0, 10_000)))

    async def until(self, reached: Callable[[], bool]) -> None:
        """Let time pass until it is so."""
        for _ in range(20_000):
            if reached():
                return
            await self.clock.advance(0.3)
            await asyncio.sleep(0.0005)
        raise AssertionError("it never came to it")

    async def flushed(self) -> None:
        await self.until(lambda: not self.left() and not list(self.staging.names()))

    def stored(self, at: ObjectKey) -> Mapping[str, str]:
        return self.bucket.object(at.key).headers


def with_buffer(path: Path, scenario: Callable[[Buffer], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        buffer = Buffer(path)
        try:
            await scenario(buffer)
        finally:
            await buffer.close()

    asyncio.run(run())


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
        fault = buffer.origin.inject(lambda call: "if-none-match" in call.headers, Answer(501, "NotImplemented"))
        await buffer.put(key("a"), b"one")
        buffer.start()
        await buffer.flushed()
        await buffer.put(key("b"), b"two")
        await buffer.flushed()
        assert (buffer.origin.data("bucket", "a"), buffer.origin.data("bucket", "b")) == (b"one", b"two")
        assert fault.times == 0

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
