"""Threads for the files of one origin. A file server that dies keeps threads; it must keep nobody else.

Work that does not return in time is left behind with its thread, and counted. Then one look at the file system finds
out whether it is only the one file, or all of it: until that look returns, nothing more is begun. Nothing waits for
threads that hang, not even the end of the process.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from gateway.core import cancellation
from gateway.core.errors import OriginBusy, OriginUnreachable

T = TypeVar("T")


class _Work(Generic[T]):
    """A function that a thread runs; its outcome comes to the event loop. `undo` gets what nobody waits for."""

    def __init__(
        self,
        function: Callable[[], T],
        undo: Callable[[T], None] | None,
        ended: Callable[[_Work[Any]], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.is_late = self.is_write = False
        self.turn: asyncio.Semaphore | None = None
        self.seconds_max = self.due_at = math.inf
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[T] = self._loop.create_future()
        self._function, self._undo, self._ended, self._later = function, undo, ended, later

    def run(self) -> None:
        try:
            result, error = self._function(), None
        except BaseException as raised:  # noqa: BLE001 - raised where it is waited for
            result, error = None, raised
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._tell, result, error)

    def _tell(self, result: Any, error: BaseException | None) -> None:
        self._ended(self)
        if not self.outcome.done():
            self.outcome.set_result(result) if error is None else self.outcome.set_exception(error)
        elif error is None and self._undo is not None:
            self._later(partial(self._undo, result))


class FileThreads:
    """At most `count_max` threads, made as they are needed. Event loop only."""

    def __init__(
        self,
        name: str,
        count_max: int,
        look: Callable[[], object],
        *,
        wait_seconds_max: float,
        look_seconds_max: float,
    ) -> None:
        """`look` asks the file system something that no cache can answer."""
        self._name = name
        self._count_max = count_max
        self._look = look
        self._wait_seconds_max = wait_seconds_max
        self._look_seconds_max = look_seconds_max
        self._queue: SimpleQueue[_Work[Any] | None] = SimpleQueue()
        """One for all: a thread that has just ended something takes what comes next, before another one is awake."""

        self._begun = set[_Work[Any]]()
        self._limit: asyncio.TimerHandle | None = None
        self._free = asyncio.Semaphore(count_max)
        self._threads = self._busy = 0
        self._looking: asyncio.Task[None] | None = None
        self.left_behind = 0
        """Threads whose work has not returned in time."""

        self.is_dead = False
        """The file system answers nothing."""

    async def run(
        self,
        function: Callable[[], T],
        seconds_max: float,
        undo: Callable[[T], None] | None = None,
        *,
        is_write: bool = False,
        turn: asyncio.Semaphore | None = None,
        unbegun: Callable[[], None] | None = None,
    ) -> T:
        """Run it on a thread. OriginBusy: none was free; OriginUnreachable: it has not returned, or nothing does.

        `undo` gets the result of work whose caller has left. What is left behind `is_write`: it may still be done. It
        has its `turn` until it returns, left behind or not. `unbegun` is run in its stead if it never begins.
        """
        try:
            if self.is_dead or self.left_behind >= self._count_max:
                raise OriginUnreachable(f"{self._name} does not answer", may_be_done=False)
            if turn is not None:
                await self._take(turn, f"many writes wait for one key of {self._name}")
            try:
                await self._take(self._free, f"all {self._count_max} threads for {self._name} are busy")
            except BaseException:
                if turn is not None:
                    turn.release()
                raise
        except BaseException:
            if unbegun is not None:
                self.later(unbegun)
            raise
        # The caller's end cancels what it awaits.
        return await self._begin(function, seconds_max, undo, is_write=is_write, turn=turn)

    def run_now(self, function: Callable[[], T], seconds_max: float) -> asyncio.Future[T] | None:
        """As `run`, if a thread is free; else None."""
        if self.is_dead or self.left_behind or self._free.locked():
            return None
        with suppress(StopIteration):
            self._free.acquire().send(None)  # which has not to wait
        return self._begin(function, seconds_max, None, is_write=False)

    def _leave_behind(self) -> None:
        """Leave what is late, and look again when the next will be."""
        now = asyncio.get_running_loop().time()
        for work in [one for one in self._begun if one.due_at <= now]:
            self._begun.discard(work)
            if not work.outcome.done():
                message = f"{self._name} has not answered within {work.seconds_max:g} seconds"
                work.outcome.set_exception(OriginUnreachable(message, may_be_done=work.is_write))
                work.is_late = True
                self.left_behind += 1
                self._find_out()
        self._limit = None
        self._watch(min((one.due_at for one in self._begun), default=math.inf))

    def _watch(self, due_at: float) -> None:
        """Have `_leave_behind` run at this time, or before. One timer for all: most work needs none of its own."""
        if due_at == math.inf or (self._limit is not None and self._limit.when() <= due_at):
            return
        if self._limit is not None:
            self._limit.cancel()
        self._limit = asyncio.get_running_loop().call_at(due_at, self._leave_behind)

    async def _take(self, turn: asyncio.Semaphore, why_not: str) -> None:
        if not turn.locked():
            await turn.acquire()
            return
        try:
            with cancellation.turn():
                async with asyncio.timeout(self._wait_seconds_max):
                    await turn.acquire()
        except TimeoutError:
            raise OriginBusy(why_not) from None
        if self.is_dead:
            turn.release()
            raise OriginUnreachable(f"{self._name} does not answer", may_be_done=False)

    def _begin(
        self,
        function: Callable[[], T],
        seconds_max: float,
        undo: Callable[[T], None] | None,
        *,
        is_write: bool,
        turn: asyncio.Semaphore | None = None,
    ) -> asyncio.Future[T]:
        work = _Work(function, undo, self._ended, self.later)
        work.turn, work.is_write, work.seconds_max = turn, is_write, seconds_max
        work.due_at = asyncio.get_running_loop().time() + seconds_max
        self._begun.add(work)
        self._watch(work.due_at)
        self._put(work)
        return work.outcome

    def later(self, function: Callable[[], None]) -> None:
        """Run what nobody waits for, such as closing a file, when a thread is free."""
        self._put(_Work(function, None, self._ended_later, self.later))

    def _put(self, work: _Work[Any]) -> None:
        self._busy += 1
        if self._threads < min(self._busy, self._count_max):
            self._threads += 1
            threading.Thread(target=self._serve, name="files", daemon=True).start()
        self._queue.put(work)

    def _ended(self, work: _Work[Any]) -> None:
        self._begun.discard(work)
        self._busy -= 1
        self._free.release()
        if work.turn is not None:
            work.turn.release()
        self.left_behind -= work.is_late

    def _ended_later(self, work: _Work[Any]) -> None:
        self._busy -= 1
        work.outcome.add_done_callback(asyncio.Future.exception)  # nobody waits for it

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            del work

    def _find_out(self) -> None:
        if self._looking is None:
            self._looking = asyncio.create_task(self._ask(), name="look at a file system")

    async def _ask(self) -> None:
        """Look; the file system is dead from the moment on when that takes too long, until it returns."""
        work = _Work(self._look, None, lambda _: None, self.later)
        threading.Thread(target=work.run, name="look at a file system", daemon=True).start()
        try:
            done, _ = await asyncio.wait([work.outcome], timeout=self._look_seconds_max)
            self.is_dead = not done
            await asyncio.wait([work.outcome])
            with suppress(OSError):  # it has answered
                work.outcome.result()
        finally:
            self.is_dead, self._looking = False, None

    def end(self) -> None:
        for _ in range(self._threads):
            self._queue.put(None)

    async def aclose(self) -> None:
        """End the threads that are idle; those that hang end with the process."""
        self.end()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
