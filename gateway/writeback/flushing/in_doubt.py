"""Uploads that the origin is asked to begin, kept in sight whenever the process dies.

    written down → asked → noted: one transaction records the upload and ends the question

Without that transaction, it is unknown what the origin has done. The question stays as a write in the state ABORTING: a
minute later the gateway lists the origin's uploads of the key. An unknown upload begun at that time may be ours, or
another writer's who sends parts to it; ours never gets parts, as no client has its id. So the gateway aborts it when it
has no parts after half a day (state.py). If there are more than were asked for, it logs them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferUnavailable
from gateway.core.model import ObjectKey
from gateway.writeback.flushing.requests import OpenUpload, OpenUploads
from gateway.writeback.flushing.state import CLOCKS_APART_SECONDS, TOLD_APART_SECONDS
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import CreateAttempt
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.uploads import CARRIED_OUT_SECONDS


@asynccontextmanager
async def in_doubt(journal: Journal, key: ObjectKey, slot: str, clock: Clock) -> AsyncIterator[CreateInDoubt]:
    """Enter the question before it is asked. BufferUnavailable when that fails: then nothing is asked."""
    asked = CreateAttempt(journal.worker, Moment.of(clock))
    question = CreateInDoubt(await journal.change(lambda tx: tx.uploads.ask(key, slot, asked)))
    try:
        yield question
    finally:
        if not question.is_over:
            with suppress(BufferUnavailable):  # the next start marks it instead
                if question.is_refused:
                    await journal.change(lambda tx: tx.uploads.forget(question.id))
                else:
                    await journal.change(lambda tx: tx.uploads.mark_in_doubt(question.id, Moment.of(clock)))


@dataclass(slots=True)
class CreateInDoubt:
    """One request for an upload at the origin; `id` is that of its row."""

    id: int
    is_over: bool = False
    """A transaction has noted the outcome."""
    is_refused: bool = False
    """The origin has answered that it has begun none."""


def settle_in_doubt(tx: JournalTransaction, key: ObjectKey, listed: OpenUploads, now: Moment) -> Sequence[OpenUpload]:
    """Take the open uploads of a key that may be ours, listed before this transaction, among those to abort.

    Return them if they are more than were asked for. Decide nothing while a process is asking for an upload of the key.
    """
    rows = [(one, one.asked) for one in tx.uploads.asked(key) if one.asked is not None]
    if any(not _is_carried_out(asked, now) for _, asked in rows):
        return []
    known, found = tx.uploads.origin_upload_ids(key), list[OpenUpload]()
    for one in listed.uploads:
        if one.upload_id not in known and any(_may_be_of(asked, one, listed) for _, asked in rows):
            found.append(one)
    for row, _ in rows:
        tx.uploads.forget(row.id)
    for one in found:
        tx.writes.abort_at_origin(key, rows[0][0].spec.slot, one.upload_id, now.at, rows[0][1])
    return found if len(found) > len(rows) else []


def _is_carried_out(asked: CreateAttempt, now: Moment) -> bool:
    if asked.in_doubt_since is None:
        return False
    waited_seconds, is_certain = now.since(asked.in_doubt_since)
    return waited_seconds >= CARRIED_OUT_SECONDS or (waited_seconds < 0 and not is_certain)


def _may_be_of(asked: CreateAttempt, one: OpenUpload, listed: OpenUploads) -> bool:
    since_begun, is_certain = listed.answered.since(asked.begun)
    since_suspect, is_suspect_certain = listed.asked.since(asked.in_doubt_since or asked.begun)
    begun_apart = TOLD_APART_SECONDS if is_certain and listed.are_ages_told else CLOCKS_APART_SECONDS
    suspect_apart = TOLD_APART_SECONDS if is_suspect_certain and listed.are_ages_told else CLOCKS_APART_SECONDS
    youngest = since_suspect - CARRIED_OUT_SECONDS - suspect_apart
    return youngest <= one.age_seconds <= since_begun + begun_apart
