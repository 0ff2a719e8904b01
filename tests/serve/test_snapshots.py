"""Snapshots as users meet them: the command, two workers, boto3, and a gateway that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import orjson
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from typer.testing import CliRunner, Result

from gateway import cli
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

OBJECTS = 1200
PREFIX = "s3://bucket/data/"


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as running:
        running.model.create_bucket("bucket")
        for number in range(OBJECTS):
            running.model.put("bucket", f"data/{number:04d}", b"old %d" % number)
        running.model.put("bucket", "other", b"")
        yield running


def config_of(origin: StrictOrigin) -> dict[str, Any]:
    return {
        "server": {"workers": 2},
        "origin": origin.settings,
        "slots": [{"name": "data", "prefix": PREFIX, "consistency": "snapshot", "snapshot": "v1"}],
    }


def client_of(gateway: GatewayProcess) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}, max_pool_connections=1),
    )


def snapshot(gateway: GatewayProcess, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, ["snapshot", *arguments, "--admin-url", gateway.admin_url])
    assert result.exit_code == code, result.output
    return result


def keys(s3: Any, prefix: str = "data/") -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    return [one["Key"] for page in pages for one in page.get("Contents", ())]


def bodies(gateway: GatewayProcess, key: str) -> set[bytes]:
    """What several connections get, so that each worker has a share in it."""
    return {client_of(gateway).get_object(Bucket="bucket", Key=key)["Body"].read() for _ in range(6)}


def refusal(s3: Any, key: str) -> str:
    with pytest.raises(ClientError) as refused:
        s3.get_object(Bucket="bucket", Key=key)
    return str(refused.value)


@pytest.mark.slow
def test_a_run_can_be_repeated(tmp_path: Path, origin: StrictOrigin) -> None:
    """What was frozen is listed and read by every worker, whatever becomes of bucket, gateway and catalog."""
    directory = tmp_path / "cache"
    with GatewayProcess(config_of(origin), directory=directory) as gateway:
        s3 = client_of(gateway)
        assert "forebay snapshot create v1 s3://bucket/data/" in refusal(s3, "data/0000")
        made = orjson.loads(snapshot(gateway, "create", "v1", PREFIX, "--json").stdout)
        assert (made["objects"], made["slots"]) == (OBJECTS, ["data"])
        assert bodies(gateway, "data/0000") == {b"old 0"}
        origin.model.put("bucket", "data/0000", b"new")
        origin.model.put("bucket", "data/0001", b"new")
        origin.model.put("bucket", "data/new", b"new")
        assert len(keys(s3)) == OBJECTS
        assert bodies(gateway, "data/0000") == {b"old 0"}
        assert "PreconditionFailed" in refusal(s3, "data/0001")
        assert "NoSuchKey" in refusal(s3, "data/new")
        assert keys(s3, "")[-1] == "other"
        with pytest.raises(ClientError, match="AccessDenied"):
            s3.put_object(Bucket="bucket", Key="data/0002", Body=b"mine")
        gateway.kill()
    (directory / "catalog" / "BOOT").unlink()
    with GatewayProcess(config_of(origin), directory=directory) as gateway:
        assert len(keys(client_of(gateway))) == OBJECTS
        assert bodies(gateway, "data/0000") == {b"old 0"}


@pytest.mark.slow
def test_the_command_does_what_it_says(tmp_path: Path, origin: StrictOrigin) -> None:
    """Text for people, JSON for programs, exit codes for both."""
    with GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        assert "1,200 objects" in snapshot(gateway, "create", "v1", PREFIX).stdout
        assert "already" in snapshot(gateway, "create", "v1", PREFIX, code=1).stderr
        assert "no name" in snapshot(gateway, "create", "v 1", PREFIX, code=1).stderr
        assert orjson.loads(snapshot(gateway, "create", "v2", PREFIX, "--no-wait", "--json").stdout)["id"]
        origin.model.put("bucket", "data/new", b"new")
        assert "1 added, 0 removed, 0 changed, 1200 same" in snapshot(gateway, "diff", "v1").stdout
        lines = snapshot(gateway, "diff", "v1", "--json").stdout.splitlines()
        assert orjson.loads(lines[0])["key"] == "data/new"
        file = tmp_path / "v1.jsonl"
        snapshot(gateway, "export", "v1", str(file))
        for more in ((), ("-",)):
            assert snapshot(gateway, "export", "v1", *more).stdout.encode() == file.read_bytes()
        assert not Path("-").exists()
        snapshot(gateway, "export", "nothing", str(tmp_path / "nothing"), code=1)
        assert [path.name for path in tmp_path.glob("*.*")] == ["v1.jsonl"]
        assert "imported" in snapshot(gateway, "import", "v3", str(file)).stdout
        assert "0 added, 0 removed, 0 changed, 1200 same" in snapshot(gateway, "diff", "v1", "v3").stdout
        file.write_bytes(file.read_bytes() + b"{}\n")
        assert "line 1202" in snapshot(gateway, "import", "v4", str(file), code=1).stderr
        listed = snapshot(gateway, "list").stdout
        assert "1,200" in listed
        assert "v3" in listed
        assert "--force" in snapshot(gateway, "delete", "v1", code=1).stderr
        assert "is deleted" in snapshot(gateway, "delete", "v1", "--force").stdout
        assert "no snapshot" in snapshot(gateway, "delete", "v1", code=1).stderr
        names = [one["name"] for one in orjson.loads(snapshot(gateway, "list", "--json").stdout)["snapshots"]]
        assert names == ["v2", "v3"]
        status = CliRunner().invoke(cli.app, ["status", "--admin-url", gateway.admin_url])
        assert "forebay snapshot create v1" in status.output
        assert CliRunner().invoke(cli.app, ["snapshot", "create", "v1"]).exit_code == 2
