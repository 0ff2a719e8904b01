"""Share one call to the origin among identical questions: the first call that begins after each of them was asked.

    no call under way? → a call begins; else the question joins those that wait for the next one

A call under way never answers a later caller: it may have seen the origin before an event that the caller has seen. So
the promise of `strict` slots holds to the letter, and any number of callers at once costs two calls.

A later call's answer is valid for earlier waiters, so callers of a stuck call get the next call's answer; without other
callers, `JoinedCalls` makes one for them. Each account has calls of its own, so that an account's denied access to the
origin fails no other account.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from gateway.core.clock import Clock
from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.client import ACCOUNT

T = TypeVar("T")

WAIT_SECONDS_MAX = 2.0
"""The next call waits no longer for the one under way, which may never end."""

OVERTAKEN_AFTER_SECONDS = 5.0
"""Seconds after which waiting callers get another call; they double with each call made."""

_LOOK_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Call:
    """A call; `task` is None until its turn has come. Until its first step, questions may join.

    Each that waits has a future of its own, so that none can take another's along. `earlier` are those that wait for
    calls before it, and may have its answer, too.
    """

    send: Callable[[], Coroutine[Any, Any, Any]]
    context: Context
    waiting: set[asyncio.Future[Any]] = field(default_factory=set)
    earlier: set[asyncio.Future[Any]] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    timer: asyncio.Task[None] | None = None
    began_at: float = 0.0

    def answered(self, answer: Any) -> None:
        for one in self.waiting | self.earlier:
            if not one.done():  # its caller is not leaving
                one.set_result(answer)

    def failed(self, error: Exception, *, is_answer: bool) -> None:
        """Fail the callers. Those that an earlier call may still answer fail only if `error` is the origin's answer."""
        for one in self.waiting | self.earlier if is_answer else self.waiting:
            if not one.done():
                one.set_exception(error)


@dataclass(slots=True)
class JoinedCalls:
    """The calls of one process. Event loop only."""

    clock: Clock
    _joinable: dict[Hashable, _Call] = field(default_factory=dict)
    _under_way: dict[Hashable, list[_Call]] = field(default_factory=dict)
    _watching: asyncio.Task[None] | None = None

    async def ask(self, question: Hashable, send: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `send`, or of another caller's identical question; raise as that one does.

        `question` must contain everything that may change the answer. A cancelled caller harms no other; a call without
        waiting callers is not made, or is cancelled.
        """
        question = ACCOUNT.get(), question
        call = self._joinable.get(question)
        if call is None:
            call = self._joinable[question] = _Call(send, copy_context())
            if question in self._under_way:
                call.timer = asyncio.create_task(self._begin_late(question, call), name="joined call waits")
            else:
                self._begin(question, call)
        mine: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call.waiting.add(mine)
        try:
            return await mine
        finally:
            self._leave(question, call, mine)
            for later in self._under_way.get(question, ()):
                self._leave(question, later, mine)

    def enter(self, question: Hashable, send: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], None] | None:
        """Note a call that its caller begins here and now, as `send` would; return what ends it.

        None: a call is under way, so `ask`.
        """
        question = ACCOUNT.get(), question
        if question in self._joinable or question in self._under_way:
            return None
        call = _Call(send, copy_context(), began_at=self.clock.monotonic())
        calls = self._under_way[question] = [call]
        return partial(self._over, question, call, calls)

    async def close(self) -> None:
        calls = [*self._joinable.values(), *chain.from_iterable(self._under_way.values())]
        for call in calls:
            for one in call.waiting:
                one.cancel()
        begun = [self._watching, *(task for call in calls for task in (call.task, call.timer))]
        tasks = [task for task in begun if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, question: Hashable, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        call.task = asyncio.create_task(self._run(question, call), name="joined call", context=call.context)

    async def _begin_late(self, question: Hashable, call: _Call) -> None:
        await self.clock.sleep(WAIT_SECONDS_MAX)
        call.timer = None
        self._begin(question, call)

    async def _run(self, question: Hashable, call: _Call) -> None:
        if self._joinable.get(question) is call:
            del self._joinable[question]
        calls = self._under_way.setdefault(question, [])
        for before in calls:
            call.earlier |= before.waiting
        calls.append(call)
        call.began_at = self.clock.monotonic()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="joined calls that take long")
        try:
            answer = await call.send()
        except (OriginUnreachable, OriginBodyError) as error:
            call.failed(error, is_answer=False)
        except Exception as error:  # noqa: BLE001 - the waiting callers get it as it is
            call.failed(error, is_answer=True)
        except asyncio.CancelledError:
            given_up = OriginUnreachable("the request to the origin was given up")  # by any caller
            call.failed(given_up, is_answer=False)
            raise
        else:
            call.answered(answer)
        finally:
            self._over(question, call, calls)

    async def _watch(self) -> None:
        while self._under_way:
            await self.clock.sleep(_LOOK_SECONDS)
            now = self.clock.monotonic()
            for question, calls in list(self._under_way.items()):
                latest, patience = calls[-1], OVERTAKEN_AFTER_SECONDS * 2 ** (len(calls) - 1)
                if question not in self._joinable and now - latest.began_at >= patience:
                    call = self._joinable[question] = _Call(latest.send, latest.context.copy())
                    self._begin(question, call)
        self._watching = None

    def _over(self, question: Hashable, call: _Call, calls: list[_Call]) -> None:
        is_latest = calls[-1] is call
        calls.remove(call)
        if not calls:
            del self._under_way[question]
        if is_latest:
            following = self._joinable.get(question)
            if following is not None and following.task is None:
                self._begin(question, following)

    def _leave(self, question: Hashable, call: _Call, mine: asyncio.Future[Any]) -> None:
        """Stop waiting. A call without waiting callers is cancelled."""
        call.waiting.discard(mine)
        call.earlier.discard(mine)
        if call.waiting or call.earlier:
            return
        if self._joinable.get(question) is call:
            del self._joinable[question]
        for task in (call.task, call.timer):
            if task is not None:
                task.cancel()
