"""Time as an argument, so that tests own it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the gateway asks of time. Durations are monotonic; only signatures and answers need the wall."""

    def now(self) -> float:
        """Wall clock: seconds since 1970-01-01 UTC."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, the same for all processes until the next boot; never goes backwards."""

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for `seconds`."""


class SystemClock:
    """The machine's own clocks and the running event loop's timer."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine is suspended

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
