"""One block on its way, as its readers and the task that fetches it see it. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gateway.blocks.block_file import BlockLease, ChunkChecksums, OpenFiles
from gateway.blocks.directory import BlockDirectory, DiskThreads
from gateway.blocks.disk_health import CircuitBreaker
from gateway.blocks.fetch_locks import FetchLocks, FileWatcher
from gateway.blocks.layout import Block, BlockSettings, Extent, data_offset
from gateway.blocks.origin_gets import PinnedGet, UnpinnedResponse
from gateway.core.clock import Clock
from gateway.core.errors import ForebayError, OriginBusy
from gateway.core.model import ByteRange, ObjectVersion
from gateway.origin.client import ACCOUNT, Origin, Purpose


class BlockPublished(ForebayError):
    """Another process has published the block meanwhile: it is in the index."""


class MovedToFile(Exception):
    """The block that was being read from memory lies in a file now: go on there. The catcher then holds the file."""

    def __init__(self, extent: Extent, file: BlockLease) -> None:
        super().__init__()
        self.extent = extent
        self.file = file


@dataclass(frozen=True, slots=True)
class FetchDependencies:
    """The parts of a cache that its fetches work with."""

    settings: BlockSettings
    directory: BlockDirectory
    locks: FetchLocks
    origin: Origin
    threads: DiskThreads
    watcher: FileWatcher
    open_files: OpenFiles
    isolation: CircuitBreaker
    clock: Clock

    def pinned_get(
        self, version: ObjectVersion, byte_range: ByteRange, headers: Mapping[str, str], purpose: Purpose, slot: str
    ) -> PinnedGet:
        return PinnedGet(
            self.origin, version, byte_range, headers, purpose, slot, self.clock, self.settings.fill_retries
        )


FetchKey: TypeAlias = tuple[bytes, frozenset[tuple[str, str]]]


def fetch_key(block: Block, headers: Mapping[str, str]) -> FetchKey:
    return block.id, frozenset(headers.items())


class InflightFetch:
    """One block that is fetched: `available` bytes from its start can be read.

    They lie in `content`, of a small block; else in `file`. A reader that got it from `SingleFlight` is a user of it
    until `leave`: the file stays open that long. Bytes that this process has written to it from `unwritten_from` on
    need no verification while they wait to be written to the device (large_block_fetch.py): check that first, for they
    may be fewer any time.

    A complete block still has to be published: then `persisted` is done, and `kept` is True if the disk took
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
        self.account = ACCOUNT.get()
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
        self._readers = 0
        self._is_awaited_elsewhere: Callable[[], bool] = _by_nobody
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
        """The place of the available bytes, with the checksums of their chunks."""
        return Extent("", data_offset(self.block), self.block.length, bytes(self._checksums.packed))

    @property
    def is_abandoned(self) -> bool:
        if self._users or self.purpose is Purpose.READAHEAD:
            return False
        return self.purpose is Purpose.LIVE or not (self.all_arrived or self.is_awaited)

    @property
    def is_awaited(self) -> bool:
        """A reader waits for it now, here or in another process, whatever it was begun for."""
        return self._readers > 0 or self._is_awaited_elsewhere()

    def _nothing(self) -> int:
        """From where on bytes need no verification where none do without."""
        return self.block.length

    # For readers.

    def was_denied_another(self, error: OriginBusy) -> bool:
        """Return True if it failed for lack of another account's connections; the caller's account may have some."""
        return error is self._failure and self.account != ACCOUNT.get()

    def enter(self, purpose: Purpose = Purpose.LIVE) -> None:
        """Count a user with this `purpose`; the user names it again on leaving."""
        self._users += 1
        self._readers += purpose is Purpose.LIVE

    def leave(self, purpose: Purpose = Purpose.LIVE) -> None:
        self._users -= 1
        self._readers -= purpose is Purpose.LIVE
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
        """Return a future of the caller's own: a cancelled caller cancels no other."""
        waiter = asyncio.get_running_loop().create_future()
        if len(self._waiters) > 2 * self._users:  # drop those of readers that have left
            self._waiters = [one for one in self._waiters if not one.done()]
        self._waiters.append(waiter)
        return waiter

    # For the task that fetches.

    def leads(self, is_awaited_elsewhere: Callable[[], bool]) -> None:
        """Note that this process fetches for all; the argument tells whether a reader in another one waits."""
        self._is_awaited_elsewhere = is_awaited_elsewhere

    def begin(self) -> None:
        """Note that the origin's answer is good."""
        self._begun = True
        self._notify()

    def advance(
        self, file: BlockLease, checksums: ChunkChecksums, unwritten_from: Callable[[], int] | None = None
    ) -> None:
        """Announce the bytes written to a file, with the checksums of its complete chunks.

        `unwritten_from` is of this file. A file that was begun anew must first reach the readers' position. Earlier
        files stay open: readers may be sending from them.
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
        self.content, self.available, self._begun = content, available, True
        self._notify()

    def move(self, file: BlockLease, extent: Extent) -> None:
        """Note the small block's file, and hold it for those who still read it, whatever becomes of the block."""
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


def _by_nobody() -> bool:
    return False
