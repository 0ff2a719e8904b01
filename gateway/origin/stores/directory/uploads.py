"""Multipart uploads in a directory: each byte is written once, to where the object will have it. All of it blocks.

    .forebay-origin/uploads/ID/meta      key, headers, time
                               data      the object to be: part N at (N - 1) x stride
                               stride    a link whose target is a number: the size of the first part of 5 MiB or more
                               records   page N - 1: part N is whole and synced; its size, ETag, checksums and file
                               N.ID      a part that has no place in `data`: unknown or odd in size, or written again

Complete reads and removes as few files for ten thousand parts as for one. Each record has a page to itself, because the
nodes of a file server may write whole pages. A record that a power failure has torn does not have its checksum.

Who writes a part into `data` has locked its range there, on all nodes, for as long as a thread may still write. So an
attempt that everybody has given up, and that goes on later, meets no bytes but its own. While there is one, Complete
makes a file anew; else it locks all of `data`, and no part begins there any more.

Complete renames `data`, if its parts are the listed ones, one behind the other. The rest, as a rule a short last part
that came before the stride was known, is copied to its place. If the parts lie otherwise, a file is made of them.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey
from gateway.origin.stores.directory import sidecars
from gateway.origin.stores.directory.abandoned_files import remove
from gateway.origin.stores.directory.beneath import opened_beneath
from gateway.origin.stores.directory.files import Files, told
from gateway.origin.stores.directory.held import HeldFile, has_locked, lock
from gateway.origin.stores.directory.key_paths import refusal
from gateway.origin.stores.directory.versions import found_in
from gateway.origin.stores.directory.writes import Writer, write_all
from gateway.origin.stores.store import (
    PART_SIZE_BYTES_MIN,
    Condition,
    Found,
    FoundPart,
    FoundUpload,
    Headers,
    checked,
    chosen,
)
from gateway.s3.checksums import PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import multipart_etag
from gateway.s3.xml import CompletedPart

_ID = re.compile("[0-9a-f]{32}")
_UPLOADS, _DATA, _META, _STRIDE, _RECORDS = b"uploads", b"data", b"meta", b"stride", b"records"
_RECORD_BYTES, _BEFORE_RECORD = 4096, struct.Struct("<II")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COPIED_BYTES = 1024 * 1024


class NewPart(HeldFile):
    """A part that is being written into `file` of its upload, from `base` on; at most `size_bytes_max` bytes."""

    def __init__(
        self, descriptor: int, upload: tuple[ObjectKey, str], number: int, file: bytes, base: int, size_bytes_max: int
    ) -> None:
        super().__init__(descriptor)
        self.upload, self.number = upload, number
        self.file, self.base, self._size_bytes_max = file, base, size_bytes_max

    def write(self, data: bytes | memoryview, offset: int) -> None:
        if offset + len(data) > self._size_bytes_max:
            raise s3_error("IncompleteBody")  # its neighbour begins there
        with told(), self.in_use():
            write_all(self.descriptor, data, self.base + offset)


class Uploads:
    def __init__(self, files: Files, writer: Writer) -> None:
        self._files = files
        self._writer = writer

    def begin(self, key: ObjectKey, headers: Headers) -> str:
        if (refused := refusal(key.key)) is not None:
            raise refused
        if key.key.endswith("/"):
            raise s3_error("InvalidArgument", "The origin is a directory, and dir/ has no bytes.")
        self._writer.check_place(key)
        upload_id = uuid.uuid4().hex
        with told(), self._files.bucket(key.bucket) as bucket, self._writer.own(bucket, _UPLOADS) as uploads:
            made = f".{upload_id}"
            os.mkdir(made, 0o700, dir_fd=uploads)
            try:
                self._fill(uploads, made, {"key": key.key, "headers": headers, "initiated": time.time()})
                os.rename(made, upload_id, src_dir_fd=uploads, dst_dir_fd=uploads)
            except OSError:
                remove(uploads, made)
                raise
            os.fsync(uploads)
        return upload_id

    def began(self, key: ObjectKey, upload_id: str) -> Headers:
        with self._opened(key, upload_id) as (_, _, meta):
            headers: Headers = meta["headers"]
            return headers

    def begin_part(self, key: ObjectKey, upload_id: str, number: int, size_bytes: int | None) -> NewPart:
        with self._opened(key, upload_id) as (_, directory, _):
            stride, upload = _stride(directory, size_bytes), (key, upload_id)
            if stride is not None and size_bytes is not None and size_bytes <= stride:
                base = (number - 1) * stride
                if (data := _range_of_data(directory, number, base, stride)) is not None:
                    return NewPart(data, upload, number, _DATA, base, size_bytes)
            name = f"{number:05}.{uuid.uuid4().hex}".encode()
            return NewPart(os.open(name, _NEW, 0o600, dir_fd=directory), upload, number, name, 0, sys.maxsize)

    def give_up_part(self, new: NewPart) -> None:
        """Let another attempt have its place."""
        new.close()
        if new.file != _DATA:
            with suppress(OSError, S3Error), self._opened(*new.upload) as (_, directory, _):
                os.unlink(new.file, dir_fd=directory)

    def finish_part(self, new: NewPart, md5: bytes, size_bytes: int, checksums: Headers) -> FoundPart:
        part = FoundPart(new.number, size_bytes, f'"{md5.hex()}"', time.time(), checksums)
        try:
            with self._opened(*new.upload) as (_, directory, _):
                os.fsync(new.descriptor)
                if new.file != _DATA:
                    os.fsync(directory)
                record = {"size": size_bytes, "etag": part.etag, "modified": part.modified, "checksums": checksums}
                record |= {"file": new.file.decode(), "offset": new.base}
                before = _records(directory, new.number).get(new.number)
                _write_records(directory, {new.number: orjson.dumps(record)})
                os.utime(directory)  # an upload that gets parts is not abandoned
                if before is not None and before["file"] not in ("data", new.file.decode()):
                    with suppress(OSError):
                        os.unlink(before["file"], dir_fd=directory)
        finally:
            new.close()
        return part

    def parts(self, key: ObjectKey, upload_id: str) -> list[FoundPart]:
        with self._opened(key, upload_id) as (_, directory, _):
            records = _records(directory)
        return [_found(number, record) for number, record in sorted(records.items())]

    def complete(
        self,
        key: ObjectKey,
        upload_id: str,
        listed: Sequence[CompletedPart],
        headers: Headers,
        condition: Condition,
    ) -> Found:
        with told(key), self._files.bucket(key.bucket) as bucket:
            if (done := self._done(bucket, key, upload_id, listed)) is None:
                with self._opened(key, upload_id) as (_, directory, meta), _alone(directory):
                    done = self._done(bucket, key, upload_id, listed)  # by another, meanwhile
                    done = done or self._complete(bucket, directory, meta, key, upload_id, listed, headers, condition)
        with suppress(S3Error):
            self.abort(key, upload_id, lasts=False)
        return done

    def _complete(
        self,
        bucket: int,
        directory: int,
        meta: Mapping[str, Any],
        key: ObjectKey,
        upload_id: str,
        listed: Sequence[CompletedPart],
        headers: Headers,
        condition: Condition,
    ) -> Found:
        records = _records(directory)
        parts = chosen(upload_id, {number: _found(number, one) for number, one in records.items()}, listed)
        made = _Made.of(meta, parts, headers, upload_id)
        chosen_records, places = {part.number: records[part.number] for part in parts}, _places(parts)
        lies_so = all(one["file"] != "data" or one["offset"] == places[at] for at, one in chosen_records.items())
        with opened_beneath(directory, [_DATA], os.O_RDWR, follows_links=False) as data:
            if lies_so and has_locked(data) and os.fstat(data).st_nlink == 1:
                seen = self._finish_in_place(bucket, key, directory, data, made, chosen_records, places, condition)
            else:
                seen = self._finish_anew(bucket, key, directory, made, chosen_records, places, condition)
        return found_in(key.key, seen, made.written, 0)

    def _done(self, bucket: int, key: ObjectKey, upload_id: str, listed: Sequence[CompletedPart]) -> Found | None:
        """Return the object if it was made by this Complete already."""
        opened = self._writer.open(bucket, key)
        if opened is None:
            return None
        opened.close()
        is_it = opened.written is not None and opened.written["upload"] == upload_id
        return opened.found if is_it and opened.found.etag == multipart_etag([one.etag for one in listed]) else None

    def _finish_in_place(
        self,
        bucket: int,
        key: ObjectKey,
        directory: int,
        data: int,
        made: _Made,
        records: Mapping[int, Mapping[str, Any]],
        places: Mapping[int, int],
        condition: Condition,
    ) -> os.stat_result:
        seen: list[os.stat_result] = []

        def before() -> None:
            """Whatever else the upload has is lost from here on; its records go first."""
            _write_records(directory, dict.fromkeys(_records(directory).keys() - records.keys(), b""))
            for number, record in records.items():
                if record["file"] != "data":
                    _copy(directory, record, data, places[number])
            os.ftruncate(data, made.size_bytes)
            seen.append(self._writer.keep(bucket, data, *made.kept))

        self._writer.publish(bucket, key, directory, _DATA, condition, before)
        return seen[-1]

    def _fill(self, uploads: int, name: str, meta: Mapping[str, Any]) -> None:
        """Make the files of a new upload, and sync them. OSError."""
        with opened_beneath(uploads, [name.encode()], os.O_RDONLY | os.O_DIRECTORY) as directory:
            for own, content in ((_META, orjson.dumps(meta)), (_RECORDS, b""), (_DATA, b"")):
                is_data = own == _DATA
                file = self._writer.create(directory, own) if is_data else os.open(own, _NEW, 0o600, dir_fd=directory)
                try:
                    write_all(file, content, 0)
                    os.fsync(file)
                finally:
                    os.close(file)
            os.fsync(directory)

    def _finish_anew(
        self,
        bucket: int,
        key: ObjectKey,
        directory: int,
        made: _Made,
        records: Mapping[int, Mapping[str, Any]],
        places: Mapping[int, int],
        condition: Condition,
    ) -> os.stat_result:
        name = f"whole.{uuid.uuid4().hex}".encode()
        descriptor = self._writer.create(directory, name)
        try:
            for number, record in records.items():
                _copy(directory, record, descriptor, places[number])
            seen = self._writer.keep(
                bucket, descriptor, made.etag, made.headers, made.checksums, made.sizes, made.upload_id
            )
            self._writer.publish(bucket, key, directory, name, condition)
        except BaseException:
            sidecars.remove(bucket, os.fstat(descriptor).st_ino)
            raise
        finally:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(name, dir_fd=directory)
        return seen

    def abort(self, key: ObjectKey, upload_id: str, *, lasts: bool = True) -> None:
        with self._opened(key, upload_id) as (bucket, directory, _), self._writer.own(bucket, _UPLOADS) as uploads:
            os.unlink(_META, dir_fd=directory)  # from here on it is unknown
            remove(uploads, upload_id)
            if lasts:
                os.fsync(uploads)

    def open_uploads(self, bucket: str, prefix: str) -> list[FoundUpload]:
        found = []
        with told(), self._files.bucket(bucket) as opened, self._writer.own(opened, _UPLOADS) as uploads:
            for name in filter(_ID.fullmatch, os.listdir(uploads)):
                with suppress(OSError), opened_beneath(uploads, [name.encode()], os.O_RDONLY | os.O_DIRECTORY) as one:
                    meta = _read(one, _META)
                    if meta is not None and meta["key"].startswith(prefix):
                        found.append(FoundUpload(meta["key"], name, meta["initiated"]))
        return sorted(found, key=lambda one: (one.key.encode(), one.initiated, one.upload_id))

    @contextmanager
    def _opened(self, key: ObjectKey, upload_id: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Open bucket and directory of an upload, and read what it began with. S3Error NoSuchUpload."""
        unknown = s3_error("NoSuchUpload", UploadId=upload_id)
        if not _ID.fullmatch(upload_id):
            raise unknown
        with told(key), self._files.bucket(key.bucket) as bucket:
            try:
                with (
                    self._writer.own(bucket, _UPLOADS) as uploads,
                    opened_beneath(uploads, [upload_id.encode()], os.O_RDONLY | os.O_DIRECTORY) as directory,
                ):
                    meta = _read(directory, _META)
                    if meta is None or meta["key"] != key.key:
                        raise unknown
                    yield bucket, directory, meta
            except FileNotFoundError:
                raise unknown from None


@dataclass(frozen=True, slots=True)
class _Made:
    """The object that a Complete makes."""

    etag: str
    headers: Headers
    checksums: Headers
    sizes: Sequence[int]
    upload_id: str

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def kept(self) -> tuple[str, Headers, Headers, Sequence[int], str]:
        return self.etag, self.headers, self.checksums, self.sizes, self.upload_id

    @property
    def written(self) -> dict[str, Any]:
        parts = [(size, 1) for size in self.sizes]
        return {"etag": self.etag, "headers": self.headers, "checksums": self.checksums, "parts": parts}

    @classmethod
    def of(cls, meta: Mapping[str, Any], parts: Sequence[FoundPart], headers: Headers, upload_id: str) -> _Made:
        """S3Error if the Complete says something else of the object than its parts do."""
        sizes = [part.size_bytes for part in parts]
        checksums = checked(meta["headers"], parts, headers)
        kept = {name: value for name, value in meta["headers"].items() if not name.startswith(PREFIX)}
        return cls(multipart_etag([part.etag for part in parts]) or "", kept, checksums, sizes, upload_id)


def _places(parts: Sequence[FoundPart]) -> dict[int, int]:
    """Return where each part lies in the object."""
    places, end = dict[int, int](), 0
    for part in parts:
        places[part.number] = end
        end += part.size_bytes
    return places


def _stride(directory: int, size_bytes: int | None) -> int | None:
    with suppress(OSError):
        return int(os.readlink(_STRIDE, dir_fd=directory))
    if size_bytes is None or size_bytes < PART_SIZE_BYTES_MIN:
        return None
    with suppress(OSError):
        os.symlink(str(size_bytes).encode(), _STRIDE, dir_fd=directory)
        os.fsync(directory)
    with suppress(OSError):
        return int(os.readlink(_STRIDE, dir_fd=directory))
    return None


def _range_of_data(directory: int, number: int, base: int, size_bytes: int) -> int | None:
    """Open `data` with the range of a part locked; None: somebody writes or has written it, or it is the object now."""
    try:
        data = os.open(_DATA, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    is_free = False
    try:
        if has_locked(data, base, size_bytes):
            now, record = os.stat(_DATA, dir_fd=directory), _records(directory, number).get(number)
            is_data = os.path.samestat(now, os.fstat(data)) and now.st_nlink == 1
            is_free = is_data and (record is None or record["file"] != "data")
    except FileNotFoundError:
        pass
    finally:
        if not is_free:
            os.close(data)
    return data if is_free else None


@contextmanager
def _alone(directory: int) -> Iterator[None]:
    """Let one Complete after the other have an upload."""
    with opened_beneath(directory, [_META], os.O_RDWR, follows_links=False) as meta:
        lock(meta)
        yield


def _records(directory: int, number: int | None = None) -> dict[int, dict[str, Any]]:
    """Read the record of one part, or of all."""
    offset = (number - 1) * _RECORD_BYTES if number is not None else 0
    found = {}
    with opened_beneath(directory, [_RECORDS], os.O_RDONLY, follows_links=False) as file:
        size_bytes = _RECORD_BYTES if number is not None else os.fstat(file).st_size
        while pages := os.pread(file, min(size_bytes, _COPIED_BYTES), offset):
            for at in range(0, len(pages), _RECORD_BYTES):
                checksum, length = _BEFORE_RECORD.unpack_from(pages, at)
                packed = pages[at + _BEFORE_RECORD.size : at + _BEFORE_RECORD.size + length] if length else b""
                if packed and checksum == zlib.crc32(packed):
                    found[(offset + at) // _RECORD_BYTES + 1] = orjson.loads(packed)
            offset, size_bytes = offset + len(pages), size_bytes - len(pages)
    return found


def _write_records(directory: int, packed: Mapping[int, bytes]) -> None:
    """Write records, empty ones of parts that are none, and sync them."""
    if not packed:
        return
    with opened_beneath(directory, [_RECORDS], os.O_RDWR, follows_links=False) as file:
        for number, one in packed.items():
            page = _BEFORE_RECORD.pack(zlib.crc32(one), len(one)) + one
            write_all(file, page.ljust(_RECORD_BYTES, b"\0"), (number - 1) * _RECORD_BYTES)
        os.fdatasync(file)


def _found(number: int, record: Mapping[str, Any]) -> FoundPart:
    return FoundPart(number, record["size"], record["etag"], record["modified"], record["checksums"])


def _read(directory: int, name: bytes) -> dict[str, Any] | None:
    try:
        with opened_beneath(directory, [name], os.O_RDONLY, follows_links=False) as file:
            read: dict[str, Any] = orjson.loads(os.pread(file, os.fstat(file).st_size, 0))
            return read
    except FileNotFoundError:
        return None


def _copy(directory: int, record: Mapping[str, Any], target: int, place: int) -> None:
    """Copy a part, by the file system itself where it can (reflinks; the file server)."""
    left, offset = record["size"], record["offset"]
    with opened_beneath(directory, [record["file"].encode()], os.O_RDONLY, follows_links=False) as source:
        while left:
            try:
                count = os.copy_file_range(source, target, left, offset, place)
            except OSError:
                data = os.pread(source, min(left, _COPIED_BYTES), offset)
                write_all(target, data, place)
                count = len(data)
            if not count:
                raise OSError("a part is shorter than it was")
            left, offset, place = left - count, offset + count, place + count
