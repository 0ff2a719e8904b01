"""Parts reach the origin while their upload is open, and Complete takes over what is there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from gateway.objects import ObjectKey
from gateway.origin.client import Direction, OriginRequest, Purpose
from gateway.origin.s3 import Attempt
from gateway.origin.traffic_meter import MeteredOrigin, OriginMeter
from gateway.s3.headers import multipart_etag
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from gateway.writeback.flushing.early_parts import PARTS_PER_SLOT, EarlyParts
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.records import Base, Ended, Fixed, Part, PendingObject, Upload
from tests.support.flushing import HEADERS, PART_BYTES, Buffer, with_buffer
from tests.support.journal_steps import steps_of_reads
from tests.support.memory_origin.faults import Answer, Hold, on
from tests.support.writeback import key, staged

AT = key("model")


class OpenUpload:
    """An upload that is open here, and at the origin."""

    def __init__(self, buffer: Buffer, upload: Upload) -> None:
        self.buffer = buffer
        self.fixed, self.upload_id = upload.fixed, upload.upload_id
        self.origin_upload_id = upload.origin_upload_id
        self.parts: dict[int, Part] = {}

    @classmethod
    async def begin(
        cls, buffer: Buffer, upload_id: str = "u", at: ObjectKey = AT, *, slot: str = "slot", at_origin: bool = True
    ) -> OpenUpload:
        origin_upload_id = None
        if at_origin:
            request = OriginRequest("POST", at.bucket, at.key, [("uploads", None)], HEADERS)
            async with await buffer.origin.send(request) as response:
                origin_upload_id = text_of(await response.read(100_000), "UploadId")
        upload = Upload(upload_id, Fixed(at, HEADERS, slot), Base(absent=True), 1.0, origin_upload_id)
        await buffer.journal.change(lambda book: book.open_upload(upload))
        return cls(buffer, upload)

    async def store(self, number: int, content: bytes) -> None:
        part = self.parts[number] = Part(number, self.buffer.stage(content), 1.0)
        await self.buffer.journal.change(lambda book: book.put_part(self.upload_id, part))

    def sent(self) -> set[int]:
        parts = self.buffer.journal.read(lambda book: list(book.parts(self.upload_id)))
        return {part.number for part in parts if part.origin_etag is not None}

    async def complete(self) -> PendingObject:
        parts = self.buffer.journal.read(lambda book: tuple(book.parts(self.upload_id)))
        etag = multipart_etag([part.file.etag for part in parts]) or ""
        size_bytes = sum(part.file.size_bytes for part in parts)
        made = PendingObject(
            *(0, self.fixed, Base(absent=True), 1.0, etag, size_bytes),
            *(parts, True, False, self.upload_id, self.origin_upload_id),
        )
        ended = Ended(self.upload_id, self.fixed.key, 1.0, etag)
        completed = await self.buffer.journal.change(lambda book: book.complete(made, ended))
        assert completed is not None
        return completed

    async def store_many(self, count: int) -> None:
        """Parts of which there is no file."""

        def put(book: Book) -> None:
            for number in range(1, count + 1):
                assert book.put_part(self.upload_id, Part(number, staged(f"{self.upload_id}/{number}"), 1.0))

        await self.buffer.journal.change(put)


def test_parts_are_there_when_the_client_completes(tmp_path: Path) -> None:
    """The flush sends none of them again."""

    async def scenario(buffer: Buffer) -> None:
        upload = await OpenUpload.begin(buffer)
        buffer.start_early()
        contents = {number: os.urandom(PART_BYTES) for number in range(1, PARTS_PER_SLOT + 2)}
        for number, content in contents.items():
            await upload.store(number, content)
        await buffer.until(lambda: upload.sent() == set(contents))
        await buffer.kill()
        await upload.complete()
        buffer.start()
        await buffer.flushed()
        assert buffer.origin.count(Operation.UPLOAD_PART) == len(contents)
        assert buffer.origin.data("bucket", AT.key) == b"".join(contents.values())

    with_buffer(tmp_path, scenario)


def test_a_part_that_is_replaced_is_sent_again(tmp_path: Path) -> None:
    """Also where the first one is on its way and arrives last: the object is made of what the client sent last."""

    async def scenario(buffer: Buffer) -> None:
        upload = await OpenUpload.begin(buffer)
        held, reached = asyncio.Event(), asyncio.Event()
        buffer.origin.inject(on(Operation.UPLOAD_PART), Hold(held, reached))
        await upload.store(1, b"first")
        buffer.start_early()
        await buffer.until(reached.is_set)
        await upload.store(1, b"second")
        await buffer.until(lambda: upload.sent() == {1})
        held.set()
        await buffer.until(lambda: buffer.origin.count(Operation.UPLOAD_PART) == 2)
        await asyncio.sleep(0)
        await buffer.kill()
        stored = await upload.complete()
        buffer.start()
        await buffer.flushed()
        assert buffer.origin.data("bucket", AT.key) == b"second"
        assert buffer.observer.published == [(AT.key, stored.etag)]
        await buffer.until(lambda: not buffer.bucket.uploads)

    with_buffer(tmp_path, scenario)


def test_failures_are_left_to_the_flush_after_a_pause(tmp_path: Path) -> None:
    """A part that does not get there is tried again now and then; the others go on."""

    async def scenario(buffer: Buffer) -> None:
        upload = await OpenUpload.begin(buffer)
        buffer.origin.inject(on(Operation.UPLOAD_PART), Answer(503, "SlowDown"), times=3)
        for number in (1, 2, 3):
            await upload.store(number, os.urandom(PART_BYTES))
        buffer.start_early()
        await buffer.until(lambda: upload.sent() == {1, 2, 3})
        assert buffer.origin.count(Operation.UPLOAD_PART) == 6
        assert not buffer.observer.failures

    with_buffer(tmp_path, scenario)


def test_an_upload_that_the_origin_does_not_know_waits(tmp_path: Path) -> None:
    """It was begun with the origin away: its parts go once it is complete."""

    async def scenario(buffer: Buffer) -> None:
        upload = await OpenUpload.begin(buffer, at_origin=False)
        await upload.store(1, b"x")
        buffer.start_early()
        for _ in range(20):
            await buffer.clock.advance(1.0)
        assert buffer.origin.count(Operation.UPLOAD_PART) == 0
        await buffer.kill()
        await upload.complete()
        buffer.start()
        await buffer.flushed()
        assert buffer.origin.data("bucket", AT.key) == b"x"

    with_buffer(tmp_path, scenario)


def test_slots_and_uploads_take_turns(tmp_path: Path) -> None:
    """A slot whose places are all taken keeps no other waiting, nor does an upload of many parts one of few."""

    async def scenario(buffer: Buffer) -> None:
        held, reached = asyncio.Event(), asyncio.Event()
        buffer.origin.inject(on(Operation.UPLOAD_PART, key="a"), Hold(held, reached), times=None)
        uploads = {name: await OpenUpload.begin(buffer, name, key(name), slot=slot) for name, slot in SLOTS.items()}
        for upload in uploads.values():
            for number in range(1, 3 * PARTS_PER_SLOT if upload.fixed.slot == "one" else 3):
                await upload.store(number, b"x")
        buffer.start_early()
        await buffer.until(lambda: uploads["b"].sent() == uploads["c"].sent() == {1, 2})
        assert not uploads["a"].sent()
        held.set()
        await buffer.until(lambda: len(uploads["a"].sent()) == 3 * PARTS_PER_SLOT - 1)

    with_buffer(tmp_path, scenario)


SLOTS = {"a": "one", "b": "other", "c": "other"}


def test_an_upload_that_gets_nowhere_keeps_no_other_of_its_slot_waiting(tmp_path: Path) -> None:
    """The origin has dropped it, or refuses its key: it rests, and the others go on."""

    async def scenario(buffer: Buffer) -> None:
        buffer.origin.inject(on(Operation.UPLOAD_PART, key="a"), Answer(403, "AccessDenied"), times=None)
        uploads = {name: await OpenUpload.begin(buffer, name, key(name)) for name in ("a", "b")}
        for number in range(1, 3 * PARTS_PER_SLOT):
            await uploads["a"].store(number, b"x")
        await uploads["b"].store(1, b"y")
        buffer.start_early()
        await buffer.at_once(lambda: uploads["b"].sent() == {1})
        tried = buffer.origin.count(Operation.UPLOAD_PART)
        assert tried <= PARTS_PER_SLOT + 1
        await buffer.until(lambda: buffer.origin.count(Operation.UPLOAD_PART) > tried)
        assert not buffer.observer.failures

    with_buffer(tmp_path, scenario)


def test_a_look_reads_what_it_can_start(tmp_path: Path) -> None:
    """However much is unsent, of however many uploads: with places to give, and with none."""
    steps: dict[int, list[int]] = {}

    async def scenario(buffer: Buffer, uploads: int, parts: int) -> None:
        held, reached = asyncio.Event(), asyncio.Event()
        for number in range(uploads):
            upload = await OpenUpload.begin(buffer, f"u{number:03d}", key(f"k{number}"))
            await upload.store_many(parts)
        buffer.origin.inject(on(Operation.UPLOAD_PART), Hold(held, reached), times=None)
        early = EarlyParts(buffer.tools(), buffer.clock)
        with steps_of_reads(buffer.journal) as counted:
            early.look()
            early.look()
        steps[uploads] = counted
        await early.stop()

    for uploads, parts in ((10, 10), (100, 100)):
        directory = tmp_path / str(uploads)
        directory.mkdir()
        with_buffer(directory, lambda buffer: scenario(buffer, uploads, parts))  # noqa: B023
    for few, many in zip(steps[10], steps[100], strict=True):
        assert many <= few * 1.2 + 50


class _Limiter:
    """Lets pass what is asked for, and writes it down."""

    def __init__(self) -> None:
        self.passed_bytes = 0

    async def take(self, count: int) -> float:
        self.passed_bytes += count
        return 0.0

    def passes(self, count: int) -> bool:
        self.passed_bytes += count
        return True

    def charge(self, count: int) -> None:
        self.passed_bytes += count


class _Meter:
    """Ceilings and observer of a meter."""

    def __init__(self) -> None:
        self.limiters: dict[tuple[Direction, str], _Limiter] = {}
        self.purposes: set[tuple[str, str]] = set()

    def limiter(self, direction: Direction, slot: str) -> _Limiter:
        return self.limiters.setdefault((direction, slot), _Limiter())

    def origin_attempt(self, attempt: Attempt) -> None: ...

    def origin_bytes(self, direction: Direction, slot: str, purpose: str, count: int) -> None:
        self.purposes.add((slot, purpose))

    def origin_waited(self, direction: Direction, slot: str, seconds: float) -> None: ...


def test_early_parts_take_the_bandwidth_of_their_slot(tmp_path: Path) -> None:
    """Byte by byte, as those that the flush sends do: large ones that stream, and small ones."""

    async def scenario(buffer: Buffer) -> None:
        meter = _Meter()
        upload = await OpenUpload.begin(buffer, slot="mine")
        await upload.store(1, os.urandom(PART_BYTES))
        await upload.store(2, b"x" * 1000)
        early = EarlyParts(buffer.tools(MeteredOrigin(buffer.origin, OriginMeter(meter, meter))), buffer.clock)
        running = asyncio.create_task(early.run())
        await buffer.until(lambda: upload.sent() == {1, 2})
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert meter.limiters["write", "mine"].passed_bytes == PART_BYTES + 1000
        assert meter.purposes == {("mine", Purpose.FLUSH.value)}

    with_buffer(tmp_path, scenario)
