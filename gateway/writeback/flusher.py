"""Takes what is pending to the origin, as long as it takes: one flush per key at a time, several keys side by side.

Only one process of a gateway flushes. Slots wait for nobody but themselves: each has its own number of flushes at once,
so that a bucket that refuses everything keeps no other from its bandwidth. Nothing is given up: what fails is tried
again for ever, and told to the observer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import partial

from gateway.clock import Clock
from gateway.errors import BufferDamaged
from gateway.objects import ObjectKey
from gateway.writeback.book import Book
from gateway.writeback.flush import OneFlush, Tools
from gateway.writeback.records import PendingObject

FLUSHES_PER_SLOT = 8

LOOK_SECONDS = 0.25
"""What nobody told us of is found so soon."""

_PAGE = 32


class Flusher:
    """Of one buffer. `wake` when something has become pending."""

    def __init__(self, tools: Tools, clock: Clock) -> None:
        self._tools = tools
        self._clock = clock
        self._running: dict[str, dict[ObjectKey, asyncio.Task[None]]] = {}
        self._aside: set[int] = set()
        self._news = asyncio.Event()

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                self._news.clear()
                await self._abort_orphans()
                self._start_flushes()
                await self._some_news()
        finally:
            await self._stop()

    def _start_flushes(self) -> None:
        for slot in self._tools.journal.read(lambda book: book.slots()):
            running = self._running.setdefault(slot, {})
            after = 0
            while len(running) < FLUSHES_PER_SLOT and (page := self._page(slot, after)):
                for pending in page:
                    if len(running) < FLUSHES_PER_SLOT and self._may_start(running, pending):
                        running[pending.key] = asyncio.create_task(self._flush(running, pending))
                after = page[-1].sequence

    def _page(self, slot: str, after: int) -> Sequence[PendingObject]:
        return self._tools.journal.read(lambda book: book.startable(slot, after, _PAGE))

    def _may_start(self, running: Mapping[ObjectKey, object], pending: PendingObject) -> bool:
        """Whether it is the first of its key, and not on its way."""
        if pending.key in running or pending.sequence in self._aside:
            return False
        first = self._tools.journal.read(lambda book: book.earliest(pending.key))
        return first is not None and first.sequence == pending.sequence

    async def _flush(self, running: dict[ObjectKey, asyncio.Task[None]], pending: PendingObject) -> None:
        try:
            await OneFlush(self._tools, self._clock, random.Random()).run(pending.sequence)
        except BufferDamaged as error:
            self._aside.add(pending.sequence)
            self._tools.observer.damaged(pending, str(error))
        except Exception as error:  # noqa: BLE001 - it is told, and tried again: nothing may stop a flush for good
            self._tools.observer.failing(pending, 1, repr(error))
            await self._clock.sleep(LOOK_SECONDS)
        finally:
            del running[pending.key]
            self.wake()

    async def _abort_orphans(self) -> None:
        """What nobody will complete; the first that cannot be aborted now ends it for this time."""
        for orphan in self._tools.journal.read(lambda book: book.orphans(_PAGE)):
            if not await self._tools.requests.abort(orphan.key, orphan.origin_upload_id):
                return
            await self._tools.journal.change(partial(Book.forget_orphan, origin_upload_id=orphan.origin_upload_id))

    async def _some_news(self) -> None:
        looking = asyncio.ensure_future(self._clock.sleep(LOOK_SECONDS))
        telling = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({looking, telling}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            looking.cancel()
            telling.cancel()

    async def _stop(self) -> None:
        running = [task for flushes in self._running.values() for task in flushes.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
