"""The system's clock, set ahead: for clients that sign by the time of now."""

from __future__ import annotations

from gateway.clock import SystemClock


class SetClock(SystemClock):
    """That can be set ahead."""

    ahead_seconds = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_seconds

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds
