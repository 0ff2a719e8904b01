"""Uploads that the origin was asked to begin when the process died, or its answer was lost: found, and aborted.

The origin lists what is open under the key. What was begun at that time and is nobody's here is ours, unless there is
more of it than was asked for: another writer's upload looks the same, and is never aborted. That is told, and left to
the bucket's own rules for incomplete uploads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import structlog

from gateway.clock import Clock
from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.objects import ObjectKey
from gateway.s3.upload_list import ListedUpload
from gateway.writeback.flushing.damaged_rows import DamagedRows
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.upload_state import CLOCKS_APART_SECONDS
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Intent

CARRIED_OUT_SECONDS = 60.0
"""What was under way to the origin when its sender died has happened by then, or never will."""

LOOK_SECONDS = 1.0
PAUSE_SECONDS = 30.0
"""How long a bucket is left alone whose uploads could not be listed."""

_PAGE = 64

_log = structlog.get_logger("forebay.writeback")


class LostUploads:
    """Of one buffer; in the process that flushes."""

    def __init__(self, journal: Journal, requests: FlushRequests, clock: Clock) -> None:
        self._journal = journal
        self._requests = requests
        self._clock = clock
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
        after = ""
        while tokens := self._journal.read(lambda book: book.suspected(after, _PAGE)):  # noqa: B023
            found = [self._damaged.read(partial(Book.intent, token=token)) for token in tokens]
            page = [one for one in found if one is not None]
            for key in dict.fromkeys(one.key for one in page if self._is_due(one)):
                await self._find_out(key)
            after = tokens[-1]

    def _is_due(self, suspect: Intent) -> bool:
        now = self._clock.now()
        return now >= self._not_before.get(suspect.key.bucket, now) and now >= _carried_out(suspect)

    async def _find_out(self, key: ObjectKey) -> None:
        listed = await self._requests.open_uploads(key)
        if listed is None:
            self._not_before[key.bucket] = self._clock.now() + PAUSE_SECONDS
            return
        self._not_before.pop(key.bucket, None)
        now = self._clock.now()
        try:
            unclear = await self._journal.change(lambda book: settle_suspects(book, key, listed, now))
        except BufferDamaged as error:
            self._damaged.tell(error)
            self._not_before[key.bucket] = now + PAUSE_SECONDS
            return
        if unclear:
            _log.warning(
                "uploads at the origin may be of this gateway, or of another writer: they are left open",
                bucket=key.bucket,
                key=key.key,
                upload_ids=[one.upload_id for one in unclear],
            )


def settle_suspects(book: Book, key: ObjectKey, listed: Sequence[ListedUpload], now: float) -> Sequence[ListedUpload]:
    """What is open under a key at the origin, listed before this transaction: what is ours becomes orphans.

    What may be ours, and may be another writer's, is returned. Where somebody is just asking for an upload of the key,
    nothing is decided.
    """
    intents = book.intents(key)
    suspects = [one for one in intents if one.suspect_since is not None]
    if len(suspects) < len(intents) or any(now < _carried_out(one) for one in suspects):
        return []
    known = book.origin_upload_ids(key)
    found = [
        one
        for one in listed
        if one.upload_id not in known
        and not book.is_orphan(one.upload_id)
        and any(_may_be_of(suspect, one) for suspect in suspects)
    ]
    for suspect in suspects:
        book.forget_intent(suspect.token)
    if len(found) > len(suspects):
        return found
    for one in found:
        book.orphan(key, one.upload_id)
    return []


def _may_be_of(suspect: Intent, listed: ListedUpload) -> bool:
    until = suspect.asked_at if suspect.suspect_since is None else suspect.suspect_since
    return suspect.asked_at - CLOCKS_APART_SECONDS <= listed.initiated <= until + CLOCKS_APART_SECONDS


def _carried_out(suspect: Intent) -> float:
    return (suspect.suspect_since or 0.0) + CARRIED_OUT_SECONDS
