"""A server that says exactly what a test has written down, and a pool of connections to it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.origin.http1_client.client import Claim, Endpoint, Pool
from gateway.origin.http1_client.connection import Supervision
from gateway.origin.http1_client.response_stream import ResponseStream
from tests.support.connections import answering

REQUEST = b"GET /bucket/key HTTP/1.1\r\nhost: origin\r\n\r\n"

Exchange = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What happens behind the head of a request. When it returns, the next request may come."""


class RawOrigin:
    """`connections` counts those that were made, `requests` the heads that came whole."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._open = AsyncExitStack()
        self.connections = 0
        self.requests: list[bytes] = []

    async def start(self) -> Endpoint:
        return Endpoint("127.0.0.1", await self._open.enter_async_context(answering(self._serve)), tls=False)

    async def stop(self) -> None:
        await self._open.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while not writer.is_closing():
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            await self._exchange(reader, writer)


def saying(*parts: bytes, then_close: bool = False) -> Exchange:
    """An exchange that writes `parts` one after the other, each when the one before is on its way."""

    async def exchange(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()

    return exchange


class Client:
    """A pool, and the one origin that it is asked for."""

    def __init__(self, endpoint: Endpoint, pool: Pool, origin: RawOrigin, supervision: Supervision) -> None:
        self.supervision = supervision
        self.endpoint = endpoint
        self.pool = pool
        self.origin = origin

    async def ask(self, *, bodiless: bool = False) -> ResponseStream:
        """The answer, begun. It must be closed."""
        connection = await self.pool.take(self.endpoint, Claim())
        answer = connection.ask(REQUEST, self.supervision, bodiless=bodiless)
        await answer.begun()
        return answer

    async def body(self, *, bodiless: bool = False) -> bytes:
        answer = await self.ask(bodiless=bodiless)
        try:
            return b"".join([piece async for piece in pieces(answer)])
        finally:
            answer.close()


async def pieces(answer: ResponseStream) -> AsyncIterator[bytes]:
    while piece := await answer.piece():
        yield piece


@asynccontextmanager
async def client(
    exchange: Exchange, *, connections_max: int = 8, silence_seconds_max: float = 10.0
) -> AsyncIterator[Client]:
    """An origin, and a pool of its own."""
    origin = RawOrigin(exchange)
    endpoint = await origin.start()
    pool = Pool(
        connections_max,
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        connect_seconds_max=5.0,
        wait_seconds_max=5.0,
    )
    try:
        async with asyncio.timeout(20):
            yield Client(endpoint, pool, origin, Supervision(silence_seconds_max, silence_seconds_max))
    finally:
        await pool.aclose()
        await origin.stop()
