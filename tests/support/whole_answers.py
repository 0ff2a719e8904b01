"""An origin near by: small bodies have arrived with their heads, as over the wire they mostly do."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gateway.core.errors import OriginBodyError
from gateway.origin.client import Origin, OriginRequest, OriginResponse, WrappedResponse
from gateway.origin.http1_client.response_stream import WHOLE_BYTES_MAX
from gateway.origin.receive_buffer import ReceiveBuffer


class WholeAnswers:
    """`origin`, whose answers to GETs are received as far as they come before anybody sees their heads."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    async def send(self, request: OriginRequest) -> OriginResponse:
        response = await self._origin.send(request)
        if request.method != "GET" or int(response.headers.get("content-length", "0")) > WHOLE_BYTES_MAX:
            return response
        received, failure = bytearray(), None
        try:
            async for piece in response.stream():
                received += piece
        except OriginBodyError as error:
            failure = error
        return _Received(response, bytes(received), failure)

    async def aclose(self) -> None:
        await self._origin.aclose()


class _Received(WrappedResponse):
    def __init__(self, response: OriginResponse, body: bytes, failure: OriginBodyError | None) -> None:
        super().__init__(response)
        self._body = body
        self._failure = failure

    def whole(self) -> memoryview | None:
        return memoryview(self._body) if self._failure is None else None

    async def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes | memoryview]:
        if self._body:
            yield self._body
        if self._failure is not None:
            raise self._failure

    async def read(self, limit_bytes: int) -> bytes:
        if self._failure is not None:
            raise self._failure
        if len(self._body) > limit_bytes:
            raise OriginBodyError(f"the origin's answer is longer than {limit_bytes} bytes")
        return self._body
