"""Exports everything in a buffer that the origin does not have into a directory of plain files. Blocks.

    DIR/manifest.jsonl      one JSON document a line (manifest.py): what lies where, and what else there was
    DIR/objects/<name>      the bytes of one object each; keys never become names

A second run continues: files under their final names are complete. The manifest appears at the end, and is that of the
last run. The buffer is only read.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from gateway.core.errors import BufferDamaged, StartupError
from gateway.disk.atomic_write import sync_directory
from gateway.s3.headers import multipart_etag, unquote
from gateway.writeback import DIRECTORY
from gateway.writeback.files.staged_file import DIRECTORY_MODE, FILE_MODE, StagedFile, Staging, read_verified
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.schema import connect_reading
from gateway.writeback.offline_export.journal_copy import JOURNAL, JournalCopy, refuse_without_journal
from gateway.writeback.offline_export.manifest import (
    Findings,
    Unreadable,
    damaged_line,
    end_line,
    header_line,
    object_line,
    tombstone_line,
    upload_line,
)
from gateway.writeback.opening import FORMAT

MANIFEST = "manifest.jsonl"
OBJECTS = "objects"

_SCRATCH = ".journal-"
_PIECE_BYTES = 1024 * 1024


class ExportProgress(Protocol):
    """Takes the progress of an export."""

    def begin(self, objects: int, size_bytes: int) -> None:
        """Report the numbers of objects and bytes to come, as far as the journal can be read."""

    def advance(self, size_bytes: int) -> None:
        """Report `size_bytes` more that are exported."""

    def damaged(self, name: str, reason: str) -> None:
        """Report something that cannot be exported."""


def buffer_of(directory: Path) -> Path:
    """Return the buffer in a cache directory, or the directory itself if it is a buffer."""
    inside = directory / DIRECTORY
    return inside if inside.is_dir() or not (directory / "journal").exists() else directory


def export(buffer: Path, target: Path, progress: ExportProgress, *, running: bool) -> Findings:
    """Export all of it; `running`: a gateway works with the buffer, and what it flushes meanwhile is left out.

    StartupError if this is no buffer of this version, or the target holds another export; BufferUnavailable when the
    journal cannot be read at all; OSError when the target cannot be written.
    """
    refuse_without_journal(buffer)
    _check_format(buffer)
    with _alone(target), tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target) as scratch:
        _refuse_other_export(target, buffer)
        copy = (JournalCopy.of_running if running else JournalCopy.of_stopped)(buffer, Path(scratch))
        try:
            progress.begin(*copy.totals())
            with _whole_file(target / MANIFEST) as manifest:
                found = _Export(buffer, target, progress, copy, manifest, running=running).run()
        finally:
            copy.close()
        sync_directory(target)
        return found


class _Export:
    """One run of an export."""

    def __init__(
        self,
        buffer: Path,
        target: Path,
        progress: ExportProgress,
        copy: JournalCopy,
        manifest: BinaryIO,
        *,
        running: bool,
    ) -> None:
        self._buffer = buffer
        self._staging = Staging(buffer, 0)
        self._objects = target / OBJECTS
        self._progress = progress
        self._copy = copy
        self._manifest = manifest
        self._running = running
        self._found = Findings()

    def run(self) -> Findings:
        self._write(header_line(str(self._buffer.absolute()), time.time()))
        for one in self._copy.objects():
            self._take(one)
        for upload, parts, size_bytes in self._copy.uploads():
            self._found.uploads += 1
            self._write(upload_line(upload, parts, size_bytes))
        self._count_unnamed()
        self._found.warnings += self._copy.warnings
        self._write(end_line(self._found))
        sync_directory(self._objects)
        return self._found

    def _take(self, one: Write | Unreadable) -> None:
        if isinstance(one, Unreadable):
            self._damaged(one.sequence, damaged_line(one.sequence, one.key, one.reason), str(one.key), one.reason)
        elif one.deleted:
            self._found.tombstones += 1
            self._write(tombstone_line(one))
        else:
            self._take_object(one)

    def _take_object(self, pending: Write) -> None:
        name = file_name(pending)
        try:
            if _has(self._objects / name, pending.size_bytes):
                self._progress.advance(pending.size_bytes)
            else:
                self._write_body(pending, self._objects / name)
        except BufferDamaged as error:
            files = [part.file.name for part in pending.parts]
            line = damaged_line(pending.sequence, pending.key, str(error), files)
            self._damaged(pending.sequence, line, str(pending.key), str(error))
            return
        self._found.objects += 1
        self._found.size_bytes += pending.size_bytes
        self._write(object_line(pending, f"{OBJECTS}/{name}"))

    def _write_body(self, pending: Write, path: Path) -> None:
        """Write no file and raise BufferDamaged when bytes are missing, or differ from the acknowledged ones."""
        _check_row(pending)
        with _whole_file(path) as file:
            for part in pending.parts:
                for piece in _pieces(self._staging, part.file):
                    file.write(piece)
                    self._progress.advance(len(piece))

    def _count_unnamed(self) -> None:
        try:
            self._found.unnamed_files = sum(not self._copy.knows_file(name) for name in self._staging.names())
        except OSError as error:
            self._found.warnings.append(f"the staged files cannot be listed: {error}")

    def _damaged(self, sequence: int, line: dict[str, Any], name: str, reason: str) -> None:
        if self._running and not self._is_pending(sequence):
            return  # the origin has it by now, or a later write replaced it
        self._found.damaged += 1
        self._progress.damaged(name, reason)
        self._write(line)

    def _is_pending(self, sequence: int) -> bool:
        connection = connect_reading(str(self._buffer / JOURNAL))
        try:
            return connection.execute("SELECT 1 FROM writes WHERE sequence = ?", (sequence,)).fetchone() is not None
        finally:
            connection.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._manifest.write(orjson.dumps(line) + b"\n")


def _check_format(buffer: Path) -> None:
    with suppress(FileNotFoundError):  # the journal has its version, too
        found = (buffer / "FORMAT").read_bytes()
        if found != FORMAT:
            raise StartupError(
                f"{buffer} has the write-back format {found!r}, this version reads {FORMAT!r}: "
                "export it with the version that wrote it"
            )


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Make the target if it is missing, and keep other exports from it."""
    for path in (target, target / OBJECTS):
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"another export to {target} is at work") from None
        for left in target.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left)
        yield
    finally:
        os.close(descriptor)


def _refuse_other_export(target: Path, buffer: Path) -> None:
    with suppress(FileNotFoundError), (target / MANIFEST).open("rb") as manifest:
        before = _buffer_of(manifest.readline())
        if before != str(buffer.absolute()):
            raise StartupError(f"{target} holds an export of {before}: give this one a directory of its own")


def _buffer_of(line: bytes) -> str:
    try:
        return str(orjson.loads(line)["buffer"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "something else"


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which gets its name once it is synced; after an error the old file stays."""
    new = path.with_name(f"{path.name}.part")
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(new, flags, FILE_MODE), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


# The bytes of one object


def file_name(pending: Write) -> str:
    """Return a name without anything of the key in it: the same for the same object, unlike that of any other."""
    key = pending.key
    named = "\0".join((key.bucket, key.key, pending.etag)).encode("utf-8", "surrogatepass")
    return f"{pending.sequence:012d}-{hashlib.sha256(named).hexdigest()[:16]}"


def _check_row(pending: Write) -> None:
    """Raise BufferDamaged unless the journal's parts make the acknowledged ETag and length."""
    etags = [part.file.etag for part in pending.parts]
    etag = multipart_etag(etags) if pending.multipart else etags[0] if len(etags) == 1 else None
    size_bytes = sum(part.file.size_bytes for part in pending.parts)
    if etag is None or unquote(etag) != unquote(pending.etag) or size_bytes != pending.size_bytes:
        raise BufferDamaged(f"the journal's rows of parts do not make {pending.etag} of {pending.size_bytes} bytes")


def _pieces(staging: Staging, file: StagedFile) -> Iterator[memoryview]:
    """Yield a staged file's bytes; BufferDamaged at the first that is unreadable, or not the acknowledged one."""
    md5 = hashlib.md5(usedforsecurity=False)
    try:
        with staging.open(file) as opened:
            for position in range(0, file.size_bytes, _PIECE_BYTES):
                piece = read_verified(opened, file, position, min(_PIECE_BYTES, file.size_bytes - position))
                md5.update(piece)
                yield piece
    except OSError as error:
        raise BufferDamaged(f"staged file {file.name} cannot be read: {error.strerror}") from error
    if md5.digest() != file.md5:
        raise BufferDamaged(f"staged file {file.name} is not what its MD5 says")


def _has(path: Path, size_bytes: int) -> bool:
    with suppress(FileNotFoundError):
        return path.lstat().st_size == size_bytes
    return False
