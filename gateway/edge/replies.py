"""Sending a Reply: the head, then bytes, or file spans that never pass through this process's memory."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, get_args

from gateway.edge.request_record import RequestRecord
from gateway.edge.server.cycle import LENT, RESPONSE, SPAN, ZERO_COPY
from gateway.edge.server.response_head import Response
from gateway.objects import BodyStream, FileSpan, HeldSpan, LentBytes
from gateway.operations.context import CacheLabel, Reply

COPIED_BYTES = 64 * 1024
"""What is sent at once of lent bytes where `LENT` is not to be had: a client that reads slowly keeps a copy of it."""

READ_SIZE_BYTES = 1024**2
"""How much of a file is read at once where zero-copy sending is not to be had (TLS, other servers)."""

READS_MAX = 3
"""Each is lost to a file whose bytes leave memory while they are read."""

_SERVER = (b"server", b"Forebay")
_IDENTITY = b"server: Forebay\r\nx-amz-request-id: %b\r\nx-amz-id-2: forebay/%b\r\n"
_CACHE: Mapping[str, bytes] = {name: b"x-forebay-cache: %b\r\n" % name.encode() for name in get_args(CacheLabel)}

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def whole_response(reply: Reply, scope: Scope, record: RequestRecord) -> Response | None:
    """The answer, where the server takes all of it at once: nothing is to be waited for before it is sent."""
    extensions, body = scope.get("extensions") or {}, reply.body
    if RESPONSE not in extensions:
        return None
    if isinstance(body, (bytes, memoryview)):
        return _response(reply, record, body)
    if isinstance(body, HeldSpan) and ZERO_COPY in extensions:
        return _response(reply, record, body.span)
    return None


async def send_reply(reply: Reply, scope: Scope, send: Send, record: RequestRecord) -> None:
    """Send the whole answer, and count its body in `record.sent_bytes`. The caller closes the reply."""
    extensions = scope.get("extensions") or {}
    if RESPONSE in extensions:
        await send({"type": RESPONSE, "response": _response(reply, record, None)})
    else:
        await send(_start(reply, record))
    body = reply.body
    if isinstance(body, (bytes, memoryview)):
        body = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": body})
        record.sent_bytes = len(body)
        return
    if isinstance(body, HeldSpan):
        await _send_span_through_memory(body.span, send)
        record.sent_bytes = body.span.count
    else:
        await _send_stream(body, send, record, zero_copy=ZERO_COPY in extensions, lending=LENT in extensions)
    await send({"type": "http.response.body", "body": b""})


def _response(reply: Reply, record: RequestRecord, body: Any) -> Response:
    headers = own_fields(reply)
    if not record.body_complete:
        headers.append((b"connection", b"close"))
    return Response(reply.status, headers, ready_lines(reply, record.request_id), body, content_length(reply))


def _start(reply: Reply, record: RequestRecord) -> dict[str, Any]:
    """The same for servers that know nothing but ASGI."""
    headers, length = own_fields(reply) + _ready_pairs(reply, record.request_id), content_length(reply)
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    if not record.body_complete:
        headers.append((b"connection", b"close"))
    return {"type": "http.response.start", "status": reply.status, "headers": headers}


def ready_lines(reply: Reply, request_id: str) -> bytes:
    """The fields of an answer's head that a server need not look at, as lines."""
    encoded_id = request_id.encode()
    cache = _CACHE[reply.cache] if reply.cache is not None else b""
    return b"".join((reply.encoded.lines, _IDENTITY % (encoded_id, encoded_id), cache))


def _ready_pairs(reply: Reply, request_id: str) -> list[tuple[bytes, bytes]]:
    """The same as pairs."""
    encoded_id = request_id.encode()
    pairs = [
        *reply.encoded.pairs,
        _SERVER,
        (b"x-amz-request-id", encoded_id),
        (b"x-amz-id-2", b"forebay/" + encoded_id),
    ]
    if reply.cache is not None:
        pairs.append((b"x-forebay-cache", reply.cache.encode()))
    return pairs


def own_fields(reply: Reply) -> list[tuple[bytes, bytes]]:
    """The fields that belong to this answer alone, as its handler gave them."""
    headers = reply.headers  # most often there are none, and even an empty comprehension costs something
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers] if headers else []


def content_length(reply: Reply) -> int | None:
    """What Content-Length is to say, where it is not among the answer's own fields."""
    if reply.length_bytes is not None:
        return reply.length_bytes
    if not isinstance(reply.body, (bytes, memoryview)) or reply.status in (204, 304):
        return None
    return None if any(name == "content-length" for name, _ in reply.headers) else len(reply.body)


async def _send_stream(
    stream: BodyStream, send: Send, record: RequestRecord, *, zero_copy: bool, lending: bool
) -> None:
    async for piece in stream:
        if isinstance(piece, LentBytes):
            await (_send_lent(piece, send) if lending else _send_copied(piece, send))
            record.sent_bytes += piece.taken
            continue
        if not isinstance(piece, FileSpan):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            record.sent_bytes += len(piece)
            continue
        if zero_copy:
            await _send_span(piece, send, more_body=True)
        else:
            await _send_span_through_memory(piece, send)
        record.sent_bytes += piece.count


async def _send_lent(lent: LentBytes, send: Send) -> None:
    await send({"type": LENT, "bytes": lent})


async def _send_copied(lent: LentBytes, send: Send) -> None:
    copied = bytes(lent.content[:COPIED_BYTES])
    lent.taken = len(copied)
    lent.content.release()
    await send({"type": "http.response.body", "body": copied, "more_body": True})


async def _send_span(span: FileSpan, send: Send, *, more_body: bool) -> None:
    await send(
        {
            "type": ZERO_COPY,
            "file": span.descriptor,
            "offset": span.offset,
            "count": span.count,
            SPAN: span,
            "more_body": more_body,
        }
    )


async def _send_span_through_memory(span: FileSpan, send: Send) -> None:
    offset, stop = span.offset, span.offset + span.count
    while offset < stop:
        data = await _in_memory(span, offset, min(READ_SIZE_BYTES, stop - offset))
        offset += len(data)
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _in_memory(span: FileSpan, offset: int, count: int) -> bytes | memoryview:
    """The first bytes of a part of a span, as they were checked."""
    file = span.file
    for _ in range(READS_MAX):
        if file is None or file.intact(offset, count):
            data = os.pread(span.descriptor, count, offset)
            if len(data) == count and (file is None or file.intact(offset, count)):
                return data
        restored = await file.restore(offset, count) if file is not None else None
        if restored is not None:
            return restored
    raise OSError(f"{count} bytes at {offset} of a block file cannot be read")
