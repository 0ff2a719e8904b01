"""Tells a task when to read the journal again: soon after any process has committed something to flush.

The workers are other processes: they leave a version in shared memory (pending_key_filter.py). A poll takes a fraction
of a microsecond and does not touch the journal; polls are frequent while it changes, and rare otherwise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.core.clock import Clock

QUICK_SECONDS = 0.02
"""Seconds between two polls while the version changes."""

QUIET_SECONDS = 0.1
"""Seconds between two polls when it has not changed for a while."""

LOOK_SECONDS = 1.0
"""Seconds after which the task reads the journal even without a change, for events that no process reports."""

_QUIET_AFTER_SECONDS = 2.0


class ChangeNotifier:
    """Notifies one task. `version` returns the version of the part of the journal that the task reads."""

    def __init__(self, version: Callable[[], bytes], clock: Clock) -> None:
        self._version = version
        self._clock = clock
        self._event = asyncio.Event()
        self._notify_at = math.inf

    def notify(self) -> None:
        """Report a change in this process."""
        self._event.set()

    def notify_at(self, monotonic: float) -> None:
        """Report that something will be due at a monotonic time."""
        self._notify_at = min(self._notify_at, monotonic)

    async def wait(self) -> None:
        """Wait for a change since the last wait, a due time, or LOOK_SECONDS."""
        await self._event.wait()
        self._event.clear()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Notice changes by other processes while the context lasts."""
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
