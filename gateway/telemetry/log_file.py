"""JSON lines in a file that all processes append to, and that others may rename at any time, as logrotate does.

Whole lines are appended (O_APPEND), so lines of several processes never mix. A file that was renamed is made anew
within a second; lines that come meanwhile go to the old one. Nobody waits for the disk: what it does not take, or not
in time, is lost, counted, and told in a line.
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
"""How often is looked whether the file was renamed."""

_WAITING_BYTES_MAX = 32 * 1024 * 1024
"""Of what is not written yet. A DeleteObjects names up to 1,000 keys of 1 KiB, which takes a few MiB here."""

_MODE = 0o600
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LogFile:
    """One process's lines. Any thread; never waits, never fails."""

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
        """`on_lost` is called with a number each time that lines are lost. `at_once_bytes`: LogSink. OSError where the
        file cannot be opened."""
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
        """Soon, by a thread."""
        self._sink.write(line)

    def write_all(self, lines: Iterable[str], count: int, size_bytes: int) -> None:
        """Lines that the thread makes when it writes them; until then they take `size_bytes`."""
        self._sink.write_all(lines, count, size_bytes)

    def close(self) -> None:
        """Write what is left, as far as that is taken within a second."""
        self._sink.close()
        self._file.close()


class _RenamedFile:
    """For one thread at a time."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._opened = -1
        self._looked_at = float("-inf")

    def descriptor(self) -> int:
        """Of the file that has the name now, or had it a second ago; OSError."""
        now = self._clock()
        if self._opened < 0 or now >= self._looked_at + LOOK_SECONDS:
            self._looked_at = now
            if self._opened < 0 or not self._has_name():
                self._reopen()
        return self._opened

    def _reopen(self) -> None:
        """The renamed one goes on where no other can be opened; not one that is removed: nobody would read it."""
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
        """Let go of the file."""
        opened, self._opened = self._opened, -1
        if opened >= 0:
            os.close(opened)

    def _has_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._opened))
        except FileNotFoundError:
            return False


def _open_file(path: Path) -> int:
    """A plain file: OSError where anything else has its name. A FIFO or a device might take lines and keep the thread
    for ever."""
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
