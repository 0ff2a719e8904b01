"""Making blocks of a file that came another way, a staged part for instance, by index alone: no byte is copied.

The file gets a second name in the directory (a hard link), under which it is counted, evicted and unlinked; its first
name can be removed at any time. It has no header, so a rebuild of the index does not know its blocks again: after an
unclean boot they are fetched from the origin like others. All of this blocks: it runs on a disk thread.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from awscrt import checksums as crt

from gateway.blocks import layout
from gateway.blocks.directory import Ingest
from gateway.blocks.layout import CHECKSUM_BYTES, CHUNK_BYTES, Block, Extent
from gateway.blocks.rows import BlockRecord, Reservation
from gateway.core.errors import StoreUnavailable
from gateway.core.model import ByteRange, ObjectVersion


@dataclass(frozen=True, slots=True)
class IngestedFile:
    """A file that begins with `size_bytes` bytes of `version`, those at `offset`, and will never be written again.

    `checksums` gives the CRC32C of each 64 KiB chunk of these, 4 bytes little-endian each, where they are known: they
    serve for blocks that begin on one of these chunks, the others are read once. It may block, and may raise.
    """

    path: Path
    version: ObjectVersion
    offset: int
    size_bytes: int
    checksums: Callable[[], bytes] | None = None


def describe(ingested: IngestedFile, slot: str, block_size_bytes: int) -> Ingest | None:
    """Return the records of a file on a slot's account; None if no block lies wholly in it.

    Reads bytes without checksums; raises StoreUnavailable when that fails. The whole file takes room, also behind the
    bytes.
    """
    try:
        records = list(_records(ingested, block_size_bytes))
        disk_bytes = ingested.path.stat().st_size
    except OSError as error:
        raise StoreUnavailable(f"a file to be linked into the cache cannot be read: {error}") from error
    if not records:
        return None
    file = layout.file_name(records[0].block_id, secrets.token_hex(8))
    placed = [replace(record, extent=record.extent._replace(file=file)) for record in records]
    reservation = Reservation(file, slot, layout.in_pages(disk_bytes), to_write=False)
    return Ingest(ingested.path, reservation, placed, ingested.version.key)


def _records(ingested: IngestedFile, block_size_bytes: int) -> Iterator[BlockRecord]:
    whole = list(_whole_blocks(ingested, block_size_bytes))
    if not whole:
        return
    known = ingested.checksums() if ingested.checksums else b""
    descriptor = os.open(ingested.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_size < ingested.size_bytes:
            raise StoreUnavailable("a file to be linked into the cache is shorter than it was")
        for block in whole:
            start = block.offset - ingested.offset
            packed = _known(known, start, block) or _computed(descriptor, start, block)
            yield BlockRecord(block.id, Extent("", start, block.length, packed))
    finally:
        os.close(descriptor)


def _whole_blocks(ingested: IngestedFile, block_size_bytes: int) -> Iterator[Block]:
    stop = min(ingested.offset + ingested.size_bytes, ingested.version.size_bytes)
    if stop <= ingested.offset:
        return
    held = ByteRange(ingested.offset, stop - 1)
    for block in layout.blocks_of(ingested.version, held, block_size_bytes):
        if held.first <= block.offset and block.range.last <= held.last:
            yield block


def _known(checksums: bytes, start: int, block: Block) -> bytes | None:
    if start % CHUNK_BYTES:
        return None
    first = start // CHUNK_BYTES * CHECKSUM_BYTES
    packed = checksums[first : first + layout.chunk_count(block.length) * CHECKSUM_BYTES]
    return packed if len(packed) == layout.chunk_count(block.length) * CHECKSUM_BYTES else None


def _computed(descriptor: int, start: int, block: Block) -> bytes:
    packed = bytearray()
    for position in range(0, block.length, CHUNK_BYTES):
        size = min(CHUNK_BYTES, block.length - position)
        chunk = os.pread(descriptor, size, start + position)
        if len(chunk) < size:
            raise StoreUnavailable("a file to be linked into the cache is shorter than it was")
        packed += crt.crc32c(chunk).to_bytes(CHECKSUM_BYTES, "little")
    return bytes(packed)
