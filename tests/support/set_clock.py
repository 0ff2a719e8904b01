"""The system's clock, set ahead, or stopped: for clients that sign by the time of now."""

from __future__ import annotations

from gateway.core.clock import SystemClock


class SetClock(SystemClock):
    """That can be set ahead."""

    ahead_seconds = 0.0
    _stopped: tuple[float, float] | None = None

    def stop(self) -> None:
        """Time passes no more but by being set ahead, however slow the machine is."""
        self._stopped = super().now(), super().monotonic()

    def now(self) -> float:
        return (super().now() if self._stopped is None else self._stopped[0]) + self.ahead_seconds

    def monotonic(self) -> float:
        return (super().monotonic() if self._stopped is None else self._stopped[1]) + self.ahead_seconds
