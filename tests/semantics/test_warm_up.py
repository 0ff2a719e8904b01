"""Clause 9.7 of docs/semantics.md: a HEAD with `Range: bytes=0-0` warms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.core.clock import Clock, SystemClock
from gateway.operations import warm_up_queue
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.telemetry.metrics import WARM_UP_OBJECTS
from tests.support.asgi import Answer, call
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import Hold
from tests.support.slots import Slot
from tests.support.waiting import until

PREFIX = Prefix.parse("s3://bucket/")
STRICT = Slot("strict", PREFIX)
TTL = Slot("ttl", PREFIX, "read-write", "ttl", 60.0)
IMMUTABLE = Slot("immutable", PREFIX, "read-write", "immutable")
SMALL_ONLY = Slot("small-only", PREFIX, "read-write", "ttl", 60.0, kept_object_bytes_max=10)
BLOCKS = 5
LARGE = bytes(range(256)) * (BLOCKS * BLOCK_SIZE_BYTES // 256)


@asynccontextmanager
async def playing(
    directory: Path,
    slot: Slot,
    *,
    capacity_bytes: int = 256 * 1024**2,
    writeback: bool = False,
    clock: Clock | None = None,
) -> AsyncIterator[GatewayApp]:
    async with gateway_app(
        directory,
        slots=[slot],
        clock=clock or ManualClock(),
        capacity_bytes=capacity_bytes,
        writeback=writeback,
        allow_unsigned=True,
    ) as gateway:
        gateway.origin.put("bucket", "k", LARGE)
        yield gateway


async def warm(gateway: GatewayApp, target: str = "/bucket/k", **headers: str) -> Answer:
    return await call(gateway.app, "HEAD", target, {"Range": "bytes=0-0", **headers}, sign=False)


async def settle(gateway: GatewayApp) -> None:
    assert gateway.warm_ups is not None
    await gateway.warm_ups.settle()


def gets(gateway: GatewayApp) -> int:
    return len([one for one in gateway.origin.calls if one.method == "GET"])


@pytest.mark.parametrize("slot", [STRICT, TTL, IMMUTABLE])
async def test_9_7_a_head_for_the_first_byte_brings_the_whole_object(tmp_path: Path, slot: Slot) -> None:
    """9.7 It is answered as S3 does, 206 and one byte of so many; then every byte comes from this node, and the same
    HEAD says `hit`."""
    async with playing(tmp_path, slot) as gateway:
        answer = await warm(gateway)
        assert (answer.status, answer.body) == (206, b"")
        assert answer.headers["content-range"] == f"bytes 0-0/{len(LARGE)}"
        assert answer.headers["content-length"] == "1"
        assert answer.headers["x-forebay-cache"] == "miss; reason=first-read"
        await settle(gateway)
        asked = gets(gateway)
        read = await call(gateway.app, "GET", "/bucket/k", sign=False)
        assert (read.body, read.headers["x-forebay-cache"], gets(gateway)) == (LARGE, "hit", asked)
        assert (await warm(gateway)).headers["x-forebay-cache"] == "hit"


async def test_9_7_asked_again_and_again_it_is_fetched_once(tmp_path: Path) -> None:
    """9.7 512 clients ask at once; each block is asked for once, and the version once."""
    async with playing(tmp_path, TTL) as gateway:
        answers = await asyncio.gather(*(warm(gateway) for _ in range(512)))
        assert {answer.status for answer in answers} == {206}
        await settle(gateway)
        assert gets(gateway) == BLOCKS
        assert gateway.origin.count(Operation.HEAD_OBJECT) <= 2


@pytest.mark.parametrize(("slot", "heads"), [(STRICT, 20), (TTL, 0), (IMMUTABLE, 0)])
async def test_9_7_to_warm_what_is_here_costs_the_origin_nothing(tmp_path: Path, slot: Slot, heads: int) -> None:
    """9.7 However often an SDK does it; in a strict slot a HEAD asks which version is current, as any does."""
    async with playing(tmp_path, slot) as gateway:
        await warm(gateway)
        await settle(gateway)
        asked, before = gateway.origin.count(), gateway.origin.count(Operation.HEAD_OBJECT)
        for _ in range(20):
            assert (await warm(gateway)).headers["x-forebay-cache"] == "hit"
        await settle(gateway)
        assert gateway.origin.count() - asked == gateway.origin.count(Operation.HEAD_OBJECT) - before == heads


@pytest.mark.parametrize("change", ["partNumber=1", "versionId=null", "response-content-type=x"])
async def test_9_7_what_is_not_the_whole_current_object_warms_nothing(tmp_path: Path, change: str) -> None:
    """9.7 A part, a version, overrides; nor does another range, or a GET of the first byte warm all."""
    async with playing(tmp_path, TTL) as gateway:
        if change != "partNumber=1":
            await warm(gateway, f"/bucket/k?{change}")
        for asked in ("bytes=0-1", "bytes=0-", "bytes=-1"):
            answer = await call(gateway.app, "HEAD", "/bucket/k", {"Range": asked}, sign=False)
            assert answer.headers["x-forebay-cache"] == "forwarded"
        await settle(gateway)
        assert gets(gateway) == 0


async def test_9_7_what_its_slot_does_not_keep_is_not_fetched(tmp_path: Path) -> None:
    """9.7 The answer says so: `miss; reason=not-kept`. So it does of what is larger than its slot may have."""

    async def scenario(gateway: GatewayApp) -> None:
        assert (await warm(gateway)).headers["x-forebay-cache"] == "miss; reason=not-kept"
        await settle(gateway)
        assert gets(gateway) == 0

    async with playing(tmp_path / "kept", SMALL_ONLY) as gateway:
        await scenario(gateway)
    async with playing(tmp_path / "small", TTL, capacity_bytes=2 * BLOCK_SIZE_BYTES) as gateway:
        await scenario(gateway)


async def test_9_7_an_absence_and_an_empty_object_are_answered_as_the_origin_does(tmp_path: Path) -> None:
    """9.7 Nothing is begun for them."""
    async with playing(tmp_path, TTL) as gateway:
        gateway.origin.put("bucket", "empty", b"")
        assert (await warm(gateway, "/bucket/none")).status == 404
        for _ in range(2):
            answer = await warm(gateway, "/bucket/empty")
            assert answer.headers["x-forebay-cache"] == "forwarded"
        assert gets(gateway) == 0


async def test_9_7_a_full_queue_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """9.7 503 SlowDown, which SDKs repeat; nothing was done for it."""
    monkeypatch.setattr(warm_up_queue, "WAITING_MAX", 2)
    async with playing(tmp_path, TTL) as gateway:
        keys = [f"k{number}" for number in range(40)]
        for key in keys:
            gateway.origin.put("bucket", key, LARGE)
        answers = await asyncio.gather(*(warm(gateway, f"/bucket/{key}") for key in keys))
        assert {answer.status for answer in answers} == {206, 503}
        refused = next(answer for answer in answers if answer.status == 503)
        assert "retry-after" in refused.headers
        await settle(gateway)
        begun = [answer for answer in answers if answer.status == 206]
        assert gets(gateway) == BLOCKS * len(begun)


async def test_9_7_what_changes_meanwhile_is_left(tmp_path: Path) -> None:
    """9.7 A change at the origin ends a warm-up, and what was known of the object is forgotten."""
    async with playing(tmp_path, TTL) as gateway:
        await call(gateway.app, "HEAD", "/bucket/k", sign=False)
        await gateway.catalog.settle()
        gateway.origin.put("bucket", "k", b"another" * 1000)
        before = WARM_UP_OBJECTS.value("ttl", "changed")
        await warm(gateway)
        await settle(gateway)
        assert WARM_UP_OBJECTS.value("ttl", "changed") == before + 1
        assert (await call(gateway.app, "GET", "/bucket/k", sign=False)).body == b"another" * 1000


async def test_9_7_what_is_pending_needs_no_warming(tmp_path: Path) -> None:
    """9.7 Its bytes are on this node: `hit`, and the origin is asked nothing."""
    slot = Slot("back", PREFIX, write="back")
    async with playing(tmp_path, slot, writeback=True) as gateway:
        await call(gateway.app, "PUT", "/bucket/first", body=b"first", sign=False)
        absorbed = await call(gateway.app, "PUT", "/bucket/k", body=b"x" * 1000, sign=False)
        assert absorbed.headers["x-forebay-cache"] == "absorbed"
        asked = gateway.origin.count()
        answer = await warm(gateway)
        assert (answer.status, answer.headers["x-forebay-cache"]) == (206, "hit")
        assert answer.headers["content-range"] == "bytes 0-0/1000"
        assert gateway.origin.count() == asked


async def test_9_7_it_holds_back_while_readers_wait(tmp_path: Path) -> None:
    """9.7, 10.4 While the origin owes a reader a block, no more than four are asked for to warm; then all go on."""
    async with playing(tmp_path, TTL, clock=SystemClock()) as gateway:
        for number in range(4):
            gateway.origin.put("bucket", f"k{number}", LARGE)
        await call(gateway.app, "HEAD", "/bucket/k", sign=False)
        reached, resume = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(lambda one: one.key == "k" and one.method == "GET", Hold(resume, reached))
        reader = asyncio.create_task(call(gateway.app, "GET", "/bucket/k", sign=False))
        await reached.wait()
        held = asyncio.Event()
        gateway.origin.inject(lambda one: one.key != "k" and one.method == "GET", Hold(held), times=None)
        for number in range(4):
            await warm(gateway, f"/bucket/k{number}")
        await until(lambda: gets(gateway) >= 1 + warm_up_queue.PIECES_WHILE_BUSY)
        await asyncio.sleep(0.1)
        assert gets(gateway) == 1 + warm_up_queue.PIECES_WHILE_BUSY
        resume.set()
        assert (await reader).body == LARGE
        held.set()
        await settle(gateway)
        for number in range(4):
            assert (await warm(gateway, f"/bucket/k{number}")).headers["x-forebay-cache"] == "hit"


async def test_9_7_an_end_of_the_worker_ends_it(tmp_path: Path) -> None:
    """9.7 What waits and what runs is left, and nothing is in the way of the end."""
    async with playing(tmp_path, TTL) as gateway:
        keys = [f"k{number}" for number in range(40)]
        for key in keys:
            gateway.origin.put("bucket", key, LARGE)
            await warm(gateway, f"/bucket/{key}")
        assert gateway.warm_ups is not None
        await gateway.warm_ups.close()
        await gateway.blocks.settle()
        asked = gets(gateway)
        assert asked < BLOCKS * len(keys)
        assert (await warm(gateway)).status == 503
        assert gets(gateway) == asked
