"""Writes in a slot with `write = "back"` that go through, and their notes in the buffer that the key has changed.

Otherwise an older upload takes their result for another writer's: a conflict, which is kept and reported. The same
happens if the journal cannot be written now (the buffer reports that): the origin has taken the write, so it is
acknowledged all the same. The results of CopyObject and CompleteMultipartUpload are in the answer's document, which may
come long after its head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferUnavailable, ForebayError, OriginBodyError, OutcomeUnknown
from gateway.core.model import BodyStream, ObjectKey, PinnedFileSpan
from gateway.core.steps import in_steps
from gateway.operations.context import CacheLabel, RequestContext, Response
from gateway.operations.failures import s3_error_of
from gateway.operations.writeback.write_back_policy import Reason, has_conditions
from gateway.s3.error_codes import error_document
from gateway.s3.headers import multipart_etag, unquote, without
from gateway.s3.requests import Operation
from gateway.s3.xml import (
    DELETE_RESULT_BYTES_MAX,
    RESULT_SIZE_BYTES_MAX,
    DeleteEntry,
    entries_left,
    etag_of_result,
    without_prolog,
)
from gateway.s3.xml_writer import PROLOG
from gateway.telemetry import metrics
from gateway.writeback.journal.records import LastOwnWrite

if TYPE_CHECKING:
    from gateway.writeback.bounds import Bound
    from gateway.writeback.buffer import WritebackBuffer
    from gateway.writeback.journal.transaction import JournalTransaction


def goes_through(context: RequestContext, reason: Reason | Bound) -> None:
    """Set the answer's header that says why a write is not absorbed, and count it."""
    context.not_absorbed = reason.value
    if context.services.writeback is not None:
        metrics.WRITEBACK_THROUGH.add(1, context.slot.name, reason.value)


CHANGES_NO_OBJECT = frozenset(
    {
        Operation.CREATE_MULTIPART_UPLOAD,
        Operation.UPLOAD_PART,
        Operation.UPLOAD_PART_COPY,
        Operation.ABORT_MULTIPART_UPLOAD,
    }
)
"""Operations that leave the key's object at the origin as it was."""


async def written_through(context: RequestContext, buffer: WritebackBuffer, write: Awaitable[Response]) -> Response:
    """Carry out a write of the request's key at the origin, answered or not."""
    clock = context.services.clock

    async def note(etag: str | None, *, known: bool) -> None:
        with suppress(BufferUnavailable):
            own = LastOwnWrite.now(Moment.of(clock), etag, known=known)
            await buffer.record_own_write(context.object_key, own, _said_bytes(context))
            if etag is not None and context.request.operation is Operation.COMPLETE_MULTIPART_UPLOAD:
                await _learn_of_parts(context, buffer, etag)

    try:
        reply = await write
    except BaseException:
        await note(None, known=False)
        raise
    if 400 <= reply.status < 500:  # it has refused, and nothing has changed
        return reply
    match context.request.operation, reply.status:
        case ((Operation.COPY_OBJECT | Operation.COMPLETE_MULTIPART_UPLOAD), 200):
            return await retried_until_final_document(
                reply, note, clock, may_be_repeated=not has_conditions(context.request.headers)
            )
        case Operation.PUT_OBJECT, 200:
            etag = dict(reply.headers).get("etag")
            await note(etag, known=etag is not None)
        case Operation.DELETE_OBJECT, 204 if context.request.parameter("versionId") is None:
            await note(None, known=True)
        case _:
            await note(None, known=False)
    return reply


def _said_bytes(context: RequestContext) -> int:
    """Return the length of a PutObject's body by its headers; 0 if they do not have it."""
    headers = context.request.headers
    said = headers.get("x-amz-decoded-content-length", headers.get("content-length", ""))
    is_put = context.request.operation is Operation.PUT_OBJECT
    return int(said) if is_put and said.isascii() and said.isdecimal() and len(said) < 16 else 0


async def _learn_of_parts(context: RequestContext, buffer: WritebackBuffer, etag: str) -> None:
    """Note that the ETag of this object of parts could have been foretold, after others could not."""
    bucket = context.object_key.bucket
    capabilities = buffer.look(lambda tx: tx.buckets.capabilities(bucket))
    if (
        capabilities is None
        or capabilities.multipart_etags
        or unquote(multipart_etag(context.made_of) or "") != unquote(etag)
    ):
        return
    await buffer.journal.change(lambda tx: tx.buckets.amend(bucket, multipart_etags=True))


class Note(Protocol):
    """Records the origin's present version of a key (None: nothing), or, not `known`, that it is unknown."""

    async def __call__(self, etag: str | None, *, known: bool) -> None: ...


async def retried_until_final_document(
    reply: Response, note: Note, clock: Clock, *, may_be_repeated: bool = True
) -> Response:
    """Return an answer whose document tells the result: noted before the client has it, or closes the answer.

    OriginBodyError if it breaks off; OutcomeUnknown if the request may not be repeated.
    """

    async def noted() -> Response:
        etag = None
        try:
            document = await whole_document(reply)
            etag = etag_of_result(document)
        except OriginBodyError as error:
            if not may_be_repeated:
                raise OutcomeUnknown(f"the origin's answer to a write is not whole: {error}") from error
            raise
        finally:
            await note(etag, known=etag is not None)
        return replace(reply, headers=headers, body=document, resource=None)

    headers = without(reply.headers, "content-length")
    return await with_retries(noted(), clock, headers=headers)


async def whole_document(reply: Response, size_bytes_max: int = RESULT_SIZE_BYTES_MAX) -> bytes:
    """Return the document of an origin's answer, less white space before it, and close the answer. OriginBodyError."""
    try:
        if isinstance(reply.body, bytes):
            return reply.body
        document = bytearray()
        if not isinstance(reply.body, (memoryview, PinnedFileSpan)):
            async for piece in reply.body:
                assert isinstance(piece, (bytes, memoryview))  # noqa: S101 - the origin's bytes, and no file's
                document += piece if document else bytes(piece).lstrip()
                if len(document) > size_bytes_max:
                    raise OriginBodyError("the origin's answer is too long for the result of a write")
        return bytes(document)
    finally:
        await reply.aclose()


async def deleted_through(
    context: RequestContext, buffer: WritebackBuffer, entries: Iterable[DeleteEntry], delete: Awaitable[Response]
) -> Response:
    """Carry out a DeleteObjects at the origin, answered or not. OriginBodyError for an incomplete answer.

    Keys reported as deleted leave their checkpoints, except those with a version: others may remain.
    """
    bucket, slots = context.request.bucket or "", context.services.slots
    changed = [one for one in entries if slots.find(bucket, one.key).is_buffered]
    left: Collection[DeleteEntry] = changed
    try:
        reply = await delete
        if reply.status == 200 and changed:
            document = await whole_document(reply, DELETE_RESULT_BYTES_MAX)
            left = await in_steps(entries_left(document, changed))
            reply = replace(reply, headers=without(reply.headers, "content-length"), body=document, resource=None)
        return reply
    finally:
        own = LastOwnWrite.now(Moment.of(context.services.clock), known=False)

        def note(tx: JournalTransaction) -> None:
            for one in changed:
                key = ObjectKey(bucket, one.key)
                tx.buckets.record_own_write(key, own)
                if one not in left and one.version_id is None:
                    tx.writes.leave_checkpoint(key)

        if changed:
            with suppress(BufferUnavailable):
                await buffer.journal.change(note)


# An answer that may take longer than clients wait without a byte: head and white space first, the outcome when known

QUIET_SECONDS = 10.0

_PROLOG = PROLOG.encode()


async def with_retries(
    answering: Coroutine[Any, Any, Response],
    clock: Clock,
    cache: CacheLabel = "forwarded",
    headers: Sequence[tuple[str, str]] = (("content-type", "application/xml"),),
) -> Response:
    """Return an answer whose body is an XML document in memory. If the client leaves, the work ends.

    S3 does so with CompleteMultipartUpload (S3 API, "CompleteMultipartUpload"): a 200 whose document may be an
    `<Error>`, which SDKs treat as one. `headers` are those of a 200 whose document is not known yet.
    """
    wait = _Wait(asyncio.create_task(answering), clock)
    try:
        if await wait.is_over():
            return await wait.answering
    except BaseException:
        await wait.aclose()
        raise
    return Response(200, headers, wait.body(), cache, wait)


class _Wait:
    """The wait of one answer."""

    def __init__(self, answering: asyncio.Task[Response], clock: Clock) -> None:
        self.answering = answering
        self._clock = clock

    async def is_over(self) -> bool:
        pause = asyncio.ensure_future(self._clock.sleep(QUIET_SECONDS))
        try:
            await asyncio.wait({self.answering, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
        return self.answering.done()

    async def body(self) -> BodyStream:
        yield _PROLOG
        while not await self.is_over():
            yield b" "
        yield without_prolog(await self._document())

    async def aclose(self) -> None:
        self.answering.cancel()
        await asyncio.gather(self.answering, return_exceptions=True)

    async def _document(self) -> bytes:
        try:
            reply = await self.answering
        except ForebayError as error:
            return error_document(s3_error_of(error), resource="", request_id="", host_id="")
        assert isinstance(reply.body, bytes)  # noqa: S101 - as `with_retries` says
        return reply.body
