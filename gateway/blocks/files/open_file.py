"""A descriptor that several readers, and threads on their behalf, use at once, closed when the last lets go."""

from __future__ import annotations

import os
import threading


class OpenFile:
    """Counts who uses `descriptor`; begins with one user.

    A read in a thread outlives the task that waited for it, and a descriptor closed under it may by then belong to
    another file: whoever gives the descriptor to a thread holds it for as long as the thread runs. Thread-safe.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._users = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """One more user; only by somebody who is a user already."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """One user less; the last closes."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self.descriptor)

    def __del__(self) -> None:
        # A body that is closed before its first piece never runs: this closes what it held when its client left.
        if self._users > 0:
            self._users = 0
            os.close(self.descriptor)
