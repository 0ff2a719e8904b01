"""Uploads that the origin was asked to complete when the process died, or its answer was lost: found out, and ended.

    the origin has no such upload any more, and under its key an object of just these parts: it has done it
    anything else: nobody knows, or it has not; the upload stays open, and its client may go on with it

So says who repeats the Complete (`conditional.py`), too; this is for those whom nobody repeats. An upload that was
given a part since stays open in any case: its client has more in mind. It is looked at seldom, and less and less.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import structlog

from gateway.clock import Clock
from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.s3.headers import unquote
from gateway.writeback.flushing.damaged_rows import DamagedRows
from gateway.writeback.flushing.flush import Publication
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.upload_state import Headed
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Ended, PendingObject, Upload

FIRST_LOOK_SECONDS = 5.0
"""Behind the question; each further look comes when as much time has passed again."""

GIVEN_UP_SECONDS = 3600.0
"""An origin may work at a large object for minutes, whoever still listens; not so long."""

LOOK_SECONDS = 1.0
PAUSE_SECONDS = 30.0
"""How long a bucket is left alone that does not say."""

_PAGE = 64

_log = structlog.get_logger("forebay.writeback")


class LostCompletions:
    """Of one buffer; in the process that flushes."""

    def __init__(self, journal: Journal, requests: FlushRequests, publication: Publication, clock: Clock) -> None:
        self._journal = journal
        self._requests = requests
        self._publication = publication
        self._clock = clock
        self._due: dict[tuple[str, float], float] = {}
        self._not_before: dict[str, float] = {}
        self._damaged = DamagedRows(journal)

    async def run(self) -> None:
        """For ever."""
        while True:
            with suppress(BufferUnavailable):  # whoever writes to the journal learns of it
                await self.look()
            await self._clock.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Find out about all of which the time has come."""
        after, due = "", dict[tuple[str, float], float]()
        while page := self._journal.read(lambda book: book.all_completing(after, _PAGE)):  # noqa: B023
            for upload_id, asked_at in page:
                when = self._due.get((upload_id, asked_at), asked_at + FIRST_LOOK_SECONDS)
                if self._clock.now() >= when:
                    when = await self._find_out(upload_id, asked_at)
                due[upload_id, asked_at] = when
            after = page[-1][0]
        self._due = due

    async def _find_out(self, upload_id: str, asked_at: float) -> float:
        """When to look the next time."""
        now = self._clock.now()
        try:
            is_over = await self._is_over(upload_id, now)
        except BufferDamaged as error:
            self._damaged.tell(error)
            is_over = False
        if is_over is None:
            return now + PAUSE_SECONDS
        if not is_over and now >= asked_at + GIVEN_UP_SECONDS:
            await self._journal.change(lambda book: book.end_completing(upload_id, asked_at))
        return now + max(FIRST_LOOK_SECONDS, now - asked_at)

    async def _is_over(self, upload_id: str, now: float) -> bool | None:
        """Whether it has been ended now; None where the origin does not say."""
        asked = self._journal.read(lambda book: book.completing(upload_id))
        upload = self._journal.read(lambda book: book.upload(upload_id))
        if asked is None or upload is None:
            return False
        is_made = await self._is_made(_as_object(upload, asked), now)
        if not is_made:
            return is_made
        await self._publication.publish(_as_object(upload, asked), asked.etag)
        if not await self._journal.change(lambda book: settle_completing(book, asked, now)):
            return False
        _log.info("the origin has completed an upload without telling", object=str(asked.key), upload_id=upload_id)
        return True

    async def _is_made(self, completed: PendingObject, now: float) -> bool | None:
        """The same of the origin's object. A bucket that has not answered is left alone for a while."""
        bucket = completed.key.bucket
        if now < self._not_before.get(bucket, now):
            return None
        self._not_before.pop(bucket, None)
        has_upload = await self._requests.has_upload(completed)
        if has_upload:
            return False
        found = await self._requests.head(completed) if has_upload is not None else None
        if not isinstance(found, Headed):
            self._not_before[bucket] = now + PAUSE_SECONDS
            return None
        return unquote(found.etag or "") == unquote(completed.etag)


def settle_completing(book: Book, asked: Ended, looked_at: float) -> bool:
    """End an upload whose object was at the origin, and itself no more, at this time; whether that is its end.

    Not where the client has gone on with it: it was completed anew, or given a part since.
    """
    if book.upload(asked.upload_id) is None or book.completing(asked.upload_id) != asked:
        return False
    if any(part.stored_at > asked.ended_at for part in book.parts(asked.upload_id)):
        return False
    book.completed_at_origin(replace(asked, ended_at=looked_at))
    return True


def _as_object(upload: Upload, asked: Ended) -> PendingObject:
    """What the origin was to make, as far as questions for it go; what of it lies here is not offered to the cache."""
    return PendingObject(
        0,
        upload.fixed,
        upload.base,
        asked.ended_at,
        asked.etag or "",
        0,
        multipart=True,
        upload_id=upload.upload_id,
        origin_upload_id=upload.origin_upload_id,
    )
