"""Counts the bytes of bodies on their way from and to an origin."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from gateway.origin.client import Origin, OriginRequest, OriginResponse, StreamedBody

CountBytes = Callable[[str, str, int], None]
"""Told (direction, purpose, bytes) of each piece; direction is `read` or `write`."""

_Count = Callable[[int], None]


class CountedOrigin:
    """An `Origin` that tells `count` of every piece of a body that passes.

    A streamed body counts as far as it was taken, one in memory once, however often it is sent again.
    """

    def __init__(self, origin: Origin, count: CountBytes) -> None:
        self._origin = origin
        self._count = count

    async def send(self, request: OriginRequest) -> OriginResponse:
        """As `Origin.send`."""
        written = partial(self._count, "write", request.purpose.value)
        if isinstance(request.body, StreamedBody):
            chunks = _CountedChunks(request.body.chunks, written)
            request = replace(request, body=replace(request.body, chunks=chunks))
        elif request.body:
            written(len(request.body))
        response = await self._origin.send(request)
        return _CountedResponse(response, partial(self._count, "read", request.purpose.value))

    async def aclose(self) -> None:
        """As `Origin.aclose`."""
        await self._origin.aclose()


class _CountedChunks:
    def __init__(self, chunks: AsyncIterator[bytes | memoryview], count: _Count) -> None:
        self._chunks = chunks
        self._count = count

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | memoryview:
        chunk = await anext(self._chunks)
        self._count(len(chunk))
        return chunk


class _CountedResponse:
    def __init__(self, response: OriginResponse, count: _Count) -> None:
        self._response = response
        self._count = count

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def stream(self) -> AsyncIterator[bytes]:
        pieces = self._response.stream()
        try:
            async for piece in pieces:
                self._count(len(piece))
                yield piece
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    async def read(self, limit_bytes: int) -> bytes:
        body = await self._response.read(limit_bytes)
        self._count(len(body))
        return body

    async def aclose(self) -> None:
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._response.aclose()
