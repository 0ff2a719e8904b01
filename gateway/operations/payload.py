"""Request bodies on their way through: framing taken off, every promise of the client verified.

Nothing may become visible before it is verified. A small body is therefore received and checked whole before the origin
hears of it. A large one streams, but its last piece is held back until all signatures and checksums have been
checked: when one fails, the origin is left with an unfinished request, which stores nothing. One that goes to a sink is
the sink's to throw away.
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
"""So much of a body is decoded and hashed before the event loop has its turn."""

_WORTH_JOINING_BYTES = 8 * 1024
"""Smaller pieces than these on average go on as one: each costs a call of every checksum, and of whoever takes it."""

_LENGTH = re.compile(r"\d{1,19}", re.ASCII)

_OBJECT_WRITES = frozenset({Operation.PUT_OBJECT, Operation.UPLOAD_PART})


class IncomingBody:
    """One body: how it is framed, and what it must add up to.

    `wire_length_bytes` is the Content-Length, None for HTTP chunks; `length_bytes` that of the data, None where nobody
    says. `also` names checksums that the caller wants; `on_threads`, like it, is BodyVerifier's. Raises S3Error, when
    made and later: MissingContentLength, InvalidRequest, EntityTooLarge, and what AwsChunkedDecoder and BodyVerifier
    raise.
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
        _refuse_too_large(request, self.length_bytes)

    def _expect_chunks(self, request: S3Request, seed: SeedSignature | None) -> None:
        if not _stores_an_object(request):
            raise s3_error("InvalidRequest", f"{request.operation.value} does not take a streaming payload.")
        declared = request.headers.get("x-amz-decoded-content-length", "")
        if not _LENGTH.fullmatch(declared):
            raise s3_error("MissingContentLength", "aws-chunked bodies need x-amz-decoded-content-length.")
        self.length_bytes = int(declared)
        self.trailer_names = _announced_trailers(request)
        self._decoder = AwsChunkedDecoder(self.mode, self.length_bytes, self.trailer_names, seed)

    def feed(self, data: bytes | memoryview) -> Sequence[bytes | memoryview]:
        """The data in the next bytes from the wire: views, where the pieces are large. Nobody may be shown it before
        `finish`."""
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
        """The body has ended, and all of it is as promised: the checksum header that it came with, if any."""
        if self._decoder is not None:
            self.trailers = self._decoder.finish()
        elif self._left_bytes:
            raise s3_error("IncompleteBody")
        return self._verifier.verify(self.trailers)

    def digest(self, algorithm: str) -> bytes:
        return self._verifier.digest(algorithm)


def is_checksum(name: str) -> bool:
    """Whether a header or trailer, in lower case, is a checksum of the data."""
    return name.startswith("x-amz-checksum-")


def is_streaming(request: S3Request) -> bool:
    """Whether the body is aws-chunked. S3Error for what `x-amz-content-sha256` must not say."""
    return _mode_of(request).streaming


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


def _refuse_too_large(request: S3Request, length_bytes: int | None) -> None:
    if request.operation in _OBJECT_WRITES and length_bytes is not None and length_bytes > PUT_SIZE_BYTES_MAX:
        raise s3_error("EntityTooLarge", ProposedSize=str(length_bytes), MaxSizeAllowed=str(PUT_SIZE_BYTES_MAX))


BUFFERED_SIZE_BYTES_MAX = 256 * 1024
"""Bodies up to this length are received whole: they can be sent to the origin again when an attempt fails."""

BUFFERED_GRACE_SECONDS = 30.0
BUFFERED_RATE_BYTES_PER_SECOND_MIN = 32 * 1024
"""How slow a body may be that takes room from others while it comes, once the grace is over."""


def check_rate(received_bytes: int, seconds: float) -> None:
    """S3Error RequestTimeout where a body that takes room has come too slowly in so much of its client's time."""
    if received_bytes < (seconds - BUFFERED_GRACE_SECONDS) * BUFFERED_RATE_BYTES_PER_SECOND_MIN:
        raise s3_error("RequestTimeout")


@dataclass(frozen=True, slots=True)
class Payload:
    """A body for the origin, and the headers that come with it.

    `md5`, where it was asked for: the digest of the data, once the body has been sent.
    """

    body: bytes | StreamedBody = b""
    headers: dict[str, str] = field(default_factory=dict)
    md5: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """What a sink has got. `md5` is the digest; `checksums` the `x-amz-checksum-…` header or trailer that it came with,
    lower-case name and base64 value, verified."""

    length_bytes: int
    md5: bytes
    checksums: Mapping[str, str]


def announced_bytes(context: RequestContext) -> int:
    """How long the request says that its data is; 0 where receiving it will be refused for what it says."""
    length_bytes = context.body.length_bytes
    if is_streaming(context.request):
        declared = context.request.headers.get("x-amz-decoded-content-length", "")
        length_bytes = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    return length_bytes if length_bytes is not None and length_bytes <= PUT_SIZE_BYTES_MAX else 0


async def receive_payload(
    context: RequestContext, *, with_md5: bool = False, buffered_bytes_max: int = BUFFERED_SIZE_BYTES_MAX
) -> Payload:
    """The request's body, ready to be sent on: verified whole when it is small, else verified as it streams."""
    incoming = IncomingBody(context.request, context.seed, context.body.length_bytes, also=("md5",) if with_md5 else ())
    length_bytes, md5 = incoming.length_bytes, partial(incoming.digest, "md5") if with_md5 else None
    if length_bytes is not None and length_bytes > buffered_bytes_max:
        return Payload(_streamed(context, incoming, length_bytes), md5=md5)
    document = await _collect(context, incoming, buffered_bytes_max)
    return Payload(document, {name: value for name, value in incoming.trailers.items() if is_checksum(name)}, md5)


async def receive_document(context: RequestContext, size_bytes_max: int) -> bytes:
    """The whole body of an XML request, verified; MaxMessageLengthExceeded when it is longer than allowed."""
    incoming = IncomingBody(context.request, context.seed, context.body.length_bytes)
    return await _collect(context, incoming, size_bytes_max)


async def receive_verified(context: RequestContext, sink: Sink) -> Received:
    """Hand the body's data to `sink`, as `RequestBody.receive` does, and return once all of it has been verified.

    Raises as `RequestBody.receive`, and S3Error for whatever is not as promised; then what the sink has got is to be
    thrown away, though all of it may have come.
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
    """The body for the origin. A checksum that comes behind it goes on in the same way, behind it."""
    pieces = _pieces(context, incoming)
    names = [name for name in incoming.trailer_names if is_checksum(name)]
    if not names:
        return StreamedBody(pieces, length_bytes, incoming.mode.sha256_hex or UNSIGNED_PAYLOAD)
    return StreamedBody(pieces, length_bytes, trailer_name=names[0], trailer_value=lambda: incoming.trailers[names[0]])


async def _collect(context: RequestContext, incoming: IncomingBody, size_bytes_max: int) -> bytes:
    """All of it, verified; SlowDown when too much lies in memory already, RequestTimeout when it comes too slowly."""
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
    """The data; the last piece comes only after everything has been verified."""
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
