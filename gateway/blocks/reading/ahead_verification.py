"""Verifying what a reader comes to next while its client takes what it has: disk and network are busy at once.

The device is told of more than that, so that it has always something to fetch.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.residency import Residency
from gateway.blocks.files.store import BlockStore
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.layout import Extent

HINTED_AHEAD_BYTES = 4 * 1024 * 1024
"""How far behind what is being verified the device is told to fetch: at 2 GB/s, two milliseconds of work."""


@dataclass(slots=True)
class _Piece:
    position: int
    count: int
    verifying: asyncio.Task[None]


class AheadVerifier:
    """Verifies one block for one reader, piece by piece, at most one of them ahead. Event loop only."""

    def __init__(self, file: BlockLease, extent: Extent, residency: Residency, threads: DiskThreads) -> None:
        self._file = file
        self._extent = extent
        self._residency = residency
        self._threads = threads
        self._hinted = 0
        self._ahead: _Piece | None = None
        self.from_device = False
        """Whether any of the bytes were not in memory."""

    async def verify(self, position: int, count: int, wanted_after: int) -> None:
        """Have the bytes at a position of the block verified; `wanted_after` are asked for behind them.

        BlockDamaged when they are not what they were.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or (ahead.position, ahead.count) != (position, count):
            _let_be(ahead)
            ahead = self._begin(position, count, wanted_after)
        await ahead.verifying

    def go_on(self, position: int, count: int, wanted_after: int) -> None:
        """Begin with the piece that comes next, unless there is nothing to do for it."""
        if self._file.file.intact(self._extent, position, count):
            return
        self._ahead = self._begin(position, count, wanted_after)

    def stop(self) -> None:
        """Nobody wants to know any more."""
        ahead, self._ahead = self._ahead, None
        _let_be(ahead)

    def _begin(self, position: int, count: int, wanted_after: int) -> _Piece:
        hint = self._hint(position, count, wanted_after)
        work = self._threads.disk_holding(self._file, _verify_with_hint, self._extent, position, count, hint)
        return _Piece(position, count, asyncio.create_task(work))

    def _hint(self, position: int, count: int, wanted_after: int) -> tuple[int, int] | None:
        """Offset and length in the file of what the device is to be told of."""
        if self._residency.resident(self._file.descriptor, self._extent.offset + position, count):
            return None
        self.from_device = True
        first = max(position, self._hinted)
        self._hinted = position + count + min(wanted_after, HINTED_AHEAD_BYTES)
        return self._extent.offset + first, self._hinted - first


def hint_beginning(store: BlockStore, extent: Extent) -> None:
    """Tell the device that a block is about to be read from its beginning. Blocks."""
    file = store.open_published(extent)
    try:
        count = min(extent.length, HINTED_AHEAD_BYTES)
        os.posix_fadvise(file.descriptor, extent.offset, count, os.POSIX_FADV_WILLNEED)
    finally:
        file.close()


def _verify_with_hint(
    file: BlockLease, extent: Extent, position: int, count: int, hint: tuple[int, int] | None
) -> None:
    if hint is not None and hint[1] > 0:
        os.posix_fadvise(file.descriptor, *hint, os.POSIX_FADV_WILLNEED)
    file.file.verify(extent, position, count)


def _let_be(piece: _Piece | None) -> None:
    """What is found out by it is found out again by whoever reads the piece."""
    if piece is not None:
        piece.verifying.add_done_callback(lambda task: task.cancelled() or task.exception())
