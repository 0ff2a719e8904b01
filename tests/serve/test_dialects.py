"""A real gateway before stores that are nearly S3, each for a bucket of its own, as boto3 and the command see it.

The stores are the strict origin's, which stands behind the hosts of all of them as a proxy does.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from botocore.exceptions import ClientError

from gateway.origin.dialects import dialect_of
from tests.serve.test_writeback_admin import Running
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_dialects import strict_dialects
from tests.support.strict_origin import StrictOrigin

STORES = {dialect_of("auto", host).name: host for host in strict_dialects()}


HONOURED = {
    "gcs": ("yes", "refused", "yes"),
    "oss": ("creates", "creates", "refused"),
    "cos": ("creates", "creates", "refused"),
    "obs": ("creates", "creates", "refused"),
    "bos": ("ignored", "ignored", "ignored"),
    "tos": ("ignored", "ignored", "ignored"),
    "r2": ("yes", "yes", "yes"),
    "b2": ("refused", "refused", "refused"),
}
"""What the probe finds for PUT, Complete and DELETE."""


class Before(Running):
    """A gateway before every store."""

    def __init__(self, gateway: GatewayProcess, origin: StrictOrigin) -> None:
        super().__init__(gateway)
        self.origin = origin

    def data(self, bucket: str, key: str) -> bytes:
        return self.origin.model.data(bucket, key)

    def flush(self, bucket: str, key: str = "") -> None:
        result = self.run("flush", f"s3://{bucket}/{key}", "--wait")
        assert result.exit_code == 0, result.output

    def absorb(self, bucket: str, key: str, body: bytes) -> None:
        answer = self.s3.put_object(Bucket=bucket, Key=key, Body=body)
        assert answer["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"] == "absorbed", (bucket, key)


@contextmanager
def running(directory: Path) -> Iterator[Before]:
    with StrictOrigin() as origin:
        origin.dialects = strict_dialects()
        for name in STORES:
            origin.model.create_bucket(name)
        config: dict[str, Any] = {
            "origin": {**origin.settings, "proxy": origin.endpoint_url},
            "cache": {"persistent": True},
            "buckets": [{"name": name, "endpoint_url": f"http://{host}"} for name, host in STORES.items()],
            "slots": [
                {"name": name, "prefix": f"s3://{name}/back/", "write": "back", "etag": "local"} for name in STORES
            ],
        }
        with GatewayProcess(config, directory=directory) as gateway:
            yield Before(gateway, origin)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Before]:
    with running(tmp_path_factory.mktemp("dialects") / "cache") as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
def test_boto3_reads_writes_and_lists_through_the_gateway(before: Before, name: str) -> None:
    """With its own defaults: checksums and trailers, uploads in parts, DeleteObjects; a second read is the same."""
    s3, large = before.s3, bytes(range(256)) * (40 * 1024)
    s3.put_object(Bucket=name, Key="k", Body=b"0123456789", Metadata={"step": "1"})
    s3.upload_fileobj(io.BytesIO(large), name, "large")
    assert before.data(name, "large") == large
    for _ in range(2):
        assert s3.get_object(Bucket=name, Key="large")["Body"].read() == large
        assert s3.get_object(Bucket=name, Key="k", Range="bytes=2-4")["Body"].read() == b"234"
    assert s3.head_object(Bucket=name, Key="k")["Metadata"] == {"step": "1"}
    listed = s3.list_objects_v2(Bucket=name, FetchOwner=True)["Contents"]
    assert {"k", "large"} <= {entry["Key"] for entry in listed}
    s3.delete_objects(Bucket=name, Delete={"Objects": [{"Key": "k"}, {"Key": "large"}]})
    assert not {"k", "large"} & before.origin.model.buckets[name].objects.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
def test_what_is_written_back_arrives_and_overwrites_nobody(before: Before, name: str) -> None:
    """A new object and one in place of another, in one piece and in parts, while others write the same keys."""
    s3, origin, large = before.s3, before.origin, b"0123456789abcdef" * 2**20
    s3.put_object(Bucket=name, Key="back/first", Body=b"makes the bucket known")
    before.absorb(name, "back/new", b"new")
    before.flush(name)
    before.absorb(name, "back/new", b"newer")
    s3.upload_fileobj(io.BytesIO(large), name, "back/large")
    before.flush(name)
    assert (before.data(name, "back/new"), before.data(name, "back/large")) == (b"newer", large)
    assert s3.get_object(Bucket=name, Key="back/large")["Body"].read() == large
    assert not origin.model.buckets[name].uploads
    origin.is_out_of_reach = True
    try:
        for key in ("back/ours", "back/new"):
            before.absorb(name, key, b"ours")
        s3.put_object(Bucket=name, Key="back/more", Body=b"ours")
    finally:
        for key in ("back/ours", "back/new"):
            origin.model.put(name, key, b"theirs")
        origin.is_out_of_reach = False
    result = before.run("flush", f"s3://{name}/back/", "--wait", "--timeout", "30s")
    assert result.exit_code == 1, result.output
    assert {item["key"] for item in before.listed(f"s3://{name}/back/")} == {"back/ours", "back/new"}
    assert [before.data(name, key) for key in ("back/ours", "back/new", "back/more")] == [b"theirs", b"theirs", b"ours"]


@pytest.mark.slow
def test_a_condition_that_a_store_does_not_have_is_refused(before: Before) -> None:
    """And none is answered with a 200 that means nothing."""
    for name, code in (("gcs", 412), ("oss", 412), ("cos", 412), ("obs", 412), ("r2", 412), ("b2", 501)):
        before.origin.model.put(name, "there", b"theirs")
        with pytest.raises(ClientError) as refused:
            before.s3.put_object(Bucket=name, Key="there", Body=b"ours", IfNoneMatch="*")
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == code
        assert before.data(name, "there") == b"theirs"
    for name, code in (("gcs", 412), ("oss", 501)):  # before its body has come
        with pytest.raises(ClientError) as refused:
            before.s3.put_object(Bucket=name, Key="there", Body=bytes(6 * 2**20), IfMatch='"0"')
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == code
        assert before.s3.get_object(Bucket=name, Key="there")["Body"].read() == b"theirs"


@pytest.mark.slow
def test_the_probe_finds_what_each_store_honours(before: Before) -> None:
    """What the gateway sends in place of S3's conditions counts as theirs."""
    for name in STORES:
        before.s3.put_object(Bucket=name, Key="back/k", Body=b"makes the bucket known")
        before.absorb(name, "back/probed", b"1")
        before.flush(name, "back/probed")
    told = [orjson.loads(line) for line in before.gateway.log.splitlines() if "which conditions a bucket" in line]
    assert {one["bucket"]: (one["put"], one["complete"], one["delete"]) for one in told} == HONOURED
