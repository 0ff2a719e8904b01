"""Parts reach the origin while their upload is open, and Complete takes over what is there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from gateway.origin.client import OriginRequest
from gateway.origin.memory.faults import Answer, Hold, on
from gateway.s3.etags import multipart_etag
from gateway.s3.requests import Operation
from gateway.s3.xml_reader import text_of
from gateway.writeback.early_parts import PARTS_PER_SLOT
from gateway.writeback.records import Base, Ended, Fixed, Part, PendingObject, Upload
from tests.support.flushing import HEADERS, PART_BYTES, Buffer, with_buffer
from tests.support.writeback import key

AT = key("model")


class OpenUpload:
    """An upload that is open here, and at the origin."""

    def __init__(self, buffer: Buffer, origin_upload_id: str | None) -> None:
        self.buffer = buffer
        self.origin_upload_id = origin_upload_id
        self.parts: dict[int, Part] = {}

    @classmethod
    async def begin(cls, buffer: Buffer, *, at_origin: bool = True) -> OpenUpload:
        origin_upload_id = None
        if at_origin:
            request = OriginRequest("POST", AT.bucket, AT.key, [("uploads", None)], HEADERS)
            async with await buffer.origin.send(request) as response:
                origin_upload_id = text_of(await response.read(100_000), "UploadId")
        upload = Upload("u", Fixed(AT, HEADERS, "slot"), Base(absent=True), 1.0, origin_upload_id)
        await buffer.journal.change(lambda book: book.open_upload(upload))
        return cls(buffer, origin_upload_id)

    async def store(self, number: int, content: bytes) -> None:
        part = self.parts[number] = Part(number, self.buffer.stage(content), 1.0)
        await self.buffer.journal.change(lambda book: book.put_part("u", part))

    def sent(self) -> set[int]:
        parts = self.buffer.journal.read(lambda book: list(book.parts("u")))
        return {part.number for part in parts if part.origin_etag is not None}

    async def complete(self) -> PendingObject:
        parts = self.buffer.journal.read(lambda book: tuple(book.parts("u")))
        etag = multipart_etag([part.file.etag for part in parts]) or ""
        size_bytes = sum(part.file.size_bytes for part in parts)
        fixed = Fixed(AT, HEADERS, "slot")
        made = PendingObject(
            0, fixed, Base(absent=True), 1.0, etag, size_bytes, parts, True, False, "u", self.origin_upload_id
        )
        return await self.buffer.journal.change(lambda book: book.complete(made, Ended("u", AT, 1.0, etag)))


def test_parts_are_there_when_the_client_completes(tmp_path: Path) -> None:
    """The flush sends none of them again."""

    async def scenario(buffer: Buffer) -> None:
        upload = await OpenUpload.begin(buffer)
        buffer.start_early()
        contents = {number: os.urandom(PART_BYTES) for number in range(1, 3 * PARTS_PER_SLOT)}
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
