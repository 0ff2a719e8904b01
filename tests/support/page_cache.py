"""Taking a file's pages out of memory, those that this process has mapped included."""

from __future__ import annotations

import ctypes
import os

_MADV_PAGEOUT = 21
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def page_out(address: int, count: int) -> None:
    """Have the kernel reclaim what this process alone has mapped at an address, as it does when memory is short."""
    if _libc.madvise(address, count, _MADV_PAGEOUT):
        raise OSError(ctypes.get_errno(), "madvise")


def drop_unmapped(descriptor: int, offset: int, count: int) -> None:
    """Drop pages that nobody has mapped."""
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
