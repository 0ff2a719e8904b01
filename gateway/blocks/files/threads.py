"""Where blocking work runs: one thread for the index, a few for files; and what a refusal of the disk means."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import lmdb

from gateway.blocks.files.block_file import BlockLease
from gateway.errors import BlockDamaged, BlockError, StoreUnavailable
from gateway.file_lease import close_opened, with_lease


class Trouble(StrEnum):
    """What the directory can still be used for, the least harm first."""

    FULL = "full"
    """It gives, and takes nothing more: somebody else has filled the disk, or a quota is used up."""

    READ_ONLY = "read-only"
    """It gives, and takes nothing: its file system went read-only, or writing fails."""

    FAILING = "failing"
    """It neither gives nor takes."""


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_OF_THE_PROCESS = frozenset(
    {errno.EBADF, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.EEXIST}
)
"""These say nothing about the disk. EBADF is a defect of this program: somebody closed a file that was not his."""


def trouble_of(error: BaseException) -> Trouble | None:
    """What an error says about the disk; None where it says nothing: no room in a slot, no descriptors, other bytes."""
    for cause in _causes(error):
        if isinstance(cause, lmdb.Error):
            return _of_index(cause)
        if isinstance(cause, OSError):
            gone = isinstance(cause, FileNotFoundError) and isinstance(error, BlockDamaged)
            return None if gone else _of_number(cause.errno)
    return None


def as_block_error(error: Exception) -> BlockError:
    """What comes out of a disk thread, as the rest of the cache expects it."""
    if isinstance(error, BlockError):
        return error
    failure = StoreUnavailable(f"the cache directory cannot be used: {error}")
    failure.__cause__ = error
    return failure


def _of_index(error: lmdb.Error) -> Trouble | None:
    if isinstance(error, lmdb.MapFullError):
        return Trouble.FULL
    return _of_number(getattr(error, "code", None))


def _of_number(number: int | None) -> Trouble | None:
    if number in _OF_THE_PROCESS:
        return None
    if number in _FULL:
        return Trouble.FULL
    return Trouble.READ_ONLY if number == errno.EROFS else Trouble.FAILING


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine, -1)
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3

_LOOK_SECONDS = 0.5
"""Who waits for the index looks so often whether another process keeps it from being written."""

P = ParamSpec("P")
R = TypeVar("R")
Opened = TypeVar("Opened", BlockLease, BlockLease | None)


class DiskThreads:
    """The threads of one process's cache.

    What the disk says against something comes out as BlockError, and is told to `on_error` before, probes excepted.
    `stalled` says whether another process keeps the index from being written: nobody waits for that.
    """

    def __init__(self, disk_threads: int) -> None:
        self.on_error: Callable[[BlockError], None] = _nobody
        self.stalled: Callable[[], bool] = lambda: False
        self._index = ThreadPoolExecutor(1, thread_name_prefix="block-index")
        self._idle = ThreadPoolExecutor(1, thread_name_prefix="block-scrub", initializer=_give_way)
        self._disk = ThreadPoolExecutor(disk_threads, thread_name_prefix="block-disk")

    async def index(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what writes the index; to its end, even when the caller is cancelled, once it has begun.

        StoreUnavailable when another process keeps the index from being written; what has begun then goes on later.
        """
        return await self._unless_stalled(lambda: self._index.submit(function, *arguments, **keywords), None)

    async def index_or_undo(
        self, undo: Callable[[R], None], function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs
    ) -> R:
        """The same for what makes something that has to be somebody's: `undo` is given what comes when nobody waits."""
        return await self._unless_stalled(lambda: self._index.submit(function, *arguments, **keywords), undo)

    async def index_later(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what writes the index and no client waits for, however long that takes."""
        return await self._outcome(self._index.submit(function, *arguments, **keywords))

    async def probe(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """The same for what only tries the directory: its failures are its answer."""
        return await self._outcome(self._index.submit(function, *arguments, **keywords), _nobody)

    async def disk(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what reads or writes block files."""
        return await self._outcome(self._disk.submit(function, *arguments, **keywords))

    async def open(self, function: Callable[P, Opened], *arguments: P.args, **keywords: P.kwargs) -> Opened:
        """Run what opens a block file; it is closed again where nobody waits for it any more."""
        opening = self._disk.submit(function, *arguments, **keywords)
        try:
            return await self._outcome(opening)
        except BaseException:
            opening.add_done_callback(close_opened)
            raise

    async def idle(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what reads block files while nobody waits for it: the disk does it when it has nothing else to do."""
        return await self._outcome(self._idle.submit(function, *arguments, **keywords))

    def disk_holding(
        self,
        file: BlockLease,
        function: Callable[Concatenate[BlockLease, P], R],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """The same with a lease of the function's own, which lasts until the function is done.

        The lease is taken and the work begun in this call, before anybody awaits it: the caller may be gone by then.
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

    def hint(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> None:
        """Run what only makes later reads faster: whatever is wrong, they find out."""
        self._disk.submit(function, *arguments, **keywords)

    async def _unless_stalled(self, submit: Callable[[], Future[R]], undo: Callable[[R], None] | None) -> R:
        if self.stalled():
            raise _kept_from_writing()
        future = submit()
        outcome = asyncio.ensure_future(self._outcome(future))
        try:
            while not (await asyncio.wait((outcome,), timeout=_LOOK_SECONDS))[0]:
                if self.stalled():
                    raise _kept_from_writing()
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


def _kept_from_writing() -> StoreUnavailable:
    return StoreUnavailable("another process keeps the block index from being written")


def _nobody(_error: BlockError) -> None:
    """Where nobody wants to know."""


def _give_way() -> None:
    """Put this thread into the idle class (ioprio_set(2)): I/O schedulers that know it let everybody else go first."""
    ctypes.CDLL(None, use_errno=True).syscall(_IOPRIO_SET, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE << 13)
