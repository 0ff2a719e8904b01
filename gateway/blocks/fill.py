"""Filling one block: room first, then the origin's bytes into a partial file, then header, rename and index.

Where another process leads the fill, its bytes are followed; where that process is killed, they are taken over, and
only what is missing is asked of the origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gateway.blocks.coalescing import Fill, FillUnneeded
from gateway.blocks.directory import BlockDirectory, FillFile
from gateway.blocks.following import Follower
from gateway.blocks.layout import CHUNK_BYTES, Extent
from gateway.blocks.observer import CacheObserver
from gateway.blocks.open_file import OpenFile
from gateway.blocks.pinned_get import PinnedGet
from gateway.blocks.shared_fills import OwnFill, fill_key, lead_or_find
from gateway.blocks.threads import DiskThreads
from gateway.blocks.verification import ChunkChecksums, read_verified
from gateway.clock import Clock
from gateway.errors import BlockDamaged, ForebayError, NotKept, StoreUnavailable
from gateway.objects import ByteRange
from gateway.origin.client import Origin, Purpose

GATHERED_BYTES = 256 * 1024
"""What one trip to a disk thread writes; while it is written, no more is taken from the origin."""

GATHERED_AHEAD_BYTES = 1024 * 1024
"""The same while nobody waits for the bytes: a trip costs as much as writing 256 KiB."""

GATHERING_SECONDS_MAX = 0.1
"""A slow origin's bytes are not kept from their readers longer than this once the next ones come."""


@dataclass(frozen=True, slots=True)
class BlockFiller:
    """Does the work of a `Fill`: called once for each, in the fill's own task."""

    directory: BlockDirectory
    origin: Origin
    threads: DiskThreads
    follower: Follower
    clock: Clock
    observer: CacheObserver
    retries: int

    async def __call__(self, fill: Fill) -> None:
        """FillUnneeded when another process has published the block meanwhile, NotKept when it is not to be kept; else
        what made the fill fail."""
        started = self.clock.monotonic()
        try:
            led = await self._follow_or_lead(fill)
        except (FillUnneeded, NotKept):
            raise
        except ForebayError:
            self.observer.fill_failed(fill.slot)
            raise
        if led:
            self.observer.fill_finished(fill.slot, self.clock.monotonic() - started, fill.block.length)

    async def _follow_or_lead(self, fill: Fill) -> bool:
        """Whether this process was the one to publish the block."""
        key, given_up = fill_key(fill.block, fill.headers), None
        wanted = fill.purpose is Purpose.WARM
        while True:
            arguments = self.directory, fill.block, fill.slot, key, given_up, wanted
            found = await self.threads.index(lead_or_find, *arguments)
            if isinstance(found, OwnFill):
                await self._lead(fill, found)
                return True
            if found is None:
                if fill.all_arrived:
                    return False
                raise FillUnneeded("another process has filled the block")
            if fill.purpose is Purpose.READAHEAD and not fill.users:
                found.file.release()  # it is on its way, and nobody here waits for it yet
                return False
            if given_up is None:
                self.observer.coalesced(fill.slot)
            given_up = found.holder
            if await self.follower.follow(fill, found) or fill.forsaken:
                return False

    async def _lead(self, fill: Fill, own: OwnFill) -> None:
        own.evicted.tell(self.observer)
        filled, checksums = own.filled, ChunkChecksums(fill.block.length)
        try:
            await self._inherit(fill, filled, checksums)
            fill.attach(filled.file, checksums)
            if not checksums.complete:
                await self._fetch(fill, filled, checksums)
            await self._publish(filled, checksums)
        except Exception:
            await self._abandon(filled)
            raise
        finally:
            filled.file.release()

    async def _inherit(self, fill: Fill, filled: FillFile, checksums: ChunkChecksums) -> None:
        """Take over what a dead leader had written as far as this fill has verified it."""
        if fill.available:
            arguments = fill.file, fill.extent, fill.available, filled, checksums
            await self.threads.disk_holding(fill.file, self._copy_now, *arguments)

    def _copy_now(
        self, source: OpenFile, extent: Extent, count: int, filled: FillFile, checksums: ChunkChecksums
    ) -> None:
        try:
            for position in range(0, count, GATHERED_BYTES):
                size = min(GATHERED_BYTES, count - position)
                content = read_verified(source.descriptor, extent, position, size)
                self._write_now(filled, checksums, [content], filled.data_offset + position)
        except BlockDamaged as error:
            raise StoreUnavailable(f"what a dead process has filled does not come back: {error}") from error

    async def _fetch(self, fill: Fill, filled: FillFile, checksums: ChunkChecksums) -> None:
        """What is missing, from the origin."""
        block = fill.block
        missing = ByteRange(block.offset + checksums.complete_bytes, block.range.last)
        get = PinnedGet(
            self.origin, block.version, missing, fill.headers, fill.purpose, fill.slot, self.clock, self.retries
        )
        get.begin_with(fill.answer)
        try:
            await get.start()
            fill.begin()
            await self._receive(fill, get, filled, checksums)
        finally:
            await get.aclose()

    async def _receive(self, fill: Fill, get: PinnedGet, filled: FillFile, checksums: ChunkChecksums) -> None:
        gathered, size_bytes, since = list[bytes](), 0, self.clock.monotonic()
        offset = filled.data_offset + checksums.complete_bytes
        async with aclosing(get.pieces()) as pieces:
            async for piece in pieces:
                gathered.append(piece)
                size_bytes += len(piece)
                enough = size_bytes >= _worth_writing(fill)
                if not enough and self.clock.monotonic() - since < GATHERING_SECONDS_MAX:
                    continue
                await self._write(fill, filled, checksums, gathered, offset)
                offset += size_bytes
                gathered, size_bytes, since = [], 0, self.clock.monotonic()
        if gathered:
            await self._write(fill, filled, checksums, gathered, offset)

    async def _write(
        self, fill: Fill, filled: FillFile, checksums: ChunkChecksums, pieces: Sequence[bytes], offset: int
    ) -> None:
        await self.threads.disk_holding(filled.file, self._write_now, filled, checksums, pieces, offset)
        fill.advance()

    def _write_now(
        self, filled: FillFile, checksums: ChunkChecksums, pieces: Sequence[bytes | memoryview], offset: int
    ) -> None:
        recorded = len(checksums.packed)
        for piece in pieces:
            checksums.update(piece)
        self.directory.record_checksums(filled, checksums.packed, recorded)
        for piece in pieces:
            self.directory.store.write(filled.file, piece, offset)
            offset += len(piece)

    async def _publish(self, filled: FillFile, checksums: ChunkChecksums) -> None:
        """Nothing of the block counts as verified then: nobody has looked whether the file holds what was written."""
        await self.threads.index(self.directory.finish, filled, bytes(checksums.packed))

    async def _abandon(self, filled: FillFile) -> None:
        try:
            await self.threads.index(self.directory.abandon, filled)
        except StoreUnavailable:  # the room stays reserved until the slot is opened again: the file may still be there
            self.observer.store_unavailable()


def _worth_writing(fill: Fill) -> int:
    if not fill.users:
        return GATHERED_AHEAD_BYTES
    return GATHERED_BYTES if fill.available else CHUNK_BYTES
