"""Signals for an event loop: none is lost, however many come.

asyncio tells signals apart by bytes in a pipe: a storm of SIGHUP fills it, and a SIGTERM among them would be lost.
Python itself remembers which ones have come.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def answered(
    number: signal.Signals, answer: Callable[[], None], afterwards: signal.Handlers = signal.SIG_DFL
) -> Iterator[None]:
    """While this lasts, the running loop calls `answer` after one or several of these. Main thread."""
    loop = asyncio.get_running_loop()
    is_due = False

    def come(_number: int, _frame: FrameType | None) -> None:
        """Between any two steps of the main thread."""
        nonlocal is_due
        if not is_due:
            is_due = True
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(give)

    def give() -> None:
        nonlocal is_due
        is_due = False
        answer()

    signal.signal(number, come)
    signal.siginterrupt(number, False)
    try:
        yield
    finally:
        signal.signal(number, afterwards)
