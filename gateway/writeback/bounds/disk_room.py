"""What the buffer's file system has free, asked at most so often."""

from __future__ import annotations

import os
from pathlib import Path

LOOK_SECONDS = 0.05

MARGIN_BYTES = 8 * 1024 * 1024
"""Left free by bodies, for the journal: what takes things out of the buffer must be written down, too."""


class DiskRoom:
    """Of one directory. Event loop only: a look takes microseconds on a local disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._free_bytes = 0
        self._looked_at = float("-inf")

    def takes(self, size_bytes: int, now: float) -> bool:
        """Whether so much fits beside the margin; `now` is of the monotonic clock. OSError as the disk says it."""
        if not self._looked_at <= now < self._looked_at + LOOK_SECONDS:
            facts = os.statvfs(self._path)
            self._free_bytes, self._looked_at = facts.f_bavail * facts.f_frsize, now
        return self._free_bytes - MARGIN_BYTES >= size_bytes
