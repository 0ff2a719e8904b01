"""The threads that take request bodies off their sockets and through their sinks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

BUFFER_BYTES = 1024 * 1024
"""Measured: as good as 4 MiB, and better than 256 KiB (docs/decisions/0020-receiving-uploads.md)."""

P = ParamSpec("P")
R = TypeVar("R")


def default_threads() -> int:
    """More than cores, as a sink may wait for the disk; not many more, as each holds a buffer."""
    return min(16, 2 * len(os.sched_getaffinity(0)))


class ReceiveThreads:
    """A bounded number of threads, first come, first served; each has one buffer for as long as it lives."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or default_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="receive")
        self._own = threading.local()
        self.asked = 0
        """How many have a thread or wait for one."""

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for a thread."""
        return self.asked > self._threads

    def buffer(self) -> memoryview:
        """The calling thread's: used again and again, so that it costs no page faults."""
        own: memoryview | None = getattr(self._own, "buffer", None)
        if own is None:
            own = self._own.buffer = memoryview(bytearray(BUFFER_BYTES))
        return own

    async def run(self, stop: Callable[[], None], work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """What `work` returns or raises; it has ended when this returns, whatever ends it.

        When the caller is cancelled, `stop` is called, which should make the work end soon.
        """
        self.asked += 1
        try:
            return await to_its_end(self._pool.submit(work, *arguments, **keywords), stop)
        finally:
            self.asked -= 1

    def shut_down(self) -> None:
        """Let the threads go once they are idle."""
        self._pool.shutdown(wait=False)


async def to_its_end(work: Future[R], stop: Callable[[], None]) -> R:
    """The outcome of work on a thread. A cancelled caller learns of it only when no thread is at the work any more."""
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
            outcome.exception()  # looked at: nobody is left to be told
        raise
