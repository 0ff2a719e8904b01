"""Fills: one for many readers, streamed while it grows, finished once begun, a few blocks ahead of a reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.blocks.origin_gets import UnpinnedGets
from gateway.core.errors import OriginAnswered, OriginBusy, OriginUnreachable
from gateway.core.model import ByteRange, FileSpan
from gateway.origin.client import ACCOUNT, IS_AWAITED, OriginRequest, OriginResponse, Purpose
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    KIB,
    NotingOrigin,
    PacedOrigin,
    bytes_of,
    content_of,
    make_origin,
    open_cache,
    read,
    stored,
    until,
    whole,
)
from tests.support.counting import counted
from tests.support.memory_origin.faults import Answer, Hold, Unreachable


def test_two_hundred_readers_cost_one_request(tmp_path: Path) -> None:
    """However many readers want a cold block at once, the origin is asked for it once."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        async with open_cache(tmp_path / "c", origin) as cache:
            bodies = await asyncio.gather(*(read(cache, version) for _ in range(200)))
            assert set(bodies) == {content_of(origin, version)}
        assert origin.count() == 1
        assert counted(metrics.CACHE_COALESCED) == 199

    asyncio.run(scenario())


def test_a_fetch_that_one_account_may_not_make_is_made_for_another(
    tmp_path: Path,
) -> None:
    """The fetch began on the account of one who has no connections left: the other reader asks for himself."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        asked, joined, send = asyncio.Event(), asyncio.Event(), origin.send

        async def shared_out(request: OriginRequest) -> OriginResponse:
            if ACCOUNT.get() == "busy":
                asked.set()
                await joined.wait()
                raise OriginBusy("all connections that it may have are in use")
            return await send(request)

        origin.send = shared_out  # type: ignore[method-assign, assignment]
        async with open_cache(tmp_path / "c", origin, fill_retries=0) as cache:

            async def reading(account: str) -> bytes:
                ACCOUNT.set(account)
                return await read(cache, version)

            busy = asyncio.create_task(reading("busy"))
            await asked.wait()
            idle = asyncio.create_task(reading("idle"))
            await asyncio.sleep(0.05)
            joined.set()
            assert await idle == content_of(origin, version)
            with pytest.raises(OriginBusy):
                await busy

    asyncio.run(scenario())


def test_readers_with_other_headers_do_not_share(tmp_path: Path) -> None:
    """A caller whose headers make the origin refuse does not spoil another caller's read."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        origin.inject(lambda call: "x-amz-expected-bucket-owner" in call.headers, Answer(403, "AccessDenied"))
        async with open_cache(tmp_path / "c", origin) as cache:
            refused, served = await asyncio.gather(
                cache.open_range(version, whole(version), headers={"x-amz-expected-bucket-owner": "1"}),
                read(cache, version),
                return_exceptions=True,
            )
            assert isinstance(refused, OriginAnswered)
            assert refused.status == 403
            assert served == content_of(origin, version)

    asyncio.run(scenario())


def test_first_bytes_flow_before_the_block_is_complete(tmp_path: Path) -> None:
    """A reader gets what has arrived while the origin still owes the rest."""

    async def scenario() -> None:
        memory = make_origin()
        version = stored(memory, "a", BLOCK)
        origin = PacedOrigin(memory, pause_after=128 * KIB)
        async with open_cache(tmp_path / "c", origin) as cache:
            reader = await cache.open_range(version, whole(version))
            async with aclosing(reader.body()) as body:
                first = await anext(body)
                assert isinstance(first, FileSpan)
                assert not origin.go.is_set()
                begin = bytes_of(first)
                origin.go.set()
                rest = [bytes_of(piece) async for piece in body]
                assert b"".join((begin, *rest)) == content_of(memory, version)

    asyncio.run(scenario())


def test_a_leader_that_leaves_does_not_stop_the_fill(tmp_path: Path) -> None:
    """The reader that began a fill may go; the others get every byte, from one request."""

    async def scenario() -> None:
        memory = make_origin()
        version = stored(memory, "a", BLOCK)
        origin = PacedOrigin(memory, pause_after=64 * KIB)
        async with open_cache(tmp_path / "c", origin) as cache:
            leader = asyncio.create_task(read(cache, version))
            await origin.paused.wait()
            follower = asyncio.create_task(read(cache, version))
            await asyncio.sleep(0)
            leader.cancel()
            await asyncio.gather(leader, return_exceptions=True)
            origin.go.set()
            assert await follower == content_of(memory, version)
            assert memory.count() == 1

    asyncio.run(scenario())


def test_a_fill_begun_is_finished_though_everyone_left(tmp_path: Path) -> None:
    """What was asked of the origin is kept, and no further block of the range is begun."""

    async def scenario() -> None:
        memory = make_origin()
        version = stored(memory, "a", 8 * BLOCK)
        origin = PacedOrigin(memory, pause_after=64 * KIB)
        async with open_cache(tmp_path / "c", origin, readahead_bytes=0) as cache:
            reader = await cache.open_range(version, whole(version))
            await reader.aclose()
            origin.go.set()
            await cache.settle()
            assert memory.count() == 1
            assert (await cache.open_range(version, ByteRange(0, BLOCK - 1))).outcome == "hit"

    asyncio.run(scenario())


def test_a_queued_fill_is_not_begun_when_its_readers_left(tmp_path: Path) -> None:
    """A fill that waits for its turn costs nothing once nobody waits for it."""

    async def scenario() -> None:
        memory = make_origin()
        one, two = stored(memory, "one", BLOCK), stored(memory, "two", BLOCK)
        origin = PacedOrigin(memory, pause_after=64 * KIB)
        async with open_cache(tmp_path / "c", origin, fills_max=1) as cache:
            running = asyncio.create_task(read(cache, one))
            await origin.paused.wait()
            queued = asyncio.create_task(cache.open_range(two, whole(two)))
            await asyncio.sleep(0)
            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
            origin.go.set()
            assert await running == content_of(memory, one)
            await cache.settle()
            assert memory.count(key="two") == 0

    asyncio.run(scenario())


def test_following_blocks_fill_ahead(tmp_path: Path) -> None:
    """The next blocks of a range are on their way while it is read, no more than the setting allows."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 10 * BLOCK)
        released = asyncio.Event()
        origin.inject(lambda call: call.purpose is Purpose.READAHEAD, Hold(released), times=None)
        async with open_cache(tmp_path / "c", origin, readahead_bytes=3 * BLOCK) as cache:
            reader = await cache.open_range(version, ByteRange(0, 6 * BLOCK - 1))
            async with aclosing(reader.body()) as body:
                await anext(body)
                await until(lambda: origin.count() == 4)
                assert [call.purpose for call in origin.calls] == [Purpose.LIVE] + [Purpose.READAHEAD] * 3
            released.set()

    asyncio.run(scenario())


def test_what_is_read_ahead_is_awaited_when_its_reader_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its purpose stays, but its bytes do not wait any more behind those that nobody waits for."""

    async def scenario() -> None:
        origin, awaited = make_origin(), list[Callable[[], bool]]()
        version = stored(origin, "a", 2 * BLOCK)
        released, send = asyncio.Event(), origin.send
        origin.inject(lambda call: call.purpose is Purpose.READAHEAD, Hold(released), times=None)

        async def seen(request: OriginRequest) -> OriginResponse:
            is_awaited = IS_AWAITED.get()
            assert is_awaited is not None
            awaited.append(is_awaited)
            return await send(request)

        monkeypatch.setattr(origin, "send", seen)
        async with open_cache(tmp_path / "c", origin, readahead_bytes=BLOCK) as cache:
            reader = await cache.open_range(version, whole(version))
            async with aclosing(reader.body()) as body:
                await anext(body)
                await until(lambda: len(awaited) == 2)
                assert not awaited[1]()
                rest = asyncio.ensure_future(anext(body))
                while not awaited[1]() and not rest.done():
                    await asyncio.sleep(0)
                    if rest.done() and not awaited[1]():
                        rest = asyncio.ensure_future(anext(body))
                assert awaited[1]()
                released.set()
                await rest

    asyncio.run(scenario())


@pytest.mark.parametrize("small_object_bytes_max", [0, 2 * BLOCK])
def test_a_fetch_has_the_priority_of_whoever_waits_for_it(tmp_path: Path, small_object_bytes_max: int) -> None:
    """Of a warm-up until a reader comes, of the reader until he leaves; another warm-up that joins changes nothing."""

    async def scenario() -> None:
        origin, released = make_origin(), asyncio.Event()
        version = stored(origin, "a", BLOCK)
        seen = list[tuple[Purpose, Callable[[], bool]]]()
        origin.inject(lambda call: True, Hold(released), times=None)
        noting = NotingOrigin(origin, seen)
        async with open_cache(tmp_path / "c", noting, small_object_bytes_max=small_object_bytes_max) as cache:

            def warm() -> asyncio.Task[tuple[int, bool]]:
                return asyncio.create_task(cache.fetch(version, whole(version), slot="default", purpose=Purpose.WARM))

            jobs = [warm()]
            await until(lambda: bool(seen))
            [(purpose, is_awaited)] = seen
            assert purpose is Purpose.WARM
            jobs.append(warm())
            reading = asyncio.create_task(read(cache, version))
            await until(is_awaited)
            reading.cancel()
            await until(lambda: not is_awaited())
            reading = asyncio.create_task(read(cache, version))
            await until(is_awaited)
            jobs[0].cancel()  # whose fetch goes on: the reader still waits for it
            await asyncio.gather(jobs[0], return_exceptions=True)
            assert is_awaited()
            released.set()
            assert await reading == content_of(origin, version)
            assert await jobs[1] == (BLOCK, True)
            assert len(seen) == 1

    asyncio.run(scenario())


def test_a_read_that_nobody_waits_for_any_more_does_not_go_first(tmp_path: Path) -> None:
    """What has been asked for is paid for, and goes on; a warm-up that has joined it does not make it urgent."""

    async def scenario() -> None:
        origin, released = make_origin(), asyncio.Event()
        version = stored(origin, "a", BLOCK)
        seen = list[tuple[Purpose, Callable[[], bool]]]()
        origin.inject(lambda call: True, Hold(released), times=None)
        async with open_cache(tmp_path / "c", NotingOrigin(origin, seen)) as cache:
            reading = asyncio.create_task(read(cache, version))
            await until(lambda: bool(seen))
            [(purpose, is_awaited)] = seen
            assert purpose is Purpose.LIVE
            assert is_awaited()
            warming = asyncio.create_task(cache.fetch(version, whole(version), slot="default", purpose=Purpose.WARM))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert not is_awaited()
            released.set()
            assert await warming == (BLOCK, True)
            assert len(seen) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("small_object_bytes_max", [0, 2 * BLOCK])
@pytest.mark.parametrize("fails", [False, True])
def test_readers_that_give_the_same_process_up_share_one_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_object_bytes_max: int, fails: bool
) -> None:
    """They have waited for who finds out the version, and go on without it in the same moment: all of them are told."""

    async def give_up(*_: object) -> bool:
        await asyncio.sleep(0)
        return False

    monkeypatch.setattr(UnpinnedGets, "settled", give_up)

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        if fails:
            origin.inject(lambda call: True, Unreachable(), times=None)
        async with open_cache(
            tmp_path / "c", origin, small_object_bytes_max=small_object_bytes_max, fill_retries=0
        ) as cache:
            async with asyncio.timeout(30):
                found = await asyncio.gather(*(read(cache, version) for _ in range(4)), return_exceptions=True)
        assert found == [content_of(origin, version)] * 4 or fails
        assert not fails or [type(error) for error in found] == [OriginUnreachable] * 4
        assert origin.count() == 1

    asyncio.run(scenario())
