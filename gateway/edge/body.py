"""The request body as ASGI hands it over."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from gateway.edge.request_record import CountedBody
from gateway.edge.server.receiving import BodyDrain, ReceiveThreads
from gateway.errors import ClientDisconnected
from gateway.operations.context import Sink

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
ReceiveInto = Callable[[Sink], Awaitable[None]]


class NoBody:
    """The body of a request that is known to have none."""

    length_bytes = 0
    complete = True
    received_bytes = 0

    async def read(self) -> bytes:
        return b""

    async def receive(self, sink: Sink) -> None:
        return


NO_BODY = NoBody()


def request_body(headers: Mapping[str, str], receive: Receive, receive_into: ReceiveInto | None) -> CountedBody:
    """The body of a request with these headers."""
    if "content-length" not in headers and "transfer-encoding" not in headers:
        return NO_BODY
    return AsgiRequestBody(receive, headers, receive_into)


class AsgiRequestBody:
    """Reads `http.request` events. The first read makes the server answer `Expect: 100-continue`.

    `receive_into` is what our own server offers beside them (server/receiving.py).
    """

    def __init__(self, receive: Receive, headers: Mapping[str, str], receive_into: ReceiveInto | None = None) -> None:
        self._receive = receive
        self._receive_into = receive_into or self._read_into
        length = headers.get("content-length", "")
        self._length_bytes = int(length) if length.isdecimal() else None
        if self._length_bytes is None and "transfer-encoding" not in headers:
            self._length_bytes = 0
        self._complete = self._length_bytes == 0
        self.received_bytes = 0

    @property
    def length_bytes(self) -> int | None:
        return self._length_bytes

    @property
    def complete(self) -> bool:
        """Whether the whole body has been read; if not, the connection cannot carry another request."""
        return self._complete

    async def read(self) -> bytes:
        piece = await self._next()
        self.received_bytes += len(piece)
        return piece

    async def receive(self, sink: Sink) -> None:
        def counted(data: memoryview) -> None:
            self.received_bytes += len(data)
            sink(data)

        if not self._complete:
            await self._receive_into(counted)
            self._complete = True

    async def _next(self) -> bytes:
        while not self._complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected("the client left before its request was complete")
            self._complete = not message.get("more_body", False)
            body: bytes = message.get("body", b"")
            if body:
                return body
        return b""

    async def _read_into(self, sink: Sink) -> None:
        """For servers that offer no better way."""
        while piece := await self._next():
            drain = BodyDrain([piece], sink)
            await _shared_threads().run(drain.stop, drain.run)


@functools.cache
def _shared_threads() -> ReceiveThreads:
    return ReceiveThreads()
