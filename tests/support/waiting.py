"""Wait for what other tasks, threads and processes bring about without telling anybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS_MAX = 100.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.005, 0.1


def eventually(
    holds: Callable[[], object],
    what: str | Callable[[], str] = "it never came to it",
    *,
    seconds: float = SECONDS_MAX,
) -> None:
    """Return soon after it holds; or fail, saying what did not."""
    deadline, pause = time.monotonic() + seconds, _PAUSE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(pause)
        pause = min(pause * 1.5, _PAUSE_SECONDS_MAX)  # what takes long is asked seldom: to ask takes CPU from it


async def until(holds: Callable[[], object]) -> None:
    """The same for what the event loop is about to bring about; TimeoutError when it does not."""
    async with asyncio.timeout(SECONDS_MAX):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
