"""A file that lines are appended to, and that others may rename at any time, as logrotate does."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

LOOK_SECONDS = 1.0
"""How often is looked whether the file was renamed."""

_MODE = 0o600
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class RenamedFile:
    """A file to append to that others rename. For one thread at a time."""

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
