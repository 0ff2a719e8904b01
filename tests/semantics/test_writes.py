"""Clauses 4 and 6 of docs/semantics.md."""

from __future__ import annotations

import base64
import hashlib
import zlib
from pathlib import Path

import pytest

from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.memory_origin.faults import AlterBody, Unreachable, on

SMALL = b"small body"
LARGE = bytes(range(256)) * 4096
"""One MiB: streams to the origin, where SMALL is received whole first."""

MD5_OF_OTHER_BYTES = base64.b64encode(hashlib.md5(b"other").digest()).decode()
CRC32_OF_OTHER_BYTES = base64.b64encode(zlib.crc32(b"other").to_bytes(4, "big")).decode()


def pieces(body: bytes, size: int = 60_000) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


async def test_4_1_the_etag_answered_is_the_origins(tmp_path: Path) -> None:
    """4.1 A 200 means that the origin has accepted it, with the ETag that it shows."""
    async with gateway_app(tmp_path) as gateway:
        answer = await call(gateway.app, "PUT", "/bucket/k", body=pieces(LARGE))
        assert answer.status == 200
        assert answer.headers["etag"] == f'"{hashlib.md5(LARGE).hexdigest()}"'
        assert gateway.origin.data("bucket", "k") == LARGE


@pytest.mark.parametrize("body", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-MD5": MD5_OF_OTHER_BYTES}, "BadDigest"),
        ({"x-amz-checksum-crc32": CRC32_OF_OTHER_BYTES}, "BadDigest"),
        ({"x-amz-content-sha256": hashlib.sha256(b"other").hexdigest()}, "XAmzContentSHA256Mismatch"),
        ({"Content-MD5": "not base64"}, "InvalidDigest"),
    ],
)
async def test_4_2_a_body_that_fails_a_check_changes_nothing(
    tmp_path: Path, body: bytes, headers: dict[str, str], code: str
) -> None:
    """4.2 Whatever a client promised of its body is verified before anything becomes visible."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", b"before")
        answer = await call(gateway.app, "PUT", "/bucket/k", headers, pieces(body))
        assert answer.status == 400
        assert f"<Code>{code}</Code>".encode() in answer.body
        assert gateway.origin.data("bucket", "k") == b"before"


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_4_2_a_body_that_breaks_off_stores_nothing(tmp_path: Path, body: bytes) -> None:
    """4.2 A client that leaves in the middle of its upload leaves what was there untouched."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", b"before")
        headers = {"Content-Length": str(len(body) + 1), "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
        await call(gateway.app, "PUT", "/bucket/k", headers, [*pieces(body), b""][:-1])
        assert gateway.origin.data("bucket", "k") == b"before"


async def test_4_3_conditions_on_writes_are_the_origins(tmp_path: Path) -> None:
    """4.3 `If-None-Match: *` on an object that exists is refused with the origin's 412."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", b"before")
        answer = await call(gateway.app, "PUT", "/bucket/k", {"If-None-Match": "*"}, SMALL)
        assert (answer.status, b"<Code>PreconditionFailed</Code>" in answer.body) == (412, True)
        assert gateway.origin.data("bucket", "k") == b"before"


async def upload_one_part(gateway: GatewayApp) -> tuple[str, bytes]:
    created = await call(gateway.app, "POST", "/bucket/k?uploads")
    upload_id = created.body.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
    part = await call(gateway.app, "PUT", f"/bucket/k?partNumber=1&uploadId={upload_id}", body=SMALL)
    document = (
        "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
        f"<ETag>{part.headers['etag']}</ETag></Part></CompleteMultipartUpload>"
    )
    return upload_id, document.encode()


async def complete(gateway: GatewayApp) -> Answer:
    upload_id, document = await upload_one_part(gateway)
    return await call(gateway.app, "POST", f"/bucket/k?uploadId={upload_id}", body=document)


ETAG_OF_THE_UPLOAD = hashlib.md5(hashlib.md5(SMALL).digest()).hexdigest() + "-1"


async def test_4_1_a_completed_upload_is_visible(tmp_path: Path) -> None:
    """4.1 The 200 to CompleteMultipartUpload means that every reader sees the object."""
    async with gateway_app(tmp_path) as gateway:
        answer = await complete(gateway)
        assert ETAG_OF_THE_UPLOAD.encode() in answer.body
        assert (await call(gateway.app, "GET", "/bucket/k")).body == SMALL


async def test_4_1_an_empty_etag_of_the_origin_is_made_good(tmp_path: Path) -> None:
    """4.1 RGW answers Complete with an empty ETag; the client gets the one that HEAD shows."""
    async with gateway_app(tmp_path) as gateway:
        quoted = f"&quot;{ETAG_OF_THE_UPLOAD}&quot;".encode()
        gateway.origin.inject(
            on(Operation.COMPLETE_MULTIPART_UPLOAD), AlterBody(lambda body: body.replace(quoted, b""))
        )
        answer = await complete(gateway)
        assert b"<ETag>" + quoted + b"</ETag>" in answer.body


async def test_4_4_a_lost_answer_to_complete_is_settled_by_the_etag(tmp_path: Path) -> None:
    """4.4 The origin completed and its answer was lost: the client hears of a success."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(late=True))
        answer = await complete(gateway)
        assert answer.status == 200
        assert ETAG_OF_THE_UPLOAD.encode() in answer.body


async def test_4_4_a_complete_that_never_arrived_is_an_error_that_clients_retry(tmp_path: Path) -> None:
    """4.4 The origin never saw the request: 503, and the upload can still be completed."""
    async with gateway_app(tmp_path) as gateway:
        upload_id, document = await upload_one_part(gateway)
        gateway.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable())
        target = f"/bucket/k?uploadId={upload_id}"
        assert (await call(gateway.app, "POST", target, body=document)).status == 503
        assert (await call(gateway.app, "POST", target, body=document)).status == 200
