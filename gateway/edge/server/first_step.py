"""Runs an application's coroutine in the call that brings its request, and in a task only where it has to wait.

Most of what a cache answers, it can answer at once, and a task with its turn of the event loop costs as much as half of
such an answer. So the server takes the first step itself: `step`. An application must not do there what needs a task
(`asyncio.timeout`, `asyncio.current_task`): it awaits `in_task` before. In any other server that does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import coroutine as awaitable_generator
from typing import Any

_TASK_WANTED: Any = object()


@awaitable_generator
def in_task() -> Generator[Any, None, None]:
    """Go on in a task."""
    if asyncio.current_task() is None:
        yield _TASK_WANTED


def step(running: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Take the first step; the rest of it, for a task, where it is not over. It raises what the step raises."""
    try:
        return _Rest(running, running.send(None))
    except StopIteration:
        return None
    except Exception as error:  # noqa: BLE001 - for whoever awaits the rest
        return _raised(error)


async def _raised(error: Exception) -> None:
    raise error


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
