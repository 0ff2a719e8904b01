"""Writes whose outcome nobody knows: the origin has not answered, and may carry them out later.

What is learned of a key meanwhile may be of before. So a write in doubt is ended later than others: what was learned is
forgotten once more then, and until then LIST asks the origin about its keys.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import lmdb
import structlog

from gateway.clock import Clock
from gateway.errors import StoreUnavailable

IN_DOUBT_SECONDS = 60.0
"""A request of which nothing has been heard is carried out within so long, or never."""

IN_DOUBT_MAX = 10_000
"""With more, the oldest is ended sooner: an origin that is away must not fill the memory."""

_log = structlog.get_logger("forebay.catalog")


class InDoubtWrites:
    """Those of this process, each with what ends it. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], Awaitable[None]]]] = deque()
        self._ending: asyncio.Task[None] | None = None

    def add(self, end: Callable[[], Awaitable[None]]) -> None:
        """Call this when the time of doubt is over; not when the gateway stops before."""
        self._waiting.append((self._clock.monotonic() + IN_DOUBT_SECONDS, end))
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_all(), name="writes in doubt")

    async def close(self) -> None:
        """Nothing is ended any more."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_all(self) -> None:
        while self._waiting:
            due, _ = self._waiting[0]
            left = due - self._clock.monotonic()
            if left > 0 and len(self._waiting) <= IN_DOUBT_MAX:
                await self._clock.sleep(min(left, 1.0))
                continue
            _, end = self._waiting.popleft()
            try:
                await end()
            except (OSError, lmdb.Error, StoreUnavailable):  # the others are to be ended all the same
                _log.exception("a write in doubt could not be ended")
        self._ending = None
