"""Clause 9.1 of docs/semantics.md: a miss says why."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import pytest

from gateway.core.model import MissReason, ObjectKey
from gateway.policy.slots import Prefix
from gateway.telemetry.metrics import MISSES
from tests.support.asgi import Answer, call
from tests.support.blocks import block_files
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot, slot_with

PREFIX = Prefix.parse("s3://bucket/")
STRICT = Slot("strict", PREFIX)
TTL = Slot("ttl", PREFIX, "read-write", "ttl", 60.0)
IMMUTABLE = Slot("immutable", PREFIX, "read-write", "immutable")
SMALL_ONLY = Slot("small-only", PREFIX, "read-write", "ttl", 60.0, kept_object_bytes_max=10)
SMALL, LARGE = b"small" * 20, b"l" * (2 * BLOCK_SIZE_BYTES)


@asynccontextmanager
async def playing(
    directory: Path, slot: Slot, *, capacity_bytes: int = 256 * 1024**2
) -> AsyncIterator[tuple[GatewayApp, ManualClock]]:
    clock = ManualClock()
    async with gateway_app(
        directory, slots=[slot], clock=clock, allow_unsigned=True, capacity_bytes=capacity_bytes
    ) as gateway:
        for key, body in (("k", SMALL), ("large", LARGE)):
            gateway.origin.put("bucket", key, body)
        yield gateway, clock


async def ask(gateway: GatewayApp, target: str = "/bucket/k", method: str = "GET", **headers: str) -> str:
    """What the answer says of the cache; everything that is learned from it is written."""
    answer: Answer = await call(gateway.app, method, target, headers, sign=False)
    assert answer.status in (200, 206), answer.body
    await gateway.catalog.settle()
    await gateway.blocks.settle()
    return answer.headers["x-forebay-cache"]


def missed(reason: str) -> str:
    return f"miss; reason={reason}"


@pytest.mark.parametrize("key", ["k", "large"])
@pytest.mark.parametrize("slot", [STRICT, TTL, IMMUTABLE])
async def test_9_1_a_first_read_says_so(tmp_path: Path, slot: Slot, key: str) -> None:
    """9.1 And it is counted so; a hit has no reason."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        before = MISSES.value("GetObject", slot.name, "first-read")
        assert await ask(gateway, f"/bucket/{key}") == missed("first-read")
        assert await ask(gateway, f"/bucket/{key}") == "hit"
        assert MISSES.value("GetObject", slot.name, "first-read") == before + 1


@pytest.mark.parametrize("slot", [STRICT, TTL])
async def test_9_1_what_others_have_changed_is_told_from_a_first_read(tmp_path: Path, slot: Slot) -> None:
    """9.1 By what was known of the object, or by the blocks that are here."""
    async with playing(tmp_path, slot) as (gateway, clock):
        for key in ("k", "large"):
            await ask(gateway, f"/bucket/{key}")
            gateway.origin.put("bucket", key, b"another" * 30)
        await clock.advance(61)
        for key in ("k", "large"):
            assert await ask(gateway, f"/bucket/{key}") == missed("changed")
            assert await ask(gateway, f"/bucket/{key}") == "hit"


async def test_9_1_a_change_that_a_head_has_told_of_is_one_to_the_next_get(tmp_path: Path) -> None:
    """9.1 The blocks that are here are of another version, though the catalog knows this one."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        await ask(gateway)
        gateway.origin.put("bucket", "k", b"another" * 30)
        await clock.advance(61)
        assert await ask(gateway, method="HEAD") == missed("changed")
        assert await ask(gateway) == missed("changed")


@pytest.mark.parametrize("eviction", ["epoch", "lru"])
async def test_9_1_what_made_room_is_told(tmp_path: Path, eviction: str) -> None:
    """9.1 As long as it is remembered."""
    slot = Slot("tight", PREFIX, "read-write", "immutable", eviction=eviction)
    async with playing(tmp_path, slot, capacity_bytes=12 * BLOCK_SIZE_BYTES) as (gateway, _clock):
        for number in range(12):
            gateway.origin.put("bucket", f"{number}", LARGE)
            await ask(gateway, f"/bucket/{number}")
        labels = [await ask(gateway, f"/bucket/{number}") for number in range(12)]
        assert missed("evicted") in labels
        assert {label.partition("; ")[2] for label in labels} <= {"", "reason=evicted"}


async def test_9_1_what_was_found_damaged_counts_as_evicted(tmp_path: Path) -> None:
    """9.1 It was here, and is not any more."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway, "/bucket/large")
        for file in block_files(tmp_path):
            file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
        for lease in list(gateway.blocks._dependencies.open_files._leases.values()):
            lease.file.distrust()
        assert (await ask(gateway, "/bucket/large")).endswith("reason=evicted")


async def test_9_1_what_is_not_kept_is_told(tmp_path: Path) -> None:
    """9.1 Each time."""
    async with playing(tmp_path, SMALL_ONLY) as (gateway, _clock):
        for _ in range(2):
            assert await ask(gateway, "/bucket/large") == missed("not-kept")
            assert await ask(gateway, "/bucket/k") == missed("not-kept")


async def test_9_1_heads_and_listings_say_so_too(tmp_path: Path) -> None:
    """9.1 `expired`: what is known is older than the slot allows; it may still be true."""
    listing = "/bucket?list-type=2"
    async with playing(tmp_path, TTL) as (gateway, clock):
        assert await ask(gateway, method="HEAD") == missed("first-read")
        assert await ask(gateway, method="HEAD") == "hit"
        assert await ask(gateway, listing) == missed("first-read")
        assert await ask(gateway, listing) == "hit"
        await clock.advance(61)
        assert await ask(gateway, method="HEAD") == missed("expired")
        assert await ask(gateway, listing) == missed("expired")
        gateway.origin.put("bucket", "k", b"another")
        await clock.advance(61)
        assert await ask(gateway, method="HEAD") == missed("changed")


async def test_9_1_questions_about_buckets_say_so_too(tmp_path: Path) -> None:
    """9.1 The first time, and when what is remembered is too old."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        target = "/bucket?location"
        assert await ask(gateway, target) == missed("first-read")
        assert await ask(gateway, target) == "hit"
        await clock.advance(61)
        assert await ask(gateway, target) == missed("expired")


@pytest.mark.slow
@pytest.mark.parametrize("slot", [STRICT, TTL, IMMUTABLE, SMALL_ONLY])
async def test_9_1_every_miss_has_a_reason_and_nothing_else_has_one(tmp_path: Path, slot: Slot) -> None:
    """9.1 Whatever is asked, written by others, evicted and waited for."""
    rng = random.Random(5)
    reasons = {f"reason={reason}" for reason in get_args(MissReason)}
    async with playing(tmp_path, slot) as (gateway, clock):
        keys = [f"d/{number}" for number in range(6)]
        for key in keys:
            gateway.origin.put("bucket", key, rng.randbytes(rng.choice([5, 900, 3 * BLOCK_SIZE_BYTES])))
        for _ in range(300):
            key = rng.choice(keys)
            if rng.random() < 0.1:
                gateway.origin.put("bucket", key, rng.randbytes(rng.choice([5, 900, 3 * BLOCK_SIZE_BYTES])))
            if rng.random() < 0.1:
                await gateway.blocks.invalidate(ObjectKey("bucket", key))
            if rng.random() < 0.1:
                await clock.advance(40)
            target = rng.choice([f"/bucket/{key}"] * 4 + ["/bucket?list-type=2", "/bucket?list-type=2&prefix=d/"])
            headers: Mapping[str, str] = {"range": f"bytes={rng.choice([0, 3])}-"} if rng.random() < 0.4 else {}
            method = "HEAD" if "?" not in target and rng.random() < 0.3 else "GET"
            label, _, reason = (await ask(gateway, target, method, **headers)).partition("; ")
            assert (label in ("miss", "partial")) == bool(reason), (label, reason, target)
            assert not reason or reason in reasons


async def test_9_1_an_object_that_was_written_through_the_gateway_has_changed(tmp_path: Path) -> None:
    """9.1 Whoever has written it: what was known is void by then, and tells the change all the same."""
    async with playing(tmp_path, TTL) as (gateway, _clock):
        await ask(gateway)
        assert (await call(gateway.app, "PUT", "/bucket/k", body=b"another", sign=False)).status == 200
        assert await ask(gateway) == missed("changed")
        assert await ask(gateway) == "hit"


@pytest.mark.parametrize("slot", [STRICT, TTL])
async def test_9_1_a_small_object_that_was_not_kept_says_so_when_it_is_read_again(tmp_path: Path, slot: Slot) -> None:
    """9.1 Its bytes have left before the disk is asked for room: the first answer cannot know."""
    async with playing(tmp_path, slot_with(slot, capacity_limit_bytes=0)) as (gateway, _clock):
        assert await ask(gateway) == missed("first-read")
        for _ in range(2):
            assert await ask(gateway) == missed("not-kept")
