"""The request body as ASGI hands it over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from gateway.errors import ClientDisconnected

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class AsgiRequestBody:
    """Reads `http.request` events. The first read makes the server answer `Expect: 100-continue`."""

    def __init__(self, receive: Receive, headers: Mapping[str, str]) -> None:
        self._receive = receive
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
        while not self._complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected("the client left before its request was complete")
            self._complete = not message.get("more_body", False)
            body: bytes = message.get("body", b"")
            if body:
                self.received_bytes += len(body)
                return body
        return b""
