"""Whether the origin can be reached at all: a connection attempt, remembered for a few seconds."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from gateway.clock import Clock, SystemClock
from gateway.config import OriginSettings

REMEMBERED_SECONDS = 5.0
TIMEOUT_SECONDS = 2.0


class OriginProbe:
    """Connects to the origin, or to the proxy in front of it. However many ask, one attempt runs at a time."""

    def __init__(self, origin: OriginSettings, clock: Clock | None = None) -> None:
        url = urlsplit(origin.proxy.get_secret_value() if origin.proxy else origin.endpoint_url)
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._clock = clock or SystemClock()
        self._lock = asyncio.Lock()
        self._known: tuple[float, bool] | None = None

    async def reachable(self) -> bool:
        """The answer, at most REMEMBERED_SECONDS old."""
        async with self._lock:
            now = self._clock.monotonic()
            if self._known is None or now - self._known[0] > REMEMBERED_SECONDS:
                self._known = (now, await self._connects())
            return self._known[1]

    async def _connects(self) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True
