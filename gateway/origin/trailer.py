"""Uploads whose checksum follows the body, as unsigned aws-chunked.

Source: S3 API, "Signature calculations: transferring payload in multiple chunks". Chunks have a fixed size, so that the
length on the wire is known beforehand, and none is too small for S3 (8 KiB) or too large for others (16 MiB).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import AsyncIterator

from gateway.errors import S3Error
from gateway.origin.client import StreamedBody
from gateway.s3 import aws_chunked

CHUNK_BYTES = 1024 * 1024

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
    name = body.trailer_name or ""
    digest_bytes = _DIGEST_BYTES.get(name.removeprefix("x-amz-checksum-"))
    if body.length_bytes is None or digest_bytes is None:
        return None
    base64_length = (digest_bytes + 2) // 3 * 4
    return aws_chunked.encoded_length(body.length_bytes, name, base64_length, CHUNK_BYTES)


class TrailerChunks:
    """The encoded body, piece by piece. Raises IncompleteBody when the payload is not as long as it should be."""

    def __init__(self, body: StreamedBody) -> None:
        self._body = body
        length = body.length_bytes
        self._encoder = None if length is None else aws_chunked.AwsChunkedEncoder(length, CHUNK_BYTES)
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
            elif self._encoder is None:
                self._gather(chunk)
            else:
                self._encode(self._encoder, chunk)
        return self._ready.popleft()

    def _encode(self, encoder: aws_chunked.AwsChunkedEncoder, chunk: bytes | memoryview) -> None:
        try:
            self._ready.extend(encoder.encode(chunk))
        except ValueError as error:
            raise _incomplete(error) from None

    def _gather(self, chunk: bytes | memoryview) -> None:
        """Without a declared length a chunk can only be begun once it is whole."""
        self._gathered += chunk
        while len(self._gathered) >= CHUNK_BYTES:
            self._ready.append(aws_chunked.encode_chunk(bytes(self._gathered[:CHUNK_BYTES])))
            del self._gathered[:CHUNK_BYTES]

    def _end(self) -> None:
        if self._gathered:
            self._ready.append(aws_chunked.encode_chunk(bytes(self._gathered)))
        self._ready.append(self._final_chunk(self._body.trailer_name or "", self._trailer_value()))
        self._over = True

    def _final_chunk(self, name: str, value: str) -> bytes:
        if self._encoder is None:
            return aws_chunked.final_chunk(name, value)
        try:
            return self._encoder.finish(name, value)
        except ValueError as error:
            raise _incomplete(error) from None

    def _trailer_value(self) -> str:
        if self._body.trailer_value is None:
            raise TypeError("a body with a trailer needs trailer_value")
        return self._body.trailer_value()


def _incomplete(error: ValueError) -> S3Error:
    return S3Error("IncompleteBody", f"The request body does not have its declared length: {error}", 400)
