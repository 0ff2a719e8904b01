"""Making blocks of a file that came another way, a staged part for instance, by index alone: no byte is copied.

The file gets a second name in the directory (a hard link), under which it is counted, evicted and unlinked; its first
name can be removed at any time. It has no header, so a rebuild of the index does not know its blocks again: after an
unclean boot they are fetched from the origin like others. All of this blocks: it runs on a disk thread.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from awscrt import checksums

from gateway.blocks import layout
from gateway.blocks.directory import Adoption
from gateway.blocks.layout import CHECKSUM_BYTES, CHUNK_BYTES, Block, BlockRecord, Extent, Reservation
from gateway.errors import StoreUnavailable
from gateway.objects import ByteRange, ObjectVersion


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """A file that holds the bytes of `version` from `offset` to the file's end, and will never be written again.

    `checksums` holds the CRC32C of each of its 64 KiB chunks, 4 bytes little-endian each, where they are known: they
    serve for blocks that begin on one of these chunks, the others are read once.
    """

    path: Path
    version: ObjectVersion
    offset: int
    checksums: bytes | None = None


def describe(offered: OfferedFile, slot: str, block_size_bytes: int) -> Adoption | None:
    """What has to be entered for a file on a slot's account; None where no block lies wholly in it.

    StoreUnavailable when it cannot be read. Reads what has no checksums yet.
    """
    try:
        records = list(_records(offered, block_size_bytes))
        size_bytes = offered.path.stat().st_size
    except OSError as error:
        raise StoreUnavailable(f"a file to be adopted cannot be read: {error}") from error
    if not records:
        return None
    file = layout.file_name(records[0].block_id, secrets.token_hex(8))
    placed = [replace(record, extent=record.extent._replace(file=file)) for record in records]
    return Adoption(offered.path, Reservation(file, slot, layout.in_pages(size_bytes), to_write=False), placed)


def _records(offered: OfferedFile, block_size_bytes: int) -> Iterator[BlockRecord]:
    object_id = layout.object_id(offered.version.key)
    descriptor = os.open(offered.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        stop = min(offered.offset + os.fstat(descriptor).st_size, offered.version.size_bytes)
        if stop <= offered.offset:
            return
        held = ByteRange(offered.offset, stop - 1)
        for block in layout.blocks_of(offered.version, held, block_size_bytes):
            if held.first <= block.offset and block.range.last <= held.last:
                start = block.offset - offered.offset
                packed = _known(offered, start, block) or _computed(descriptor, start, block)
                yield BlockRecord(block.id, object_id, Extent("", start, block.length, packed))
    finally:
        os.close(descriptor)


def _known(offered: OfferedFile, start: int, block: Block) -> bytes | None:
    if offered.checksums is None or start % CHUNK_BYTES:
        return None
    first = start // CHUNK_BYTES * CHECKSUM_BYTES
    packed = offered.checksums[first : first + layout.chunk_count(block.length) * CHECKSUM_BYTES]
    return packed if len(packed) == layout.chunk_count(block.length) * CHECKSUM_BYTES else None


def _computed(descriptor: int, start: int, block: Block) -> bytes:
    packed = bytearray()
    for position in range(0, block.length, CHUNK_BYTES):
        size = min(CHUNK_BYTES, block.length - position)
        chunk = os.pread(descriptor, size, start + position)
        if len(chunk) < size:
            raise StoreUnavailable("a file to be adopted is shorter than it was")
        packed += checksums.crc32c(chunk).to_bytes(CHECKSUM_BYTES, "little")
    return bytes(packed)
