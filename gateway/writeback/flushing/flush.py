"""One pending object on its way: carries out the instructions of upload_state.py, and writes down what comes of them.

What must survive a kill is in the journal before the origin hears of it (`sending`) or before anything builds on it (an
upload's id, a part's ETag). The journal decides whether the object is still pending: one that was overwritten before it
was `sending` is gone from there, and its flush ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.clock import Clock
from gateway.errors import BufferDamaged
from gateway.s3.headers import unquote
from gateway.writeback.flushing.asking import asking
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.upload_state import (
    Again,
    Begin,
    Begun,
    Delete,
    Event,
    Finish,
    Flush,
    Head,
    Instruction,
    Keep,
    PartSent,
    Refused,
    SendPart,
    Settle,
    StartOver,
    Wait,
)
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Part, PendingObject, State

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0


class Publication(Protocol):
    """Who must know of an object before it is pending no more."""

    async def publish(self, pending: PendingObject, etag: str | None) -> None:
        """The origin has it as this version (None: the key is deleted); its files are still there.

        Called at least once: a flush that is killed behind it is found to be done, and publishes again.
        """


class FlushObserver(Protocol):
    """What happens to pending objects, for metrics and logs."""

    def settled(self, pending: PendingObject) -> None:
        """The origin has it, and nothing is pending of it any more."""

    def failing(self, pending: PendingObject, failures: int, reason: str) -> None:
        """It failed, and is tried again."""

    def goes_on(self, pending: PendingObject) -> None:
        """The origin has taken something of it, after it had failed."""

    def conflict(self, pending: PendingObject) -> None:
        """Others have changed the key at the origin: kept, until somebody decides."""

    def damaged(self, pending: PendingObject, reason: str) -> None:
        """What lies here is not what was acknowledged: kept, and not sent."""


class Overtaken(Exception):
    """The object is pending no more: something that was acknowledged later took its place."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What every flush of a process shares."""

    journal: Journal
    requests: FlushRequests
    publication: Publication
    observer: FlushObserver


class OneFlush:
    """Runs once, for one object. `waits` while it has failed and does nothing; `on_wait` is told when that begins."""

    def __init__(self, tools: Tools, clock: Clock, dice: random.Random, on_wait: Callable[[], None]) -> None:
        self._journal = tools.journal
        self._requests = tools.requests
        self._publication = tools.publication
        self._observer = tools.observer
        self._clock = clock
        self._dice = dice
        self._on_wait = on_wait
        self.waits = False
        self._has_failed = False
        self._pause: asyncio.Future[None] | None = None
        self._events: asyncio.Queue[asyncio.Task[Event | None]] = asyncio.Queue()
        self._under_way: set[asyncio.Task[Event | None]] = set()

    async def run(self, sequence: int) -> None:
        """Until the origin has it, or it is a conflict, or it is overtaken. BufferDamaged, BufferUnavailable."""
        pending = self._journal.read(lambda book: book.object(sequence))
        if pending is None:
            return
        flush = Flush(pending)
        try:
            self._start(flush, flush.begin())
            while self._under_way:
                event = (await self._events.get()).result()
                if event is not None:
                    self._start(flush, flush.after(event))
        except Overtaken:
            return
        except BufferDamaged:
            if self._is_pending(sequence):  # otherwise its files went with it
                raise
        finally:
            await self._stop()

    def hurry(self) -> None:
        """Wait no more, but try again now."""
        if self._pause is not None:
            self._pause.cancel()

    def _is_pending(self, sequence: int) -> bool:
        return self._journal.read(lambda book: book.has_object(sequence))

    def _start(self, flush: Flush, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            task = asyncio.create_task(self._carry_out(flush.object, instruction))
            self._under_way.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Event | None]) -> None:
        self._under_way.discard(task)
        self._events.put_nowait(task)

    async def _stop(self) -> None:
        left = list(self._under_way)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _carry_out(self, pending: PendingObject, instruction: Instruction) -> Event | None:
        match instruction:
            case Head():
                return await self._requests.head(pending)
            case Begin():
                return await self._begin(pending)
            case SendPart():
                return await self._send_part(pending, instruction)
            case Finish():
                return await self._when_marked(pending, lambda: self._requests.finish(pending, instruction))
            case Delete():
                return await self._when_marked(pending, lambda: self._requests.delete(pending))
            case Wait():
                return await self._wait(pending, instruction)
            case StartOver():
                await self._journal.change(lambda book: book.start_over(pending))
            case Settle():
                await self._settle(pending, instruction)
            case Keep():
                await self._keep(pending)
        return None

    async def _begin(self, pending: PendingObject) -> Event:
        async with asking(self._journal, pending.key, self._clock) as upload:
            upload.sent()
            event = await self._requests.begin(pending)
            if isinstance(event, Refused):
                upload.refused()
            if isinstance(event, Begun):
                begun = replace(pending, origin_upload_id=event.origin_upload_id)
                if not await upload.note(lambda book: book.begun(begun)):
                    raise Overtaken
        return event

    async def _send_part(self, pending: PendingObject, instruction: SendPart) -> Event:
        event = await self._requests.send_part(pending, instruction)
        if isinstance(event, PartSent):
            part: Part = replace(instruction.part, origin_etag=event.etag)
            await self._journal.change(lambda book: book.piece_sent(pending.sequence, part))
            if self._has_failed:
                self._has_failed = False
                self._observer.goes_on(pending)
        return event

    async def _when_marked(self, pending: PendingObject, send: Callable[[], Awaitable[Event]]) -> Event:
        """From here on the origin may have it: it is settled before anything that was acknowledged later."""
        marked = replace(pending, state=State.SENDING)
        if not await self._journal.change(lambda book: book.change(marked)):
            raise Overtaken
        return await send()

    async def _wait(self, pending: PendingObject, instruction: Wait) -> Event:
        self._observer.failing(pending, instruction.failures, instruction.reason)
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(instruction.failures, 10))
        self.waits = self._has_failed = True
        self._on_wait()
        self._pause = asyncio.ensure_future(self._clock.sleep(longest * self._dice.uniform(0.5, 1.0)))
        try:
            await asyncio.wait({self._pause})
        finally:
            self._pause.cancel()
            self.waits = False
        if not self._is_pending(pending.sequence):
            raise Overtaken
        return Again()

    async def _settle(self, pending: PendingObject, instruction: Settle) -> None:
        await self._publication.publish(pending, instruction.etag)
        now = self._clock.now()
        await self._journal.change(lambda book: _settle(book, pending, instruction, now))
        self._observer.settled(pending)

    async def _keep(self, pending: PendingObject) -> None:
        if await self._journal.change(lambda book: book.change(pending)):
            self._observer.conflict(pending)


def _settle(book: Book, pending: PendingObject, instruction: Settle, now: float) -> None:
    book.settle(pending.sequence, instruction.etag, now)
    if instruction.etag is not None and unquote(instruction.etag) != unquote(pending.etag):
        book.forget_profile(pending.key.bucket)  # the next write goes through, and tells what its ETags are by now
    if instruction.upload_may_be_open and pending.origin_upload_id is not None:
        book.orphan(pending.key, pending.origin_upload_id)
