"""Clause 5.4 of docs/semantics.md: what a slot holds within its capacity, no other slot's reads take away."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import pytest

from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.policy.slots import Prefix
from tests.support.asgi import call
from tests.support.blocks import block_files
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.slots import Slot

CAPACITY_BYTES = {"a": 512 * 1024, "b": 2 * 1024**2}
ALL_BYTES = 3 * 1024**2
"""So B holds more than half of all, which nobody could without a guarantee."""

KEPT_BYTES = CAPACITY_BYTES["b"] * 4 // 5
"""What B holds: its blocks take a little more on disk than the bytes in them."""

SCANNED_BYTES = 10 * CAPACITY_BYTES["a"]
SIZES = {"small": 5_000, "of one block": BLOCK_SIZE_BYTES, "of several blocks": 2 * BLOCK_SIZE_BYTES + 100}

Scan = Callable[[GatewayApp, list[str]], Awaitable[None]]


async def in_order(gateway: GatewayApp, keys: list[str]) -> None:
    for key in keys:
        await read(gateway, key)


async def side_by_side(gateway: GatewayApp, keys: list[str]) -> None:
    """Eight readers."""
    waiting = iter(keys)

    async def one() -> None:
        for key in waiting:
            await read(gateway, key)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(one())


async def at_random_twice(gateway: GatewayApp, keys: list[str]) -> None:
    """In an order in which much is read again that has just been evicted."""
    shuffled = [*keys, *keys]
    random.Random(1).shuffle(shuffled)
    await side_by_side(gateway, shuffled)


async def read(gateway: GatewayApp, key: str) -> str:
    """What the answer says of the cache; every byte is compared."""
    answer = await call(gateway.app, "GET", f"/bucket/{key}", {}, sign=False)
    assert (answer.status, answer.body) == (200, content(key)), key
    return answer.headers["x-forebay-cache"]


def content(key: str) -> bytes:
    """By its name: slot, size, number."""
    return random.Random(key).randbytes(int(key.split("/")[1]))


def keys_of(slot: str, size_bytes: int, all_bytes: int) -> list[str]:
    return [f"{slot}/{size_bytes}/{number}" for number in range(all_bytes // size_bytes)]


QUICK = {
    ("of one block", at_random_twice, "lru"),
    ("of several blocks", side_by_side, "lru"),
}


@pytest.mark.parametrize(
    ("scanned", "scan", "eviction"),
    [
        pytest.param(
            SIZES[size],
            scan,
            eviction,
            marks=() if (size, scan, eviction) in QUICK else pytest.mark.slow,
            id=f"{size}, {scan.__name__}, {eviction}",
        )
        for (size, scan), eviction in zip(
            itertools.product(SIZES, (in_order, side_by_side, at_random_twice)),
            itertools.cycle(("epoch", "lru")),  # either with each size and each scan
            strict=False,
        )
    ],
)
async def test_5_4_a_scan_of_ten_times_a_slots_capacity_takes_no_block_of_another(
    tmp_path: Path, scanned: int, scan: Scan, eviction: Literal["epoch", "lru"]
) -> None:
    """5.4 The other holds small and large objects within its capacity. All of them are there afterwards, by the index,
    and reading them asks nothing of the origin. The one that scans has evicted its own: no more lies on disk than may.
    """
    async with gateway_app(
        tmp_path,
        slots=[
            Slot(
                name,
                Prefix.parse(f"s3://bucket/{name}/"),
                "read-write",
                "immutable",
                capacity_bytes=capacity_bytes,
                eviction=eviction,
            )
            for name, capacity_bytes in CAPACITY_BYTES.items()
        ],
        allow_unsigned=True,
        capacity_bytes=ALL_BYTES,
    ) as gateway:
        kept = [key for size in SIZES.values() for key in keys_of("b", size, KEPT_BYTES // len(SIZES))]
        scanned_keys = keys_of("a", scanned, SCANNED_BYTES)
        versions = {key: put(gateway, key) for key in [*kept, *scanned_keys]}
        await in_order(gateway, kept)
        await gateway.blocks.settle()
        before = gateway.blocks.usage().slots["b"]
        assert before.blocks > len(kept)

        await scan(gateway, scanned_keys)
        await gateway.blocks.settle()
        assert gateway.blocks.usage().slots["b"] == before
        assert all(holds(gateway, versions[key], "b") for key in kept)
        assert not all(holds(gateway, versions[key], "a") for key in scanned_keys)
        assert sum(path.stat().st_size for path in block_files(tmp_path)) <= ALL_BYTES

        asked = gateway.origin.count()
        assert {await read(gateway, key) for key in kept} == {"hit"}
        assert gateway.origin.count() == asked


def put(gateway: GatewayApp, key: str) -> ObjectVersion:
    data = content(key)
    return ObjectVersion(ObjectKey("bucket", key), gateway.origin.put("bucket", key, data), len(data))


def holds(gateway: GatewayApp, version: ObjectVersion, slot: str) -> bool:
    return gateway.blocks.holds(version, ByteRange(0, version.size_bytes - 1), slot=slot)
