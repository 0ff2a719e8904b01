"""How fast a job goes, of late, and how long it will take at that rate. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 30.0


class Rate:
    """Bytes done per second over the last WINDOW_SECONDS."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now_seconds: float, bytes_done: int) -> None:
        """So many bytes are done at a time of the monotonic clock."""
        self._seen.append((now_seconds, bytes_done))
        while len(self._seen) > 2 and self._seen[1][0] <= now_seconds - WINDOW_SECONDS:
            self._seen.popleft()

    @property
    def bytes_per_second(self) -> float | None:
        """None while nothing can be said."""
        if len(self._seen) < 2:
            return None
        (begun, before), (now, after) = self._seen[0], self._seen[-1]
        return max(0, after - before) / (now - begun) if now > begun else None

    def seconds_left(self, bytes_left: int) -> float | None:
        """At this rate; None while nothing can be said, and while nothing moves."""
        rate = self.bytes_per_second
        return bytes_left / rate if rate else None
