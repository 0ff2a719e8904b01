"""Bodies that are received whole: many of them at once are bounded together, and shared out among credentials."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.operations.context import BUFFERED_SIZE_BYTES_MAX_TOTAL, WAIT_SECONDS_MAX, BodyBuffers
from gateway.operations.payload import BUFFERED_GRACE_SECONDS, BUFFERED_SIZE_BYTES_MAX
from gateway.policy.slots import Grant, Prefix
from tests.support.asgi import ACCESS_KEY_ID, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot

BODY = b"b" * BUFFERED_SIZE_BYTES_MAX


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Body:
    """One that has room, or waits for it."""

    def __init__(self, buffers: BodyBuffers, credential: str, size_bytes: int, clock: ManualClock) -> None:
        self.ends = asyncio.Event()
        self.has_room = False
        self.credential = credential
        self.task = asyncio.create_task(self._hold(buffers, size_bytes, clock))

    async def _hold(self, buffers: BodyBuffers, size_bytes: int, clock: ManualClock) -> None:
        async with buffers.room(self.credential, size_bytes, clock):
            self.has_room = True
            await self.ends.wait()


def test_what_is_held_is_given_back() -> None:
    """By those that were completed and by those that failed, each what it had taken."""
    buffers = BodyBuffers(20)
    with buffers.holding() as first:
        first(6)
        with buffers.holding() as second:
            second(3)
            with pytest.raises(S3Error, match="SlowDown"):
                second(3)
            assert buffers.held_bytes == 9
        assert buffers.held_bytes == 6
    assert buffers.held_bytes == 0


def test_one_credential_leaves_room_for_others() -> None:
    """However much one asks for, the next finds as much as the first has left, and the one after that again."""

    async def scenario() -> None:
        buffers, clock = BodyBuffers(64), ManualClock()
        first = [Body(buffers, "first", 1, clock) for _ in range(200)]
        await settle()
        assert sum(body.has_room for body in first) == 32
        second = [Body(buffers, "second", 1, clock) for _ in range(200)]
        await settle()
        assert sum(body.has_room for body in second) == 16
        third = Body(buffers, "third", 8, clock)
        await settle()
        assert third.has_room
        await clock.advance(WAIT_SECONDS_MAX)
        refused = [body.task for body in (*first, *second) if not body.has_room]
        assert {str(task.exception())[:8] for task in refused} == {"SlowDown"}
        for body in (*first, *second, third):
            body.ends.set()
        await settle()
        assert buffers.held_bytes == 0

    asyncio.run(scenario())


def test_who_waits_is_served_by_turns() -> None:
    """A long queue of one credential does not put off another's; within a credential the first comes first."""

    async def scenario() -> None:
        buffers, clock = BodyBuffers(4), ManualClock()
        full = [Body(buffers, name, 1, clock) for name in ("a", "a", "b")]
        await settle()
        waiting = [Body(buffers, name, 2, clock) for name in ("a", "a", "a", "b")]
        await settle()
        assert not any(body.has_room for body in waiting)
        served = []
        for ending in (*full, waiting[0], waiting[3], waiting[1]):
            ending.ends.set()
            await settle()
            served += [number for number, body in enumerate(waiting) if body.has_room and number not in served]
        assert served == [0, 3, 1, 2]

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.sampled_from(["end", "leave", "time"]))))
def test_any_history_gives_all_back(history: list[tuple[str, int, str]]) -> None:
    """Bodies that end, clients that leave while they wait, waits that take too long: nothing is lost or held twice."""

    async def scenario() -> None:
        buffers, clock = BodyBuffers(12), ManualClock()
        bodies: list[tuple[Body, int]] = []
        for credential, size, what in history:
            bodies.append((Body(buffers, credential, size, clock), size))
            await settle()
            body = bodies[len(bodies) // 2][0]
            if what == "end":
                body.ends.set()
            elif what == "leave":
                body.task.cancel()
            else:
                await clock.advance(WAIT_SECONDS_MAX / 2)
            await settle()
            held = sum(size for one, size in bodies if one.has_room and not one.task.done())
            assert buffers.held_bytes == held <= 12
        for body, _ in bodies:
            body.ends.set()
        await settle()
        await clock.advance(WAIT_SECONDS_MAX)
        assert buffers.held_bytes == 0
        await asyncio.gather(*(body.task for body, _ in bodies), return_exceptions=True)

    asyncio.run(scenario())


class DatedClock(ManualClock):
    """For requests that are signed now."""

    def now(self) -> float:
        return time.time()


def play(directory: Path, part: Callable[[GatewayApp, ManualClock], Awaitable[None]], **options: object) -> None:
    async def scenario() -> None:
        clock = DatedClock()
        async with gateway_app(directory, clock=clock, **options) as gateway:  # type: ignore[arg-type]
            await part(gateway, clock)
            assert gateway.app.services.buffers.held_bytes == 0

    asyncio.run(scenario())


def test_one_body_too_many_is_told_to_slow_down(tmp_path: Path) -> None:
    """503 SlowDown after a while, which every SDK tries again, and nothing is stored; others find room meanwhile."""

    async def part(gateway: GatewayApp, clock: ManualClock) -> None:
        buffers = gateway.app.services.buffers
        async with buffers.room(ACCESS_KEY_ID, BUFFERED_SIZE_BYTES_MAX_TOTAL // 2, clock):
            refused = asyncio.create_task(call(gateway.app, "PUT", "/bucket/k", {}, BODY))
            await settle()
            async with buffers.room("another", len(BODY), clock):
                await clock.advance(WAIT_SECONDS_MAX)
            answer = await refused
            assert (answer.status, b"<Code>SlowDown</Code>" in answer.body) == (503, True)
            assert "k" not in gateway.origin.buckets["bucket"].objects
        assert (await call(gateway.app, "PUT", "/bucket/k", {}, BODY)).status == 200

    play(tmp_path, part)


@pytest.mark.parametrize(("method", "target"), [("POST", "/bucket?delete"), ("PUT", "/bucket/k"), ("PUT", "/bucket?x")])
def test_a_body_that_trickles_into_memory_is_cut(method: str, target: str, tmp_path: Path) -> None:
    """A byte a second, never silent: 400 RequestTimeout soon after the grace, not after hours."""

    async def part(gateway: GatewayApp, clock: ManualClock) -> None:
        headers = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
        answer = await call(gateway.app, method, target, headers, [b"x"] * 100_000, before_piece=second_of(clock))
        assert (answer.status, b"<Code>RequestTimeout</Code>" in answer.body) == (400, True)
        assert BUFFERED_GRACE_SECONDS < clock.monotonic() < BUFFERED_GRACE_SECONDS + 5

    play(tmp_path, part)


def second_of(clock: ManualClock) -> Callable[[], Awaitable[None]]:
    async def second() -> None:
        await clock.advance(1)

    return second


READ_ONLY = Grant((Prefix(""),), read_only=True)
FROZEN = Slot("frozen", Prefix("bucket", "team/"), "read-only")


@pytest.mark.parametrize(
    ("grant", "slots"),
    [
        (READ_ONLY, ()),
        (Grant((Prefix("elsewhere"),)), ()),
        (Grant((Prefix("bucket", "team/a/"), Prefix("bucket", "team/b/"))), (FROZEN,)),
    ],
)
def test_who_may_delete_nothing_is_refused_by_the_head(grant: Grant, slots: tuple[Slot, ...], tmp_path: Path) -> None:
    """DeleteObjects names its keys in its body; whoever may change none of the bucket need not send it."""

    async def part(gateway: GatewayApp, clock: ManualClock) -> None:
        headers = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
        pieces = [b"x"] * 1000
        answer = await call(gateway.app, "POST", "/bucket?delete", headers, pieces, before_piece=second_of(clock))
        assert answer.status == 403
        assert clock.monotonic() == 0.0, "nothing of the body was read"

    play(tmp_path, part, grant=grant, slots=slots)
