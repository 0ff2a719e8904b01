"""Sources of a reader's next bytes: a block on disk, a fetch in progress, or the origin itself.

A source gives one piece at a time, never empty. A piece that is a `FileSpan` is good until the next call or `close`.

A block on disk is verified piece by piece, the next piece while the client takes what it has (verifying.py).
"""

from __future__ import annotations

from typing import Protocol

from gateway.blocks.directory import DiskThreads
from gateway.blocks.files.block_file import BlockLease, read_verified
from gateway.blocks.files.page_cache import Residency
from gateway.blocks.filling.inflight_fetch import InflightFetch, MovedToFile
from gateway.blocks.filling.origin_gets import PinnedGet
from gateway.blocks.layout import Block, Extent
from gateway.blocks.reading.verifying import PieceVerifier
from gateway.core.model import BodyPiece, BorrowedBuffer, FileSpan
from gateway.origin.client import Purpose

READ_BYTES = 1024 * 1024
"""Bytes that a thread reads for one reader to hold in memory; also the first piece for which a reader waits."""

PIECE_BYTES_MAX = 8 * 1024 * 1024
"""Limit to which the pieces of a block grow for one reader: work for each piece is rare then."""


RESTORED_BYTES = 256 * 1024
"""Bytes kept in memory for a slow client when those of its file do not stay there."""


class Source(Protocol):
    cached: bool
    """True if the bytes count as hits."""

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
        self.file = file
        self._residency = residency
        self._threads = threads
        self._pieces = PieceVerifier(file, extent, threads)
        self._spans = True
        self._begun_at: int | None = None

    def span(self, first: int, stop: int) -> FileSpan | None:
        """Bytes of the object `first` to `stop` as they lie, if all of them are verified and in memory."""
        return self._span(first - self.block.offset, stop - first)

    async def read(self, first: int, stop: int) -> BodyPiece:
        span = self.span(first, stop)
        if span is not None:
            return span
        position, last = first - self.block.offset, stop - self.block.offset
        if not self._spans:
            piece = min(last, (position // READ_BYTES + 1) * READ_BYTES) - position
            return await self._threads.disk_holding(self.file, _read_verified, self.extent, position, piece)
        return await self._piece(position, last)

    @property
    def was_verified(self) -> bool:
        """True if any of its bytes had to be verified for this reader."""
        return self._pieces.has_worked

    async def close(self) -> None:
        self._pieces.stop()
        self.file.close()

    def _span(self, position: int, count: int) -> FileSpan | None:
        """The bytes as they lie, if all of them are verified and in memory."""
        offset = self.extent.offset + position
        return FileSpan(self.file.descriptor, offset, count, self) if self.intact(offset, count) else None

    # As `objects.SpanFile`.

    def intact(self, offset: int, count: int) -> bool:
        """Return True if bytes can be sent: those fetched for this reader as written, others after a check."""
        file = self.file.file
        if not self.cached and file.unwritten(self._residency, offset, count):
            return True
        return file.intact(self.extent, offset - self.extent.offset, count)

    stayed = intact

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return await restored(self._threads, self.file, self.extent, offset, count)

    async def _piece(self, position: int, stop: int) -> BodyPiece:
        """The next piece of what is wanted of the block, up to byte `stop` of it; the one behind it is begun."""
        reads_on, end = stop == self.extent.length, self._piece_end(position, stop)
        span = self._span(position, end - position)
        if span is None:
            await self._pieces.verify(position, end - position, reads_on=reads_on)
            span = self._span(position, end - position)
        if span is None:
            self._spans = False
            return await self.read(self.block.offset + position, self.block.offset + stop)
        if end < stop:
            count = self._piece_end(end, stop) - end
            if not self.intact(self.extent.offset + end, count):
                self._pieces.go_on(end, count, reads_on=reads_on)
        return span

    def _piece_end(self, position: int, stop: int) -> int:
        """Return a piece's end: a piece is as long as the reader's earlier part of the block."""
        if self._begun_at is None:
            self._begun_at = position
        size = min(max(READ_BYTES, position - self._begun_at), PIECE_BYTES_MAX)
        return min(stop, (position + size) // READ_BYTES * READ_BYTES)


class FillSource:
    """A block that is being filled: its bytes as they arrive. Raises what makes the fill fail, and MovedToFile.

    One that another reader began, and whose bytes have all inline_response, counts as cached.
    """

    def __init__(
        self,
        fill: InflightFetch,
        residency: Residency,
        threads: DiskThreads,
        *,
        reader: object,
        purpose: Purpose = Purpose.LIVE,
    ) -> None:
        self.cached = fill.all_arrived and fill.started_by is not reader
        self.stop = fill.block.offset + fill.block.length
        self.block = fill.block
        self.fill = fill
        self._purpose = purpose
        self._residency = residency
        self._threads = threads

    async def read(self, first: int, stop: int) -> BodyPiece:
        fill = self.fill
        position = first - fill.block.offset
        available = await fill.beyond(position)
        count = min(stop - fill.block.offset, available) - position
        if fill.content is not None:
            return BorrowedBuffer(fill.content[position : position + count])
        if fill.moved_to is not None:
            raise MovedToFile(fill.moved_to, fill.file)
        if position >= fill.unwritten_from():
            file, offset = _GrowingFile(fill, self._residency, self._threads), fill.extent.offset + position
            if file.intact(offset, count):
                return FileSpan(fill.file.descriptor, offset, count, file)
        count = min(count, READ_BYTES - position % READ_BYTES)
        return await self._threads.disk_holding(fill.file, _read_verified, fill.extent, position, count)

    async def close(self) -> None:
        self.fill.leave(self._purpose)


class _GrowingFile:
    """The file of a fill as `objects.SpanFile`: bytes that wait to be written to the device are those that came."""

    __slots__ = ("_extent", "_file", "_residency", "_threads", "_unwritten_from")

    def __init__(self, fill: InflightFetch, residency: Residency, threads: DiskThreads) -> None:
        self._file = fill.file  # the fill's own lease: its files stay open as long as it has readers
        self._extent = fill.extent
        self._unwritten_from = fill.unwritten_from
        self._residency = residency
        self._threads = threads

    def intact(self, offset: int, count: int) -> bool:
        waits = self._residency.unwritten(self._file.descriptor, offset, count)
        return waits and offset - self._extent.offset >= self._unwritten_from()

    stayed = intact

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
    file.file.verify_unread(extent, position, count, reads_on=False)
    if file.file.intact(extent, position, count):
        return None
    return read_verified(file.descriptor, extent, position, min(count, RESTORED_BYTES))


def _read_verified(file: BlockLease, extent: Extent, position: int, count: int) -> memoryview:
    return read_verified(file.descriptor, extent, position, count)
