"""What a peer sends reaches no reader, and no disk, unless it is what the peer promised: the bucket gives the rest.

`FOREBAY_HARMED_ANSWERS` is the number of harmed answers, `FOREBAY_HARMED_SEED` decides about them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from gateway.blocks.cache import BlockCache
from gateway.cluster.peers import LEFT_OUT_SECONDS
from gateway.core.model import ByteRange, ObjectVersion
from gateway.policy.slots import Prefix, Slot, Slots
from gateway.telemetry import metrics
from tests.cluster.nodes import Cluster
from tests.support.blocks import BLOCK, BUCKET, KIB, MIB, content_of, open_cache, read, take, whole

CHUNK = 64 * KIB
ANSWERS = int(os.environ.get("FOREBAY_HARMED_ANSWERS", "300"))
SEED = int(os.environ.get("FOREBAY_HARMED_SEED", "7"))

Harming = Callable[[bytearray, random.Random], bytearray]


def flip(body: bytearray, rng: random.Random) -> bytearray:
    body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    return body


def cut(body: bytearray, rng: random.Random) -> bytearray:
    return body[: rng.choice([0, rng.randrange(len(body)), len(body) // CHUNK * CHUNK - CHUNK])]


def reorder(body: bytearray, rng: random.Random) -> bytearray:
    chunks = [body[at : at + CHUNK] for at in range(0, len(body), CHUNK)]
    rng.shuffle(chunks)
    return bytearray().join(chunks)


def swap(body: bytearray, rng: random.Random) -> bytearray:
    first, second = rng.randrange(len(body)), rng.randrange(len(body))
    body[first], body[second] = body[second], body[first]
    return body


def zeros(body: bytearray, rng: random.Random) -> bytearray:
    first = rng.randrange(len(body))
    count = min(rng.choice([1, 512, 4096, CHUNK]), len(body) - first)
    body[first : first + count] = bytes(count)
    return body


def of_another(body: bytearray, rng: random.Random) -> bytearray:
    return bytearray(rng.randbytes(len(body)))


HARMS: tuple[Harming, ...] = (flip, cut, reorder, swap, zeros, of_another)


@dataclass
class Harmed:
    rng: random.Random
    count: int = 0

    def __call__(self, body: bytes) -> bytes:
        self.count += 1
        return bytes(self.rng.choice(HARMS)(bytearray(body), self.rng))


@asynccontextmanager
async def node(directory: Path, cluster: Cluster, **settings: Any) -> AsyncIterator[BlockCache]:
    async with open_cache(
        directory, cluster.origin, clock=cluster.clock, roles=cluster.roles, slots=cluster.slots, **settings
    ) as cache:
        yield cache


def copies(kept: Literal["idle", "none", "all"]) -> Slots:
    return Slots([Slot(name="data", prefix=Prefix(BUCKET), copies=kept)])


KINDS = {
    "large": {"small_object_bytes_max": 0},
    "small": {"small_object_bytes_max": BLOCK},
    "large blocks in parts": {"small_object_bytes_max": 0, "block_size_bytes": 2 * MIB},
}


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["all", "idle", "none"])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_harmed_byte_is_given_or_kept(kind: str, kept: Literal["idle", "none", "all"], tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} {kind} {kept}")
    harmed = Harmed(rng)
    cluster = Cluster(slots=copies(kept), fallback_requests=64)
    cluster.origin.block_size_of = lambda _: int(KINDS[kind].get("block_size_bytes", BLOCK))
    before, number = metrics.CLUSTER_DAMAGED.value(), 0
    for name in ("one", "two"):
        cluster.nodes[name].harm = harmed
    while harmed.count < ANSWERS / (len(KINDS) * 3):
        number += 1
        async with node(tmp_path / str(number % 2), cluster, **KINDS[kind]) as cache:
            for key in range(4):
                size = rng.choice([rng.randrange(1, 3 * CHUNK), rng.randrange(1, 4 * BLOCK), 2 * BLOCK])
                version = cluster.store(f"{number}/{key}", size, seed=number * 10 + key)
                first = rng.choice([0, rng.randrange(size)])
                asked = ByteRange(first, rng.choice([size - 1, rng.randrange(first, size)]))
                readers = [read_of(cache, cluster, version, one) for one in (asked, asked, whole(version))]
                assert await asyncio.gather(*readers) == [True] * 3
            await cache.settle()
            for name in ("one", "two"):
                cluster.nodes[name].unreachable = True
            calls = cluster.from_bucket()
            assert await read_of(cache, cluster, version, whole(version))
            if kept != "idle":  # such a copy may have made room for the next one
                assert (cluster.from_bucket() > calls) is (kept == "none")
            for name in ("one", "two"):
                cluster.nodes[name].unreachable = False
    await cluster.settle()
    assert metrics.CLUSTER_DAMAGED.value() > before


async def read_of(cache: BlockCache, cluster: Cluster, version: ObjectVersion, asked: ByteRange) -> bool:
    reader = await cache.open_range(version, asked, slot="data")
    return await take(reader) == content_of(cluster.bucket, version, asked)


async def test_a_node_whose_bodies_do_not_come_is_left_out_for_a_while(tmp_path: Path) -> None:
    cluster = Cluster(slots=copies("none"))
    version, one = cluster.store("k", BLOCK), cluster.member("one")
    cluster.nodes["one"].harm = lambda body: body[: CHUNK + 10]
    async with node(tmp_path, cluster) as cache:
        assert await read_of(cache, cluster, version, whole(version))
    assert cluster.peers.is_away(one)
    cluster.clock.time += LEFT_OUT_SECONDS + 1
    assert not cluster.peers.is_away(one)


async def test_sound_answers_leave_the_bucket_alone(tmp_path: Path) -> None:
    cluster = Cluster()
    version = cluster.store("k", 5 * BLOCK + 1000)
    async with node(tmp_path, cluster) as cache:
        reader = await cache.open_range(version, whole(version))
        assert reader.outcome == "peer"
        await reader.aclose()
        assert await read(cache, version) == content_of(cluster.bucket, version)
        await cache.settle()
        assert cluster.from_bucket() == 0
        reader = await cache.open_range(version, whole(version))
        assert reader.outcome == "hit"
        await reader.aclose()
