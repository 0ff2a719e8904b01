"""A clock that never waits: it remembers how long it was asked to sleep, and jumps ahead by that."""

from __future__ import annotations

import asyncio
import time


class JumpingClock:
    """Wall time is real plus what was slept; `slept` lists the sleeps."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._jumped = 0.0

    def now(self) -> float:
        return time.time() + self._jumped

    def monotonic(self) -> float:
        return self._jumped

    def jump(self, seconds: float) -> None:
        self._jumped += seconds

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._jumped += seconds
        await asyncio.sleep(0)
