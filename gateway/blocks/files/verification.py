"""Which bytes of which blocks this process has seen to be right, and how to see it.

A chunk counts as verified while its file is the same (device, inode, size, times) and its pages have stayed in memory:
bytes that come from the device again are checked again.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from awscrt import checksums as crt

from gateway.blocks.layout import CHUNK_BYTES, Extent, chunk_count
from gateway.errors import BlockDamaged

BLOCKS_REMEMBERED_MAX = 65_536
"""About 20 MiB of memory at worst."""

VERIFY_STEP_BYTES = 4 * CHUNK_BYTES
"""Little enough for the processor's cache: what is read is checked before it has left it."""

Fingerprint: TypeAlias = tuple[int, int, int, int, int]

_CRC = struct.Struct("<I")


def fingerprint(descriptor: int) -> Fingerprint:
    """What changes whenever a file's bytes may have."""
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def chunk_mask(position: int, count: int) -> int:
    """A bit for each chunk that `count` bytes at `position` of a block touch."""
    first, last = position // CHUNK_BYTES, (position + count - 1) // CHUNK_BYTES
    return ((1 << (last - first + 1)) - 1) << first


@dataclass(slots=True)
class Verified:
    """The chunks of one file that were verified, as a bit mask."""

    file: Fingerprint
    chunks: int = 0

    def covers(self, position: int, count: int) -> bool:
        wanted = chunk_mask(position, count)
        return self.chunks & wanted == wanted

    def add(self, position: int, count: int) -> None:
        self.chunks |= chunk_mask(position, count)

    def clear(self) -> None:
        self.chunks = 0


@dataclass(slots=True)
class VerifiedMemory:
    """What was verified, by block; the blocks used longest ago are forgotten first. Event loop only."""

    blocks_max: int = BLOCKS_REMEMBERED_MAX
    _blocks: OrderedDict[bytes, Verified] = field(default_factory=OrderedDict)

    def knows(self, block_id: bytes) -> bool:
        """Whether the block was read a moment ago, so that opening its file will not touch the disk."""
        return block_id in self._blocks

    def of(self, block_id: bytes, file: Fingerprint) -> Verified:
        """What is verified of a block that lies in this very file."""
        known = self._blocks.get(block_id)
        if known is None or known.file != file:
            known = self._blocks[block_id] = Verified(file)
            if len(self._blocks) > self.blocks_max:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block_id)
        return known

    def forget(self, block_id: bytes) -> None:
        self._blocks.pop(block_id, None)


def read_verified(descriptor: int, extent: Extent, position: int, count: int) -> memoryview:
    """`count` bytes at `position` of a block, every chunk they touch read whole and checked. Blocks.

    BlockDamaged when the file is short or a checksum differs, or the device gives an error.
    """
    first = position // CHUNK_BYTES * CHUNK_BYTES
    last = min(-(-(position + count) // CHUNK_BYTES) * CHUNK_BYTES, extent.length)
    content = memoryview(bytearray(last - first))
    _read_chunks(descriptor, extent, first, content)
    return content[position - first : position - first + count]


def verify(descriptor: int, extent: Extent, position: int, count: int) -> None:
    """Read and check as `read_verified`, a little at a time, and keep nothing. Blocks; BlockDamaged."""
    first = position // CHUNK_BYTES * CHUNK_BYTES
    last = min(-(-(position + count) // CHUNK_BYTES) * CHUNK_BYTES, extent.length)
    buffer = memoryview(bytearray(min(VERIFY_STEP_BYTES, last - first)))
    for start in range(first, last, VERIFY_STEP_BYTES):
        _read_chunks(descriptor, extent, start, buffer[: last - start])


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
