"""Takes what is pending to the origin, as long as it takes: one flush per key at a time, several keys side by side.

Only one process of a gateway flushes. Slots wait for nobody but themselves: each has its own number of flushes at once,
so that a bucket that refuses everything keeps no other from its bandwidth. Nothing is given up: what fails is tried
again for ever, and told to the observer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from gateway.clock import Clock
from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.objects import ObjectKey
from gateway.policy.prefixes import Prefix
from gateway.writeback.book import Book
from gateway.writeback.flush import OneFlush, Tools
from gateway.writeback.records import PendingObject

FLUSHES_PER_SLOT = 8
"""At work at once."""

WAITING_PER_SLOT = 64
"""That have failed and wait for their next try: they are in nobody's way, up to this number."""

LOOK_SECONDS = 0.25
"""What nobody told us of is found so soon."""

_PAGE = 32


class _SlotFlushes:
    """What is on its way in one slot, by key."""

    def __init__(self) -> None:
        self._flushes: dict[ObjectKey, OneFlush] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._flushes

    def has_room(self) -> bool:
        """Whether another one may begin."""
        waiting = sum(flush.waits for flush in self._flushes.values())
        at_work = len(self._flushes) - waiting
        return at_work < FLUSHES_PER_SLOT and waiting < WAITING_PER_SLOT

    def hurry(self, prefix: Prefix) -> None:
        """Have what waits under a prefix be tried now."""
        for key, flush in self._flushes.items():
            if prefix.covers(key.bucket, key.key):
                flush.hurry()

    def begin(self, key: ObjectKey, flush: OneFlush) -> None:
        self._flushes[key] = flush

    def end(self, key: ObjectKey) -> None:
        del self._flushes[key]


class Flusher:
    """Of one buffer. `wake` when something has become pending."""

    def __init__(self, tools: Tools, clock: Clock) -> None:
        self._tools = tools
        self._clock = clock
        self._slots: dict[str, _SlotFlushes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._aside: set[int] = set()
        self._news = asyncio.Event()

    def wake(self) -> None:
        self._news.set()

    def hurry(self, prefix: Prefix) -> None:
        """Try now what waits under a prefix because it has failed."""
        for slot in self._slots.values():
            slot.hurry(prefix)
        self.wake()

    async def run(self) -> None:
        """For ever. A journal that cannot be used now is asked again."""
        try:
            while True:
                self._news.clear()
                with suppress(BufferUnavailable):  # whoever writes to it learns of it
                    await self._abort_orphans()
                    self._start_flushes()
                await self._some_news()
        finally:
            await self._stop()

    def _start_flushes(self) -> None:
        for name in self._tools.journal.read(lambda book: book.slots()):
            slot = self._slots.setdefault(name, _SlotFlushes())
            after = 0
            while slot.has_room() and (page := self._page(name, after)):
                for pending in page:
                    if slot.has_room() and self._may_start(slot, pending):
                        self._start(slot, pending)
                after = page[-1].sequence

    def _page(self, slot: str, after: int) -> Sequence[PendingObject]:
        return self._tools.journal.read(lambda book: book.startable(slot, after, _PAGE))

    def _may_start(self, slot: _SlotFlushes, pending: PendingObject) -> bool:
        """Whether it is the first of its key, and not on its way."""
        if pending.key in slot or pending.sequence in self._aside:
            return False
        first = self._tools.journal.read(lambda book: book.earliest(pending.key))
        return first is not None and first.sequence == pending.sequence

    def _start(self, slot: _SlotFlushes, pending: PendingObject) -> None:
        flush = OneFlush(self._tools, self._clock, random.Random(), self.wake)
        slot.begin(pending.key, flush)
        task = asyncio.create_task(self._flush(slot, pending, flush))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self, slot: _SlotFlushes, pending: PendingObject, flush: OneFlush) -> None:
        try:
            await flush.run(pending.sequence)
        except BufferDamaged as error:
            self._aside.add(pending.sequence)
            self._tools.observer.damaged(pending, str(error))
        except Exception as error:  # noqa: BLE001 - it is told, and tried again: nothing may stop a flush for good
            self._tools.observer.failing(pending, 1, repr(error))
            await self._clock.sleep(LOOK_SECONDS)
        finally:
            slot.end(pending.key)
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
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
