"""deploy/iam: each policy allows all that Forebay asks the origin for, and nothing that it never does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.credentials import Credentials

from gateway.s3.requests import Operation
from tests.support.gateway_process import ORIGIN_KEYS, GatewayProcess
from tests.support.iam import LIST_BUCKETS, IamPolicy
from tests.support.memory_origin.faults import Unreachable
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

POLICIES = Path(__file__).resolve().parents[2] / "deploy" / "iam"
BUCKET = "train"
pytestmark = pytest.mark.slow
PART_BYTES = 5 * 1024**2


@contextmanager
def _gateway(policy: IamPolicy, **slot: str) -> Iterator[tuple[Any, StrictOrigin]]:
    """boto3 through a gateway whose key has the policy, and the origin."""
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        origin.model.put(BUCKET, "data/read", b"bytes" * 1000)
        origin.credentials[ORIGIN_KEYS[0]] = Credentials(*ORIGIN_KEYS)
        origin.model.policies = {ORIGIN_KEYS[0]: policy}
        config: dict[str, Any] = {
            "origin": {"endpoint_url": origin.endpoint_url, "region": "us-east-1"},
            "cache": {"persistent": True},
            "slots": [{"name": "all", "prefix": f"s3://{BUCKET}/", **slot}],
        }
        with GatewayProcess(config) as gateway:
            s3 = boto3.client(
                "s3",
                endpoint_url=gateway.s3_url,
                aws_access_key_id=ORIGIN_KEYS[0],
                aws_secret_access_key=ORIGIN_KEYS[1],
                region_name="us-east-1",
                config=Config(retries={"total_max_attempts": 1}, proxies={}),
            )
            yield s3, origin
            s3.close()
            told = httpx.get(f"{gateway.admin_url}/metrics", timeout=30).text
            assert [line[-3:] for line in told.splitlines() if line.startswith("forebay_origin_up{")] == ["1.0"]
            assert re.findall(r'^forebay_origin_state\{.*state="([a-z-]+)".*\} 1\.0$', told, re.MULTILINE) == ["well"]
            assert gateway.status()["origin"]["problem"] is None


def _read(s3: Any) -> None:
    s3.head_bucket(Bucket=BUCKET)
    assert s3.list_objects_v2(Bucket=BUCKET, Prefix="data/")["KeyCount"] == 1
    assert s3.list_objects(Bucket=BUCKET)["Contents"]
    for _ in range(2):
        assert s3.get_object(Bucket=BUCKET, Key="data/read")["Body"].read() == b"bytes" * 1000
    assert s3.get_object(Bucket=BUCKET, Key="data/read", Range="bytes=5-9")["Body"].read() == b"bytes"
    assert s3.head_object(Bucket=BUCKET, Key="data/read")["ContentLength"] == 5000
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket=BUCKET, Key="data/missing")


def _begin(s3: Any, key: str) -> dict[str, Any]:
    """A multipart upload of a part that is sent and one that is copied, as arguments of what ends it."""
    upload = {"Bucket": BUCKET, "Key": key, "UploadId": s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]}
    part = s3.upload_part(**upload, PartNumber=1, Body=b"p" * PART_BYTES)
    copied = s3.upload_part_copy(**upload, PartNumber=2, CopySource=f"{BUCKET}/data/read")["CopyPartResult"]
    assert len(s3.list_parts(**upload)["Parts"]) == 2
    parts = [{"PartNumber": number, "ETag": one["ETag"]} for number, one in enumerate((part, copied), 1)]
    return upload | {"MultipartUpload": {"Parts": parts}}


def _write(s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="saved/first", Body=b"1")
    s3.put_object(Bucket=BUCKET, Key="saved/second", Body=b"2")
    s3.complete_multipart_upload(**_begin(s3, "saved/large"))
    left = _begin(s3, "saved/left")
    assert s3.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    s3.abort_multipart_upload(**{name: value for name, value in left.items() if name != "MultipartUpload"})
    s3.copy_object(Bucket=BUCKET, Key="saved/copy", CopySource=f"{BUCKET}/data/read")
    s3.put_object(Bucket=BUCKET, Key="saved/once", Body=b"3", IfNoneMatch="*")
    s3.delete_object(Bucket=BUCKET, Key="saved/first")
    deleted = s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "saved/second"}]})
    assert len(deleted["Deleted"]) == 1


def _check(policy: IamPolicy) -> None:
    """All was allowed, but for the health check's question, and all that is allowed was needed."""
    assert set(policy.refused) <= {LIST_BUCKETS}
    assert policy.used - {LIST_BUCKETS[0]} == policy.actions


def test_reading() -> None:
    """The policy for read-only slots is enough, and no action of it is superfluous."""
    policy = IamPolicy(POLICIES / "policy-read-only.json", BUCKET)
    with _gateway(policy, mode="read-only") as (s3, _):
        _read(s3)
    _check(policy)


@pytest.mark.parametrize("write", ["through", "back"])
def test_writing(write: str) -> None:
    """The policy for slots that write is enough, through and back, and no action of it is superfluous.

    The origin's answer to one completed upload is lost, so that what the gateway does then is asked for, too.
    """
    policy = IamPolicy(POLICIES / "policy-read-write.json", BUCKET)
    with _gateway(policy, mode="read-write", write=write) as (s3, origin):
        _read(s3)
        if write == "back":
            s3.put_object(Bucket=BUCKET, Key="saved/first", Body=b"the first write to a bucket goes through")
            origin.model.inject(
                lambda call: call.operation is Operation.COMPLETE_MULTIPART_UPLOAD, Unreachable(late=True)
            )
        _write(s3)
        _wait_for_objects(origin, {"data/read", "saved/large", "saved/copy", "saved/once"})
    _check(policy)


def _wait_for_objects(origin: StrictOrigin, keys: set[str]) -> None:
    """Until the origin has these and no other, and no upload is open there."""
    bucket = origin.model.buckets[BUCKET]
    eventually(
        lambda: set(bucket.objects) == keys and not bucket.uploads,
        lambda: f"the origin has {sorted(bucket.objects)}, {len(bucket.uploads)} uploads",
    )
