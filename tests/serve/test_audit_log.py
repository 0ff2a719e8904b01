"""What the audit log of a real gateway says: each change, each refusal, what operators do; while it is rotated."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import httpx
import orjson
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

KEYS = {"writer": "writer-secret-0123", "reader": "reader-secret-0123"}


def config_of(origin: StrictOrigin, audit: Path) -> dict[str, Any]:
    rights = {"writer": "read-write", "reader": "read-only"}
    return {
        "server": {"workers": 2},
        "origin": {
            "endpoint_url": origin.endpoint_url,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        },
        "logging": {"audit_file": str(audit)},
        "credentials": [
            {"access_key_id": key, "secret_access_key": secret, "allow": ["s3://"], "operations": rights[key]}
            for key, secret in KEYS.items()
        ],
    }


def client(gateway: GatewayProcess, key: str, secret: str = "") -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=key,
        aws_secret_access_key=secret or KEYS[key],
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


def refused(call: Callable[..., Any], **arguments: Any) -> None:
    with pytest.raises(ClientError):
        call(**arguments)


def lines(*paths: Path) -> list[dict[str, Any]]:
    """Of all files: what is written a moment after the answer is waited for."""
    time.sleep(0.3)
    return [orjson.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def test_each_change_and_each_refusal_is_there(tmp_path: Path) -> None:
    """And no read; no secret, and nothing of a body."""
    audit = tmp_path / "audit.jsonl"
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        with GatewayProcess(config_of(origin, audit)) as gateway:
            s3 = client(gateway, "writer")
            etag = s3.put_object(Bucket="bucket", Key="a", Body=b"the body")["ETag"]
            s3.get_object(Bucket="bucket", Key="a")["Body"].read()
            s3.list_objects_v2(Bucket="bucket")
            s3.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": "a"}, {"Key": "b"}]})
            s3.delete_object(Bucket="bucket", Key="c")
            refused(client(gateway, "reader").put_object, Bucket="bucket", Key="d", Body=b"x")
            refused(client(gateway, "writer", "wrong").put_object, Bucket="bucket", Key="e", Body=b"x")
            httpx.put(f"{gateway.admin_url}/api/v1/slots/s", json={"prefix": "s3://bucket/s/"}, timeout=60)
            found = lines(audit)
            text = audit.read_text()
    told = [(one["caller"], one["operation"], one.get("key"), one["status"]) for one in found]
    assert told == [
        ("writer", "PutObject", "a", "200"),
        ("writer", "DeleteObjects", "a", "200"),
        ("writer", "DeleteObjects", "b", "200"),
        ("writer", "DeleteObject", "c", "204"),
        ("reader", "PutObject", "d", "403"),
        ("none", "PutObject", "e", "403"),
        ("admin", "PUT /api/v1/slots/s", None, "200"),
    ]
    assert found[0]["etag"] == etag
    assert found[0]["remote"] == "127.0.0.1"
    assert found[0]["bucket"] == "bucket"
    assert found[1]["request_id"] == found[2]["request_id"]
    for hidden in (*KEYS.values(), SECRET_ACCESS_KEY, "the body", "Signature"):
        assert hidden not in text


@pytest.mark.slow
def test_no_line_is_lost_while_it_is_rotated(tmp_path: Path) -> None:
    """By renaming, as logrotate does, and while a worker is killed: what was answered is there."""
    audit, count = tmp_path / "audit.jsonl", 120
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        with GatewayProcess(config_of(origin, audit)) as gateway:
            ids, old = set[str](), list[Path]()
            for number in range(count):
                answer = client(gateway, "writer").put_object(Bucket="bucket", Key=str(number), Body=b"x")
                ids.add(answer["ResponseMetadata"]["RequestId"])
                if number % 30 == 29:
                    old.append(tmp_path / f"audit.{number}")
                    audit.rename(old[-1])
                    time.sleep(1.1)
                if number == 50:
                    time.sleep(0.3)
                    gateway.wait_for_worker(0, other_than=gateway.kill_worker(0))
            client(gateway, "writer").put_object(Bucket="bucket", Key="last", Body=b"x")
            found = lines(*old, audit)
    assert ids <= {one["request_id"] for one in found}
    assert len(found) == count + 1
