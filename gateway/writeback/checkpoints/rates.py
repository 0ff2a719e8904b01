"""How fast each checkpoint gets to the origin, by what was seen of it within the last minute. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.progress_rate import ProgressRate

WINDOW_SECONDS = 60.0
"""Older samples do not count."""


class FlushRates:
    """The flush progress of checkpoints: of as many as the last `see` was given."""

    def __init__(self) -> None:
        self._rates: dict[int, ProgressRate] = {}

    def see(self, flushed_bytes: Mapping[int, int], now: float) -> None:
        """Sample the flushed bytes of all unfinished checkpoints, by id; forget others. `now` is monotonic."""
        self._rates = {one: self._rates.get(one) or ProgressRate(WINDOW_SECONDS) for one in flushed_bytes}
        for one, size_bytes in flushed_bytes.items():
            self._rates[one].note(now, size_bytes)

    def left_seconds(self, checkpoint_id: int, left_bytes: int) -> float | None:
        """Return the seconds that the rest takes at that rate; None: unknown, or nothing moves."""
        rate = self._rates.get(checkpoint_id)
        return None if rate is None else rate.seconds_left(left_bytes)
