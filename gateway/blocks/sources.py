"""Sources of a reader's next bytes: a block on disk, a fetch in progress, or the origin itself.

A source gives one piece at a time, never empty. A piece that is a `FileSpan` is good until the next call or `close`.

Blocks on disk are read and verified ahead of their readers, so that device, processor and network are busy at once.
Within a block piece by piece, the next one while the client takes the last (`PieceVerifier`). Behind it, once bytes
had to be verified, the blocks that the reader comes to next, in threads of their own (`BlocksAhead`): one, and more of
them as long as the reader has to wait. So a client that takes its time has little read for it, and the blocks that are
read ahead for all readers of a process together are bounded.

Bytes verified ahead stay in the page cache, and their open file remembers it: bytes read for one
reader are read for all. The reader that comes to them finds out any damage.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.blocks.block_file import BlockLease, OpenFiles, read_verified
from gateway.blocks.disk_threads import DiskThreads
from gateway.blocks.inflight_fetch import InflightFetch, MovedToFile
from gateway.blocks.layout import Block, Extent
from gateway.blocks.origin_gets import PinnedGet
from gateway.blocks.page_cache import Residency
from gateway.blocks.plan import ReadPlan
from gateway.blocks.store import BlockStore
from gateway.core.errors import BlockError
from gateway.core.model import BodyPiece, BorrowedBuffer, FileSpan
from gateway.origin.client import Purpose

READ_BYTES = 1024 * 1024
"""Bytes that a thread reads for one reader to hold in memory; also the first piece for which a reader waits."""

PIECE_BYTES_MAX = 8 * 1024 * 1024
"""Limit to which the pieces of a block grow for one reader: work for each piece is rare then."""


RESTORED_BYTES = 256 * 1024
"""Bytes kept in memory for a slow client when those of its file do not stay there."""


BLOCK_AHEAD_BYTES = 8 * 1024 * 1024
"""Bytes at the beginning of a block that are verified before a reader comes to it."""

READER_AHEAD_BYTES = 32 * 1024 * 1024
"""Most that is verified in further blocks for one reader: at 2 GB/s, 16 milliseconds of work."""


@dataclass(eq=False, slots=True)
class _Piece:
    position: int
    count: int
    is_wanted: bool = True
    verifying: asyncio.Task[Any] | None = None

    def has_reader(self) -> bool:
        return self.is_wanted

    def let_be(self) -> None:
        """Let the piece go on without a reader; the next reader finds its result again."""
        self.is_wanted = False
        if self.verifying is not None:
            self.verifying.add_done_callback(lambda task: task.cancelled() or task.exception())


class PieceVerifier:
    """Verifies one block for one reader, piece by piece, at most one of them ahead. Event loop only.

    `reads_on` says of a piece whether all that follows it in the block is wanted, too.
    """

    def __init__(self, file: BlockLease, extent: Extent, threads: DiskThreads) -> None:
        self._file = file
        self._extent = extent
        self._threads = threads
        self._ahead: _Piece | None = None
        self.has_worked = False
        """True if any of the bytes had to be verified."""

    async def verify(self, position: int, count: int, *, reads_on: bool) -> None:
        """Verify the bytes at a position of the block; raise BlockDamaged when they have changed."""
        piece = self._taken(position, count) or self._begin(position, count, reads_on)
        assert piece.verifying is not None  # noqa: S101 - `_begin` has set it
        await piece.verifying

    def resume(self, position: int, count: int, *, reads_on: bool) -> None:
        """Begin with the piece that comes next, unless there is nothing to do for it."""
        if self._file.file.intact(self._extent, position, count):
            return
        self._ahead = self._taken(position, count) or self._begin(position, count, reads_on)

    def stop(self) -> None:
        self._taken(-1, 0)

    def _taken(self, position: int, count: int) -> _Piece | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.position, ahead.count) != (position, count):
            ahead.let_be()
            return None
        return ahead

    def _begin(self, position: int, count: int, reads_on: bool) -> _Piece:
        self.has_worked = True
        piece = _Piece(position, count)
        work = self._threads.disk_holding(self._file, _verify, self._extent, piece, reads_on)
        piece.verifying = asyncio.create_task(work)
        return piece


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
        """Return the bytes as they lie, if all of them are verified and in memory."""
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
        """Return the next wanted piece of the block, up to byte `stop` of it, and begin the one behind it."""
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
                self._pieces.resume(end, count, reads_on=reads_on)
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


class BlocksAhead:
    """Verifies the blocks behind the one that a reader is in. Event loop only; to be stopped at the end.

    Those that were fetched for the reader it lets be: what this process has just written need not be verified.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._dependencies = plan.dependencies
        self._plan = plan
        self._pieces: dict[int, _Piece] = {}
        self._next = 0
        self._depth = 1
        self._depth_max = max(1, READER_AHEAD_BYTES // plan.block_size_bytes)
        self.is_active = False
        """True once the reader has come to bytes that had to be verified."""

    def keep_on(self, stop: int) -> None:
        """Keep blocks behind the one ending at `stop` on their way if they are here. Raises StoreUnavailable."""
        self.is_active = True
        first = stop // self._plan.block_size_bytes
        self._next = max(self._next, first)
        while self._next < min(first + self._depth, self._plan.numbers.stop) and self._begin(self._next):
            self._next += 1

    async def come_to(self, position: int) -> None:
        """Wait until what was begun with the block at a position is done: the reader is about to open it."""
        piece = self._pieces.pop(position // self._plan.block_size_bytes, None)
        if piece is None or piece.verifying is None:
            return
        self._dependencies.ahead_room.left_bytes += piece.count
        if not piece.verifying.done():  # the client is faster than the device
            self._depth = min(self._depth + 1, self._depth_max)
            await asyncio.wait((piece.verifying,))

    def stop(self) -> None:
        """End, as the reader goes no further. Idempotent."""
        while self._pieces:
            piece = self._pieces.popitem()[1]
            self._dependencies.ahead_room.left_bytes += piece.count
            piece.let_be()

    def _begin(self, number: int) -> bool:
        dependencies, block = self._dependencies, self._plan.block(number)
        if block.id in self._plan.fetched:
            return True
        extent = dependencies.directory.index.lookup(block.id)
        if extent is None:
            return False
        wanted = self._plan.part_in(block).length
        piece = _Piece(0, min(wanted, BLOCK_AHEAD_BYTES))
        if dependencies.ahead_room.left_bytes < piece.count:
            return False
        file = dependencies.open_files.get(extent.file)
        if file is None:
            store, open_files = dependencies.directory.store, dependencies.open_files
            work = dependencies.threads.disk(_open_and_verify, open_files, store, extent, piece, wanted == block.length)
        else:
            with file:
                if file.file.intact(extent, 0, piece.count):
                    return True
                work = dependencies.threads.disk_holding(file, _verify_quietly, extent, piece, wanted == block.length)
        piece.verifying = asyncio.create_task(work)
        dependencies.ahead_room.left_bytes -= piece.count
        self._pieces[number] = piece
        return True


def _open_and_verify(open_files: OpenFiles, store: BlockStore, extent: Extent, piece: _Piece, reads_on: bool) -> None:
    if piece.is_wanted:
        with suppress(BlockError), open_files.opened(extent, store.open_published) as file:
            _verify(file, extent, piece, reads_on)


def _verify_quietly(file: BlockLease, extent: Extent, piece: _Piece, reads_on: bool) -> None:
    with suppress(BlockError):  # its reader finds it out
        _verify(file, extent, piece, reads_on)


def _verify(file: BlockLease, extent: Extent, piece: _Piece, reads_on: bool) -> None:
    file.file.verify_unread(extent, piece.position, piece.count, reads_on=reads_on, is_wanted=piece.has_reader)
