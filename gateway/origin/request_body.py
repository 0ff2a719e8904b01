"""Request bodies on their way to the origin: what is signed and told of them, and the bytes on the wire.

A streamed body that fails must leave an unfinished request behind, never a shorter object. So the last byte of a body
of known length stays here until the source has said that it is done (it may find a wrong digest at its very end), and a
body of unknown length ends with a chunk that is only sent then.

A checksum that follows the body goes out as unsigned aws-chunked (S3 API, "Signature calculations: transferring payload
in multiple chunks"). Its chunks have a fixed size, so that the length on the wire is known beforehand, and none is too
small for S3 (8 KiB) or too large for others (16 MiB).
"""

from __future__ import annotations

import base64
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from gateway.core.errors import S3Error
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.s3 import aws_chunked

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

CHUNK_BYTES = 1024 * 1024
"""Size of an aws-chunked chunk."""

EXPECT_CONTINUE_MIN_BYTES = 256 * 1024
"""Bodies from this size on wait for the origin's 100, so that a refusal costs no upload and is not lost in a reset.
What is smaller fits into the sockets' buffers, and is over before the origin closes.
"""

SLICE_BYTES = 256 * 1024
"""A body in memory is written in slices, so that a slow origin holds only what it has not taken."""

_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_WITH_BODY = frozenset({"PUT", "POST"})

_DIGEST_BYTES = {
    "crc32": 4,
    "crc32c": 4,
    "crc64nvme": 8,
    "xxhash64": 8,
    "xxhash3": 8,
    "xxhash128": 16,
    **{name: hashlib.new(name, usedforsecurity=False).digest_size for name in ("md5", "sha1", "sha256", "sha512")},
}

Write = Callable[[bytes | memoryview], Awaitable[None]]
"""Takes a piece of a body, and returns when its memory may be used again."""


@dataclass(frozen=True, slots=True)
class RequestBody:
    """One attempt's body. `signed_headers` belong under the signature, `framing_headers` are the connection's own."""

    payload_hash: str
    signed_headers: Mapping[str, str]
    framing_headers: Mapping[str, str]
    content: bytes | StreamedContent

    @property
    def can_be_sent_again(self) -> bool:
        return isinstance(self.content, bytes) or not self.content.touched


NO_BODY = RequestBody(EMPTY_SHA256, {}, {}, b"")


def is_about_checksums(name: str) -> bool:
    return name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum-"))


def request_body(request: OriginRequest, *, checksums: bool = True) -> RequestBody:
    """Return the body of a request. Without `checksums`, one that follows the body is verified here alone.

    A Content-MD5 stands for those of a body in memory: DeleteObjects needs one of them.
    """
    if not isinstance(request.body, StreamedBody):
        body = _in_memory(request.method, request.body)
        if checksums or "content-md5" in request.headers or not any(map(is_about_checksums, request.headers)):
            return body
        md5 = base64.b64encode(hashlib.md5(request.body, usedforsecurity=False).digest()).decode()
        return replace(body, signed_headers={"content-md5": md5}) if request.body else body
    if request.body.trailer_name is not None and checksums:
        return _with_trailer(request, request.body, request.body.trailer_name)
    content = StreamedContent(request.body.chunks, request.body.length_bytes)
    return RequestBody(request.body.payload_hash, {}, _framing(request.body.length_bytes), content)


def _in_memory(method: str, body: bytes) -> RequestBody:
    if not body and method not in _WITH_BODY:
        return NO_BODY
    payload_hash = hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256
    return RequestBody(payload_hash, {}, {"content-length": str(len(body))}, body)


def _with_trailer(request: OriginRequest, body: StreamedBody, name: str) -> RequestBody:
    signed = {"x-amz-trailer": name, "content-encoding": _aws_chunked(request.headers.get("content-encoding"))}
    if body.length_bytes is not None:
        signed["x-amz-decoded-content-length"] = str(body.length_bytes)
    length_bytes = encoded_length(body)
    content = StreamedContent(TrailerChunks(body), length_bytes)
    return RequestBody(_UNSIGNED_TRAILER, signed, _framing(length_bytes), content)


def _aws_chunked(codings: str | None) -> str:
    """`aws-chunked` in front of the codings of the object itself."""
    kept = [coding.strip() for coding in (codings or "").split(",") if coding.strip() not in ("", "aws-chunked")]
    return ",".join(["aws-chunked", *kept])


def _framing(length_bytes: int | None) -> dict[str, str]:
    framing = {"transfer-encoding": "chunked"} if length_bytes is None else {"content-length": str(length_bytes)}
    if length_bytes is None or length_bytes >= EXPECT_CONTINUE_MIN_BYTES:
        framing["expect"] = "100-continue"
    return framing


class FirstPieceAwaited:
    """A source whose first piece can be waited for before anything is done for it."""

    def __init__(self, chunks: AsyncIterator[bytes | memoryview]) -> None:
        self._chunks = chunks
        self._first: bytes | memoryview | None = None
        self._is_held = False

    async def wait(self) -> None:
        """Wait for the first piece, or the end. Raises what the source raises."""
        if not self._is_held:
            self._first, self._is_held = await anext(self._chunks, None), True

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        return self

    async def __anext__(self) -> bytes | memoryview:
        if self._is_held:
            first, self._first, self._is_held = self._first, None, False
            if first is None:
                raise StopAsyncIteration
            return first
        return await anext(self._chunks)


def with_first_piece(request: OriginRequest, body: StreamedBody) -> tuple[OriginRequest, FirstPieceAwaited]:
    """Return the request with a source that the caller can await before it takes a connection."""
    source = FirstPieceAwaited(body.chunks)
    return replace(request, body=replace(body, chunks=source)), source


class StreamedContent:
    """A body that passes through once. `length_bytes` None sends HTTP chunks. `touched`: the source was read from.

    `failure` is what the source raised, if it did. `is_sent`: all of it has left.
    """

    def __init__(self, chunks: AsyncIterator[bytes | memoryview], length_bytes: int | None) -> None:
        self._chunks = chunks
        self._length_bytes = length_bytes
        self._taken_bytes = 0
        self.touched = False
        self.is_sent = False
        self.failure: Exception | None = None

    async def send(self, write: Write) -> None:
        """Send it; raises what the source raises, and what `write` does."""
        held_back = b""
        while (chunk := await self._next()) is not None:
            if not chunk:
                continue
            if self._length_bytes is None:
                await write(b"%x\r\n" % len(chunk))
                await write(chunk)
                await write(b"\r\n")
                continue
            if self._taken_bytes == self._length_bytes:
                held_back, chunk = bytes(chunk[-1:]), chunk[:-1]
            if chunk:
                await write(chunk)
        self.is_sent = True  # from the moment on that the last byte may be there
        if self._length_bytes is None:
            await write(b"0\r\n\r\n")
        elif held_back:
            await write(held_back)

    async def _next(self) -> bytes | memoryview | None:
        """Return the source's next chunk, None at its end; remember how it failed, if it did."""
        self.touched = True
        try:
            chunk = await anext(self._chunks, None)
            self._taken_bytes += 0 if chunk is None else len(chunk)
            self._check_length(is_over=chunk is None)
        except Exception as failure:
            self.failure = failure
            raise
        return chunk.cast("B") if isinstance(chunk, memoryview) and chunk.format != "B" else chunk

    def _check_length(self, *, is_over: bool) -> None:
        length, taken = self._length_bytes, self._taken_bytes
        if length is None or taken == length or (taken < length and not is_over):
            return
        message = f"You did not provide the number of bytes specified: {length} expected, {taken} came."
        raise S3Error("IncompleteBody", message, 400)


def encoded_length(body: StreamedBody) -> int | None:
    """Bytes on the wire as aws-chunked; None when the payload's length, or the checksum's, is unknown."""
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
