"""Forwarding: the request goes to the origin re-signed and otherwise unchanged, the answer comes back as it is.

`is_plain` decides which questions about a bucket need no forwarding. Identical HEAD and LIST requests share a call
(metadata/joined_calls.py). CompleteMultipartUpload, at the end, makes up for two habits of origins: Ceph's RGW may
answer with an empty ETag, where the client gets the one that HEAD shows; and an answer may be lost after the origin has
done its work, which the ETag at the origin, as it follows from the parts, then shows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

from gateway.core.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.core.model import BodyStream
from gateway.core.steps import in_steps
from gateway.operations.context import CacheLabel, RequestContext, Response, xml_response
from gateway.operations.payload import Payload, receive_document, receive_payload
from gateway.operations.visibility import changed_by, with_invalidation
from gateway.origin.client import OriginRequest, OriginResponse, Purpose, StreamedBody
from gateway.s3.headers import filter_request_headers, filter_response_headers, multipart_etag, without
from gateway.s3.list_result import PAGE_SIZE_BYTES_MAX
from gateway.s3.requests import S3Request, strip_signature_parameters
from gateway.s3.xml import (
    COMPLETE_SIZE_BYTES_MAX,
    RESULT_SIZE_BYTES_MAX,
    complete_multipart_upload_result,
    parse_complete_multipart_upload,
    says_nothing_yet,
)

_CHANGES_NOTHING = frozenset(
    {
        "x-amz-api-version",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-security-token",
        "x-amz-te",
        "x-amz-user-agent",
        "x-amzn-trace-id",
        "x-forebay-hop",
    }
)
"""Headers beginning with `x-` that change no origin's answer; every other one is the origin's to judge."""


def is_plain(request: S3Request, *, besides: frozenset[str] = frozenset()) -> bool:
    """Tell whether a request has no body, and no headers beside `besides` that are for the origin to judge."""
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        return False
    # CORS rules of the bucket, and conditions that servers treat differently, are the origin's, too.
    judged = [name for name in request.headers if name.startswith(("if-", "x-")) or name in ("origin", "range")]
    return not set(judged) - _CHANGES_NOTHING - besides


_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/")

_WITHOUT_BODY = frozenset({204, 304})
"""RFC 9110, 6.4.1: answers with these end with the head, whatever Content-Length says."""


async def forward(
    context: RequestContext, *, cache: CacheLabel = "forwarded", payload: Payload | None = None
) -> Response:
    """Send the client's request on and stream the answer back, whatever its status. `payload`: a received body."""
    payload = payload or await receive_payload(context)
    request = onward_request(context, payload)
    response = handed_on(context, request, await context.services.origin.send(request))
    return streamed_reply(response, head_only=context.request.method == "HEAD", cache=cache)


def handed_on(context: RequestContext, request: OriginRequest, response: OriginResponse) -> OriginResponse:
    """Return an answer that the client gets; no absence of an object that it shows is believed afterwards."""
    context.services.catalog.answered(request, response.status, context.slot)
    return response


async def forward_write(context: RequestContext, payload: Payload | None = None) -> Response:
    """Forward a request that changes an object, and forget the cached facts about it. `payload` as in `forward`.

    They are forgotten after the origin's answer, so a reader that starts after the client's 200 sees the change.
    """
    reply = await with_invalidation(changed_by(context), forward(context, payload=payload))
    if context.request.bucket is not None and context.request.key is not None:
        await context.services.blocks.invalidate(context.object_key)
    return reply


def onward_request(
    context: RequestContext,
    payload: Payload,
    *,
    headers: Mapping[str, str] | None = None,
    query: Sequence[tuple[str, str | None]] | None = None,
) -> OriginRequest:
    """Return the client's request for the origin, unsigned, in the caller's own name if the origin judges callers."""
    request = context.request
    onward_headers = filter_request_headers(request.headers) if headers is None else dict(headers)
    onward_headers.update(payload.headers)
    return OriginRequest(
        request.method,
        request.bucket,
        request.key,
        strip_signature_parameters(request.query) if query is None else query,
        onward_headers,
        payload.body,
        Purpose.FORWARD,
        context.slot.name,
        signed_by=context.signed_by,
    )


def streamed_reply(response: OriginResponse, *, head_only: bool, cache: CacheLabel | None = "forwarded") -> Response:
    """Return the origin's answer, streamed as it comes."""
    headers = filter_response_headers(response.headers)
    if head_only or response.status in _WITHOUT_BODY:
        if response.status in _WITHOUT_BODY:
            headers = without(headers, "content-length")
        return Response(response.status, headers, no_body(), cache, response)
    return Response(response.status, headers, _body(response), cache, response)


async def _body(response: OriginResponse) -> BodyStream:
    """Yield the body. OriginBodyError if it has another length than its Content-Range says.

    With a Content-Length, the connection's reader knows where it ends.
    """
    length_bytes = None if "content-length" in response.headers else _length_of_range(response)
    count = 0
    async for piece in response.stream():
        count += len(piece)
        yield piece
    if length_bytes not in (None, count):
        raise OriginBodyError(f"the origin's answer has {count} bytes, and its Content-Range {length_bytes}")


def _length_of_range(response: OriginResponse) -> int | None:
    found = _RANGE.match(response.headers.get("content-range", "")) if response.status == 206 else None
    return int(found[2]) - int(found[1]) + 1 if found is not None else None


async def no_body() -> BodyStream:
    """Return the empty body of an answer that is only a head, whatever its Content-Length says."""
    return
    yield b""


_OF_ONE_CALLER = frozenset(
    {
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-amz-user-agent",
        "x-amzn-trace-id",
    }
)
"""Headers that identify the caller or the attempt, and change no answer."""


class _PassedAnswer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


_OF_PREFLIGHTS = ("origin", "access-control-request-method", "access-control-request-headers")


async def forward_preflight(context: RequestContext) -> Response:
    """Let the bucket's own rules decide what a page may do. The request is unsigned: nothing else of it is sent on."""
    headers = {name: value for name, value in context.request.headers.items() if name in _OF_PREFLIGHTS}
    return await _joined(context, onward_request(context, Payload(), headers=headers, query=[]))


async def forward_joined(context: RequestContext) -> Response:
    """Forward, as `forward`, a request that changes nothing and has a small answer."""
    payload = await receive_payload(context)
    return await _joined(context, onward_request(context, payload))


async def _joined(context: RequestContext, request: OriginRequest) -> Response:
    # Everything that may change the answer:
    headers = frozenset(item for item in request.headers.items() if item[0] not in _OF_ONE_CALLER)
    question = request.method, request.bucket, request.key, tuple(request.query), headers, request.signed_by
    joined = context.services.catalog.joined_calls
    answer = None if request.body else await joined.ask(question, lambda: _ask(context, request))
    if answer is None:
        response = handed_on(context, request, await context.services.origin.send(request))
        return streamed_reply(response, head_only=request.method == "HEAD")
    if request.method == "HEAD" or answer.status in _WITHOUT_BODY:
        return Response(answer.status, answer.headers, no_body(), "forwarded")
    return Response(answer.status, without(answer.headers, "content-length"), answer.body, "forwarded")


async def _ask(context: RequestContext, request: OriginRequest) -> _PassedAnswer | None:
    """Ask; return None if the answer is too long to hold, or meant for one client: then each caller asks."""
    async with handed_on(context, request, await context.services.origin.send(request)) as response:
        headers = filter_response_headers(response.headers)
        if "set-cookie" in response.headers or response.headers.get("content-type", "").startswith("text/event-"):
            return None
        if request.method == "HEAD" or response.status in _WITHOUT_BODY:
            return _PassedAnswer(response.status, headers, b"")
        with context.services.buffers.holding() as grow:
            document = bytearray()
            async for piece in response.stream():
                grow(len(piece))
                document += piece
                if len(document) > PAGE_SIZE_BYTES_MAX:
                    return None
            return _PassedAnswer(response.status, headers, bytes(document))


_EMPTY_ETAG = re.compile(rb"<ETag\s*+/>|<ETag>\s*+(?:(?:&quot;&quot;|\"\")\s*+)?</ETag>")


async def complete_multipart_upload(context: RequestContext) -> Response:
    return await with_invalidation(changed_by(context), _complete(context))


async def _complete(context: RequestContext) -> Response:
    document = await receive_document(context, COMPLETE_SIZE_BYTES_MAX)
    parts = await in_steps(parse_complete_multipart_upload(document))
    context.made_of = [part.etag for part in parts]

    async def in_one_piece() -> AsyncIterator[bytes]:
        yield document

    # Sent once: a second attempt of a Complete that was carried out would be answered NoSuchUpload.
    body = StreamedBody(in_one_piece(), len(document), hashlib.sha256(document).hexdigest())
    try:
        response = await context.services.origin.send(onward_request(context, Payload(body)))
    except OriginUnreachable as error:
        return await _decide_by_etag(context, error)
    finally:
        await context.services.blocks.invalidate(context.object_key)
    if response.status != 200:
        return streamed_reply(response, head_only=False)
    return await _completed(context, response)


async def _completed(context: RequestContext, response: OriginResponse) -> Response:
    headers = without(filter_response_headers(response.headers), "content-length")
    if "content-length" not in response.headers:
        return Response(200, headers, _long_answer(context, response), "forwarded", response)
    async with response:
        document = await response.read(RESULT_SIZE_BYTES_MAX)
    return Response(200, headers, await _with_etag(context, document), "forwarded")


async def _long_answer(context: RequestContext, response: OriginResponse) -> BodyStream:
    """Pass on the white space that keeps the client waiting, then the document."""
    document = b""
    async for piece in response.stream():
        document += piece
        if len(document) > RESULT_SIZE_BYTES_MAX:
            raise OriginBodyError("the answer to CompleteMultipartUpload is too long")
        if says_nothing_yet(document):
            yield document
            document = b""
    yield await _with_etag(context, document)


async def _with_etag(context: RequestContext, document: bytes) -> bytes:
    if not _EMPTY_ETAG.search(document):
        return document
    etag = await _etag_at_origin(context)
    return _EMPTY_ETAG.sub(b"<ETag>" + etag.replace('"', "&quot;").encode("latin-1") + b"</ETag>", document)


async def _decide_by_etag(context: RequestContext, lost: OriginUnreachable) -> Response:
    """Answer after a lost answer: done if the object at the origin is made of exactly these parts."""
    expected = multipart_etag(context.made_of)
    found = await _etag_at_origin(context)
    if expected is None or found != expected:
        raise lost
    key = context.object_key
    return xml_response(complete_multipart_upload_result(key.bucket, key.key, found), "forwarded")


async def _etag_at_origin(context: RequestContext) -> str:
    try:
        head = await context.services.catalog.ask(context.object_key, context.slot, headers={})
    except OriginAnswered:
        return ""
    return head.version.etag
