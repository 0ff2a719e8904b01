"""Whole gateways of one cluster, with a real Redis: what one node has answered is seen on all that are asked later."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.s3.headers import multipart_etag
from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from gateway.serve.claim import closed_mark
from tests.cluster.with_redis import PREFIXES, believes, is_ready, state, writing
from tests.support.memory_origin.faults import Answer, on
from tests.support.nodes import BUCKET, Node, Nodes
from tests.support.redis_server import RedisServer

PART_BYTES = 5 * 1024**2
PARTS = 100


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


@pytest.mark.slow
def test_a_write_on_one_node_is_seen_on_all(tmp_path: Path, redis: RedisServer) -> None:
    """12.4 GET, HEAD and LIST, of slots that remember, and of what is pending."""
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    with writing(tmp_path, redis.url, 3) as cluster:
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


@pytest.mark.slow
def test_an_upload_goes_on_at_any_node(tmp_path: Path, redis: RedisServer) -> None:
    """12.10 Its requests reach the node that has it, in whatever order they come, and through whichever node."""
    with writing(tmp_path, redis.url, 3) as cluster:
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


@pytest.mark.slow
def test_another_node_says_why_an_upload_goes_through(tmp_path: Path, redis: RedisServer) -> None:
    """9.1 In the answer and in an error, as the node that has the upload would say it to its own client."""
    with writing(tmp_path, redis.url, 2) as cluster:
        for at, status in ((0, 200), (1, 412), (1, 200)):
            key = "back/there" if status == 412 else f"back/new-{at}"
            if status == 412:
                assert cluster[0].request("PUT", key, content=b"x").status_code == 200
                assert cluster[0].gateway.command("flush", "--wait").returncode == 0  # the node knows what is pending
            begun = cluster[0].request("POST", f"{key}?uploads")
            assert begun.headers["x-forebay-cache"] == "absorbed"
            upload_id = text_of(begun.content, "UploadId") or ""
            stored = cluster[at].request("PUT", f"{key}?partNumber=1&uploadId={upload_id}", content=b"part")
            assert "x-forebay-not-absorbed" not in stored.headers
            part = f"<Part><PartNumber>1</PartNumber><ETag>{stored.headers['etag']}</ETag></Part>"
            document = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
            target, only_new = f"{key}?uploadId={upload_id}", {"if-none-match": "*"}
            done = cluster[at].request("POST", target, content=document, headers=only_new)
            assert (done.status_code, done.headers.get("x-forebay-not-absorbed")) == (status, "condition"), done.text


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("write", ["back", "through"])
def test_an_upload_of_100_parts_goes_over_all_nodes(tmp_path: Path, redis: RedisServer, write: str) -> None:
    """12.10 Whoever takes which part, and in whatever order: the object is right, and no upload stays open."""
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    large = {"name": "large", "prefix": f"s3://{BUCKET}/large/", "mode": "read-write", "consistency": "ttl"}
    buffer = {"write": "back", "buffer": "2GiB"} if write == "back" else {}
    with writing(tmp_path, redis.url, 3, {**large, **buffer}, capacity="6GiB") as cluster:
        cluster.wait_until(lambda: wrote(cluster[0].request("PUT", "large/first", content=b"x")) == write)
        begun = cluster[0].request("POST", "large/one?uploads")
        upload_id = text_of(begun.content, "UploadId") or ""
        one = dice.randbytes(PART_BYTES)
        bodies = {number: number.to_bytes(4, "big") + one[4:] for number in range(1, PARTS)} | {PARTS: b"the end"}

        def send(number: int) -> tuple[int, str]:
            target = f"large/one?partNumber={number}&uploadId={upload_id}"
            answer = cluster[number % 3].request("PUT", target, content=bodies[number])
            assert answer.status_code == 200, f"seed {seed}: {answer.text}"
            return number, answer.headers["etag"]

        with ThreadPoolExecutor(8) as pool:
            etags = dict(pool.map(send, dice.sample(range(1, PARTS + 1), PARTS)))
        parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etags[n]}</ETag></Part>" for n in sorted(etags))
        document = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>"
        done = cluster[1].request("POST", f"large/one?uploadId={upload_id}", content=document.encode())
        assert text_of(done.content, "ETag") == multipart_etag([etags[n] for n in sorted(etags)]), done.text
        whole = b"".join(bodies[number] for number in sorted(bodies))
        for node in cluster.nodes:
            assert node.request("GET", "large/one").content == whole
            open_uploads = node.client.get(f"{node.gateway.s3_url}/{BUCKET}?uploads")
            assert "<Upload>" not in open_uploads.text
        bucket = cluster.origin.model.buckets[BUCKET]
        cluster.wait_until(lambda: "large/one" in bucket.objects)
        assert cluster.content("large/one") == whole
        cluster.wait_until(lambda: not bucket.uploads)


def wrote(answer: httpx.Response) -> str:
    return "back" if answer.headers["x-forebay-cache"] == "absorbed" else "through"


@pytest.mark.slow
def test_redis_may_come_and_go(tmp_path: Path, redis: RedisServer) -> None:
    """12.11 While it is away, and when it comes back empty: no older version, and nothing is lost."""
    with writing(tmp_path, redis.url, 2) as cluster:
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


@contextmanager
def without_its_directory(node: Node) -> Iterator[None]:
    """Start a node anew, in whose directory nobody can make a file; in the end, start it as it was."""
    directory = node.gateway.directory
    catalog = directory / "catalog"
    node.gateway.terminate()
    catalog.rename(directory.parent / "kept")
    catalog.symlink_to("/proc")
    node.gateway.start()
    try:
        yield
    finally:
        node.gateway.terminate()
        catalog.unlink()
        (directory.parent / "kept").rename(catalog)
        closed_mark(directory).unlink(missing_ok=True)
    node.gateway.start()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_without_its_directory_sees_other_nodes_writes_and_tells_its_own(
    tmp_path: Path, redis: RedisServer
) -> None:
    """12.4, 12.14 It owns and acknowledges nothing, and is in the cluster all the same. What it has alone is missed."""
    with writing(tmp_path, redis.url, 2) as cluster:
        whole, closed = cluster.nodes
        assert closed.request("PUT", "back/left", content=b"first").status_code == 200
        cluster.wait_until(lambda: "back/left" in cluster.origin.model.buckets[BUCKET].objects)
        held = cluster.origin.model.inject(on(Operation.PUT_OBJECT, key="back/left"), Answer(503), times=None)
        assert closed.request("PUT", "back/left", content=b"second").headers["x-forebay-cache"] == "absorbed"
        with without_its_directory(closed):
            cluster.wait_until(lambda: believes(whole) and believes(closed))
            cluster.wait_for_states(0, ["up", "closed"])
            for prefix in PREFIXES:
                for number, (writer, reader) in enumerate([(whole, closed), (closed, whole), (whole, closed)]):
                    content = f"{prefix} {number}".encode()
                    assert writer.request("PUT", f"{prefix}/k", content=content).status_code == 200
                    for node in (reader, writer, reader):
                        assert node.request("GET", f"{prefix}/k").content == content, f"{prefix}, write {number}"
            cluster.wait_until(
                lambda: (
                    {one["name"]: one["state"] for one in state(closed)["members"]}
                    == {"node-0": "up", "node-1": "closed"}
                )
            )
            for node in cluster.nodes:
                assert node.request("GET", "back/left").status_code == 503
        held.times = 0
        cluster.wait_for_states(0, ["up", "up"])
        cluster.wait_until(lambda: whole.request("GET", "back/left").content == b"second")
