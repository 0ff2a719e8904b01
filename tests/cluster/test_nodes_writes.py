"""Whole gateways of one cluster, with a real Redis: what one node has answered is seen on all that are asked later."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.s3.headers import multipart_etag
from gateway.s3.xml import text_of
from tests.support.nodes import BUCKET, Nodes, nodes
from tests.support.redis_server import RedisServer

PART_BYTES = 5 * 1024**2
_WRITES: Mapping[str, Any] = {"mode": "read-write"}
SLOTS: list[Mapping[str, Any]] = [
    {"name": "ttl", "prefix": f"s3://{BUCKET}/ttl/", "consistency": "ttl", "metadata_ttl": "1h", **_WRITES},
    {"name": "fixed", "prefix": f"s3://{BUCKET}/fixed/", "consistency": "immutable", **_WRITES},
    {"name": "back", "prefix": f"s3://{BUCKET}/back/", "consistency": "ttl", "write": "back", **_WRITES},
    {"name": "strict", "prefix": f"s3://{BUCKET}/strict/", "consistency": "strict", "write": "back", **_WRITES},
]
PREFIXES = ("ttl", "fixed", "back", "strict")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as server:
        yield server


@contextmanager
def writing(directory: Path, redis: RedisServer, count: int) -> Iterator[Nodes]:
    """A cluster whose nodes believe Redis, and know the bucket."""
    of_one = {
        number: {"cluster": {"redis": redis.url, "members": [], "node": f"node-{number}"}} for number in range(count)
    }
    with nodes(directory, count, SLOTS, of_one=of_one, cache={"persistent": True}) as cluster:
        for number in range(count):
            cluster.wait_until(lambda: is_ready(cluster, number, count))  # noqa: B023
        cluster.wait_until(lambda: all(absorbs(cluster, number) for number in range(count)))
        yield cluster


def is_ready(cluster: Nodes, number: int, count: int) -> bool:
    node = cluster[number]
    state = node.client.get(f"{node.gateway.admin_url}/api/v1/cluster").json()
    return bool(state["redis"]["believed"]) and sum(one["state"] == "up" for one in state["members"]) == count


def absorbs(cluster: Nodes, number: int) -> bool:
    answers = [cluster[number].request("PUT", f"{prefix}/n{number}", content=b"x") for prefix in ("back", "strict")]
    return all(answer.headers["x-forebay-cache"] == "absorbed" for answer in answers)


def listed(cluster: Nodes, number: int, prefix: str) -> dict[str, str]:
    """Keys and ETags."""
    answer = cluster[number].client.get(
        f"{cluster[number].gateway.s3_url}/{BUCKET}", params={"list-type": "2", "prefix": prefix}
    )
    assert answer.status_code == 200, answer.text
    found = {}
    for entry in answer.text.split("<Contents>")[1:]:
        key, etag = (entry.split(f"<{name}>")[1].split("</")[0] for name in ("Key", "ETag"))
        found[key] = etag.replace("&quot;", "").strip('"')
    return found


def check(cluster: Nodes, reader: int, key: str, content: bytes | None, etag: str, how: str) -> None:
    where = f"{how} of {key} on node {reader}"
    if how == "LIST":
        found = listed(cluster, reader, key)
        assert found.get(key) == (etag if content is not None else None), where
        return
    answer = cluster[reader].request(how, key)
    if content is None:
        assert answer.status_code == 404, where
        return
    assert answer.status_code == 200, f"{where}: {answer.status_code} {answer.text}"
    assert answer.headers["etag"].strip('"') == etag, where
    assert how == "HEAD" or answer.content == content, where


def test_a_write_on_one_node_is_seen_on_all(tmp_path: Path, redis: RedisServer) -> None:
    """12.4 GET, HEAD and LIST, of slots that remember, and of what is pending."""
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    with writing(tmp_path, redis, 3) as cluster:
        for turn in range(120):
            key, writer = f"{PREFIXES[turn % 4]}/k{dice.randrange(4)}", dice.randrange(3)
            content: bytes | None = None
            if dice.random() < 0.15:
                answer = cluster[writer].request("DELETE", key)
                assert answer.status_code == 204, f"seed {seed}: {answer.text}"
            else:
                content = dice.randbytes(dice.randrange(1, 3000))
                answer = cluster[writer].request("PUT", key, content=content)
                assert answer.status_code == 200, f"seed {seed}: {answer.text}"
            etag = answer.headers.get("etag", "").strip('"')
            for reader in dice.sample(range(3), 3):
                check(cluster, reader, key, content, etag, dice.choice(("GET", "HEAD", "LIST")))


def test_an_upload_goes_on_at_any_node(tmp_path: Path, redis: RedisServer) -> None:
    """12.10 Its requests reach the node that has it, in whatever order they come, and through whichever node."""
    with writing(tmp_path, redis, 3) as cluster:
        begun = cluster[0].request("POST", "back/large?uploads")
        upload_id = text_of(begun.content, "UploadId") or ""
        bodies = [bytes([number]) * PART_BYTES for number in range(4)]
        etags = dict[int, str]()
        for number in (3, 1, 4, 2):
            target = f"back/large?partNumber={number}&uploadId={upload_id}"
            answer = cluster[number % 3].request("PUT", target, content=bodies[number - 1])
            assert answer.status_code == 200, answer.text
            etags[number] = answer.headers["etag"]
        parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etags[n]}</ETag></Part>" for n in sorted(etags))
        document = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>"
        done = cluster[1].request("POST", f"back/large?uploadId={upload_id}", content=document.encode())
        assert done.status_code == 200, done.text
        assert text_of(done.content, "ETag") == multipart_etag([etags[n] for n in sorted(etags)])
        for reader in range(3):
            assert cluster[reader].request("GET", "back/large").content == b"".join(bodies)


def test_redis_may_come_and_go(tmp_path: Path, redis: RedisServer) -> None:
    """12.11 While it is away, and when it comes back empty: no older version, and nothing is lost."""
    with writing(tmp_path, redis, 2) as cluster:
        latest = dict[str, bytes]()

        def write(number: int, key: str) -> None:
            content = random.randbytes(500)
            cluster.wait_until(lambda: cluster[number].request("PUT", key, content=content).status_code == 200)
            latest[key] = content
            for reader in range(2):
                assert read(reader, key) == content, f"{key} on node {reader}"

        def read(number: int, key: str) -> bytes:
            """Read an object; a node that cannot say now which version there is says so."""
            answers = list[httpx.Response]()

            def is_told() -> bool:
                answers.append(cluster[number].request("GET", key))
                return answers[-1].status_code != 503

            cluster.wait_until(is_told)
            return answers[-1].content

        for number, prefix in enumerate(PREFIXES * 2):
            write(number % 2, f"{prefix}/before{number}")
        redis.stop()
        for number, prefix in enumerate(PREFIXES * 2):
            write(number % 2, f"{prefix}/before{number}")
            write((number + 1) % 2, f"{prefix}/away{number}")
        redis.start()
        cluster.wait_until(lambda: all(is_ready(cluster, number, 2) for number in range(2)))
        for number, prefix in enumerate(PREFIXES * 2):
            write(number % 2, f"{prefix}/before{number}")
        for key, content in latest.items():
            for reader in range(2):
                assert cluster[reader].request("GET", key).content == content, f"{key} on node {reader}"
