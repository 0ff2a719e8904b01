"""A write-back buffer on an origin in memory, and the process that flushes it, without any gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from gateway.objects import ObjectKey
from gateway.origin.client import Origin
from gateway.s3.headers import multipart_etag
from gateway.writeback.files.staged_file import StagedFile, Staging
from gateway.writeback.flushing.early_parts import EarlyParts
from gateway.writeback.flushing.flush import Tools
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.flusher import Flusher
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Base, Ended, Fixed, Part, PendingObject, Upload
from gateway.writeback.threads import BufferThreads
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.writeback import md5

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

    def settled(self, pending: PendingObject) -> None:
        """As it should be."""

    def failing(self, pending: PendingObject, failures: int, reason: str) -> None:
        self.failures.append(reason)

    def goes_on(self, pending: PendingObject) -> None:
        """Nothing to be done."""

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

    def tools(self, origin: Origin | None = None) -> Tools:
        """What flushes need; `origin` stands before the one in memory."""
        requests = FlushRequests(origin or self.origin, self.staging, self.threads)
        return Tools(self.journal, requests, self.observer, self.observer)

    def start(self) -> None:
        """Flush what is pending."""
        self._flushing = asyncio.create_task(Flusher(self.tools(), self.clock).run())

    def start_early(self) -> None:
        """Send parts of open uploads, and nothing else."""
        self._flushing = asyncio.create_task(EarlyParts(self.tools(), self.clock).run())

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
        completed = await self.journal.change(lambda book: book.complete(new, Ended("u", at, 1.0, etag)))
        assert completed is not None
        return completed

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

    async def at_once(self, reached: Callable[[], bool]) -> None:
        """Wait until it is so while time stands still, however long the disk takes."""
        async with asyncio.timeout(60):
            while not reached():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.0005)

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
