"""Whole gateways of one cluster, with a real Redis: a checkpoint whose ranks write through several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.s3.requests import Operation
from tests.cluster.with_redis import writing
from tests.support.memory_origin.faults import Answer, on
from tests.support.nodes import BUCKET, Nodes
from tests.support.redis_server import RedisServer

STEP = "back/run/step-100"
MARKER = f"{STEP}/.metadata"
SHARDS = [f"{STEP}/__{rank}_0.distcp" for rank in range(3)]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as server:
        yield server


def has(cluster: Nodes, key: str) -> bool:
    return key in cluster.origin.model.buckets[BUCKET].objects


def run(cluster: Nodes, number: int, *words: str) -> Result:
    return CliRunner().invoke(cli.app, [*words, "--admin-url", cluster[number].gateway.admin_url])


def told(cluster: Nodes) -> list[str]:
    return [cluster[number].request("HEAD", MARKER).headers["x-forebay-durable"] for number in range(3)]


def shown(cluster: Nodes, number: int) -> list[dict[str, Any]]:
    result = run(cluster, number, "checkpoints", f"s3://{BUCKET}/back/run/", "--cluster", "--json")
    assert result.exit_code == 0, result.output
    return [orjson.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_a_checkpoint_of_several_nodes_is_one(tmp_path: Path, redis: RedisServer) -> None:
    """6.6, 6.8, 12.10 The bucket takes nothing of one rank for a while."""
    with writing(tmp_path, redis.url, 3) as cluster:
        refusal = cluster.origin.model.inject(
            on(Operation.PUT_OBJECT, key=SHARDS[2]), Answer(503, "SlowDown"), times=None
        )
        for number, key in enumerate(SHARDS):
            answer = cluster[number].request("PUT", key, content=bytes(1000 + number))
            assert answer.headers["x-forebay-cache"] == "absorbed", answer.text
        assert cluster[0].request("PUT", MARKER, content=b"m").headers["x-forebay-cache"] == "absorbed"
        cluster.wait_until(lambda: has(cluster, SHARDS[0]) and has(cluster, SHARDS[1]))
        objects = f"{cluster[0].gateway.admin_url}/api/v1/writeback/objects?prefix=s3://{BUCKET}/{STEP}"

        def reason() -> str:
            found = cluster[0].client.get(objects).json()["objects"]
            return next((one["reason"] or "" for one in found if one["key"] == MARKER), "")

        cluster.wait_until(lambda: f"s3://{BUCKET}/{SHARDS[2]} on node-2" in reason())
        assert not has(cluster, MARKER)
        assert told(cluster) == ["false"] * 3
        for number in range(3):
            [one] = shown(cluster, number)
            assert (one["files"], one["bytes"], one["ranks"]) == (4, 3004, 3), one
            assert one["nodes"] == ["node-0", "node-1", "node-2"]
            assert one["state"] != "durable"
        late = run(cluster, 1, "flush", f"s3://{BUCKET}/{STEP}/", "--wait", "--cluster", "--timeout", "1s")
        assert late.exit_code == 1, late.output
        cluster.origin.model.faults.remove(refusal)
        done = run(cluster, 1, "flush", f"s3://{BUCKET}/{STEP}/", "--wait", "--cluster")
        assert done.exit_code == 0, done.output
        assert has(cluster, MARKER)
        cluster.wait_until(lambda: told(cluster) == ["true"] * 3)
        assert shown(cluster, 2)[0]["state"] == "durable"
        cluster[2].kill()
        part = run(cluster, 0, "checkpoints", "--cluster")
        assert (part.exit_code, "without what node-2" in part.stderr) == (1, True), part.output
        part = run(cluster, 0, "flush", "--wait", "--cluster", "--timeout", "1s")
        assert (part.exit_code, "node-2" in part.stderr) == (1, True), part.output
