"""Small objects whose first answer has come whole: given from memory, kept like others, and nothing asked for twice."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.blocks import small_block_fetch
from gateway.core.clock import SystemClock
from gateway.core.model import ByteRange, ObjectKey
from gateway.origin.traffic_meter import MeteredOrigin, OriginMeter
from gateway.policy.bandwidth import Bandwidth, Ceiling
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from tests.support.asgi import call
from tests.support.cache_label import cache_label
from tests.support.counting import by_label
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, on
from tests.support.slots import Slot
from tests.support.whole_answers import WholeAnswers

GET = Operation.GET_OBJECT
CONTENT = bytes(range(256)) * 250
IMMUTABLE = (Slot("i", Prefix.parse("s3://bucket/"), consistency="immutable"),)


@asynccontextmanager
async def gateway(directory: Path, **options: object) -> AsyncIterator[GatewayApp]:
    origin = MemoryOrigin(SystemClock())
    origin.create_bucket("bucket")
    origin.put("bucket", "k", CONTENT)
    async with gateway_app(directory, origin=origin, through=WholeAnswers(origin), **options) as one:  # type: ignore[arg-type]
        yield one


async def settled(one: GatewayApp) -> None:
    await one.blocks.settle()
    await one.catalog.settle()


def test_it_is_kept_though_nobody_filled_it_in_a_task(tmp_path: Path) -> None:
    """The answer needs no task of a fill; the block is on the disk a moment later, and read from there."""

    async def scenario() -> None:
        async with gateway(tmp_path, slots=IMMUTABLE) as one:
            tasks = {task.get_name() for task in asyncio.all_tasks()}
            answer = await call(one.app, "GET", "/bucket/k")
            begun = {task.get_name() for task in asyncio.all_tasks()} - tasks
            assert (answer.status, answer.body, cache_label(answer)) == (200, CONTENT, "miss")
            assert "small object writer" in begun
            assert "block fill" not in begun
            await settled(one)
            assert one.blocks.usage().blocks == 1
            again = await call(one.app, "GET", "/bucket/k")
            assert (again.body, again.headers["x-forebay-cache"]) == (CONTENT, "hit")
            assert one.origin.count(GET) == 1

    asyncio.run(scenario())


def test_who_comes_before_it_has_landed_shares_it(tmp_path: Path) -> None:
    """5.3 A reader in the moment between memory and disk gets the same bytes, and the origin is not asked for them."""

    async def scenario() -> None:
        async with gateway(tmp_path) as one:
            first = await call(one.app, "GET", "/bucket/k")
            second = await call(one.app, "GET", "/bucket/k", {"Range": "bytes=10-19"})
            assert (first.body, second.body) == (CONTENT, CONTENT[10:20])
            assert second.headers["x-forebay-cache"] == "hit"
            assert one.origin.count(GET) == 1

    asyncio.run(scenario())


def test_who_closes_right_behind_the_answer_has_kept_it(tmp_path: Path) -> None:
    """What has arrived is written before the directory is left."""

    async def scenario() -> None:
        async with gateway(tmp_path, slots=IMMUTABLE) as one:
            await call(one.app, "GET", "/bucket/k")
        async with gateway(tmp_path, slots=IMMUTABLE) as one:
            assert one.blocks.usage().blocks == 1

    asyncio.run(scenario())


def crc32(content: bytes) -> str:
    return base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()


@pytest.mark.parametrize("right", [True, False])
def test_bytes_without_their_checksum_are_never_kept(tmp_path: Path, right: bool) -> None:
    """6.5 A body that is not what the origin says it is goes to no client and to no disk."""

    async def scenario() -> None:
        async with gateway(tmp_path) as one:
            one.origin.inject(on(GET), AlterHeaders({"x-amz-checksum-crc32": crc32(CONTENT)}), times=None)
            if not right:
                one.origin.inject(on(GET), AlterBody(lambda body: body[::-1]), times=None)
            answer = await call(one.app, "GET", "/bucket/k")
            await settled(one)
            assert (answer.body == CONTENT) is right
            assert CONTENT[::-1] not in answer.body
            assert one.blocks.usage().blocks == int(right)

    asyncio.run(scenario())


def test_where_memory_has_no_room_the_fill_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in memory stays bounded: the second of two objects takes the ordinary way, and is as good."""

    async def scenario() -> None:
        monkeypatch.setattr(small_block_fetch, "GATHERING_SECONDS", 0.05)
        monkeypatch.setattr(small_block_fetch, "HELD_BYTES_MAX", len(CONTENT) + 1)
        async with gateway(tmp_path) as one:
            one.origin.put("bucket", "l", CONTENT)
            answers = await asyncio.gather(*(call(one.app, "GET", f"/bucket/{key}") for key in "kl"))
            assert [answer.body for answer in answers] == [CONTENT] * 2
            assert one.blocks._dependencies.writer.held_bytes <= 2 * len(CONTENT)
            await settled(one)
            assert one.blocks.usage().blocks == 2
            assert one.origin.count(GET) == 2

    asyncio.run(scenario())


def test_a_slot_that_does_not_keep_it_passes_it_on(tmp_path: Path) -> None:
    """`kept_object_size_max` holds for what has come whole, too."""

    async def scenario() -> None:
        slots = (Slot("i", Prefix.parse("s3://bucket/"), consistency="immutable", kept_object_bytes_max=1000),)
        async with gateway(tmp_path, slots=slots) as one:
            assert (await call(one.app, "GET", "/bucket/k")).body == CONTENT
            await settled(one)
            assert one.blocks.usage().blocks == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("rate", [None, 1e9, 200_000.0], ids=["no ceiling", "a high one", "a low one"])
def test_every_byte_is_counted_and_held_to_its_ceiling(tmp_path: Path, rate: float | None) -> None:
    """10.3 Counted once each, and what a ceiling has no room for waits, though it has arrived."""

    async def scenario() -> float:
        origin, loop = MemoryOrigin(SystemClock()), asyncio.get_running_loop()
        origin.create_bucket("bucket")
        ceilings = [] if rate is None else [Ceiling("read", None, rate)]
        bandwidth = Bandwidth(ceilings, SystemClock())
        front = MeteredOrigin(WholeAnswers(origin), OriginMeter(bandwidth))
        async with gateway_app(tmp_path, origin=origin, through=front) as one:
            for number in range(3):
                origin.put("bucket", f"k{number}", CONTENT)
            started = loop.time()
            for number in range(3):
                assert (await call(one.app, "GET", f"/bucket/k{number}")).body == CONTENT
            await settled(one)
            assert by_label(metrics.ORIGIN_BYTES, "direction", purpose="live") == {"read": 3 * len(CONTENT)}
            return loop.time() - started

    seconds = asyncio.run(scenario())
    if rate is not None and rate < 1e6:
        assert seconds > len(CONTENT) / rate


@pytest.mark.parametrize(
    "fits",
    [lambda size: ByteRange(0, size - 1), lambda size: ByteRange(5, 9), lambda size: ByteRange(size - 1, size - 1)],
)
def test_any_range_of_it_is_given(tmp_path: Path, fits: Callable[[int], ByteRange]) -> None:
    """From the first byte to the last."""

    async def scenario() -> None:
        async with gateway(tmp_path) as one:
            wanted = fits(len(CONTENT))
            answer = await call(one.app, "GET", "/bucket/k", {"Range": f"bytes={wanted.first}-{wanted.last}"})
            assert (answer.status, answer.body) == (206, CONTENT[wanted.first : wanted.stop])
            assert answer.headers["content-range"] == f"bytes {wanted.first}-{wanted.last}/{len(CONTENT)}"

    asyncio.run(scenario())


def test_an_object_whose_blocks_were_dropped_is_looked_at_anew(tmp_path: Path) -> None:
    """Its claim ended with its fill: nobody is kept out."""

    async def scenario() -> None:
        async with gateway(tmp_path) as one:
            for _ in range(3):
                assert (await call(one.app, "GET", "/bucket/k")).body == CONTENT
                await settled(one)
                await one.blocks.invalidate(ObjectKey("bucket", "k"))
            assert [asked.method for asked in one.origin.calls] == ["GET"] * 3

    asyncio.run(scenario())
