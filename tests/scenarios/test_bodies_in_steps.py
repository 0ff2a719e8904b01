"""No body holds the event loop: what is much is done in steps, or refused (docs/security.md)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.edge import request_parsing
from gateway.operations.payload import BUFFERED_SIZE_BYTES_MAX
from gateway.policy.slots import Prefix
from gateway.s3 import aws_chunked
from tests.support.asgi import call, signed_headers
from tests.support.cache_label import cache_label
from tests.support.gateway_app import gateway_app
from tests.support.loop_steps import longest_step
from tests.support.serving import serving
from tests.support.slots import Slot

LINES_MAX = 80_000
"""Some 10 ms: 1,024 chunks of any size, and what 256 KiB hold besides, are 50,000."""

TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
SIZE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Request:
    """What a client sends, and what it is told."""

    body: bytes
    status: int
    target: str = "/bucket/key"
    method: str = "PUT"
    headers: Mapping[str, str] = field(default_factory=dict)


def aws_chunks(chunks: list[bytes], status: int = 200, **more: str) -> Request:
    data = b"".join(chunks)
    crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big"))
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    headers = {
        "x-amz-content-sha256": TRAILER,
        "x-amz-decoded-content-length": str(len(data)),
        "x-amz-trailer": "x-amz-checksum-crc32",
    }
    return Request(body + b"0\r\nx-amz-checksum-crc32:%b\r\n\r\n" % crc, status, **more, headers=headers)


def http_chunks(request: Request, sizes: list[int], status: int) -> Request:
    """The same body in such HTTP chunks, again and again."""
    body, wire, position, number = request.body, bytearray(), 0, 0
    while position < len(body):
        chunk = body[position : position + sizes[number % len(sizes)]]
        wire += b"%x\r\n%b\r\n" % (len(chunk), chunk)
        position, number = position + len(chunk), number + 1
    headers = {**request.headers, "Transfer-Encoding": "chunked"}
    return Request(bytes(wire) + b"0\r\n\r\n", status, request.target, request.method, headers)


def small_chunks(least: int, count: int, size_bytes: int) -> list[bytes]:
    """As many as may have any size, then the smallest that are allowed on average."""
    pairs = size_bytes // (2 * least)
    return [b"x"] * (count - 1) + [b"y" * (2 * least - 1), b"z"] * pairs


def document(target: str, body: bytes, status: int) -> Request:
    digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    return Request(body, status, target, "POST", {"content-md5": digest})


def delete(inner: bytes, status: int) -> Request:
    return document("/bucket?delete", b"<Delete>%b</Delete>" % inner, status)


def complete(inner: bytes, status: int) -> Request:
    name = b"CompleteMultipartUpload"
    return document("/bucket/key?uploadId=none", b"<%b>%b</%b>" % (name, inner, name), status)


def objects(key: bytes) -> bytes:
    fields = b"<VersionId>%b</VersionId><ETag>e</ETag><Size>1</Size>" % (b"v" * 1000)
    return b"".join(b"<Object><Key>%b%d</Key>%b</Object>" % (key, number, fields) for number in range(1000))


def parts(count: int, more: bytes = b"") -> bytes:
    fields = b"<ETag>&quot;%b&quot;</ETag><ChecksumSHA256>%b=</ChecksumSHA256>%b" % (b"0" * 32, b"A" * 43, more)
    return b"".join(b"<Part><PartNumber>%d</PartNumber>%b</Part>" % (number, fields) for number in range(1, count + 1))


ATTRIBUTES = b" ".join(b"a%d=''" % number for number in range(900))
AWS_LEAST, AWS_SMALL = aws_chunked.CHUNK_SIZE_BYTES_MIN, aws_chunked.SMALL_CHUNKS_MAX
HTTP_LEAST, HTTP_SMALL = request_parsing.CHUNK_BYTES_MIN, request_parsing.SMALL_CHUNKS_MAX

REQUESTS: Mapping[str, Callable[[], Request]] = {
    "counted": lambda: Request(bytes(SIZE_BYTES), 200, headers={"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}),
    "aws-chunks of 64 KiB": lambda: aws_chunks([bytes(65_536)] * 32),
    "aws-chunks, the smallest": lambda: aws_chunks(small_chunks(AWS_LEAST, AWS_SMALL, SIZE_BYTES)),
    "aws-chunks, the smallest, received whole": lambda: aws_chunks(
        small_chunks(AWS_LEAST, AWS_SMALL, BUFFERED_SIZE_BYTES_MAX - AWS_SMALL)
    ),
    "aws-chunks, the smallest, written back": lambda: aws_chunks(
        small_chunks(AWS_LEAST, AWS_SMALL, SIZE_BYTES), target="/bucket/back/key"
    ),
    "aws-chunks of a byte": lambda: aws_chunks([b"x"] * 300_000, 403),
    "aws-chunks of a byte, behind a large one": lambda: aws_chunks([bytes(SIZE_BYTES)] + [b"x"] * 60_000, 403),
    "aws-chunks of a byte, written back": lambda: aws_chunks([b"x"] * 300_000, 403, target="/bucket/back/key"),
    "HTTP chunks, the smallest": lambda: http_chunks(aws_chunks([bytes(SIZE_BYTES)]), [1, 2 * HTTP_LEAST - 1], 200),
    "HTTP chunks, the smallest, written back": lambda: http_chunks(
        aws_chunks([bytes(SIZE_BYTES)], target="/bucket/back/key"), [1, 2 * HTTP_LEAST - 1], 200
    ),
    "HTTP and aws-chunks, the smallest": lambda: http_chunks(
        aws_chunks(small_chunks(AWS_LEAST, AWS_SMALL, SIZE_BYTES)), [1, 2 * HTTP_LEAST - 1], 200
    ),
    "HTTP chunks of a byte": lambda: http_chunks(aws_chunks([bytes(100_000)]), [1], 400),
    "HTTP chunks of a byte, behind a large one": lambda: http_chunks(
        aws_chunks([bytes(SIZE_BYTES + 100_000)]), [SIZE_BYTES, *[1] * 100_000], 400
    ),
    "DeleteObjects of 1,000 long keys": lambda: delete(objects(b"k" * 1000), 200),
    "DeleteObjects with attributes": lambda: delete(
        b"".join(b"<Object %b><Key>k%d</Key></Object>" % (ATTRIBUTES, number) for number in range(1000)), 200
    ),
    "DeleteObjects of many elements": lambda: delete(b"<Object/>" * 500_000, 400),
    "DeleteObjects of one object of many": lambda: delete(b"<Object>%b</Object>" % (b"<Key>a</Key>" * 15_000), 400),
    "DeleteObjects of one tag": lambda: delete(b"<Object %b/>" % b" ".join([ATTRIBUTES] * 700), 400),
    "DeleteObjects of references": lambda: delete(b"<Object><Key>%b</Key></Object>" % (b"&#97;" * 1_000_000), 200),
    "DeleteObjects of lines": lambda: delete(b"\n" * 7_000_000, 400),
    "Complete of 10,000 parts": lambda: complete(parts(10_000), 404),
    "Complete of many elements": lambda: complete(b"<a></a>" * 159_000 + parts(1), 400),
    "Complete of one part of many": lambda: complete(parts(1, b"<a></a>" * 150_000), 400),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
async def test_no_body_holds_the_event_loop(tmp_path: Path, name: str) -> None:
    """Every grammar of bodies, at the largest and the finest that it may be, and beyond."""
    request = REQUESTS[name]()
    headers = signed_headers(request.method, request.target, request.headers, request.body)
    headers.setdefault("Content-Length", str(len(request.body)))
    if "Transfer-Encoding" in headers:
        del headers["Content-Length"]

    def ask(port: int) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for field_name, value in headers.items():
                connection.putheader(field_name, value)
            connection.endheaders()
            connection.send(request.body)
            answer = connection.getresponse()
            return answer.status, cache_label(answer)
        finally:
            connection.close()

    slots = [Slot("back", Prefix.parse("s3://bucket/back/"), write="back")]
    async with gateway_app(tmp_path, writeback=True, slots=slots) as gateway, serving(gateway.app) as port:
        first = await call(gateway.app, "PUT", "/bucket/back/first", {}, [b"x"])
        assert first.status == 200  # and now it is known what the bucket's answers are like
        with longest_step() as longest:
            status, came_from = await asyncio.to_thread(ask, port.port)
        if status == 200:
            assert (came_from == "absorbed") == name.endswith("written back")
        assert status == request.status
        assert longest.lines <= LINES_MAX, str(longest)
