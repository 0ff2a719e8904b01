"""CompleteMultipartUpload that is the origin's to carry out: with a condition, or of parts that only the origin has.

So its 200 comes after the origin's.

    what is pending under the key is flushed → parts that the origin lacks are sent → Complete with the condition

Parts that were absorbed are at the origin then; when the condition does not hold, the upload stays open, as at S3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.errors import BufferUnavailable, S3Error
from gateway.operations.absorbing.barrier import flushed
from gateway.operations.absorbing.completion import Completion
from gateway.operations.absorbing.eligible import is_condition
from gateway.operations.absorbing.staging import unavailable
from gateway.operations.context import RequestContext
from gateway.s3.error_codes import CODES, s3_error
from gateway.s3.headers import unquote
from gateway.writeback.flushing.asking import asking
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.upload_state import (
    PARTS_AT_ONCE,
    Begun,
    Event,
    Finished,
    Headed,
    Lost,
    PartSent,
    Refused,
    SendPart,
)
from gateway.writeback.journal.records import Ended, Part, PendingObject, Upload

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


async def complete_at_origin(
    context: RequestContext, buffer: WritebackBuffer, upload: Upload, made: Completion, ended: Ended
) -> None:
    """Return when the origin has made the object; S3Error with its code when it has not."""
    await flushed(context, buffer, [context.object_key])
    completing = _Completing(context, buffer, upload, made, ended)
    try:
        await completing.run()
        await buffer.completed_at_origin(replace(ended, ended_at=context.services.clock.now()))
    except BufferUnavailable as error:
        raise unavailable(error) from error


class _Completing:
    """One such Complete under way."""

    def __init__(
        self, context: RequestContext, buffer: WritebackBuffer, upload: Upload, made: Completion, ended: Ended
    ) -> None:
        self._requests = FlushRequests(context.services.origin, buffer.staging, buffer.threads)
        self._buffer = buffer
        self._clock = context.services.clock
        self._upload_id = upload.upload_id
        self._ended = ended
        self._conditions = _conditions(context.request.headers)
        self._object = PendingObject(
            0,
            upload.fixed,
            upload.base,
            0.0,
            made.etag,
            made.size_bytes,
            made.parts,
            multipart=True,
            upload_id=upload.upload_id,
            origin_upload_id=upload.origin_upload_id,
        )

    async def run(self) -> None:
        if self._object.origin_upload_id is None:
            await self._begin()
        event = await self._complete()
        if event == Refused("InvalidPart") and self._forget_sent():
            event = await self._complete()
        if not isinstance(event, Finished) and not await self._was_done_before(event):
            raise _error(event)

    async def _complete(self) -> Event:
        """Written down before it is asked for: it may be done, and nobody hear of it (lost_completions.py)."""
        self._object = replace(self._object, parts=await self._all_sent())
        asked = replace(self._ended, ended_at=self._clock.now())
        was_asked = await self._buffer.journal.change(lambda book: book.begin_completing(asked))
        event = await self._requests.complete(self._object, self._conditions)
        if isinstance(event, Refused) and event.code != "NoSuchUpload" and not was_asked:
            await self._buffer.journal.change(lambda book: book.end_completing(asked.upload_id, asked.ended_at))
        return event

    def _forget_sent(self) -> bool:
        """Two versions of a part have crossed on their way: what is here is sent again. Whether anything is."""
        parts = [replace(part, origin_etag=None) if part.file.is_here else part for part in self._object.parts]
        self._object = replace(self._object, parts=parts)
        return any(part.file.is_here for part in parts)

    async def _begin(self) -> None:
        async with asking(self._buffer.journal, self._object.key, self._clock) as upload:
            upload.sent()
            event = await self._requests.begin(self._object)
            if isinstance(event, Refused):
                upload.refused()
            if not isinstance(event, Begun):
                raise _error(event)
            key, begun = self._object.key, event.origin_upload_id
            counts = await upload.note(lambda book: book.begun_at_origin(self._upload_id, key, begun))
        if counts is None:
            raise s3_error("NoSuchUpload", UploadId=self._upload_id)
        self._object = replace(self._object, origin_upload_id=counts)

    async def _all_sent(self) -> list[Part]:
        limit = asyncio.Semaphore(PARTS_AT_ONCE)
        sending = [asyncio.create_task(self._send(part, limit)) for part in self._object.parts]
        try:
            return await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def _send(self, part: Part, limit: asyncio.Semaphore) -> Part:
        if part.origin_etag is not None:
            return part
        async with limit:
            event = await self._requests.send_part(self._object, SendPart(self._object.origin_upload_id or "", part))
        if not isinstance(event, PartSent):
            raise _error(event)
        sent = replace(part, origin_etag=event.etag)
        await self._buffer.sent(self._upload_id, sent)
        return sent

    async def _was_done_before(self, event: Event) -> bool:
        """An answer was lost, this one or one before: the ETag decides."""
        if not isinstance(event, Lost) and event != Refused("NoSuchUpload"):
            return False
        found = await self._requests.head(self._object)
        return isinstance(found, Headed) and unquote(found.etag or "") == unquote(self._object.etag)


def _conditions(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if is_condition(name)}


def _error(event: Event) -> S3Error:
    code = getattr(event, "code", None)
    if isinstance(code, str) and code in CODES:
        return s3_error(code)
    return s3_error("ServiceUnavailable", f"The origin has not done it: {event}")
