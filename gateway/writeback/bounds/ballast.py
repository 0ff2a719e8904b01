"""Room set aside beside the journal, given up when the disk is full: what leaves the buffer must be written down, too.

Otherwise a disk that somebody else has filled would keep the flush from telling the journal what the origin has, and so
from giving any room back. The log grows to a few megabytes and is then written over from its start: so much is enough
for any number of changes. All of this blocks.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gateway.writeback.bounds.bounds import MARGIN_BYTES

SIZE_BYTES = MARGIN_BYTES
_FILE_MODE = 0o600


class Ballast:
    """Of one buffer, in the process that flushes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ballast"

    def keep(self) -> None:
        """Set the room aside, where it is not and there is some; else later."""
        with suppress(OSError):
            if self._path.exists() and self._path.stat().st_size == SIZE_BYTES:
                return
            facts = os.statvfs(self._path.parent)
            if facts.f_bavail * facts.f_frsize >= 2 * SIZE_BYTES:
                self._take()

    def give_up(self) -> bool:
        """Whether there was any."""
        try:
            os.unlink(self._path)
        except OSError:
            return False
        return True

    def _take(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, _FILE_MODE)
        try:
            os.posix_fallocate(descriptor, 0, SIZE_BYTES)
        finally:
            os.close(descriptor)
