"""What `forebay serve` says of itself when it starts, and what it will not start with."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from gateway.config.defaults import file_system_kind
from gateway.serve.banner import banner, what_is_served
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.prepared_process import run_prepared
from tests.support.settings import load
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

REPOSITORY = Path(__file__).resolve().parents[2]


def started(tmp_path: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A start that is to fail."""
    file = tmp_path / "forebay.toml"
    file.write_text(text, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FOREBAY_"))}
    nowhere = {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", "PYTHONPATH": str(REPOSITORY)}
    return run_prepared("gateway", "serve", "--config", file, timeout=60, env=kept | nowhere | environment)


def served(gateway: GatewayProcess) -> dict[str, Any]:
    """The event that says what is served; it comes right behind the first line on standard output."""
    while True:  # the test's own time limit is the deadline
        events = [json.loads(line) for line in gateway.log.splitlines() if line.endswith("}")]
        said = [event for event in events if event["event"] == "serving"]
        if said:
            found: dict[str, Any] = said[0]
            return found
        time.sleep(0.02)


@pytest.mark.slow
def test_it_says_what_it_serves() -> None:
    """Origin, key, callers, cache, workers, slots; and no secret."""
    with StrictOrigin() as origin:
        config: dict[str, Any] = {
            "origin": {
                "endpoint_url": origin.endpoint_url,
                "region": "eu-west-1",
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            },
            "server": {"workers": 2},
            "slots": [{"name": "imagenet", "prefix": "s3://train/imagenet/", "mode": "read-only"}],
        }
        with GatewayProcess(config) as gateway:
            said = served(gateway)
            assert SECRET_ACCESS_KEY not in gateway.log
    assert said["origin"] == f"{origin.endpoint_url}, region eu-west-1"
    assert said["own_key"] == f"{ACCESS_KEY_ID}, from the configuration"
    assert said["callers"] == "whoever signs with the gateway's own key"
    assert said["cache"] == f"{gateway.directory}: up to 64.0 MiB, may be lost with the machine"
    assert said["workers"] == "2"
    assert said["slots"][0] == "imagenet: s3://train/imagenet/ read-only, ttl, write through"
    assert said["warnings"] == []


def test_people_read_lines() -> None:
    """One fact a line, and loudly what is not in force."""
    text = banner({"origin": "o", "own_key": "k", "slots": ["a", "b"]}, ["w", "x"])
    assert text == "  origin   o\n  own key  k\n  slots    a\n           b\n  WARNING  w\n  WARNING  x\n"


@pytest.mark.parametrize(
    ("lanes", "said"),
    [(8, "8 at a time by a core"), (1, "one at a time by a core (docs/write-back.md)")],
)
def test_who_writes_back_is_told_how_md5s_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, said: str
) -> None:
    """Whether the library is there; nobody else needs to know."""
    monkeypatch.setattr("gateway.serve.banner.LANES", lanes)
    text = f'[cache]\ndirectory = "{tmp_path}/cache"\ncapacity = "64MiB"\npersistent = true\n'
    slot = '[[slots]]\nname = "s"\nprefix = "s3://bucket/"\nwrite = "back"\nbuffer = "16MiB"\n'
    assert what_is_served(load(tmp_path, text + slot).settings, None)["md5"] == said
    assert "md5" not in what_is_served(load(tmp_path, text).settings, None)


@pytest.mark.slow
def test_without_a_key_it_does_not_start(tmp_path: Path) -> None:
    """It says what to set, and what to set to start all the same."""
    text = f'[origin]\nendpoint_url = "http://127.0.0.1:1"\n[cache]\ndirectory = "{tmp_path}/cache"\n'
    done = started(tmp_path, text)
    assert done.returncode == 1
    assert "no credentials for the origin" in done.stderr
    assert "origin.require_credentials = false" in done.stderr


@pytest.mark.slow
def test_without_a_key_it_starts_where_that_is_configured() -> None:
    """And says that it has none."""
    no_key = {"access_key_id": None, "secret_access_key": None}
    origin: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:1", "require_credentials": False, **no_key}
    with GatewayProcess({"origin": origin, "server": {"allow_unsigned": True}}) as gateway:
        assert "none found" in served(gateway)["own_key"]


@pytest.mark.slow
def test_the_gateways_own_key_refused_is_told_as_such() -> None:
    """The client is not sent to look at its own key; status and readiness say the same, and the log once a minute."""
    with StrictOrigin() as origin:
        origin.model.put("bucket", "k", b"x")
        keys = {"access_key_id": "AKIAUNKNOWN", "secret_access_key": "wrong-secret"}
        callers = [{"access_key_id": "job-a", "secret_access_key": "s" * 20, "allow": ["s3://"]}]
        config: dict[str, Any] = {"origin": {"endpoint_url": origin.endpoint_url, **keys}, "credentials": callers}
        with GatewayProcess(config) as gateway:
            client = boto3.client(
                "s3",
                endpoint_url=gateway.s3_url,
                region_name="us-east-1",
                aws_access_key_id="job-a",
                aws_secret_access_key="s" * 20,
                config=Config(retries={"total_max_attempts": 1}),
            )
            for _ in range(3):
                with pytest.raises(ClientError) as refused:
                    client.get_object(Bucket="bucket", Key="k")
                error = refused.value.response["Error"]
                assert error["Code"] == "AccessDenied"
                assert "refuses the key of this gateway (InvalidAccessKeyId)" in error["Message"]
            ready = httpx.get(f"{gateway.admin_url}/readyz", timeout=ANSWER_SECONDS_MAX).json()
            assert ready["origin_reachable"]
            assert "refuses the gateway's own key: InvalidAccessKeyId" in ready["origin_problem"]
            assert gateway.status()["origin"]["state"] == "refused"
            wrong = boto3.client(
                "s3",
                endpoint_url=gateway.s3_url,
                region_name="us-east-1",
                aws_access_key_id="job-a",
                aws_secret_access_key="wrong",
                config=Config(retries={"total_max_attempts": 1}),
            )
            for _ in range(3):
                with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
                    wrong.get_object(Bucket="bucket", Key="k")
            assert gateway.log.count("the origin: ") == 1
            assert gateway.log.count("the origin refuses the gateway's own key") == 1
            assert gateway.log.count('"callers are refused"') == 1


def test_a_capacity_beyond_the_disk_is_told(tmp_path: Path) -> None:
    """A slip of a unit is seen at the start, and not when the disk is full."""
    text = f'[cache]\ndirectory = "{tmp_path}/cache"\ncapacity = "900PiB"\n'.replace("900PiB", "9000TiB")
    [warning] = load(tmp_path, text).warnings
    assert "cache.capacity takes up to" in warning
    assert "the cache will be smaller" in warning
    assert load(tmp_path, f'[cache]\ndirectory = "{tmp_path}/cache"\ncapacity = "64MiB"\n').warnings == ()


def test_a_directory_in_memory_that_is_said_to_last_is_told(tmp_path: Path) -> None:
    """What is acknowledged there is lost with the machine."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:20 / / rw - ext4 /dev/sda rw\n"
        "23 22 0:21 / /mnt/a\\040b rw,nosuid shared:3 - tmpfs tmpfs rw\n"
        "24 22 0:22 / /mnt/a rw - xfs /dev/sdb rw\n"
    )
    assert file_system_kind(Path("/mnt/a b/cache"), mounts) == "tmpfs"
    assert file_system_kind(Path("/mnt/a/cache"), mounts) == "xfs"
    assert file_system_kind(Path("/mnt/ab"), mounts) == "ext4"
    assert file_system_kind(Path("/mnt"), tmp_path / "absent") == ""
    text = '[cache]\ndirectory = "/dev/shm/forebay-test"\ncapacity = "64MiB"\npersistent = true\n'
    if file_system_kind(Path("/dev/shm")) == "tmpfs":
        assert any("LOSES ACKNOWLEDGED WRITES" in warning for warning in load(tmp_path, text).warnings)
