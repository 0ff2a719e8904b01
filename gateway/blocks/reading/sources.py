"""Where a reader's next bytes come from: a block on disk, a fill in progress, or the origin itself.

A source gives one piece at a time, never empty. A piece that is a `FileSpan` is good until the next call or `close`.
"""

from __future__ import annotations

from typing import Protocol

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.residency import Residency
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.files.verification import read_verified
from gateway.blocks.filling.coalescing import Fill, FillLanded
from gateway.blocks.filling.pinned_get import PinnedGet
from gateway.blocks.layout import Block, Extent
from gateway.blocks.reading.ahead_verification import AheadVerifier
from gateway.objects import BodyPiece, FileSpan, LentBytes

READ_BYTES = 1024 * 1024
"""What a thread reads and verifies in one go: the memory that one reader may hold."""


RESTORED_BYTES = 256 * 1024
"""What a slow client keeps in memory where the bytes of its file do not stay there."""


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
        self._threads = threads
        self._pieces = AheadVerifier(file, extent, residency, threads)
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

    def distrust(self) -> None:
        """Bytes of the file could not be sent, or were not what they were."""
        self._file.file.distrust()

    @property
    def from_device(self) -> bool:
        """Whether any of its bytes were not in memory."""
        return self._pieces.from_device

    async def close(self) -> None:
        self._pieces.stop()
        self._file.close()

    def _span(self, position: int, count: int) -> FileSpan | None:
        """The bytes as they lie, if all of them are verified and in memory."""
        if not self._file.file.intact(self.extent, position, count):
            return None
        return FileSpan(self._file.descriptor, self.extent.offset + position, count, self)

    # As `objects.SpanFile`.

    def intact(self, offset: int, count: int) -> bool:
        return self._file.file.intact(self.extent, offset - self.extent.offset, count)

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return await restored(self._threads, self._file, self.extent, offset, count)

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
        if position >= fill.unwritten_from():
            file, offset = _GrowingFile(fill, self._residency, self._threads), fill.extent.offset + position
            if file.intact(offset, count):
                return FileSpan(fill.file.descriptor, offset, count, file)
        return await self._read(position, min(count, READ_BYTES - position % READ_BYTES))

    async def close(self) -> None:
        self._fill.leave()

    async def _read(self, position: int, count: int) -> memoryview:
        file, extent = self._fill.file, self._fill.extent
        return await self._threads.disk_holding(file, _read_verified, extent, position, count)


class _GrowingFile:
    """The file of a fill as `objects.SpanFile`: bytes that wait to be written to the device are those that came."""

    __slots__ = ("_extent", "_file", "_residency", "_threads", "_unwritten_from")

    def __init__(self, fill: Fill, residency: Residency, threads: DiskThreads) -> None:
        self._file = fill.file  # the fill's own lease: its files stay open as long as it has readers
        self._extent = fill.extent
        self._unwritten_from = fill.unwritten_from
        self._residency = residency
        self._threads = threads

    def intact(self, offset: int, count: int) -> bool:
        waits = self._residency.unwritten(self._file.descriptor, offset, count)
        return waits and offset - self._extent.offset >= self._unwritten_from()

    async def restore(self, offset: int, count: int) -> memoryview:
        position = offset - self._extent.offset
        count = min(count, RESTORED_BYTES)
        return await self._threads.disk_holding(self._file, _read_verified, self._extent, position, count)


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


async def restored(
    threads: DiskThreads, file: BlockLease, extent: Extent, offset: int, count: int
) -> memoryview | None:
    """`objects.SpanFile.restore` for bytes of a block."""
    return await threads.disk_holding(file, _restored, extent, offset - extent.offset, count)


def _restored(file: BlockLease, extent: Extent, position: int, count: int) -> memoryview | None:
    file.file.verify(extent, position, count)
    if file.file.intact(extent, position, count):
        return None
    return read_verified(file.descriptor, extent, position, min(count, RESTORED_BYTES))


def _read_verified(file: BlockLease, extent: Extent, position: int, count: int) -> memoryview:
    return read_verified(file.descriptor, extent, position, count)
