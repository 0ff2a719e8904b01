"""The rate of work and the time that the rest takes, from recent observations. Pure.

The time left is unknown at first. Work in large pieces stands still, and then jumps: one jump tells little, and the
first one comes late.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

SAMPLE_SECONDS = 1.0
"""An observation within this time replaces the last one."""

KNOWN_SECONDS = 5.0
"""Seconds of work, with MOVES_MIN moves, before the time left is given."""

MOVES_MIN = 2


class ProgressRate:
    """The rate of one work, whose bytes are noted now and then; observations older than the window do not count."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now: float, done_bytes: int) -> None:
        """Note the bytes done at a time of a monotonic clock. A smaller number than before means a new beginning."""
        seen = self._seen
        if seen and done_bytes < seen[-1][1]:
            seen.clear()
        if len(seen) > 1 and now - seen[-2][0] < SAMPLE_SECONDS:
            seen.pop()
        seen.append((now, done_bytes))
        while len(seen) > 2 and now - seen[1][0] >= self._window_seconds:
            seen.popleft()

    def begin_anew(self) -> None:
        self._seen.clear()

    @property
    def bytes_per_second(self) -> float | None:
        """None while nothing can be said."""
        if len(self._seen) < 2:
            return None
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first) if last > first else None

    def seconds_left(self, left_bytes: int) -> float | None:
        """Return the seconds for the rest at this rate; None while unknown, and while nothing moves."""
        rate, seen = self.bytes_per_second, self._seen
        if not rate or seen[-1][0] - seen[0][0] < KNOWN_SECONDS:
            return None
        moves = sum(after > before for (_, before), (_, after) in pairwise(seen))
        return left_bytes / rate if moves >= MOVES_MIN else None
