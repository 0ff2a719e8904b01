"""A staged file: the bytes of one PutObject or UploadPart as they came, and behind them their checksums.

So the origin gets the client's own part boundaries, and a file becomes cached blocks by index alone. Name, length and
MD5 are in the journal, the CRC32C of each 64 KiB is in the file: so neither the journal nor reads of it grow with the
bytes. A sealed file is never written again.

    staged/w<slot>/<32 hex digits>    one file per PutObject or UploadPart, made by that worker slot

Sealed means: the file is synced, and then its directory. Only then may the journal name it, and only then may the
client get its answer. A file that the journal does not name was never acknowledged; `sweep` removes it when its worker
is dead. All of this except `create` blocks.

While more of a file is still to come, the kernel begins to write it out (`begin_write_out`), so that `fsync` has less
to wait for. `sync_file_range(2)` with SYNC_FILE_RANGE_WRITE makes nothing durable, and hides no error from `fsync`.
Where it is missing, forbidden (seccomp), or unsupported by the file system, `fsync` does it all.

The trailer is the CRC32C of each 64 KiB of the bytes, and a footer:

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

import asyncio
import ctypes
import errno
import os
import secrets
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from awscrt import checksums as crt

from gateway.core.cancellation import to_its_end
from gateway.core.errors import BufferDamaged, BufferUnavailable
from gateway.disk.atomic_write import sync_directory
from gateway.disk.file_lease import FileLease, SharedFile, close_opened, with_lease
from gateway.disk.thread_priority import prefer_event_loop

CHUNK_BYTES = 64 * 1024
CHECKSUM_BYTES = 4

TRAILER_VERSION = 1
FOOTER_BYTES = 48

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

SWEPT_AT_ONCE = 500
"""File names per question to the journal."""

AT_ONCE_BYTES = 1024 * 1024
"""Begun in such pieces: the disk is busy early, and gets requests of a size that suits it."""

_WRITE = 2
_MEANS_NOTHING = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})

_MAGIC = b"FBYSTAGE"
_FIELDS = struct.Struct("<8sIIQ16sI")
_CRC = struct.Struct("<I")


def checksums_bytes(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES) * CHECKSUM_BYTES


def trailer_bytes(size_bytes: int) -> int:
    return checksums_bytes(size_bytes) + FOOTER_BYTES


def pack_trailer(size_bytes: int, md5: bytes, checksums: bytes) -> bytes:
    """`checksums` are those of all chunks, in order."""
    chunks = len(checksums) // CHECKSUM_BYTES
    fields = _FIELDS.pack(_MAGIC, TRAILER_VERSION, chunks, size_bytes, md5, crt.crc32c(checksums))
    return checksums + fields + _CRC.pack(crt.crc32c(fields))


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


def _of_libc() -> Any:
    """Return sync_file_range; None if libc lacks it."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_sync_file_range = _of_libc()


def begin_write_out(descriptor: int, position: int, count: int) -> None:
    """Begin to write out `count` bytes. Blocks while the disk has too much to do; raises the disk's OSError."""
    if _sync_file_range is not None and _sync_file_range(descriptor, position, count, _WRITE):
        error = ctypes.get_errno()
        if error not in _MEANS_NOTHING:
            raise OSError(error, os.strerror(error))


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A staged file in the journal; `size_bytes` excludes the trailer. Without a name, only the origin has it."""

    name: str
    size_bytes: int
    md5: bytes

    @property
    def is_here(self) -> bool:
        return bool(self.name)

    @property
    def disk_bytes(self) -> int:
        return self.size_bytes + trailer_bytes(self.size_bytes)

    @property
    def etag(self) -> str:
        """As S3 gives it to a part, or to an object put in one piece: quoted."""
        return f'"{self.md5.hex()}"'


class StagedWriter:
    """Writes a new staged file, in order. Blocks; raises the disk's OSError.

    The first write, or sync, makes the file, so that callers on the event loop wait for no disk. `sync_name` begins to
    make the file's name durable: for a large file while more of it comes, so that the end need not wait.
    """

    def __init__(self, name: str, make: Callable[[], int], sync_name: Callable[[], Future[None]]) -> None:
        self.name = name
        self.size_bytes = 0
        self._make = make
        self._made: int | None = None
        self._checksums = TrailerChecksums()
        self._begun_bytes = 0
        self._sync_name = sync_name
        self._name: Future[None] | None = None

    def write(self, data: memoryview) -> None:
        """Append; the bytes may be changed when this returns."""
        descriptor = self._descriptor()
        _write_all(descriptor, data, self.size_bytes)
        self.size_bytes += len(data)
        if self.size_bytes - self._begun_bytes >= AT_ONCE_BYTES:
            if self._name is None:
                self._name = self._sync_name()
            begin_write_out(descriptor, self._begun_bytes, self.size_bytes - self._begun_bytes)
            self._begun_bytes = self.size_bytes
        self._checksums.update(data)

    def sync(self, md5: bytes) -> StagedFile:
        """Make the bytes (`md5` is theirs), their trailer and the file's name durable."""
        trailer, descriptor = pack_trailer(self.size_bytes, md5, self._checksums.digest()), self._descriptor()
        _write_all(descriptor, memoryview(trailer), self.size_bytes)
        os.fsync(descriptor)
        (self._name or self._sync_name()).result()
        return StagedFile(self.name, self.size_bytes, md5)

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
    """Return `count` bytes at `position` of an opened file, after checking each chunk of them. Blocks.

    Reads only the checksums that it needs. BufferDamaged when a chunk or its checksum is damaged, or the file is too
    short; OSError from the disk.
    """
    first, stop = position // CHUNK_BYTES, -(-(position + count) // CHUNK_BYTES)
    start, end = first * CHUNK_BYTES, min(stop * CHUNK_BYTES, file.size_bytes)
    content = memoryview(_read(opened.descriptor, file, start, end - start))
    expected = _checksums(opened.descriptor, file, first, stop)
    for number in range(stop - first):
        crc = crt.crc32c(content[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
        if crc.to_bytes(CHECKSUM_BYTES, "little") != expected[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]:
            raise BufferDamaged(f"staged file {file.name} is damaged in its chunk {first + number}, or its checksum is")
    return content[position - start : position - start + count]


def _checksums(descriptor: int, file: StagedFile, first: int, stop: int) -> bytes:
    at, end = first * CHECKSUM_BYTES, stop * CHECKSUM_BYTES
    return _read(descriptor, file, file.size_bytes + at, end - at)


def _check_footer(descriptor: int, file: StagedFile) -> int:
    """Return the checksum of the checksums. BufferDamaged if the footer is damaged, or differs from the row."""
    packed = _read(descriptor, file, file.size_bytes + checksums_bytes(file.size_bytes), FOOTER_BYTES)
    fields, crc = packed[: _FIELDS.size], packed[_FIELDS.size :]
    magic, version, chunks, size_bytes, md5, checksums_crc = _FIELDS.unpack(fields)
    is_whole = (magic, version, chunks * CHECKSUM_BYTES) == (_MAGIC, TRAILER_VERSION, checksums_bytes(size_bytes))
    if not is_whole or crc != _CRC.pack(crt.crc32c(fields)):
        raise BufferDamaged(f"staged file {file.name} is damaged in its footer")
    if (size_bytes, md5) != (file.size_bytes, file.md5):
        raise BufferDamaged(f"staged file {file.name} is another one, by its footer, than was acknowledged")
    return int(checksums_crc)


def _read(descriptor: int, file: StagedFile, offset: int, count: int) -> bytes:
    content = os.pread(descriptor, count, offset)
    while len(content) < count and (more := os.pread(descriptor, count - len(content), offset + len(content))):
        content += more
    if len(content) < count:
        raise BufferDamaged(f"staged file {file.name} ends at {offset + len(content)} of {file.disk_bytes} bytes")
    return content


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class Staging:
    """The staged files of one buffer, as worker slot `worker` makes them."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._root = directory / "staged"
        self._own = f"w{worker}"
        self._names = _GroupSync(self._root / self._own)

    def prepare(self) -> None:
        """Make the directories, durably; OSError when the disk does not take them."""
        for path in (self._root, self._root / self._own):
            path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        sync_directory(self._root)
        sync_directory(self._root.parent)

    def create(self) -> StagedWriter:
        """Return a writer for a new file, for the caller to seal or discard. Does not block."""
        name = f"{self._own}/{secrets.token_hex(16)}"
        return StagedWriter(name, partial(os.open, self._root / name, _NEW, FILE_MODE), self._names.begin)

    def seal(self, writer: StagedWriter, md5: bytes) -> StagedFile:
        """Make a complete file durable, its name included, and close it.

        On failure, raise BufferUnavailable and remove the file: a later sync could succeed though bytes are lost.
        """
        try:
            sealed = writer.sync(md5)
        except OSError as error:
            self.discard(writer)
            raise BufferUnavailable(f"a staged file cannot be synced: {error}") from error
        writer.close()
        return sealed

    def discard(self, writer: StagedWriter) -> None:
        writer.close()
        self.remove(writer.name)

    def remove(self, name: str) -> None:
        """Remove a file. If the disk refuses, the next sweep removes it."""
        with suppress(OSError):
            os.unlink(self._root / name)

    def open(self, file: StagedFile) -> FileLease[SharedFile]:
        """Open a file for reading. FileNotFoundError when it is gone; OSError from the disk.

        BufferDamaged when its length or its footer differs from the journal's row.
        """
        descriptor = os.open(self._root / file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        lease = FileLease(SharedFile(descriptor))
        try:
            length = os.fstat(descriptor).st_size
            if length != file.disk_bytes:
                raise BufferDamaged(f"staged file {file.name} has {length} bytes, not {file.disk_bytes}")
            _check_footer(descriptor, file)
        except BaseException:
            lease.close()
            raise
        return lease

    def checksums(self, file: StagedFile) -> bytes:
        """Return the checksums of all chunks, 4 bytes little-endian each. BufferDamaged; OSError from the disk."""
        with self.open(file) as opened:
            packed = _checksums(opened.descriptor, file, 0, checksums_bytes(file.size_bytes) // CHECKSUM_BYTES)
            if crt.crc32c(packed) != _check_footer(opened.descriptor, file):
                raise BufferDamaged(f"staged file {file.name} is damaged in its checksums")
        return packed

    def path(self, file: StagedFile) -> Path:
        return self._root / file.name

    def names(self, worker: int | None = None) -> Iterator[str]:
        """Yield every file of a worker slot, or of all."""
        for directory in sorted(self._root.glob("w*" if worker is None else f"w{worker}")):
            for entry in os.scandir(directory):
                yield f"{directory.name}/{entry.name}"

    def sweep(self, unknown: Callable[[Sequence[str]], Sequence[str]], worker: int | None = None) -> int:
        """Remove the files that the journal does not name, of a dead worker's slot or of all; return their number.

        `unknown` picks the names that the journal does not know.
        """
        names = list(self.names(worker))
        removed = [
            name for at in range(0, len(names), SWEPT_AT_ONCE) for name in unknown(names[at : at + SWEPT_AT_ONCE])
        ]
        for name in removed:
            self.remove(name)
        return len(removed)


class _GroupSync:
    """Syncs a directory on a thread, once for several callers: each gets a sync that begins after its call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writeback-names")
        self._lock = threading.Lock()
        self._next: Future[None] | None = None

    def begin(self) -> Future[None]:
        """Return a future of a sync of the directory's present entries; OSError when it fails."""
        with self._lock:
            if self._next is None:
                self._next = Future()
                self._thread.submit(self._run, self._next)
            return self._next

    def _run(self, led: Future[None]) -> None:
        with self._lock:
            self._next = None  # it begins: later callers may have made files that it misses
        try:
            sync_directory(self._path)
        except OSError as error:
            led.set_exception(error)
        else:
            led.set_result(None)


P = ParamSpec("P")
R = TypeVar("R")


class BufferThreads:
    """A bounded number of threads of one process."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, "writeback", initializer=prefer_event_loop)

    async def run(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run the function to its end, even if the caller is cancelled meanwhile."""
        return await asyncio.wrap_future(self._threads.submit(function, *arguments, **keywords))

    async def finish(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run the function; a cancelled caller waits until no thread runs it any more."""
        return await to_its_end(self._threads.submit(function, *arguments, **keywords), lambda: None)

    async def open(
        self, function: Callable[P, FileLease[SharedFile]], *arguments: P.args, **keywords: P.kwargs
    ) -> FileLease[SharedFile]:
        """Run a function that opens a file; close the file if the caller was cancelled."""
        opening = self._threads.submit(function, *arguments, **keywords)
        try:
            return await asyncio.wrap_future(opening)
        except BaseException:
            opening.add_done_callback(close_opened)
            raise

    def run_holding(
        self,
        file: FileLease[SharedFile],
        function: Callable[Concatenate[FileLease[SharedFile], P], R],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """Run a function with its own lease on a file: the caller's lease may end before the thread is done."""
        return self.run(with_lease(file.share(), function), *arguments, **keywords)

    def shut_down(self) -> None:
        """Wait until all calls have ended; blocks."""
        self._threads.shutdown(wait=True)
