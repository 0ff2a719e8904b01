"""Forwarding: the request goes to the origin re-signed and otherwise unchanged, the answer comes back as it is.

`is_plain` tells which questions about a bucket need not be forwarded. Identical HEAD and LIST requests share a call
(metadata/joined_calls.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from gateway.core.model import BodyStream
from gateway.operations.context import CacheLabel, RequestContext, Response
from gateway.operations.payload import Payload, receive_payload
from gateway.operations.visibility import changed_by, with_invalidation
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.s3.headers import filter_request_headers, filter_response_headers, without
from gateway.s3.list_result import PAGE_SIZE_BYTES_MAX
from gateway.s3.presigned import strip_signature_parameters
from gateway.s3.requests import S3Request

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
"""Headers beginning with `x-` that no origin answers differently for; every other one is the origin's to judge."""


def is_plain(request: S3Request, *, besides: frozenset[str] = frozenset()) -> bool:
    """Whether method, bucket and query are all there is to it, but for the headers `besides`.

    What has a body is for the origin.
    """
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        return False
    return not any(_is_judged_by_the_origin(name) for name in request.headers if name not in besides)


def _is_judged_by_the_origin(header: str) -> bool:
    if header in ("origin", "range") or header.startswith("if-"):
        return True  # the bucket's CORS rules, and conditions that servers take seriously or not
    return header.startswith("x-") and header not in _CHANGES_NOTHING


READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_WITHOUT_BODY = frozenset({204, 304})
"""RFC 9110, 6.4.1: their answers end with the head, whatever Content-Length says."""


async def forward(
    context: RequestContext, *, cache: CacheLabel = "forwarded", payload: Payload | None = None
) -> Response:
    """Send the client's request on and stream the answer back, whatever its status. `payload`: where it was received
    already."""
    payload = payload or await receive_payload(context)
    response = await context.services.origin.send(onward_request(context, payload))
    return streamed_reply(response, head_only=context.request.method == "HEAD", cache=cache)


async def forward_write(context: RequestContext, payload: Payload | None = None) -> Response:
    """Forward a request that changes an object, and forget what is known of it. `payload` as in `forward`.

    The origin has answered when catalog and cache are told, so a reader that starts after the client's 200 sees it.
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
    """The client's request as the origin gets it: without the client's signature, unsigned as yet. In the caller's own
    name where the origin is to judge the caller."""
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
    """The origin's answer, streamed as it comes."""
    headers = filter_response_headers(response.headers)
    if head_only or response.status in _WITHOUT_BODY:
        if response.status in _WITHOUT_BODY:
            headers = without(headers, "content-length")
        return Response(response.status, headers, no_body(), cache, response)
    return Response(response.status, headers, _body(response), cache, response)


async def _body(response: OriginResponse) -> BodyStream:
    async for piece in response.stream():
        yield piece


async def no_body() -> BodyStream:
    """The body of an answer that is a head only, whatever its Content-Length says."""
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
"""Headers that say who asks, or how often, and change no answer."""


class _Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


_OF_PREFLIGHTS = ("origin", "access-control-request-method", "access-control-request-headers")


async def forward_preflight(context: RequestContext) -> Response:
    """Have the bucket's own rules say what a page may do. Nobody has signed this: nothing else of it goes on."""
    headers = {name: value for name, value in context.request.headers.items() if name in _OF_PREFLIGHTS}
    return await _joined(context, onward_request(context, Payload(), headers=headers, query=[]))


async def forward_joined(context: RequestContext) -> Response:
    """As `forward`, for a request that changes nothing and whose answer is small."""
    payload = await receive_payload(context)
    return await _joined(context, onward_request(context, payload))


async def _joined(context: RequestContext, request: OriginRequest) -> Response:
    if request.body:
        response = await context.services.origin.send(request)
        return streamed_reply(response, head_only=context.request.method == "HEAD")

    async def send() -> _Answer | None:
        return await _ask(context, request)

    answer = await context.services.catalog.joined_calls.ask(_question(request), send)
    if answer is None:
        response = await context.services.origin.send(request)
        return streamed_reply(response, head_only=request.method == "HEAD")
    if request.method == "HEAD" or answer.status in (204, 304):
        return Response(answer.status, answer.headers, no_body(), "forwarded")
    return Response(answer.status, without(answer.headers, "content-length"), answer.body, "forwarded")


def _question(request: OriginRequest) -> Hashable:
    """Everything that may change the answer."""
    headers = frozenset(item for item in request.headers.items() if item[0] not in _OF_ONE_CALLER)
    return request.method, request.bucket, request.key, tuple(request.query), headers, request.signed_by


async def _ask(context: RequestContext, request: OriginRequest) -> _Answer | None:
    """None where the answer is too long to be held, or is meant for one client: then each asks for himself."""
    async with await context.services.origin.send(request) as response:
        headers = filter_response_headers(response.headers)
        if "set-cookie" in response.headers or response.headers.get("content-type", "").startswith("text/event-"):
            return None
        if request.method == "HEAD" or response.status in (204, 304):
            return _Answer(response.status, headers, b"")
        with context.services.buffers.holding() as held:
            document = bytearray()
            async for piece in response.stream():
                held.grow(len(piece))
                document += piece
                if len(document) > PAGE_SIZE_BYTES_MAX:
                    return None
            return _Answer(response.status, headers, bytes(document))
