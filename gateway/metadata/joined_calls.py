"""Identical questions to the origin share one call: the first that begins after each of them was asked.

    nothing under way? → a call begins; else the question joins those that wait for the next one

A call that is under way answers nobody who comes later: it may have seen the origin before an event that the caller
has seen. So the promise of `strict` slots holds to the letter, and any number of callers at once costs two calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.clock import Clock
from gateway.errors import OriginUnreachable

T = TypeVar("T")

WAIT_SECONDS_MAX = 2.0
"""The next call waits no longer for the one under way, which may never end."""


@dataclass(slots=True, eq=False)
class _Call:
    """`task` is None until the call's turn has come; until its first step, questions may join. Each that waits has a
    future of its own, so that none can take another's along."""

    send: Callable[[], Coroutine[Any, Any, Any]]
    context: Context
    waiting: set[asyncio.Future[Any]] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    timer: asyncio.Task[None] | None = None

    def tell(self, answer: Any, error: Exception | None) -> None:
        for one in self.waiting:
            if one.done():
                continue  # its caller is leaving
            if error is not None:
                one.set_exception(error)
            else:
                one.set_result(answer)


@dataclass(slots=True)
class JoinedCalls:
    """The calls of one process. Event loop only."""

    clock: Clock
    _joinable: dict[Hashable, _Call] = field(default_factory=dict)
    _under_way: dict[Hashable, _Call] = field(default_factory=dict)

    async def ask(self, question: Hashable, send: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `send` gives, or that of another caller who asks the same; raises as that one does.

        `question` must tell everything that may change the answer. A caller that is cancelled harms nobody; a call
        for which nobody waits any more is not made, or is cancelled.
        """
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
            call.waiting.discard(mine)
            if not call.waiting:
                self._abandon(question, call)

    async def close(self) -> None:
        """Cancel what is under way; whoever waits is cancelled with it."""
        calls = [*self._joinable.values(), *self._under_way.values()]
        for call in calls:
            for one in call.waiting:
                one.cancel()
        tasks = [task for call in calls for task in (call.task, call.timer) if task is not None]
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
        self._under_way[question] = call
        try:
            answer = await call.send()
        except Exception as error:  # noqa: BLE001 - told to those who wait, as it is
            call.tell(None, error)
        except asyncio.CancelledError:
            call.tell(None, OriginUnreachable("the question to the origin was given up"))  # whoever gave it up
            raise
        else:
            call.tell(answer, None)
        finally:
            self._over(question, call)

    def _over(self, question: Hashable, call: _Call) -> None:
        """The next one's turn has come, if somebody waits for it."""
        if self._under_way.get(question) is call:
            del self._under_way[question]
            following = self._joinable.get(question)
            if following is not None and following.task is None:
                self._begin(question, following)

    def _abandon(self, question: Hashable, call: _Call) -> None:
        """Nobody waits for it any more, whether it is over or not."""
        if self._joinable.get(question) is call:
            del self._joinable[question]
        for task in (call.task, call.timer):
            if task is not None:
                task.cancel()
