"""Has the kernel begin to write a file out while more of it is still to come, so that `fsync` has less to wait for.

`sync_file_range(2)` with SYNC_FILE_RANGE_WRITE: it makes nothing durable, and takes nothing from what `fsync` reports.
Where it is missing, forbidden (seccomp), or means nothing for a file system, `fsync` does it all, as ever.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

AT_ONCE_BYTES = 1024 * 1024
"""Begun in such pieces: the disk is busy early, and gets requests of a size that suits it."""

_WRITE = 2
_MEANS_NOTHING = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})


def _of_libc() -> Any:
    """None where there is none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_sync_file_range = _of_libc()


def begin_write_out(descriptor: int, position: int, count: int) -> None:
    """Of `count` bytes at `position`. May block while the disk has too much to do; OSError as the disk says it."""
    if _sync_file_range is not None and _sync_file_range(descriptor, position, count, _WRITE):
        error = ctypes.get_errno()
        if error not in _MEANS_NOTHING:
            raise OSError(error, os.strerror(error))
