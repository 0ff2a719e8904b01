"""What a thread has the kernel write to devices, as the kernel counts it: pages that were clean before."""

from __future__ import annotations

import os
import threading

_PATH = "/proc/thread-self/io"
_FIELD = b"\nwrite_bytes: "


class WrittenBytes:
    """The counter of whichever thread asks. It stands still where the kernel does not count."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __call__(self) -> int:
        opened = getattr(self._of_thread, "opened", None)
        if opened is None:
            opened = self._of_thread.opened = _Opened()
        return opened.read()


class _Opened:
    """One thread's file, closed when the thread is gone."""

    def __init__(self) -> None:
        try:
            self._descriptor = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self) -> int:
        if self._descriptor < 0:
            return 0
        _, _, rest = os.pread(self._descriptor, 512, 0).partition(_FIELD)
        return int(rest.partition(b"\n")[0] or b"0")

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
