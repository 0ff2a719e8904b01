"""An answer of the origin that came over HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

import aiohttp

from gateway.errors import OriginBodyError
from gateway.origin.landing import Landing, landed

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class HttpResponse(ABC):
    """`OriginResponse` over a connection, which it holds until its body is over or it is closed."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._headers = headers
        self._prefix = b""

    @property
    def status(self) -> int:
        return self._status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    def stream(self, landing: Landing | None = None) -> AsyncIterator[bytes | memoryview]:
        return self._pieces() if landing is None else self._landed(landing)

    def whole(self) -> memoryview | None:
        return None

    async def read(self, limit_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in self._pieces():
            size += len(piece)
            if size > limit_bytes:
                raise OriginBodyError(f"the origin's answer is longer than {limit_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def peek(self, limit_bytes: int) -> bytes:
        """The beginning of the body, at least `limit_bytes` where it has so many; `stream` and `read` still give it."""
        pieces = [self._prefix]
        size = len(self._prefix)
        while size < limit_bytes and (piece := await self._next()):
            pieces.append(piece)
            size += len(piece)
        self._prefix = b"".join(pieces)
        return self._prefix

    @abstractmethod
    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self._prefix:
            prefix, self._prefix = self._prefix, b""
            yield prefix
        while piece := await self._next():
            yield piece

    def _landed(self, landing: Landing) -> AsyncIterator[memoryview]:
        return landed(self._pieces(), landing)

    @abstractmethod
    async def _next(self) -> bytes:
        """The next piece; empty at the end of the body. OriginBodyError when it ended early."""


class AiohttpResponse(HttpResponse):
    """One that came over aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        super().__init__(response.status, _end_to_end(response.raw_headers))
        self._response = response
        self._complete = False

    async def aclose(self) -> None:
        self._response.release()

    async def _next(self) -> bytes:
        if self._complete:
            return b""
        content = self._response.content
        try:
            piece = await content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self.aclose()
            raise OriginBodyError(f"the origin's answer broke off: {type(error).__name__}") from error
        if not piece:
            self._complete = True
        return piece


def _end_to_end(raw_headers: tuple[tuple[bytes, bytes], ...]) -> dict[str, str]:
    """Lower-case names, latin-1 values, repeated ones joined; without what concerns this connection only."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw_headers:
        name = raw_name.decode("latin-1").lower()
        value = raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    for name in headers.get("connection", "").split(","):
        headers.pop(name.strip().lower(), None)
    return {name: value for name, value in headers.items() if name not in _HOP_BY_HOP}
