"""What is asked of the origin, and what its answers mean: nothing is overwritten that is not known, and nothing is
taken for ours that is not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from gateway.origin.client import OriginRequest
from gateway.s3.requests import Operation
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.flushing.state import (
    DIFFERENT,
    Aborted,
    Compared,
    Event,
    FoundObject,
    Headed,
    Lost,
    WriteRefused,
)
from gateway.writeback.journal.buckets import Honoured
from gateway.writeback.journal.records import ExpectedVersion, Part
from tests.support.flushing import PART_BYTES, Buffer
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import AlterHeaders, Answer, Call, CutBody, Hold, Unreachable, on
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import StoredObject
from tests.support.writeback import key, pending


def untold(status: int, missing: str = "an S3 error document") -> Lost:
    return Lost(f"HTTP {status} without {missing}")


def requests_of(buffer: Buffer) -> Requests:
    return Requests(buffer.origin, buffer.staging, buffer.threads, buffer.clock)


async def test_what_else_an_origin_does_not_know_takes_no_condition_from_others(buffer: Buffer) -> None:
    """A 501 that is about another header leaves the next write under its condition."""
    await buffer.learn()
    buffer.origin.inject(on(Operation.PUT_OBJECT, key="a"), Answer(501, "NotImplemented"), times=None)
    await buffer.put(key("a"), b"refused for ever")
    buffer.start()
    await buffer.until(lambda: bool(buffer.observer.failures))
    await buffer.put(key("b"), b"two")
    await buffer.until(lambda: "b" in buffer.bucket.objects)
    [sent] = [call for call in buffer.origin.calls if call.key == "b" and call.method == "PUT"]
    assert sent.headers["if-none-match"] == "*"


@pytest.mark.parametrize(
    ("answer", "is_gone", "expected"),
    [
        (Answer(404, "NoSuchUpload"), False, Aborted()),
        (Answer(404, body=b"<html>not here</html>"), False, untold(404)),
        (Answer(404, "NoSuchBucket"), False, WriteRefused("NoSuchBucket")),
        (Answer(404, "NoSuchBucket"), True, Aborted()),
    ],
    ids=str,
)
async def test_an_upload_is_gone_where_the_origin_says_so_itself(
    buffer: Buffer, answer: Answer, is_gone: bool, expected: Event
) -> None:
    """A 404 of what stands before it, or of another store's, says nothing of uploads."""
    write = await buffer.upload(key("k"), [PART_BYTES, 3], origin_upload_id="o")
    for operation in (Operation.ABORT_MULTIPART_UPLOAD, Operation.LIST_MULTIPART_UPLOADS):
        buffer.origin.inject(on(operation), answer, times=None)
    if is_gone:
        del buffer.origin.buckets["bucket"]
    assert await requests_of(buffer).abort(write) == expected
    listed = await requests_of(buffer).open_uploads(write.key)
    assert isinstance(listed, WriteRefused | Lost) == (not is_gone)


async def test_pages_of_uploads_that_do_not_lead_on_come_to_an_end(buffer: Buffer) -> None:
    """An origin that takes no notice of markers gives the same page again and again."""
    page = (
        b"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker>"
        b"<NextUploadIdMarker>o</NextUploadIdMarker></ListMultipartUploadsResult>"
    )
    buffer.origin.inject(on(Operation.LIST_MULTIPART_UPLOADS), Answer(200, body=page), times=100)
    async with asyncio.timeout(30):
        assert isinstance(await requests_of(buffer).open_uploads(key("k")), Lost)
    assert buffer.origin.count(Operation.LIST_MULTIPART_UPLOADS) == 2


@pytest.mark.parametrize("honoured", [Honoured.UNKNOWN, Honoured.YES, Honoured.IGNORED], ids=lambda one: one.name)
async def test_what_changes_something_goes_under_a_condition(buffer: Buffer, honoured: Honoured) -> None:
    """Unless the bucket answers 501 to it: what it makes of it is its own affair. Where it is not known to honour it, a
    look comes right before."""
    await buffer.learn(honoured)
    etag = buffer.origin.put("bucket", "put", b"old")
    await buffer.put(key("put"), b"new", expected=ExpectedVersion((etag,)))
    await buffer.upload(key("model"), [PART_BYTES, 3])
    buffer.start()
    await buffer.flushed()
    [put] = _calls(buffer, Operation.PUT_OBJECT)
    [complete] = _calls(buffer, Operation.COMPLETE_MULTIPART_UPLOAD)
    assert put.headers["if-match"] == etag
    assert complete.headers["if-none-match"] == "*"
    for changing in (put, complete):
        before = [call for call in buffer.origin.calls if call.number < changing.number and call.key == changing.key]
        looked = bool(before) and before[-1].operation is Operation.HEAD_OBJECT
        assert looked == (honoured is not Honoured.YES)


def _calls(buffer: Buffer, operation: Operation) -> list[Call]:
    return [call for call in buffer.origin.calls if call.operation is operation and ".forebay" not in (call.key or "")]


async def test_what_does_not_say_when_it_was_written_is_somebody_elses(buffer: Buffer) -> None:
    """The origin was away when the write was absorbed: only what is known to be older is overwritten."""
    buffer.bucket.put(StoredObject("k", BytesContent(b"theirs"), '"theirs"', 0.0))
    buffer.origin.inject(on(Operation.HEAD_OBJECT), AlterHeaders({"last-modified": None}), times=None)
    await buffer.put(key("k"), b"ours", expected=ExpectedVersion(known=False, asked_at=1e12))
    buffer.start()
    await buffer.until(lambda: bool(buffer.observer.conflicts))
    assert buffer.origin.data("bucket", "k") == b"theirs"


@pytest.mark.parametrize("ahead_seconds", [-100_000.0, 0.0, 100_000.0])
@pytest.mark.parametrize("is_older", [True, False])
async def test_a_node_with_a_wrong_clock_tells_older_from_newer(
    buffer: Buffer, ahead_seconds: float, is_older: bool
) -> None:
    """The origin was away when the write was absorbed. The origin's own clock says how old an object is, and the
    monotonic clock how long ago the write came."""
    if is_older:
        buffer.origin.put("bucket", "k", b"theirs")
    await buffer.clock.advance(60.0)
    right = ManualClock()
    buffer.origin.set_clock(right)
    await right.advance(1000.0 + 60.0)
    if is_older:
        stored = buffer.bucket.object("k")
        buffer.bucket.put(replace(stored, modified=right.now() - 60.0))
    wall = buffer.clock.now
    buffer.clock.now = lambda: wall() + ahead_seconds  # type: ignore[method-assign]
    expected = ExpectedVersion.unknown(buffer.clock)
    for clock in (right, buffer.clock):
        await clock.advance(60.0)
    if not is_older:
        buffer.origin.put("bucket", "k", b"theirs")
    for clock in (right, buffer.clock):
        await clock.advance(60.0)
    await buffer.put(key("k"), b"ours", expected=expected)
    buffer.start()
    await buffer.at_once(lambda: bool(buffer.observer.conflicts) or not buffer.left())
    assert buffer.origin.data("bucket", "k") == (b"ours" if is_older else b"theirs")


async def test_what_others_wrote_is_theirs_however_long_the_look_takes(buffer: Buffer) -> None:
    """The origin tells an age when it answers: by then more time has passed since the write, too."""
    expected = ExpectedVersion.unknown(buffer.clock)
    await buffer.clock.advance(3.0)
    buffer.origin.put("bucket", "k", b"theirs")
    resume, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.HEAD_OBJECT), Hold(resume, reached))
    await buffer.put(key("k"), b"ours", expected=expected)
    buffer.start()
    await buffer.until(reached.is_set)
    await buffer.clock.advance(20.0)
    resume.set()
    await buffer.at_once(lambda: bool(buffer.observer.conflicts) or not buffer.left())
    assert buffer.origin.data("bucket", "k") == b"theirs"


# ETags


class Encrypting:
    """An origin whose buckets are encrypted since: what it stores has ETags that are no MD5s. `change` is what becomes
    of the bytes on its disks."""

    def __init__(self, buffer: Buffer, change: Callable[[bytes], bytes] = bytes) -> None:
        self._buffer = buffer
        self._change = change

    async def send(self, request: OriginRequest) -> MemoryResponse:
        response = await self._buffer.origin.send(request)
        query = dict(request.query)
        is_put = request.method == "PUT" and "partNumber" not in query
        is_complete = request.method == "POST" and "uploadId" in query
        if response.status != 200 or not (is_put or is_complete) or request.key is None:
            return response
        stored = self._buffer.bucket.object(request.key)
        data = self._change(self._buffer.origin.data("bucket", request.key))
        etag = f'"opaque-{request.key}"'
        self._buffer.bucket.put(replace(stored, etag=etag, content=BytesContent(data)))
        if is_put:
            response.headers = {**response.headers, "etag": etag}
        else:
            answer = b"<R><ETag>" + etag.encode() + b"</ETag></R>"
            response.content, response.headers = BytesContent(answer), {"content-length": str(len(answer))}
        return response

    async def aclose(self) -> None:
        return


async def test_a_bucket_that_begins_to_make_opaque_etags_has_the_bytes_read_back(buffer: Buffer) -> None:
    """They are the same: it is done, under the ETag that the origin shows; and the bucket is known for it."""
    await buffer.learn()
    await buffer.put(key("k"), os.urandom(300_000))
    await buffer.upload(key("model"), [PART_BYTES, 3])
    buffer.start(Encrypting(buffer))
    await buffer.flushed()
    assert sorted(buffer.observer.published) == [("k", '"opaque-k"'), ("model", '"opaque-model"')]
    assert buffer.origin.count(Operation.GET_OBJECT) == 2
    capabilities = buffer.journal.read(lambda tx: tx.buckets.capabilities("bucket"))
    assert capabilities is not None
    assert not capabilities.md5_etags
    assert not capabilities.multipart_etags
    assert capabilities.conditions.put is Honoured.YES


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: data[:-1], lambda data: data + b"?"])
@pytest.mark.parametrize("multipart", [False, True])
async def test_what_the_origin_has_made_of_it_is_compared(
    buffer: Buffer, multipart: bool, change: Callable[[bytes], bytes]
) -> None:
    """Other bytes than were sent: a conflict, with its reason, and ours are kept."""
    await buffer.learn()
    write = await (buffer.upload(key("k"), [PART_BYTES, 3]) if multipart else buffer.put(key("k"), b"ours"))
    buffer.start(Encrypting(buffer, change))
    await buffer.until(lambda: buffer.observer.conflicts == ["k"])
    turn = buffer.journal.read(lambda tx: tx.turns.of(write.id))
    assert turn is not None
    assert turn.last_error == DIFFERENT
    assert len(list(buffer.staging.names())) == len(write.parts)
    assert not buffer.observer.published


@pytest.mark.parametrize("effect", [Unreachable(late=True), Answer(500, late=True)], ids=str)
async def test_an_opaque_etag_of_which_nobody_heard_is_ours_by_its_bytes(
    buffer: Buffer, effect: Answer | Unreachable
) -> None:
    """The answer to the request that made it was lost; what others write of the same length is not taken for it."""
    await buffer.learn()
    for name in ("ours", "theirs"):
        buffer.origin.inject(on(Operation.PUT_OBJECT, key=name), effect)
        await buffer.put(key(name), b"bytes")
    buffer.start()
    await buffer.at_once(lambda: len(buffer.observer.failures) == 2)
    for name, data in (("ours", b"bytes"), ("theirs", b"other")):
        stored = buffer.bucket.object(name)
        buffer.bucket.put(replace(stored, etag=f'"opaque-{name}"', content=BytesContent(data)))
    await buffer.until(lambda: buffer.observer.conflicts == ["theirs"] and len(buffer.left()) == 1)
    assert buffer.observer.published == [("ours", '"opaque-ours"')]
    assert buffer.origin.data("bucket", "theirs") == b"other"


async def test_what_others_write_while_it_is_read_back_is_theirs(buffer: Buffer) -> None:
    """The origin has had ours; it is over, and what they have written stays."""
    await buffer.learn()
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.GET_OBJECT), Hold(held, reached))
    await buffer.put(key("k"), b"ours")
    buffer.start(Encrypting(buffer))
    await buffer.until(reached.is_set)
    buffer.origin.put("bucket", "k", b"theirs")
    held.set()
    await buffer.flushed()
    assert buffer.origin.data("bucket", "k") == b"theirs"
    assert not buffer.observer.conflicts


@pytest.mark.parametrize("sizes", [[], [0], [1], [3, 5], [PART_BYTES, 3], [5, 0]])
@pytest.mark.parametrize(
    ("change", "is_same"),
    [(lambda data: data, True), (lambda data: data + b"x", False), (lambda data: data[:-1] + b"\0", False)],
)
async def test_bytes_are_compared_part_by_part(
    buffer: Buffer, sizes: list[int], change: Callable[[bytes], bytes], is_same: bool
) -> None:
    """Whatever the boundaries of parts, and of pieces on their way."""
    files = [buffer.stage(b"\1" * size) for size in sizes]
    parts = [Part(number, file, 1.0) for number, file in enumerate(files, 1)]
    write = replace(pending(key("k"), parts=parts), parts=tuple(parts))
    etag = buffer.origin.put("bucket", "k", change(b"\1" * sum(sizes)))
    requests = requests_of(buffer)
    assert await requests.compare(write, etag) == Compared(is_same)
    assert await requests.compare(write, '"gone"') == Compared(None)


async def test_what_is_cut_short_tells_nothing(buffer: Buffer) -> None:
    """Of a body that ends before its length nobody knows what it was."""
    write = await buffer.put(key("k"), b"ours")
    etag = buffer.origin.put("bucket", "k", b"ours")
    buffer.origin.inject(on(Operation.GET_OBJECT), CutBody(2))
    assert isinstance(await requests_of(buffer).compare(write, etag), Lost)


# Answers


async def test_a_bucket_that_is_gone_is_no_object_that_is_gone(buffer: Buffer) -> None:
    """HEAD has no document: it is asked for the bucket, where that makes a difference."""
    etag = buffer.origin.put("bucket", "k", b"old")
    write = await buffer.put(key("k"), b"new", expected=ExpectedVersion((etag,)))
    requests = requests_of(buffer)
    buffer.bucket.objects.clear()
    found = await requests.head(write)
    assert isinstance(found, Headed)
    assert found.etag is None
    del buffer.origin.buckets["bucket"]
    assert await requests.head(write) == WriteRefused("NoSuchBucket")


@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        (Answer(501, "NotImplemented"), WriteRefused("NotImplemented")),
        (Answer(403, "AccessDenied"), WriteRefused("AccessDenied")),
        (Answer(400, body=b""), untold(400)),
        (Answer(503, "SlowDown"), Lost("SlowDown")),
        (Answer(502, body=b"<html>"), untold(502)),
        (Answer(200, body=b"<Error><Code>SlowDown</Code></Error>"), Lost("SlowDown")),
        (Answer(200, body=b"<Error><Code>PreconditionFailed</Code></Error>"), WriteRefused("PreconditionFailed")),
    ],
    ids=str,
)
async def test_a_5xx_leaves_open_what_has_been_done(
    buffer: Buffer, effect: Answer, expected: WriteRefused | Lost
) -> None:
    """And what an origin has not implemented it has not done."""
    write = await buffer.upload(key("k"), [3], "upload")
    buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), effect)
    assert await requests_of(buffer).complete(write) == expected


async def test_an_upload_that_the_origin_does_not_know_is_not_open(buffer: Buffer) -> None:
    """And one that it does not tell of may be."""
    write, requests = await buffer.upload(key("k"), [3], "gone"), requests_of(buffer)
    assert await requests.find(write) == FoundObject(False)
    for effect in (Answer(403, "AccessDenied"), Answer(404, "NoSuchBucket")):
        buffer.origin.inject(on(Operation.LIST_PARTS), effect)
        assert await requests.find(write) == WriteRefused(effect.code)
    buffer.origin.inject(on(Operation.LIST_PARTS), Unreachable())
    assert isinstance(await requests.find(write), Lost)
    begun = await requests.begin(write)
    assert isinstance(begun, str)
    assert await requests.find(replace(write, origin_upload_id=begun)) == FoundObject(True)
