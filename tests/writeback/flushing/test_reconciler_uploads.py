"""Parts reach the origin while their upload is open; Complete takes over what is there; what nobody wants ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.core.model import ObjectKey
from gateway.core.prefixes import Prefix
from gateway.origin.client import Direction, OriginRequest
from gateway.origin.traffic_meter import AnswerKind, MeteredOrigin, OriginMeter
from gateway.s3.headers import multipart_etag
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from gateway.telemetry import metrics
from gateway.writeback.flushing.lanes import PARTS_PER_LANE, PLACES
from gateway.writeback.flushing.state import ANSWER_GIVEN_UP_SECONDS, PARTS_AT_ONCE, RESTARTS_MAX
from gateway.writeback.journal.buckets import LastOwnWrite
from gateway.writeback.journal.records import (
    UPLOAD_LOOK_SECONDS,
    ExpectedVersion,
    Part,
    Priority,
    State,
    Write,
    WriteSpec,
)
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.counting import counted
from tests.support.flushing import HEADERS, PART_BYTES, Buffer, with_buffer
from tests.support.journal_steps import steps_of_reads
from tests.support.memory_origin.faults import Answer, Call, Hold, Unreachable, on
from tests.support.memory_origin.store import StoredPart
from tests.support.slots import Slot
from tests.support.writeback import key, staged

pytestmark = pytest.mark.usefixtures("looking_seldom")

AT = key("model")


class OpenUpload:
    """An upload that is open here, and, if it is said so, at the origin."""

    def __init__(self, buffer: Buffer, upload: Write) -> None:
        self.buffer = buffer
        self.upload_id = upload.upload_id or ""
        self.id = upload.id
        self.slot = upload.spec.slot
        self.contents: dict[int, bytes] = {}

    @classmethod
    async def begin(
        cls, buffer: Buffer, upload_id: str = "u", at: ObjectKey = AT, *, slot: str = "slot", at_origin: bool = False
    ) -> OpenUpload:
        origin_upload_id = None
        if at_origin:
            request = OriginRequest("POST", at.bucket, at.key, [("uploads", None)], HEADERS)
            async with await buffer.origin.send(request) as response:
                origin_upload_id = text_of(await response.read(100_000), "UploadId")
        opened = Write(
            WriteSpec(at, HEADERS, slot),
            ExpectedVersion(absent=True),
            buffer.clock.now(),
            upload_id=upload_id,
            origin_upload_id=origin_upload_id,
        )
        return cls(buffer, await buffer.journal.change(lambda tx: tx.uploads.begin(opened)))

    async def store(self, number: int, content: bytes) -> None:
        now = self.buffer.clock.now()
        part = Part(number, self.buffer.stage(content), now)
        self.contents[number] = content
        assert await self.buffer.journal.change(lambda tx: tx.uploads.put_part(self.upload_id, part, Moment(now)))

    def parts(self) -> tuple[Part, ...]:
        return self.buffer.journal.read(lambda tx: tuple(tx.parts.of(self.id)))

    def sent(self) -> set[int]:
        return {part.number for part in self.parts() if part.origin_etag is not None}

    def now(self) -> Write | None:
        return self.buffer.journal.read(lambda tx: tx.uploads.upload(self.upload_id))

    @property
    def is_open(self) -> bool:
        return self.now() is not None

    @property
    def etag(self) -> str:
        return multipart_etag([part.file.etag for part in self.parts()]) or ""

    def _made(self) -> Write:
        now, parts = self.now(), self.parts()
        assert now is not None
        size_bytes = sum(part.file.size_bytes for part in parts)
        return replace(now, etag=self.etag, size_bytes=size_bytes, parts=parts, completed_of="these")

    async def complete(self) -> Write:
        """Acknowledged here."""
        made = replace(self._made(), acknowledged_at=self.buffer.clock.now())
        completed = await self.buffer.journal.change(lambda tx: tx.uploads.complete(made))
        assert completed is not None
        return completed

    async def complete_at_origin(self, **conditions: str) -> None:
        """Its client waits for the origin."""
        made = replace(self._made(), conditions=conditions, asked_as="token", touched=Moment.of(self.buffer.clock))
        assert await self.buffer.journal.change(lambda tx: tx.uploads.complete_at_origin(made))

    def answer(self) -> str | None:
        now = self.now()
        return None if now is None else now.answer

    def is_over(self) -> bool:
        """What the origin has said of its Complete is the end of that."""
        now = self.now()
        return now is None or now.state is State.OPEN

    async def store_many(self, count: int) -> None:
        """Parts of which there is no file."""

        def put(tx: JournalTransaction) -> None:
            for number in range(1, count + 1):
                assert tx.uploads.put_part(
                    self.upload_id, Part(number, staged(f"{self.upload_id}/{number}"), 1.0), Moment(1.0)
                )

        await self.buffer.journal.change(put)


@pytest.mark.slow
@pytest.mark.parametrize("at_origin", [True, False])
async def test_parts_are_there_when_the_client_completes(buffer: Buffer, at_origin: bool) -> None:
    """The flush sends none of them again. An upload that was begun with the origin away is begun there later."""
    away = buffer.origin.inject(lambda _: not at_origin, Unreachable(), times=None)
    upload = await OpenUpload.begin(buffer, at_origin=at_origin)
    buffer.start()
    for number in range(1, PARTS_AT_ONCE + 2):
        await upload.store(number, os.urandom(PART_BYTES))
    await buffer.passes(30.0)
    buffer.origin.faults.remove(away)
    await buffer.until(lambda: upload.sent() == set(upload.contents))
    stored = await upload.complete()
    await buffer.flushed()
    reached = [call for call in buffer.origin.calls if call.operation is Operation.UPLOAD_PART and call.status]
    assert len(reached) == len(upload.contents)
    assert buffer.origin.data("bucket", AT.key) == b"".join(upload.contents.values())
    assert HEADERS.items() <= buffer.stored(AT).items()
    assert buffer.observer.published == [(AT.key, stored.etag)]
    assert not buffer.bucket.uploads


async def test_a_part_that_is_replaced_is_sent_again(buffer: Buffer) -> None:
    """Also while the first one is on its way: the object is made of what the client sent last."""
    upload = await OpenUpload.begin(buffer)
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.UPLOAD_PART), Hold(held, reached))
    await upload.store(1, b"first")
    buffer.start()
    await buffer.until(reached.is_set)
    await upload.store(1, b"second")
    held.set()
    await buffer.until(lambda: upload.sent() == {1})
    assert buffer.origin.count(Operation.UPLOAD_PART) == 2
    stored = await upload.complete()
    await buffer.flushed()
    assert buffer.origin.data("bucket", AT.key) == b"second"
    assert buffer.observer.published == [(AT.key, stored.etag)]


@pytest.mark.parametrize("client_waits", [False, True])
async def test_a_part_that_an_older_one_has_overtaken_is_sent_again(buffer: Buffer, client_waits: bool) -> None:
    """What a killed process had under way arrives behind what its successor has sent: Complete tells, and the object is
    made of what the client sent last."""
    upload = await OpenUpload.begin(buffer)
    await upload.store(1, b"second")
    buffer.start()
    await buffer.until(lambda: upload.sent() == {1})
    [at_origin] = buffer.bucket.uploads.values()
    late = buffer.origin.put("bucket", "elsewhere", b"first")
    content = buffer.bucket.object("elsewhere").content
    at_origin.parts[1] = StoredPart(1, content, late, buffer.clock.now(), {})
    if client_waits:
        await upload.complete_at_origin()
    else:
        await upload.complete()
    await buffer.until(lambda: AT.key in buffer.bucket.objects and not upload.is_open)
    await buffer.flushed()
    assert buffer.origin.data("bucket", AT.key) == b"second"
    await buffer.until(lambda: not buffer.bucket.uploads)


async def test_a_part_that_fails_is_tried_again_and_the_others_go_on(buffer: Buffer) -> None:
    """It is told, and once a part has come through it counts as going on."""
    upload = await OpenUpload.begin(buffer)
    buffer.origin.inject(on(Operation.UPLOAD_PART), Answer(503, "SlowDown"), times=3)
    for number in range(1, 10):
        await upload.store(number, b"x")
    buffer.start()
    await buffer.until(lambda: len(upload.sent()) == 9)
    turn = buffer.journal.read(lambda tx: tx.turns.of(upload.id))
    assert turn is not None
    await buffer.until(lambda: getattr(buffer.journal.read(lambda tx: tx.turns.of(upload.id)), "attempts", 1) == 0)
    assert buffer.observer.failures


async def test_few_uploads_of_a_bucket_go_at_once(buffer: Buffer) -> None:
    """Objects become whole one after the other, not all of them at the end; and so many parts of them all."""
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.UPLOAD_PART), Hold(held, reached), times=None)
    uploads = [await OpenUpload.begin(buffer, f"u{number}", key(f"k{number}")) for number in range(6)]
    for upload in uploads:
        for number in range(1, 2 * PARTS_AT_ONCE + 1):
            await upload.store(number, b"x")
    buffer.start()
    await buffer.until(reached.is_set)
    await buffer.passes(5.0)
    on_their_way = [call.key for call in buffer.origin.calls if call.operation is Operation.UPLOAD_PART]
    assert len(set(on_their_way)) == PLACES[Priority.UPLOAD]
    assert len(on_their_way) == min(PARTS_PER_LANE, PARTS_AT_ONCE * PLACES[Priority.UPLOAD])
    held.set()
    await buffer.until(lambda: all(len(upload.sent()) == 2 * PARTS_AT_ONCE for upload in uploads))


async def test_slots_wait_for_no_other(buffer: Buffer) -> None:
    """However much another has open that does not get on; and acknowledged objects wait for no open upload."""
    held = asyncio.Event()
    buffer.origin.inject(on(Operation.UPLOAD_PART, key="a"), Hold(held), times=None)
    uploads = {
        name: await OpenUpload.begin(buffer, name + slot, key(name), slot=slot)
        for name, slot in (("a", "one"), ("b", "other"), ("c", "other"))
    }
    for upload in uploads.values():
        for number in range(1, 3 * PARTS_PER_LANE if upload.slot == "one" else 3):
            await upload.store(number, b"x")
    at = WriteSpec(key("object"), HEADERS, "one")
    await buffer.put(key("object"), b"x", spec=at)
    buffer.start()
    await buffer.until(lambda: uploads["b"].sent() == uploads["c"].sent() == {1, 2})
    await buffer.until(lambda: "object" in buffer.bucket.objects)
    assert not uploads["a"].sent()
    held.set()
    await buffer.until(lambda: len(uploads["a"].sent()) == 3 * PARTS_PER_LANE - 1)


async def test_an_upload_that_gets_nowhere_keeps_no_other_of_its_bucket_waiting(buffer: Buffer) -> None:
    """The origin refuses their keys: more of them than there are places rest, and the others go on."""
    bad = [f"bad{number}" for number in range(3 * PLACES[Priority.UPLOAD])]
    for name in bad:
        buffer.origin.inject(on(Operation.UPLOAD_PART, key=name), Answer(403, "AccessDenied"), times=None)
    uploads = {name: await OpenUpload.begin(buffer, name, key(name)) for name in (*bad, "good")}
    for name in bad:
        for number in range(1, 3 * PARTS_PER_LANE):
            await uploads[name].store(number, b"x")
    await uploads["good"].store(1, b"y")
    buffer.start()
    await buffer.at_once(lambda: uploads["good"].sent() == {1})
    await buffer.still()
    tried = buffer.origin.count(Operation.UPLOAD_PART)
    assert tried <= len(bad) * PARTS_AT_ONCE + 1
    await buffer.until(lambda: buffer.origin.count(Operation.UPLOAD_PART) > tried)


class _Limiter:
    """Lets pass what is asked for, and writes it down."""

    def __init__(self) -> None:
        self.passed_bytes = 0

    async def take(self, count: int, rank: Callable[[], int]) -> tuple[float, float]:
        self.passed_bytes += count
        return 0.0, 0.0

    def passes(self, count: int, rank: Callable[[], int]) -> bool:
        self.passed_bytes += count
        return True

    def charge(self, count: int) -> None:
        self.passed_bytes += count


class _Meter:
    """Ceilings of a meter."""

    def __init__(self) -> None:
        self.limiters: dict[tuple[Direction, str], _Limiter] = {}

    def limiter(self, direction: Direction, slot: str) -> _Limiter:
        return self.limiters.setdefault((direction, slot), _Limiter())

    def release(self) -> None: ...

    def answered(self, kind: AnswerKind, seconds: float) -> None: ...

    def slowed(self, direction: Direction) -> None: ...


async def test_parts_take_the_bandwidth_of_their_slot(buffer: Buffer) -> None:
    """Byte by byte: large ones that stream, and small ones."""
    meter = _Meter()
    upload = await OpenUpload.begin(buffer, slot="mine", at_origin=True)
    await upload.store(1, os.urandom(PART_BYTES))
    await upload.store(2, b"x" * 1000)
    buffer.start(MeteredOrigin(buffer.origin, OriginMeter(meter)))
    await buffer.until(lambda: upload.sent() == {1, 2})
    assert meter.limiters["write", "mine"].passed_bytes == PART_BYTES + 1000
    assert counted(metrics.ORIGIN_BYTES, slot="mine", purpose="flush") == counted(metrics.ORIGIN_BYTES) > 0


@pytest.mark.slow
async def test_a_part_that_complete_leaves_out_is_no_damage(buffer: Buffer) -> None:
    """Large objects have all places of the lane: a part waits for one while its client completes without it."""
    await buffer.learn()
    for name in ("one", "another"):
        await buffer.upload(key(name), [PART_BYTES] * PARTS_AT_ONCE, upload_id=name)
    held = asyncio.Event()
    buffer.origin.inject(on(Operation.UPLOAD_PART), Hold(held), times=PARTS_PER_LANE)
    buffer.start()
    await buffer.until(lambda: buffer.origin.count(Operation.UPLOAD_PART) == PARTS_PER_LANE)
    upload = await OpenUpload.begin(buffer, at_origin=True)
    for number in (1, 2):
        await upload.store(number, bytes([number]) * PART_BYTES)
    await buffer.until(lambda: upload.id in buffer.reconciler._runs)
    await buffer.still()
    del upload.contents[2]
    made, parts = upload._made(), upload.parts()[:1]
    etag = multipart_etag([one.file.etag for one in parts]) or ""
    made = replace(made, parts=parts, etag=etag, size_bytes=PART_BYTES, acknowledged_at=buffer.clock.now())
    assert await buffer.journal.change(lambda tx: tx.uploads.complete(made))
    held.set()
    await buffer.flushed()
    assert buffer.origin.data("bucket", AT.key) == upload.contents[1]
    assert not buffer.observer.damages


async def test_a_part_that_is_sent_anew_is_no_damage(buffer: Buffer) -> None:
    """While others are on their way: the former one was taken up as the next, and is gone."""
    await buffer.learn()
    upload = await OpenUpload.begin(buffer, at_origin=True)
    for number in range(1, PARTS_AT_ONCE + 2):
        await upload.store(number, bytes([number]) * PART_BYTES)
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.UPLOAD_PART), Hold(held, reached), times=PARTS_AT_ONCE)
    buffer.start()
    await buffer.until(reached.is_set)
    await upload.store(PARTS_AT_ONCE + 1, b"sent anew")
    held.set()
    await buffer.until(lambda: upload.sent() == set(upload.contents))
    await upload.complete()
    await buffer.flushed()
    assert buffer.origin.data("bucket", AT.key) == b"".join(upload.contents.values())
    assert not buffer.observer.damages


# What nobody goes on with


@pytest.mark.slow
async def test_an_upload_that_nobody_touches_expires(buffer: Buffer) -> None:
    """So long after its last part as its slot says: its parts go here, its upload at the origin, and it is told."""
    expiry_seconds = 6 * UPLOAD_LOOK_SECONDS
    buffer.slots["slot"] = Slot("slot", Prefix(""), upload_expiry_seconds=expiry_seconds)
    upload = await OpenUpload.begin(buffer)
    await upload.store(1, b"x")
    buffer.start()
    await buffer.until(lambda: upload.sent() == {1})
    await buffer.passes(expiry_seconds - UPLOAD_LOOK_SECONDS, step=10.0)
    await upload.store(2, b"y")
    await buffer.until(lambda: upload.sent() == {1, 2})
    await buffer.passes(expiry_seconds - UPLOAD_LOOK_SECONDS, step=10.0)
    assert upload.is_open
    assert not buffer.observer.expiries
    assert await buffer.passes(2 * UPLOAD_LOOK_SECONDS, lambda: buffer.observer.expiries == [AT.key], step=10.0)
    await buffer.until(lambda: not buffer.bucket.uploads and not list(buffer.staging.names()))
    ended = buffer.journal.read(lambda tx: tx.uploads.ended("u"))
    assert ended is not None
    assert ended.etag is None
    assert AT.key not in buffer.bucket.objects


@pytest.mark.slow
async def test_an_open_upload_is_asked_for_now_and_then_only(buffer: Buffer) -> None:
    """Nobody touches it: at most one question in three minutes."""
    upload = await OpenUpload.begin(buffer)
    await upload.store(1, b"x")
    buffer.start()
    await buffer.until(lambda: upload.sent() == {1})
    asked = buffer.origin.count()
    await buffer.passes(10 * UPLOAD_LOOK_SECONDS, step=UPLOAD_LOOK_SECONDS / 4)
    assert 5 <= buffer.origin.count() - asked <= 11
    assert upload.is_open


async def test_an_upload_that_the_bucket_has_ended_goes(buffer: Buffer) -> None:
    """Its client has left it alone for a while, and a rule of the bucket, or somebody, has aborted it there."""
    upload = await OpenUpload.begin(buffer)
    await upload.store(1, b"x")
    buffer.start()
    await buffer.until(lambda: upload.sent() == {1})
    buffer.bucket.uploads.clear()
    assert await buffer.passes(2 * UPLOAD_LOOK_SECONDS, lambda: not upload.is_open, step=UPLOAD_LOOK_SECONDS / 4)
    await buffer.until(lambda: not list(buffer.staging.names()))
    assert buffer.observer.expiries == [AT.key]


async def test_an_upload_in_use_that_the_bucket_has_ended_is_begun_anew(buffer: Buffer) -> None:
    """Its client goes on with it: all its parts are sent again, and it is completed."""
    upload = await OpenUpload.begin(buffer)
    await upload.store(1, os.urandom(PART_BYTES))
    buffer.start()
    await buffer.until(lambda: upload.sent() == {1})
    buffer.bucket.uploads.clear()
    await buffer.passes(UPLOAD_LOOK_SECONDS / 2, step=10.0)
    await upload.store(2, b"y")
    await buffer.until(lambda: upload.sent() == {1, 2} and len(buffer.bucket.uploads) == 1)
    await upload.complete()
    await buffer.flushed()
    assert buffer.origin.data("bucket", AT.key) == b"".join(upload.contents.values())
    assert not buffer.observer.expiries


# A Complete that the origin carries out while its client waits


async def sent_upload(buffer: Buffer) -> OpenUpload:
    """Of two parts, which the origin has."""
    upload = await OpenUpload.begin(buffer)
    await upload.store(1, os.urandom(PART_BYTES))
    await upload.store(2, b"end")
    buffer.start()
    await buffer.until(lambda: upload.sent() == {1, 2})
    return upload


async def test_what_the_origin_completes_is_over_here(buffer: Buffer) -> None:
    """Published, remembered for who repeats it; its parts go, and what lies under the key is our own."""
    upload = await sent_upload(buffer)
    etag = upload.etag
    await upload.complete_at_origin(**{"if-none-match": "*"})
    await buffer.until(lambda: not upload.is_open)
    await buffer.flushed()
    assert buffer.observer.published == [(AT.key, etag)]
    ended = buffer.journal.read(lambda tx: tx.uploads.ended("u"))
    assert ended is not None
    assert (ended.etag, ended.parts) == (etag, "these")
    own = buffer.journal.read(lambda tx: tx.buckets.last_own_write(AT))
    assert own is not None
    assert own.etag == etag
    [sent] = [one for one in buffer.origin.calls if one.operation is Operation.COMPLETE_MULTIPART_UPLOAD]
    assert sent.headers["if-none-match"] == "*"


async def test_a_condition_that_does_not_hold_is_told_and_the_upload_stays(buffer: Buffer) -> None:
    """It can be completed again, under another, and its parts are there still."""
    upload = await sent_upload(buffer)
    buffer.origin.put("bucket", AT.key, b"theirs")
    await upload.complete_at_origin(**{"if-none-match": "*"})
    await buffer.until(lambda: upload.answer() is not None and upload.is_over())
    assert upload.answer() == "PreconditionFailed"
    assert buffer.origin.data("bucket", AT.key) == b"theirs"
    await upload.complete_at_origin(**{"if-match": buffer.bucket.object(AT.key).etag})
    await buffer.until(lambda: not upload.is_open)
    assert buffer.origin.data("bucket", AT.key) == b"".join(upload.contents.values())
    assert buffer.origin.count(Operation.UPLOAD_PART) == 2


@pytest.mark.parametrize("effect", [Unreachable(late=True), Answer(500, late=True)], ids=str)
async def test_what_the_origin_has_completed_and_nobody_heard_of_is_over_here_too(
    buffer: Buffer, effect: Answer | Unreachable
) -> None:
    """Also where the look behind it was lost as well: its client is told that nobody knows, and it is found out."""
    upload = await sent_upload(buffer)
    etag = upload.etag
    buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), effect)
    away = buffer.origin.inject(on(Operation.HEAD_OBJECT), Unreachable(), times=None)
    await upload.complete_at_origin()
    await buffer.until(lambda: upload.answer() == "ServiceUnavailable")
    assert not upload.is_over()
    buffer.origin.faults.remove(away)
    await buffer.until(lambda: not upload.is_open)
    assert buffer.observer.published == [(AT.key, etag)]
    assert buffer.origin.count(Operation.COMPLETE_MULTIPART_UPLOAD) == 1
    await buffer.flushed()


async def in_doubt(buffer: Buffer) -> OpenUpload:
    """Whether the origin has completed it nobody knows; it has not."""
    upload = await sent_upload(buffer)
    buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable())
    await upload.complete_at_origin()
    await buffer.until(lambda: upload.answer() is not None)
    return upload


def complete_late(buffer: Buffer, upload: OpenUpload) -> None:
    """The origin carries it out after all."""
    origin_upload_id = next(iter(buffer.bucket.uploads))
    del buffer.bucket.uploads[origin_upload_id]
    buffer.origin.put("bucket", AT.key, b"".join(upload.contents.values()))
    stored = buffer.bucket.object(AT.key)
    buffer.bucket.put(replace(stored, etag=upload.etag))


@pytest.mark.slow
async def test_the_origin_is_given_time(buffer: Buffer) -> None:
    """It is asked seldom, and less and less, for as long as it may still be at it; then it has not done it, and the
    upload can be completed anew."""
    upload = await in_doubt(buffer)
    times = []
    for _ in range(int(3 * ANSWER_GIVEN_UP_SECONDS / 5)):
        before = buffer.origin.count(Operation.LIST_PARTS)
        await buffer.clock.advance(5.0)
        await buffer.still()
        times += [buffer.clock.now()] * (buffer.origin.count(Operation.LIST_PARTS) - before)
        if upload.is_over():
            break
    waits = [after - before for before, after in pairwise(sorted(set(times)))]
    assert all(later >= earlier - 5.0 for earlier, later in pairwise(waits))
    assert 8 <= len(times) <= 14
    assert upload.is_open
    assert upload.is_over()
    await upload.complete_at_origin()
    await buffer.until(lambda: not upload.is_open)


@pytest.mark.slow
async def test_what_is_done_late_is_found(buffer: Buffer) -> None:
    """The origin works at a large object for half an hour."""
    upload = await in_doubt(buffer)
    await buffer.passes(1800.0, step=10.0)
    assert upload.is_open
    assert not upload.is_over()
    etag = upload.etag
    complete_late(buffer, upload)
    assert await buffer.passes(1800.0, lambda: not upload.is_open, step=10.0)
    assert buffer.observer.published == [(AT.key, etag)]


async def test_an_upload_that_the_origin_has_given_up_stays(buffer: Buffer) -> None:
    """Something else lies under the key: its parts are of use to who completes it anew, and are sent again."""
    upload = await in_doubt(buffer)
    buffer.bucket.uploads.clear()
    buffer.origin.put("bucket", AT.key, b"theirs")
    assert await buffer.passes(600.0, upload.is_over, step=1.0)
    assert upload.is_open
    assert upload.answer() == "NoSuchUpload"
    assert not buffer.observer.published
    await buffer.until(lambda: upload.sent() == {1, 2} and len(buffer.bucket.uploads) == 1)
    await upload.complete_at_origin()
    await buffer.until(lambda: not upload.is_open)
    assert buffer.origin.data("bucket", AT.key) == b"".join(upload.contents.values())


@pytest.mark.slow
async def test_an_upload_that_is_open_there_stays_whatever_lies_under_the_key(buffer: Buffer) -> None:
    """Also the very same bytes: others may have put them there."""
    upload = await in_doubt(buffer)
    kept = dict(buffer.bucket.uploads)
    complete_late(buffer, upload)
    buffer.bucket.uploads.update(kept)
    await buffer.passes(600.0, step=5.0)
    assert upload.is_open
    assert not buffer.observer.published


async def test_one_that_has_ended_meanwhile_is_left_as_it_is(buffer: Buffer) -> None:
    """Its client has aborted it while the origin was being asked."""
    upload = await in_doubt(buffer)
    held, reached = asyncio.Event(), asyncio.Event()
    buffer.origin.inject(on(Operation.LIST_PARTS), Hold(held, reached))
    await buffer.until(reached.is_set)
    assert await buffer.journal.change(lambda tx: tx.uploads.abort("u", Moment(buffer.clock.now())))
    held.set()
    await buffer.until(lambda: not buffer.bucket.uploads)
    ended = buffer.journal.read(lambda tx: tx.uploads.ended("u"))
    assert ended is not None
    assert ended.etag is None
    assert not buffer.observer.published
    assert not upload.is_open


async def test_what_this_gateway_has_written_since_counts(buffer: Buffer) -> None:
    """What is found out late takes the place of nothing that was done later."""
    upload = await in_doubt(buffer)
    later = LastOwnWrite(buffer.clock.now() + 10_000.0, '"later"')
    await buffer.journal.change(lambda tx: tx.buckets.record_own_write(AT, later))
    complete_late(buffer, upload)
    assert await buffer.passes(600.0, lambda: not upload.is_open, step=5.0)
    assert buffer.journal.read(lambda tx: tx.buckets.last_own_write(AT)) == later


def _away(_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("when", "effect"),
    [
        (on(Operation.LIST_PARTS), Unreachable()),
        (on(Operation.LIST_PARTS), Answer(503, "SlowDown")),
        (on(Operation.LIST_PARTS), Answer(403, "AccessDenied")),
        (on(Operation.HEAD_OBJECT), Unreachable()),
        (_away, Unreachable()),
    ],
    ids=["no parts", "slowly", "no right", "no head", "away"],
)
@pytest.mark.slow
async def test_an_origin_that_does_not_say_is_asked_again(
    buffer: Buffer, when: Callable[..., bool], effect: Answer | Unreachable
) -> None:
    """However long: nothing is concluded from it."""
    upload = await in_doubt(buffer)
    fault = buffer.origin.inject(when, effect, times=None)
    complete_late(buffer, upload)
    await buffer.passes(2 * ANSWER_GIVEN_UP_SECONDS, step=30.0)
    assert upload.is_open
    assert not upload.is_over()
    buffer.origin.faults.remove(fault)
    assert await buffer.passes(7500.0, lambda: not upload.is_open, step=5.0)


@pytest.mark.slow
async def test_an_origin_without_lists_of_parts_is_looked_at_all_the_same(buffer: Buffer) -> None:
    """Whether the upload is open it does not tell: then it is completed anew after an hour."""
    upload = await in_doubt(buffer)
    buffer.origin.inject(on(Operation.LIST_PARTS), Answer(501, "NotImplemented"), times=None)
    assert await buffer.passes(3 * ANSWER_GIVEN_UP_SECONDS, upload.is_over, step=30.0)
    assert upload.is_open


@pytest.mark.slow
def test_a_look_reads_what_it_can_start(tmp_path: Path) -> None:
    """However much is unsent, of however many uploads."""
    steps: dict[int, int] = {}

    async def scenario(buffer: Buffer, uploads: int, parts: int) -> None:
        buffer.origin.inject(on(Operation.UPLOAD_PART), Hold(asyncio.Event()), times=None)
        for number in range(uploads):
            upload = await OpenUpload.begin(buffer, f"u{number:03d}", key(f"k{number}"), at_origin=True)
            await upload.store_many(parts)
        with steps_of_reads(buffer.journal) as counted:
            buffer.start()
            await buffer.passes(3.0)
        steps[uploads] = max(counted)

    for uploads, parts in ((10, 100), (100, 200)):
        directory = tmp_path / str(uploads)
        directory.mkdir()
        with_buffer(directory, lambda buffer: scenario(buffer, uploads, parts))  # noqa: B023
    assert steps[100] <= steps[10] * 1.2 + 50


@pytest.mark.slow
async def test_an_upload_with_which_the_client_goes_on_stays(buffer: Buffer) -> None:
    """A part that was acknowledged since is not thrown away with those of which the origin has made the object."""
    upload = await in_doubt(buffer)
    etag = upload.etag
    await upload.store(3, b"more")
    before = buffer.origin.count(Operation.LIST_PARTS)
    await buffer.passes(60.0, step=1.0)
    assert buffer.origin.count(Operation.LIST_PARTS) - before < 20  # now and then, not all the time
    complete_late(buffer, upload)
    buffer.bucket.put(replace(buffer.bucket.object(AT.key), etag=etag))
    await buffer.passes(600.0, step=5.0)
    assert upload.is_open
    assert 3 in {part.number for part in upload.parts()}


USELESS = ("NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall")
STEPS = (Operation.UPLOAD_PART, Operation.COMPLETE_MULTIPART_UPLOAD)


def of_last_part_or_complete(call: Call) -> bool:
    return call.operation in STEPS and dict(call.query).get("partNumber") in (None, "6")


@pytest.mark.slow
@pytest.mark.parametrize("code", USELESS)
@pytest.mark.parametrize("operation", STEPS)
async def test_an_upload_of_which_the_bucket_never_makes_an_object_is_sent_seldom(
    buffer: Buffer, code: str, operation: Operation
) -> None:
    """After some attempts it has failed, in the origin's words. It gets there when the bucket takes it."""
    await buffer.learn()
    refusal = Answer(404 if code == "NoSuchUpload" else 400, code)
    fault = buffer.origin.inject(
        lambda call: call.operation is operation and of_last_part_or_complete(call), refusal, times=None
    )
    write = await buffer.upload(AT, [PART_BYTES, PART_BYTES, 3])

    def refusals() -> int:
        return len(buffer.observer.failures)

    buffer.start()
    assert await buffer.passes(60.0, lambda: refusals() == RESTARTS_MAX + 1, step=1.0)
    turn = buffer.journal.read(lambda tx: tx.turns.of(write.id))
    assert turn is not None
    assert (turn.priority, turn.last_error) == (Priority.REFUSED, f"{code}: injected")
    assert turn.failing_since is not None
    assert buffer.observer.kinds == ["changed"] * RESTARTS_MAX + ["other"]
    await buffer.passes(3600.0, step=60.0)
    assert 5 <= refusals() - RESTARTS_MAX - 1 <= 12
    fault.times = 0
    assert await buffer.passes(700.0, lambda: not buffer.left(), step=30.0)
    assert buffer.bucket.object(AT.key).etag == write.etag
    assert await buffer.passes(60.0, lambda: not buffer.bucket.uploads, step=5.0)


@pytest.mark.slow
async def test_failures_count_whatever_parts_get_there_between(buffer: Buffer) -> None:
    """A bucket that loses uploads: the parts of an open one are sent again less and less often."""
    upload = await OpenUpload.begin(buffer)
    fault = buffer.origin.inject(of_last_part_or_complete, Answer(404, "NoSuchUpload"), times=None)
    for number in (1, 2, 6):
        await upload.store(number, b"x")
    buffer.start()
    await buffer.passes(150.0, step=0.5)
    assert upload.is_open
    assert buffer.origin.count(Operation.UPLOAD_PART) < 40
    fault.times = 0
    assert await buffer.passes(100.0, lambda: upload.sent() == {1, 2, 6}, step=5.0)


async def test_an_upload_that_was_lost_once_is_sent_again_at_once(buffer: Buffer) -> None:
    """However often the bucket was away before: that has nothing to do with it."""
    await buffer.learn()
    away = buffer.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(), times=None)
    write = await buffer.upload(AT, [PART_BYTES, 3])
    buffer.start()
    assert await buffer.passes(600.0, lambda: len(buffer.observer.failures) > RESTARTS_MAX + 2, step=5.0)
    buffer.bucket.uploads.clear()
    away.times = 0
    assert await buffer.passes(130.0, lambda: not buffer.left(), step=5.0)
    assert buffer.observer.kinds.count("changed") == 1
    assert buffer.bucket.object(AT.key).etag == write.etag
