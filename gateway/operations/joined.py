"""HEAD and LIST that the origin answers each time: identical ones share a call (metadata/joined_calls.py)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from gateway.operations.exchange import Exchange
from gateway.operations.passthrough import forward, no_body, onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.operations.reply import Reply
from gateway.origin.client import OriginRequest
from gateway.s3.headers import towards_client, without
from gateway.s3.list_result import PAGE_SIZE_BYTES_MAX

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


async def forward_joined(exchange: Exchange) -> Reply:
    """As `forward`, for a request that changes nothing and whose answer is small."""
    payload = await receive_payload(exchange)
    request = onward_request(exchange, payload)
    if payload.body:
        response = await exchange.services.origin.send(request)
        return streamed_reply(response, head_only=exchange.request.method == "HEAD")

    async def send() -> _Answer | None:
        return await _ask(exchange, request)

    answer = await exchange.services.catalog.joined_calls.ask(_question(request), send)
    if answer is None:
        return await forward(exchange)
    if request.method == "HEAD" or answer.status in (204, 304):
        return Reply(answer.status, answer.headers, no_body(), "forwarded")
    return Reply(answer.status, without(answer.headers, "content-length"), answer.body, "forwarded")


def _question(request: OriginRequest) -> Hashable:
    """Everything that may change the answer. The origin is asked with the gateway's own rights, whoever calls."""
    headers = frozenset(item for item in request.headers.items() if item[0] not in _OF_ONE_CALLER)
    return request.method, request.bucket, request.key, tuple(request.query), headers


async def _ask(exchange: Exchange, request: OriginRequest) -> _Answer | None:
    """None where the answer is too long to be held, or is meant for one client: then each asks for himself."""
    async with await exchange.services.origin.send(request) as response:
        headers = towards_client(response.headers)
        if "set-cookie" in response.headers:
            return None
        if request.method == "HEAD" or response.status in (204, 304):
            return _Answer(response.status, headers, b"")
        with exchange.services.buffers.holding() as held:
            document = bytearray()
            async for piece in response.stream():
                held.grow(len(piece))
                document += piece
                if len(document) > PAGE_SIZE_BYTES_MAX:
                    return None
            return _Answer(response.status, headers, bytes(document))
