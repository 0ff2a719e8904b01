"""What the origin has under a key behind a write that went through: written down before the client knows of it.

What a CopyObject or CompleteMultipartUpload has made its answer's document says, which may come long after its head.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from gateway.clock import Clock
from gateway.errors import BufferUnavailable
from gateway.objects import BodyStream, ObjectKey, PinnedFileSpan
from gateway.operations.context import Closable, Response
from gateway.s3.results import RESULT_SIZE_BYTES_MAX, etag_of_result, says_nothing_yet
from gateway.writeback.journal.records import OwnDoing

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


class Outcome:
    """Of one write. Where the journal cannot be written, nobody is told (through.py)."""

    def __init__(self, key: ObjectKey, buffer: WritebackBuffer, clock: Clock) -> None:
        self._key = key
        self._buffer = buffer
        self._clock = clock
        self.is_noted = False

    async def note(self, etag: str | None) -> None:
        """This version is there now; None: who knows."""
        await self._note(OwnDoing(self._clock.now(), etag, known=etag is not None))

    async def note_deletion(self) -> None:
        """No object is there now."""
        await self._note(OwnDoing(self._clock.now(), None))

    async def _note(self, own: OwnDoing) -> None:
        self.is_noted = True
        with suppress(BufferUnavailable):
            await self._buffer.did(self._key, own)


async def told_by_document(reply: Response, outcome: Outcome) -> Response:
    """An answer whose document says what was made: noted before the client has all of it, or closes the answer."""
    body = reply.body
    if isinstance(body, (bytes, memoryview, PinnedFileSpan)):
        await outcome.note(etag_of_result(body) if isinstance(body, bytes) else None)
        return reply
    reply.body = _noted(body, outcome)
    reply.resource = _NotedAtTheEnd(outcome, reply.resource)
    return reply


async def _noted(body: BodyStream, outcome: Outcome) -> BodyStream:
    """Pass on what keeps the client waiting; the document when it is whole, and noted what it says.

    Nothing longer than a result may be is held back, or looked at.
    """
    document = b""
    async with aclosing(body):
        async for piece in body:
            if outcome.is_noted or not isinstance(piece, (bytes, memoryview)):
                yield piece
                continue
            document += piece
            if len(document) > RESULT_SIZE_BYTES_MAX:
                await outcome.note(None)
            if outcome.is_noted or says_nothing_yet(document):
                yield document
                document = b""
    if not outcome.is_noted:
        await outcome.note(etag_of_result(document))
        yield document


class _NotedAtTheEnd:
    """The answer is closed, sent or not: what nobody has read to its end has made who knows what."""

    def __init__(self, outcome: Outcome, resource: Closable | None) -> None:
        self._outcome = outcome
        self._resource = resource

    async def aclose(self) -> None:
        try:
            if self._resource is not None:
                await self._resource.aclose()
        finally:
            if not self._outcome.is_noted:
                await self._outcome.note(None)
