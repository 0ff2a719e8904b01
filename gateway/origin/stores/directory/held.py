"""Open files that several threads use, and locks of parts of them."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.core.errors import OriginBodyError

_FLOCK = struct.Struct("hhqqi")
_IS_LOCKED = frozenset({errno.EAGAIN, errno.EACCES})


class HeldFile:
    """A descriptor that the last thread closes: its number must not become another file's under one that uses it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._lock = threading.Lock()
        self._users, self._is_closed = 0, False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise OriginBodyError("nobody uses this file any more")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                is_last = self._is_closed and not self._users
            if is_last:
                os.close(self.descriptor)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Close it when the last thread has done with it. Idempotent."""
        with self._lock:
            is_last, self._is_closed = not (self._is_closed or self._users), True
        if is_last:
            os.close(self.descriptor)


def lock(descriptor: int, first: int = 0, size_bytes: int = 0) -> None:
    """Wait for a range (0 bytes: to the end) that no other open file has locked; on other nodes, too. OSError."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, size_bytes, 0))


def has_locked(descriptor: int, first: int = 0, size_bytes: int = 0) -> bool:
    """Lock a range unless another open file has it. It ends when the last descriptor, and the last write, does."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, size_bytes, 0))
    except OSError as error:
        if error.errno in _IS_LOCKED:
            return False
        raise
    return True
