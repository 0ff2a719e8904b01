"""A rate in bytes per second as a bucket of tokens: pure arithmetic, the time is an argument."""

from __future__ import annotations

import math

BURST_SECONDS = 0.1
"""What an idle bucket saves up: this much of its rate. It also makes good for timers that ring late."""


class TokenBucket:
    """Whoever finds no debt may pass with a piece of any size, and what the bucket lacks for it becomes debt.

    So in any span of t seconds at most `rate * (t + BURST_SECONDS)` and one piece pass. `now` is monotonic, in seconds.
    """

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._level = rate * BURST_SECONDS
        self._settled_at = now

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self._rate

    def set_rate(self, rate: float, now: float) -> None:
        """From `now` on; what was saved or owed before stays, the savings as far as the new rate allows any."""
        self._settle(now)
        self._rate = rate
        self._level = min(self._level, rate * BURST_SECONDS)

    def delay_seconds(self, now: float) -> float:
        """Until the next piece may pass; 0 is now."""
        self._settle(now)
        if self._level >= 0:
            return 0.0
        return -self._level / self._rate if self._rate else math.inf

    def take(self, count: int) -> None:
        """`count` bytes pass now: allowed or not, they are on the account."""
        self._level -= count

    def give_back(self, count: int) -> None:
        """`count` bytes that were taken did not pass."""
        self._level = min(self._level + count, self._rate * BURST_SECONDS)

    def _settle(self, now: float) -> None:
        if now > self._settled_at:
            self._level = min(self._level + (now - self._settled_at) * self._rate, self._rate * BURST_SECONDS)
            self._settled_at = now
