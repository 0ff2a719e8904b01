"""Where blocking work runs: one thread for the index's writes, a few for file reads and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from gateway.blocks.open_file import OpenFile

P = ParamSpec("P")
R = TypeVar("R")


class DiskThreads:
    """The threads of one process's cache."""

    def __init__(self, disk_threads: int) -> None:
        self._index = ThreadPoolExecutor(1, thread_name_prefix="block-index")
        self._disk = ThreadPoolExecutor(disk_threads, thread_name_prefix="block-disk")

    async def index(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what writes the index; to its end, even when the caller is cancelled, once it has begun."""
        return await asyncio.wrap_future(self._index.submit(function, *arguments, **keywords))

    async def disk(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what reads or writes block files."""
        return await asyncio.wrap_future(self._disk.submit(function, *arguments, **keywords))

    async def disk_holding(
        self, file: OpenFile, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs
    ) -> R:
        """The same, with `file` kept open until the thread is done, though the caller may be cancelled before."""
        file.hold()
        future = self._disk.submit(function, *arguments, **keywords)
        future.add_done_callback(lambda _: file.release())
        return await asyncio.wrap_future(future)

    def shut_down(self) -> None:
        """Wait for what runs; blocks."""
        self._disk.shutdown(wait=True)
        self._index.shutdown(wait=True)
