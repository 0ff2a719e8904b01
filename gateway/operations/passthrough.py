"""Forwarding: the request goes to the origin re-signed and otherwise unchanged, the answer comes back as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.objects import BodyStream
from gateway.operations.exchange import Exchange
from gateway.operations.payload import Payload, receive_payload
from gateway.operations.reply import CacheLabel, Reply
from gateway.operations.visibility import changed_by, with_invalidation
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.s3.headers import towards_client, towards_origin, without
from gateway.s3.presigned import strip_signature_parameters

READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_WITHOUT_BODY = frozenset({204, 304})
"""RFC 9110, 6.4.1: their answers end with the head, whatever Content-Length says."""


async def forward(exchange: Exchange, *, cache: CacheLabel = "forwarded") -> Reply:
    """Send the client's request on and stream the answer back, whatever its status."""
    payload = await receive_payload(exchange)
    response = await exchange.services.origin.send(onward_request(exchange, payload))
    return streamed_reply(response, head_only=exchange.request.method == "HEAD", cache=cache)


async def forward_write(exchange: Exchange) -> Reply:
    """Forward a request that changes an object, and forget what is known of it.

    The origin has answered when catalog and cache are told, so a reader that starts after the client's 200 sees it.
    """
    reply = await with_invalidation(changed_by(exchange), forward(exchange))
    if exchange.request.bucket is not None and exchange.request.key is not None:
        await exchange.services.blocks.invalidate(exchange.object_key)
    return reply


async def passthrough(exchange: Exchange) -> Reply:
    """Every operation that Forebay does not handle itself."""
    if exchange.request.method in READ_METHODS:
        return await forward(exchange)
    return await forward_write(exchange)


def onward_request(
    exchange: Exchange,
    payload: Payload,
    *,
    headers: Mapping[str, str] | None = None,
    query: Sequence[tuple[str, str | None]] | None = None,
) -> OriginRequest:
    """The client's request as the origin gets it: without the client's signature, unsigned as yet."""
    request = exchange.request
    onward_headers = towards_origin(request.headers) if headers is None else dict(headers)
    onward_headers.update(payload.headers)
    return OriginRequest(
        request.method,
        request.bucket,
        request.key,
        strip_signature_parameters(request.query) if query is None else query,
        onward_headers,
        payload.body,
        Purpose.FORWARD,
        exchange.slot.name,
    )


def streamed_reply(response: OriginResponse, *, head_only: bool, cache: CacheLabel | None = "forwarded") -> Reply:
    """The origin's answer, streamed as it comes."""
    headers = towards_client(response.headers)
    if head_only or response.status in _WITHOUT_BODY:
        if response.status in _WITHOUT_BODY:
            headers = without(headers, "content-length")
        return Reply(response.status, headers, no_body(), cache, response)
    return Reply(response.status, headers, _body(response), cache, response)


async def _body(response: OriginResponse) -> BodyStream:
    async for piece in response.stream():
        yield piece


async def no_body() -> BodyStream:
    """The body of an answer that is a head only, whatever its Content-Length says."""
    return
    yield b""
