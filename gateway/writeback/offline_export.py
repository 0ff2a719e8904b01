"""Exports everything in a buffer that the origin does not have into a directory of plain files. Blocks.

    DIR/manifest.jsonl      one JSON document a line: what lies where, and what else there was
    DIR/objects/<name>      the bytes of one object each; keys never become names

A second run continues: files under their final names are complete. The manifest appears at the end, and is that of the
last run. The buffer is only read, as it may be a read-only mount, and its journal from a copy in a scratch directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from gateway.core.errors import BufferDamaged, BufferUnavailable, StartupError
from gateway.core.model import ObjectKey
from gateway.disk.atomic_write import sync_directory
from gateway.s3.headers import multipart_etag, unquote
from gateway.writeback import DIRECTORY
from gateway.writeback.journal import schema
from gateway.writeback.journal.integrity_check import check_log
from gateway.writeback.journal.records import Write, unpack_write
from gateway.writeback.journal.rows import OPEN
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.opening import FORMAT
from gateway.writeback.staged_file import DIRECTORY_MODE, FILE_MODE, StagedFile, Staging, read_verified

MANIFEST = "manifest.jsonl"
MANIFEST_VERSION = 1
OBJECTS = "objects"

_JOURNAL, _LOG = "journal", "journal-wal"
_SCRATCH = ".journal-"
_PIECE_BYTES = 1024 * 1024

_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""SQLite's messages quote what is damaged, and Python takes them for UTF-8."""


class ExportProgress(Protocol):
    """Takes the progress of an export."""

    def begin(self, objects: int, size_bytes: int) -> None:
        """Report the numbers of objects and bytes to come, as far as the journal can be read."""

    def advance(self, size_bytes: int) -> None:
        """Report `size_bytes` more that are exported."""

    def damaged(self, name: str, reason: str) -> None:
        """Report something that cannot be exported."""


@dataclass(slots=True)
class Findings:
    """The findings of an export. `damaged` counts objects that could not be exported; `warnings` name other faults.

    `unnamed_files` are staged files that no readable row names: never acknowledged, unless the journal is damaged.
    """

    objects: int = 0
    size_bytes: int = 0
    tombstones: int = 0
    damaged: int = 0
    uploads: int = 0
    unnamed_files: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Return whether all that was acknowledged was found undamaged."""
        return self.damaged == 0 and not self.warnings

    def document(self) -> dict[str, Any]:
        return asdict(self)


def buffer_of(directory: Path) -> Path:
    """Return the buffer in a cache directory, or the directory itself if it is a buffer."""
    inside = directory / DIRECTORY
    return inside if inside.is_dir() or not (directory / _JOURNAL).exists() else directory


def export(buffer: Path, target: Path, progress: ExportProgress, *, running: bool) -> Findings:
    """Export all of it; `running`: a gateway works with the buffer, and what it flushes meanwhile is left out.

    StartupError if this is no buffer of this version, or the target holds another export; BufferUnavailable when the
    journal cannot be read at all; OSError when the target cannot be written.
    """
    _refuse_other_directories(buffer)
    with _alone(target), tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target) as scratch:
        _refuse_other_export(target, buffer)
        warnings = (_copy_running if running else _copy_stopped)(buffer, Path(scratch))
        with closing(_open_copy(Path(scratch), warnings)) as journal:
            exporting = _Export(buffer, target, progress, journal, Findings(warnings=warnings), running=running)
            exporting.begin()
            with _whole_file(target / MANIFEST) as manifest:
                exporting.run(manifest)
        sync_directory(target)
        return exporting.found


def _refuse_other_directories(buffer: Path) -> None:
    if not (buffer / _JOURNAL).exists():  # SQLite would make a new, empty one
        raise StartupError(f"{buffer} holds no write-back journal")
    if (buffer / _JOURNAL).stat().st_size == 0 and not (buffer / _LOG).exists():
        raise StartupError(f"the write-back journal in {buffer} is empty, and its log is missing")
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
        try:
            before = str(orjson.loads(manifest.readline())["buffer"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            before = "something else"
        if before != str(buffer.absolute()):
            raise StartupError(f"{target} holds an export of {before}: give this one a directory of its own")


# The copy of the journal. Each function returns warnings that name the parts that are unreliable


def _copy_stopped(buffer: Path, scratch: Path) -> list[str]:
    """Copy the files of a buffer that no process writes to, the log with them: SQLite recovers the copy."""
    for name in (_JOURNAL, _LOG):
        if (buffer / name).exists():
            shutil.copyfile(buffer / name, scratch / name)
    try:
        check_log(scratch / _LOG)
    except BufferDamaged as error:
        return [f"{error}: what was acknowledged from there on is not found"]
    return []


def _copy_running(buffer: Path, scratch: Path) -> list[str]:
    try:
        with (
            closing(schema.connect_reading(str(buffer / _JOURNAL))) as source,
            closing(sqlite3.connect(scratch / _JOURNAL)) as target,
        ):
            source.backup(target)
    except _UNREADABLE as error:
        raise BufferUnavailable(f"the write-back journal in {buffer} cannot be copied: {error}") from error
    return []


def _open_copy(scratch: Path, warnings: list[str]) -> sqlite3.Connection:
    """Open the copy, and add to the warnings. BufferUnavailable if it is unreadable, or of another version."""
    connection = sqlite3.connect(scratch / _JOURNAL)
    try:
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.isolation_level = None
        schema.prepare(connection)
        [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
    except (*_UNREADABLE, StartupError) as error:
        connection.close()
        told = "; ".join([f"the write-back journal cannot be read: {error}", *warnings])
        raise BufferUnavailable(told) from error
    if found != "ok":
        warnings.append(f"the write-back journal is damaged, what it has lost is not found: {found}")
    return connection


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A damaged row of the journal: its keys, as far as they are credible, and the damage."""

    sequence: int
    key: ObjectKey
    reason: str


class _Export:
    """One run of an export."""

    def __init__(
        self,
        buffer: Path,
        target: Path,
        progress: ExportProgress,
        journal: sqlite3.Connection,
        found: Findings,
        *,
        running: bool,
    ) -> None:
        self._buffer = buffer
        self._staging = Staging(buffer, 0)
        self._objects = target / OBJECTS
        self._progress = progress
        self._journal = journal
        self._tx = JournalTransaction(journal)
        self._running = running
        self.found = found

    def begin(self) -> None:
        sizes = [
            one.size_bytes for one in self._pending(with_parts=False) if isinstance(one, Write) and not one.deleted
        ]
        self._progress.begin(len(sizes), sum(sizes))

    def run(self, manifest: BinaryIO) -> None:
        self._manifest = manifest
        self._write("export", version=MANIFEST_VERSION, buffer=str(self._buffer.absolute()), exported_at=time.time())
        for one in self._pending():
            if isinstance(one, _Unreadable):
                self._damaged(one.sequence, one.key, one.reason)
            elif one.deleted:
                self.found.tombstones += 1
                self._write("tombstone", **_place(one.sequence, one.key), acknowledged_at=one.acknowledged_at)
            else:
                self._take_object(one)
        self._take_uploads()
        try:
            self.found.unnamed_files = sum(not self._knows_file(name) for name in self._staging.names())
        except OSError as error:
            self.found.warnings.append(f"the staged files cannot be listed: {error}")
        self._write("end", **self.found.document())
        sync_directory(self._objects)

    def _pending(self, *, with_parts: bool = True) -> Iterator[Write | _Unreadable]:
        """Yield pending writes in the order of acknowledgement, with an `_Unreadable` in place of each damaged one.

        If pages of the journal are damaged, the writes behind them come last, in reverse order.
        """
        pending = "SELECT id, sequence, bucket, key, record FROM writes WHERE pending = 1 AND sequence > ?"
        last = 0
        try:
            # One by one: in a page of rows, an unreadable one would take the others with it.
            for row in self._journal.execute(f"{pending} ORDER BY sequence", (0,)):
                last = row[1]
                yield self._read(row, with_parts)
        except _UNREADABLE as error:
            self._warn(error)
            with suppress(*_UNREADABLE):  # nothing between the two can be read
                for row in self._journal.execute(f"{pending} ORDER BY sequence DESC", (last,)):
                    yield self._read(row, with_parts)

    def _read(self, row: tuple[int, int, str, bytes, bytes], with_parts: bool) -> Write | _Unreadable:
        write_id, sequence, bucket, key, record = row
        try:
            write = unpack_write(write_id, record)
            return replace(write, parts=tuple(self._tx.parts.of(write_id))) if with_parts else write
        except (*_UNREADABLE, BufferDamaged) as error:
            return _Unreadable(sequence, ObjectKey(bucket, key.decode(errors="replace")), str(error))

    def _take_object(self, pending: Write) -> None:
        key = pending.key
        # A name without anything of the key in it: the same for the same object, unlike that of any other.
        named = "\0".join((key.bucket, key.key, pending.etag)).encode("utf-8", "surrogatepass")
        name = f"{pending.sequence:012d}-{hashlib.sha256(named).hexdigest()[:16]}"
        try:
            if _has(self._objects / name, pending.size_bytes):
                self._progress.advance(pending.size_bytes)
            else:
                self._write_body(pending, self._objects / name)
        except BufferDamaged as error:
            self._damaged(pending.sequence, key, str(error), [part.file.name for part in pending.parts])
            return
        self.found.objects += 1
        self.found.size_bytes += pending.size_bytes
        # With parts of the same numbers and lengths the object has the same ETag at the origin.
        self._write(
            "object",
            **_place(pending.sequence, key),
            etag=pending.etag,
            size_bytes=pending.size_bytes,
            file=f"{OBJECTS}/{name}",
            headers=dict(pending.spec.headers),
            multipart=pending.multipart,
            parts=[[part.number, part.file.size_bytes] for part in pending.parts],
            checksums=dict(pending.checksums),
            acknowledged_at=pending.acknowledged_at,
            state=pending.state.name.lower(),
            slot=pending.spec.slot,
        )

    def _write_body(self, pending: Write, path: Path) -> None:
        """Write no file and raise BufferDamaged when bytes are missing, or differ from the acknowledged ones."""
        files = [part.file for part in pending.parts]
        etags, size_bytes = [file.etag for file in files], sum(file.size_bytes for file in files)
        etag = multipart_etag(etags) if pending.multipart else etags[0] if len(etags) == 1 else None
        if etag is None or unquote(etag) != unquote(pending.etag) or size_bytes != pending.size_bytes:
            raise BufferDamaged(f"the journal's rows of parts do not make {pending.etag} of {pending.size_bytes} bytes")
        with _whole_file(path) as body:
            for file in files:
                for piece in _pieces(self._staging, file):
                    body.write(piece)
                    self._progress.advance(len(piece))

    def _take_uploads(self) -> None:
        """Name the uploads that were never completed; their parts are not exported."""
        try:
            for row in self._journal.execute(f"SELECT id, record FROM writes WHERE {OPEN} ORDER BY key"):  # noqa: S608
                sizes = [part.file.size_bytes for part in self._tx.parts.of(row[0])]
                upload = unpack_write(*row)
                named = {"upload_id": upload.upload_id, "bucket": upload.key.bucket, "key": upload.key.key}
                self.found.uploads += 1
                self._write("upload", **named, parts=len(sizes), size_bytes=sum(sizes))
        except (*_UNREADABLE, BufferDamaged) as error:
            self._warn(error)

    def _knows_file(self, name: str) -> bool:
        try:
            return self._tx.files.knows(name)
        except _UNREADABLE:
            return False

    def _damaged(self, sequence: int, key: ObjectKey, reason: str, files: Sequence[str] = ()) -> None:
        """`files` are the staged files, as far as they are known, for inspection."""
        if self._running:
            with closing(schema.connect_reading(str(self._buffer / _JOURNAL))) as journal:
                if journal.execute("SELECT 1 FROM writes WHERE sequence = ?", (sequence,)).fetchone() is None:
                    return  # the origin has it by now, or a later write replaced it
        self.found.damaged += 1
        self._progress.damaged(str(key), reason)
        self._write("damaged", **_place(sequence, key), reason=reason, files=list(files))

    def _warn(self, error: Exception) -> None:
        warning = f"the write-back journal cannot be read as a whole: {error}"
        if warning not in self.found.warnings:
            self.found.warnings.append(warning)

    def _write(self, kind: str, **line: Any) -> None:
        self._manifest.write(orjson.dumps({"type": kind, **line}) + b"\n")


def _place(sequence: int, key: ObjectKey) -> dict[str, Any]:
    return {"sequence": sequence, "bucket": key.bucket, "key": key.key}


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
