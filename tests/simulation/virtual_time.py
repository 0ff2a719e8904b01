"""An event loop on which time passes when nobody has anything to do, and threads that are turns of it."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WALL_START = 1_767_225_600.0
"""2026-01-01 00:00:00 UTC."""


class NothingLeft(RuntimeError):
    """Everybody waits for something that will never come."""


class _NoFiles(selectors.BaseSelector):
    """Has no file to wait for."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class _Turn(asyncio.TimerHandle):
    """`asyncio.Handle` and `TimerHandle` in one; making and comparing those took longer than what they were for."""

    __slots__ = ("args", "callback", "context", "moment")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None, moment: float
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context
        self.moment = moment

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.moment


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Deterministic: one thread, no socket, no clock of the machine's. What others run on threads runs at once."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self._turns: deque[_Turn] = deque()
        self._timers: list[tuple[float, int, _Turn]] = []
        self._timer_numbers = count()
        self._is_ending = False
        super().__init__(_NoFiles())

    def time(self) -> float:
        return self.elapsed

    def jump(self, seconds: float) -> None:
        """Time passes, and nobody notices."""
        self.elapsed += seconds

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        turn = _Turn(callback, args, context, 0.0)
        self._turns.append(turn)
        return turn

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.elapsed + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        turn = _Turn(callback, args, context, when)
        heappush(self._timers, (when, next(self._timer_numbers), turn))
        return turn

    def stop(self) -> None:
        self._is_ending = True
        super().stop()

    def close(self) -> None:
        self._turns.clear()
        self._timers.clear()
        super().close()

    def _run_once(self) -> None:
        """Go on until somebody stops it. Where nobody has a turn, time moves to the next timer."""
        turns, timers = self._turns, self._timers
        while True:
            while timers and (timers[0][2].callback is None or timers[0][0] <= self.elapsed):
                turn = heappop(timers)[2]
                if turn.callback is not None:
                    turns.append(turn)
            if not turns and not self._is_ending:
                if not timers:
                    raise NothingLeft("no timer is set, and nothing is ready")
                self.elapsed = timers[0][0]
                continue
            for _ in range(len(turns)):
                turn = turns.popleft()
                if turn.callback is None:
                    continue
                try:
                    turn.context.run(turn.callback, *turn.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"in {turn.callback!r}", "exception": error})
            if self._is_ending:
                self._is_ending = False
                return

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class NumberedTask(asyncio.Task[Any]):
    """Sets of tasks are gone through in the same order in every replay: by numbers, not by addresses."""

    _numbers = count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class VirtualClock:
    """`Clock` of a node whose wall clock may be wrong by `skew_seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, skew_seconds: float = 0.0) -> None:
        self._loop = loop
        self.skew_seconds = skew_seconds

    def now(self) -> float:
        return WALL_START + self._loop.time() + self.skew_seconds

    def monotonic(self) -> float:
        return self._loop.time()

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(seconds)


_pending: dict[int, Callable[[], None]] = {}
"""What has been given to threads and has not begun, in order."""


class VirtualFuture(Future[Any]):
    """Who waits for it on a thread has the other threads go on."""

    def result(self, timeout: float | None = None) -> Any:
        while not self.done() and _pending:
            _pending[next(iter(_pending))]()
        return super().result(timeout if self.done() else 0.0)


class VirtualThreads:
    """`ThreadPoolExecutor` whose jobs are turns of the loop, after as long as the dice say; in order."""

    dice = Random(0)
    pause_seconds_max = 0.002
    _numbers = count()

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "", **_: Any) -> None:
        self._free_at = 0.0
        self._own: list[int] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> VirtualFuture:
        future, number = VirtualFuture(), next(self._numbers)
        context = contextvars.copy_context()

        def job() -> None:
            if _pending.pop(number, None) is None or not future.set_running_or_notify_cancel():
                return
            self._own.remove(number)
            try:
                result = context.run(fn, *args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        _pending[number] = job
        self._own.append(number)
        loop = _running_loop()
        if loop is None:
            job()
            return future
        self._free_at = max(loop.time(), self._free_at) + self.dice.random() * self.pause_seconds_max
        loop.call_at(self._free_at, job)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for number in list(self._own):
            _pending.get(number, bool)()


def begin_anew(dice: Random) -> None:
    """Nothing is left of another simulation."""
    _pending.clear()
    VirtualThreads.dice = dice
    NumberedTask._numbers = count()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
