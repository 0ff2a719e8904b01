"""Bodies on their way through: framing, lengths, trailers (docs/semantics.md, clause 4.2)."""

from __future__ import annotations

import base64
import zlib

import pytest

from gateway.operations.payload import BUFFERED_SIZE_BYTES_MAX, PUT_SIZE_BYTES_MAX
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app, given

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
@given(gateway_app)
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
@given(gateway_app)
async def test_a_wrong_trailer_stores_nothing(gateway: GatewayApp, body: bytes) -> None:
    """The checksum arrives behind the body; the body must not be visible before it is compared."""
    answer = await put_chunked(gateway, body, crc32(b"other"))
    assert (answer.status, b"<Code>BadDigest</Code>" in answer.body) == (400, True)
    assert "k" not in gateway.origin.buckets["bucket"].objects


@given(gateway_app)
async def test_a_body_without_length_is_refused(gateway: GatewayApp) -> None:
    """PutObject needs Content-Length, or a streaming payload that declares its decoded length."""
    plain = {"Transfer-Encoding": "chunked", "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    assert (await call(gateway.app, "PUT", "/bucket/k", plain, [SMALL])).status == 411
    undeclared = {name: value for name, value in headers_of(SMALL).items() if "decoded" not in name}
    answer = await call(gateway.app, "PUT", "/bucket/k", undeclared, chunked(SMALL, crc32(SMALL)))
    assert (answer.status, b"<Code>MissingContentLength</Code>" in answer.body) == (411, True)


@given(gateway_app)
async def test_a_body_beyond_the_limit_is_refused_before_it_is_read(gateway: GatewayApp) -> None:
    """5 GiB is the limit of one PUT; the answer says both sizes and closes the connection."""
    size = PUT_SIZE_BYTES_MAX + 1
    headers = {"Content-Length": str(size), "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    answer = await call(gateway.app, "PUT", "/bucket/k", headers, [b"x"])
    assert f"<ProposedSize>{size}</ProposedSize>".encode() in answer.body
    assert answer.headers["connection"] == "close"


@given(gateway_app)
async def test_streaming_payloads_belong_to_objects(gateway: GatewayApp) -> None:
    """A chunk-signed CompleteMultipartUpload is no S3 request."""
    answer = await call(gateway.app, "POST", "/bucket/k?uploadId=u", headers_of(SMALL), chunked(SMALL, crc32(SMALL)))
    assert (answer.status, b"<Code>InvalidRequest</Code>" in answer.body) == (400, True)


@pytest.mark.parametrize("declared", ["9" * 5000, "9" * 20, "-1", "1e3", ""])
@given(gateway_app)
async def test_a_decoded_length_that_is_no_length_is_refused(gateway: GatewayApp, declared: str) -> None:
    """A number of thousands of digits is a client's mistake like any other, not a fault of the gateway."""
    headers = headers_of(SMALL) | {"x-amz-decoded-content-length": declared}
    answer = await call(gateway.app, "PUT", "/bucket/k", headers, chunked(SMALL, crc32(SMALL)))
    assert (answer.status, b"<Code>MissingContentLength</Code>" in answer.body) == (411, True)
