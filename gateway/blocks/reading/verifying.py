"""Blocks on disk are read and verified ahead of their readers, so that device, processor and network are busy at once.

Within a block piece by piece, the next one while the client takes the last (`PieceVerifier`). Behind it, once bytes
had to be verified, the blocks that the reader comes to next, in threads of their own (`BlocksAhead`): one, and more of
them as long as the reader has to wait. So a client that takes its time has little read for it, and the blocks that are
read ahead for all readers of a process together are bounded.

Bytes verified ahead stay in the page cache, and their open file remembers it: bytes read for one
reader are read for all. The reader that comes to them finds out any damage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.blocks.directory import DiskThreads
from gateway.blocks.files.block_file import BlockLease, OpenFiles
from gateway.blocks.files.store import BlockStore
from gateway.blocks.layout import Extent
from gateway.core.errors import BlockError

if TYPE_CHECKING:
    from gateway.blocks.reading.sources import ReadDependencies, ReadRequest

BLOCK_AHEAD_BYTES = 8 * 1024 * 1024
"""Bytes at the beginning of a block that are verified before a reader comes to it."""

READER_AHEAD_BYTES = 32 * 1024 * 1024
"""Most that is verified in further blocks for one reader: at 2 GB/s, 16 milliseconds of work."""

PROCESS_AHEAD_BYTES = 256 * 1024 * 1024
"""Limit for all readers of a process. Readers without room verify pieces when they come to them."""


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


@dataclass(slots=True)
class AheadRoom:
    """Bytes that may still be verified ahead for the readers of a process. Event loop only."""

    left_bytes: int = PROCESS_AHEAD_BYTES


class BlocksAhead:
    """Verifies the blocks behind the one that a reader is in. Event loop only; to be stopped at the end.

    Those in `fetched` it lets be: what this process has just written for the reader need not be verified.
    """

    def __init__(self, tools: ReadDependencies, request: ReadRequest, fetched: Set[bytes]) -> None:
        self._tools = tools
        self._request = request
        self._fetched = fetched
        self._pieces: dict[int, _Piece] = {}
        self._next = 0
        self._depth = 1
        self._depth_max = max(1, READER_AHEAD_BYTES // request.block_size_bytes)
        self.is_active = False
        """True once the reader has come to bytes that had to be verified."""

    def keep_on(self, stop: int) -> None:
        """The reader is in the block that ends at `stop`: keep the next ones on their way, as far as they are here.

        StoreUnavailable as the index raises it.
        """
        self.is_active = True
        first = stop // self._request.block_size_bytes
        self._next = max(self._next, first)
        while self._next < min(first + self._depth, self._request.numbers.stop) and self._begin(self._next):
            self._next += 1

    async def come_to(self, position: int) -> None:
        """The reader is about to open the block at a position: wait until what was begun with it is done."""
        piece = self._pieces.pop(position // self._request.block_size_bytes, None)
        if piece is None or piece.verifying is None:
            return
        self._tools.ahead_room.left_bytes += piece.count
        if not piece.verifying.done():  # the client is faster than the device
            self._depth = min(self._depth + 1, self._depth_max)
            await asyncio.wait((piece.verifying,))

    def stop(self) -> None:
        """The reader goes no further. Idempotent."""
        while self._pieces:
            piece = self._pieces.popitem()[1]
            self._tools.ahead_room.left_bytes += piece.count
            piece.let_be()

    def _begin(self, number: int) -> bool:
        tools, block = self._tools, self._request.block(number)
        if block.id in self._fetched:
            return True
        extent = tools.directory.index.lookup(block.id)
        if extent is None:
            return False
        wanted = self._request.part_in(block).length
        piece = _Piece(0, min(wanted, BLOCK_AHEAD_BYTES))
        if tools.ahead_room.left_bytes < piece.count:
            return False
        file = tools.open_files.get(extent.file)
        if file is None:
            store, open_files = tools.directory.store, tools.open_files
            work = tools.threads.disk(_open_and_verify, open_files, store, extent, piece, wanted == block.length)
        else:
            with file:
                if file.file.intact(extent, 0, piece.count):
                    return True
                work = tools.threads.disk_holding(file, _verify_quietly, extent, piece, wanted == block.length)
        piece.verifying = asyncio.create_task(work)
        tools.ahead_room.left_bytes -= piece.count
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
