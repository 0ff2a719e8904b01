"""Clause 14 of docs/semantics.md, through a running gateway; tests/origin/stores/test_webhdfs.py has the details."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.serve.test_writeback_admin import forebay
from tests.support.changing_slots import client_of
from tests.support.gateway_process import GatewayProcess
from tests.support.webhdfs import WebHdfsCluster

CALLER = ("job", "a-secret-of-a-job")
LARGE = bytes(range(256)) * (12 * 1024)


@pytest.fixture(scope="module")
def cluster() -> Iterator[WebHdfsCluster]:
    with WebHdfsCluster() as one:
        one.put("/warehouse/train/shards/a-b.bin", b"0123456789")
        one.put("/warehouse/train/shards/a/x.bin", LARGE)
        for number in range(20):
            one.put(f"/warehouse/train/small/{number:03}", f"{number}".encode())
        yield one


@pytest.fixture(scope="module")
def gateway(cluster: WebHdfsCluster) -> Iterator[GatewayProcess]:
    home = {
        "endpoint_url": f"webhdfs://alice@{cluster.namenode}/warehouse",
        "access_key_id": None,
        "secret_access_key": None,
    }
    config: dict[str, Any] = {
        "origin": home,
        "credentials": [{"access_key_id": CALLER[0], "secret_access_key": CALLER[1], "allow": ["s3://"]}],
        "slots": [
            {"name": "train", "prefix": "s3://train/shards/", "mode": "read-only", "consistency": "strict"},
            {"name": "small", "prefix": "s3://train/small/", "mode": "read-only", "consistency": "immutable"},
        ],
    }
    with GatewayProcess(config) as running:
        yield running


@pytest.fixture
def client(gateway: GatewayProcess, cluster: WebHdfsCluster) -> Any:
    cluster.cut_after.clear()
    return client_of(gateway.s3_url, CALLER)


def read(client: Any, key: str) -> bytes:
    return bytes(client.get_object(Bucket="train", Key=key)["Body"].read())


@pytest.mark.slow
def test_16_1_a_changed_file_is_another_version(client: Any, cluster: WebHdfsCluster) -> None:
    """16.1 A file is read once, from the cache after that, and anew when another one lies there."""
    cluster.put("/warehouse/train/shards/new", LARGE)
    assert [read(client, "shards/new") for _ in range(2)] == [LARGE] * 2
    opened = cluster.operations().count("OPEN")
    assert read(client, "shards/new") == LARGE
    assert [read(client, f"small/{number:03}") for number in range(20)] == [b"%d" % number for number in range(20)]
    assert [read(client, f"small/{number:03}") for number in range(20)] == [b"%d" % number for number in range(20)]
    assert cluster.operations().count("OPEN") <= opened + 20
    cluster.put("/warehouse/train/shards/new", LARGE[::-1])
    assert read(client, "shards/new") == LARGE[::-1]
    cluster.remove("/warehouse/train/shards/new")


def test_16_2_a_datanode_that_breaks_off_breaks_no_answer(client: Any, cluster: WebHdfsCluster) -> None:
    """16.2 The rest comes from another one."""
    cluster.put("/warehouse/train/shards/cut", LARGE)
    cluster.cut_after["datanode 0"] = 1_000_000
    assert read(client, "shards/cut") == LARGE
    assert "OPEN" in cluster.operations("datanode 1")
    cluster.remove("/warehouse/train/shards/cut")


def test_16_3_listings_are_in_s3s_order(client: Any) -> None:
    """16.3 Whatever the namenode's: `a-b.bin` comes before what lies in `a`. Directories are the buckets."""
    assert [one["Name"] for one in client.list_buckets()["Buckets"]] == ["train"]
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="train", PaginationConfig={"PageSize": 7})
    keys = [one["Key"] for page in pages for one in page["Contents"]]
    assert keys == ["shards/a-b.bin", "shards/a/x.bin", *(f"small/{number:03}" for number in range(20))]
    rolled_up = client.list_objects_v2(Bucket="train", Delimiter="/")
    assert [one["Prefix"] for one in rolled_up["CommonPrefixes"]] == ["shards/", "small/"]


def test_16_4_nothing_is_written(client: Any, gateway: GatewayProcess, cluster: WebHdfsCluster) -> None:
    """16.4 Writes are refused, and the status names the home."""
    for write in (client.put_object, client.delete_object, client.create_multipart_upload):
        with pytest.raises(ClientError, match="AccessDenied"):
            write(Bucket="train", Key="new")
    told = forebay("status", "--admin-url", gateway.admin_url)
    assert (told.exit_code, f"webhdfs://alice@{cluster.namenode}/warehouse" in told.output) == (0, True)
