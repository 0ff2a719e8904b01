"""CompleteMultipartUpload that is the origin's to carry out: with a condition, or of parts that only the origin has.

So its 200 comes after the origin's. The reconciler does it (writeback/flushing), behind what is pending under the key:
parts that the origin lacks are sent, then Complete with the condition. When that does not hold, the upload stays open,
as at S3.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway import cancellation
from gateway.clock import Moment
from gateway.errors import S3Error
from gateway.operations.absorbing.barrier import FlushWait
from gateway.operations.absorbing.objects import is_condition
from gateway.operations.absorbing.parts import no_such_upload
from gateway.operations.context import RequestContext
from gateway.s3.error_codes import CODES, s3_error
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.records import Ended, Write

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

PATIENCE_SECONDS = 1800.0
"""An origin may work for minutes at a large object, and parts may have to be sent first."""

_LOOK_SECONDS = 0.02


async def complete_at_origin(context: RequestContext, buffer: WritebackBuffer, made: Write) -> Ended:
    """How it has ended, when the origin has made the object; S3Error with its code when it has not."""
    await FlushWait(context, buffer).for_keys([context.object_key])
    clock, token, upload_id = context.services.clock, secrets.token_hex(8), made.upload_id or ""
    conditions = {name: value for name, value in context.request.headers.items() if is_condition(name)}
    asked = replace(made, conditions=conditions, asked_as=token, touched=Moment.of(clock))
    if not await buffer.complete_at_origin(asked):
        raise s3_error(
            "ServiceUnavailable",
            "A part has just been replaced, or the upload has ended, or is just being completed: try again.",
        )
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while clock.monotonic() < deadline:
        ended = buffer.look(lambda book: _outcome(book, upload_id, token))
        if ended is not None:
            return ended
        with cancellation.turn():
            await clock.sleep(_LOOK_SECONDS)
    raise s3_error("ServiceUnavailable", "The origin has not done it in time: try again.")


def _outcome(book: Book, upload_id: str, token: str) -> Ended | None:
    """None: there is none yet."""
    upload = book.upload(upload_id)
    if upload is None:
        ended = book.ended(upload_id)
        if ended is None or ended.etag is None:
            raise no_such_upload(upload_id)
        return ended
    if upload.asked_as != token:
        raise s3_error("ServiceUnavailable", "The upload is being completed in another way: try again.")
    if upload.answer is not None:
        raise _error(upload.answer)
    return None


def _error(code: str) -> S3Error:
    if code in CODES:
        return s3_error(code)
    return s3_error("ServiceUnavailable", f"The origin has not done it: {code}")
