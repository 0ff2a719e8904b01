"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """`advance` is the only thing that makes time pass. Starts at 2026-01-01 00:00:00 UTC."""

    def __init__(self) -> None:
        self._wall_start = 1_767_225_600.0
        self._elapsed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._wall_start + self._elapsed

    def set_wall(self, by_seconds: float) -> None:
        """Somebody sets the wall clock, forward or back."""
        self._wall_start += by_seconds

    def monotonic(self) -> float:
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + seconds, next(self._order), wake))
        await wake

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass; sleepers wake in order, and what they then do has happened when this returns."""
        end = self._elapsed + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self._elapsed, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
            await _let_tasks_run()
        self._elapsed = end
        await _let_tasks_run()


async def _let_tasks_run() -> None:
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(5):
        await asyncio.sleep(0)
        if not ready:
            return
