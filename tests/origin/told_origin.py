"""An origin that answers as a test tells it, request by request."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.core.clock import Clock, SystemClock
from gateway.origin.client import CredentialSource, HedgeOutcome, OriginSettings
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.origin.traffic_meter import Attempt, RequestRateLimits
from tests.origin.origins import STRICT_PAIR
from tests.support.connections import answering

NONE: dict[str, object] = {"first_byte_timeout_seconds": 0.5, "stall_timeout_seconds": 0.5}
"""No patience: for an origin that is to be found silent."""


@dataclass(slots=True)
class Request:
    """The head of a request, its body read; lower-case header names."""

    number: int
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Exchange = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]
"""What is answered. When it returns, the next request may come."""


@dataclass(slots=True)
class ToldOrigin:
    """`origin` is a client of it, `requests` what has come, `outcomes` what became of hedges."""

    origin: S3Origin
    port: int
    requests: list[Request] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    outcomes: list[HedgeOutcome] = field(default_factory=list)
    exchange: Exchange | None = None

    def of(self, method: str) -> list[Request]:
        return [request for request in self.requests if request.method == method]


async def forever(*_: object) -> None:
    """Say nothing."""
    await asyncio.get_running_loop().create_future()


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


@dataclass(frozen=True, slots=True)
class Reach:
    """How a client reaches a told origin, and whose key it signs with."""

    url: str = "http://127.0.0.1:{port}"
    tls: ssl.SSLContext | None = None
    credentials: Callable[[], CredentialSource] = lambda: StaticCredentials(STRICT_PAIR)
    rates: RequestRateLimits | None = None
    patience_seconds: float = 60.0
    clock: Callable[[], Clock] = SystemClock


@asynccontextmanager
async def told_origin(
    exchange: Exchange, reach: Reach | None = None, /, **settings: object
) -> AsyncIterator[ToldOrigin]:
    """A server, and a client that has patience with it: a busy machine is no silent origin. `settings` may say NONE."""
    reach = reach or Reach()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await _request(reader, writer, len(told.requests) + 1)
            told.requests.append(request)
            assert told.exchange is not None
            await told.exchange(request, writer)
            await writer.drain()

    given: dict[str, object] = {
        "first_byte_timeout_seconds": 20.0,
        "stall_timeout_seconds": 20.0,
        "max_attempts": 1,
        **settings,
    }
    told: ToldOrigin
    async with answering(serve, ssl=reach.tls) as port:
        if isinstance(proxy := given.get("proxy"), str):
            given["proxy"] = proxy.format(port=port)
        origin = S3Origin(
            OriginSettings(endpoint_url=reach.url.format(port=port), **given),  # type: ignore[arg-type]
            reach.credentials(),
            reach.clock(),
            instance_id="gateway-1",
            on_attempt=lambda attempt: told.attempts.append(attempt),
            on_hedge=lambda outcome: told.outcomes.append(outcome),
            rates=reach.rates,
        )
        told = ToldOrigin(origin, port, exchange=exchange)
        try:
            async with asyncio.timeout(reach.patience_seconds):
                yield told
        finally:
            await origin.aclose()


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    fields = [line.partition(": ") for line in lines if line]
    headers = {name.lower(): value for name, _, value in fields}
    if "expect" in headers:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(number, method, target, headers, body)
