"""When to look into the journal again: soon after any process has committed something that is to be flushed.

The workers are other processes: they leave a stamp in shared memory (presence.py). Comparing it costs a fraction of a
microsecond and asks the journal nothing; it is done often while there is much news, and seldom when there is none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.clock import Clock

QUICK_SECONDS = 0.02
"""From one glance at the stamp to the next, while there is news."""

QUIET_SECONDS = 0.1
"""The same when there has been none for a while."""

LOOK_SECONDS = 1.0
"""Without any news it is looked into the journal all the same, for what nobody tells of."""

_QUIET_AFTER_SECONDS = 2.0


class Awaited:
    """For one task. `stamp` is the journal's, of what the task is about."""

    def __init__(self, stamp: Callable[[], bytes], clock: Clock) -> None:
        self._stamp = stamp
        self._clock = clock
        self._event = asyncio.Event()
        self._tell_at = math.inf

    def tell(self) -> None:
        """There is some, in this process."""
        self._event.set()

    def tell_at(self, monotonic: float) -> None:
        """There will be some at a time of the monotonic clock."""
        self._tell_at = min(self._tell_at, monotonic)

    async def wait(self) -> None:
        """Until there is some that was not waited for before, or some time is over."""
        await self._event.wait()
        self._event.clear()

    @asynccontextmanager
    async def coming(self) -> AsyncIterator[None]:
        """As long as this lasts other processes' news are noticed."""
        glancing = asyncio.create_task(self._glance())
        try:
            yield
        finally:
            glancing.cancel()
            await asyncio.gather(glancing, return_exceptions=True)

    async def _glance(self) -> None:
        seen, told_at = b"", self._clock.monotonic()
        quiet_from = told_at
        while True:
            stamp, now = self._stamp(), self._clock.monotonic()
            if stamp != seen:
                quiet_from = now + _QUIET_AFTER_SECONDS
            if stamp != seen or now >= min(self._tell_at, told_at + LOOK_SECONDS):
                seen, told_at = stamp, now
                if now >= self._tell_at:
                    self._tell_at = math.inf
                self.tell()
            await self._clock.sleep(QUICK_SECONDS if now < quiet_from else QUIET_SECONDS)
