"""Takes what is pending to the origin, as long as it takes: one flush per key at a time, several keys side by side.

Only one process of a gateway flushes. Slots wait for nobody but themselves: each has its own number of flushes at once,
so that a bucket that refuses everything keeps no other from its bandwidth. What somebody waits for goes first. Nothing
is given up: what fails is tried again for ever, and told to the observer.

The journal is read from where the last look ended; what was passed by there (it is behind another of its key) is looked
for when that other is done. So a look costs what it starts, however much is pending; and a row that is damaged stops
nothing but itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from gateway.clock import Clock
from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.objects import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.flushing.damaged_rows import DamagedRows
from gateway.writeback.flushing.flush import OneFlush, Tools
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.records import Base, Fixed, Orphan, PendingObject, Waiting
from gateway.writeback.news import Awaited
from gateway.writeback.presence import News
from gateway.writeback.tidying import Tidying

FLUSHES_PER_SLOT = 8
"""At work at once."""

URGENT_PER_SLOT = 8
"""As many more, of what somebody waits for."""

WAITING_PER_SLOT = 64
"""That have failed and wait for their next try: they are in nobody's way, up to this number."""

AGAIN_SECONDS = 5.0
"""So often all is looked through from the beginning, for what nobody tells of."""

READ_AT_ONCE = 256
"""Pending objects that a look reads of a slot: more is left to the next one, so that nothing else waits for long."""

_PAGE = 8
_FAILED_PAUSE_SECONDS = 0.25
_ORPHANS_PAUSE_SECONDS = 5.0


class _SlotFlushes:
    """What is on its way in one slot, by key, and how far its pending objects are looked through."""

    def __init__(self) -> None:
        self._flushes: dict[ObjectKey, OneFlush] = {}
        self._passed: set[ObjectKey] = set()
        self.looked_through = 0
        """Up to this sequence, but for what is urgent."""

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._flushes

    def has_room(self, *, urgent: bool) -> bool:
        """Whether another one may begin."""
        waiting = sum(flush.waits for flush in self._flushes.values())
        at_work = len(self._flushes) - waiting
        return at_work < FLUSHES_PER_SLOT + urgent * URGENT_PER_SLOT and waiting < WAITING_PER_SLOT

    def pass_by(self, key: ObjectKey) -> None:
        """Something is behind what is on its way under a key."""
        self._passed.add(key)

    def hurry(self, prefix: Prefix) -> None:
        """Have what waits under a prefix be tried now, and what was passed by be looked at again."""
        for key, flush in self._flushes.items():
            if prefix.covers(key.bucket, key.key):
                flush.hurry()
        self.look_again()

    def begin(self, key: ObjectKey, flush: OneFlush) -> None:
        self._flushes[key] = flush

    def end(self, key: ObjectKey) -> None:
        del self._flushes[key]
        if key in self._passed:
            self.look_again()

    def look_again(self) -> None:
        """From the beginning."""
        self._passed.clear()
        self.looked_through = 0


class Flusher:
    """Of one buffer."""

    def __init__(self, tools: Tools, clock: Clock) -> None:
        self._tools = tools
        self._clock = clock
        self._slots: dict[str, _SlotFlushes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._aside: set[int] = set()
        self._news = Awaited(partial(tools.journal.stamp, News.OBJECTS), clock)
        self._tidying = Tidying(tools.journal, clock)
        self._again_at = 0.0
        self._aborting: asyncio.Task[None] | None = None
        self._damaged = DamagedRows(tools.journal)

    def wake(self) -> None:
        """Something may be flushed that could not be before."""
        self._again_at = 0.0
        self._news.tell()

    def hurry(self, prefix: Prefix) -> None:
        """Try now what waits under a prefix because it has failed."""
        for slot in self._slots.values():
            slot.hurry(prefix)
        self.wake()

    async def run(self) -> None:
        """For ever. A journal that cannot be used now is asked again."""
        tidying = asyncio.create_task(self._tidying.run())
        try:
            async with self._news.coming():
                while True:
                    with suppress(BufferUnavailable):  # whoever writes to it learns of it
                        self._start_flushes()
                    await self._news.wait()
        finally:
            await self._stop(tidying)

    def _start_flushes(self) -> None:
        if self._clock.monotonic() >= self._again_at:
            self._again_at = self._clock.monotonic() + AGAIN_SECONDS
            for slot in self._slots.values():
                slot.look_again()
        self._tools.journal.read(self._look)

    def _look(self, book: Book) -> None:
        if (self._aborting is None or self._aborting.done()) and book.orphan_ids(1):
            self._aborting = self._in_background(self._abort_orphans())
        for name in book.slots():
            slot = self._slots.setdefault(name, _SlotFlushes())
            self._look_through(book, name, slot, urgent=True)
            self._look_through(book, name, slot, urgent=False)

    def _look_through(self, book: Book, name: str, slot: _SlotFlushes, *, urgent: bool) -> None:
        after, find = (0, book.urgent) if urgent else (slot.looked_through, book.startable)
        for _ in range(READ_AT_ONCE // _PAGE):
            found = find(name, after, _PAGE) if slot.has_room(urgent=urgent) else ()
            for pending in found:
                if not slot.has_room(urgent=urgent):
                    return
                if self._may_start(book, slot, pending):
                    self._start(name, slot, pending)
                after = pending.sequence
                slot.looked_through = slot.looked_through if urgent else after
            if len(found) < _PAGE:
                return
        if not urgent:
            self._news.tell()  # there is more

    def _may_start(self, book: Book, slot: _SlotFlushes, pending: Waiting) -> bool:
        """Whether it is the first of its key, and not on its way."""
        if pending.key in slot:
            slot.pass_by(pending.key)
            return False
        return pending.sequence not in self._aside and book.first_sequence(pending.key) == pending.sequence

    def _start(self, name: str, slot: _SlotFlushes, pending: Waiting) -> None:
        flush = OneFlush(self._tools, self._clock, random.Random(), self._news.tell)
        slot.begin(pending.key, flush)
        self._in_background(self._flush(name, slot, pending, flush))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _flush(self, name: str, slot: _SlotFlushes, pending: Waiting, flush: OneFlush) -> None:
        try:
            await flush.run(pending.sequence)
        except BufferDamaged as error:
            self._aside.add(pending.sequence)
            self._tools.observer.damaged(_told(name, pending), str(error))
        except Exception as error:  # noqa: BLE001 - it is told, and tried again: nothing may stop a flush for good
            self._tools.observer.failing(_told(name, pending), 1, repr(error))
            await self._clock.sleep(_FAILED_PAUSE_SECONDS)
            slot.look_again()
        finally:
            slot.end(pending.key)
            self._tidying.needed = True
            self._news.tell()

    async def _abort_orphans(self) -> None:
        """Have the origin forget what nobody will complete; where something is left, this rests for a while."""
        after, refusing, is_left = "", set[str](), False
        with suppress(BufferUnavailable):
            while ids := self._tools.journal.read(lambda book: book.orphan_ids(_PAGE, after)):  # noqa: B023
                for one in ids:
                    orphan = self._damaged.read(partial(Book.orphan_of, origin_upload_id=one))
                    if orphan is None or orphan.key.bucket in refusing:
                        is_left = True
                    elif not await self._abort(orphan):
                        refusing.add(orphan.key.bucket)
                after = ids[-1]
            if is_left or refusing:
                await self._clock.sleep(_ORPHANS_PAUSE_SECONDS)

    async def _abort(self, orphan: Orphan) -> bool:
        """Whether the origin has forgotten it."""
        if not await self._tools.requests.abort(orphan.key, orphan.origin_upload_id):
            return False
        forget = partial(Book.forget_orphan, origin_upload_id=orphan.origin_upload_id)
        await self._tools.journal.change(forget)
        return True

    async def _stop(self, tidying: asyncio.Task[None]) -> None:
        running = [*self._tasks, tidying]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _told(slot: str, pending: Waiting) -> PendingObject:
    """What is certain of an object whose row in the journal may be damaged."""
    return PendingObject(pending.sequence, Fixed(pending.key, {}, slot), Base(), 0.0, "", 0)
