"""Whole gateways whose objects other nodes look after: what may be made of those nodes' answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.metadata.entries import SETTLED_SECONDS
from gateway.origin import peer_protocol as peer
from gateway.policy.slots import Prefix, Slots
from gateway.s3.headers import format_http_date
from gateway.s3.origin_habits import NO_HABITS
from tests.cluster.nodes import Cluster
from tests.support.asgi import Answer, call
from tests.support.blocks import BLOCK, BUCKET, content_of
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.response import MemoryResponse
from tests.support.peers import checksums
from tests.support.slots import Slot, slot_with
from tests.support.snapshots import freeze

PREFIX = Prefix.parse(f"s3://{BUCKET}/")
TTL = Slot("data", PREFIX, "read-only", "ttl")
FROZEN = Slot("frozen", PREFIX, "read-only", "snapshot", snapshot="v1")


@asynccontextmanager
async def asking(directory: Path, slot: Slot) -> AsyncIterator[tuple[GatewayApp, Cluster]]:
    cluster = Cluster(slots=Slots([slot]))
    more: dict[str, Any] = {"slots": [slot], "clock": cluster.clock, "block_size_bytes": BLOCK}
    more |= {"origin": cluster.bucket, "through": cluster.origin, "roles": cluster.roles, "allow_unsigned": True}
    async with gateway_app(directory, **more) as gateway:
        yield gateway, cluster


async def ask(gateway: GatewayApp, method: str, target: str, **headers: str) -> Answer:
    answer = await call(gateway.app, method, f"/{BUCKET}{target}", headers, sign=False)
    await gateway.catalog.settle()
    await gateway.blocks.settle()
    return answer


@pytest.mark.parametrize(("method", "is_there"), [("HEAD", True), ("GET", True), ("HEAD", False)])
async def test_12_3_what_a_peer_tells_is_as_old_here_as_there(tmp_path: Path, method: str, *, is_there: bool) -> None:
    async with asking(tmp_path, slot_with(TTL, negative_ttl_seconds=60.0)) as (gateway, cluster):
        cluster.store("k" if is_there else "another", 1000)
        for passes, age_seconds, asked in ((0, 40.0, 1), (19, 59.0, 1), (2, 1.0, 2)):
            cluster.clock.time += passes
            cluster.nodes["one"].age_seconds = age_seconds
            assert (await ask(gateway, method, "/k")).status == (200 if is_there else 404)
            assert (cluster.asked(), cluster.from_bucket()) == ({"one": asked}, 0)


async def test_12_3_a_strict_slot_asks_the_bucket_though_nobody_writes_there(tmp_path: Path) -> None:
    async with asking(tmp_path, slot_with(TTL, consistency="strict")) as (gateway, cluster):
        cluster.store("k", 1000)
        for method in ("GET", "HEAD", "GET"):
            assert (await ask(gateway, method, "/k")).status == 200
        assert (cluster.asked(), cluster.from_bucket()) == ({}, 3)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("size_bytes", [1000, 70_000, BLOCK, 3 * BLOCK])
async def test_12_2_a_first_answer_that_came_damaged_reaches_nobody(
    tmp_path: Path, size_bytes: int, *, at_once: bool
) -> None:
    """The answer that tells the version brings its first bytes."""

    def harm(body: bytes) -> bytes:
        return body[:-1] + bytes([body[-1] ^ 1])

    async with asking(tmp_path, TTL) as (gateway, cluster):
        version = cluster.store("k", size_bytes)
        for node in (cluster.nodes["one"], cluster.nodes["two"]):
            node.harm, node.at_once = harm, at_once
        for _ in range(2):
            answer = await ask(gateway, "GET", "/k")
            assert (answer.status, answer.body) == (200, content_of(cluster.bucket, version))
        assert cluster.asked()
        await cluster.settle()


@pytest.mark.parametrize(
    "odd",
    [
        {"status": 206, "etag": 'W/"weak"', "content-range": f"bytes 0-{BLOCK - 1}/{2 * BLOCK}"},
        {"status": 200},
        {"status": 412},
        {"status": 416},
        {"status": 501},
    ],
)
async def test_9_8_no_odd_answer_of_a_peer_is_a_habit_of_the_bucket(tmp_path: Path, odd: dict[str, Any]) -> None:
    """9.8 A weak ETag, the whole object for a range, a refusal: only the bucket tells what it does."""
    async with asking(tmp_path, TTL) as (gateway, cluster):
        version = cluster.store("k", 2 * BLOCK)
        content = content_of(cluster.bucket, version)
        body = {200: content, 206: content[:BLOCK]}.get(odd["status"], b"")
        told = {"etag": version.etag, "content-length": str(len(body)), peer.AGE: "0", peer.CRC32C: checksums(body)}
        told |= {name: value for name, value in odd.items() if name != "status"}
        cluster.nodes["one"].replies = [MemoryResponse(odd["status"], told, BytesContent(body))]
        for _ in range(3):
            answer = await ask(gateway, "GET", "/k")
            assert (answer.status, answer.body) == (200, content)
        assert gateway.catalog.habits(BUCKET) == NO_HABITS


@pytest.mark.parametrize(("after_seconds", "settled"), [(None, False), (1.0, False), (SETTLED_SECONDS, True)])
async def test_3_11_only_the_buckets_date_settles_a_version(
    tmp_path: Path, after_seconds: float | None, *, settled: bool
) -> None:
    """3.11 A peer may have looked right behind the version's date; the Date of its own answer is a later one."""
    async with asking(tmp_path, TTL) as (gateway, cluster):
        version = cluster.store("k", BLOCK)
        objects = cluster.at_nodes.buckets[BUCKET].objects
        modified = objects["k"].modified - 3600.0
        objects["k"] = replace(objects["k"], modified=modified)
        if after_seconds is not None:
            cluster.nodes["one"].date = format_http_date(modified + after_seconds)
        assert (await ask(gateway, "HEAD", "/k")).status == 200
        assert cluster.asked() == {"one": 1}
        entry = gateway.catalog._lookup(version.key)
        assert entry is not None
        assert entry.settled is settled


async def test_3_10_what_is_told_of_a_bucket_each_node_asks_itself(tmp_path: Path) -> None:
    """3.10 Small answers about buckets are each node's own."""
    async with asking(tmp_path, TTL) as (gateway, cluster):
        cluster.store("k", BLOCK)
        for target in ("", "?location", "?versioning", "?list-type=2"):
            method = "HEAD" if not target else "GET"
            for _ in range(2):
                assert (await ask(gateway, method, target)).status == 200
        assert cluster.asked() == {}
        assert not [name for call in cluster.bucket.calls for name in call.headers if name == peer.COPY]


@pytest.mark.parametrize(("whole", "at_bucket"), [(False, 0), (True, 1)])
async def test_12_1_the_first_bytes_of_a_frozen_version_come_from_their_owner(
    tmp_path: Path, *, whole: bool, at_bucket: int
) -> None:
    """12.1 With what is to be known of the object, unless that is its checksums: these come with the whole object."""
    async with asking(tmp_path, FROZEN) as (gateway, cluster):
        version = cluster.store("k", 1000)
        await freeze(gateway, "v1", f"s3://{BUCKET}/")
        headers = {"x-amz-checksum-mode": "ENABLED"} if whole else {}
        asked = cluster.from_bucket()
        answer = await ask(gateway, "GET", "/k", **headers)
        assert (answer.status, answer.body) == (200, content_of(cluster.bucket, version))
        assert cluster.from_bucket() - asked == at_bucket
        if not whole:
            said = cluster.nodes["one"].headers()
            assert (said["if-match"], said[peer.MAX_AGE]) == (version.etag, "0.000")


async def test_3_14_a_412_of_a_peer_leaves_a_frozen_version_its_blocks(tmp_path: Path) -> None:
    """3.14 The node serves the blocks that it has of a lost version, whoever has said that the version is lost."""
    async with asking(tmp_path, FROZEN) as (gateway, cluster):
        old = cluster.store("k", 2 * BLOCK)
        content = cluster.bucket.data(*old.key)
        await freeze(gateway, "v1", f"s3://{BUCKET}/")
        first = f"bytes=0-{BLOCK - 1}"
        assert (await ask(gateway, "GET", "/k", range=first)).body == content[:BLOCK]
        cluster.store("k", 3 * BLOCK)
        asked = sum(cluster.asked().values())
        assert (await ask(gateway, "GET", "/k", range=f"bytes={BLOCK}-")).status == 412
        assert sum(cluster.asked().values()) > asked
        again = await ask(gateway, "GET", "/k", range=first)
        assert (again.status, again.body, again.headers["x-forebay-cache"]) == (206, content[:BLOCK], "hit")
