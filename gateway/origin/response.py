"""An answer of the origin that came over HTTP, and what a refusal tells: its S3 error code, the region it wants."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

from gateway.errors import OriginBodyError
from gateway.origin.http1_client.response_stream import ResponseBroken, ResponseStream
from gateway.origin.receive_buffer import ReceiveBuffer, gathered

_PEEK_BYTES = 16 * 1024
_ELEMENT = {name: re.compile(rf"<{name}>\s*+([^<]{{1,200}}?)\s*+</{name}>") for name in ("Code", "Region")}
_REGION = re.compile(r"[a-z0-9-]{1,64}")

Successor = Callable[[], Coroutine[Any, Any, ResponseStream | None]]
"""Gives what the rest of a body comes by, if it broke off and there is anything."""


class HttpResponse:
    """`OriginResponse` over a connection, which it holds until its body is over or it is closed."""

    def __init__(
        self, stream: ResponseStream, *, successor: Successor | None = None, on_close: Callable[[], None] | None = None
    ) -> None:
        """`successor` is asked when the body breaks off, `on_close` told of the end."""
        self._stream = stream
        self._status = stream.head.status
        self._headers = stream.head.headers
        self._prefix = b""
        self._successor = successor
        self._on_close = on_close

    @property
    def status(self) -> int:
        return self._status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes | memoryview]:
        return self._pieces() if buffer is None else self._into(buffer)

    def whole(self) -> memoryview | None:
        return None if self._prefix else self._stream.whole()

    async def read(self, limit_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in self._pieces():
            size += len(piece)
            if size > limit_bytes:
                raise OriginBodyError(f"the origin's answer is longer than {limit_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def error_document(self) -> str:
        """The beginning of an error answer's body; the answer can still be read in full."""
        return (await self.begin(_PEEK_BYTES)).decode("utf-8", "replace")

    async def begin(self, size_bytes: int) -> bytes:
        """Wait for so much of the body, or all of it; the answer can still be read in full."""
        pieces = [self._prefix]
        size = len(self._prefix)
        while size < size_bytes and (piece := await self._next()):
            pieces.append(piece)
            size += len(piece)
        self._prefix = b"".join(pieces)
        return self._prefix

    async def aclose(self) -> None:
        self._stream.close()
        if self._on_close is not None:
            self._on_close()

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

    async def _into(self, buffer: ReceiveBuffer) -> AsyncIterator[memoryview]:
        if self._prefix or not self._stream.is_direct:
            async for view in gathered(self._pieces(), buffer):
                yield view
            return
        while True:
            try:
                view = await self._stream.receive_into(buffer)
            except ResponseBroken as error:
                await self._succeed(error)
                if self._stream.is_direct:
                    continue
                async for view in gathered(self._pieces(), buffer):  # a short rest, which has come as a whole
                    yield view
                return
            if not view:
                return
            yield view

    async def _next(self) -> bytes:
        while True:
            try:
                return await self._stream.piece()
            except ResponseBroken as error:
                await self._succeed(error)

    async def _succeed(self, error: ResponseBroken) -> None:
        """Go on with the rest of the body from elsewhere; OriginBodyError when there is none."""
        following = await self._successor() if self._successor is not None else None
        if following is None:
            raise OriginBodyError(f"the origin's answer broke off: {error}") from error
        self._stream = following


def error_code(document: str) -> str | None:
    """The S3 error code (S3 API, "Error responses"); None when there is none, as in the answer to a HEAD."""
    found = _ELEMENT["Code"].search(document)
    return found.group(1) if found else None


def wanted_region(document: str, response: HttpResponse) -> str | None:
    """The region that the origin expects in the signature: in the document, or in a header where there is no body."""
    found = _ELEMENT["Region"].search(document)
    region = found.group(1) if found else response.headers.get("x-amz-bucket-region", "")
    return region if _REGION.fullmatch(region) else None
