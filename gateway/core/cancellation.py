"""Ends abandoned work: at any point, or only where it waits for its turn.

A read may end anywhere. A write may not: an operation that the origin or the journal has begun must be recorded to its
end. So a write ends only inside `turn`, the queues before it has begun. A fetch that many readers share, and that the
origin has not been asked for yet, ends there too when its last reader leaves.

Tasks that are not registered are never ended here. Event loop only.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from gateway.core.errors import ClientDisconnected

Task = asyncio.Task[Any]

R = TypeVar("R")


@dataclass(slots=True)
class _Work:
    is_abandoned: Callable[[], bool]
    on_end: Callable[[], None]
    anywhere: bool
    turns: int = 0


_works: WeakKeyDictionary[Task, _Work] = WeakKeyDictionary()
_left: WeakSet[Task] = WeakSet()


def register_request(*, anywhere: bool) -> None:
    """Let `abandon` end the current task, from now on or at once: `anywhere`, or inside `turn` only."""
    task = _current()
    if task in _left:
        raise _nobody_waits()
    request = weakref.ref(task)  # what is noted of a task must not keep it
    _works[task] = _Work(lambda: (one := request()) is not None and one in _left, lambda: None, anywhere)


def register_shared(is_abandoned: Callable[[], bool], on_end: Callable[[], None], *, anywhere: bool = False) -> None:
    """Let the current task end when `is_abandoned`: `anywhere`, or inside `turn` only.

    `on_end` is called first, so that no other caller joins it.
    """
    task = _current()
    _works[task] = _Work(is_abandoned, on_end, anywhere)
    task.add_done_callback(_works.pop)  # both may refer to the task, which would be kept for ever


def abandon(task: Task) -> None:
    """Note that the last caller of the task has left."""
    _left.add(task)
    work = _works.get(task)
    if work is not None and not task.done() and work.is_abandoned() and (work.anywhere or work.turns):
        work.on_end()
        task.cancel()


def is_current_left() -> bool:
    return _current() in _left


@contextmanager
def turn() -> Iterator[None]:
    """Mark a wait for one's turn, before anything has begun. Raises ClientDisconnected when the work is abandoned."""
    turn_now()
    task = asyncio.current_task()
    work = _works.get(task) if task is not None else None
    if task is None or work is None or work.anywhere:
        yield
        return
    work.turns += 1
    try:
        yield
    except asyncio.CancelledError:
        if task.cancelling() == 1 and work.is_abandoned():
            task.uncancel()
            raise _nobody_waits() from None
        raise
    finally:
        work.turns -= 1


def turn_now() -> None:
    task = asyncio.current_task()
    work = _works.get(task) if task is not None else None
    if work is not None and not work.anywhere and work.is_abandoned():
        work.on_end()
        raise _nobody_waits()


def _current() -> Task:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("only a task can be abandoned")
    return task


def _nobody_waits() -> ClientDisconnected:
    return ClientDisconnected("nobody waits for this any more")


async def to_its_end(work: Future[R], stop: Callable[[], None]) -> R:
    """Return the outcome of a thread's work. A cancelled caller learns of it only after the thread's end."""
    outcome = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        if outcome.done() or work.cancel():
            raise
        stop()
        while not outcome.done():
            try:
                await asyncio.wait((outcome,))
            except asyncio.CancelledError:  # once more: the answer is the same
                continue
        if not outcome.cancelled():
            outcome.exception()  # retrieved, as no caller is left to get it
        raise
