"""Nodes whose bucket has a replica near them: what the source, and what the replica, is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.demo.ports import free_port
from gateway.s3.headers import first_and_last
from tests.support.nodes import BLOCK, BUCKET, READ_ONLY, Nodes, nodes
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

COPY = "bucket-eu"
SIZES = [10, 70_000, 300_000, BLOCK, 3 * BLOCK + 1] * 3
ATTEMPTS_MAX = 3
"""A machine that stands still makes nodes take each other for dead."""


@pytest.fixture(scope="module")
def near() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.model.create_bucket(COPY)
        yield origin


def with_replica(directory: Path, url: str) -> dict[str, object]:
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    replica = {"name": COPY, "endpoint_url": url, "origin_credentials": "eu"}
    return {
        "origin_credentials": [{"name": "eu", **keys}],
        "buckets": [{"name": BUCKET, "replicas": [replica]}],
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, near: StrictOrigin) -> Iterator[Nodes]:
    directory = tmp_path_factory.mktemp("cluster")
    with nodes(directory, 3, [READ_ONLY], **with_replica(directory, near.endpoint_url)) as running:  # type: ignore[arg-type]
        yield running


def sent_bytes(near: StrictOrigin) -> int:
    """How many bytes of objects the replica was asked for."""
    near.settle()
    found = 0
    for line, fields in zip(near.request_lines, near.request_headers, strict=True):
        if line.startswith(f"GET /{COPY}/".encode()):
            size = len(near.model.data(COPY, line.removeprefix(f"GET /{COPY}/".encode()).decode()))
            headers = {name.decode(): value.decode("latin-1") for name, value in fields}
            first, last = first_and_last(headers.get("range")) or (0, None)
            found += min(size, size if last is None else last + 1) - first
    return found


@pytest.mark.slow
def test_14_1_each_byte_comes_from_the_replica_once(cluster: Nodes, near: StrictOrigin) -> None:
    """14.1 And none from the source, which is asked about each object once by the whole cluster."""
    for number in range(ATTEMPTS_MAX):
        keys = cluster.store(f"epoch{number}-", SIZES)
        for key in keys:
            near.model.put(COPY, key, cluster.content(key))
        before, asked = sent_bytes(near), len(cluster.origin.request_lines)
        seen = cluster.epoch(keys, range(3))
        assert "peer" in seen.seen
        from_source = [
            one for one in cluster.origin.request_lines[asked:] if one.startswith(f"GET /{BUCKET}/".encode())
        ]
        if sent_bytes(near) - before <= 1.02 * cluster.size_bytes(keys) and seen.questions <= 1.05 * len(keys):
            break
    else:
        pytest.fail(f"{sent_bytes(near) - before} bytes for {cluster.size_bytes(keys)}, {seen}")
    assert from_source == []


@pytest.mark.slow
def test_14_1_a_replica_that_lags_gives_no_wrong_byte(cluster: Nodes, near: StrictOrigin) -> None:
    """14.1 Whichever node asks: an older version there is not taken, and no node passes it on."""
    keys = cluster.store("lag-", SIZES)
    for key in keys:
        near.model.put(COPY, key, b"older " * 100)
    seen = cluster.epoch(keys, range(3))
    assert seen.size_bytes <= 1.1 * cluster.size_bytes(keys)


@pytest.mark.slow
def test_14_2_a_replica_that_is_gone_fails_no_read(tmp_path: Path) -> None:
    """14.2 On no node, and each byte still comes once."""
    table = with_replica(tmp_path, f"http://127.0.0.1:{free_port()}")
    with nodes(tmp_path, 2, [READ_ONLY], **table) as cluster:  # type: ignore[arg-type]
        keys = cluster.store("gone-", SIZES)
        assert cluster.epoch(keys, range(2)).size_bytes <= 1.1 * cluster.size_bytes(keys)
