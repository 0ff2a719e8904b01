"""How fast each checkpoint gets to the origin, by what was seen of it within the last minute. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW_SECONDS = 60.0
"""What was seen before does not count."""

SAMPLE_SECONDS = 1.0
"""What is seen sooner after the last sample is not kept."""


class FlushRates:
    """Bytes that the origin has of each, as they were seen. It holds as many as are given to `see`."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, int]]] = {}

    def see(self, flushed_bytes: Mapping[int, int], now: float) -> None:
        """Of every checkpoint, by id, that the origin does not have whole; others are forgotten. `now` is monotonic."""
        self._seen = {one: self._seen.get(one, deque()) for one in flushed_bytes}
        for one, size_bytes in flushed_bytes.items():
            seen = self._seen[one]
            if seen and size_bytes < seen[-1][1]:  # another save
                seen.clear()
            if not seen or now - seen[-1][0] >= SAMPLE_SECONDS:
                seen.append((now, size_bytes))
            while len(seen) > 2 and now - seen[1][0] >= WINDOW_SECONDS:
                seen.popleft()

    def left_seconds(self, checkpoint_id: int, flushed_bytes: int, left_bytes: int, now: float) -> float | None:
        """How long the rest takes at that rate; None: nothing has moved, or it was not seen for a second yet."""
        seen = self._seen.get(checkpoint_id)
        if not seen or now - seen[0][0] < SAMPLE_SECONDS:
            return None
        at, before = seen[0]
        moved_bytes = flushed_bytes - before
        return left_bytes * (now - at) / moved_bytes if moved_bytes > 0 else None
