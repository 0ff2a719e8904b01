"""Request bodies on their way through: framing taken off, every promise of the client verified.

Nothing may become visible before it is verified. A small body is therefore received and checked whole before the origin
hears of it. A large one streams, but its last piece is held back until all signatures and checksums have been
checked: when one fails, the origin is left with an unfinished request, which stores nothing. One that goes to a sink is
the sink's to throw away.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from gateway.operations.exchange import Exchange
from gateway.operations.incoming import PUT_SIZE_BYTES_MAX, IncomingBody, is_checksum, is_streaming
from gateway.operations.request_body import Sink
from gateway.origin.client import UNSIGNED_PAYLOAD, StreamedBody
from gateway.s3.error_codes import s3_error

BUFFERED_SIZE_BYTES_MAX = 256 * 1024
"""Bodies up to this length are received whole: they can be sent to the origin again when an attempt fails."""

BUFFERED_GRACE_SECONDS = 30.0
BUFFERED_RATE_BYTES_PER_SECOND_MIN = 32 * 1024
"""How slow a body may be that is received whole, once the grace is over: its room is not others' meanwhile."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A body for the origin, and the headers that come with it."""

    body: bytes | StreamedBody = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    """What a sink has got. `md5` is the digest; `checksums` the `x-amz-checksum-…` header or trailer that it came with,
    lower-case name and base64 value, verified."""

    length_bytes: int
    md5: bytes
    checksums: Mapping[str, str]


def announced_bytes(exchange: Exchange) -> int:
    """How long the request says that its data is; 0 where receiving it will be refused for what it says."""
    length_bytes = exchange.body.length_bytes
    if is_streaming(exchange.request):
        declared = exchange.request.headers.get("x-amz-decoded-content-length", "")
        length_bytes = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    return length_bytes if length_bytes is not None and length_bytes <= PUT_SIZE_BYTES_MAX else 0


async def receive_payload(exchange: Exchange) -> Payload:
    """The request's body, ready to be sent on: verified whole when it is small, else verified as it streams."""
    incoming = _incoming(exchange)
    length_bytes = incoming.length_bytes
    if length_bytes is not None and length_bytes > BUFFERED_SIZE_BYTES_MAX:
        return Payload(_streamed(exchange, incoming, length_bytes))
    document = await _collect(exchange, incoming, BUFFERED_SIZE_BYTES_MAX)
    return Payload(document, {name: value for name, value in incoming.trailers.items() if is_checksum(name)})


async def receive_document(exchange: Exchange, size_bytes_max: int) -> bytes:
    """The whole body of an XML request, verified; MaxMessageLengthExceeded when it is longer than allowed."""
    return await _collect(exchange, _incoming(exchange), size_bytes_max)


async def receive_verified(exchange: Exchange, sink: Sink) -> Received:
    """Hand the body's data to `sink`, as `RequestBody.receive` does, and return once all of it has been verified.

    Raises as `RequestBody.receive`, and S3Error for whatever is not as promised; then what the sink has got is to be
    thrown away, though all of it may have come.
    """
    incoming = IncomingBody(exchange.request, exchange.seed, exchange.body.length_bytes, also=("md5",))
    length_bytes = 0

    def decode(data: memoryview) -> None:
        nonlocal length_bytes
        for piece in incoming.feed(data):
            length_bytes += len(piece)
            sink(memoryview(piece))

    await exchange.body.receive(decode)
    checksums = incoming.finish()
    return Received(length_bytes, incoming.digest("md5"), checksums)


def _incoming(exchange: Exchange) -> IncomingBody:
    return IncomingBody(exchange.request, exchange.seed, exchange.body.length_bytes)


def _streamed(exchange: Exchange, incoming: IncomingBody, length_bytes: int) -> StreamedBody:
    """The body for the origin. A checksum that comes behind it goes on in the same way, behind it."""
    pieces = _pieces(exchange, incoming)
    names = [name for name in incoming.trailer_names if is_checksum(name)]
    if not names:
        return StreamedBody(pieces, length_bytes, incoming.mode.sha256_hex or UNSIGNED_PAYLOAD)
    return StreamedBody(pieces, length_bytes, trailer_name=names[0], trailer_value=lambda: incoming.trailers[names[0]])


async def _collect(exchange: Exchange, incoming: IncomingBody, size_bytes_max: int) -> bytes:
    """All of it, verified; SlowDown when too much lies in memory already, RequestTimeout when it comes too slowly."""
    length_bytes = size_bytes_max if incoming.length_bytes is None else incoming.length_bytes
    if length_bytes > size_bytes_max:
        raise s3_error("MaxMessageLengthExceeded")
    clock, document = exchange.services.clock, bytearray()
    async with exchange.services.buffers.room(exchange.credential, length_bytes, clock):
        started = clock.monotonic()
        async for piece in _pieces(exchange, incoming):
            document += piece
            if len(document) > size_bytes_max:
                raise s3_error("MaxMessageLengthExceeded")
            late_seconds = clock.monotonic() - started - BUFFERED_GRACE_SECONDS
            if len(document) < late_seconds * BUFFERED_RATE_BYTES_PER_SECOND_MIN:
                raise s3_error("RequestTimeout")
        return bytes(document)


async def _pieces(exchange: Exchange, incoming: IncomingBody) -> AsyncIterator[bytes | memoryview]:
    """The data; the last piece comes only after everything has been verified."""
    held: bytes | memoryview = b""
    while data := await exchange.body.read():
        for piece in incoming.feed(data):
            if held:
                yield held
            held = piece
    incoming.finish()
    if held:
        yield held
