"""Identical questions share a call that begins after each of them was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import OriginBusy, OriginUnreachable
from gateway.metadata.joined_calls import OVERTAKEN_AFTER_SECONDS, WAIT_SECONDS_MAX, JoinedCalls
from gateway.origin.client import ACCOUNT as origin_account
from tests.support.manual_clock import ManualClock

ACCOUNT = ContextVar[str]("account")


class Refused(Exception):
    """The call failed."""


@dataclass
class Bucket:
    """An origin whose state is a number that grows. Each call sees it at one moment while it is under way."""

    state: int = 0
    calls: list[tuple[asyncio.Future[bool], int]] = field(default_factory=list)
    begun: int = 0
    cancelled: int = 0

    async def send(self) -> int:
        self.begun += 1
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        call = (outcome, self.state)
        self.calls.append(call)
        try:
            if not await outcome:
                raise Refused
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.calls.remove(call)
        return call[1]

    def finish(self, number: int, *, good: bool) -> None:
        waiting = [outcome for outcome, _ in self.calls if not outcome.done()]
        if waiting:
            waiting[number % len(waiting)].set_result(good)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def asking(joined: JoinedCalls, send: Callable[[], Coroutine[Any, Any, int]]) -> asyncio.Task[int]:
    """A caller that has asked."""
    caller = asyncio.create_task(joined.ask("q", send))
    await turn()
    return caller


@asynccontextmanager
async def playing() -> AsyncIterator[tuple[JoinedCalls, Bucket, ManualClock]]:
    clock, bucket = ManualClock(), Bucket()
    joined = JoinedCalls(clock)
    yield joined, bucket, clock
    await joined.close()
    assert bucket.calls == []
    assert not joined._joinable
    assert not joined._under_way
    assert len(asyncio.all_tasks()) == 1


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 1)),
    st.tuples(st.just("change"), st.just(0)),
    st.tuples(st.sampled_from(["finish", "fail", "leave"]), st.integers(0, 50)),
    st.tuples(st.just("turn"), st.just(0)),
    st.tuples(st.just("pass"), st.sampled_from([0, 1, 2])),
)


@given(st.lists(STEPS, max_size=60))
async def test_each_answer_is_a_state_between_question_and_answer(steps: list[tuple[str, int]]) -> None:
    """Whatever changes, fails and leaves meanwhile; and every question that stays is answered in the end."""
    async with playing() as (joined, bucket, clock):
        callers: list[asyncio.Task[None]] = []

        async def caller(question: int) -> None:
            arrived = bucket.state
            try:
                seen = await joined.ask(question, bucket.send)
            except Refused:
                return
            assert arrived <= seen <= bucket.state

        for step, number in steps:
            if step == "ask":
                callers.append(asyncio.create_task(caller(number)))
                await asyncio.sleep(0)  # it has arrived; what it began need not have begun
            elif step == "change":
                bucket.state += 1
            elif step in ("finish", "fail"):
                bucket.finish(number, good=step == "finish")
            elif step == "leave" and callers:
                callers[number % len(callers)].cancel()
            elif step == "turn":
                await turn()
            elif step == "pass":
                await clock.advance(float(number))
        for _ in range(len(steps) + 1):
            await turn()
            bucket.finish(0, good=True)
        await turn()
        assert all(task.done() for task in callers)
        for outcome in await asyncio.gather(*callers, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), repr(outcome)


async def test_a_call_that_never_ends_holds_the_next_one_up_for_a_moment_only() -> None:
    """Whoever asked later has a call of his own by then; its answer is as good for who waits for the silent one."""
    async with playing() as (joined, bucket, clock):
        first = await asking(joined, bucket.send)
        second = await asking(joined, bucket.send)
        await clock.advance(WAIT_SECONDS_MAX)
        assert bucket.begun == 2
        bucket.finish(1, good=True)
        assert (await first, await second) == (0, 0)
        await turn()
        assert bucket.cancelled == 1


async def test_a_call_that_is_stuck_is_made_again_for_those_who_wait() -> None:
    """Though nobody else asks; ever more seldom, for it may only be slow."""
    async with playing() as (joined, bucket, clock):
        callers = [asyncio.create_task(joined.ask("q", bucket.send)) for _ in range(512)]
        await turn()
        begun = []
        for _ in range(40):
            await clock.advance(1.0)
            begun.append(bucket.begun)
        assert begun[3:6] == [1, 2, 2]
        assert begun[13:16] == [2, 3, 3]
        assert begun[-1] == 4
        bucket.finish(1, good=True)
        assert set(await asyncio.gather(*callers)) == {0}
        await turn()
        assert (bucket.begun, bucket.cancelled) == (4, 3)


async def test_a_slow_answer_serves_those_who_waited_for_it() -> None:
    """The calls that were made meanwhile are given up."""
    async with playing() as (joined, bucket, clock):
        first = await asking(joined, bucket.send)
        await clock.advance(OVERTAKEN_AFTER_SECONDS)
        await clock.advance(1.0)
        assert bucket.begun == 2
        bucket.state = 1
        late = await asking(joined, bucket.send)
        bucket.finish(0, good=True)
        assert await first == 0
        await turn()
        bucket.finish(0, good=True)
        assert await late == 1


async def test_who_waits_for_an_earlier_call_is_not_told_that_a_later_one_got_no_answer() -> None:
    """Only the origin's word, be it a refusal, is good for both; and whoever's own call has failed waits no longer."""
    async with playing() as (joined, bucket, clock):

        async def send() -> int:
            try:
                return await bucket.send()
            except Refused:
                raise OriginUnreachable("no answer") from None

        first = await asking(joined, send)
        second = await asking(joined, send)
        await clock.advance(WAIT_SECONDS_MAX)
        third = await asking(joined, bucket.send)
        await clock.advance(WAIT_SECONDS_MAX)
        assert bucket.begun == 3
        bucket.finish(1, good=False)
        with pytest.raises(OriginUnreachable):
            await second
        assert not first.done()
        bucket.finish(1, good=False)
        for caller in (first, third):
            with pytest.raises(Refused):
                await caller


async def test_a_call_that_fails_again_and_again_is_told_of_in_time() -> None:
    """Calls that were made meanwhile do not put it off."""
    async with playing() as (joined, bucket, clock):

        async def send() -> int:
            bucket.begun += 1
            await clock.sleep(20.0)
            raise OriginBusy("no connection was free")

        caller = await asking(joined, send)
        await clock.advance(20.0)
        assert bucket.begun == 3
        with pytest.raises(OriginBusy):
            await caller


async def test_what_one_account_may_not_have_is_no_failure_of_another() -> None:
    """Each has calls of its own."""
    async with playing() as (joined, bucket, _clock):

        async def send() -> int:
            if origin_account.get() == "busy":
                raise OriginBusy("all connections that it may have are in use")
            return await bucket.send()

        async def ask(account: str) -> int:
            origin_account.set(account)
            return await joined.ask("q", send)

        callers = [asyncio.create_task(ask(account)) for account in ("busy", "idle")]
        await turn()
        bucket.finish(0, good=True)
        ends = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(ends[0], OriginBusy)
        assert ends[1] == 0


async def test_a_call_that_fails_fails_those_who_waited_for_it() -> None:
    """And nobody who asked after it had begun."""
    async with playing() as (joined, bucket, _clock):
        first = await asking(joined, bucket.send)
        second = await asking(joined, bucket.send)
        bucket.finish(0, good=False)
        await turn()
        bucket.finish(0, good=True)
        assert await second == 0
        with pytest.raises(Refused):
            await first


async def test_what_nobody_waits_for_is_not_asked() -> None:
    """A call that has begun is cancelled when the last caller leaves; one that has not is never made."""
    async with playing() as (joined, bucket, _clock):
        first = await asking(joined, bucket.send)
        second, third = (asyncio.create_task(joined.ask("q", bucket.send)) for _ in range(2))
        await turn()
        second.cancel()
        third.cancel()
        await turn()
        first.cancel()
        await turn()
        assert (bucket.begun, bucket.cancelled) == (1, 1)


async def test_the_call_runs_in_the_context_of_who_asked_first() -> None:
    """Also where another question's end begins it: what a call may take is on that caller's account."""
    async with playing() as (joined, bucket, _clock):
        names: list[str] = []

        async def send() -> int:
            names.append(ACCOUNT.get())
            return await bucket.send()

        async def ask(name: str) -> int:
            ACCOUNT.set(name)
            return await joined.ask("q", send)

        callers = [asyncio.create_task(ask("a"))]
        await turn()
        callers.append(asyncio.create_task(ask("b")))
        await turn()
        for _ in callers:
            bucket.finish(0, good=True)
            await turn()
        await asyncio.gather(*callers)
        assert names == ["a", "b"]


async def test_a_call_that_is_given_up_from_within_ends_for_all_who_wait() -> None:
    """Nobody waits for ever."""
    async with playing() as (joined, _bucket, _clock):

        async def given_up() -> int:
            raise asyncio.CancelledError

        callers = [asyncio.create_task(joined.ask("q", given_up)) for _ in range(2)]
        for caller in callers:
            with pytest.raises(OriginUnreachable):
                await caller
