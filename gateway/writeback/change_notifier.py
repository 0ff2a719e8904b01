"""When to look into the journal again: soon after any process has committed something that is to be flushed.

The workers are other processes: they leave a version in shared memory (pending_key_filter.py). Polling it costs a
fraction of a microsecond and asks the journal nothing; that happens often while it changes, and seldom otherwise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.core.clock import Clock

QUICK_SECONDS = 0.02
"""From one poll to the next, while the version changes."""

QUIET_SECONDS = 0.1
"""The same when it has not changed for a while."""

LOOK_SECONDS = 1.0
"""Without any change the journal is looked into all the same, for what nobody notifies of."""

_QUIET_AFTER_SECONDS = 2.0


class ChangeNotifier:
    """For one task. `version` is the journal's, of what the task is about."""

    def __init__(self, version: Callable[[], bytes], clock: Clock) -> None:
        self._version = version
        self._clock = clock
        self._event = asyncio.Event()
        self._notify_at = math.inf

    def notify(self) -> None:
        """Something has changed, in this process."""
        self._event.set()

    def notify_at(self, monotonic: float) -> None:
        """Something will be due at a time of the monotonic clock."""
        self._notify_at = min(self._notify_at, monotonic)

    async def wait(self) -> None:
        """Until there is a change that was not waited for before, or some time is over."""
        await self._event.wait()
        self._event.clear()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """As long as this lasts, changes by other processes are noticed."""
        polling = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    async def _poll(self) -> None:
        seen, notified_at = b"", self._clock.monotonic()
        quiet_from = notified_at
        while True:
            version, now = self._version(), self._clock.monotonic()
            if version != seen:
                quiet_from = now + _QUIET_AFTER_SECONDS
            if version != seen or now >= min(self._notify_at, notified_at + LOOK_SECONDS):
                seen, notified_at = version, now
                if now >= self._notify_at:
                    self._notify_at = math.inf
                self.notify()
            await self._clock.sleep(QUICK_SECONDS if now < quiet_from else QUIET_SECONDS)
