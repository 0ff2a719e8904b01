"""Real clients list a bucket whose listings the gateway keeps: what they see is what the bucket says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.boto import boto3_client
from tests.clients.commands import Command, client_environment
from tests.clients.conftest import Endpoint
from tests.clients.content import ODD_KEYS
from tests.clients.filesystems import closed, s3_filesystem
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin
from tests.clients.warmth import put_all
from tests.support.gateway_process import GatewayProcess

pytestmark = pytest.mark.clients

BUCKET = "indexed"
KEYS = [*ODD_KEYS, *(f"data/class{number % 7}/{number:03}" for number in range(60))]


@pytest.fixture(scope="module")
def endpoint(origin: Origin) -> Iterator[Endpoint]:
    """A gateway with two workers and one slot that lets the index answer; the bucket is filled."""
    slot = {"name": "indexed", "prefix": f"s3://{BUCKET}/", "consistency": "immutable"}
    client = boto3_client(origin.url)
    origin.make_bucket(client, BUCKET)
    put_all(client, BUCKET, {key: key.encode() for key in KEYS})
    client.close()
    with GatewayProcess({"server": {"workers": 2}, "slots": [slot], **origin.configuration()}) as gateway:
        yield Endpoint(gateway.s3_url, None, [gateway.directory])


def pages(client: Any, operation: str, **arguments: Any) -> Iterator[Any]:
    """What each page says, less tokens and what belongs to one answer."""
    for page in client.get_paginator(operation).paginate(Bucket=BUCKET, **arguments):
        yield {
            name: value
            for name, value in page.items()
            if name not in ("ResponseMetadata", "ContinuationToken", "NextContinuationToken")
        }


QUESTIONS: list[dict[str, Any]] = [
    {},
    {"PaginationConfig": {"PageSize": 7}},
    {"Delimiter": "/", "PaginationConfig": {"PageSize": 3}},
    {"Prefix": "data/", "Delimiter": "/", "PaginationConfig": {"PageSize": 2}},
    {"Prefix": "data/class3/"},
    {"Prefix": "ünï"},
    {"Prefix": "nothing"},
]


@pytest.mark.parametrize("arguments", QUESTIONS)
def test_boto3_pages_are_the_origins(through: Any, direct: Any, arguments: dict[str, Any]) -> None:
    """ListObjectsV2: page by page the same, asked of the origin and of the index, by any worker."""
    expected = list(pages(direct, "list_objects_v2", **arguments))
    for _ in range(3):
        found = list(pages(through, "list_objects_v2", **arguments))
        is_same = found == expected
        assert is_same, f"{found} instead of {expected}"


@pytest.mark.parametrize("arguments", QUESTIONS)
def test_the_first_version_lists_the_same(through: Any, direct: Any, arguments: dict[str, Any]) -> None:
    """ListObjects: every key and prefix once. Its pages are not compared: moto's have markers that mean nothing."""
    expected = listed(pages(direct, "list_objects_v2", **arguments))
    for _ in range(3):
        assert listed(pages(through, "list_objects", **arguments)) == expected


def listed(found: Iterator[Any]) -> list[str]:
    """Keys and common prefixes."""
    return sorted(
        one.get("Key") or one["Prefix"]
        for page in found
        for one in (*page.get("Contents", ()), *page.get("CommonPrefixes", ()))
    )


def test_s5cmd_and_rclone_see_every_key(endpoint: Endpoint, direct: Any, tmp_path: Path) -> None:
    """Recursively, and level by level."""
    environment = client_environment(endpoint.url, None, tmp_path)
    s5cmd = Command("s5cmd", environment | {"S3_ENDPOINT_URL": endpoint.url, "NO_PROXY": "*"})
    config = tmp_path / "rclone.conf"
    config.write_text(
        f"[forebay]\ntype = s3\nprovider = Other\naccess_key_id = {ACCESS_KEY_ID}\nregion = {REGION}\n"
        f"secret_access_key = {SECRET_ACCESS_KEY}\nendpoint = {endpoint.url}\nforce_path_style = true\n"
    )
    rclone = Command("rclone", {"HOME": str(tmp_path), "RCLONE_CONFIG": str(config), "PATH": "/usr/bin:/bin"})
    wanted = {key for key in KEYS if key.startswith("data/")}
    for _ in range(2):
        lines = s5cmd("--json", "ls", f"s3://{BUCKET}/data/*").stdout.decode().splitlines()
        assert {json.loads(line)["key"].removeprefix(f"s3://{BUCKET}/") for line in lines} == wanted
        listed = json.loads(rclone("lsjson", "--recursive", "--files-only", f"forebay:{BUCKET}/data").stdout)
        assert {f"data/{one['Path']}" for one in listed} == wanted
        assert {one["Size"] for one in listed} == {len("data/class0/000")}


def test_a_file_system_sees_its_own_changes(endpoint: Endpoint, direct: Any) -> None:
    """s3fs writes, lists, removes and lists: each listing is of that moment."""
    with closed(s3_filesystem(endpoint)) as filesystem:
        for number in range(3):
            path = f"{BUCKET}/own/{number}"
            filesystem.pipe(path, b"content")
            assert sorted(filesystem.find(f"{BUCKET}/own")) == [f"{BUCKET}/own/{one}" for one in range(number + 1)]
        assert f"{BUCKET}/own" in filesystem.ls(BUCKET)
        filesystem.rm(f"{BUCKET}/own", recursive=True)
        assert filesystem.find(f"{BUCKET}/own") == []
        assert f"{BUCKET}/own" not in filesystem.ls(BUCKET)
