"""The write-back buffer as one process uses it: stages bodies, acknowledges writes, knows what is pending.

    <directory>/FORMAT      "forebay writeback 1"
    <directory>/journal     what was acknowledged (journal/schema.py); with SQLite's -wal and -shm beside it
    <directory>/presence    where anything is pending (presence.py)
    <directory>/ballast     room for the journal on a full disk (ballast.py)
    <directory>/arriving    what bodies that are arriving will take (bounds/bounds.py)
    <directory>/staged/     the bytes (staging.py)

A write is acknowledged in this order: the bytes are verified, its file is synced, the file's directory is synced, the
journal is committed. Nothing before the last step is visible to anybody, and what is left of it after a kill goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from gateway.clock import Clock, SystemClock
from gateway.errors import BufferRefused, BufferUnavailable
from gateway.objects import ByteRange, ObjectKey
from gateway.policy.slots import Slot
from gateway.writeback.bounds.ballast import Ballast
from gateway.writeback.bounds.bounds import Bounds, BoundsObserver, DiskRoom, Reservations, Shared, SilentBoundsObserver
from gateway.writeback.files.staged_file import StagedFile, StagedWriter, Staging
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Ended, OwnDoing, Part, PendingObject
from gateway.writeback.opening import ARRIVING, prepare
from gateway.writeback.reading import PendingReader
from gateway.writeback.recent_parts import RecentParts
from gateway.writeback.threads import BufferThreads

THREADS = 8

R = TypeVar("R")


class WritebackBuffer:
    """Of one process. What changes something is durable when it returns; BufferUnavailable when it may not be."""

    def __init__(self, files: _Files, threads: BufferThreads, bounds: Bounds) -> None:
        self.journal = files.journal
        self.may_be_pending = files.journal.presence.may_be
        """Whether something may be pending under a key: False is certain, and costs next to nothing."""
        self.staging = files.staging
        self.threads = threads
        self.bounds = bounds
        self._reservations = files.reservations
        self._ballast = files.ballast
        self._reader = PendingReader(self.staging, threads)
        self._recent_parts = RecentParts()

    @classmethod
    async def open(
        cls,
        directory: Path,
        worker: int,
        slots: Iterable[Slot] = (),
        *,
        clock: Clock | None = None,
        observer: BoundsObserver | None = None,
    ) -> Self:
        """Open, or create, as worker slot `worker`, whose process before this one is dead.

        Those of `slots` that write back are bounded by what they say, in all processes that are given the same.
        StartupError for a directory of another version, which stays as it is; BufferUnavailable when the disk fails.
        """
        bounded = [slot for slot in slots if slot.write == "back"]
        threads = BufferThreads(THREADS)
        try:
            now = (clock or SystemClock()).now()
            files = await threads.run(_open, directory, worker, [slot.name for slot in bounded], now)
        except BaseException:
            threads.shut_down()
            raise
        shared = Shared(files.journal, files.reservations, DiskRoom(directory), clock or SystemClock())
        return cls(files, threads, Bounds(bounded, shared, observer or SilentBoundsObserver()))

    async def keep_ballast(self) -> None:
        """Have this process write down what leaves the buffer even on a full disk. Again from time to time."""
        self.journal.make_room = self._ballast.give_up
        await self.threads.run(self._ballast.keep)

    async def close(self) -> None:
        """Finish what was begun, and close."""
        await self.bounds.close()
        self.journal.end_reads()
        await asyncio.to_thread(self._close)

    # What is pending

    def pending(self, key: ObjectKey) -> PendingObject | None:
        """The object or tombstone that was acknowledged last under a key and has not reached the origin.

        Next to nothing for a key under which nothing is; else some microseconds, but for the first look at an object of
        many parts. What the origin has of these may have changed since. Event loop only, as `look`.
        """
        if not self.may_be_pending(key):
            return None
        return self.journal.read(lambda book: self._latest(book, key))

    def _latest(self, book: Book, key: ObjectKey) -> PendingObject | None:
        return book.latest(key, lambda sequence: self._recent_parts.of(sequence, lambda: book.pieces(sequence)))

    def look(self, at: Callable[[Book], R]) -> R:
        """What a look at the journal as it is now finds."""
        return self.journal.read(at)

    def pieces(self, pending: PendingObject, byte_range: ByteRange) -> AsyncGenerator[memoryview, None]:
        """The bytes of a pending object (reading.py)."""
        return self._reader.pieces(pending, byte_range)

    # Bodies

    def stage(self) -> StagedWriter:
        """A new file for a body: write to it on any one thread at a time, then `seal` or `discard` it."""
        return self.staging.create()

    async def seal(self, writer: StagedWriter, md5: bytes) -> StagedFile:
        """Have a body survive a power cut; when it cannot, it is gone."""
        with self._watching_the_disk():
            return await self.threads.run(self.staging.seal, writer, md5)

    async def discard(self, writer: StagedWriter) -> None:
        """Throw a body away that is not sealed."""
        await self.threads.run(self.staging.discard, writer)

    async def give_up(self, part: Part) -> None:
        """Throw a sealed body away of which the journal was told nothing."""
        await self._remove([part])

    # Acknowledged by these. After BufferUnavailable it may be so all the same: nothing may be thrown away, but what
    # BufferRefused was raised for.

    async def acknowledge(self, pending: PendingObject) -> PendingObject:
        """An object, or a tombstone, is the key's last state now."""
        async with self._or_refused(pending.parts):
            return await self.journal.change(lambda book: book.put(pending))

    async def acknowledge_sharing(self, pending: PendingObject) -> bool:
        """The same for an object made of files of others; False when one of them has gone meanwhile."""

        def put(book: Book) -> bool:
            if not all(book.knows_file(part.file.name) for part in pending.parts):
                return False
            book.put(pending)
            return True

        return await self.journal.change(put)

    async def put_part(self, upload_id: str, part: Part) -> bool:
        """UploadPart; False when there is no such upload: then its file is gone."""
        async with self._or_refused([part]):
            stored = await self.journal.change(lambda book: book.put_part(upload_id, part))
        if not stored:
            await self._remove([part])
        return stored

    async def complete(self, pending: PendingObject, ended: Ended) -> PendingObject | None:
        """CompleteMultipartUpload with the chosen parts; None when one was replaced, or the upload ended, meanwhile."""

        def put(book: Book) -> PendingObject | None:
            known = all(book.knows_file(part.file.name) for part in pending.parts)
            return book.complete(pending, ended) if known else None

        return await self.journal.change(put)

    async def completed_at_origin(self, ended: Ended) -> None:
        """CompleteMultipartUpload that the origin has carried out."""
        await self.journal.change(lambda book: book.completed_at_origin(ended))

    async def sent(self, upload_id: str, part: Part) -> None:
        """The origin has a part of an open upload."""
        await self.journal.change(lambda book: book.sent(upload_id, part))

    async def did(self, key: ObjectKey, own: OwnDoing) -> None:
        """This gateway has changed a key at the origin, past the buffer."""
        with self._watching_the_disk():
            await self.journal.change(lambda book: book.did(key, own))

    async def hurry(self, key: ObjectKey) -> None:
        """Somebody waits until the origin has what is pending under a key."""
        await self.journal.change(lambda book: book.hurry(key))

    async def abort(self, ended: Ended) -> bool:
        """AbortMultipartUpload; False when the upload has ended meanwhile."""
        return await self.journal.change(lambda book: book.abort(ended))

    @contextmanager
    def _watching_the_disk(self) -> Iterator[None]:
        """Have the bounds know when it takes nothing."""
        try:
            yield
        except BufferUnavailable as error:
            self.bounds.trouble(error)
            raise

    @asynccontextmanager
    async def _or_refused(self, parts: Sequence[Part]) -> AsyncIterator[None]:
        """The files of new parts go where it is certain that the journal does not name them."""
        with self._watching_the_disk():
            try:
                yield
            except BufferRefused:
                await self._remove(parts)
                raise

    async def _remove(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.file.is_here:
                await self.threads.run(self.staging.remove, part.file.name)

    def _close(self) -> None:
        self.threads.shut_down()
        self.journal.close()
        self._reservations.close()


@dataclass(frozen=True, slots=True)
class _Files:
    """What one process has open in the directory."""

    journal: Journal
    staging: Staging
    reservations: Reservations
    ballast: Ballast


def _open(directory: Path, worker: int, slots: Sequence[str], now: float) -> _Files:
    prepare(directory)
    staging = Staging(directory, worker)
    staging.prepare()

    def remove(names: list[str]) -> None:
        for name in names:
            staging.remove(name)

    journal = Journal(directory, remove, worker)
    journal.take_over(now)
    staging.sweep(journal.knows_file, worker)
    try:
        return _Files(journal, staging, Reservations(directory / ARRIVING, worker, slots), Ballast(directory))
    except OSError as error:
        journal.close()
        raise BufferUnavailable(f"the write-back buffer {directory} cannot be used: {error}") from error
