"""A write-back buffer on an origin in memory, and the process that flushes it, without any gateway."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gateway.core.clock import Clock, Moment
from gateway.core.model import ObjectKey
from gateway.origin.client import Origin
from gateway.policy.slots import Slot
from gateway.s3.headers import multipart_etag
from gateway.telemetry.metrics import FailureKind
from gateway.writeback.flushing.flush_logger import FlushLogger
from gateway.writeback.flushing.flush_task import FlushDependencies
from gateway.writeback.flushing.reconciler import Reconciler
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.journal.buckets import BucketCapabilities, Conditions, Honoured
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import ExpectedVersion, Part, Write, WriteSpec
from gateway.writeback.staged_file import BufferThreads, StagedFile, Staging
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.writeback import md5

PART_BYTES = 5 * 1024 * 1024
HEADERS = {"content-type": "text/plain", "x-amz-meta-step": "12", "cache-control": "no-store"}


class Observer(FlushLogger):
    """Writes down what it is told."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.published: list[tuple[str, str | None]] = []
        self.settlements: list[tuple[str, str | None, float]] = []
        self.failures: list[str] = []
        self.kinds: list[FailureKind] = []
        self.conflicts: list[str] = []
        self.damages: list[str] = []
        self.expiries: list[str] = []
        self.mishaps: list[str] = []
        self.strange: list[tuple[str, str]] = []
        self.waits: list[str] = []

    async def publish(self, write: Write, etag: str | None) -> None:
        self.published.append((write.key.key, etag))

    def settled(self, write: Write, etag: str | None, attempt_seconds: float) -> None:
        self.settlements.append((write.key.key, etag, attempt_seconds))

    def failing(self, write: Write, failures: int, reason: str, kind: FailureKind) -> None:
        self.failures.append(reason)
        self.kinds.append(kind)

    def goes_on(self, write: Write) -> None:
        """Nothing to be done."""

    def conflict(self, write: Write, reason: str) -> None:
        self.conflicts.append(write.key.key)

    def damaged(self, write_id: int, name: str, slot: str, reason: str) -> None:
        self.damages.append(name.rpartition("/")[2])

    def not_looked_after(self, name: str, slot: str, reason: str) -> None:
        self.mishaps.append(reason)

    def not_understood(self, write: Write, reason: str) -> None:
        self.strange.append((write.key.key, reason))

    def awaits_files(self, write: Write, reason: str, *, of_others: bool = False) -> None:
        self.waits.append(reason)

    def expired(self, write: Write, reason: str) -> None:
        self.expiries.append(write.key.key)


class CountedThreads(ThreadPoolExecutor):
    """Knows how many calls of it have not ended; one has when everybody has been told who waited for it then."""

    def __init__(self, threads_count: int) -> None:
        super().__init__(threads_count)
        self._count_lock = threading.Lock()
        self.calls_count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        with self._count_lock:
            self.calls_count += 1
        super().submit(self._call, future, partial(fn, *args, **kwargs))
        return future

    def _call(self, future: Future[Any], function: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        finally:
            with self._count_lock:
                self.calls_count -= 1


class Buffer:
    """A buffer on an origin in memory, and its flusher."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.origin = MemoryOrigin(self.clock)
        self.bucket = self.origin.create_bucket("bucket")
        self.staging = Staging(directory, 0)
        self.staging.prepare()
        self.journal = Journal(directory, self._remove, clock=self.clock)
        self.threads = BufferThreads(2)
        self._counted = (CountedThreads(1), CountedThreads(2))
        self.journal._thread, self.threads._threads = self._counted
        self.observer = Observer(self.clock)
        self.slots: dict[str, Slot] = {}
        self._flushing: asyncio.Task[None] | None = None

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self.staging.remove(name)

    def tools(self, origin: Origin | None = None) -> FlushDependencies:
        """What flushes need; `origin` stands before the one in memory."""
        requests = Requests(origin or self.origin, self.staging, self.threads, self.clock)
        return FlushDependencies(self.journal, requests, self.observer, self.observer, self.clock, self.slots)

    async def learn(self, honoured: Honoured = Honoured.YES) -> None:
        """What the bucket is like is known: it is not probed."""
        known = Conditions(honoured, honoured, honoured, self.clock.now())
        capabilities = BucketCapabilities(True, True, self.clock.now(), known)
        await self.journal.change(lambda tx: tx.buckets.learn("bucket", capabilities))

    def start(self, origin: Origin | None = None) -> None:
        """Flush what is pending."""
        self.reconciler = Reconciler(self.tools(origin), random.Random(1))
        self._flushing = asyncio.create_task(self.reconciler.run())

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

    async def put(self, at: ObjectKey, content: bytes, **changed: Any) -> Write:
        file = self.stage(content)
        new = Write(
            changed.get("spec", WriteSpec(at, HEADERS, "slot")),
            changed.get("expected", ExpectedVersion(absent=True)),
            1.0,
            etag=file.etag,
            size_bytes=file.size_bytes,
            parts=(Part(1, file, 1.0, changed.get("checksums", {})),),
            acknowledged_at=changed.get("acknowledged_at", 1.0),
            behind=changed.get("behind"),
        )
        return await self.journal.change(lambda tx: tx.writes.acknowledge(new))

    async def upload(
        self, at: ObjectKey, sizes: list[int], origin_upload_id: str | None = None, upload_id: str = "u", **changed: Any
    ) -> Write:
        opened = Write(
            WriteSpec(at, HEADERS, "slot"),
            ExpectedVersion(absent=True),
            1.0,
            upload_id=upload_id,
            origin_upload_id=origin_upload_id,
            **changed,
        )
        files = [self.stage(os.urandom(size)) for size in sizes]
        parts = tuple(Part(2 * number, file, 1.0) for number, file in enumerate(files, 1))
        await self.journal.change(lambda tx: tx.uploads.begin(opened))
        for part in parts:
            await self.journal.change(lambda tx: tx.uploads.put_part(upload_id, part, Moment(1.0)))  # noqa: B023
        etag = multipart_etag([file.etag for file in files]) or ""
        made = replace(opened, etag=etag, size_bytes=sum(sizes), parts=parts, acknowledged_at=1.0)
        completed = await self.journal.change(lambda tx: tx.uploads.complete(made))
        assert completed is not None
        return completed

    async def delete(self, at: ObjectKey) -> None:
        gone = Write(WriteSpec(at, {}, "slot"), ExpectedVersion(absent=True), 1.0, deleted=True, acknowledged_at=1.0)
        await self.journal.change(lambda tx: tx.writes.acknowledge(gone))

    def left(self) -> list[Write]:
        return list(self.journal.read(lambda tx: tx.writes.waiting(0, 10_000)))

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

    async def still(self) -> None:
        """What follows from what has happened is done, as far as it waits for disks and threads, and for no clock."""
        ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
        while True:
            await asyncio.sleep(0.0002 if any(one.calls_count for one in self._counted) else 0)
            if not any(one.calls_count for one in self._counted) and not ready:
                return

    async def passes(self, seconds: float, reached: Callable[[], bool] = lambda: False, step: float = 0.25) -> bool:
        """Let time pass in steps, each of which is over before the next, at most until it is so; whether it is."""
        until = self.clock.monotonic() + seconds
        while not reached() and self.clock.monotonic() < until:
            await self.clock.advance(step)
            await self.still()
        return reached()

    async def flushed(self) -> None:
        await self.until(lambda: not self.left() and not list(self.staging.names()))

    def stored(self, at: ObjectKey) -> Mapping[str, str]:
        return self.bucket.object(at.key).headers


def with_buffer(
    path: Path, scenario: Callable[[Buffer], Coroutine[Any, Any, None]], made: type[Buffer] = Buffer
) -> None:
    async def run() -> None:
        buffer = made(path)
        try:
            await scenario(buffer)
        finally:
            await buffer.close()

    asyncio.run(run())
