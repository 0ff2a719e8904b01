"""Fills: one for many readers, streamed while it grows, finished once begun, a few blocks ahead of a reader."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from pathlib import Path

import pytest

from gateway.blocks import origin_gets
from gateway.blocks.fetch_locks import FileWatcher, lock_of_place
from gateway.blocks.layout import object_id
from gateway.blocks.origin_gets import Turns, UnpinnedGet, UnpinnedGets, UnpinnedResponse
from gateway.core.errors import OriginAnswered, OriginBusy, OriginUnreachable
from gateway.core.model import ByteRange, FileSpan, ObjectKey
from gateway.origin.client import ACCOUNT, IS_AWAITED, OriginRequest, OriginResponse, Purpose
from gateway.telemetry import metrics
from tests.blocks.test_fetch_locks import processes
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
    whole,
)
from tests.support.counting import counted
from tests.support.memory_origin.faults import Answer, Hold, Unreachable
from tests.support.memory_origin.response import MemoryResponse
from tests.support.waiting import until


async def test_two_hundred_readers_cost_one_request(tmp_path: Path) -> None:
    """However many readers want a cold block at once, the origin is asked for it once."""
    origin = make_origin()
    version = stored(origin, "a", BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        bodies = await asyncio.gather(*(read(cache, version) for _ in range(200)))
        assert set(bodies) == {content_of(origin, version)}
    assert origin.count() == 1
    assert counted(metrics.CACHE_COALESCED) == 199


async def test_a_fetch_that_one_account_may_not_make_is_made_for_another(
    tmp_path: Path,
) -> None:
    """The fetch began on the account of one who has no connections left: the other reader asks for himself."""
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


async def test_who_waits_too_long_for_a_turn_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the others take: a wait has an end, and leaves nothing behind."""
    monkeypatch.setattr(origin_gets, "TURN_SECONDS_MAX", 0.05)
    origin, go, reached = make_origin(), asyncio.Event(), asyncio.Event()
    first, second = stored(origin, "a", BLOCK), stored(origin, "b", BLOCK)
    origin.inject(lambda call: call.key == "a", Hold(go, reached))
    async with open_cache(tmp_path / "c", origin, fills_max=1) as cache:
        held = asyncio.create_task(read(cache, first))
        await reached.wait()
        with pytest.raises(OriginBusy):
            await read(cache, second)
        go.set()
        assert await held == content_of(origin, first)
        assert await read(cache, second) == content_of(origin, second)
        await cache.settle()
        assert (origin.count(), cache._dependencies.fetches._own.turns._value) == (2, 1)


async def test_readers_with_other_headers_do_not_share(tmp_path: Path) -> None:
    """A caller whose headers make the origin refuse does not spoil another caller's read."""
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


async def test_first_bytes_flow_before_the_block_is_complete(tmp_path: Path) -> None:
    """A reader gets what has arrived while the origin still owes the rest."""
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


async def test_a_leader_that_leaves_does_not_stop_the_fill(tmp_path: Path) -> None:
    """The reader that began a fill may go; the others get every byte, from one request."""
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


async def test_a_fill_begun_is_finished_though_everyone_left(tmp_path: Path) -> None:
    """What was asked of the origin is kept, and no further block of the range is begun."""
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


async def test_a_queued_fill_is_not_begun_when_its_readers_left(tmp_path: Path) -> None:
    """A fill that waits for its turn costs nothing once nobody waits for it."""
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


async def test_following_blocks_fill_ahead(tmp_path: Path) -> None:
    """The next blocks of a range are on their way while it is read, no more than the setting allows."""
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


async def test_what_is_read_ahead_is_awaited_when_its_reader_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its purpose stays, but its bytes do not wait any more behind those that nobody waits for."""
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


@pytest.mark.parametrize("small_object_bytes_max", [0, 2 * BLOCK])
async def test_a_fetch_has_the_priority_of_whoever_waits_for_it(tmp_path: Path, small_object_bytes_max: int) -> None:
    """Of a warm-up until a reader comes, of the reader until he leaves; another warm-up that joins changes nothing."""
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


async def test_a_read_that_nobody_waits_for_any_more_does_not_go_first(tmp_path: Path) -> None:
    """What has been asked for is paid for, and goes on; a warm-up that has joined it does not make it urgent."""
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


@pytest.mark.parametrize("small_object_bytes_max", [0, 2 * BLOCK])
@pytest.mark.parametrize("fails", [False, True])
async def test_readers_that_give_the_same_process_up_share_one_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_object_bytes_max: int, fails: bool
) -> None:
    """They have waited for who finds out the version, and go on without it in the same moment: all of them are told."""

    async def give_up(*_: object) -> bool:
        await asyncio.sleep(0)
        return False

    monkeypatch.setattr(UnpinnedGets, "settled", give_up)
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


KEY = ObjectKey("bucket", "k")
OTHERS = [
    (ObjectKey("bucket", "l"), 0, {}),
    (KEY, 65536, {}),
    (KEY, 0, {"x-amz-request-payer": "requester"}),
]


@contextmanager
def two_workers(directory: Path) -> Iterator[tuple[UnpinnedGets, UnpinnedGets]]:
    watcher = FileWatcher()
    with processes(directory) as opened:
        one, other = opened.locks
        turns = Turns(8), Turns(8)
        yield UnpinnedGets(one, watcher, *turns), UnpinnedGets(other, watcher, *turns)
    watcher.close()


@contextmanager
def looking(looks: UnpinnedGets, key: ObjectKey, offset: int, headers: dict[str, str]) -> Iterator[UnpinnedGet | None]:
    """A first look, where one is to be had, while this lasts."""
    look = looks.begin(object_id(key), offset, headers)
    with look or nullcontext():
        yield look


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_one_looks_at_a_time(tmp_path: Path, elsewhere: bool) -> None:
    """While somebody looks, nobody else does, in the same process or in another; other bytes are nobody's concern."""
    with two_workers(tmp_path / "c") as (one, two):
        asking = two if elsewhere else one
        with looking(one, KEY, 0, {}) as look:
            assert look is not None
            assert asking.pending(KEY, 0, {})
            with looking(asking, KEY, 0, {}) as second:
                assert second is None
            for key, offset, headers in OTHERS:
                assert not asking.pending(key, offset, headers)
                with looking(asking, key, offset, headers) as free:
                    assert free is not None
        assert not asking.pending(KEY, 0, {})
        with looking(asking, KEY, 0, {}) as next_look:
            assert next_look is not None


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_look_that_is_over_keeps_others_out_while_its_fill_runs(tmp_path: Path, elsewhere: bool) -> None:
    """Who waited goes on when the version is known; the next first look is to be had when the fill has ended."""
    with two_workers(tmp_path / "c") as (one, two):
        asking = two if elsewhere else one
        with looking(one, KEY, 0, {}) as look:
            assert look is not None
            look.hold()
            waiting = asyncio.create_task(asking.settled(KEY, 0, {}))
            await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting
        assert not asking.pending(KEY, 0, {})
        assert not await asking.settled(KEY, 0, {})
        with looking(asking, KEY, 0, {}) as second:
            assert second is None
        look.let_go()
        with looking(asking, KEY, 0, {}) as third:
            assert third is not None


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_who_waits_for_a_whole_answer_goes_on_when_its_bytes_are_to_be_had(
    tmp_path: Path, elsewhere: bool
) -> None:
    """Another process waits until the fetch has ended; this one can share it; nobody asks the origin again before."""
    with two_workers(tmp_path / "c") as (one, two):
        asking = two if elsewhere else one
        with looking(one, KEY, 0, {}) as look:
            assert look is not None
            look.hold()
            look.whole = True
            waiting = asyncio.create_task(two.settled(KEY, 0, {}))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert asking.pending(KEY, 0, {}) is elsewhere
        with looking(asking, KEY, 0, {}) as second:
            assert second is None
        look.let_go()
        assert await waiting
        with looking(asking, KEY, 0, {}) as third:
            assert third is not None


async def test_a_fill_that_ends_before_its_look_leaves_nothing(tmp_path: Path) -> None:
    """Small fills end before their first reader has begun to be served."""
    with two_workers(tmp_path / "c") as (one, two):
        with looking(one, KEY, 0, {}) as look:
            assert look is not None
            look.hold()
            look.let_go()
            assert two.pending(KEY, 0, {})
        with looking(two, KEY, 0, {}) as second:
            assert second is not None


async def test_nobody_waits_for_the_dead(tmp_path: Path) -> None:
    """A dead process's look is over, though its claim still stands."""
    watcher = FileWatcher()
    with processes(tmp_path) as opened:
        dead, living = opened.locks
        looks = UnpinnedGets(living, watcher, Turns(8), Turns(8))
        assert dead.take(lock_of_place(object_id(KEY), 0, {})) == 0
        waiting = asyncio.create_task(looks.settled(KEY, 0, {}))
        await asyncio.sleep(0)
        assert not waiting.done()
        dead.close()
        assert await waiting is False
        assert looks.pending(KEY, 0, {})
    watcher.close()


class Response(MemoryResponse):
    """One that can be watched."""


@pytest.fixture
def look(tmp_path: Path) -> Iterator[UnpinnedGet]:
    with processes(tmp_path, 1) as opened:
        place, object_id = lock_of_place(b"p" * 16, 0, {}), b"p" * 16
        yield UnpinnedGet(opened.locks[0], place, Turns(1), lambda _: None, object_id)


@pytest.mark.parametrize(
    ("first", "last", "fits"), [(100, 299, True), (100, 150, True), (101, 299, False), (100, 300, False)]
)
def test_it_is_taken_once_by_who_wants_its_first_bytes(look: UnpinnedGet, first: int, last: int, fits: bool) -> None:
    """Its body must begin with them and hold all; whoever comes second, or closes it after that, gets nothing."""
    response = Response(206)
    answer = UnpinnedResponse(look, ByteRange(100, 299), response)
    assert answer.take(ByteRange(first, last)) is (response if fits else None)
    assert answer.take(ByteRange(100, 299)) is (None if fits else response)
    asyncio.run(answer.aclose())
    assert not response.closed


@pytest.mark.parametrize("taken", [False, True])
def test_a_reader_that_keeps_it_keeps_no_response(look: UnpinnedGet, taken: bool) -> None:
    """Readers go on for minutes: what has come of a body nobody uses must not wait for their end in memory."""
    response = Response(206)
    gone = weakref.ref(response)
    answer = UnpinnedResponse(look, ByteRange(100, 299), response)
    if taken:
        answer.take(answer.range)
    asyncio.run(answer.aclose())
    assert response.closed is not taken
    del response
    assert gone() is None
    assert answer.take(answer.range) is None
