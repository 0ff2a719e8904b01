"""The Compose file follows Compose's schema, agrees with itself, and its job does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from gateway.config.units import parse_duration_seconds
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.test_deploy import DEPLOY

COMPOSE_FILE = DEPLOY / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))
SETTINGS = tomllib.loads((DEPLOY / "compose" / "forebay.toml").read_text(encoding="utf-8"))


def against_schema(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    """The schema is the one that check-jsonschema brings: nothing is fetched."""
    program = Path(sys.executable).with_name("check-jsonschema")
    command = [str(program), "--builtin-schema", schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_the_file_follows_the_schema(tmp_path: Path) -> None:
    """And a misspelt key would be found."""
    done = against_schema(COMPOSE_FILE, "vendor.compose-spec")
    assert done.returncode == 0, done.stdout
    bad = tmp_path / "compose.yaml"
    bad.write_text(COMPOSE_FILE.read_text(encoding="utf-8").replace("depends_on:", "depend_on:"), encoding="utf-8")
    assert against_schema(bad, "vendor.compose-spec").returncode == 1


def test_what_it_names_is_there_and_agrees() -> None:
    """Files, endpoints, keys and times are the same wherever they stand; every image is pinned or built here."""
    services = COMPOSE["services"]
    for config in COMPOSE["configs"].values():
        assert (DEPLOY / config["file"]).is_file()
    gateway, job, origin = services["forebay"], services["job"], services["origin"]
    assert (DEPLOY / gateway["build"]["context"] / gateway["build"]["dockerfile"]).is_file()
    assert gateway["image"] == job["image"] == f"forebay:{__version__}"
    assert "@sha256:" in origin["image"]
    assert SETTINGS["origin"]["endpoint_url"] == "http://origin:9000"
    assert job["environment"]["AWS_ENDPOINT_URL_S3"] == "http://forebay:9000"
    pair = (origin["environment"]["MINIO_ROOT_USER"], origin["environment"]["MINIO_ROOT_PASSWORD"])
    [credential] = SETTINGS["credentials"]
    assert (credential["access_key_id"], credential["secret_access_key"]) == pair
    for service in (gateway, job):
        assert (service["environment"]["AWS_ACCESS_KEY_ID"], service["environment"]["AWS_SECRET_ACCESS_KEY"]) == pair
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    assert parse_duration_seconds(gateway["stop_grace_period"]) > 45


@pytest.mark.slow
def test_the_job_reads_through_forebay() -> None:
    """With the slots of the composition, in front of another bucket: the second read is a hit."""
    with StrictOrigin() as origin:
        own = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        config: dict[str, Any] = {
            "origin": {"endpoint_url": origin.endpoint_url, "region": "us-east-1", **own},
            "cache": {"capacity": "1GiB", "persistent": True},
            "credentials": SETTINGS["credentials"],
            "slots": SETTINGS["slots"],
        }
        with GatewayProcess(config) as gateway:
            keys = COMPOSE["services"]["job"]["environment"] | {"AWS_ENDPOINT_URL_S3": gateway.s3_url}
            done = subprocess.run(
                [sys.executable, DEPLOY / "compose" / "job.py"],
                env={"PATH": os.environ["PATH"], **keys},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
    assert done.returncode == 0, done.stderr
    labels = [line.rpartition("x-forebay-cache: ")[2] for line in done.stdout.splitlines()]
    assert labels[:4] == ["miss; reason=first-read", "hit", "forwarded", "absorbed"]
