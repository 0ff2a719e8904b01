"""Bodies on their way through: framing, lengths, trailers, to the origin or to a sink (semantics, clause 4.2)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.clock import SystemClock
from gateway.core.errors import ClientDisconnected, S3Error
from gateway.operations.context import BodyBuffers, RequestContext, Sink
from gateway.operations.payload import (
    BUFFERED_SIZE_BYTES_MAX,
    PUT_SIZE_BYTES_MAX,
    Received,
    receive_payload,
    receive_verified,
)
from gateway.origin.client import StreamedBody
from gateway.s3.checksums import ALGORITHMS, Checksum
from gateway.s3.requests import parse_request
from gateway.s3.signature_v4 import SeedSignature
from tests.s3.chunks import seed_of, signed_body, unsigned_body
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app, within

SMALL = b"s" * 10_000
LARGE = b"l" * (BUFFERED_SIZE_BYTES_MAX + 10_000)
UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


def crc32(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def chunked(body: bytes, trailer: str) -> list[bytes]:
    wire = b"%x\r\n%s\r\n0\r\nx-amz-checksum-crc32:%s\r\n\r\n" % (len(body), body, trailer.encode())
    return [wire[start : start + 50_000] for start in range(0, len(wire), 50_000)]


def headers_of(body: bytes) -> dict[str, str]:
    return {
        "x-amz-content-sha256": UNSIGNED_TRAILER,
        "x-amz-decoded-content-length": str(len(body)),
        "x-amz-trailer": "x-amz-checksum-crc32",
        "Content-Encoding": "aws-chunked",
    }


async def put_chunked(gateway: GatewayApp, body: bytes, trailer: str) -> Answer:
    return await call(gateway.app, "PUT", "/bucket/k", headers_of(body), chunked(body, trailer))


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
@within(gateway_app)
async def test_an_aws_chunked_body_is_stored_without_its_frames_and_with_its_checksum(
    gateway: GatewayApp, body: bytes
) -> None:
    """The origin gets the decoded bytes, and the trailing checksum belongs to the object afterwards."""
    assert (await put_chunked(gateway, body, crc32(body))).status == 200
    assert gateway.origin.data("bucket", "k") == body
    head = await call(gateway.app, "HEAD", "/bucket/k", {"x-amz-checksum-mode": "ENABLED"})
    assert head.headers["x-amz-checksum-crc32"] == crc32(body)
    assert "content-encoding" not in head.headers


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
@within(gateway_app)
async def test_a_wrong_trailer_stores_nothing(gateway: GatewayApp, body: bytes) -> None:
    """The checksum arrives behind the body; the body must not be visible before it is compared."""
    answer = await put_chunked(gateway, body, crc32(b"other"))
    assert (answer.status, b"<Code>BadDigest</Code>" in answer.body) == (400, True)
    assert "k" not in gateway.origin.buckets["bucket"].objects


@within(gateway_app)
async def test_a_body_without_length_is_refused(gateway: GatewayApp) -> None:
    """PutObject needs Content-Length, or a streaming payload that declares its decoded length."""
    plain = {"Transfer-Encoding": "chunked", "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    assert (await call(gateway.app, "PUT", "/bucket/k", plain, [SMALL])).status == 411
    undeclared = {name: value for name, value in headers_of(SMALL).items() if "decoded" not in name}
    answer = await call(gateway.app, "PUT", "/bucket/k", undeclared, chunked(SMALL, crc32(SMALL)))
    assert (answer.status, b"<Code>MissingContentLength</Code>" in answer.body) == (411, True)


@within(gateway_app)
async def test_a_body_beyond_the_limit_is_refused_before_it_is_read(gateway: GatewayApp) -> None:
    """5 GiB is the limit of one PUT; the answer says both sizes and closes the connection."""
    size = PUT_SIZE_BYTES_MAX + 1
    headers = {"Content-Length": str(size), "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    answer = await call(gateway.app, "PUT", "/bucket/k", headers, [b"x"])
    assert f"<ProposedSize>{size}</ProposedSize>".encode() in answer.body
    assert answer.headers["connection"] == "close"


@within(gateway_app)
async def test_streaming_payloads_belong_to_objects(gateway: GatewayApp) -> None:
    """A chunk-signed CompleteMultipartUpload is no S3 request."""
    answer = await call(gateway.app, "POST", "/bucket/k?uploadId=u", headers_of(SMALL), chunked(SMALL, crc32(SMALL)))
    assert (answer.status, b"<Code>InvalidRequest</Code>" in answer.body) == (400, True)


@pytest.mark.parametrize("declared", ["9" * 5000, "9" * 20, "-1", "1e3", ""])
@within(gateway_app)
async def test_a_decoded_length_that_is_no_length_is_refused(gateway: GatewayApp, declared: str) -> None:
    """A number of thousands of digits is a client's mistake like any other, not a fault of the gateway."""
    headers = headers_of(SMALL) | {"x-amz-decoded-content-length": declared}
    answer = await call(gateway.app, "PUT", "/bucket/k", headers, chunked(SMALL, crc32(SMALL)))
    assert (answer.status, b"<Code>MissingContentLength</Code>" in answer.body) == (411, True)


@dataclass
class Body:
    """A request body that comes in these pieces; in one buffer, used again, where it goes to a sink."""

    pieces: Sequence[bytes]
    length_bytes: int | None
    error: Exception | None = None

    async def read(self) -> bytes:
        if self.pieces:
            piece, self.pieces = self.pieces[0], self.pieces[1:]
            return piece
        if self.error is not None:
            raise self.error
        return b""

    async def receive(self, sink: Sink) -> None:
        buffer = bytearray(max(map(len, self.pieces), default=0))
        while piece := await self.read():
            buffer[: len(piece)] = piece
            sink(memoryview(buffer)[: len(piece)].toreadonly())
            buffer[:] = bytes(len(buffer))


@dataclass(frozen=True)
class Upload:
    """A PutObject as a client makes it."""

    wire: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    seed: SeedSignature | None = None
    chunked: bool = False
    """HTTP chunks: no Content-Length."""

    def context(self, cuts: Sequence[int] = ()) -> RequestContext:
        borders = [0, *sorted(cut for cut in cuts if 0 < cut < len(self.wire)), len(self.wire)]
        pieces = [self.wire[first:stop] for first, stop in pairwise(borders) if first < stop]
        fields = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        request = parse_request("PUT", b"/bucket/key", b"", [(b"host", b"h"), *fields], ())
        body = Body(pieces, None if self.chunked else len(self.wire))
        services = cast("Any", SimpleNamespace(buffers=BodyBuffers(), clock=SystemClock()))
        return RequestContext(services, request, body, cast("Any", None), self.seed, cast("Any", None))


Outcome = tuple[bytes, dict[str, str]] | str
"""Data and verified checksum headers, or the code of the refusal."""


async def to_a_sink(context: RequestContext) -> Outcome:
    content = bytearray()
    try:
        received = await receive_verified(context, lambda data: content.extend(data))
    except S3Error as error:
        return error.code
    assert received.length_bytes == len(content)
    assert received.md5 == hashlib.md5(content, usedforsecurity=False).digest()
    return bytes(content), dict(received.checksums)


async def streamed(context: RequestContext) -> bytes | str:
    """What the origin would have got; nothing, where its request would have been left unfinished."""
    try:
        body = (await receive_payload(context)).body
        if not isinstance(body, StreamedBody):
            return body
        return b"".join([bytes(piece) async for piece in body.chunks])
    except S3Error as error:
        return error.code


def base64_of(algorithm: str, data: bytes) -> str:
    checksum = Checksum(algorithm)
    checksum.update(data)
    return checksum.base64()


def unsigned(data: bytes, **headers: str) -> Upload:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Upload(data, {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"} | named)


def in_chunks(data: bytes, mode: str, *, trailer: str | None = None, chunk_bytes: int = 8192) -> Upload:
    """aws-chunked; with a trailer, if named, of the right value."""
    chunks = [data[first : first + chunk_bytes] for first in range(0, len(data), chunk_bytes)]
    headers = {"x-amz-content-sha256": mode, "x-amz-decoded-content-length": str(len(data))}
    trailers = None
    if trailer is not None:
        headers["x-amz-trailer"] = f"x-amz-checksum-{trailer}"
        trailers = [(headers["x-amz-trailer"], base64_of(trailer, data))]
    if mode == "STREAMING-UNSIGNED-PAYLOAD-TRAILER":
        name, value = (trailers or [("", "")])[0]
        return Upload(unsigned_body(chunks, f"{name}:{value}" if trailer else ""), headers, chunked=True)
    return Upload(signed_body(chunks, seed_of(), trailers), headers, seed_of())


def of_kind(kind: str, data: bytes) -> Upload:
    if kind == "unsigned":
        return unsigned(data)
    if kind == "signed hash":
        return Upload(data, {"x-amz-content-sha256": hashlib.sha256(data).hexdigest()})
    if kind == "content-md5":
        return unsigned(data, content_md5=base64_of("md5", data))
    if kind in ALGORITHMS:
        return unsigned(data, **{f"x_amz_checksum_{kind}": base64_of(kind, data)})
    mode, _, trailer = kind.partition(" ")
    return in_chunks(data, mode, trailer=trailer or None)


KINDS = [
    "unsigned",
    "signed hash",
    "content-md5",
    *ALGORITHMS,
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER crc32",
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER md5",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER crc64nvme",
]

DATA = bytes(range(256)) * 1100
"""More than is received whole."""


@pytest.mark.parametrize("data", [b"", b"abc", DATA], ids=["empty", "small", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_body_arrives_with_what_vouches_for_it(kind: str, data: bytes) -> None:
    """Decoded, with its MD5 for the ETag, and with the checksum that it came with."""
    upload = of_kind(kind, data)
    outcome = asyncio.run(to_a_sink(upload.context([1, 100, 8195, 70_000])))
    named = kind.rpartition(" ")[2]
    checksums = {f"x-amz-checksum-{named}": base64_of(named, data)} if named in ALGORITHMS else {}
    assert outcome == (data, checksums)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    size_bytes=st.sampled_from([0, 1, 8192, 20_000, BUFFERED_SIZE_BYTES_MAX + 9]),
    cuts=st.lists(st.integers(1, 300_000), max_size=8),
    harm=st.one_of(st.none(), st.tuples(st.integers(0, 300_000), st.sampled_from(["flip", "drop", "add"]))),
)
def test_a_sink_gets_what_a_stream_gives(
    kind: str, size_bytes: int, cuts: list[int], harm: tuple[int, str] | None
) -> None:
    """However it is cut, and whatever is done to it on the way: the same bytes, or the same refusal."""
    upload = of_kind(kind, DATA[:size_bytes])
    if harm is not None and upload.wire:
        upload = Upload(harmed(upload.wire, *harm), upload.headers, upload.seed, upload.chunked)
    sunk = asyncio.run(to_a_sink(upload.context(cuts)))
    flowed = asyncio.run(streamed(upload.context(cuts)))
    assert (sunk if isinstance(sunk, str) else sunk[0]) == flowed
    if harm is None:
        assert flowed == DATA[:size_bytes]


def harmed(wire: bytes, at: int, how: str) -> bytes:
    at %= len(wire)
    if how == "flip":
        return wire[:at] + bytes([wire[at] ^ 1]) + wire[at + 1 :]
    return wire[:at] + (wire[at + 1 :] if how == "drop" else b"0" + wire[at:])


@pytest.mark.parametrize("chunk_bytes", [1, 8192, 4 * 1024**2])
def test_chunks_of_any_size_stream(chunk_bytes: int) -> None:
    """Nothing is gathered until a chunk is complete."""
    data = DATA[: 10 * chunk_bytes] if chunk_bytes > 1 else DATA[:1000]
    upload = in_chunks(data, "STREAMING-UNSIGNED-PAYLOAD-TRAILER", trailer="crc32", chunk_bytes=chunk_bytes)
    outcome = asyncio.run(to_a_sink(upload.context(range(0, len(upload.wire), 997))))
    assert isinstance(outcome, tuple)
    assert outcome[0] == data


WRONG = {
    "BadDigest": unsigned(DATA, content_md5=base64_of("md5", b"other")),
    "XAmzContentSHA256Mismatch": Upload(DATA, {"x-amz-content-sha256": hashlib.sha256(b"other").hexdigest()}),
    "InvalidDigest": unsigned(DATA, content_md5="no digest"),
    "MissingContentLength": Upload(DATA, {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}, chunked=True),
    "SignatureDoesNotMatch": Upload(
        signed_body([DATA], seed_of("6" * 64)),
        {
            "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
            "x-amz-decoded-content-length": str(len(DATA)),
        },
        seed_of(),
    ),
}


@pytest.mark.parametrize("code", WRONG)
def test_what_is_not_as_promised_is_refused(code: str) -> None:
    """Before `receive_verified` returns, so that nobody acknowledges it."""
    assert asyncio.run(to_a_sink(WRONG[code].context())) == code


def test_more_than_s3_takes_is_refused_before_any_of_it_is_received() -> None:
    """5 GiB for one PUT."""

    async def scenario() -> None:
        context = unsigned(DATA).context()
        cast("Body", context.body).length_bytes = PUT_SIZE_BYTES_MAX + 1
        assert await to_a_sink(context) == "EntityTooLarge"
        assert await context.body.read() == DATA

    asyncio.run(scenario())


def test_a_body_that_ends_early_is_incomplete() -> None:
    """Fewer bytes than the Content-Length."""

    async def scenario() -> None:
        context = unsigned(DATA).context()
        cast("Body", context.body).length_bytes = len(DATA) + 1
        assert await to_a_sink(context) == "IncompleteBody"

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ClientDisconnected("left"), OSError("the disk is full")])
def test_failures_on_the_way_come_out_as_they_are(error: Exception) -> None:
    """Of the client, and of the sink."""

    async def scenario() -> Received:
        context = unsigned(DATA).context()
        cast("Body", context.body).error = error
        return await receive_verified(context, lambda data: None)

    with pytest.raises(type(error)) as caught:
        asyncio.run(scenario())
    assert caught.value is error


def test_the_md5_is_that_of_the_etag() -> None:
    """One pass gives it, whoever else asks for MD5 too."""
    upload = unsigned(DATA, content_md5=base64_of("md5", DATA))
    received = asyncio.run(receive_verified(upload.context(), lambda data: None))
    assert base64.b64encode(received.md5).decode() == upload.headers["content-md5"]
