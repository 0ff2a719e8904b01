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
from gateway.operations.absorbing.outcome import Outcome, told_by_document
from gateway.operations.context import RequestContext, Response
from gateway.s3.requests import Operation
from gateway.writeback.journal.records import OwnDoing

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer
    from gateway.writeback.journal.book import Book

CHANGES_NO_OBJECT = frozenset(
    {
        Operation.CREATE_MULTIPART_UPLOAD,
        Operation.UPLOAD_PART,
        Operation.UPLOAD_PART_COPY,
        Operation.ABORT_MULTIPART_UPLOAD,
    }
)
"""The origin has under the key what it had before."""


async def written_through(context: RequestContext, buffer: WritebackBuffer, write: Awaitable[Response]) -> Response:
    """Carry out a write of the request's key at the origin, answered or not."""
    outcome = Outcome(context.object_key, buffer, context.services.clock)
    try:
        reply = await write
    except BaseException:
        await outcome.note(None)
        raise
    if 400 <= reply.status < 500:  # it has refused, and nothing is changed
        return reply
    match context.request.operation, reply.status:
        case ((Operation.COPY_OBJECT | Operation.COMPLETE_MULTIPART_UPLOAD), 200):
            return await told_by_document(reply, outcome)
        case Operation.PUT_OBJECT, 200:
            await outcome.note(dict(reply.headers).get("etag"))
        case Operation.DELETE_OBJECT, 204:
            await outcome.note_deletion()
        case _:
            await outcome.note(None)
    return reply


async def deleted_through(
    context: RequestContext, buffer: WritebackBuffer, keys: Iterable[str], delete: Awaitable[Response]
) -> Response:
    """Carry out a DeleteObjects of these keys at the origin, answered or not; what became of each is not looked at."""
    try:
        return await delete
    finally:
        bucket, slots = context.request.bucket or "", context.services.slots
        own = OwnDoing(context.services.clock.now(), known=False)
        changed = [ObjectKey(bucket, key) for key in keys if slots.find(bucket, key).write == "back"]

        def note(book: Book) -> None:
            for key in changed:
                book.did(key, own)

        if changed:
            with suppress(BufferUnavailable):
                await buffer.journal.change(note)
