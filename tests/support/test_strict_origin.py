"""The strict origin is strict: a real client passes, and whatever is changed on the way is noticed."""

from __future__ import annotations

import gc
import http.client
import io
import socket
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError, ConnectionClosedError

from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin


@pytest.fixture(scope="module")
def strict() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.model.put("bucket", "key", b"0123456789")
        yield origin


def client(strict: StrictOrigin, secret: str = SECRET_ACCESS_KEY, region: str = "us-east-1") -> Any:
    return boto3.client(
        "s3",
        endpoint_url=strict.endpoint_url,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=secret,
        region_name=region,
        config=Config(retries={"total_max_attempts": 1}),
    )


def test_boto3_reads_writes_and_uploads_parts(strict: StrictOrigin) -> None:
    """An unmodified client with its default checksums is content."""
    s3 = client(strict)
    s3.put_object(Bucket="bucket", Key="a/../b +%2F€", Body=b"x" * 100, Metadata={"step": "1"})
    assert s3.get_object(Bucket="bucket", Key="a/../b +%2F€")["Metadata"] == {"step": "1"}
    data = bytes(range(256)) * (9 * 4096)
    s3.upload_fileobj(io.BytesIO(data), "bucket", "large")
    assert s3.get_object(Bucket="bucket", Key="large", ChecksumMode="ENABLED")["Body"].read() == data
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="bucket")["Contents"]]
    assert keys == ["a/../b +%2F€", "key", "large"]


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_every_checksum_is_accepted_when_right(strict: StrictOrigin, algorithm: str) -> None:
    """What boto3 computes is what the strict origin computes."""
    answer = client(strict).put_object(Bucket="bucket", Key=algorithm, Body=b"data", ChecksumAlgorithm=algorithm)
    assert f"Checksum{algorithm}" in answer


def test_a_wrong_secret_is_refused(strict: StrictOrigin) -> None:
    """As moto would not."""
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client(strict, "wrong").get_object(Bucket="bucket", Key="key")


def test_a_client_in_another_region_is_told_the_right_one(strict: StrictOrigin) -> None:
    """boto3 reads the region in the refusal, and signs anew."""
    assert client(strict, region="eu-west-1").get_object(Bucket="bucket", Key="key")["ContentLength"] == 10


def signed(strict: StrictOrigin, method: str, target: str, headers: dict[str, str], body: bytes) -> dict[str, str]:
    """The headers of a request that is right."""
    request = AWSRequest(method, f"{strict.endpoint_url}{target}", headers, body)
    S3SigV4Auth(Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY), "s3", "us-east-1").add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


def exchange(
    strict: StrictOrigin, method: str, target: str, headers: dict[str, str], body: bytes | None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(strict.endpoint_url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("change", "body", "code"),
    [
        ({}, b"DATA", b"XAmzContentSHA256Mismatch"),
        ({"x-amz-meta-new": "1"}, b"data", b"not signed"),
        ({"x-amz-meta-a": "2"}, b"data", b"SignatureDoesNotMatch"),
        ({"x-amz-date": "20200101T000000Z"}, b"data", b"RequestTimeTooSkewed"),
        ({"content-md5": "AAAAAAAAAAAAAAAAAAAAAA=="}, b"data", b"BadDigest"),
        ({"authorization": "nonsense"}, b"data", b"AuthorizationHeaderMalformed"),
    ],
)
def test_anything_changed_on_the_way_is_refused(
    strict: StrictOrigin, change: dict[str, str], body: bytes, code: bytes
) -> None:
    """A byte of the body, a header, the time: nothing is stored."""
    headers = signed(strict, "PUT", "/bucket/changed", {"x-amz-meta-a": "1"}, b"data")
    status, answer = exchange(strict, "PUT", "/bucket/changed", {**headers, **change}, body)
    assert status in (400, 403)
    assert code in answer
    assert "changed" not in strict.model.buckets["bucket"].objects


def test_an_incomplete_body_stores_nothing(strict: StrictOrigin) -> None:
    """The connection ends before the announced length."""
    headers = signed(strict, "PUT", "/bucket/cut", {}, b"0123456789")
    lines = [f"{name}: {value}" for name, value in headers.items()]
    host = strict.endpoint_url.removeprefix("http://")
    head = "\r\n".join(["PUT /bucket/cut HTTP/1.1", f"Host: {host}", "Content-Length: 10", *lines, "", ""])
    with socket.create_connection(tuple(host.split(":")), timeout=10) as connection:  # type: ignore[arg-type]
        connection.sendall(head.encode() + b"01234")
    strict.settle()
    assert "cut" not in strict.model.buckets["bucket"].objects


def test_a_get_with_a_body_is_refused(strict: StrictOrigin) -> None:
    """A gateway that frames what has no body is found out."""
    headers = signed(strict, "GET", "/bucket/key", {}, b"")
    assert exchange(strict, "GET", "/bucket/key", {**headers, "content-length": "1"}, b"x")[0] == 400


def test_out_of_reach_nothing_has_an_effect(strict: StrictOrigin) -> None:
    """Not even on a connection that was there before; afterwards all is as it was."""
    s3 = client(strict)
    s3.put_object(Bucket="bucket", Key="before", Body=b"x")
    strict.is_out_of_reach = True
    with pytest.raises(ConnectionClosedError):
        s3.create_multipart_upload(Bucket="bucket", Key="never")
    strict.is_out_of_reach = False
    assert s3.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []
    assert s3.get_object(Bucket="bucket", Key="before")["Body"].read() == b"x"


def test_refused_connections_come_back_with_the_same_objects(strict: StrictOrigin) -> None:
    """An outage loses nothing and keeps the port."""
    port = int(strict.endpoint_url.rpartition(":")[2])
    with strict.refused(), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert client(strict).get_object(Bucket="bucket", Key="key")["Body"].read() == b"0123456789"


def test_no_connection_outlives_it() -> None:
    """A client that reads nothing keeps an answer under way; what is left open fails the test that collects it."""
    with StrictOrigin() as origin, socket.socket() as silent:
        origin.model.put("bucket", "large", bytes(64 * 1024 * 1024))
        host = origin.endpoint_url.removeprefix("http://")
        fields = {"Host": host, **signed(origin, "GET", "/bucket/large", {}, b"")}
        head = ["GET /bucket/large HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", int(host.split(":")[1])))
        silent.sendall("\r\n".join(head).encode())
        assert silent.recv(12) == b"HTTP/1.1 200"
        origin.stop()
        gc.collect()
