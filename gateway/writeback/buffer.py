"""The write-back buffer as one process uses it: stages bodies, acknowledges writes, finds pending ones.

    <directory>/FORMAT      "forebay writeback 1"
    <directory>/journal     the acknowledged writes (journal/schema.py); with SQLite's -wal and -shm beside it
    <directory>/presence    which keys may be pending (pending_key_filter.py)
    <directory>/ballast     room for the journal on a full disk (room.py)
    <directory>/arriving    the room reserved for arriving bodies (room.py)
    <directory>/staged/     the bytes, and their checksums (staged_file.py)

A write is acknowledged in this order: the bytes are verified, its file is synced, the file's directory is synced, the
journal is committed. No reader sees anything before the last step, and recovery removes what a kill leaves before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from gateway.core.clock import Clock, Moment, SystemClock
from gateway.core.errors import BufferRefused, BufferUnavailable, PartInUse
from gateway.core.model import ByteRange, ObjectKey
from gateway.origin.client import StreamedBody
from gateway.policy.slots import PrefixMap, Slot
from gateway.writeback.bounds import Bounds, Shared
from gateway.writeback.checkpoints.layouts import member_of, rules_of
from gateway.writeback.journal.buckets import LastOwnWrite
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Part, Write
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.opening import ARRIVING, prepare
from gateway.writeback.order import with_order
from gateway.writeback.pending_reader import pending_pieces, staged_body
from gateway.writeback.room import DiskRoom, Reservations, ReserveFile
from gateway.writeback.staged_file import BufferThreads, StagedFile, StagedWriter, Staging

THREADS = 8

R = TypeVar("R")


class WritebackBuffer:
    """The buffer of one process. A change is durable when its method returns; BufferUnavailable when it may not be."""

    def __init__(
        self,
        directory: Path,
        opened: tuple[Journal, Staging, Reservations],
        threads: BufferThreads,
        clock: Clock,
        slots: Sequence[Slot],
    ) -> None:
        self.journal, self.staging, self._reservations = opened
        self.threads = threads
        self._clock = clock
        self._reserve = ReserveFile(directory)
        self.may_be_pending = self.journal.pending_keys.may_be
        """False is certain, and costs next to nothing; True means that something may be pending under the key."""
        self.look = self.journal.read
        self.node_id, _ = self.look(lambda tx: tx.node())
        """Identifies this node: every upload id begins with it."""
        self.stage = self.staging.create
        """Makes a file for a body: write to it on one thread at a time, then `seal` or `discard` it."""
        shared = Shared(self.journal, self._reservations, DiskRoom(directory), clock)
        self.bounds = Bounds([slot for slot in slots if slot.is_buffered], shared)
        self._slots = PrefixMap((slot.prefix, slot) for slot in slots)

    @classmethod
    async def open(
        cls,
        directory: Path,
        worker: int,
        slots: Iterable[Slot] = (),
        *,
        clock: Clock | None = None,
    ) -> Self:
        """Open or create the buffer as worker slot `worker`; the slot's previous process must be dead.

        Bounds hold for the `slots` that write back, across all processes that are given the same. StartupError for a
        directory of another version, which stays as it is; BufferUnavailable when the disk fails.
        """
        slots, threads, clock = list(slots), BufferThreads(THREADS), clock or SystemClock()
        try:
            names = [slot.name for slot in slots if slot.is_buffered]
            opened = await threads.run(_open, directory, worker, names, clock)
        except BaseException:
            threads.shut_down()
            raise
        return cls(directory, opened, threads, clock, slots)

    async def apply_settings(self, slots: Iterable[Slot]) -> None:
        """Set all slots. BufferUnavailable when the disk fails; then nothing has changed."""
        slots = list(slots)
        bounded = [slot for slot in slots if slot.is_buffered]
        try:
            await self.threads.run(self._reservations.apply_settings, [slot.name for slot in bounded])
        except OSError as error:
            raise BufferUnavailable(f"the room of the write-back buffers cannot be counted: {error}") from error
        self.bounds.apply_settings(bounded)
        self._slots = PrefixMap((slot.prefix, slot) for slot in slots)

    async def keep_reserve(self) -> None:
        """Keep room so that this process can record what leaves the buffer even on a full disk. Call it repeatedly."""
        self.journal.make_room = self._reserve.give_up
        await self.threads.run(self._reserve.keep)

    async def close(self) -> None:
        """Finish what was begun, and close."""
        await self.bounds.close()
        self.journal.end_reads()
        await asyncio.to_thread(self._close)

    # What is pending

    def pending(self, key: ObjectKey) -> Write | None:
        """Return the last unflushed write or tombstone of a key, without its parts. Event loop only, as `look`.

        Next to free for a key with nothing pending.
        """
        if not self.may_be_pending(key):
            return None
        return self.journal.read(lambda tx: tx.writes.latest(key))

    def pieces(self, pending: Write, byte_range: ByteRange) -> AsyncGenerator[memoryview, None]:
        """Yield the bytes of a pending object (pending_reader.py)."""
        return pending_pieces(self.journal, self.staging, self.threads, pending, byte_range)

    # Bodies

    async def seal(self, writer: StagedWriter, md5: bytes) -> StagedFile:
        """Make a body durable; if that fails, it is removed."""
        with self._watching_the_disk():
            return await self.threads.run(self.staging.seal, writer, md5)

    async def discard(self, writer: StagedWriter) -> None:
        """Remove a body that is not sealed."""
        await self.threads.run(self.staging.discard, writer)

    async def body(self, part: Part) -> bytes | StreamedBody:
        """Return a sealed body to send to the origin. BufferDamaged, OSError, now or while it is sent."""
        return await staged_body(self.staging, self.threads, part.file)

    async def give_up(self, *parts: Part) -> None:
        """Remove sealed bodies that the journal was never given."""
        for part in parts:
            if part.file.is_here:
                await self.threads.run(self.staging.remove, part.file.name)

    # These acknowledge. After BufferUnavailable the write may stand all the same: keep its files. Only after
    # BufferRefused they may go.

    async def acknowledge(self, write: Write) -> Write:
        """Make an object the key's last state."""
        placed_write = self._placed(write)
        async with self._or_refused(write.parts):
            return await self._change(lambda tx: tx.writes.acknowledge(placed_write))

    async def acknowledge_sharing(self, write: Write) -> bool:
        """Acknowledge an object made of other objects' files; False when one of them has gone meanwhile."""
        placed_write = self._placed(write)

        def put(tx: JournalTransaction) -> bool:
            if not all(tx.files.knows(part.file.name) for part in write.parts):
                return False
            tx.writes.acknowledge(placed_write)
            return True

        return await self._change(put)

    async def write_tombstone(self, tombstone: Write) -> Write | None:
        """Delete what is pending under a key here, at once. Return the tombstone; None: no need to wait for the origin.

        InConflict when a person must decide first.
        """
        placed_write = self._placed(tombstone)
        return await self._change(lambda tx: tx.writes.write_tombstone(placed_write))

    async def put_part(self, upload_id: str, part: Part) -> bool:
        """Store a part. Return False when there is no such upload; then, and after PartInUse, its file is removed."""
        now = Moment.of(self._clock)
        async with self._or_refused([part]):
            stored = await self._change(lambda tx: tx.uploads.put_part(upload_id, part, now))
        if not stored:
            await self.give_up(part)
        return stored

    async def complete(self, made: Write) -> Write | None:
        """Complete an upload with the chosen parts; None when a part was replaced, or the upload ended, meanwhile."""
        placed_write = self._placed(made)
        return await self._change(lambda tx: tx.uploads.complete(placed_write))

    async def complete_at_origin(self, made: Write) -> bool:
        """Leave the completion to the origin (`Uploads.complete_at_origin`)."""
        placed_write = self._placed(made)
        return await self._change(lambda tx: tx.uploads.complete_at_origin(placed_write))

    async def record_own_write(self, key: ObjectKey, own: LastOwnWrite, size_bytes: int = 0) -> None:
        """Record that this gateway changed a key at the origin, past the buffer; `size_bytes`: its size, if known."""
        slot = self._slots.longest(*key)
        name, member = (slot.name, member_of(key, rules_of(slot.checkpoints))) if slot is not None else ("", None)
        await self._change(lambda tx: tx.writes.changed_past(key, own, name, member, size_bytes))

    async def prioritise(self, key: ObjectKey) -> None:
        """Flush what is pending under a key before other writes: a request waits for it."""
        now = self._clock.now()
        await self.journal.change(lambda tx: tx.turns.prioritise(key, now))

    async def abort(self, upload_id: str) -> bool:
        """Abort an upload; False when it has ended meanwhile, or the origin is just completing it."""
        now = Moment.of(self._clock)
        return await self._change(lambda tx: tx.uploads.abort(upload_id, now))

    def _placed(self, write: Write) -> Write:
        """Order a write by the slot that its key is in now: an upload may have begun in one of another name."""
        acknowledged = Moment.of(self._clock) if write.is_acknowledged else None
        return with_order(write, self._slots.longest(*write.key), acknowledged)

    def of_checkpoint(self, upload: Write) -> Write:
        """Return an upload that is about to begin, with the checkpoint that it belongs to."""
        slot = self._slots.longest(*upload.key)
        return replace(upload, member=member_of(upload.key, rules_of(None if slot is None else slot.checkpoints)))

    async def _change(self, step: Callable[[JournalTransaction], R]) -> R:
        with self._watching_the_disk():
            return await self.journal.change(step)

    @contextmanager
    def _watching_the_disk(self) -> Iterator[None]:
        try:
            yield
        except BufferUnavailable as error:
            self.bounds.trouble(error)
            raise

    @asynccontextmanager
    async def _or_refused(self, parts: Sequence[Part]) -> AsyncIterator[None]:
        """Remove the files of new parts only once the journal certainly does not name them: now, or later."""
        try:
            yield
        except (BufferRefused, PartInUse):
            await self.give_up(*parts)
            raise
        except BufferUnavailable:
            self.journal.in_doubt += [part.file.name for part in parts if part.file.is_here]
            raise

    def _close(self) -> None:
        self.threads.shut_down()
        self.journal.close()
        self._reservations.close()


def _open(directory: Path, worker: int, slots: Sequence[str], clock: Clock) -> tuple[Journal, Staging, Reservations]:
    prepare(directory)
    staging = Staging(directory, worker)
    staging.prepare()

    def remove(names: list[str]) -> None:
        for name in names:
            staging.remove(name)

    journal = Journal(directory, remove, worker, clock)
    journal.inherit(Moment.of(clock))
    staging.sweep(journal.unknown_files, worker)
    try:
        return journal, staging, Reservations(directory / ARRIVING, worker, slots)
    except OSError as error:
        journal.close()
        raise BufferUnavailable(f"the write-back buffer {directory} cannot be used: {error}") from error
