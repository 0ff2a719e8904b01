"""Published blocks on the disk: block files, and segments of small blocks. Every function here blocks.

    data/3f/<block id>-<nonce>          published blocks, in up to 256 directories by the first byte of the id
    data/3f/<32 digits>.segment         small blocks, each behind a header of its own: appended to, and nothing else
    partial/w<slot>/<block id>-<nonce>  fills of one worker slot in progress; the header comes last, then the rename

In a segment, headers and bytes begin at multiples of 64. Where a header is not whole, the segment ends: nothing behind
that is searched for headers, as an object's own bytes may look like one.

Blocks can be fetched again, so nothing is synced: after a power cut the checksums tell which files are whole. Space
returns by unlink only. A file that came another way, a staged part for instance, becomes blocks by index alone
(`describe`): it gets a second name, has no header, and is fetched again after an unclean boot.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import structlog
from awscrt import checksums as crt

from gateway.blocks import layout, page_cache
from gateway.blocks.block_file import BlockLease, lease_of
from gateway.blocks.layout import CHECKSUM_BYTES, CHUNK_BYTES, Block, BlockRecord, Extent, Reservation
from gateway.core.errors import BlockDamaged, StoreUnavailable
from gateway.core.model import ByteRange, ObjectVersion, immutable
from gateway.disk.atomic_write import set_aside
from gateway.disk.file_lease import FileLease, SharedFile

ALIGNMENT_BYTES = 64
"""Alignment of headers and bytes alike: `sendfile` needs no pages, and 100 KB would be 4 % longer for them."""

SEGMENT_BYTES_MAX = 16 * 1024 * 1024
"""Bytes evicted at once. Larger ones save next to nothing: creating one costs less than a hundredth of filling it."""

RECORDS_MAX = 1024
"""Limit of tiny blocks that leave the index at once; 10 million of them lie in 10,000 files, which stay open."""

_SUFFIX = ".segment"
_PADDING = bytes(ALIGNMENT_BYTES)


@immutable
class SmallBlock:
    block: Block
    content: memoryview


@immutable
class Placed:
    """Small blocks laid out to be appended to a file: what to write, what to enter, and where the next ones begin."""

    buffers: Sequence[bytes | memoryview]
    blocks: Sequence[BlockRecord]
    stop: int


def new_name() -> str:
    """Return a name that no other file of the directory ever has."""
    return secrets.token_hex(16) + _SUFFIX


def is_segment(file: str) -> bool:
    return file.endswith(_SUFFIX)


def place(file: str, start: int, blocks: Sequence[SmallBlock], room_bytes: int = SEGMENT_BYTES_MAX) -> Placed:
    """Lay out the first of the blocks, as many as end within `room_bytes` of the file; in a new file one at least."""
    buffers: list[bytes | memoryview] = []
    records = []
    padding = b""
    for small in blocks:
        packed = _checksums(small.content)
        header = layout.pack_header(small.block, packed, ALIGNMENT_BYTES)
        extent = Extent(file, start + len(header), small.block.length, packed)
        stop = extent.offset + layout.aligned(extent.length, ALIGNMENT_BYTES)
        if stop > room_bytes and start:
            break
        buffers += (padding + header, small.content)
        padding = _PADDING[: stop - extent.offset - extent.length]
        records.append(BlockRecord(small.block.id, extent))
        start = stop
    return Placed([*buffers, padding], records, start)


def walk(file: str, descriptor: int, size_bytes: int) -> Iterator[tuple[Block, Extent]]:
    """Yield the complete records of a segment, up to the first torn one. Blocks.

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
    found = [crt.crc32c(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES)]
    return b"".join([checksum.to_bytes(CHECKSUM_BYTES, "little") for checksum in found])


_log = structlog.get_logger("forebay.cache")

T = TypeVar("T")

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


BUFFERS_MAX = 1024
"""Limit of one pwritev (IOV_MAX)."""

WRITTEN_AT_ONCE_BYTES_MAX = 1024 * 1024
"""For longer writes the kernel takes pages of 2 MiB. A virtual machine may have given free ones back to its host, and
then each 4 KiB of them cost a trap to it, several times as long as the copy."""

BALLAST_BYTES = 1024 * 1024
"""Given up on a full disk: without any room the index could not even write down what is evicted."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE: the length tells how far the file is written."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

DIRECTORIES = 256
"""Published files lie in as many directories, each made with its first file."""


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A published file as it describes itself: no blocks where it is not whole by its header and its length.

    The bytes themselves are checked when they are read.
    """

    name: str
    disk_bytes: int
    modified_ns: int
    blocks: Sequence[tuple[Block, Extent]] = ()


class BlockStore:
    """The files of one directory, as worker slot `worker` writes them."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._format = directory / "FORMAT"
        self._ballast = directory / "ballast"
        self._data = directory / "data"
        self._partial_root = directory / "partial"
        self._partial = self._partial_of(worker)
        self._maps_files = False

    def prepare(self) -> None:
        """Make the directories, and test whether the system tells which pages of files stay in memory."""
        for directory in (self._data, self._partial_root, self._partial):
            directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        self._maps_files = page_cache.is_supported(self._partial)
        if not self._maps_files:
            _log.warning(
                "this system does not tell which pages of a file stay in memory, so every cached byte is read and "
                "verified for each request; Linux 5.14 or newer and /proc/self/pagemap are needed for less"
            )

    def create_partial(self, file: str) -> BlockLease:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(self._partial / file, flags, FILE_MODE)
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be created: {error}") from error
        return self._lease(descriptor)

    def set_aside(self, file: BlockLease, size_bytes: int) -> None:
        """Give a file its room on the disk now, which is cheaper than bit by bit. StoreUnavailable on a full disk."""
        if _libc.fallocate(file.descriptor, _KEEP_SIZE, 0, size_bytes):
            number = ctypes.get_errno()
            if number in _NO_ROOM:
                raise StoreUnavailable(f"a block file cannot be written: {os.strerror(number)}") from OSError(
                    number, os.strerror(number)
                )  # other errors: some file systems cannot do that, and a write needs nothing of it

    def open_of(self, worker: int, file: str) -> BlockLease | None:
        """Open a file that any slot fills, or has just published, for reading; None if there is none any more."""
        for path in (self._partial_of(worker) / file, self._place(file)):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreUnavailable(f"the file of a fetch cannot be opened: {error}") from error
            return self._lease(descriptor)
        return None

    def write(self, file: BlockLease, content: bytes | bytearray | memoryview, offset: int) -> None:
        """All of `content`; StoreUnavailable when the disk does not take it."""
        rest = memoryview(content)
        try:
            while rest:
                written = os.pwrite(file.descriptor, rest, offset)
                offset += written
                rest = rest[written:]
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be written: {error}") from error

    def append(self, file: str, buffers: Sequence[bytes | memoryview], offset: int, *, new: bool) -> bool:
        """All of `buffers` to a published file that ends at `offset`, made where it is `new`.

        False when there is no such file any more. StoreUnavailable when the disk does not take it.
        """
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if new else 0)
        try:
            descriptor = self._in_directory(file, lambda: os.open(self._place(file), flags, FILE_MODE))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreUnavailable(f"a segment cannot be opened: {error}") from error
        try:
            _write_all(descriptor, buffers, offset)
            return True
        except OSError as error:
            raise StoreUnavailable(f"a segment cannot be written: {error}") from error
        finally:
            os.close(descriptor)

    def keep_unsealed(self, file: str) -> FileLease[SharedFile]:
        """Lock (`flock`) a new segment until the lease ends: nothing is appended to a segment that is not locked."""
        lease = FileLease(SharedFile(self.open_description(file)))
        try:
            fcntl.flock(lease.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreUnavailable(f"a segment cannot be locked: {error}") from error
        return lease

    def open_description(self, file: str) -> int:
        """Open a published file for reading, with a file description that this process does not use."""
        try:
            return os.open(self._place(file), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be opened: {error}") from error

    def disk_bytes(self, file: str) -> int | None:
        """Return the size of a published file in whole pages; None when it is gone."""
        try:
            return layout.in_pages(os.stat(self._place(file), follow_symlinks=False).st_size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"the length of a block file cannot be read: {error}") from error

    def publish(self, file: str) -> None:
        try:
            self._in_directory(file, lambda: os.rename(self._partial / file, self._place(file)))
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be renamed: {error}") from error

    def link(self, source: Path, file: str) -> None:
        """Give a file that lies elsewhere a place here, too. It belongs to the owner alone from then on."""
        try:
            os.chmod(source, FILE_MODE)
            self._in_directory(file, lambda: os.link(source, self._place(file)))
        except OSError as error:
            raise StoreUnavailable(f"a file cannot be linked into the block directory: {error}") from error

    def free_bytes(self) -> int:
        """Return the free bytes of the file system. Raises OSError."""
        facts = os.statvfs(self._data)
        return facts.f_bavail * facts.f_frsize

    def try_reading(self) -> None:
        """Read a file of the directory from the device; raise StoreUnavailable when that fails."""
        try:
            descriptor = os.open(self._format, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.preadv(descriptor, [bytearray(layout.ALIGNMENT_BYTES)], 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreUnavailable(f"the directory cannot be read: {error}") from error

    def try_writing(self, room_bytes: int) -> None:
        """Write something to the device, with room for `room_bytes` more; raise StoreUnavailable when that fails."""
        path = self._partial / "probe"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                os.posix_fallocate(descriptor, 0, room_bytes)
                os.pwrite(descriptor, bytes(layout.ALIGNMENT_BYTES), 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
                os.unlink(path)
        except OSError as error:
            raise StoreUnavailable(f"the directory cannot be written to: {error}") from error

    def keep_ballast(self) -> None:
        """Set BALLAST_BYTES aside in the directory; raise StoreUnavailable when that fails."""
        try:
            set_aside(self._ballast, BALLAST_BYTES)
        except OSError as error:
            raise StoreUnavailable(f"the reserve file cannot be written: {error}") from error

    def drop_ballast(self) -> None:
        """Give the ballast up: its room is needed now."""
        self._unlink(self._ballast)

    def open_published(self, extent: Extent) -> BlockLease:
        """Open a block's file for reading.

        BlockDamaged when it is gone or too short; StoreUnavailable when it may well be there but cannot be opened now.
        """
        try:
            descriptor = os.open(self._place(extent.file), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise BlockDamaged("the block's file is gone") from error
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be opened: {error}") from error
        return self._lease(descriptor, is_segment=is_segment(extent.file))

    def _lease(self, descriptor: int, *, is_segment: bool = False) -> BlockLease:
        # Without this the kernel reads more than it is asked for; what is worth reading ahead is known here.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return lease_of(descriptor, is_segment=is_segment, is_mappable=self._maps_files)

    def unlink(self, file: str) -> None:
        """Remove a file, published or partial, of this slot; one that is not there is fine."""
        self._unlink(self._place(file))
        self._unlink(self._partial / file)

    def unlink_of(self, worker: int, file: str) -> None:
        self._unlink(self._place(file))
        self._unlink(self._partial_of(worker) / file)

    def clean_slot(self, worker: int) -> None:
        """Remove every partial file of a dead worker's slot."""
        for path in self._partial_of(worker).glob("*"):
            self._unlink(path)

    def clean_all_slots(self) -> None:
        """Remove every partial file. No other process may have the directory open."""
        for path in self._partial_root.glob("*/*"):
            self._unlink(path)

    def directories(self) -> list[int]:
        """Return the numbers of the directories of published files that are there."""
        there = set(os.listdir(self._data))
        return [number for number in range(DIRECTORIES) if f"{number:02x}" in there]

    def listing(self, number: int) -> list[str]:
        """Return the names of the published files in directory `number`, 0 to DIRECTORIES - 1."""
        try:
            return os.listdir(self._directory(number))
        except FileNotFoundError:
            return []

    def bytes_on_disk(self, number: int) -> int:
        """Return the size of the published files in a directory, in whole pages."""
        with os.scandir(self._directory(number)) as entries:
            return sum(layout.in_pages(entry.stat(follow_symlinks=False).st_size) for entry in entries)

    def is_published(self, file: str) -> bool:
        return os.path.lexists(self._place(file))

    def describe(self, file: str) -> ScannedFile | None:
        """Read a published file's headers; None when it is gone. Raises StoreUnavailable when it is unreadable."""
        try:
            with open(self._place(file), "rb") as opened:
                facts = os.fstat(opened.fileno())
                if is_segment(file):
                    blocks = list(walk(file, opened.fileno(), facts.st_size))
                else:
                    start, blocks = opened.read(layout.ALIGNMENT_BYTES), []
                    with suppress(BlockDamaged):
                        header = start + opened.read(layout.header_bytes(start) - len(start))
                        blocks = [_described(file, header, facts.st_size)]
                return ScannedFile(file, layout.in_pages(facts.st_size), facts.st_mtime_ns, blocks)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be read: {error}") from error

    def _partial_of(self, worker: int) -> Path:
        return self._partial_root / f"w{worker}"

    def _directory(self, number: int) -> Path:
        return self._data / f"{number:02x}"

    def _in_directory(self, file: str, publish: Callable[[], T]) -> T:
        """Give a file its place; the directory of its place is made where there is none yet."""
        try:
            return publish()
        except FileNotFoundError:
            self._directory(int(file[:2], 16)).mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            return publish()

    def _place(self, file: str) -> str:
        return f"{self._data}/{file[:2]}/{file}"

    def _unlink(self, path: Path | str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be removed: {error}") from error


def _write_all(descriptor: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    rest = list(buffers)
    while rest:
        stops = list(accumulate(map(len, rest[:BUFFERS_MAX])))
        fitting = bisect_right(stops, WRITTEN_AT_ONCE_BYTES_MAX)
        written = os.pwritev(descriptor, rest[: max(1, fitting)], offset)
        offset += written
        whole = bisect_right(stops, written)
        if whole < len(stops):
            rest[whole] = memoryview(rest[whole])[written - stops[whole] :]
        rest = rest[whole:]


def _described(file: str, header: bytes, size_bytes: int) -> tuple[Block, Extent]:
    block, checksums = layout.unpack_header(header)
    extent = Extent(file, layout.header_bytes(header), block.length, checksums)
    if size_bytes != extent.offset + extent.length:
        raise BlockDamaged("the file's length is not the block's")
    return block, extent


@dataclass(frozen=True, slots=True)
class Ingest:
    """A file that lies elsewhere, and the blocks in it."""

    source: Path
    reservation: Reservation
    blocks: Sequence[BlockRecord]
    first: Block
    """The first of the blocks: if it is pinned, all stay."""


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
    return Ingest(ingested.path, reservation, placed, next(_whole_blocks(ingested, block_size_bytes)))


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
