"""Who is calling: presigned requests, and mechanisms that exclude each other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config

from tests.support.asgi import ACCESS_KEY_ID, HOST, SECRET_ACCESS_KEY, Answer, call, signed_headers
from tests.support.gateway_app import gateway_app


def presign(method: str, version: str, *, secret: str = SECRET_ACCESS_KEY, **parameters: Any) -> str:
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{HOST}",
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=secret,
        config=Config(signature_version=version),
    )
    url = urlsplit(client.generate_presigned_url(method, Params={"Bucket": "bucket", "Key": "k", **parameters}))
    return f"{url.path}?{url.query}"


async def ask(directory: Path, method: str, target: str, body: bytes = b"", **options: Any) -> Answer:
    async with gateway_app(directory, **options) as gateway:
        gateway.origin.put("bucket", "k", b"stored")
        return await call(gateway.app, method, target, {}, body, sign=False)


@pytest.mark.parametrize("version", ["s3v4", "s3"])
async def test_presigned_reads_are_accepted(tmp_path: Path, version: str) -> None:
    """What boto3 makes by default (V2) and on request (V4), with overrides, gives the object."""
    target = presign("get_object", version, ResponseContentType="text/plain")
    answer = await ask(tmp_path, "GET", target)
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"stored", "text/plain")
    assert (await ask(tmp_path / "head", "HEAD", presign("head_object", version))).status == 200


@pytest.mark.parametrize("version", ["s3v4", "s3"])
async def test_a_presigned_url_of_another_secret_is_refused(tmp_path: Path, version: str) -> None:
    """Neither version admits a signature that does not hold."""
    answer = await ask(tmp_path, "GET", presign("get_object", version, secret="wrong"))
    assert b"<Code>SignatureDoesNotMatch</Code>" in answer.body


@pytest.mark.parametrize("version", ["s3v4", "s3"])
async def test_presigned_writes_are_accepted(tmp_path: Path, version: str) -> None:
    """PUT by a URL that boto3 makes, as it comes (V2) and on request (V4), stores the object."""
    answer = await ask(tmp_path, "PUT", presign("put_object", version), b"new")
    assert (answer.status, answer.headers["etag"]) == (200, f'"{hashlib.md5(b"new").hexdigest()}"')
    assert (await ask(tmp_path / "delete", "DELETE", presign("delete_object", version))).status == 204


async def test_version_2_can_be_switched_off(tmp_path: Path) -> None:
    """The refusal names the setting."""
    answer = await ask(tmp_path, "GET", presign("get_object", "s3"), allow_signature_v2=False)
    assert answer.status == 400
    assert b"server.allow_signature_v2" in answer.body


async def test_two_signatures_are_one_too_many(tmp_path: Path) -> None:
    """A request signed in the header and in the query is ambiguous, and refused."""
    async with gateway_app(tmp_path) as gateway:
        target = presign("get_object", "s3v4")
        headers = signed_headers("GET", target, {}, b"")
        answer = await call(gateway.app, "GET", target, headers, sign=False)
    assert (answer.status, b"<Code>InvalidArgument</Code>" in answer.body) == (400, True)


async def test_a_signature_in_the_query_never_reaches_the_origin(tmp_path: Path) -> None:
    """The caller's signature is taken off; the origin gets the gateway's own."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", b"stored")
        await call(gateway.app, "GET", presign("get_object", "s3v4", VersionId="null"), sign=False)
        found = [name for name, _ in gateway.origin.calls[-1].query]
    assert found == ["versionId"]
