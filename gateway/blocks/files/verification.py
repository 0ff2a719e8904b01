"""Reading a block's bytes and checking them against the checksums of its chunks."""

from __future__ import annotations

import os
import struct

from awscrt import checksums as crt

from gateway.blocks.layout import CHUNK_BYTES, Extent, chunk_count
from gateway.errors import BlockDamaged

VERIFY_STEP_BYTES = 4 * CHUNK_BYTES
"""Little enough for the processor's cache: what is read is checked before it has left it."""

_CRC = struct.Struct("<I")


def chunk_aligned(extent: Extent, position: int, count: int) -> tuple[int, int]:
    """The chunks of a block that `count` bytes at `position` lie in: from where, and the first byte behind them."""
    stop = -(-(position + count) // CHUNK_BYTES) * CHUNK_BYTES
    return position // CHUNK_BYTES * CHUNK_BYTES, min(stop, extent.length)


def read_verified(descriptor: int, extent: Extent, position: int, count: int) -> memoryview:
    """`count` bytes at `position` of a block, every chunk they touch read whole and checked. Blocks.

    BlockDamaged when the file is short or a checksum differs, or the device gives an error.
    """
    first, last = chunk_aligned(extent, position, count)
    content = memoryview(bytearray(last - first))
    _read_chunks(descriptor, extent, first, content)
    return content[position - first : position - first + count]


def check(descriptor: int, extent: Extent, first: int, count: int) -> None:
    """Read and check whole chunks as `read_verified`, a little at a time, and keep nothing. Blocks; BlockDamaged."""
    buffer = memoryview(bytearray(min(VERIFY_STEP_BYTES, count)))
    for start in range(first, first + count, VERIFY_STEP_BYTES):
        _read_chunks(descriptor, extent, start, buffer[: first + count - start])


def _read_chunks(descriptor: int, extent: Extent, first: int, content: memoryview) -> None:
    """Fill `content` with the block's bytes from `first` on, where a chunk begins, and check them."""
    _read_whole(descriptor, extent.offset + first, content)
    for start in range(0, len(content), CHUNK_BYTES):
        expected = _CRC.unpack_from(extent.checksums, (first + start) // CHUNK_BYTES * _CRC.size)[0]
        if crt.crc32c(content[start : start + CHUNK_BYTES]) != expected:
            raise BlockDamaged(f"the checksum of chunk {(first + start) // CHUNK_BYTES} differs")


def _read_whole(descriptor: int, offset: int, content: memoryview) -> None:
    done = 0
    while done < len(content):
        try:
            got = os.preadv(descriptor, [content[done:]], offset + done)
        except OSError as error:
            raise BlockDamaged(f"the block's file cannot be read: {error}") from error
        if got == 0:
            raise BlockDamaged("the block's file is shorter than the block")
        done += got


class ChunkChecksums:
    """The checksums of a block's chunks while its bytes come in pieces of any size."""

    def __init__(self, length: int) -> None:
        self.packed = bytearray()
        self._length = length
        self._position = 0
        self._running = 0

    @property
    def complete_bytes(self) -> int:
        """How many bytes lie in chunks whose checksum is final."""
        return min(len(self.packed) // _CRC.size * CHUNK_BYTES, self._length)

    @property
    def complete(self) -> bool:
        return len(self.packed) == chunk_count(self._length) * _CRC.size

    def take(self, extent: Extent, stop: int) -> None:
        """The chunks up to byte `stop`, verified, are those of an extent."""
        self.packed += extent.checksums[len(self.packed) : chunk_count(stop) * _CRC.size]
        self._position = stop

    def update(self, content: bytes | bytearray | memoryview) -> None:
        rest = memoryview(content)
        while rest:
            room = CHUNK_BYTES - self._position % CHUNK_BYTES
            part, rest = rest[:room], rest[room:]
            self._running = crt.crc32c(part, self._running)
            self._position += len(part)
            if self._position % CHUNK_BYTES == 0 or self._position == self._length:
                self.packed += _CRC.pack(self._running)
                self._running = 0
