"""Small objects on their way to disk: gathered in memory, written many at once.

Their readers have been served by then: nobody waits for the disk. What lies in memory is bounded, from the first byte
that comes of a block until it is written: beyond that, fetching goes no faster than the disk takes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.blocks.files.segments import SmallBlock
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.filling.segment_appender import Appended, SegmentAppender
from gateway.clock import Clock
from gateway.counting import CacheMetrics
from gateway.errors import NotKept, StoreUnavailable

GATHERING_SECONDS = 0.01
"""How long the first of a batch waits for others; a process that waits for the object waits as long."""

BATCH_BYTES = 4 * 1024 * 1024
BATCH_BLOCKS = 256
"""One transaction of about a millisecond."""

_LOOK_SECONDS = 0.5

HELD_BYTES_MAX = 32 * 1024 * 1024
"""Of small blocks in memory, all that one process has: what comes in 30 ms at 1 GB/s, and is written meanwhile."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A small block to be kept on a slot's account; `persisted` says in the end whether it is.

    `wanted` is of records.Reservation.
    """

    small: SmallBlock
    slot: str
    wanted: bool
    started: float
    persisted: asyncio.Future[bool]


class GroupCommitWriter:
    """What one process writes of small objects. Event loop only."""

    def __init__(
        self,
        appender: SegmentAppender,
        threads: DiskThreads,
        clock: Clock,
        observer: CacheMetrics,
        held_bytes_max: int = HELD_BYTES_MAX,
    ) -> None:
        self._appender = appender
        self._threads = threads
        self._clock = clock
        self._observer = observer
        self._held_bytes_max = held_bytes_max
        self._waiting: deque[Waiting] = deque()
        self._eased = asyncio.Event()
        self._pumping: asyncio.Task[None] | None = None
        self.held_bytes = 0

    def has_room(self, count: int) -> bool:
        """Whether memory has room for a block of so many bytes."""
        return not self.held_bytes or self.held_bytes + count <= self._held_bytes_max

    async def take_room(self, count: int) -> None:
        """Wait for room in memory for a block of so many bytes, and take it; `put` or `give_back` must follow.

        StoreUnavailable when another process keeps the index from being written.
        """
        while not self.has_room(count):
            if self._threads.stalled():
                raise StoreUnavailable("memory is full of blocks that another process keeps from being written")
            self._eased.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._eased.wait()
        self.hold(count)

    def hold(self, count: int) -> None:
        """Take the room without waiting for it."""
        self.held_bytes += count

    def give_back(self, count: int) -> None:
        """The block does not come, or needs no room any more."""
        self.held_bytes -= count
        self._eased.set()

    def put(self, small: SmallBlock, slot: str, started: float, *, wanted: bool = False) -> asyncio.Future[bool]:
        """Have a block written, in good time, for which room was taken; that is given back when it has persisted."""
        waiting = Waiting(small, slot, wanted, started, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._pumping is None:
            self._pumping = asyncio.create_task(self._pump(), name="small object writer")
        return waiting.persisted

    async def drain(self) -> None:
        """Wait until nothing waits."""
        while self._pumping is not None:
            await asyncio.shield(self._pumping)

    async def _pump(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(
                    GATHERING_SECONDS
                )  # not of the clock: no promise hangs on it, tests need not wind it
                await self._write_all(self._take_batches())
        finally:
            self._pumping = None

    async def _write_all(self, batches: deque[list[Waiting]]) -> None:
        try:
            while batches:
                await self._write(batches.popleft())
        except BaseException:
            for batch in (*batches, *self._take_batches()):
                self._not_kept(batch)
            raise

    def _take_batches(self) -> deque[list[Waiting]]:
        """All that waits now, in batches that are kept alike."""
        batches: deque[list[Waiting]] = deque()
        open_batches: dict[tuple[str, bool], list[Waiting]] = {}
        sizes: dict[tuple[str, bool], int] = {}
        while self._waiting:
            waiting = self._waiting.popleft()
            alike = waiting.slot, waiting.wanted
            batch = open_batches.get(alike)
            if batch is None or sizes[alike] > BATCH_BYTES or len(batch) == BATCH_BLOCKS:
                batch = open_batches[alike] = []
                sizes[alike] = 0
                batches.append(batch)
            batch.append(waiting)
            sizes[alike] += waiting.small.block.length
        return batches

    async def _write(self, batch: list[Waiting]) -> None:
        while batch:
            blocks = [waiting.small for waiting in batch]
            try:
                appended = await self._threads.index_later(
                    self._appender.append, batch[0].slot, blocks, batch[0].wanted
                )
            except StoreUnavailable as error:
                self._not_kept(batch, error.reason if isinstance(error, NotKept) else "disk")
                return
            except BaseException:
                self._not_kept(batch)
                raise
            self._kept(batch[: appended.blocks], appended)
            batch = batch[appended.blocks :]

    def _kept(self, batch: Sequence[Waiting], appended: Appended) -> None:
        appended.evicted.tell(self._observer)
        now = self._clock.monotonic()
        for waiting in batch:
            self._observer.fill_finished(waiting.slot, now - waiting.started, waiting.small.block.length)
        self._settle(batch, kept=True)

    def _not_kept(self, batch: Sequence[Waiting], reason: str = "disk") -> None:
        for waiting in batch:
            self._observer.fill_failed(waiting.slot)
        self._observer.not_kept(batch[0].slot, reason, len(batch))
        self._settle(batch, kept=False)

    def _settle(self, batch: Sequence[Waiting], *, kept: bool) -> None:
        for waiting in batch:
            self.give_back(waiting.small.block.length)
            if not waiting.persisted.done():
                waiting.persisted.set_result(kept)
