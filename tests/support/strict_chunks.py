"""Decodes unsigned aws-chunked bodies with a trailer: strict about every byte, and written apart from the gateway's."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gateway.s3.error_codes import s3_error

_LINE_BYTES_MAX = 1024


class UnsignedChunks:
    """`pieces` gives the payload; `trailers` is filled when it is over."""

    def __init__(self, body: AsyncIterator[bytes], decoded_length: int) -> None:
        self._body = body
        self._length = decoded_length
        self._buffer = bytearray()
        self.trailers: dict[str, str] = {}

    async def pieces(self) -> AsyncIterator[bytes]:
        received = 0
        while size := int(await self._line(), 16):
            received += size
            remaining = size
            while remaining:
                piece = await self._take(remaining)
                remaining -= len(piece)
                yield piece
            if await self._line() != b"":
                raise s3_error("IncompleteBody", "a chunk is longer than it says")
        if received != self._length:
            raise s3_error("IncompleteBody", f"{received} bytes came, {self._length} were declared")
        await self._read_trailers()

    async def _read_trailers(self) -> None:
        while line := await self._line():
            name, separator, value = line.decode("ascii").partition(":")
            if not separator:
                raise s3_error("MalformedTrailerError")
            self.trailers[name] = value
        behind = await anext(self._body, b"")
        if self._buffer or behind:
            raise s3_error("IncompleteBody", "there are bytes behind the last chunk")

    async def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _LINE_BYTES_MAX:
                raise s3_error("IncompleteBody", "a chunk line is too long")
            await self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    async def _take(self, limit: int) -> bytes:
        if not self._buffer:
            await self._fill()
        piece = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return piece

    async def _fill(self) -> None:
        data = await anext(self._body, None)
        if data is None:
            raise s3_error("IncompleteBody")
        self._buffer += data
