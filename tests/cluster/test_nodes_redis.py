"""Whole gateways that find each other in a real Redis: members, belief, and what Redis' failures cost."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.with_redis import believes, state
from tests.support.memory_origin.faults import Answer
from tests.support.nodes import BUCKET, PATIENCE_SECONDS, READ_ONLY, Node, Nodes, nodes
from tests.support.redis_server import RedisServer

BACK: Mapping[str, Any] = {"name": "back", "prefix": f"s3://{BUCKET}/back/", "mode": "read-write", "write": "back"}


@contextmanager
def clustered(directory: Path, redis: RedisServer, count: int, *, running: int | None = None) -> Iterator[Nodes]:
    of_one = {
        number: {"cluster": {"redis": redis.url, "members": [], "node": f"node-{number}"}} for number in range(count)
    }
    cache = {"persistent": True}
    with nodes(directory, count, (READ_ONLY, BACK), running=running, of_one=of_one, cache=cache) as cluster:
        yield cluster


def names(node: Node) -> list[str]:
    return sorted(one["name"] for one in state(node)["members"] if one["state"] == "up")


def wait_for_members(cluster: Nodes, number: int, count: int) -> None:
    """Until the worker of a node asks so many nodes for what they own."""
    asked, tried = set[str](), itertools.count()

    def asks_all() -> bool:
        asked.update(cluster.asked_by(number, f"probe-{number}-{next(tried)}"))
        return len(asked) == count

    cluster.wait_until(asks_all)


def reads_each_byte_once(cluster: Nodes) -> None:
    """Let three nodes read objects that none has read. A node that was too late once is left out for a while."""
    due = time.monotonic() + PATIENCE_SECONDS
    while True:
        keys = cluster.store(str(uuid.uuid4()), [300_000] * 6)
        spent = cluster.epoch(keys, of=range(3))
        assert "peer" in spent.seen
        if spent.size_bytes == cluster.size_bytes(keys):
            return
        assert time.monotonic() < due, "objects were read more than once, each time"


@pytest.mark.slow
def test_nodes_find_each_other_in_redis_and_read_each_byte_once(tmp_path: Path, redis: RedisServer) -> None:
    """No list of members. A node that comes later is found; Redis' end changes nothing about who is there."""
    with clustered(tmp_path, redis, 3, running=2) as cluster:
        for number in (0, 1):
            cluster.wait_until(lambda: believes(cluster[number]))  # noqa: B023
            cluster.wait_until(lambda: names(cluster[number]) == ["node-0", "node-1"])  # noqa: B023
        cluster[2].start()
        for number in range(3):
            cluster.wait_until(lambda: len(names(cluster[number])) == 3)  # noqa: B023
        for number in range(3):
            wait_for_members(cluster, number, 3)
        reads_each_byte_once(cluster)
        redis.stop()
        cluster.wait_until(lambda: not believes(cluster[1]))
        assert "connect" in state(cluster[1])["redis"]["problem"].lower()
        reads_each_byte_once(cluster)
        assert len(names(cluster[0])) == 3
        redis.start()
        cluster.wait_until(lambda: all(believes(cluster[number]) for number in range(3)))


@pytest.mark.slow
def test_an_empty_redis_is_believed_once_all_nodes_have_told_it_what_they_have(
    tmp_path: Path, redis: RedisServer
) -> None:
    """A node that is down with acknowledged writes stays in the way until it is back, or somebody forgets it."""
    with clustered(tmp_path, redis, 2) as cluster:
        first, second = cluster[0], cluster[1]
        cluster.wait_until(lambda: believes(first) and believes(second))
        cluster.wait_until(lambda: len(names(first)) == 2)
        second.kill()
        redis.restart()
        cluster.wait_until(lambda: "node-1 (1 in all)" in (state(first)["redis"]["problem"] or ""))
        forget = f"{first.gateway.admin_url}/api/v1/cluster/forget"
        asked = first.client.post(forget, json={"node": "node-1", "only_ask": True})
        assert asked.json() == {"node": "node-1", "pending": 0, "forgotten": False}
        assert not believes(first)
        assert first.client.post(forget, json={"node": "node-9"}).status_code == 404
        assert first.client.post(forget, json={"node": "node-0"}).status_code == 409
        assert first.client.post(forget, json={"node": "node-1"}).json()["forgotten"]
        cluster.wait_until(lambda: believes(first))


@pytest.mark.slow
def test_12_14_a_forgotten_node_that_comes_back_shows_what_it_had_until_somebody_decides(
    tmp_path: Path, redis: RedisServer
) -> None:
    with clustered(tmp_path, redis, 2) as cluster:
        first, second = cluster[0], cluster[1]
        cluster.wait_until(lambda: believes(first) and believes(second))
        cluster.wait_until(lambda: all(len(names(one)) == 2 for one in cluster.nodes))

        def absorbed(node: Node, key: str, content: bytes) -> bool:
            answer = node.request("PUT", key, content=content)
            return bool(answer.headers.get("x-forebay-cache") == "absorbed")

        def shown() -> list[bytes]:
            return [node.request("GET", "back/key").content for node in cluster.nodes]

        cluster.wait_until(lambda: all(absorbed(node, "back/known", b"x") for node in cluster.nodes))
        is_shut = True
        shut = Answer(503, "SlowDown")
        cluster.origin.model.inject(lambda call: is_shut and call.key == "back/key", shut, times=None)
        assert absorbed(second, "back/key", b"returned")
        second.gateway.kill()
        is_shut = False
        forget = f"{first.gateway.admin_url}/api/v1/cluster/forget"
        cluster.wait_until(lambda: first.client.post(forget, json={"node": "node-1"}).status_code == 200)
        cluster.wait_until(lambda: absorbed(first, "back/key", b"meanwhile"))
        flushed = cluster.origin.model.buckets[BUCKET].objects
        cluster.wait_until(lambda: "back/key" in flushed and cluster.content("back/key") == b"meanwhile")
        second.gateway.start()
        cluster.wait_until(lambda: shown() == [b"returned"] * 2)
        resolve, decision = f"{second.gateway.admin_url}/api/v1/writeback/resolve", {"decision": "keep-theirs"}
        decision["object"] = f"s3://{BUCKET}/back/key"
        cluster.wait_until(lambda: second.client.post(resolve, json=decision).status_code == 200)
        cluster.wait_until(lambda: shown() == [b"meanwhile"] * 2)
