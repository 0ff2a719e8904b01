"""Filling one block: room first, then the origin's bytes into a partial file, then header, rename and index."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from gateway.blocks.coalescing import Fill
from gateway.blocks.directory import BlockDirectory, FillFile
from gateway.blocks.layout import CHUNK_BYTES
from gateway.blocks.observer import CacheObserver
from gateway.blocks.pinned_get import PinnedGet
from gateway.blocks.threads import DiskThreads
from gateway.blocks.verification import ChunkChecksums, VerifiedMemory, fingerprint
from gateway.clock import Clock
from gateway.errors import ForebayError, StoreUnavailable
from gateway.origin.client import Origin

GATHERED_BYTES = 256 * 1024
"""What one trip to a disk thread writes; while it is written, no more is taken from the origin."""

GATHERING_SECONDS_MAX = 0.1
"""A slow origin's bytes are not kept from their readers longer than this once the next ones come."""


@dataclass(frozen=True, slots=True)
class BlockFiller:
    """Does the work of a `Fill`: called once for each, in the fill's own task."""

    directory: BlockDirectory
    origin: Origin
    threads: DiskThreads
    verified: VerifiedMemory
    clock: Clock
    observer: CacheObserver
    retries: int

    async def __call__(self, fill: Fill) -> None:
        started = self.clock.monotonic()
        try:
            await self._fill(fill)
        except ForebayError:
            self.observer.fill_failed()
            raise
        self.observer.fill_finished(self.clock.monotonic() - started, fill.block.length)

    async def _fill(self, fill: Fill) -> None:
        filled, evicted = await self.threads.index(self.directory.begin, fill.block)
        if evicted.blocks:
            self.observer.evicted(evicted.blocks, evicted.size_bytes)
        checksums = fill.attach(filled)
        get = PinnedGet(
            self.origin, fill.block.version, fill.block.range, fill.headers, fill.purpose, self.clock, self.retries
        )
        try:
            await get.start()
            fill.begin()
            await self._receive(fill, get, filled, checksums)
            await self._publish(fill, filled, checksums)
        except Exception:
            await self._abandon(filled)
            raise
        finally:
            await get.aclose()

    async def _receive(self, fill: Fill, get: PinnedGet, filled: FillFile, checksums: ChunkChecksums) -> None:
        gathered, offset, since = bytearray(), filled.data_offset, self.clock.monotonic()
        async with aclosing(get.pieces()) as pieces:
            async for piece in pieces:
                gathered += piece
                enough = GATHERED_BYTES if fill.available else CHUNK_BYTES
                if len(gathered) < enough and self.clock.monotonic() - since < GATHERING_SECONDS_MAX:
                    continue
                await self._write(fill, filled, checksums, gathered, offset)
                offset += len(gathered)
                gathered, since = bytearray(), self.clock.monotonic()
        await self._write(fill, filled, checksums, gathered, offset)

    async def _write(
        self, fill: Fill, filled: FillFile, checksums: ChunkChecksums, content: bytearray, offset: int
    ) -> None:
        if content:
            await self.threads.disk_holding(filled.file, self._write_now, filled, checksums, content, offset)
            fill.advance()

    def _write_now(self, filled: FillFile, checksums: ChunkChecksums, content: bytearray, offset: int) -> None:
        self.directory.store.write(filled.file, content, offset)
        checksums.update(content)

    async def _publish(self, fill: Fill, filled: FillFile, checksums: ChunkChecksums) -> None:
        extent = await self.threads.index(self.directory.finish, filled, bytes(checksums.packed))
        if extent is not None:
            self.verified.of(fill.block.id, fingerprint(filled.file.descriptor)).add(0, fill.block.length)

    async def _abandon(self, filled: FillFile) -> None:
        try:
            await self.threads.index(self.directory.abandon, filled)
        except StoreUnavailable:  # the room stays reserved until the slot is opened again: the file may still be there
            self.observer.store_unavailable()
