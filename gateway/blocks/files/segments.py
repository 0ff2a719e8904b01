"""Segments: files in which small blocks lie one behind the other, each behind a header of its own.

    0     header of the first record, its bytes, header of the second, its bytes, …

A header is that of a block file (layout.py), only that it and the next record begin at multiples of 64. Records are
appended and never changed; where a header is not whole, the segment ends. Nothing behind that is searched for headers:
an object's own bytes may look like one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from awscrt import checksums

from gateway.blocks import layout
from gateway.blocks.index.records import BlockRecord
from gateway.blocks.layout import CHECKSUM_BYTES, CHUNK_BYTES, Block, Extent
from gateway.errors import BlockDamaged

ALIGNMENT_BYTES = 64
"""Of headers and bytes alike: `sendfile` needs no pages, and 100 KB would be 4 % longer for them."""

SEGMENT_BYTES_MAX = 16 * 1024 * 1024
"""What is evicted at once. Larger ones save next to nothing: creating one costs less than a hundredth of filling it."""

RECORDS_MAX = 1024
"""Of tiny blocks: so many leave the index at once, and 10 million of them lie in 10,000 files, which stay open."""

_SUFFIX = ".segment"
_PADDING = bytes(ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class SmallBlock:
    """A small block, with its bytes."""

    block: Block
    content: memoryview

    @property
    def record_bytes(self) -> int:
        """What it takes in a segment."""
        return layout.data_offset(self.block, ALIGNMENT_BYTES) + layout.aligned(self.block.length, ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class Placed:
    """Small blocks laid out to be appended to a file: what to write, what to enter, and where the next ones begin."""

    buffers: Sequence[bytes | memoryview]
    blocks: Sequence[BlockRecord]
    stop: int


def new_name() -> str:
    """A name that no other file of the directory ever has."""
    return secrets.token_hex(16) + _SUFFIX


def is_segment(file: str) -> bool:
    return file.endswith(_SUFFIX)


def place(file: str, start: int, blocks: Sequence[SmallBlock]) -> Placed:
    """Lay blocks out from byte `start` of a file on."""
    buffers: list[bytes | memoryview] = []
    records = []
    for small in blocks:
        packed = _checksums(small.content)
        header = layout.pack_header(small.block, packed, ALIGNMENT_BYTES)
        buffers += (header, small.content, _PADDING[: -len(small.content) % ALIGNMENT_BYTES])
        extent = Extent(file, start + len(header), small.block.length, packed)
        records.append(BlockRecord(small.block.id, layout.object_id(small.block.version.key), extent))
        start += small.record_bytes
    return Placed(buffers, records, start)


def walk(file: str, descriptor: int, size_bytes: int) -> Iterator[tuple[Block, Extent]]:
    """The records of a segment of which everything is there, up to the first that is torn. Blocks.

    The bytes themselves are checked when they are read.
    """
    position = 0
    while position < size_bytes:
        try:
            header = _header(descriptor, position)
            block, packed = layout.unpack_header(header, ALIGNMENT_BYTES)
        except BlockDamaged:
            return
        start = position + layout.header_bytes(header, ALIGNMENT_BYTES)
        if start + block.length > size_bytes:
            return
        yield block, Extent(file, start, block.length, packed)
        position = start + layout.aligned(block.length, ALIGNMENT_BYTES)


def _header(descriptor: int, position: int) -> bytes:
    start = os.pread(descriptor, 512, position)
    missing = layout.header_bytes(start, ALIGNMENT_BYTES) - len(start)
    return start + os.pread(descriptor, missing, position + len(start)) if missing > 0 else start


def _checksums(content: memoryview) -> bytes:
    chunks = (content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES))
    return b"".join(checksums.crc32c(chunk).to_bytes(CHECKSUM_BYTES, "little") for chunk in chunks)
