"""The trailer of a staged file: the CRC32C of each 64 KiB of its bytes, and a footer. Pure.

    0              the bytes
    length         4 bytes little-endian for each chunk of 64 KiB; the last chunk may be shorter
    end - 48       the footer, little-endian:
                     0   `FBYSTAGE`
                     8   u32  version, 1
                    12   u32  number of chunks
                    16   u64  length of the bytes
                    24        their MD5
                    40   u32  CRC32C of all the chunks' checksums
                    44   u32  CRC32C of the footer up to here

The footer locates everything in the file, and vouches for the checksums, which vouch for the bytes: so a file can be
checked without the journal, and a part of it without the rest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from awscrt import checksums as crt

CHUNK_BYTES = 64 * 1024
CHECKSUM_BYTES = 4

VERSION = 1
FOOTER_BYTES = 48

_MAGIC = b"FBYSTAGE"
_FIELDS = struct.Struct("<8sIIQ16sI")
_CRC = struct.Struct("<I")


def checksums_bytes(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES) * CHECKSUM_BYTES


def trailer_bytes(size_bytes: int) -> int:
    return checksums_bytes(size_bytes) + FOOTER_BYTES


@dataclass(frozen=True, slots=True)
class Footer:
    size_bytes: int
    md5: bytes
    checksums_crc: int


def pack_trailer(size_bytes: int, md5: bytes, checksums: bytes) -> bytes:
    """`checksums` are those of all chunks, in order."""
    chunks = len(checksums) // CHECKSUM_BYTES
    fields = _FIELDS.pack(_MAGIC, VERSION, chunks, size_bytes, md5, crt.crc32c(checksums))
    return checksums + fields + _CRC.pack(crt.crc32c(fields))


def unpack_footer(packed: bytes) -> Footer | None:
    """Return None for a damaged footer."""
    fields, crc = packed[: _FIELDS.size], packed[_FIELDS.size :]
    if len(packed) != FOOTER_BYTES or crc != _CRC.pack(crt.crc32c(fields)):
        return None
    magic, version, chunks, size_bytes, md5, checksums_crc = _FIELDS.unpack(fields)
    if (magic, version, chunks * CHECKSUM_BYTES) != (_MAGIC, VERSION, checksums_bytes(size_bytes)):
        return None
    return Footer(size_bytes, md5, checksums_crc)


class TrailerChecksums:
    """The CRC32C of each 64 KiB of the bytes given, in pieces of any size."""

    def __init__(self) -> None:
        self._packed = bytearray()
        self._running = 0
        self._filled_bytes = 0

    def update(self, data: memoryview) -> None:
        position = 0
        while position < len(data):
            piece = data[position : position + CHUNK_BYTES - self._filled_bytes]
            self._running = crt.crc32c(piece, self._running)
            self._filled_bytes += len(piece)
            position += len(piece)
            if self._filled_bytes == CHUNK_BYTES:
                self._end_chunk()

    def digest(self) -> bytes:
        if self._filled_bytes:
            self._end_chunk()
        return bytes(self._packed)

    def _end_chunk(self) -> None:
        self._packed += self._running.to_bytes(CHECKSUM_BYTES, "little")
        self._running = self._filled_bytes = 0
