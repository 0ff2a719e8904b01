"""Clause 17 of docs/semantics.md, through a running gateway: over a fake of Azure Blob and, marked azure, Azurite.

tests/origin/stores/ has the details.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.origin.origins import ask, azure_origin
from tests.support import azure_blob, azurite
from tests.support.changing_slots import client_of
from tests.support.gateway_process import ORIGIN_KEYS, GatewayProcess
from tests.support.waiting import eventually

PART_BYTES = 5 * 1024 * 1024
BUCKET = "container"


@pytest.fixture(autouse=True)
def way() -> None:
    """The gateway is a process of its own, without a local socket."""


class Service:
    """Azure Blob, as its other users have it: through an origin of their own, without the gateway."""

    def __init__(self, address: str, account: str, key: str) -> None:
        self.address, self.account, self.key = address, account, key

    def ask(self, method: str, key: str, body: bytes = b"") -> Any:
        async def send() -> Any:
            origin = azure_origin(self.address, self.account, self.key)
            try:
                return await ask(origin, method, BUCKET, key, body=body)
            finally:
                await origin.aclose()

        return asyncio.run(send())

    def make_container(self) -> None:
        async def send() -> None:
            origin = azure_origin(self.address, self.account, self.key)
            await origin.azure.wire.told("PUT", BUCKET, None, [("restype", "container")])
            await origin.aclose()

        asyncio.run(send())


@pytest.fixture(scope="module", params=["fake", pytest.param("azurite", marks=pytest.mark.azure)])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    if request.param == "fake":
        with azure_blob.AzureBlob() as fake:
            one = Service(fake.address, azure_blob.ACCOUNT, azure_blob.KEY)
            one.make_container()
            yield one
        return
    with azurite.running_azurite(tmp_path_factory.mktemp("azurite")) as address:
        one = Service(address, azurite.ACCOUNT, azurite.KEY)
        one.make_container()
        yield one


@pytest.fixture(scope="module")
def gateway(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """The container is a bucket of its own, beside an S3 that is not there."""
    file = Path(tmp_path_factory.mktemp("keys")) / "azure"
    file.write_text(service.key)
    file.chmod(0o600)
    config: dict[str, Any] = {
        "origin": {"endpoint_url": "http://127.0.0.1:1"},
        "cache": {"persistent": True, "capacity": "256MiB", "block_size": "64KiB"},
        "origin_credentials": [
            {"name": "azure", "access_key_id": service.account, "secret_access_key_file": str(file)}
        ],
        "buckets": [
            {
                "name": BUCKET,
                "endpoint_url": f"azure+http://{service.address}/{service.account}",
                "origin_credentials": "azure",
            }
        ],
        "slots": [
            {"name": "indexed", "prefix": f"s3://{BUCKET}/indexed/", "consistency": "ttl", "index": True},
            {"name": "back", "prefix": f"s3://{BUCKET}/back/", "write": "back"},
        ],
    }
    with GatewayProcess(config) as running:
        yield running


@pytest.fixture
def client(gateway: GatewayProcess) -> Any:
    return client_of(gateway.s3_url, ORIGIN_KEYS)


def content(client: Any, key: str, **more: str) -> bytes:
    return bytes(client.get_object(Bucket=BUCKET, Key=key, **more)["Body"].read())


def refusal(error: pytest.ExceptionInfo[ClientError]) -> int:
    return int(error.value.response["ResponseMetadata"]["HTTPStatusCode"])


def told(answer: Any) -> str:
    return str(answer["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"]).partition(";")[0]


def wait_until_flushed(gateway: GatewayProcess) -> None:
    assert gateway.command("flush", "--wait").returncode == 0


@pytest.mark.slow
def test_objects_are_written_read_from_the_cache_listed_and_deleted(service: Service, client: Any) -> None:
    """With the ETag of S3, ranges, metadata, and what somebody else overwrites."""
    data = os.urandom(3 * 1024 * 1024)
    put = client.put_object(Bucket=BUCKET, Key="dir/a b.bin", Body=data, Metadata={"step-no": "1", "plain": "x"})
    client.put_object(Bucket=BUCKET, Key="dir/empty", Body=b"")
    got = client.get_object(Bucket=BUCKET, Key="dir/a b.bin")
    assert (got["ETag"], got["Body"].read()) == (put["ETag"], data)
    assert got["Metadata"]["step-no"] == "1"
    assert content(client, "dir/a b.bin", Range="bytes=70000-70009") == data[70000:70010]
    assert content(client, "dir/a b.bin", Range="bytes=-5") == data[-5:]
    again = client.get_object(Bucket=BUCKET, Key="dir/a b.bin")
    assert again["Body"].read() == data
    assert told(again) == "hit"
    assert content(client, "dir/empty") == b""
    page = client.list_objects_v2(Bucket=BUCKET, Prefix="dir/")
    assert [(one["Key"], one["Size"]) for one in page["Contents"]] == [("dir/a b.bin", len(data)), ("dir/empty", 0)]
    assert page["Contents"][0]["ETag"] == put["ETag"]
    service.ask("PUT", "dir/a b.bin", b"theirs")
    assert content(client, "dir/a b.bin") == b"theirs"
    for key in ("dir/a b.bin", "dir/empty", "dir/none"):
        client.delete_object(Bucket=BUCKET, Key=key)
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix="dir/")
    assert service.ask("HEAD", "dir/empty").status == 404


def test_what_azure_has_not_is_refused(client: Any) -> None:
    """17.6 And not dropped."""
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket=BUCKET, Key="tagged", Body=b"x", Tagging="a=b")
    assert refusal(error) == 501
    with pytest.raises(ClientError) as error:
        client.get_bucket_versioning(Bucket=BUCKET)
    assert refusal(error) == 501


def test_conditions_and_copies(client: Any) -> None:
    etag = client.put_object(Bucket=BUCKET, Key="c/one", Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket=BUCKET, Key="c/one", Body=b"2", IfNoneMatch="*")
    assert refusal(error) == 412
    client.put_object(Bucket=BUCKET, Key="c/one", Body=b"2", IfMatch=etag)
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket=BUCKET, Key="c/one", Body=b"3", IfMatch=etag)
    assert refusal(error) == 412
    client.copy_object(Bucket=BUCKET, Key="c/two", CopySource={"Bucket": BUCKET, "Key": "c/one"})
    assert content(client, "c/two") == b"2"


def test_an_index_answers_lists(client: Any) -> None:
    names = [f"indexed/{number:03}" for number in range(25)]
    for name in names:
        client.put_object(Bucket=BUCKET, Key=name, Body=name.encode())
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, Prefix="indexed/", PaginationConfig={"PageSize": 10}
    )
    assert [one["Key"] for page in pages for one in page["Contents"]] == names
    assert content(client, names[7]) == names[7].encode()


@pytest.mark.slow
def test_an_upload_of_parts_goes_through(service: Service, client: Any) -> None:
    parts = [os.urandom(PART_BYTES), os.urandom(PART_BYTES), b"end"]
    done = upload(client, "through/parts", parts)
    assert content(client, "through/parts") == b"".join(parts)
    assert service.ask("HEAD", "through/parts").headers["etag"] == done["ETag"]
    assert content(client, "through/parts", PartNumber=3) == b"end"  # type: ignore[arg-type]
    open_one = client.create_multipart_upload(Bucket=BUCKET, Key="through/open")["UploadId"]
    assert [one["UploadId"] for one in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]] == [open_one]
    client.abort_multipart_upload(Bucket=BUCKET, Key="through/open", UploadId=open_one)


@pytest.mark.slow
def test_what_is_acknowledged_here_reaches_azure(gateway: GatewayProcess, service: Service, client: Any) -> None:
    """PUTs, overwrites, deletions and uploads of parts, with the ETags that were answered."""
    client.put_object(Bucket=BUCKET, Key="back/first", Body=b"x")  # goes through: the bucket is not known yet
    parts = [os.urandom(PART_BYTES), b"end"]
    for number in range(2):
        body = b"version %d" % number
        small = client.put_object(Bucket=BUCKET, Key="back/small", Body=body, Metadata={"step": str(number)})
        large = upload(client, "back/large", parts)
        assert (told(small), told(large)) == ("absorbed", "absorbed")
        wait_until_flushed(gateway)
        found = service.ask("GET", "back/small")
        assert (found.body, found.headers["etag"]) == (body, small["ETag"])
        assert found.headers["x-amz-meta-step"] == str(number)
        found = service.ask("GET", "back/large")
        assert (found.body, found.headers["etag"]) == (b"".join(parts), large["ETag"])
    client.delete_object(Bucket=BUCKET, Key="back/small")
    wait_until_flushed(gateway)
    eventually(lambda: service.ask("HEAD", "back/small").status == 404)


def test_what_others_write_meanwhile_stays(gateway: GatewayProcess, service: Service, client: Any) -> None:
    """6.2 It is a conflict, and a person's to decide."""
    key = "back/theirs"
    client.put_object(Bucket=BUCKET, Key=key, Body=b"first")
    wait_until_flushed(gateway)
    upload_id = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    where = {"Bucket": BUCKET, "Key": key, "UploadId": upload_id}
    etag = client.upload_part(**where, PartNumber=1, Body=b"ours")["ETag"]
    service.ask("PUT", key, b"theirs")
    client.complete_multipart_upload(**where, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    eventually(lambda: "CONFLICT:" in gateway.log, lambda: gateway.log)
    assert service.ask("GET", key).body == b"theirs"
    assert content(client, key) == b"ours"


def test_a_key_that_azure_would_change_is_refused_before_it_is_acknowledged(client: Any) -> None:
    """17.3 An acknowledged write of it could never be flushed."""
    for key in ("back/dot.", "back/back\\slash"):
        with pytest.raises(ClientError) as error:
            client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
        assert refusal(error) == 400


def upload(client: Any, key: str, bodies: list[bytes]) -> Any:
    upload_id = client.create_multipart_upload(Bucket=BUCKET, Key=key, Metadata={"m": "1"})["UploadId"]
    where = {"Bucket": BUCKET, "Key": key, "UploadId": upload_id}
    parts = [
        {"PartNumber": number, "ETag": client.upload_part(**where, PartNumber=number, Body=body)["ETag"]}
        for number, body in enumerate(bodies, 1)
    ]
    return client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})
