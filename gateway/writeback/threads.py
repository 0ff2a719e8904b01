"""Threads for the buffer's blocking work: reading, writing and syncing staged files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from gateway.core.cancellation import to_its_end
from gateway.disk.file_lease import FileLease, SharedFile, close_opened, with_lease
from gateway.disk.thread_priority import prefer_event_loop

P = ParamSpec("P")
R = TypeVar("R")


class BufferThreads:
    """A bounded number of threads of one process."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, "writeback", initializer=prefer_event_loop)

    async def run(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run the function to its end, even if the caller is cancelled meanwhile."""
        return await asyncio.wrap_future(self._threads.submit(function, *arguments, **keywords))

    async def finish(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run the function; a cancelled caller waits until no thread runs it any more."""
        return await to_its_end(self._threads.submit(function, *arguments, **keywords), lambda: None)

    async def open(
        self, function: Callable[P, FileLease[SharedFile]], *arguments: P.args, **keywords: P.kwargs
    ) -> FileLease[SharedFile]:
        """Run a function that opens a file; close the file if the caller was cancelled."""
        opening = self._threads.submit(function, *arguments, **keywords)
        try:
            return await asyncio.wrap_future(opening)
        except BaseException:
            opening.add_done_callback(close_opened)
            raise

    def run_holding(
        self,
        file: FileLease[SharedFile],
        function: Callable[Concatenate[FileLease[SharedFile], P], R],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """Run a function with its own lease on a file: the caller's lease may end before the thread is done."""
        return self.run(with_lease(file.share(), function), *arguments, **keywords)

    def shut_down(self) -> None:
        """Wait until all calls have ended; blocks."""
        self._threads.shutdown(wait=True)
