"""JSON lines in a file that all processes append to, and that others may rename at any time, as logrotate does.

Whole lines are appended (O_APPEND), so lines of several processes never mix. A renamed file is made anew within a
second; until then lines go to the old one. No process waits for the disk: lines that it does not take in time are lost
and counted, and a later line reports them.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gateway.telemetry.log_sink import LogSink, json_line, timestamp

LOOK_SECONDS = 1.0
"""The interval between checks for a renamed file."""

_WAITING_BYTES_MAX = 32 * 1024 * 1024
"""The memory of unwritten lines. A DeleteObjects with 1,000 keys of 1 KiB takes a few MiB of it."""

_MODE = 0o600
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LogFile:
    """One process's lines. Any thread; it never waits and never fails."""

    def __init__(
        self,
        path: Path,
        process: str,
        on_lost: Callable[[int], None],
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once_bytes: int = 1,
    ) -> None:
        """OSError if the file cannot be opened. `on_lost` and `at_once_bytes` are as in LogSink."""
        self.now = wall
        self._process = process
        self._file = _RenamedFile(path, clock)
        self._file.descriptor()
        self._sink = LogSink(
            self._file.descriptor,
            lambda count: self.line({"event": "lost", "lines": count}, self.now()),
            on_lost,
            _WAITING_BYTES_MAX,
            is_shared=True,
            at_once_bytes=at_once_bytes,
            look_seconds=LOOK_SECONDS,
        )

    def line(self, fields: Mapping[str, Any], at: float) -> str:
        return json_line({"time": timestamp(at), "process": self._process, **fields})

    def write(self, line: str) -> None:
        self._sink.write(line)

    def write_all(self, lines: Iterable[str], count: int, size_bytes: int) -> None:
        """Write lines that the thread makes when it writes them; until then they take `size_bytes`."""
        self._sink.write_all(lines, count, size_bytes)

    def close(self) -> None:
        """Write the remaining lines, for a second at most."""
        self._sink.close()
        self._file.close()


class _RenamedFile:
    """A file that may be renamed. For one thread at a time."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._opened = -1
        self._looked_at = float("-inf")

    def descriptor(self) -> int:
        """Return the descriptor of the file that has the name, or had it a second ago; OSError."""
        now = self._clock()
        if self._opened < 0 or now >= self._looked_at + LOOK_SECONDS:
            self._looked_at = now
            if self._opened < 0 or not self._has_name():
                self._reopen()
        return self._opened

    def _reopen(self) -> None:
        """Open the name anew. If that fails, keep a renamed file, but not a removed one, which has no reader."""
        try:
            opened = _open_file(self._path)
        except OSError:
            if self._opened >= 0 and os.fstat(self._opened).st_nlink:
                return
            self.close()
            raise
        self.close()
        self._opened = opened

    def close(self) -> None:
        opened, self._opened = self._opened, -1
        if opened >= 0:
            os.close(opened)

    def _has_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._opened))
        except FileNotFoundError:
            return False


def _open_file(path: Path) -> int:
    """Open a plain file; OSError for anything else: a FIFO or a device could hold up the thread for ever."""
    try:
        is_plain = stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        is_plain = True  # it is made
    if not is_plain:
        raise OSError(errno.EINVAL, "no plain file", os.fspath(path))
    opened = os.open(path, _FLAGS, _MODE)
    if not stat.S_ISREG(os.fstat(opened).st_mode):  # it has come just now
        os.close(opened)
        raise OSError(errno.EINVAL, "no plain file", os.fspath(path))
    return opened
