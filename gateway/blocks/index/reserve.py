"""Room on the disk that others have a right to and have not taken yet: the cache grows no further than up to it.

The write-back buffer is such another: what it may hold must find room, whatever the cache would like to keep. Where
other files on the disk leave less than that, fills evict for what they bring, and as much again, until it is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.blocks.index.capacity import Capacity

LOOK_SECONDS = 0.05
"""What a look at the file system says holds so long; what was granted since is counted."""

GIVEN_BACK_TIMES = 2
"""Of what a fill brings, so much leaves at most where room is missing."""


class Reserve:
    """What one process's fills must leave free: `size_bytes`, kept up to date by whoever knows it. Index thread only.

    `free_bytes` says what the file system has, `promised_bytes` what fills in progress have not all written yet.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int],
        promised_bytes: Callable[[], int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size_bytes = 0
        self._free_bytes = free_bytes
        self._promised_bytes = promised_bytes
        self._monotonic = monotonic
        self._left_bytes = 0
        self._looked_at = float("-inf")

    def capacity_for(self, needed_bytes: int, used_bytes: Callable[[], int], capacity: Capacity) -> Capacity:
        """What the cache may have in all when it takes so much more; `used_bytes` is what it has. OSError."""
        if not self.size_bytes:
            return capacity
        now = self._monotonic()
        if now >= self._looked_at + LOOK_SECONDS:
            self._left_bytes, self._looked_at = self._free_bytes() - self._promised_bytes(), now
        missing_bytes = self.size_bytes + needed_bytes - self._left_bytes
        if missing_bytes <= 0:
            self._left_bytes -= needed_bytes
            return capacity
        self._looked_at = float("-inf")  # what leaves now is room at once
        going_bytes = min(missing_bytes, GIVEN_BACK_TIMES * needed_bytes)
        return capacity.lowered_to(max(0, used_bytes() + needed_bytes - going_bytes))
