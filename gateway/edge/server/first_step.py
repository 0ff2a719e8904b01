"""Runs an application's coroutine in the call that brings its request, and in a task only where it has to wait.

Most of what a cache answers, it can answer at once, and a task with its turn of the event loop costs as much as half of
such an answer. So the server takes the first step itself: `step`. An application must not do there what needs a task
(`asyncio.timeout`, `asyncio.current_task`): it awaits `in_task` before. In any other server that does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import coroutine as awaitable_generator
from typing import Any

_TASK_WANTED: Any = object()


@awaitable_generator
def in_task() -> Generator[Any, None, None]:
    """Go on in a task."""
    if asyncio.current_task() is None:
        yield _TASK_WANTED


def step(running: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None] | None:
    """Take the first step; the rest of it, for a task, where it is not over. Raises what it raises."""
    try:
        waited_for = running.send(None)
    except StopIteration:
        return None
    return _rest(_Rest(running, waited_for))


async def _rest(rest: _Rest) -> None:
    await rest


class _Rest:
    """A coroutine from where it waits for something. (`await` does not take one that has begun.)"""

    def __init__(self, running: Coroutine[Any, Any, None], waited_for: Any) -> None:
        self._running = running
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, None]:
        waited_for, running = self._waited_for, self._running
        go_on: Callable[[Any], Any]
        while True:
            value: Any = None
            go_on = running.send
            try:
                if waited_for is not _TASK_WANTED:
                    value = yield waited_for
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                value, go_on = error, running.throw
            try:
                waited_for = go_on(value)
            except StopIteration:
                return
