"""Whole gateways of one cluster with a real Redis, in which every node may write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.nodes import BUCKET, Node, Nodes, nodes

_WRITES: Mapping[str, Any] = {"mode": "read-write"}
SLOTS: list[Mapping[str, Any]] = [
    {"name": "ttl", "prefix": f"s3://{BUCKET}/ttl/", "consistency": "ttl", "metadata_ttl": "1h", **_WRITES},
    {"name": "fixed", "prefix": f"s3://{BUCKET}/fixed/", "consistency": "immutable", **_WRITES},
    {"name": "back", "prefix": f"s3://{BUCKET}/back/", "consistency": "ttl", "write": "back", **_WRITES},
    {"name": "strict", "prefix": f"s3://{BUCKET}/strict/", "consistency": "strict", "write": "back", **_WRITES},
]
PREFIXES = ("ttl", "fixed", "back", "strict")


@contextmanager
def writing(
    directory: Path, redis_url: str, count: int, *more: Mapping[str, Any], workers: int = 1, **cache: str
) -> Iterator[Nodes]:
    """Yield a cluster whose nodes believe Redis, and know the bucket. `more`: slots; `cache`: settings."""
    of_one = {
        number: {"cluster": {"redis": redis_url, "members": [], "node": f"node-{number}"}} for number in range(count)
    }
    tables: dict[str, Any] = {
        "of_one": of_one,
        "cache": {"persistent": True, **cache},
        "server": {"workers": workers},
    }
    with nodes(directory, count, [*SLOTS, *more], **tables) as cluster:
        for number in range(count):
            cluster.wait_until(lambda: is_ready(cluster, number, count))  # noqa: B023
        cluster.wait_until(lambda: all(absorbs(cluster, number) for number in range(count)))
        yield cluster


def is_ready(cluster: Nodes, number: int, count: int) -> bool:
    found = state(cluster[number])
    return bool(found["redis"]["believed"]) and sum(one["state"] == "up" for one in found["members"]) == count


def absorbs(cluster: Nodes, number: int) -> bool:
    answers = [cluster[number].request("PUT", f"{prefix}/n{number}", content=b"x") for prefix in ("back", "strict")]
    return all(answer.headers["x-forebay-cache"] == "absorbed" for answer in answers)


def state(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.client.get(f"{node.gateway.admin_url}/api/v1/cluster").json()
    return found


def believes(node: Node) -> bool:
    redis = state(node)["redis"]
    return redis is not None and bool(redis["believed"])
