"""Write-back, reads and listings in front of Debian's radosgw: a second S3 that nobody of us has written.

It ignores conditions on Complete and DELETE, compares If-Match of PutObject with the ETag without its quotes, and knows
one storage class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.clients.boto import boto3_client
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB
from tests.clients.origins import ACCESS_KEY_ID, SECRET_ACCESS_KEY
from tests.support.gateway_process import GatewayProcess
from tests.support.radosgw import running_radosgw
from tests.support.waiting import eventually

pytestmark = [pytest.mark.radosgw, pytest.mark.timeout(600)]

BUCKET = "bucket"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of its own."""
    with running_radosgw(tmp_path_factory.mktemp("ceph"), ACCESS_KEY_ID, SECRET_ACCESS_KEY) as url:
        client = boto3_client(url)
        client.create_bucket(Bucket=BUCKET)
        yield client


@pytest.fixture
def gateway(origin: Any) -> Iterator[GatewayProcess]:
    """It writes back."""
    config: dict[str, Any] = {
        "origin": {
            "endpoint_url": origin.meta.endpoint_url,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        },
        "cache": {"persistent": True},
        "slots": [{"name": "all", "prefix": f"s3://{BUCKET}/", "write": "back", "consistency": "strict"}],
    }
    with GatewayProcess(config) as one:
        yield one


@pytest.fixture
def client(gateway: GatewayProcess) -> Any:
    """Of a bucket that is known: its first write goes through."""
    one = boto3_client(gateway.s3_url)
    one.put_object(Bucket=BUCKET, Key="first", Body=b"x")
    return one


def source_of(answer: Any) -> str:
    return str(answer["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"]).partition(";")[0]


def wait_until_flushed(gateway: GatewayProcess) -> None:
    Endpoint(gateway.s3_url, None, [gateway.directory]).wait_until_flushed()


def content(client: Any, key: str) -> bytes:
    return bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def test_overwrites_and_deletions_reach_it(gateway: GatewayProcess, client: Any, origin: Any) -> None:
    """Each is acknowledged here, and the last one is there in the end."""
    for number in range(3):
        body = b"version %d" % number
        assert source_of(client.put_object(Bucket=BUCKET, Key="over/k", Body=body)) == "absorbed"
        wait_until_flushed(gateway)
        assert content(origin, "over/k") == content(client, "over/k") == body
    client.put_object(Bucket=BUCKET, Key="over/gone", Body=b"x")
    wait_until_flushed(gateway)
    client.delete_object(Bucket=BUCKET, Key="over/gone")
    wait_until_flushed(gateway)
    listed = origin.list_objects_v2(Bucket=BUCKET, Prefix="over/")["Contents"]
    assert [one["Key"] for one in listed] == ["over/k"]


def test_an_upload_of_parts_reaches_it(gateway: GatewayProcess, client: Any, origin: Any) -> None:
    """With the ETag that was answered; once more over itself."""
    for _ in range(2):
        bodies = [os.urandom(5 * MIB), os.urandom(5 * MIB), b"end"]
        upload_id = client.create_multipart_upload(Bucket=BUCKET, Key="parts/k", Metadata={"step": "1"})["UploadId"]
        where = {"Bucket": BUCKET, "Key": "parts/k", "UploadId": upload_id}
        parts = [
            {"PartNumber": number, "ETag": client.upload_part(**where, PartNumber=number, Body=body)["ETag"]}
            for number, body in enumerate(bodies, 1)
        ]
        done = client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})
        assert source_of(done) == "absorbed"
        wait_until_flushed(gateway)
        head = origin.head_object(Bucket=BUCKET, Key="parts/k")
        assert (head["ETag"], head["Metadata"]) == (done["ETag"], {"step": "1"})
        assert content(origin, "parts/k") == b"".join(bodies)
    assert not origin.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_what_others_write_meanwhile_stays(gateway: GatewayProcess, client: Any, origin: Any) -> None:
    """6.2 It is a conflict, and a person's to decide."""
    client.put_object(Bucket=BUCKET, Key="theirs/k", Body=b"first")
    wait_until_flushed(gateway)
    upload_id = client.create_multipart_upload(Bucket=BUCKET, Key="theirs/k")["UploadId"]
    where = {"Bucket": BUCKET, "Key": "theirs/k", "UploadId": upload_id}
    etag = client.upload_part(**where, PartNumber=1, Body=b"ours")["ETag"]
    origin.put_object(Bucket=BUCKET, Key="theirs/k", Body=b"theirs")
    client.complete_multipart_upload(**where, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    eventually(lambda: "CONFLICT:" in gateway.log, lambda: gateway.log)
    assert content(origin, "theirs/k") == b"theirs"
    assert content(client, "theirs/k") == b"ours"


def test_a_storage_class_that_it_does_not_have_is_refused_as_it_comes(client: Any) -> None:
    """4.7 And never acknowledged."""
    with pytest.raises(ClientError, match=r"InvalidArgument|InvalidStorageClass"):
        client.put_object(Bucket=BUCKET, Key="cold/k", Body=b"x", StorageClass="STANDARD_IA")


def test_listings_and_ranges_are_its_own(gateway: GatewayProcess, client: Any, origin: Any) -> None:
    """What it has, page by page, and what is pending among it."""
    body = os.urandom(3 * MIB)
    origin.put_object(Bucket=BUCKET, Key="list/0", Body=body)
    for number in range(1, 8):
        client.put_object(Bucket=BUCKET, Key=f"list/{number}", Body=b"x")
    paginator = client.get_paginator("list_objects_v2")
    pages = paginator.paginate(Bucket=BUCKET, Prefix="list/", PaginationConfig={"PageSize": 3})
    assert [one["Key"] for page in pages for one in page["Contents"]] == [f"list/{number}" for number in range(8)]
    for first, last in ((0, 0), (MIB - 1, 2 * MIB), (3 * MIB - 5, 3 * MIB - 1)):
        part = client.get_object(Bucket=BUCKET, Key="list/0", Range=f"bytes={first}-{last}")["Body"].read()
        assert part == body[first : last + 1]
    wait_until_flushed(gateway)
