"""Parts go to the origin while the client still uploads: when it completes, most of the object is there already.

Only parts of uploads that the origin has opened. What comes of it is written down part by part (`Book.sent`), and taken
over by Complete; a part that the client replaces meanwhile is sent again. If the origin ends with the older one of two
that were on their way at once, Complete says so, and the flush sends all parts anew.

Uploads take turns, part by part, each slot by itself. However much is unsent, a look reads what it can start, beside
what is on its way or rests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gateway.clock import Clock
from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.writeback.flushing.flush import Tools
from gateway.writeback.flushing.upload_state import PartSent, SendPart
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.records import Base, Part, PendingObject, Upload
from gateway.writeback.news import Awaited
from gateway.writeback.presence import News

PARTS_PER_SLOT = 8
"""On their way at once."""

REST_SECONDS = 5.0
"""How long an upload is left alone of which a part did not get there: if the origin is away, the flush waits for it."""

RESTING_PER_SLOT = 64
"""With so many uploads at rest nothing more of the slot is tried before one of them is rested."""

_Place = tuple[str, int, str]
"""An upload, a part's number, and its file: the bytes that are sent."""


class _SlotParts:
    """What of one slot's is on its way, and whose turn it is."""

    def __init__(self) -> None:
        self.under_way: set[_Place] = set()
        self.last_upload_id = ""
        self._rested_at: dict[str, float] = {}

    def has_room(self) -> bool:
        return len(self.under_way) < PARTS_PER_SLOT and len(self._rested_at) < RESTING_PER_SLOT

    def rests(self, upload_id: str) -> bool:
        return upload_id in self._rested_at

    def rest(self, upload_id: str, now: float) -> None:
        self._rested_at[upload_id] = now + REST_SECONDS

    def wake_rested(self, now: float) -> None:
        for upload_id in [one for one, rested_at in self._rested_at.items() if rested_at <= now]:
            del self._rested_at[upload_id]


class EarlyParts:
    """Of one buffer; in the process that flushes."""

    def __init__(self, tools: Tools, clock: Clock) -> None:
        self._tools = tools
        self._clock = clock
        self._news = Awaited(partial(tools.journal.stamp, News.PARTS), clock)
        self._slots: dict[str, _SlotParts] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """For ever."""
        try:
            async with self._news.coming():
                while True:
                    with suppress(BufferUnavailable):  # whoever writes to the journal learns of it
                        self.look()
                    await self._news.wait()
        finally:
            await self.stop()

    def look(self) -> None:
        """Begin to send what there is room for."""
        self._tools.journal.read(self._start_some)

    async def stop(self) -> None:
        """Leave what is on its way: whether it got there is found out by the flush."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _start_some(self, book: Book) -> None:
        for name in book.slots_with_unsent():
            slot = self._slots.setdefault(name, _SlotParts())
            slot.wake_rested(self._clock.monotonic())
            while slot.has_room() and (found := self._next(book, name, slot)):
                self._start(slot, *found)

    def _next(self, book: Book, name: str, slot: _SlotParts) -> tuple[Upload, Part] | None:
        """The next part to be sent of the next upload that has one. One that cannot be read rests, as others do."""
        for upload_id in _in_turn(book, name, slot.last_upload_id):
            try:
                found = None if slot.rests(upload_id) else _unsent(book, name, slot, upload_id)
            except BufferDamaged:  # its Complete comes to it again, and tells
                slot.rest(upload_id, self._clock.monotonic())
                continue
            if found is not None:
                slot.last_upload_id = upload_id
                return found
        return None

    def _start(self, slot: _SlotParts, upload: Upload, part: Part) -> None:
        place = (upload.upload_id, part.number, part.file.name)
        slot.under_way.add(place)
        task = asyncio.create_task(self._send(slot, place, upload, part))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, slot: _SlotParts, place: _Place, upload: Upload, part: Part) -> None:
        """One try. A part that is damaged, or does not get there, is the flush's to deal with."""
        try:
            instruction = SendPart(upload.origin_upload_id or "", part)
            event = await self._tools.requests.send_part(_as_object(upload), instruction)
            if isinstance(event, PartSent):
                sent = replace(part, origin_etag=event.etag)
                await self._tools.journal.change(partial(Book.sent, upload_id=upload.upload_id, part=sent))
            else:
                slot.rest(upload.upload_id, self._clock.monotonic())
        except (BufferDamaged, BufferUnavailable):  # the flush comes to it again, and tells
            slot.rest(upload.upload_id, self._clock.monotonic())
        finally:
            slot.under_way.discard(place)
            self._news.tell()


def _unsent(book: Book, name: str, slot: _SlotParts, upload_id: str) -> tuple[Upload, Part] | None:
    """The first part of an upload that may be sent, and is not on its way."""
    for number, file in book.unsent(name, upload_id, PARTS_PER_SLOT):
        if (upload_id, number, file) not in slot.under_way:
            upload, part = book.upload(upload_id), book.part(upload_id, number)
            if upload is not None and part is not None:
                return upload, part
    return None


def _in_turn(book: Book, slot: str, last: str) -> Iterator[str]:
    """The uploads of a slot that have something unsent, once round from behind the last one to itself."""
    upload_id = book.next_with_unsent(slot, last)
    while upload_id is not None:
        yield upload_id
        upload_id = book.next_with_unsent(slot, upload_id)
    upload_id = book.next_with_unsent(slot, "")
    while upload_id is not None and upload_id <= last:
        yield upload_id
        upload_id = book.next_with_unsent(slot, upload_id)


def _as_object(upload: Upload) -> PendingObject:
    """The upload as far as a request for one of its parts goes."""
    return PendingObject(0, upload.fixed, Base(), 0.0, "", 0, multipart=True, origin_upload_id=upload.origin_upload_id)
