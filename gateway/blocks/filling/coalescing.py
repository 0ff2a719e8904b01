"""One fill per missing block, however many readers wait for it.

A fill is a task of its own: readers come and go, the fill goes on to the end of its block, because what has been
asked of the origin is paid for. A fill that still waits for its turn when its last reader leaves is not begun. Readers
that send other headers to the origin never share a fill: the origin may answer them differently.

Seen from here, a fill that another process leads is a fill like any other: its bytes come from the other's file.

All state belongs to the event loop; nothing here awaits between looking and acting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.verification import ChunkChecksums
from gateway.blocks.filling.first_answer import FirstAnswer
from gateway.blocks.layout import Block, Extent, data_offset
from gateway.errors import ForebayError, StoreUnavailable
from gateway.origin.client import Purpose


class FillUnneeded(ForebayError):
    """Another process has published the block meanwhile: it is in the index."""


class FillLanded(Exception):
    """The block that was being read from memory lies in a file now: go on there. Whoever goes on holds the file."""

    def __init__(self, extent: Extent, file: BlockLease) -> None:
        super().__init__()
        self.extent = extent
        self.file = file


FillKey: TypeAlias = tuple[bytes, frozenset[tuple[str, str]]]


class Fill:
    """A block on its way to the disk, as its readers see it: `available` bytes from its start can be read.

    They lie in `content`, of a small block; else in `file`. Whoever got it from `Fills` is a user of it until `leave`:
    the file stays open that long. What this process has written to it from `unwritten_from` on needs no verification as
    long as it waits to be written to the device (fill_writer.py): ask that first, for it may be less any time.

    A small block still goes to disk when all is here: when `landed` is done; `kept` says whether the disk took it. Then
    it may `move` to its file, so that slow readers do not keep it in memory.
    """

    def __init__(
        self,
        block: Block,
        slot: str,
        headers: Mapping[str, str],
        purpose: Purpose,
        reader: object,
        answer: FirstAnswer | None = None,
    ) -> None:
        self.block = block
        self.key: FillKey = (block.id, frozenset(headers.items()))
        self.slot = slot
        self.headers = headers
        self.purpose = purpose
        self.started_by = reader
        self.answer = answer
        self.available = 0
        self.content: memoryview | None = None
        self.landed: asyncio.Future[bool] | None = None
        self.kept = True
        self.unwritten_from: Callable[[], int] = lambda: self.block.length
        self.moved_to: Extent | None = None
        self._checksums = ChunkChecksums(block.length)
        self._files: list[BlockLease] = []
        self._begun = False
        self._failure: BaseException | None = None
        self._users = 0
        self._running = True
        self._changed = asyncio.Event()

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
    def forsaken(self) -> bool:
        """Nobody waits for it, and nobody is expected."""
        return self._users == 0 and self.purpose is Purpose.LIVE

    # For readers.

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        self._close_if_unused()

    async def begun(self) -> None:
        """Wait until the origin's answer has proved good; raises what made the fill fail."""
        await self._wait(lambda: self._begun)

    async def beyond(self, position: int) -> int:
        """Wait until more than `position` bytes can be read; returns how many. Raises what made the fill fail."""
        await self._wait(lambda: self.available > position)
        return self.available

    async def _wait(self, satisfied: Callable[[], bool]) -> None:
        while not satisfied():
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            await self._changed.wait()

    async def over(self) -> None:
        """Wait until it runs no more: its block is published, unless it failed."""
        while self._running:
            await self._changed.wait()

    # For the task that fills.

    def attach(self, file: BlockLease, checksums: ChunkChecksums) -> None:
        """Have readers read from a file, whose complete chunks `checksums` tells as it grows.

        It must hold every byte that is available already. Files attached before stay open: readers may be sending
        from them.
        """
        if not self._files or self._files[-1].file is not file.file:
            self._files.append(file.share())
        self._checksums = checksums

    def begin(self) -> None:
        """The origin's answer is good."""
        self._begun = True
        self._notify()

    def advance(self) -> None:
        """More chunks are written and their checksums final."""
        self.available = self._checksums.complete_bytes
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
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _close_if_unused(self) -> None:
        if self._users == 0 and not self._running:
            self.content = None
            while self._files:
                self._files.pop().close()


class Fills:
    """The fills of this process: at most `fills_max` run, the others wait their turn in order.

    `at_once` is given a fill first: True when nothing was left to wait for but the disk, which is `landed` then.
    """

    def __init__(
        self,
        work: Callable[[Fill], Awaitable[None]],
        fills_max: int,
        at_once: Callable[[Fill], bool] = lambda _: False,
    ) -> None:
        self._work = work
        self._at_once = at_once
        self._landing: set[asyncio.Future[bool]] = set()
        self._turns = asyncio.Semaphore(fills_max)
        self._ahead_max = fills_max * 2 // 3
        self._ahead = 0
        self._fills: dict[FillKey, Fill] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, block: Block, headers: Mapping[str, str]) -> Fill | None:
        """The running fill of a block, entered, or None."""
        fill = self._fills.get((block.id, frozenset(headers.items())))
        if fill is not None:
            fill.enter()
        return fill

    def has(self, block: Block, headers: Mapping[str, str]) -> bool:
        """Whether this process fills a block, or follows who does."""
        return (block.id, frozenset(headers.items())) in self._fills

    def all_arrived(self, block: Block, headers: Mapping[str, str]) -> bool:
        """Whether the block is being published: its fill has every byte."""
        fill = self._fills.get((block.id, frozenset(headers.items())))
        return fill is not None and fill.all_arrived

    def start(
        self,
        block: Block,
        slot: str,
        headers: Mapping[str, str],
        reader: object,
        purpose: Purpose = Purpose.LIVE,
        answer: FirstAnswer | None = None,
    ) -> Fill:
        """A new fill that a reader waits for, entered; only when `join` found none."""
        fill = Fill(block, slot, headers, purpose, reader, answer)
        fill.enter()
        if answer is not None:
            answer.look.hold()
        self._start(fill)
        return fill

    def start_at_once(
        self, block: Block, slot: str, headers: Mapping[str, str], answer: FirstAnswer
    ) -> memoryview | None:
        """A new fill that has all it needs, for nobody to wait for; its content. None where it is no such one."""
        fill = Fill(block, slot, headers, Purpose.LIVE, None, answer)
        if fill.key in self._fills:
            return None
        answer.look.hold()
        self._fills[fill.key] = fill
        if not self._is_done_at_once(fill):
            del self._fills[fill.key]
            answer.look.let_go()
        return fill.content

    def start_ahead(self, block: Block, slot: str, headers: Mapping[str, str], reader: object) -> bool:
        """Begin a block that a reader will come to; False when others need the room more."""
        fill = Fill(block, slot, headers, Purpose.READAHEAD, reader)
        if fill.key in self._fills:
            return True
        if self._ahead >= self._ahead_max or self._turns.locked():
            return False
        self._ahead += 1
        self._start(fill)
        return True

    async def settle(self) -> None:
        """Wait for the fills that are running or waiting now."""
        await asyncio.gather(*self._tasks, *self._landing, return_exceptions=True)

    async def close(self) -> None:
        """Cancel every fill and wait for its task. What has arrived still goes to disk."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, fill: Fill) -> None:
        self._fills[fill.key] = fill
        if self._is_done_at_once(fill):
            return
        task = asyncio.create_task(self._run(fill), name="block fill")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, fill: Fill) -> None:
        failure: BaseException | None = StoreUnavailable("the block cache is closing")
        try:
            await self._take_turn(fill)
            if fill.landed is not None:
                fill.kept = await fill.landed
            failure = None
        except ForebayError as error:
            failure = error
        except Exception as error:
            failure = error
            raise
        finally:
            self._end(fill, failure)

    def _is_done_at_once(self, fill: Fill) -> bool:
        if not self._at_once(fill):
            return False
        assert fill.landed is not None  # noqa: S101 - that it has said
        self._landing.add(fill.landed)
        fill.landed.add_done_callback(partial(self._landed, fill))
        return True

    def _landed(self, fill: Fill, landed: asyncio.Future[bool]) -> None:
        self._landing.discard(landed)
        fill.kept = not landed.cancelled() and landed.result()
        self._end(fill, None)

    def _end(self, fill: Fill, failure: BaseException | None) -> None:
        del self._fills[fill.key]
        fill.end(failure)
        if fill.answer is not None:
            fill.answer.look.let_go()

    async def _take_turn(self, fill: Fill) -> None:
        try:
            async with self._turns:
                if not fill.forsaken:
                    await self._work(fill)
        finally:
            self._ahead -= fill.purpose is Purpose.READAHEAD
