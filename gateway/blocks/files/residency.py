"""Are a file's bytes in memory, and have they come from the device?

`cachestat(2)` (Linux 6.5) counts the cached pages of a range in one call. Where it is missing, forbidden (seccomp), or
blind (it sees nothing on overlayfs), `preadv2(RWF_NOWAIT)` of one byte at both ends of every chunk answers instead.
Neither is a promise: a page may be reclaimed the moment after.
"""

from __future__ import annotations

import ctypes
import os

from gateway.blocks.layout import CHUNK_BYTES

_CACHESTAT = 451
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Residency:
    """Answers for one thread: the buffers of the system calls are reused."""

    def __init__(self, *, cachestat: bool = True) -> None:
        self._cachestat = cachestat
        self._system_call = ctypes.CDLL(None, use_errno=True).syscall
        self._range = (ctypes.c_uint64 * 2)()
        self._counts = (ctypes.c_uint64 * 5)()
        self._byte = bytearray(1)

    def resident(self, descriptor: int, offset: int, count: int) -> bool:
        """Whether all of `count` bytes at `offset` were in memory just now."""
        if not self._cachestat:
            return self._sampled(descriptor, offset, count)
        cached_pages = self._cached_pages(descriptor, offset, count)
        if cached_pages is None or (cached_pages == 0 and self._blind(descriptor, offset)):
            self._cachestat = False
            return self._sampled(descriptor, offset, count)
        return cached_pages == (offset + count - 1) // _PAGE_BYTES - offset // _PAGE_BYTES + 1

    def unwritten(self, descriptor: int, offset: int, count: int) -> bool:
        """Whether all of these bytes wait in memory to be written to the device.

        They are then what was written to the file: what has come from the device does not wait so. False where nobody
        can tell.
        """
        pages = (offset + count - 1) // _PAGE_BYTES - offset // _PAGE_BYTES + 1
        if not self._cachestat or self._cached_pages(descriptor, offset, count) is None:
            return False
        return int(self._counts[1]) == pages

    def _cached_pages(self, descriptor: int, offset: int, count: int) -> int | None:
        self._range[0], self._range[1] = offset, count
        if self._system_call(_CACHESTAT, descriptor, self._range, self._counts, 0):
            return None
        return self._counts[0]

    def _blind(self, descriptor: int, offset: int) -> bool:
        """Whether a byte is in memory and cachestat denies it; asked again, as a thread may be reading the file."""
        return self._readable_now(descriptor, offset) and self._cached_pages(descriptor, offset, 1) == 0

    def _sampled(self, descriptor: int, offset: int, count: int) -> bool:
        stop = offset + count
        ends = ((start, min(start + CHUNK_BYTES, stop) - 1) for start in range(offset, stop, CHUNK_BYTES))
        return all(
            self._readable_now(descriptor, first) and self._readable_now(descriptor, last) for first, last in ends
        )

    def _readable_now(self, descriptor: int, offset: int) -> bool:
        try:
            return os.preadv(descriptor, [self._byte], offset, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN: not in memory; EOPNOTSUPP: this file system cannot tell, so a thread reads
            return False
