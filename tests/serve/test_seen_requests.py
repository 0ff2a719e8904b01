"""What a real gateway tells of its requests: the slow and failed ones over its admin port, all in its access log."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import boto3
import httpx
import orjson
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.gateway_process import GatewayProcess, wait_for_metric
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

PATIENCE_SECONDS = 30.0


def client(gateway: GatewayProcess) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )


def request_id(answer: dict[str, Any]) -> str:
    found = answer["ResponseMetadata"]["HTTPHeaders"]["x-amz-request-id"]
    assert isinstance(found, str)
    return found


def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Once so many are there."""
    due = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < due and path.read_bytes().count(b"\n") < count:
        time.sleep(0.05)
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def shown(gateway: GatewayProcess) -> dict[str, list[dict[str, Any]]]:
    document: dict[str, list[dict[str, Any]]] = httpx.get(f"{gateway.admin_url}/api/v1/requests", timeout=60).json()
    return document


@pytest.mark.slow
def test_requests_are_in_the_access_log_and_the_bad_ones_over_the_admin_port(tmp_path: Path) -> None:
    """What is answered by something prepared, too. They stay when their worker dies; no secret is told."""
    log = tmp_path / "access.jsonl"
    with StrictOrigin() as origin:
        origin.model.put("bucket", "data/one", os.urandom(100_000))
        slot = {"name": "data", "prefix": "s3://bucket/data/", "mode": "read-only", "consistency": "immutable"}
        config = {"origin": origin.settings, "logging": {"access_file": str(log)}}
        with GatewayProcess({**config, "slots": [slot]}) as gateway:
            s3, ids = client(gateway), []
            for _ in range(10):
                answer = s3.get_object(Bucket="bucket", Key="data/one")
                answer["Body"].read()
                ids.append(request_id(answer))
                wait_for_metric(gateway, r"forebay_cache_usage_bytes\{[^}]*data[^}]*\} [1-9]")
            with pytest.raises(ClientError) as refused:
                s3.put_object(Bucket="bucket", Key="data/two", Body=b"x")
            with origin.refused(), pytest.raises(ClientError) as failed:
                s3.get_object(Bucket="bucket", Key="away")
            ids += [request_id(refused.value.response), request_id(failed.value.response)]
            wait_for_metric(gateway, r"forebay_prepared_requests_total\{[^}]*data[^}]*\} [1-9]")
            found = lines(log, len(ids))
            assert [one["request_id"] for one in found] == ids
            assert [one["status"] for one in found] == ["200"] * 10 + ["403", "503"]
            assert {(one["remote"], one["caller"], one["bucket"]) for one in found} == {
                ("127.0.0.1", "gateway", "bucket")
            }
            assert SECRET_ACCESS_KEY not in log.read_text()
            before = shown(gateway)
            assert set(ids) >= {one["request_id"] for one in before["slowest"]} >= {ids[0], ids[-1]}
            assert [one["request_id"] for one in before["refusals"]] == [ids[-2]]
            (error,) = before["errors"]
            assert (error["request_id"], error["error"]) == (ids[-1], "ServiceUnavailable")
            assert {(one["key"], one["status"]) for one in before["origin_failures"]} == {("away", "unreachable")}
            processes = httpx.get(f"{gateway.admin_url}/api/v1/status", timeout=60).json()["gateway"]["processes"]
            (worker,) = (one["process_id"] for one in processes if one["name"] == "worker0")
            os.kill(worker, signal.SIGKILL)
            due = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < due:
                try:
                    client(gateway).get_object(Bucket="bucket", Key="data/one")["Body"].read()
                    break
                except Exception:
                    time.sleep(0.05)
            assert shown(gateway)["errors"] == before["errors"]
            assert len(shown(gateway)["slowest"]) > 10


@pytest.mark.slow
def test_a_renamed_access_log_goes_on_in_another_file(tmp_path: Path) -> None:
    """As logrotate does it; no line is lost."""
    log = tmp_path / "access.jsonl"
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        config = {"origin": origin.settings, "logging": {"access_file": str(log)}}
        with GatewayProcess(config) as gateway:
            s3, count = client(gateway), 0
            s3.put_object(Bucket="bucket", Key="a", Body=b"x")
            assert len(lines(log, 1)) == 1
            log.rename(tmp_path / "old")
            due = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < due and not log.exists():
                s3.list_objects_v2(Bucket="bucket")
                count += 1
                time.sleep(0.1)
            found = lines(log, 1)
        rest = [orjson.loads(line) for line in (tmp_path / "old").read_bytes().splitlines()]
        found = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    assert len(rest) + len(found) == count + 1
    assert found
