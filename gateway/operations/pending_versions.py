"""Reads of pending objects: the version that was acknowledged last, before the origin has it.

This node answers only from its own knowledge; what the origin must judge waits for the flush (router.py).
`x-forebay-durable` tells readers of the object that marks a checkpoint complete whether the origin has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace

from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.blocks.plan import Outcome
from gateway.core.errors import OriginBodyError
from gateway.core.model import BodyStream, ByteRange, ObjectVersion
from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead
from gateway.operations.context import Answer, RequestContext, Response, changed
from gateway.operations.current_versions import CurrentVersions
from gateway.operations.read_wishes import judged_by_the_origin, must_bypass
from gateway.origin.peer_protocol import DURABLE
from gateway.s3.checksums import PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import EncodedHeaders, format_http_date, stored_headers, without
from gateway.s3.requests import S3Request, part_number
from gateway.writeback.journal.records import State, Write
from gateway.writeback.order import is_marker
from gateway.writeback.pending_reader import FileGone, part_range


def is_answered_here(request: S3Request) -> bool:
    """Return whether a GET or HEAD asks for nothing that only the origin can judge."""
    headers = judged_by_the_origin(request)
    return not must_bypass(request) and all(name == CHECKSUM_MODE for name in headers)


class PendingVersions(CurrentVersions):
    """A pending object, which is the current version, from its staged files; 404 for a tombstone."""

    def __init__(self, context: RequestContext, pending: Write) -> None:
        super().__init__(context)
        self._pending = pending

    def must_forward(self) -> bool:
        return False

    def known(self) -> ObjectHead:
        pending, request = self._pending, self.context.request
        if pending.deleted:
            raise s3_error("NoSuchKey", Key=pending.key.key)
        number = request.parameter("partNumber")
        # A checksum of the whole says nothing of a part.
        headers = _headers(pending, with_checksums=CHECKSUM_MODE in self.headers and number is None)
        if number is not None and "range" in request.headers:
            raise s3_error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter.")
        part = _part(pending, number) if number is not None else None
        if number is not None and pending.multipart:
            headers["x-amz-mp-parts-count"] = str(pending.parts_count)
        version = ObjectVersion(pending.key, pending.etag, pending.size_bytes)
        return ObjectHead(version, headers, pending.acknowledged_at, part)

    def is_served(self, head: ObjectHead) -> bool:
        return True

    async def open(self, head: ObjectHead, byte_range: ByteRange, answer: UnpinnedResponse | None) -> _StagedReader:
        """Read the first bytes. FileGone if the object was flushed or overwritten meanwhile: begin the answer anew."""
        reader = _StagedReader(self.context, self._pending, byte_range)
        await reader.start()
        return reader


def _headers(pending: Write, *, with_checksums: bool) -> dict[str, str]:
    headers = stored_headers(pending.spec.headers)
    headers |= {"etag": pending.etag, "last-modified": format_http_date(pending.acknowledged_at)}
    if with_checksums:
        checksums: Mapping[str, str] = pending.checksums
        headers |= {PREFIX + algorithm: value for algorithm, value in checksums.items()}
        if checksums:
            headers["x-amz-checksum-type"] = type_of_checksums(checksums)
    return headers


def type_of_checksums(checksums: Mapping[str, str]) -> str:
    """Return S3's name of the type of an object's checksums: those of parts' checksums end with `-N`."""
    return "COMPOSITE" if any("-" in value for value in checksums.values()) else "FULL_OBJECT"


def _part(pending: Write, text: str) -> ByteRange | None:
    number = part_number("partNumber", text)
    try:
        return part_range(pending, number)
    except IndexError:
        raise s3_error("InvalidPartNumber") from None


class _StagedReader:
    """A range from staged files; the part that was flushed meanwhile is cached, or at the origin, as that version."""

    def __init__(self, context: RequestContext, pending: Write, byte_range: ByteRange) -> None:
        self._context = context
        self._pending = pending
        self._range = byte_range
        self._pieces = context.buffer.pieces(pending, byte_range)
        self._first = memoryview(b"")

    async def start(self) -> None:
        self._first = await anext(self._pieces)

    @property
    def outcome(self) -> Outcome:
        return "hit"

    def why_missing(self, before: ObjectVersion | None) -> None:
        """Return None: all of it is here."""

    def whole(self) -> None:
        """Return None: staged files are verified as they are read, and sent in no other way."""

    def file_failed(self, error: Exception) -> None:
        """Do nothing: no file is sent."""

    async def body(self) -> BodyStream:
        async with aclosing(self._pieces) as pieces:
            try:
                yield self._first
                async for piece in pieces:
                    yield piece
                return
            except FileGone as gone:
                rest = ByteRange(self._range.first + gone.read_bytes, self._range.last)
        version, slot = self._at_origin(), self._context.slot.name
        reader = await self._context.services.blocks.open_range(version, rest, slot=slot)
        async with aclosing(reader), aclosing(reader.body()) as body:
            async for left in body:
                yield left

    def _at_origin(self) -> ObjectVersion:
        """Return the version as the origin got it. OriginBodyError if it was overwritten here and never sent."""
        pending, buffer = self._pending, self._context.buffer
        own = buffer.look(lambda tx: tx.buckets.last_own_write(pending.key))
        if own is not None and own.etag is not None and own.answered == pending.etag:
            return ObjectVersion(pending.key, own.etag, pending.size_bytes)
        latest = buffer.pending(pending.key)
        if pending.state is State.LOCAL or (latest is not None and latest.id != pending.id):
            raise OriginBodyError(f"{pending.key} was overwritten here while it was read")
        return ObjectVersion(pending.key, pending.etag, pending.size_bytes)

    async def aclose(self) -> None:
        await self._pieces.aclose()


_DURABLE_LINE = re.compile(rb"(?m)^x-forebay-durable: ([^\r]{0,64})\r\n")


def tells_durability(context: RequestContext) -> bool:
    slot = context.slot
    return slot.write == "scratch" or (slot.is_buffered and is_marker(context.request.key or "", slot.markers))


def with_durability(answer: Answer, *, is_durable: bool) -> Answer:
    """Add the header to the answer if there is an object."""

    def told(response: Response) -> Response:
        if response.status >= 400:
            return response
        said = [value for name, value in response.headers if name == DURABLE]  # the origin may be a gateway, too
        said += [value.decode("latin-1") for value in _DURABLE_LINE.findall(response.encoded.lines)]
        value = "true" if is_durable and "false" not in said else "false"
        encoded = EncodedHeaders(_DURABLE_LINE.sub(b"", response.encoded.lines))
        headers = [*without(response.headers, DURABLE), (DURABLE, value)]
        return replace(response, headers=headers, encoded=encoded)

    return changed(answer, told)
