"""How fast work goes, and how long the rest takes: by what was seen of it of late. Pure.

Nothing is said of the rest before it is known. What goes on in large pieces stands still, and then jumps: one jump
tells little, and the first one comes late.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

SAMPLE_SECONDS = 1.0
"""What is seen sooner takes the place of what was seen last."""

KNOWN_SECONDS = 5.0
"""Nothing is said of the rest before it has gone on for so long, and has moved in MOVES_MIN looks."""

MOVES_MIN = 2


class ProgressRate:
    """Of one thing, whose bytes are noted now and then; what is older than the window does not count."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now: float, done_bytes: int) -> None:
        """So much is done at a time of a monotonic clock. Where it was more before, it has begun anew."""
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
        """How long so much takes at this rate; None while that is not known, and while nothing moves."""
        rate, seen = self.bytes_per_second, self._seen
        if not rate or seen[-1][0] - seen[0][0] < KNOWN_SECONDS:
            return None
        moves = sum(after > before for (_, before), (_, after) in pairwise(seen))
        return left_bytes / rate if moves >= MOVES_MIN else None
