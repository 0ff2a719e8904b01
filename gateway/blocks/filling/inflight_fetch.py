"""A block on its way to the disk, as the readers of this process see it. All state belongs to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeAlias

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.verification import ChunkChecksums
from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.blocks.layout import Block, Extent, data_offset
from gateway.errors import ForebayError
from gateway.origin.client import Purpose


class BlockPublished(ForebayError):
    """Another process has published the block meanwhile: it is in the index."""


class MovedToFile(Exception):
    """The block that was being read from memory lies in a file now: go on there. Whoever goes on holds the file."""

    def __init__(self, extent: Extent, file: BlockLease) -> None:
        super().__init__()
        self.extent = extent
        self.file = file


FetchKey: TypeAlias = tuple[bytes, frozenset[tuple[str, str]]]


def fetch_key(block: Block, headers: Mapping[str, str]) -> FetchKey:
    """What fetches that are shared have in common."""
    return block.id, frozenset(headers.items())


class InflightFetch:
    """One block that is fetched: `available` bytes from its start can be read.

    They lie in `content`, of a small block; else in `file`. Whoever got it from `SingleFlight` is a user of it until
    `leave`: the file stays open that long. What this process has written to it from `unwritten_from` on needs no
    verification as long as it waits to be written to the device (block_writer.py): ask that first, for it may be less
    any time.

    When all is here, a block still has to be published: then `persisted` is done, and `kept` says whether the disk took
    it. A small one may then `move` to its file, so that slow readers do not keep it in memory.
    """

    def __init__(
        self,
        block: Block,
        slot: str,
        headers: Mapping[str, str],
        purpose: Purpose,
        reader: object,
        response: UnpinnedResponse | None = None,
    ) -> None:
        self.block = block
        self.key = fetch_key(block, headers)
        self.slot = slot
        self.headers = headers
        self.purpose = purpose
        self.started_by = reader
        self.response = response
        self.available = 0
        self.content: memoryview | None = None
        self.persisted: asyncio.Future[bool] | None = None
        self.kept = True
        self.unwritten_from: Callable[[], int] = self._nothing
        self.moved_to: Extent | None = None
        self.on_abandoned: Callable[[], None] | None = None
        self._checksums = ChunkChecksums(block.length)
        self._files: list[BlockLease] = []
        self._begun = False
        self._failure: BaseException | None = None
        self._users = 0
        self._running = True
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def all_arrived(self) -> bool:
        """Every byte of the block is here, though the block may not be published yet."""
        return self.available == self.block.length

    @property
    def users(self) -> int:
        return self._users

    @property
    def file(self) -> BlockLease:
        """The growing file, once `begun` has returned, or the one that a small block has moved to."""
        return self._files[-1]

    @property
    def extent(self) -> Extent:
        """Where the available bytes lie, with the checksums of their chunks."""
        return Extent("", data_offset(self.block), self.block.length, bytes(self._checksums.packed))

    @property
    def is_abandoned(self) -> bool:
        """Nobody waits for it, and nobody is expected."""
        return self._users == 0 and self.purpose is Purpose.LIVE

    def _nothing(self) -> int:
        """From where on bytes need no verification where none do without."""
        return self.block.length

    # For readers.

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        self._close_if_unused()
        if self._users == 0 and self.on_abandoned is not None and self.is_abandoned:
            self.on_abandoned()

    async def begun(self) -> None:
        """Wait until the origin's answer has proved good; raises what made the fetch fail."""
        while not self._begun:
            await self._changed()

    async def beyond(self, position: int) -> int:
        """Wait until more than `position` bytes can be read; returns how many. Raises what made the fetch fail."""
        while self.available <= position:
            await self._changed()
        return self.available

    async def over(self) -> None:
        """Wait until it runs no more: its block is published, unless it failed."""
        while self._running:
            await self._next_change()

    def _changed(self) -> asyncio.Future[None]:
        """To be awaited: something changes. Raises what made the fetch fail."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._next_change()

    def _next_change(self) -> asyncio.Future[None]:
        """One for each who waits: who is cancelled while he waits takes his own along, and no other."""
        waiter = asyncio.get_running_loop().create_future()
        if len(self._waiters) > 2 * self._users:  # of readers that have left
            self._waiters = [one for one in self._waiters if not one.done()]
        self._waiters.append(waiter)
        return waiter

    # For the task that fetches.

    def begin(self) -> None:
        """The origin's answer is good."""
        self._begun = True
        self._notify()

    def advance(
        self, file: BlockLease, checksums: ChunkChecksums, unwritten_from: Callable[[], int] | None = None
    ) -> None:
        """So much is written to a file, with the checksums of its complete chunks; `unwritten_from` is of this file.

        A file that was begun anew first comes to where readers are. Files of before stay open: readers may be sending
        from them.
        """
        complete_bytes = checksums.complete_bytes
        if complete_bytes <= self.available:
            return
        if not self._files or self._files[-1].file is not file.file:
            self._files.append(file.share())
        self._checksums, self.unwritten_from = checksums, unwritten_from or self._nothing
        self.available, self._begun = complete_bytes, True
        self._notify()

    def give(self, content: memoryview, available: int) -> None:
        """So much of a small block is here."""
        self.content, self.available, self._begun = content, available, True
        self._notify()

    def move(self, file: BlockLease, extent: Extent) -> None:
        """The small block lies in a file: that is held for those who still read it, whatever becomes of the block."""
        self._files.append(file.share())
        self.moved_to, self.content = extent, None

    def end(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._running = False
        self._notify()
        self._close_if_unused()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _close_if_unused(self) -> None:
        if self._users == 0 and not self._running:
            self.content = None
            while self._files:
                self._files.pop().close()
