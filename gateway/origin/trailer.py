"""Unsigned aws-chunked framing for uploads whose checksum follows the body.

Source: S3 API, "Signature calculations: transferring payload in multiple chunks". Frames have a fixed size, so that the
length on the wire is known beforehand, none is too small for S3 (8 KiB) or too large for others (16 MiB), and the
payload is never copied: a frame's size is written before its bytes have come.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import AsyncIterator

from gateway.errors import S3Error
from gateway.origin.client import StreamedBody

FRAME_BYTES = 1024 * 1024

_DIGEST_BYTES = {
    "crc32": 4,
    "crc32c": 4,
    "crc64nvme": 8,
    "xxhash64": 8,
    "xxhash3": 8,
    "xxhash128": 16,
    **{name: hashlib.new(name, usedforsecurity=False).digest_size for name in ("md5", "sha1", "sha256", "sha512")},
}


def encoded_length(body: StreamedBody) -> int | None:
    """Bytes on the wire; None when the payload's length, or the checksum's, is unknown."""
    digest_bytes = _DIGEST_BYTES.get((body.trailer_name or "").removeprefix("x-amz-checksum-"))
    if body.length_bytes is None or digest_bytes is None:
        return None
    full, rest = divmod(body.length_bytes, FRAME_BYTES)
    frames = full * _frame_length(FRAME_BYTES) + (_frame_length(rest) if rest else 0)
    value_length = (digest_bytes + 2) // 3 * 4
    return frames + len(f"0\r\n{body.trailer_name}:\r\n\r\n") + value_length


def _frame_length(size: int) -> int:
    return len(f"{size:x}\r\n") + size + 2


class TrailerFrames:
    """The framed body, piece by piece. Raises IncompleteBody when the payload is not as long as it should be."""

    def __init__(self, body: StreamedBody) -> None:
        self._body = body
        self._left_in_frame = 0
        self._left_in_body = body.length_bytes
        self._gathered = bytearray()
        self._ready: deque[bytes | memoryview] = deque()
        self._over = False

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        return self

    async def __anext__(self) -> bytes | memoryview:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            chunk = await anext(self._body.chunks, None)
            if chunk is None:
                self._end()
            elif self._left_in_body is None:
                self._gather(chunk)
            else:
                self._frame(memoryview(chunk), self._left_in_body)
        return self._ready.popleft()

    def _frame(self, chunk: memoryview, left_in_body: int) -> None:
        if len(chunk) > left_in_body:
            raise S3Error("IncompleteBody", "The request body is longer than it was declared to be.", 400)
        self._left_in_body = left_in_body - len(chunk)
        while chunk:
            if self._left_in_frame == 0:
                self._left_in_frame = min(FRAME_BYTES, left_in_body)
                self._ready.append(b"%x\r\n" % self._left_in_frame)
            piece, chunk = chunk[: self._left_in_frame], chunk[self._left_in_frame :]
            self._ready.append(piece)
            left_in_body -= len(piece)
            self._left_in_frame -= len(piece)
            if self._left_in_frame == 0:
                self._ready.append(b"\r\n")

    def _gather(self, chunk: bytes | memoryview) -> None:
        """Without a declared length a frame can only be begun once it is whole."""
        self._gathered += chunk
        while len(self._gathered) >= FRAME_BYTES:
            self._emit(bytes(self._gathered[:FRAME_BYTES]))
            del self._gathered[:FRAME_BYTES]

    def _emit(self, data: bytes) -> None:
        self._ready.extend((b"%x\r\n" % len(data), data, b"\r\n"))

    def _end(self) -> None:
        if self._left_in_body:
            raise S3Error("IncompleteBody", f"The request body ended {self._left_in_body} bytes early.", 400)
        if self._gathered:
            self._emit(bytes(self._gathered))
        if self._body.trailer_value is None:
            raise ValueError("a body with a trailer needs trailer_value")
        self._ready.append(f"0\r\n{self._body.trailer_name}:{self._body.trailer_value()}\r\n\r\n".encode("ascii"))
        self._over = True
