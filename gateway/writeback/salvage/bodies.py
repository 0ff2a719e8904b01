"""The bytes of one pending object into a file: verified, complete, durable, or not there at all. Blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gateway.errors import BufferDamaged
from gateway.file_lease import FileLease, SharedFile
from gateway.s3.headers import multipart_etag, unquote
from gateway.writeback.files.staged_file import StagedFile, Staging, read_verified
from gateway.writeback.journal.records import Write

_PIECE_BYTES = 1024 * 1024
_FILE_MODE = 0o600


def file_name(pending: Write) -> str:
    """The same for the same object, another for any other; nothing of the key is in it."""
    key = pending.key
    named = "\0".join((key.bucket, key.key, pending.etag)).encode("utf-8", "surrogatepass")
    return f"{pending.sequence:012d}-{hashlib.sha256(named).hexdigest()[:16]}"


def write_body(staging: Staging, pending: Write, path: Path, told: Callable[[int], None]) -> None:
    """Make the file `path`, which is told of every so many bytes.

    BufferDamaged when the bytes are not there, or are not those that were acknowledged; OSError when the file cannot be
    written.
    """
    _check_row(pending)
    part = path.with_name(f"{path.name}.part")
    with suppress(FileNotFoundError):
        part.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(part, flags, _FILE_MODE)
    try:
        for one in pending.parts:
            _copy(staging, one.file, descriptor, told)
        os.fsync(descriptor)
        part.rename(path)
    except BaseException:
        part.unlink()
        raise


def _check_row(pending: Write) -> None:
    """The parts that the journal has for it are those that it was acknowledged with."""
    etags = [part.file.etag for part in pending.parts]
    etag = multipart_etag(etags) if pending.multipart else etags[0] if len(etags) == 1 else None
    size_bytes = sum(part.file.size_bytes for part in pending.parts)
    if etag is None or unquote(etag) != unquote(pending.etag) or size_bytes != pending.size_bytes:
        raise BufferDamaged(f"the journal's rows of parts do not make {pending.etag} of {pending.size_bytes} bytes")


def _copy(staging: Staging, file: StagedFile, target: int, told: Callable[[int], None]) -> None:
    md5 = hashlib.md5(usedforsecurity=False)
    with _opened(staging, file) as opened:
        for position in range(0, file.size_bytes, _PIECE_BYTES):
            piece = _read(opened, file, position, min(_PIECE_BYTES, file.size_bytes - position))
            md5.update(piece)
            _write(target, piece)
            told(len(piece))
    if md5.digest() != file.md5:
        raise BufferDamaged(f"staged file {file.name} is not what its MD5 says")


def _opened(staging: Staging, file: StagedFile) -> FileLease[SharedFile]:
    try:
        return staging.open(file)
    except OSError as error:
        raise BufferDamaged(f"staged file {file.name} cannot be opened: {error.strerror}") from error


def _read(opened: FileLease[SharedFile], file: StagedFile, position: int, count: int) -> memoryview:
    try:
        return read_verified(opened, file, position, count)
    except OSError as error:
        raise BufferDamaged(f"staged file {file.name} cannot be read at {position}: {error.strerror}") from error


def _write(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
