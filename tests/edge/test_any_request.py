"""No request, however odd, is answered with InternalError: that would be a fault of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.asgi import Answer, call
from tests.support.gateway_app import gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin

PATHS = ["/", "//", "/bucket", "/bucket/", "/bucket/k", "/bucket/%00", "/bucket/%ff", "/bucket/%", "/bucket//../.",
         "/bucket/%E2%82%AC", "/a:b/k", "/%62ucket/k", f"/bucket/{'k' * 1025}", "/none/k"]  # fmt: skip

PARAMETERS = [
    "acl", "tagging", "uploads", "uploadId", "uploadId=u", "partNumber=0", "partNumber=1", "partNumber=x", "delete",
    "list-type=2", "prefix", "max-keys=-1", "max-keys=x", "versionId=", "versionId=null", "select", "select-type=2",
    "location", "versions", "session", "continuation-token=%00", "encoding-type=url", "delimiter=%F0%9F%98%80",
    "response-content-type=%0a", "response-expires=%C3%A9", "x-amz-checksum-mode=ENABLED", "=", "=v", "%00=%00",
    "X-Amz-Algorithm=AWS4-HMAC-SHA256", "X-Amz-Credential=%00", "Signature=s", "AWSAccessKeyId=a", "Expires=9",
]  # fmt: skip

NAMES = [
    "range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range", "content-md5",
    "content-type", "content-encoding", "authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-trailer",
    "x-amz-decoded-content-length", "x-amz-checksum-crc32", "x-amz-checksum-sha256", "x-amz-checksum-mode",
    "x-amz-sdk-checksum-algorithm", "x-amz-copy-source", "x-amz-copy-source-range", "x-amz-meta-x", "x-amz-tagging",
    "x-amz-security-token", "x-amz-target", "x-amz-expected-bucket-owner", "connection", "x-forebay-hop",
]  # fmt: skip

VALUES = [
    "", "0", "-1", "1", "9" * 18, "9" * 5000, "\xff", "\xc3\xa9", ",", '"', "*", "bytes=0-", "bytes=-0", "bytes=9-1",
    f"bytes=0-{'9' * 5000}", 'W/"e"', "Wed, 99 Oct 0000 99:99:99 GMT", "Sun Nov  6 08:49:37 1994", "ENABLED", "CRC32",
    "UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "aws-chunked",
    "AAAAAA==", "bucket/k", "bucket/k?versionId=", "%", "x-amz-checksum-crc32", "a,b", "AWS4-HMAC-SHA256 a=b",
    "AWS4-HMAC-SHA256 Credential=a/b/c/s3/aws4_request, SignedHeaders=host, Signature=s", "AWS a:b", "f" * 64,
]  # fmt: skip

BODIES = [
    b"", b"x", b"0\r\n\r\n", b"1\r\na\r\n0\r\n\r\n", b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n", b"x" * 300_000,
    b"<Delete><Object><Key>k</Key></Object></Delete>", b"<Delete/>",
    b"<Delete><Object><Key>\xff</Key></Object></Delete>",
    b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>&#x20AC;</ETag></Part></CompleteMultipartUpload>",
    b"<!DOCTYPE a [<!ENTITY x 'y'>]><Delete>&x;</Delete>", b"\xfe\xff", b"Action=GetCallerIdentity",
]  # fmt: skip


def ask(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
    async def scenario() -> Answer:
        origin = MemoryOrigin(ManualClock())
        origin.create_bucket("bucket")
        origin.put("bucket", "k", b"content")
        with TemporaryDirectory() as directory:
            async with gateway_app(Path(directory), origin=origin, allow_unsigned=True) as gateway:
                return await call(gateway.app, method, target, headers, body, sign=False)

    return asyncio.run(scenario())


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH"]),
    st.sampled_from(PATHS),
    st.lists(st.sampled_from(PARAMETERS), max_size=3),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES), max_size=4),
    st.sampled_from(BODIES),
)
def test_no_request_is_an_internal_error(
    method: str, path: str, parameters: list[str], headers: dict[str, str], body: bytes
) -> None:
    """Every combination of odd targets, headers and bodies gets an answer, and one that says what is wrong with it."""
    answer = ask(method, f"{path}?{'&'.join(parameters)}" if parameters else path, headers, body)
    assert answer.status != 500, answer.body
    assert answer.status >= 200
