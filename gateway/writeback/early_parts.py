"""Parts go to the origin while the client still uploads: when it completes, most of the object is there already.

Only parts of uploads that the origin has opened. What comes of it is written down part by part (`Book.sent`), and taken
over by Complete; a part that the client replaces meanwhile is sent again. If the origin ends with the older one of two
that were on their way at once, Complete says so, and the flush sends all parts anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gateway.clock import Clock
from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.writeback.book import Book
from gateway.writeback.flush import Tools
from gateway.writeback.records import Base, Part, PendingObject, Upload
from gateway.writeback.upload_state import PartSent, SendPart

PARTS_PER_SLOT = 4
"""On their way at once."""

LOOK_SECONDS = 0.25
PAUSE_SECONDS = 5.0
"""How long a part is left alone that did not get there: if the origin is away, the flush will wait for it."""

_PAGE = 64

_Place = tuple[str, int, str]
"""An upload, a part's number, and its file: the bytes that are sent."""


class EarlyParts:
    """Of one buffer; in the process that flushes."""

    def __init__(self, tools: Tools, clock: Clock) -> None:
        self._tools = tools
        self._clock = clock
        self._under_way: dict[_Place, asyncio.Task[None]] = {}
        self._at_work: Counter[str] = Counter()

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                with suppress(BufferUnavailable):  # whoever writes to the journal learns of it
                    self._start_some()
                await self._clock.sleep(LOOK_SECONDS)
        finally:
            await self._stop()

    def _start_some(self) -> None:
        after = ("", 0)
        while page := self._tools.journal.read(lambda book: book.unsent(after, _PAGE)):  # noqa: B023
            for upload_id, number in page:
                self._start(upload_id, number)
            after = page[-1]

    def _start(self, upload_id: str, number: int) -> None:
        upload = self._tools.journal.read(lambda book: book.upload(upload_id))
        if upload is None or upload.origin_upload_id is None or self._at_work[upload.fixed.slot] >= PARTS_PER_SLOT:
            return
        part = self._tools.journal.read(lambda book: book.part(upload_id, number))
        if part is None or (upload_id, number, part.file.name) in self._under_way:
            return
        place = (upload_id, number, part.file.name)
        self._at_work[upload.fixed.slot] += 1
        self._under_way[place] = task = asyncio.create_task(self._send(upload, part))
        task.add_done_callback(lambda _: self._under_way.pop(place, None))

    async def _send(self, upload: Upload, part: Part) -> None:
        """One try. A part that is damaged, or does not get there, is the flush's to deal with."""
        slot = upload.fixed.slot
        try:
            instruction = SendPart(upload.origin_upload_id or "", part)
            event = await self._tools.requests.send_part(_as_object(upload), instruction)
            if isinstance(event, PartSent):
                sent = replace(part, origin_etag=event.etag)
                await self._tools.journal.change(partial(Book.sent, upload_id=upload.upload_id, part=sent))
                return
        except (BufferDamaged, BufferUnavailable):
            pass  # the flush comes to it again, and tells
        finally:
            self._at_work[slot] -= 1
        await self._clock.sleep(PAUSE_SECONDS)

    async def _stop(self) -> None:
        running = list(self._under_way.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _as_object(upload: Upload) -> PendingObject:
    """The upload as far as a request for one of its parts goes."""
    return PendingObject(0, upload.fixed, Base(), 0.0, "", 0, multipart=True, origin_upload_id=upload.origin_upload_id)
