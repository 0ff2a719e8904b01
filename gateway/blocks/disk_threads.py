"""Threads for the blocking work of a cache: one for the index, a few for files, one for work that no client awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import lmdb

from gateway.blocks.block_file import BlockLease
from gateway.core.errors import BlockError, StoreUnavailable
from gateway.disk.file_lease import close_opened, with_lease
from gateway.disk.thread_priority import only_idle_disk

_LOOK_SECONDS = 0.5
"""Seconds between two looks of a waiting caller whether another process keeps the index from being written."""

P = ParamSpec("P")
R = TypeVar("R")
Opened = TypeVar("Opened", BlockLease, BlockLease | None)


class DiskThreads:
    """The threads of one process's cache.

    Errors of the disk come out as BlockError after `on_error` got them, except those of probes. `stalled` returns True
    while another process keeps the index from being written: callers do not wait for that.
    """

    def __init__(self, disk_threads: int) -> None:
        self.on_error: Callable[[BlockError], None] = _nobody
        self.stalled: Callable[[], bool] = lambda: False
        self._index = ThreadPoolExecutor(1, thread_name_prefix="block-index")
        self._idle = ThreadPoolExecutor(1, thread_name_prefix="block-scrub", initializer=only_idle_disk)
        self._disk = ThreadPoolExecutor(disk_threads, thread_name_prefix="block-disk")

    async def index(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what writes the index; to its end, even when the caller is cancelled, once it has begun.

        StoreUnavailable when another process keeps the index from being written; what has begun then goes on later.
        """
        return await self._unless_stalled(lambda: self._index.submit(function, *arguments, **keywords), None)

    async def index_or_undo(
        self, undo: Callable[[R], None], function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs
    ) -> R:
        """Run work whose result needs an owner: `undo` gets it if the caller has left."""
        return await self._unless_stalled(lambda: self._index.submit(function, *arguments, **keywords), undo)

    async def index_later(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what writes the index and no client waits for, however long that takes."""
        return await self._outcome(self._index.submit(function, *arguments, **keywords))

    async def probe(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run a test of the directory: its failures are its answer."""
        return await self._outcome(self._index.submit(function, *arguments, **keywords), _nobody)

    async def disk(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what reads or writes block files."""
        return await self._outcome(self._disk.submit(function, *arguments, **keywords))

    async def open(self, function: Callable[P, Opened], *arguments: P.args, **keywords: P.kwargs) -> Opened:
        """Open a block file; close it again if the caller has left."""
        opening = self._disk.submit(function, *arguments, **keywords)
        try:
            return await self._outcome(opening)
        except BaseException:
            opening.add_done_callback(close_opened)
            raise

    async def idle(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Read block files with idle disk priority."""
        return await self._outcome(self._idle.submit(function, *arguments, **keywords))

    def disk_holding(
        self,
        file: BlockLease,
        function: Callable[Concatenate[BlockLease, P], R],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """Run work on the disk with a lease of its own, which lasts until it is done.

        This call takes the lease and begins the work at once, as its caller may be gone before it awaits the result.
        """
        return self._outcome(self._disk.submit(with_lease(file.share(), function), *arguments, **keywords))

    def index_holding(
        self,
        file: BlockLease,
        function: Callable[Concatenate[BlockLease, P], R],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """As `disk_holding`, for what writes the index."""
        return self._outcome(self._index.submit(with_lease(file.share(), function), *arguments, **keywords))

    async def _unless_stalled(self, submit: Callable[[], Future[R]], undo: Callable[[R], None] | None) -> R:
        if self.stalled():
            raise kept_from_writing()
        future = submit()
        outcome = asyncio.ensure_future(self._outcome(future))
        try:
            while not (await asyncio.wait((outcome,), timeout=_LOOK_SECONDS))[0]:
                if self.stalled():
                    raise kept_from_writing()
        except BaseException:
            outcome.cancel()
            if not future.cancel() and undo is not None:
                future.add_done_callback(partial(self._undo, undo))
            raise
        return outcome.result()

    def _undo(self, undo: Callable[[R], None], future: Future[R]) -> None:
        if not future.cancelled() and future.exception() is None:
            with suppress(RuntimeError):  # the threads are being shut down: the next process of the slot clears up
                self._index.submit(undo, future.result())

    async def _outcome(self, future: Future[R], on_error: Callable[[BlockError], None] | None = None) -> R:
        try:
            return await asyncio.wrap_future(future)
        except (BlockError, OSError, lmdb.Error) as error:
            failure = as_block_error(error)
            (on_error or self.on_error)(failure)
            raise failure from failure.__cause__

    def shut_down(self) -> None:
        """Wait for what runs; blocks."""
        self._idle.shutdown(wait=True)
        self._disk.shutdown(wait=True)
        self._index.shutdown(wait=True)


def as_block_error(error: Exception) -> BlockError:
    """Return an error of a disk thread as a BlockError."""
    if isinstance(error, BlockError):
        return error
    failure = StoreUnavailable(f"the cache directory cannot be used: {error}")
    failure.__cause__ = error
    return failure


def kept_from_writing() -> StoreUnavailable:
    return StoreUnavailable("the block index cannot be written: another process holds its lock")


def _nobody(_error: BlockError) -> None:
    """Ignore the error."""
