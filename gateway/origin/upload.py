"""Request bodies on their way to the origin.

A streamed body that fails must leave an unfinished request behind, never a shorter object. So the last byte of a body
of known length stays here until the source has said that it is done (it may find a wrong digest at its very end), and a
body of unknown length ends with a chunk that is only sent then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import Payload
from aiohttp.abc import AbstractStreamWriter

from gateway.errors import S3Error

_SLICE_BYTES = 256 * 1024


class BytesUpload(Payload):
    """A body in memory, written in slices so that a slow origin holds only what it has not taken."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is bytes, not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        view = memoryview(self._value)
        for offset in range(0, len(view), _SLICE_BYTES):
            await writer.write(view[offset : offset + _SLICE_BYTES])


class StreamedUpload(Payload):
    """A body that passes through once.

    `failure` is what the source raised, if it did. `finish` ends the upload, complete or not, and returns when nothing
    reads from the source any more. `length_bytes` None sends HTTP chunks. `touched`: the source was read from.
    """

    def __init__(
        self, chunks: AsyncIterator[bytes | memoryview], length_bytes: int | None, stall_timeout_seconds: float
    ) -> None:
        super().__init__(None)
        self._size = length_bytes
        self._chunks = chunks
        self._stall_timeout = stall_timeout_seconds
        self._pump: asyncio.Task[None] | None = None
        self._finished = False
        self._taken = 0
        self.touched = False
        self.failure: Exception | None = None

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is bytes, not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        if not self._finished:
            self._pump = asyncio.create_task(self._run(writer))
            await self._wait_for(self._pump)
        if self._finished:
            await self._park()

    async def finish(self) -> None:
        """Stop reading from the source; wait until that is so. The connection stays up for the answer."""
        self._finished = True
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.wait([self._pump])

    async def _wait_for(self, pump: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait([pump])
        finally:
            pump.cancel()
        if not pump.cancelled():
            pump.result()

    async def _park(self) -> None:
        """The origin answered before the body was over: the request stays unfinished until its connection is closed."""
        if self._pump is None or self._pump.cancelled():
            await asyncio.get_running_loop().create_future()

    async def _run(self, writer: AbstractStreamWriter) -> None:
        held_back = b""
        while (chunk := await self._next()) is not None:
            if self._size is not None and self._taken == self._size and chunk:
                held_back, chunk = bytes(chunk[-1:]), chunk[:-1]
            await self._send(writer, chunk)
        await self._send(writer, held_back)

    async def _next(self) -> bytes | memoryview | None:
        """The source's next chunk, None at its end; remembers how it failed, if it did."""
        self.touched = True
        try:
            chunk = await anext(self._chunks, None)
            self._taken += 0 if chunk is None else len(chunk)
            self._check_length(is_over=chunk is None)
        except Exception as failure:
            self.failure = failure
            raise
        return None if chunk is None else _steady(chunk)

    def _check_length(self, *, is_over: bool) -> None:
        if self._size is None or (self._taken <= self._size and not is_over) or self._taken == self._size:
            return
        message = f"You did not provide the number of bytes specified: {self._size} expected, {self._taken} came."
        raise S3Error("IncompleteBody", message, 400)

    async def _send(self, writer: AbstractStreamWriter, chunk: bytes | memoryview) -> None:
        if chunk:
            async with asyncio.timeout(self._stall_timeout):
                await writer.write(chunk)


def _steady(chunk: bytes | memoryview) -> bytes | memoryview:
    """A view of a buffer that its owner may fill anew is copied: the transport may keep what it could not send yet."""
    if isinstance(chunk, memoryview):
        if not isinstance(chunk.obj, bytes):
            return bytes(chunk)
        return chunk if chunk.format == "B" else chunk.cast("B")
    return chunk
