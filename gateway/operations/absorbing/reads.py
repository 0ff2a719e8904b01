"""GetObject and HeadObject of what is pending: read your writes, before the origin has them.

Only what this node knows is answered here: everything that the origin must judge waits for the flush (choosing.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead
from gateway.objects import BodyStream, ByteRange, ObjectVersion
from gateway.operations.exchange import Exchange
from gateway.operations.get_object import asked_range, at_once, encoded_headers, lengths_of, response_overrides
from gateway.operations.reading import asks_for_more, judged_by_the_origin
from gateway.operations.reply import Reply
from gateway.s3.checksums import PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.http_dates import format_http_date
from gateway.s3.requests import S3Request
from gateway.s3.stored_headers import stored_headers
from gateway.s3.xml import part_number
from gateway.writeback.journal.records import PendingObject
from gateway.writeback.reading import FileGone, part_range

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


def is_known_here(request: S3Request) -> bool:
    """Whether a GET or HEAD asks for nothing that only the origin can judge."""
    headers = judged_by_the_origin(request)
    return not asks_for_more(request) and all(name == CHECKSUM_MODE for name in headers)


def get_pending(exchange: Exchange, buffer: WritebackBuffer, pending: PendingObject) -> Reply:
    """The object that was acknowledged last, from its staged files; 404 for a tombstone."""
    overrides = response_overrides(exchange)
    head = _head(exchange, pending)
    reply = at_once(exchange, head, overrides)
    if reply is not None:
        return reply
    asked = head.part or asked_range(exchange.request, head)
    byte_range = asked or ByteRange(0, pending.size_bytes - 1)
    body = _body(exchange, buffer, pending, head.version, byte_range)
    encoded = encoded_headers(head, asked, overrides)
    return Reply(206 if asked else 200, lengths_of(head, asked), body, "hit", encoded=encoded)


def head_pending(exchange: Exchange, buffer: WritebackBuffer, pending: PendingObject) -> Reply:
    """The same without the bytes."""
    overrides = response_overrides(exchange)
    head = _head(exchange, pending)
    reply = at_once(exchange, head, overrides)
    if reply is not None and reply.status == 304:
        return reply
    asked = head.part or asked_range(exchange.request, head)
    encoded = encoded_headers(head, asked, overrides)
    return Reply(206 if asked else 200, lengths_of(head, asked), b"", "hit", encoded=encoded)


def _head(exchange: Exchange, pending: PendingObject) -> ObjectHead:
    if pending.deleted:
        raise s3_error("NoSuchKey", Key=pending.key.key)
    headers = _headers(pending, with_checksums=CHECKSUM_MODE in judged_by_the_origin(exchange.request))
    number = exchange.request.parameter("partNumber")
    if number is not None and "range" in exchange.request.headers:
        raise s3_error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter.")
    part = _part(pending, number) if number is not None else None
    if number is not None and pending.multipart:
        headers["x-amz-mp-parts-count"] = str(len(pending.parts))
    version = ObjectVersion(pending.key, pending.etag, pending.size_bytes)
    return ObjectHead(version, headers, pending.acknowledged_at, part)


def _headers(pending: PendingObject, *, with_checksums: bool) -> dict[str, str]:
    headers = stored_headers(pending.fixed.headers)
    headers |= {"etag": pending.etag, "last-modified": format_http_date(pending.acknowledged_at)}
    if with_checksums:
        checksums: Mapping[str, str] = pending.checksums if pending.multipart else pending.parts[0].checksums
        headers |= {PREFIX + algorithm: value for algorithm, value in checksums.items()}
        if checksums:
            composite = any("-" in value for value in checksums.values())
            headers["x-amz-checksum-type"] = "COMPOSITE" if composite else "FULL_OBJECT"
    return headers


def _part(pending: PendingObject, text: str) -> ByteRange | None:
    number = part_number("partNumber", text)
    try:
        return part_range(pending, number)
    except IndexError:
        raise s3_error("InvalidPartNumber") from None


async def _body(
    exchange: Exchange, buffer: WritebackBuffer, pending: PendingObject, version: ObjectVersion, byte_range: ByteRange
) -> BodyStream:
    """From staged files; what was flushed in the midst of it is in the cache or at the origin, under the same ETag."""
    pieces = buffer.pieces(pending, byte_range)
    try:
        async for piece in pieces:
            yield piece
        return
    except FileGone as gone:
        rest = ByteRange(byte_range.first + gone.read_bytes, byte_range.last)
    finally:
        await pieces.aclose()
    reader = await exchange.services.blocks.open_range(version, rest, slot=exchange.slot.name)
    try:
        body = reader.body()
        try:
            async for left in body:
                yield left
        finally:
            await body.aclose()
    finally:
        await reader.aclose()
