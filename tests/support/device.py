"""Bytes changed on the device under a mounted file system: neither the page cache nor the file's times know of it."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_FIEMAP = 0xC020660B
_FIEMAP_FLAG_SYNC = 1
_EXTENT_LAST, _EXTENT_UNKNOWN, _EXTENT_DELAYED, _EXTENT_UNWRITTEN = 0x1, 0x2, 0x4, 0x800
_HEAD = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_EXTENTS_AT_ONCE = 64
_LENGTH_MAX = 2**62


class Device:
    """The image behind a file system that is mounted from it (disks.py)."""

    def __init__(self, image: Path) -> None:
        self._image = os.open(image, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._image)

    def flip(self, path: Path, position: int) -> bool:
        """Flip a bit of the byte at a position of a file; False where the device has none there.

        FileNotFoundError when it is gone. What the file has in memory is written out before, and stays there.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # its room is nobody else's as long as it is open
        try:
            place = _physical(descriptor, position)
            if place is None:
                return False
            [byte] = os.pread(self._image, 1, place)
            os.pwrite(self._image, bytes([byte ^ 1 << position % 8]), place)
            return True
        finally:
            os.close(descriptor)


def _physical(descriptor: int, position: int) -> int | None:
    """Where on the device a byte of a file lies."""
    for logical, physical, length, flags in _extents(descriptor):
        if logical <= position < logical + length:
            anywhere = flags & (_EXTENT_UNKNOWN | _EXTENT_DELAYED | _EXTENT_UNWRITTEN)
            return None if anywhere else physical + position - logical
    return None


def _extents(descriptor: int) -> Iterator[tuple[int, int, int, int]]:
    """Logical and physical offset, length, flags."""
    start = 0
    while True:
        head = _HEAD.pack(start, _LENGTH_MAX - start, _FIEMAP_FLAG_SYNC, 0, _EXTENTS_AT_ONCE, 0)
        buffer = bytearray(head + bytes(_EXTENTS_AT_ONCE * _EXTENT.size))
        fcntl.ioctl(descriptor, _FIEMAP, buffer, True)
        count = _HEAD.unpack_from(buffer)[3]
        if not count:
            return
        for number in range(count):
            logical, physical, length, _, _, flags, *_ = _EXTENT.unpack_from(buffer, _HEAD.size + number * _EXTENT.size)
            yield logical, physical, length, flags
            if flags & _EXTENT_LAST:
                return
            start = logical + length
