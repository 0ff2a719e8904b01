"""What a thread has written that goes to a device, as the kernel counts it.

It counts what was passed to it, and what of its memory had to be written back for that. Both are more than what the
device gets: pages that are written twice are passed twice, and where the kernel keeps memory in larger pieces, a whole
piece counts for each page. What counts here is the lesser of the two.
"""

from __future__ import annotations

import os
import threading

_PATH = "/proc/thread-self/io"


class WrittenBytes:
    """The counters of whichever thread asks. They stand still where the kernel does not count."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def mark(self) -> tuple[int, int]:
        """Where the counters stand."""
        opened = getattr(self._of_thread, "opened", None)
        if opened is None:
            opened = self._of_thread.opened = _Opened()
        return opened.read()

    def since(self, mark: tuple[int, int]) -> int:
        """What this thread has written since a mark of its own."""
        passed, written_back = self.mark()
        return min(passed - mark[0], written_back - mark[1])


class _Opened:
    """One thread's file, closed when the thread is gone."""

    def __init__(self) -> None:
        try:
            self._descriptor = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self) -> tuple[int, int]:
        """`wchar` and `write_bytes`, which stand second and sixth."""
        if self._descriptor < 0:
            return 0, 0
        words = os.pread(self._descriptor, 512, 0).split()
        return int(words[3]), int(words[11])

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
