"""Writes in a slot with `write = "back"` that go through all the same: the buffer is told that the key has changed.

Otherwise an upload that was begun before them takes what they have written for somebody else's: a conflict, which is
kept and told. That is what comes of it where the journal cannot be written now (the buffer tells): the origin has taken
the write, so it is acknowledged all the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from gateway.errors import BufferUnavailable
from gateway.objects import ObjectKey
from gateway.operations.exchange import Exchange
from gateway.operations.reply import Reply
from gateway.s3.requests import Operation
from gateway.writeback.journal.records import OwnDoing

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer
    from gateway.writeback.journal.book import Book


async def written_through(exchange: Exchange, buffer: WritebackBuffer, write: Awaitable[Reply]) -> Reply:
    """Carry out a write of the request's key at the origin, answered or not."""
    done: tuple[str | None, bool] | None = (None, False)
    try:
        reply = await write
        done = _done(exchange, reply)
        return reply
    finally:
        if done is not None:
            with suppress(BufferUnavailable):
                await buffer.did(exchange.object_key, OwnDoing(exchange.services.clock.now(), *done))


async def deleted_through(
    exchange: Exchange, buffer: WritebackBuffer, keys: Iterable[str], delete: Awaitable[Reply]
) -> Reply:
    """Carry out a DeleteObjects of these keys at the origin, answered or not; what became of each is not looked at."""
    try:
        return await delete
    finally:
        bucket, slots = exchange.request.bucket or "", exchange.services.slots
        own = OwnDoing(exchange.services.clock.now(), known=False)
        changed = [ObjectKey(bucket, key) for key in keys if slots.find(bucket, key).write == "back"]

        def note(book: Book) -> None:
            for key in changed:
                book.did(key, own)

        if changed:
            with suppress(BufferUnavailable):
                await buffer.journal.change(note)


def _done(exchange: Exchange, reply: Reply) -> tuple[str | None, bool] | None:
    """What the origin has under the key now (None: no object), and whether its answer says so.

    None: it has refused, and nothing is changed.
    """
    if 400 <= reply.status < 500:
        return None
    operation = exchange.request.operation
    if operation is Operation.PUT_OBJECT and reply.status == 200:
        etag = dict(reply.headers).get("etag")
        return etag, etag is not None
    return None, operation is Operation.DELETE_OBJECT and reply.status == 204
