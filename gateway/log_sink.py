"""Where log lines go: to a file descriptor, by a thread of its own.

What reads them may stop reading, go away, or be a file on a disk that is full: no process waits for that, or fails
because of it. Lines that find no room are lost, and counted: their number is told when some are taken again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

WAITING_BYTES_MAX = 1024 * 1024
"""Of lines that are not written yet."""

CLOSING_SECONDS = 1.0
"""So long a process that ends waits for its last lines."""


class LogSink:
    """Lines for one descriptor, in their order. `told_lost` is the line that tells how many were lost, `on_lost` is
    called with a number each time that some are. A `descriptor` that may change is asked for before each line; OSError
    then is as if it took nothing."""

    def __init__(
        self,
        descriptor: int | Callable[[], int],
        told_lost: Callable[[int], str],
        on_lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._descriptor = descriptor
        self._told_lost = told_lost
        self._on_lost = on_lost
        self._change = threading.Condition()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._lost = 0
        self._is_writing = self._is_closed = self._is_torn = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Take a line. Any thread; never waits, never fails."""
        line = text.encode("utf-8", "backslashreplace")
        with self._change:
            if self._is_closed or self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
                self._lost += 1
                self._on_lost(1)
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._change.notify_all()

    def flush(self) -> None:
        """Nothing: nobody waits."""

    def drain(self, seconds: float) -> bool:
        """Wait until all is written, or lost, so long at most; whether it is."""
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and not self._is_writing, seconds)

    def close(self) -> None:
        """Write what is left, as far as that is taken within a second."""
        self.drain(CLOSING_SECONDS)
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                self._is_writing = False
                self._change.notify_all()
                self._change.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if not self._waiting:
                    return
                lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
                lost, self._lost = self._lost, 0
                self._is_writing = True
            self._write([self._told_lost(lost).encode()] if lost else [], lines, lost)

    def _write(self, notice: list[bytes], lines: list[bytes], lost: int) -> None:
        for number, line in enumerate([*notice, *lines]):
            try:
                self._write_all(line)
            except OSError:  # its disk is full, or its reader has gone: others may be taken later
                missing = len(notice) + len(lines) - number
                with self._change:
                    self._lost += lost + len(lines) if number == 0 else missing
                self._on_lost(min(missing, len(lines)))
                return

    def _write_all(self, line: bytes) -> None:
        descriptor = self._descriptor if isinstance(self._descriptor, int) else self._descriptor()
        left = memoryview(b"\n" + line if self._is_torn else line)
        while left:
            left = left[os.write(descriptor, left) :]
            self._is_torn = bool(left)
