"""Warming a data set with the command, on a running gateway, as a user does."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import boto3
import httpx
import orjson
import pytest
from botocore.config import Config

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

OBJECTS = 60
SIZE_BYTES = 300_000


def config(origin: StrictOrigin) -> dict[str, Any]:
    return {
        "server": {"workers": 2},
        "origin": origin.settings,
        "cache": {"capacity": "64MiB", "block_size": "256KiB"},
        "slots": [{"name": "data", "prefix": "s3://bucket/data/", "mode": "read-only", "consistency": "immutable"}],
    }


def gets(origin: StrictOrigin) -> list[str]:
    return [call.key or "" for call in origin.model.calls if call.method == "GET" and call.key]


def put_data_set(origin: StrictOrigin) -> dict[str, bytes]:
    contents = {f"data/{n:03d}": os.urandom(SIZE_BYTES) for n in range(OBJECTS)}
    for key, content in contents.items():
        origin.model.put("bucket", key, content)
    return contents


def client(gateway: GatewayProcess) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
        config=Config(signature_version="s3v4"),
    )


@pytest.mark.slow
def test_a_warm_data_set_is_read_without_the_bucket() -> None:
    """`forebay warm --wait` ends with 0; then every worker serves every byte with nothing asked of the origin."""
    with StrictOrigin() as origin:
        contents = put_data_set(origin)
        with GatewayProcess(config(origin)) as gateway:
            done = gateway.command("warm", "s3://bucket/data/", "--wait", "--json")
            assert done.returncode == 0, done.stderr
            job = orjson.loads(done.stdout)
            assert (job["state"], job["objects_done"], job["bytes_fetched"]) == ("done", OBJECTS, OBJECTS * SIZE_BYTES)
            asked = origin.model.count()
            s3 = client(gateway)
            for key, content in contents.items():
                assert s3.get_object(Bucket="bucket", Key=key)["Body"].read() == content
            assert origin.model.count() == asked
            shown = gateway.command("jobs")
            assert job["id"] in shown.stdout
            evicted = gateway.command("evict", "s3://bucket/data/", "--wait")
            assert evicted.returncode == 0
            assert gateway.status()["slots"][0]["name"] == "data"
            assert gateway.command("warm", "s3://nowhere/", "--wait").returncode == 1
            assert gateway.command("warm", "nowhere").returncode == 1
            assert gateway.command("jobs", "unheard-of").returncode == 1


@pytest.mark.slow
def test_a_job_survives_kills_of_the_process_that_does_it(tmp_path: Path) -> None:
    """kill -9 of the background process in the midst, again and again: the job ends, each object is there."""
    with StrictOrigin() as origin:
        contents = put_data_set(origin)
        settings = config(origin)
        settings["slots"][0]["read_bandwidth"] = "4MiB/s"
        with GatewayProcess(settings) as gateway:
            job = orjson.loads(gateway.command("warm", "s3://bucket/data/", "--json").stdout)
            pause = threading.Event()
            for _ in range(3):
                pause.wait(1.0)
                before = _background(gateway)
                os.kill(before, 9)
                while _background(gateway, may_be_down=True) in (before, 0):
                    pause.wait(0.05)
            for _ in range(600):
                document = orjson.loads(gateway.command("jobs", job["id"], "--json").stdout or b"{}")
                if document.get("state", "running") != "running":
                    break
                pause.wait(0.2)
            assert (document["state"], document["objects_done"]) == ("done", OBJECTS)
            asked = len(gets(origin))
            s3 = client(gateway)
            for key, content in contents.items():
                assert s3.get_object(Bucket="bucket", Key=key)["Body"].read() == content
            assert len(gets(origin)) == asked


def _background(gateway: GatewayProcess, *, may_be_down: bool = False) -> int:
    try:
        processes = gateway.status()["gateway"]["processes"]
    except (httpx.TransportError, AssertionError, ValueError):
        if may_be_down:
            return 0
        raise
    return next(one["process_id"] or 0 for one in processes if one["name"] == "background")


@pytest.mark.slow
def test_5_5_a_pinned_prefix_stays_through_a_restart() -> None:
    """`forebay pin --wait` brings it, `forebay status` lists it, nothing pushes it out, `unpin` ends it."""
    with StrictOrigin() as origin, tempfile.TemporaryDirectory() as directory:
        contents = put_data_set(origin)
        settings = config(origin)
        settings["cache"] |= {"directory": directory, "capacity": "24MiB"}
        with GatewayProcess(settings) as gateway:
            done = gateway.command("pin", "s3://bucket/data/", "--wait")
            assert done.returncode == 0, done.stderr
        for number in range(60):
            origin.model.put("bucket", f"other/{number}", os.urandom(SIZE_BYTES))
        with GatewayProcess(settings) as gateway:
            s3 = client(gateway)
            for number in range(60):
                s3.get_object(Bucket="bucket", Key=f"other/{number}")["Body"].read()
            asked = len(gets(origin))
            for key, content in contents.items():
                assert s3.get_object(Bucket="bucket", Key=key)["Body"].read() == content
            assert len(gets(origin)) == asked
            assert "pinned: s3://bucket/data/" in gateway.command("status").stdout
            assert gateway.command("unpin", "s3://bucket/data/").returncode == 0
            refused = gateway.command("unpin", "s3://bucket/data/")
            assert (refused.returncode, "is not pinned" in refused.stderr) == (1, True)
