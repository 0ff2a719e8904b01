"""A staged file: the bytes of one PutObject or UploadPart as they came, and nothing else.

So the origin gets the client's own part boundaries, and a file becomes cached blocks by index alone. Name, length, MD5
and the CRC32C of each 64 KiB are in the journal. A file is never written again once it is sealed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from awscrt import checksums as crt

from gateway.errors import BufferDamaged
from gateway.file_lease import FileLease, SharedFile
from gateway.writeback.files.write_out import AT_ONCE_BYTES, begin_write_out

CHUNK_BYTES = 64 * 1024
CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class StagedFile:
    """What the journal knows of one. `checksums` are 4 bytes little-endian for each chunk of 64 KiB, in order.

    Without a name: bytes that only the origin has.
    """

    name: str
    size_bytes: int
    md5: bytes
    checksums: bytes

    @property
    def is_here(self) -> bool:
        """Whether there is a file."""
        return bool(self.name)

    @property
    def etag(self) -> str:
        """As S3 gives it to a part, or to an object put in one piece: quoted."""
        return f'"{self.md5.hex()}"'


class ChunkChecksums:
    """The CRC32C of each 64 KiB of what passes, in pieces of any size."""

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
        """Of all that has passed; call once."""
        if self._filled_bytes:
            self._end_chunk()
        return bytes(self._packed)

    def _end_chunk(self) -> None:
        self._packed += self._running.to_bytes(CHECKSUM_BYTES, "little")
        self._running = self._filled_bytes = 0


class StagedWriter:
    """Writes a new staged file, in order. Blocks: what the disk takes. OSError as it says it.

    The file is made by the thread that writes first, or syncs: who asks for a writer waits for no disk. `sync_name`
    begins to have its directory survive a power cut. For what is not small that is done while more of it comes: then
    nobody waits for it at the end.
    """

    def __init__(self, name: str, make: Callable[[], int], sync_name: Callable[[], Future[None]]) -> None:
        self.name = name
        self.size_bytes = 0
        self._make = make
        self._made: int | None = None
        self._checksums = ChunkChecksums()
        self._begun_bytes = 0
        self._sync_name = sync_name
        self._name: Future[None] | None = None

    def write(self, data: memoryview) -> None:
        """Append; the bytes may be changed when this returns."""
        descriptor, rest = self._descriptor(), data
        while rest:
            written = os.pwrite(descriptor, rest, self.size_bytes)
            self.size_bytes += written
            rest = rest[written:]
        if self.size_bytes - self._begun_bytes >= AT_ONCE_BYTES:
            self._write_out(descriptor)
        self._checksums.update(data)

    def sync(self, md5: bytes) -> StagedFile:
        """Have the bytes, whose MD5 is given, survive a power cut, and the file's name, too."""
        os.fsync(self._descriptor())
        (self._name or self._sync_name()).result()
        return StagedFile(self.name, self.size_bytes, md5, self._checksums.digest())

    def _write_out(self, descriptor: int) -> None:
        if self._name is None:
            self._name = self._sync_name()
        begin_write_out(descriptor, self._begun_bytes, self.size_bytes - self._begun_bytes)
        self._begun_bytes = self.size_bytes

    def close(self) -> None:
        """Idempotent."""
        made, self._made = self._made, None
        if made is not None:
            os.close(made)

    def _descriptor(self) -> int:
        if self._made is None:
            self._made = self._make()
        return self._made


def read_verified(opened: FileLease[SharedFile], file: StagedFile, position: int, count: int) -> memoryview:
    """`count` bytes at `position` of an opened file, none of them from a chunk that is not what was written. Blocks.

    BufferDamaged when one is, or when the file is shorter than it was; OSError as the disk says it.
    """
    first = position - position % CHUNK_BYTES
    stop = min(-(-(position + count) // CHUNK_BYTES) * CHUNK_BYTES, file.size_bytes)
    content = memoryview(_read_all(opened.descriptor, first, stop - first))
    for start in range(0, len(content), CHUNK_BYTES):
        _check_chunk(file, (first + start) // CHUNK_BYTES, content[start : start + CHUNK_BYTES])
    if len(content) < stop - first:
        raise BufferDamaged(f"staged file {file.name} ends at {first + len(content)} of {file.size_bytes} bytes")
    return content[position - first : position - first + count]


def _check_chunk(file: StagedFile, number: int, chunk: memoryview) -> None:
    expected = file.checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
    if crt.crc32c(chunk).to_bytes(CHECKSUM_BYTES, "little") != expected:
        raise BufferDamaged(f"staged file {file.name} is damaged in its chunk {number} of {CHUNK_BYTES} bytes")


def _read_all(descriptor: int, offset: int, count: int) -> bytes:
    content = os.pread(descriptor, count, offset)
    while len(content) < count and (more := os.pread(descriptor, count - len(content), offset + len(content))):
        content += more
    return content
