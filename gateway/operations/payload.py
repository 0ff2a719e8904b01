"""Request bodies on their way through: framing taken off, every promise of the client verified.

Nothing may become visible before it is verified. A small body is therefore received and checked whole before the origin
hears of it. A large one streams, but its last piece is held back until all signatures and checksums have been
checked: when one fails, the origin is left with an unfinished request, which stores nothing.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from gateway.operations.exchange import Exchange
from gateway.operations.request_body import RequestBody
from gateway.origin.client import UNSIGNED_PAYLOAD, StreamedBody
from gateway.s3.aws_chunked import AwsChunkedDecoder
from gateway.s3.checksums import BodyVerifier
from gateway.s3.error_codes import s3_error
from gateway.s3.payload_mode import PayloadMode, payload_mode
from gateway.s3.requests import Operation, S3Request

BUFFERED_SIZE_BYTES_MAX = 256 * 1024
"""Bodies up to this length are received whole: they can be sent to the origin again when an attempt fails."""

PUT_SIZE_BYTES_MAX = 5 * 1024**3
"""S3's limit for PutObject and UploadPart."""

_LENGTH = re.compile(r"\d{1,19}", re.ASCII)

_OBJECT_WRITES = frozenset({Operation.PUT_OBJECT, Operation.UPLOAD_PART})


@dataclass(frozen=True, slots=True)
class Payload:
    """A body for the origin, and the headers that come with it."""

    body: bytes | StreamedBody = b""
    headers: dict[str, str] = field(default_factory=dict)


async def receive_payload(exchange: Exchange) -> Payload:
    """The request's body, ready to be sent on: verified whole when it is small, else verified as it streams."""
    incoming = _Incoming(exchange)
    length_bytes = incoming.length_bytes
    if length_bytes is not None and length_bytes > BUFFERED_SIZE_BYTES_MAX:
        return Payload(incoming.streamed())
    document = await incoming.collect(BUFFERED_SIZE_BYTES_MAX)
    return Payload(document, {name: value for name, value in incoming.trailers.items() if _is_checksum(name)})


async def receive_document(exchange: Exchange, size_bytes_max: int) -> bytes:
    """The whole body of an XML request, verified; MaxMessageLengthExceeded when it is longer than allowed."""
    return await _Incoming(exchange).collect(size_bytes_max)


class _Incoming:
    """One body: where its bytes come from, how they are framed, and what they must add up to."""

    def __init__(self, exchange: Exchange) -> None:
        request = exchange.request
        self._body: RequestBody = exchange.body
        self._buffers = exchange.services.buffers
        self._mode = _mode_of(request)
        # The checksum headers of CompleteMultipartUpload are about the object, not about the request's body.
        of_body = request.operation is not Operation.COMPLETE_MULTIPART_UPLOAD
        self._verifier = BodyVerifier(request.headers, self._mode, of_body=of_body)
        self._decoder: AwsChunkedDecoder | None = None
        self.length_bytes = exchange.body.length_bytes
        self.trailers: dict[str, str] = {}
        if self._mode.streaming:
            self._expect_chunks(exchange)
        elif request.operation in _OBJECT_WRITES and self.length_bytes is None:
            raise s3_error("MissingContentLength")
        _refuse_too_large(request, self.length_bytes)

    def _expect_chunks(self, exchange: Exchange) -> None:
        request = exchange.request
        if not _stores_an_object(request):
            raise s3_error("InvalidRequest", f"{request.operation.value} does not take a streaming payload.")
        declared = request.headers.get("x-amz-decoded-content-length", "")
        if not _LENGTH.fullmatch(declared):
            raise s3_error("MissingContentLength", "aws-chunked bodies need x-amz-decoded-content-length.")
        self.length_bytes = int(declared)
        self._trailer_names = _announced_trailers(request)
        self._decoder = AwsChunkedDecoder(self._mode, self.length_bytes, self._trailer_names, exchange.seed)

    def streamed(self) -> StreamedBody:
        """The body for the origin. A checksum that comes behind it goes on in the same way, behind it."""
        checksum_names = [name for name in self._trailer_names if _is_checksum(name)] if self._decoder else []
        if not checksum_names:
            digest = self._mode.sha256_hex
            return StreamedBody(self.pieces(), self.length_bytes, digest or UNSIGNED_PAYLOAD)
        name = checksum_names[0]
        return StreamedBody(
            self.pieces(), self.length_bytes, trailer_name=name, trailer_value=lambda: self.trailers[name]
        )

    async def collect(self, size_bytes_max: int) -> bytes:
        """All of it, verified; SlowDown when too much lies in memory already."""
        document = bytearray()
        with self._buffers.holding() as held:
            async for piece in self.pieces():
                document += piece
                if len(document) > size_bytes_max:
                    raise s3_error("MaxMessageLengthExceeded")
                held.grow(len(piece))
            return bytes(document)

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        """The decoded body; the last piece comes only after everything has been verified."""
        held: bytes | memoryview = b""
        async for piece in self._decoded():
            self._verifier.update(piece)
            if held:
                yield held
            held = piece
        self._verifier.verify(self.trailers)
        if held:
            yield held

    async def _decoded(self) -> AsyncIterator[bytes | memoryview]:
        decoder = self._decoder
        received_bytes = 0
        while data := await self._body.read():
            received_bytes += len(data)
            if decoder is None:
                yield data
                continue
            for piece in decoder.feed(data):
                yield piece
        if decoder is not None:
            self.trailers = decoder.finish()
        elif self.length_bytes is not None and received_bytes != self.length_bytes:
            raise s3_error("IncompleteBody")


def _mode_of(request: S3Request) -> PayloadMode:
    """What `x-amz-content-sha256` says of the body; presigned requests may say it in the query, or not at all."""
    value = request.parameter("X-Amz-Content-Sha256") or request.headers.get("x-amz-content-sha256")
    return payload_mode(value)


def _stores_an_object(request: S3Request) -> bool:
    if request.operation in _OBJECT_WRITES:
        return True
    return request.operation is Operation.FORWARD and request.method == "PUT" and request.key is not None


def _announced_trailers(request: S3Request) -> frozenset[str]:
    names = request.headers.get("x-amz-trailer", "").lower().split(",")
    return frozenset(name.strip() for name in names if name.strip())


def _is_checksum(name: str) -> bool:
    return name.startswith("x-amz-checksum-")


def _refuse_too_large(request: S3Request, length_bytes: int | None) -> None:
    if request.operation in _OBJECT_WRITES and length_bytes is not None and length_bytes > PUT_SIZE_BYTES_MAX:
        raise s3_error("EntityTooLarge", ProposedSize=str(length_bytes), MaxSizeAllowed=str(PUT_SIZE_BYTES_MAX))
