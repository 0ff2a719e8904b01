"""An event loop on which time passes when nobody has anything to do, and threads that are turns of it."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from itertools import count
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WALL_START = 1_767_225_600.0
"""2026-01-01 00:00:00 UTC."""


class NothingLeft(RuntimeError):
    """Everybody waits for something that will never come."""


class _JumpingSelector(selectors.BaseSelector):
    """Has no file to wait for: instead of waiting, it moves the clock."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft("no timer is set, and nothing is ready")
        self.elapsed += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Deterministic: one thread, no socket, no clock of the machine's. What others run on threads runs at once."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.elapsed

    def jump(self, seconds: float) -> None:
        """Time passes, and nobody notices."""
        self._jumping.elapsed += seconds

    def _write_to_self(self) -> None:
        """Nobody sleeps."""

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

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


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
