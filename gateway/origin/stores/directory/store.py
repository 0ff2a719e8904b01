"""A directory as a store: what `files.py` does, on threads of its own, with limits of time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from gateway.core.errors import S3Error
from gateway.core.model import ByteRange, ObjectKey
from gateway.origin.client import OriginSettings
from gateway.origin.receive_buffer import ReceiveBuffer, gathered
from gateway.origin.stores.directory import key_paths
from gateway.origin.stores.directory.abandoned_files import remove_abandoned
from gateway.origin.stores.directory.file_threads import FileThreads
from gateway.origin.stores.directory.files import Files, OpenFile, told
from gateway.origin.stores.directory.uploads import Uploads
from gateway.origin.stores.directory.walk import OnSkipped
from gateway.origin.stores.directory.writes import LOCKS, Writer, lock_number
from gateway.origin.stores.store import (
    Condition,
    Found,
    FoundPart,
    FoundUpload,
    Headers,
    Incoming,
    Page,
    kept_headers,
)
from gateway.s3.checksums import PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.xml import CompletedPart

T = TypeVar("T")

_PIECE_BYTES = 1024 * 1024
_REMOVAL_SECONDS = 3600.0

THREADS_MAX = 64
"""Threads for the files of one origin in a process, however many connections others may have."""


class DirectoryStore:
    """As `Store`. Event loop only."""

    def __init__(self, root: Path, settings: OriginSettings, on_skipped: OnSkipped) -> None:
        self._files = Files(root, on_skipped, follows_links=settings.symlinks == "follow")
        self._first_byte_seconds = settings.first_byte_timeout_seconds
        self._stall_seconds = settings.stall_timeout_seconds
        self._slow_seconds = settings.slow_timeout_seconds
        self._write_seconds = settings.read_timeout_seconds
        self._writer = Writer(self._files, settings.file_mode)
        self._uploads = Uploads(self._files, self._writer)
        count_max = min(THREADS_MAX, settings.max_connections)
        self._turns = [asyncio.Semaphore(max(1, count_max // 4)) for _ in range(LOCKS)]
        self._removal_due_at: dict[str, float] = {}
        self.threads = FileThreads(
            str(root),
            count_max,
            partial(os.statvfs, root),  # a file server is asked, and no cache of its attributes
            wait_seconds_max=settings.connection_wait_seconds,
            look_seconds_max=settings.first_byte_timeout_seconds / 2,
        )

    async def buckets(self) -> Sequence[tuple[str, float]]:
        return await self._run(self._files.buckets)

    async def check_bucket(self, bucket: str) -> None:
        await self._run(partial(self._files.check_bucket, bucket))

    def refusal(self, key: ObjectKey) -> S3Error | None:
        return key_paths.refusal(key.key)

    async def head(self, key: ObjectKey) -> Found:
        found = self.head_at_once(key)
        return found if found is not None else await self._run(partial(self._files.head, key))

    def head_at_once(self, key: ObjectKey) -> Found | None:
        """As `Files.head_at_once`."""
        return self._files.head_at_once(key)

    async def open(self, key: ObjectKey, wanted: tuple[int, int | None]) -> FileReading:
        opening = partial(self._files.open, key, wanted)
        opened = await self.threads.run(opening, self._first_byte_seconds, OpenFile.close)
        return self.reading(opened)

    def reading(self, opened: OpenFile) -> FileReading:
        return FileReading(opened, self.threads, self._stall_seconds)

    def begin_read(self, key: ObjectKey, wanted: tuple[int, int | None]) -> asyncio.Future[OpenFile] | None:
        """Open a file, and read it if it is small; it is closed again. None: that needs a wait."""

        def read() -> OpenFile:
            opened = self._files.open(key, wanted)
            opened.close()
            return opened

        return self.threads.run_now(read, self._first_byte_seconds)

    def begin_head(self, key: ObjectKey) -> asyncio.Future[Found] | None:
        """As `head`. None: that needs a wait."""
        return self.threads.run_now(partial(self._files.head, key), self._first_byte_seconds)

    async def list(self, bucket: str, prefix: bytes, after: bytes, delimiter: bytes, limit: int) -> Page:
        listing = partial(self._files.list, bucket, prefix, after, delimiter, limit)
        return await self.threads.run(listing, self._slow_seconds)

    async def put(self, key: ObjectKey, body: Incoming, headers: Headers, condition: Condition) -> Found:
        if key.key.endswith("/"):
            return await self._put_directory(key, body, condition)
        self._remove_abandoned(key.bucket)
        if body.length_bytes is not None and body.length_bytes <= _PIECE_BYTES:
            return await self._put_at_once(key, body, headers, condition)
        new = await self._write(partial(self._writer.begin, key), undo=self._writer.give_up)
        give_up = partial(self._writer.give_up, new)
        async with self._given_up(give_up) as owner:
            await self._receive(body, new.write)
            checksums, etag = _checksums(body), f'"{body.digests.md5().hex()}"'
            owner.pop_all()  # from here on the threads have it
            finish = partial(self._writer.finish, new, key, etag, kept_headers(headers), checksums, condition)
            return await self._write(finish, self._slow_seconds, turn=self._turn(key), unbegun=give_up)

    async def _put_at_once(self, key: ObjectKey, body: Incoming, headers: Headers, condition: Condition) -> Found:
        """Have one trip to a thread do it all: a trip costs as much as the writing."""
        content = bytearray()
        async for chunk in body.chunks:
            content += chunk
            if len(content) > _PIECE_BYTES:
                raise s3_error("IncompleteBody")

        def judged() -> tuple[str, Headers]:
            body.digests.update(memoryview(content))
            checksums = _checksums(body)
            return f'"{body.digests.md5().hex()}"', checksums

        write = partial(self._writer.write_whole, key, memoryview(content), judged, kept_headers(headers), condition)
        return await self._write(write, self._slow_seconds, turn=self._turn(key))

    async def _put_directory(self, key: ObjectKey, body: Incoming, condition: Condition) -> Found:
        async for chunk in body.chunks:
            body.digests.update(chunk)
            if chunk:
                raise s3_error("InvalidArgument", "The origin is a directory, and dir/ has no bytes.")
        body.digests.verified()
        return await self._write(partial(self._writer.make_directory, key, condition), turn=self._turn(key))

    async def delete(self, key: ObjectKey, condition: Condition) -> None:
        await self._write(partial(self._writer.delete, key, condition), turn=self._turn(key))

    async def begin(self, key: ObjectKey, headers: Headers) -> str:
        self._remove_abandoned(key.bucket)
        return await self._write(partial(self._uploads.begin, key, headers))

    async def began(self, key: ObjectKey, upload_id: str) -> Headers:
        return await self._run(partial(self._uploads.began, key, upload_id))

    async def put_part(self, key: ObjectKey, upload_id: str, number: int, body: Incoming) -> FoundPart:
        begin = partial(self._uploads.begin_part, key, upload_id, number, body.length_bytes)
        new = await self._write(begin, undo=self._uploads.give_up_part)
        give_up = partial(self._uploads.give_up_part, new)
        async with self._given_up(give_up) as owner:
            size_bytes = await self._receive(body, new.write)
            checksums, md5 = body.digests.verified(), body.digests.md5()
            owner.pop_all()
            finish = partial(self._uploads.finish_part, new, md5, size_bytes, checksums)
            return await self._write(finish, self._slow_seconds, unbegun=give_up)

    async def parts(self, key: ObjectKey, upload_id: str) -> Sequence[FoundPart]:
        return await self.threads.run(partial(self._uploads.parts, key, upload_id), self._slow_seconds)

    async def complete(
        self, key: ObjectKey, upload_id: str, listed: Sequence[CompletedPart], headers: Headers, condition: Condition
    ) -> Found:
        complete = partial(self._uploads.complete, key, upload_id, listed, headers, condition)
        return await self._write(complete, self._slow_seconds, turn=self._turn(key))

    async def abort(self, key: ObjectKey, upload_id: str) -> None:
        await self._write(partial(self._uploads.abort, key, upload_id), self._slow_seconds)

    async def uploads(self, bucket: str, prefix: str) -> Sequence[FoundUpload]:
        return await self.threads.run(partial(self._uploads.open_uploads, bucket, prefix), self._slow_seconds)

    async def check_place(self, key: ObjectKey) -> None:
        if (refused := key_paths.refusal(key.key)) is not None:
            raise refused
        await self._run(partial(self._writer.check_place, key))

    def _remove_abandoned(self, bucket: str) -> None:
        """Have a thread remove what dead nodes have left in a bucket; once an hour."""
        now = time.monotonic()
        if now < self._removal_due_at.get(bucket, now):
            return
        self._removal_due_at[bucket] = now + _REMOVAL_SECONDS

        def work() -> None:
            with self._files.bucket(bucket) as opened:
                remove_abandoned(opened)

        self.threads.later(work)

    async def _receive(self, body: Incoming, write: Callable[[memoryview, int], None]) -> int:
        """Have threads hash and write a body, piece by piece; return its length."""
        taken_bytes = 0

        def take(piece: memoryview) -> None:
            body.digests.update(piece)
            write(piece, taken_bytes)

        async with aclosing(gathered(body.chunks, ReceiveBuffer(_PIECE_BYTES, _PIECE_BYTES))) as pieces:
            async for piece in pieces:
                await self._write(partial(take, piece))
                taken_bytes += len(piece)
        return taken_bytes

    @asynccontextmanager
    async def _given_up(self, undo: Callable[[], None]) -> AsyncIterator[ExitStack]:
        """Undo what was begun on a thread, unless it has got another owner; nobody waits for that."""
        with ExitStack() as stack:
            stack.callback(self.threads.later, undo)
            yield stack

    def _turn(self, key: ObjectKey) -> asyncio.Semaphore:
        """Return the turn that a write has which may wait for the lock of a key, while it has a thread."""
        return self._turns[lock_number(key)]

    async def _write(
        self,
        function: Callable[[], T],
        seconds_max: float | None = None,
        undo: Callable[[T], None] | None = None,
        *,
        turn: asyncio.Semaphore | None = None,
        unbegun: Callable[[], None] | None = None,
    ) -> T:
        seconds = seconds_max or self._write_seconds
        return await self.threads.run(function, seconds, undo, is_write=True, turn=turn, unbegun=unbegun)

    async def aclose(self) -> None:
        await self.threads.aclose()

    async def _run(self, function: Callable[[], T]) -> T:
        return await self.threads.run(function, self._first_byte_seconds)


def _checksums(body: Incoming) -> dict[str, str]:
    """Return those to keep with an object; a copy has its source's, if they are of its bytes."""
    checksums = body.digests.verified()
    if body.copied is not None:
        kept = dict(body.copied[0].found.checksums)
        return kept if kept.get(f"{PREFIX}type", "FULL_OBJECT") == "FULL_OBJECT" else {}
    return {**checksums, f"{PREFIX}type": "FULL_OBJECT"} if checksums else {}


class FileReading:
    """As `Reading`: the kernel reads ahead, and others fetch the blocks behind this one meanwhile."""

    def __init__(self, opened: OpenFile, threads: FileThreads, stall_seconds: float) -> None:
        self._opened = opened
        self._threads = threads
        self._stall_seconds = stall_seconds

    @property
    def found(self) -> Found:
        return self._opened.found

    def whole(self, wanted: ByteRange) -> memoryview | None:
        return self._opened.first(wanted)

    async def pieces(self, wanted: ByteRange, buffer: ReceiveBuffer) -> AsyncIterator[memoryview]:
        """Yield pieces; never give back a buffer that a stuck thread may still fill."""
        if (first := self.whole(wanted)) is not None:
            yield first
            return
        offset = wanted.first
        while offset <= wanted.last:
            lent = buffer.lender.take(buffer.size_bytes)
            into = lent[: wanted.last + 1 - offset]
            await self._threads.run(partial(self._read, offset, into), self._stall_seconds)
            yield into
            buffer.lender.give_back(lent)
            offset += len(into)

    def _read(self, offset: int, into: memoryview) -> None:
        with told(), self._opened.in_use():
            self._opened.read(offset, into)

    async def aclose(self) -> None:
        if not self._opened.is_closed:
            self._threads.later(self._opened.close)  # a file server is told, and may hang
