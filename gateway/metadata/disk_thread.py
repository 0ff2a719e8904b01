"""A thread for disk work that may hang: in LMDB and SQLite one process at a time writes, and that one may be stopped.

Who waits here has a deadline, and goes on without the result; the work is carried out when it can be. The thread is a
daemon: work that hangs keeps no process from ending.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DiskThread:
    """Carries out one work after the other, in order. To be used from one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._submitted = 0
        self._done = 0
        self._begun_seconds: float | None = None

    @property
    def waiting(self) -> int:
        """How much is not done yet."""
        return self._submitted - self._done

    def is_stuck(self, seconds: float) -> bool:
        """Whether what it does now has taken longer than that."""
        begun = self._begun_seconds
        return begun is not None and time.monotonic() - begun > seconds

    def submit(self, work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> asyncio.Future[R]:
        """Have it done behind everything submitted before. Who does not look at the result need not."""
        if self._is_closing:
            raise RuntimeError("the thread is being closed")
        done: Future[R] = Future()
        done.set_running_or_notify_cancel()  # nobody can take it back any more
        self._submitted += 1
        self._works.put((done, partial(work, *arguments, **keywords)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        result = asyncio.wrap_future(done)
        result.add_done_callback(_looked_at)
        return result

    async def run(self, seconds_max: float, work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Its result; TimeoutError when it is not done in time, though it may be done later.

        While what was submitted before takes longer than that, nothing more is: TimeoutError at once.
        """
        if self.is_stuck(seconds_max):
            raise TimeoutError
        return await in_time(self.submit(work, *arguments, **keywords), seconds_max)

    async def close(self, seconds_max: float) -> bool:
        """Do what is left, and end; False when that takes longer."""
        self._is_closing = True
        self._works.put(None)
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, seconds_max)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while (following := self._works.get()) is not None:
            done, work = following
            self._begun_seconds = time.monotonic()
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                self._ended()
                done.set_exception(error)
            else:
                self._ended()
                done.set_result(result)
                del result
            del following, done, work

    def _ended(self) -> None:
        self._begun_seconds = None
        self._done += 1


async def in_time(result: asyncio.Future[R], seconds_max: float) -> R:
    """The result; TimeoutError when it is not there in time. The work goes on, whoever leaves."""
    async with asyncio.timeout(seconds_max):
        return await result


def _looked_at(result: asyncio.Future[Any]) -> None:
    if not result.cancelled():
        result.exception()
