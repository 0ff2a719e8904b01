"""Request bodies on their way through: framing removed, every promise of the client verified.

Nothing may become visible before it is verified. So a small body is received and checked whole before the origin hears
of it. A large one streams, but its last piece is held back until all signatures and checksums are checked: if one
fails, the origin is left with an unfinished request, which stores nothing. A sink must discard its bytes itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from gateway.operations.context import RequestContext, Sink
from gateway.origin.client import UNSIGNED_PAYLOAD, StreamedBody
from gateway.s3.aws_chunked import AwsChunkedDecoder
from gateway.s3.checksums import BodyVerifier
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation, S3Request
from gateway.s3.signature_v4 import PayloadMode, SeedSignature, payload_mode

PUT_SIZE_BYTES_MAX = 5 * 1024**3
"""S3's limit for PutObject and UploadPart."""

STEP_BYTES = 256 * 1024
"""Bytes of a body that are decoded and hashed before the event loop gets its turn."""

_WORTH_JOINING_BYTES = 8 * 1024
"""Smaller pieces on average are joined: each costs a call of every checksum, and of the next stage."""

_LENGTH = re.compile(r"\d{1,19}", re.ASCII)

_OBJECT_WRITES = frozenset({Operation.PUT_OBJECT, Operation.UPLOAD_PART})


class IncomingBody:
    """The framing of one body, and the promises that it must keep.

    `wire_length_bytes` is the Content-Length, None for HTTP chunks; `length_bytes` that of the data, None if not
    announced. `also` names checksums that the caller wants; `on_threads`, like it, is BodyVerifier's. Raises S3Error,
    when made and later: MissingContentLength, InvalidRequest, EntityTooLarge, and those of AwsChunkedDecoder and
    BodyVerifier.
    """

    def __init__(
        self,
        request: S3Request,
        seed: SeedSignature | None,
        wire_length_bytes: int | None,
        *,
        also: Collection[str] = (),
        on_threads: bool = False,
    ) -> None:
        self.mode = _mode_of(request)
        # The checksum headers of CompleteMultipartUpload are about the object, not about the request's body.
        of_body = request.operation is not Operation.COMPLETE_MULTIPART_UPLOAD
        self._verifier = BodyVerifier(request.headers, self.mode, of_body=of_body, also=also, on_threads=on_threads)
        self._decoder: AwsChunkedDecoder | None = None
        self._left_bytes = self.length_bytes = wire_length_bytes
        self.trailer_names: frozenset[str] = frozenset()
        self.trailers: dict[str, str] = {}
        if self.mode.streaming:
            self._expect_chunks(request, seed)
        elif request.operation in _OBJECT_WRITES and wire_length_bytes is None:
            raise s3_error("MissingContentLength")
        length_bytes, is_object = self.length_bytes, request.operation in _OBJECT_WRITES
        if is_object and length_bytes is not None and length_bytes > PUT_SIZE_BYTES_MAX:
            raise s3_error("EntityTooLarge", ProposedSize=str(length_bytes), MaxSizeAllowed=str(PUT_SIZE_BYTES_MAX))

    def _expect_chunks(self, request: S3Request, seed: SeedSignature | None) -> None:
        is_put = request.operation is Operation.FORWARD and request.method == "PUT" and request.key is not None
        if request.operation not in _OBJECT_WRITES and not is_put:
            raise s3_error("InvalidRequest", f"{request.operation.value} does not take a streaming payload.")
        declared = request.headers.get("x-amz-decoded-content-length", "")
        if not _LENGTH.fullmatch(declared):
            raise s3_error("MissingContentLength", "aws-chunked bodies need x-amz-decoded-content-length.")
        self.length_bytes = int(declared)
        names = request.headers.get("x-amz-trailer", "").lower().split(",")
        self.trailer_names = frozenset(name.strip() for name in names if name.strip())
        self._decoder = AwsChunkedDecoder(self.mode, self.length_bytes, self.trailer_names, seed)

    def feed(self, data: bytes | memoryview) -> Sequence[bytes | memoryview]:
        """Return the data in the next bytes: views, if the pieces are large. Show none of it before `finish`."""
        if self._decoder is not None:
            pieces: Sequence[bytes | memoryview] = self._decoder.feed(data)
            if len(data) < len(pieces) * _WORTH_JOINING_BYTES and len(pieces) > 1:
                pieces = (b"".join(pieces),)
        else:
            pieces = (data,)
            if self._left_bytes is not None:
                self._left_bytes -= len(data)
        for piece in pieces:
            self._verifier.update(piece)
        return pieces

    def finish(self) -> dict[str, str]:
        """Check at the end of the body that it kept all promises; return its checksum header, if any."""
        if self._decoder is not None:
            self.trailers = self._decoder.finish()
        elif self._left_bytes:
            raise s3_error("IncompleteBody")
        return self._verifier.verify(self.trailers)

    def digest(self, algorithm: str) -> bytes:
        return self._verifier.digest(algorithm)


def is_checksum(name: str) -> bool:
    """Return whether a header or trailer, in lower case, is a checksum of the data."""
    return name.startswith("x-amz-checksum-")


def is_streaming(request: S3Request) -> bool:
    """Return whether the body is aws-chunked. S3Error for a bad `x-amz-content-sha256`."""
    return _mode_of(request).streaming


def _mode_of(request: S3Request) -> PayloadMode:
    """Return the body's mode by `x-amz-content-sha256`; presigned requests may have it in the query, or not at all."""
    value = request.parameter("X-Amz-Content-Sha256") or request.headers.get("x-amz-content-sha256")
    return payload_mode(value)


BUFFERED_SIZE_BYTES_MAX = 256 * 1024
"""Bodies up to this length are received whole, so that they can be sent to the origin again after a failed attempt."""

BUFFERED_GRACE_SECONDS = 30.0
BUFFERED_RATE_BYTES_PER_SECOND_MIN = 32 * 1024
"""The least rate of a body that takes room from others while it comes, once the grace is over."""


def check_rate(received_bytes: int, seconds: float) -> None:
    """Raise S3Error RequestTimeout if a body that takes room came too slowly in `seconds` of its client's time."""
    if received_bytes < (seconds - BUFFERED_GRACE_SECONDS) * BUFFERED_RATE_BYTES_PER_SECOND_MIN:
        raise s3_error("RequestTimeout")


@dataclass(frozen=True, slots=True)
class Payload:
    """A body for the origin, and its headers. `md5`, if asked for: the data's digest, once the body has been sent."""

    body: bytes | StreamedBody = b""
    headers: dict[str, str] = field(default_factory=dict)
    md5: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """The result of a sink: its MD5, and the verified `x-amz-checksum-…`, lower-case name and base64 value."""

    length_bytes: int
    md5: bytes
    checksums: Mapping[str, str]


def announced_bytes(context: RequestContext) -> int:
    """Return the announced length of the request's data; 0 if it will be refused."""
    length_bytes = context.body.length_bytes
    if is_streaming(context.request):
        declared = context.request.headers.get("x-amz-decoded-content-length", "")
        length_bytes = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    return length_bytes if length_bytes is not None and length_bytes <= PUT_SIZE_BYTES_MAX else 0


async def receive_payload(
    context: RequestContext, *, with_md5: bool = False, buffered_bytes_max: int = BUFFERED_SIZE_BYTES_MAX
) -> Payload:
    """Return the request's body, ready to send: verified whole if it is small, else as it streams."""
    incoming = IncomingBody(context.request, context.seed, context.body.length_bytes, also=("md5",) if with_md5 else ())
    length_bytes, md5 = incoming.length_bytes, partial(incoming.digest, "md5") if with_md5 else None
    if length_bytes is not None and length_bytes > buffered_bytes_max:
        return Payload(_streamed(context, incoming, length_bytes), md5=md5)
    document = await _collect(context, incoming, buffered_bytes_max)
    return Payload(document, {name: value for name, value in incoming.trailers.items() if is_checksum(name)}, md5)


async def receive_document(context: RequestContext, size_bytes_max: int) -> bytes:
    """Return the whole body of an XML request, verified; MaxMessageLengthExceeded if it is longer than allowed."""
    incoming = IncomingBody(context.request, context.seed, context.body.length_bytes)
    return await _collect(context, incoming, size_bytes_max)


async def receive_verified(context: RequestContext, sink: Sink) -> Received:
    """Hand the body's data to `sink`, as `ClientBody.receive` does, and return once all of it is verified.

    Raises as `ClientBody.receive`, and S3Error for a broken promise; then the sink's bytes must be discarded, though
    all may have come.
    """
    incoming = IncomingBody(context.request, context.seed, context.body.length_bytes, also=("md5",), on_threads=True)
    length_bytes = 0

    def decode(data: memoryview) -> None:
        nonlocal length_bytes
        for piece in incoming.feed(data):
            length_bytes += len(piece)
            sink(memoryview(piece))

    await context.body.receive(decode)
    checksums = incoming.finish()
    return Received(length_bytes, incoming.digest("md5"), checksums)


def _streamed(context: RequestContext, incoming: IncomingBody, length_bytes: int) -> StreamedBody:
    """Return the body for the origin. A checksum that follows it is sent on in the same way."""
    pieces = _pieces(context, incoming)
    names = [name for name in incoming.trailer_names if is_checksum(name)]
    if not names:
        return StreamedBody(pieces, length_bytes, incoming.mode.sha256_hex or UNSIGNED_PAYLOAD)
    return StreamedBody(pieces, length_bytes, trailer_name=names[0], trailer_value=lambda: incoming.trailers[names[0]])


async def _collect(context: RequestContext, incoming: IncomingBody, size_bytes_max: int) -> bytes:
    """Return all of it, verified; SlowDown when memory is too full, RequestTimeout when it comes too slowly."""
    length_bytes = size_bytes_max if incoming.length_bytes is None else incoming.length_bytes
    if length_bytes > size_bytes_max:
        raise s3_error("MaxMessageLengthExceeded")
    clock, document = context.services.clock, bytearray()
    async with context.services.buffers.room(context.credential, length_bytes, clock):
        started = clock.monotonic()
        async for piece in _pieces(context, incoming):
            document += piece
            if len(document) > size_bytes_max:
                raise s3_error("MaxMessageLengthExceeded")
            check_rate(len(document), clock.monotonic() - started)
        return bytes(document)


async def _pieces(context: RequestContext, incoming: IncomingBody) -> AsyncIterator[bytes | memoryview]:
    """Yield the data; the last piece only after everything is verified."""
    held: bytes | memoryview = b""
    while data := memoryview(await context.body.read()):
        while data:
            if held:
                await asyncio.sleep(0)
            step, data = data[:STEP_BYTES], data[STEP_BYTES:]
            for piece in incoming.feed(step):
                if held:
                    yield held
                held = piece
    incoming.finish()
    if held:
        yield held
