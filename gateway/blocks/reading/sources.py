"""Where a reader's next bytes come from: a block on disk, a fill in progress, or the origin itself.

A source gives one piece at a time, never empty. A piece that is a `FileSpan` is good until the next call or `close`.
"""

from __future__ import annotations

from typing import Protocol

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.residency import Residency
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.files.verification import Verified, read_verified
from gateway.blocks.filling.coalescing import Fill, FillLanded
from gateway.blocks.filling.pinned_get import PinnedGet
from gateway.blocks.layout import Block, Extent
from gateway.blocks.reading.ahead_verification import AheadVerifier
from gateway.objects import BodyPiece, FileSpan, LentBytes

READ_BYTES = 1024 * 1024
"""What a thread reads and verifies in one go: the memory that one reader may hold."""


class Source(Protocol):
    cached: bool
    """Whether the bytes count as hits."""

    stop: int
    """The first byte of the object behind those that it has."""

    async def read(self, first: int, stop: int) -> BodyPiece:
        """Bytes of the object from `first` on, one at least, none at or behind `stop`."""

    async def close(self) -> None: ...


class BlockSource:
    """A complete block. BlockDamaged when its bytes are not what they were.

    Bytes that must be read to be verified are then given as they lie in the file, too: what a slow client has not taken
    yet waits there and not in this process's memory. Unless they leave memory at once, or the file system cannot tell.
    """

    def __init__(
        self,
        block: Block,
        extent: Extent,
        file: BlockLease,
        verified: Verified,
        residency: Residency,
        threads: DiskThreads,
        *,
        cached: bool,
    ) -> None:
        self.cached = cached
        self.stop = block.offset + block.length
        self.block = block
        self.extent = extent
        self._file = file
        self._verified = verified
        self._residency = residency
        self._threads = threads
        self._pieces = AheadVerifier(file, extent, verified, residency, threads)
        self._spans = True

    def span(self, first: int, stop: int) -> FileSpan | None:
        """Bytes of the object `first` to `stop` as they lie, if all of them are verified and in memory."""
        return self._span(first - self.block.offset, stop - first)

    async def read(self, first: int, stop: int) -> BodyPiece:
        span = self.span(first, stop)
        if span is not None:
            return span
        position, count = first - self.block.offset, stop - first
        piece = min(count, READ_BYTES - position % READ_BYTES)
        return self._span(position, piece) or await self._read(position, piece, count - piece)

    def take_file(self) -> BlockLease:
        """The block's file, for the caller to release: this source is over."""
        return self._file

    @property
    def from_device(self) -> bool:
        """Whether any of its bytes were not in memory."""
        return self._pieces.from_device

    async def close(self) -> None:
        self._pieces.stop()
        self._file.close()

    def _span(self, position: int, count: int) -> FileSpan | None:
        """The bytes as they lie, if all of them are verified and in memory."""
        offset = self.extent.offset + position
        if not self._verified.covers(position, count):
            return None
        if self._residency.resident(self._file.descriptor, offset, count):
            return FileSpan(self._file.descriptor, offset, count)
        return None

    async def _read(self, position: int, count: int, wanted_after: int) -> BodyPiece:
        if self._spans:
            await self._pieces.verify(position, count, wanted_after)
            span = self._span(position, count)
            if span is not None:
                if wanted_after:
                    next_count = min(wanted_after, READ_BYTES)
                    self._pieces.go_on(position + count, next_count, wanted_after - next_count)
                return span
            self._spans = False
        return await self._threads.disk_holding(self._file, _read_verified, self.extent, position, count)


class FillSource:
    """A block that is being filled: its bytes as they arrive. Raises what makes the fill fail, and FillLanded.

    One that another reader began, and whose bytes have all arrived, counts as cached.
    """

    def __init__(self, fill: Fill, residency: Residency, threads: DiskThreads, *, reader: object) -> None:
        self.cached = fill.all_arrived and fill.started_by is not reader
        self.stop = fill.block.offset + fill.block.length
        self.block = fill.block
        self._fill = fill
        self._residency = residency
        self._threads = threads

    async def read(self, first: int, stop: int) -> BodyPiece:
        fill = self._fill
        position = first - fill.block.offset
        available = await fill.beyond(position)
        count = min(stop - fill.block.offset, available) - position
        if fill.content is not None:
            return LentBytes(fill.content[position : position + count])
        if fill.moved_to is not None:
            raise FillLanded(fill.moved_to, fill.file)
        offset = fill.extent.offset + position
        if self._residency.resident(fill.file.descriptor, offset, count):
            return FileSpan(fill.file.descriptor, offset, count)
        return await self._read(position, min(count, READ_BYTES - position % READ_BYTES))

    async def close(self) -> None:
        self._fill.leave()

    async def _read(self, position: int, count: int) -> memoryview:
        file, extent = self._fill.file, self._fill.extent
        return await self._threads.disk_holding(file, _read_verified, extent, position, count)


class OriginSource:
    """The rest of the range, straight from the origin."""

    cached = False

    def __init__(self, get: PinnedGet) -> None:
        self.stop = get.range.stop
        self._get = get
        self._pieces = get.pieces()

    async def read(self, first: int, stop: int) -> bytes | memoryview:
        while True:
            piece = await anext(self._pieces)
            if piece:
                return piece

    async def close(self) -> None:
        await self._pieces.aclose()
        await self._get.aclose()


def _read_verified(file: BlockLease, extent: Extent, position: int, count: int) -> memoryview:
    return read_verified(file.descriptor, extent, position, count)
