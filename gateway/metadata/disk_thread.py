"""A thread for disk work that may hang: in LMDB and SQLite one process at a time writes, and that one may be stopped.

Who waits here has a deadline, and goes on without the result; the work is carried out when it can be. The thread is a
daemon: work that hangs keeps no process from ending.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DiskThread:
    """Carries out one work after the other, in order. To be used from one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._begun_seconds: float | None = None

    @property
    def waiting(self) -> int:
        """How much is not done yet."""
        return len(self._works) + (self._begun_seconds is not None)

    def is_stuck(self, seconds: float) -> bool:
        """Whether what it does now has taken longer than that."""
        begun = self._begun_seconds
        return begun is not None and time.monotonic() - begun > seconds

    def submit(self, work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> asyncio.Future[R]:
        """Have it done behind everything submitted before. Who does not look at the result need not."""
        done: Future[R] = Future()
        done.set_running_or_notify_cancel()  # nobody can take it back any more
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the thread is being closed")
            self._works.append((done, partial(work, *arguments, **keywords)))
            self._changed.notify()
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
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, seconds_max)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._begun_seconds = None
                while not self._works:
                    if self._is_closing:
                        return
                    self._changed.wait()
                done, work = self._works.popleft()
                self._begun_seconds = time.monotonic()
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                done.set_exception(error)
            del done, work


async def in_time(result: asyncio.Future[R], seconds_max: float) -> R:
    """The result, which goes on without us; TimeoutError when it is not there in time."""
    if not result.done():
        await asyncio.wait((result,), timeout=seconds_max)
    if not result.done():
        raise TimeoutError
    return result.result()


def _looked_at(result: asyncio.Future[Any]) -> None:
    if not result.cancelled():
        result.exception()
