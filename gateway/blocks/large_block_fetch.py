"""Fetching a large block: room first, then the origin's bytes into a partial file, then header, rename and index.

Where another process fetches the block, its file is read as it grows, every chunk verified before it counts. Nothing is
taken over from a process that is given up: the block is fetched anew, and its readers go on where they are.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from gateway.blocks import layout
from gateway.blocks.block_file import BlockLease, ChunkChecksums, read_verified
from gateway.blocks.directory import BlockDirectory, FillFile
from gateway.blocks.fetch_locks import AWAITED_LOOK_SECONDS, HOLDER_SECONDS_MAX, LockKey
from gateway.blocks.layout import CHECKSUM_BYTES, CHUNK_BYTES, Block, Extent
from gateway.blocks.origin_gets import PinnedGet, is_as_promised
from gateway.blocks.page_cache import PAGE_BYTES, Residency
from gateway.blocks.single_flight import BlockPublished, FetchDependencies, InflightFetch
from gateway.core.errors import BlockDamaged, ForebayError, StoreUnavailable
from gateway.core.model import ByteRange
from gateway.origin.client import Purpose
from gateway.origin.receive_buffer import Buffers, Receive, ReceiveBuffer, TakenBytes
from gateway.telemetry import metrics

FOLIO_BYTES_MAX = min(PAGE_BYTES // 8, 2048) * PAGE_BYTES
"""The largest unit in which the kernel keeps a file's pages: what one page of page table maps, 2 MiB of 4 KiB pages."""


@dataclass(slots=True)
class BlockWriter:
    """The writer of one block. `checksums` cover the bytes given to be written. `write` and `publish` block.

    The kernel counts a whole folio (of up to FOLIO_BYTES_MAX) as changed when one byte of it was written. So a folio
    that waits to be written to the device has the given bytes only from `unwritten_from` on: behind it no folio had
    been written to the device, and could come back from there, before more was written to it. Each write checks that
    before it, wherever it writes, and that nobody else has written since the last one: so a caller may ask whether
    bytes wait to be written, and then whether they lie behind it.

    It is a `ChunkTaker`: a chunk is neither recorded nor completed before it is as promised.
    """

    directory: BlockDirectory
    filled: FillFile
    checksums: ChunkChecksums = field(init=False)
    unwritten_from: int = 0
    written_bytes: int = 0
    promised: bytes | None = None
    is_damaged: bool = False
    residency: Residency = field(default_factory=Residency)
    _state: tuple[int, ...] = ()
    """State of the file behind the last write (`Residency.state`)."""

    def __post_init__(self) -> None:
        self.checksums = ChunkChecksums(self.filled.block.length)

    def write(self, file: BlockLease, content: bytes | memoryview) -> None:
        """Write the block's next bytes to a lease on the fill's file, and none behind its end.

        StoreUnavailable if the disk refuses them.
        """
        if self.is_damaged:
            return
        content = memoryview(content)[: self.filled.block.length - self.written_bytes]
        recorded = len(self.checksums.packed)
        self._look_back(file)
        self.checksums.update(content)
        if self.promised is not None and not is_as_promised(self.checksums.packed, self.promised):
            self.is_damaged = True
            self._drop_behind(recorded // CHECKSUM_BYTES)
            return
        self.directory.record_checksums(file, self.filled.block, self.checksums.packed, recorded)
        self.directory.store.write(file, content, self.filled.data_offset + self.written_bytes)
        self._state = self.residency.state(file.descriptor)
        self.written_bytes += len(content)

    def go_back(self) -> int:
        self._drop_behind(len(self.checksums.packed) // CHECKSUM_BYTES)
        self.is_damaged = False
        return self.written_bytes

    def _drop_behind(self, complete: int) -> None:
        """Keep so many chunks. What is written over bytes that may be on the device is verified when it is read."""
        self.written_bytes = self.checksums.go_back(complete)
        self.unwritten_from = self.filled.block.length

    def _look_back(self, file: BlockLease) -> None:
        """At who else has written, at what shares a folio with the header, and at what was written last."""
        if self._state and self.residency.state(file.descriptor) != self._state:
            self.unwritten_from = self.written_bytes
        offset, stop = self.filled.data_offset, self.filled.data_offset + self.written_bytes
        for begin, end in ((offset, min(FOLIO_BYTES_MAX, stop)), (stop - FOLIO_BYTES_MAX, stop)):
            first = max(begin, offset + self.unwritten_from)
            if first < end and not self.residency.unwritten(file.descriptor, first, end - first):
                self.unwritten_from = self.written_bytes

    def publish(self, file: BlockLease) -> bool:
        """Finish the file; whether it is used, and not another process's with the same block."""
        self._look_back(file)

        def note() -> None:
            file.file.was_written(self.filled.data_offset + self.unwritten_from, self.residency)

        return self.directory.finish(self.filled, file, bytes(self.checksums.packed), note) is not None


FOLLOWED_BYTES = 256 * 1024
"""Bytes of one write while readers wait for it: the trip to a disk thread costs as much as the writing."""

AHEAD_BYTES = 1024 * 1024
"""Bytes of one write without a waiting reader, and the most that one trip to a thread receives for one that waits."""

AHEAD_TRIP_BYTES = 4 * 1024 * 1024
"""The most that one trip receives without a waiting reader: each costs the event loop as much as it costs the thread. A
ceiling lets through what has come at once."""

VERIFIED_AT_ONCE_BYTES = 1024 * 1024

ABANDON_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True)
class LargeBlockFetcher:
    """Fetches large blocks, or follows who does: called in the task of each `InflightFetch`."""

    dependencies: FetchDependencies
    buffers: Buffers

    def fetch_inline(self, fetch: InflightFetch, on_end: Callable[[InflightFetch, bool], None]) -> bool:
        return False  # no response has brought all of it

    def move(self, fetch: InflightFetch) -> None:
        """Do nothing: its readers read its file from the beginning."""

    async def fetch(self, fetch: InflightFetch, lock: LockKey) -> None:
        started, directory = self.dependencies.clock.monotonic(), self.dependencies.directory
        wanted, copy = fetch.purpose is Purpose.WARM, self.dependencies.is_idle_copy(fetch.slot, fetch.headers)
        slot = self.dependencies.settings.slot_now(fetch.block.version.key)
        filled = await self.dependencies.threads.index_or_undo(
            self._undo, lambda: directory.begin(fetch.block, slot, wanted=wanted, copy=copy)
        )
        if filled is None:
            raise BlockPublished("another process has published the block")
        self.dependencies.locks.show_file(lock, layout.nonce_of(filled.reservation.file))
        writer = BlockWriter(directory, filled)
        try:
            await self._receive_all(fetch, writer)
        except BaseException as error:
            if isinstance(error, Exception) or fetch.is_abandoned:
                await self._abandon(filled)
            filled.file.close()
            raise
        fetch.persisted = asyncio.create_task(self._publish(fetch, writer, started), name="block publication")

    async def _receive_all(self, fetch: InflightFetch, writer: BlockWriter) -> None:
        block = fetch.block
        whole = ByteRange(block.offset, block.range.last)
        get = self.dependencies.pinned_get(block.version, whole, fetch.headers, fetch.purpose, fetch.slot)
        get.begin_with(fetch.response)
        try:
            await get.start()
            fetch.is_from_peer = get.is_from_peer
            fetch.begin()
            await self._receive(fetch, get, writer)
        finally:
            await get.aclose()

    async def _receive(self, fetch: InflightFetch, get: PinnedGet, writer: BlockWriter) -> None:
        """While a piece is written, no more is taken from the origin. The thread that receives a piece writes it."""
        threads, file = self.dependencies.threads, writer.filled.file

        def write_checked(file: BlockLease, content: memoryview) -> None:
            get.check(content)
            writer.write(file, content)

        def on_thread(receive: Receive) -> Awaitable[None]:
            return threads.disk_holding(file, lambda lease: receive(partial(write_checked, lease)))

        landing = ReceiveBuffer(AHEAD_BYTES, _worth_writing(fetch), on_thread, _trip_bytes(fetch), self.buffers)
        async with aclosing(get.pieces(landing, writer)) as pieces:
            async for piece in pieces:
                if not isinstance(piece, TakenBytes):
                    await threads.disk_holding(file, writer.write, piece)
                fetch.advance(file, writer.checksums, lambda: writer.unwritten_from)
                landing.give_back()  # not after a failure: a thread may still be writing it
                landing.enough_bytes, landing.trip_bytes = _worth_writing(fetch), _trip_bytes(fetch)

    async def _publish(self, fetch: InflightFetch, writer: BlockWriter, started: float) -> bool:
        clock = self.dependencies.clock
        try:
            await self.dependencies.threads.index_holding(writer.filled.file, self._publish_and_keep, writer)
        except ForebayError:
            await self._abandon(writer.filled)
            metrics.CACHE_FILLS.add(1, fetch.slot, "failed")
            return False
        finally:
            writer.filled.file.close()
        metrics.count_fills(fetch.slot, [clock.monotonic() - started], fetch.block.length)
        return True

    def _publish_and_keep(self, file: BlockLease, writer: BlockWriter) -> None:
        """Publish the file, and keep it open for the next reader; first keep it, as a published file may be evicted."""
        name, is_used = writer.filled.reservation.file, False
        self.dependencies.open_files.keep(name, file)
        try:
            is_used = writer.publish(file)
        finally:
            if not is_used:
                self.dependencies.open_files.drop(name)

    async def _abandon(self, filled: FillFile) -> None:
        """Remove the file; readers do not wait for that while another process keeps the index locked."""
        threads, directory = self.dependencies.threads, self.dependencies.directory
        removing = asyncio.ensure_future(threads.index_later(directory.discard, filled.reservation))
        removing.add_done_callback(self._abandoned)
        await asyncio.wait((removing,), timeout=ABANDON_SECONDS_MAX)

    def _abandoned(self, removing: asyncio.Future[None]) -> None:
        if not removing.cancelled() and removing.exception() is not None:
            # The room stays reserved until the slot is opened again: the file may still be there.
            metrics.CACHE_STORE_UNAVAILABLE.add(1)

    def _undo(self, filled: FillFile | None) -> None:
        if filled is not None:
            filled.file.close()
            self.dependencies.directory.discard(filled.reservation)

    # Following another process

    async def follow(self, fetch: InflightFetch, lock: LockKey, holder: int) -> bool:
        """Read the file that the lock's holder writes, as it grows, until it is complete or the lock is given back.

        Return False if the holder must be given up: it is dead, hangs, or has brought no bytes for HOLDER_SECONDS_MAX.
        Raises StoreUnavailable when the bytes differ from those written.
        """
        dependencies, locks = self.dependencies, self.dependencies.locks

        def is_shown() -> bool:
            return fetch.is_abandoned or locks.shown_file(lock, holder) != 0

        if not await locks.released(lock, holder, dependencies.watcher, is_shown, lambda: fetch.is_awaited):
            return False
        nonce = locks.shown_file(lock, holder)
        if not nonce or fetch.is_abandoned:
            return True
        name = layout.file_name(fetch.block.id, nonce.to_bytes(8, "big").hex())
        file = await dependencies.threads.open(dependencies.directory.store.open_of, holder, name)
        if file is None:  # it is published and evicted, abandoned, or removed by a user
            return False
        try:
            return await self._read_on(fetch, lock, holder, file)
        except BlockDamaged as error:
            raise StoreUnavailable(f"the bytes that another process fetches cannot be read back: {error}") from error
        finally:
            file.close()

    async def _read_on(self, fetch: InflightFetch, lock: LockKey, holder: int, file: BlockLease) -> bool:
        checksums = ChunkChecksums(fetch.block.length)
        deadline = time.monotonic() + HOLDER_SECONDS_MAX
        with self.dependencies.watcher.watch(file.descriptor, self.dependencies.locks.wake_file(holder)) as watch:
            while True:
                watch.clear()
                # Looked at first: what the holder had written when it gave the lock back is then all there.
                held = self.dependencies.locks.await_change(lock, holder, is_reader=fetch.is_awaited)
                before = checksums.complete_bytes
                await self.dependencies.threads.disk_holding(file, take_in, fetch.block, checksums)
                fetch.advance(file, checksums)
                if not held or fetch.is_abandoned or checksums.complete:
                    return True
                if checksums.complete_bytes > before:
                    deadline = time.monotonic() + HOLDER_SECONDS_MAX
                if not self.dependencies.locks.turns(holder) or time.monotonic() > deadline:
                    return False
                await watch.changed(AWAITED_LOOK_SECONDS)


def complete_bytes(file: BlockLease, block: Block) -> int:
    """Return the length of a growing file's complete chunks, by the file's size."""
    written = os.fstat(file.descriptor).st_size - layout.data_offset(block)
    if written >= block.length:
        return block.length
    return max(0, written // CHUNK_BYTES * CHUNK_BYTES)


def take_in(file: BlockLease, block: Block, checksums: ChunkChecksums) -> None:
    """Compare the complete chunks that `checksums` has not got yet with what their writer recorded, and take them in.

    BlockDamaged at the first that differs; those before it are in.
    """
    stop, beginning = complete_bytes(file, block), layout.beginning(block)
    size = len(beginning) + layout.chunk_count(stop) * CHECKSUM_BYTES
    header = os.pread(file.descriptor, size, layout.MAGIC_BYTES)
    if len(header) < size or not header.startswith(beginning):
        raise BlockDamaged("a fetch's file is shorter than it was, or another block's")
    packed = header[len(beginning) :]
    extent = Extent("", layout.data_offset(block), block.length, packed)
    while (position := checksums.complete_bytes) < stop:
        count = min(VERIFIED_AT_ONCE_BYTES, stop - position)
        read_verified(file.descriptor, extent, position, count)
        checksums.take(extent, position + count)


def _worth_writing(fetch: InflightFetch) -> int:
    if not fetch.users:
        return AHEAD_BYTES
    return FOLLOWED_BYTES if fetch.available else CHUNK_BYTES


def _trip_bytes(fetch: InflightFetch) -> int:
    return AHEAD_BYTES if fetch.users else AHEAD_TRIP_BYTES
