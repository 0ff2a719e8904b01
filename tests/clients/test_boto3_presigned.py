"""URLs that boto3 presigns for the gateway work for whoever has nothing but the URL."""

from __future__ import annotations

import ssl
import time
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.clients.boto import boto3_client, read
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, ODD_KEYS, random_bytes

pytestmark = pytest.mark.clients

SIGNATURES = ["s3", "s3v4"]  # SigV2 in the query is what boto3 presigns by default; SigV4 when asked


def _fetch(endpoint: Endpoint, url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body, without any S3 library."""
    context = ssl.create_default_context(cafile=endpoint.ca_file) if endpoint.ca_file else None
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if context:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(url, data=body, method=method)
    if body is not None:
        request.add_header("Content-Type", "")  # urllib would add one of its own, which was not signed
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=60) as response:
            return response.status, response.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture(params=SIGNATURES)
def presigner(request: pytest.FixtureRequest, endpoint: Endpoint) -> Any:
    return boto3_client(endpoint.url, endpoint.ca_file, signature_version=request.param)


def test_boto3_presigns_v2_by_default(endpoint: Endpoint, bucket: str) -> None:
    """If boto3 changes its default, the tests below no longer cover what people use."""
    client = boto3_client(endpoint.url, endpoint.ca_file)
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
    assert "AWSAccessKeyId=" in url


@pytest.mark.parametrize("key", ["plain", *ODD_KEYS[3:18]], ids=repr)
def test_presigned_get(key: str, presigner: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """GET by URL gives the origin's bytes, the first time and from cache."""
    content = random_bytes(MIB)
    direct.put_object(Bucket=bucket, Key=key, Body=content)
    url = presigner.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key})
    for _ in range(2):
        assert _fetch(endpoint, url) == (200, content)


def test_presigned_head(presigner: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """HEAD by URL answers 200 without a body, 404 for what is missing."""
    direct.put_object(Bucket=bucket, Key="object", Body=b"content")
    for key, status in (("object", 200), ("missing", 404)):
        url = presigner.generate_presigned_url("head_object", Params={"Bucket": bucket, "Key": key})
        assert _fetch(endpoint, url, "HEAD") == (status, b"")


def test_presigned_put(presigner: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """PUT by URL stores the body at the origin."""
    url = presigner.generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "object", "ContentType": ""})
    content = random_bytes(MIB)
    status, _ = _fetch(endpoint, url, "PUT", content)
    assert status == 200
    assert read(direct, bucket, "object") == content


def test_response_overrides(presigner: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """A URL that names the download is answered with that content disposition."""
    direct.put_object(Bucket=bucket, Key="object", Body=b"content")
    url = presigner.generate_presigned_url(
        "get_object",
        Params={"Bucket": bucket, "Key": "object", "ResponseContentDisposition": 'attachment; filename="a b.tar"'},
    )
    assert "response-content-disposition" in url
    assert _fetch(endpoint, url) == (200, b"content")


def test_an_altered_url_is_refused(presigner: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """A URL opens one object: changed to name another, it is refused with 403, cached or not."""
    for key in ("object", "secret"):
        direct.put_object(Bucket=bucket, Key=key, Body=b"content")
    url = presigner.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "object"})
    assert _fetch(endpoint, url) == (200, b"content")
    altered = url.replace("/object?", "/secret?")
    assert altered != url
    status, body = _fetch(endpoint, altered)
    assert (status, b"content" in body) == (403, False)


def test_a_url_expires(presigner: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """A URL of one second is refused with 403 a few seconds later, though its object is cached."""
    direct.put_object(Bucket=bucket, Key="object", Body=b"content")
    url = presigner.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "object"}, ExpiresIn=1)
    deadline = time.monotonic() + 10
    while (answer := _fetch(endpoint, url))[0] == 200:
        assert time.monotonic() < deadline, "the URL still works"
    assert answer[0] == 403
    assert b"Request has expired" in answer[1]
