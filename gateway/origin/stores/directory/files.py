"""The files of one directory of buckets: looks at them, and opens them. All of it blocks."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.core.errors import OriginBodyError, OriginUnreachable, S3Error
from gateway.core.model import ByteRange, ObjectKey
from gateway.origin.stores.directory import sidecars
from gateway.origin.stores.directory.beneath import answers_at_once, open_at_once, open_beneath, opened_beneath
from gateway.origin.stores.directory.held import HeldFile
from gateway.origin.stores.directory.key_paths import components
from gateway.origin.stores.directory.versions import (
    SETTLE_SECONDS,
    attribute_of,
    found_directory,
    found_in,
    is_empty,
    is_made,
    token,
)
from gateway.origin.stores.directory.walk import UNREADABLE, Directories, OnSkipped, Walk
from gateway.origin.stores.store import STANDARD, Found, Page, listed_entry, timestamp
from gateway.s3.error_codes import s3_error
from gateway.s3.list_result import ListedEntry
from gateway.s3.requests import check_bucket

_VERSIONS_MAX = 8192
"""Files whose version is remembered, for as long as they stay as they are."""

_HERE = -100
"""AT_FDCWD."""

_LOOK = os.O_PATH | os.O_CLOEXEC

FIRST_BYTES_MAX = 256 * 1024
"""Bytes that are read at once with the opening, if a reader wants no more."""

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG, errno.ENXIO})
"""Errors of a path at which there is no file: a link that leads out is none."""


@contextmanager
def told(key: ObjectKey | None = None) -> Iterator[None]:
    """Raise what an OSError means to a client."""
    try:
        yield
    except OSError as error:
        raise meaning(error, key) from error


def meaning(error: OSError, key: ObjectKey | None = None) -> S3Error | OriginUnreachable:
    if error.errno in _ABSENT:
        return s3_error("NoSuchKey", Key=key.key if key is not None else "")
    if error.errno in (errno.EACCES, errno.EPERM):
        return s3_error("AccessDenied", "The file system does not let the gateway do this.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return S3Error("ServiceUnavailable", f"The origin is full: {error.strerror}.", 507)
    if error.errno == errno.EROFS:
        return s3_error("AccessDenied", "The origin is mounted read-only.")
    return OriginUnreachable(f"the file system fails: {error}")


class Files:
    """The buckets in `root`."""

    def __init__(self, root: Path, on_skipped: OnSkipped, *, follows_links: bool = False) -> None:
        """`follows_links`: listings enter linked directories."""
        self.root = root
        self.on_skipped = on_skipped
        self._follows_links = follows_links
        self._directories = Directories(on_skipped, follows_links=follows_links)
        self._devices: dict[str, int] = {}
        self._at_once: dict[str, bytes] = {}
        """The paths of buckets on a file system that `head_at_once` may ask."""

        self._versions: dict[ObjectKey, tuple[tuple[int, ...], Found]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def bucket(self, name: str) -> Iterator[int]:
        """Open a bucket; S3Error NoSuchBucket. OriginUnreachable if another file system lies there than before.

        A NAS that is not mounted must not look like one that is empty.
        """
        path = os.fsencode(check_bucket(name))
        try:
            descriptor = self._open_bucket(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise meaning(error) from error
            raise s3_error("NoSuchBucket", BucketName=name) from None
        try:
            device = os.fstat(descriptor).st_dev
            with self._lock:
                known = self._devices.get(name)
                if known is None:
                    known = self._devices[name] = device
                    if answers_at_once(descriptor):
                        self._at_once[name] = self._path(path)
            if device != known:
                self._at_once.pop(name, None)
                raise OriginUnreachable(
                    f"{self.root}/{name} is on another file system than it was when this process began: is it "
                    "mounted? If it is meant, restart Forebay",
                    may_be_done=False,
                )
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_bucket(self, name: bytes) -> int:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            return os.open(self._path(name), flags | os.O_NOFOLLOW)
        except NotADirectoryError:  # a link, which must not lead out
            with _opened(self.root) as root:
                return open_beneath(root, [name], flags)

    def _path(self, bucket: bytes) -> bytes:
        return os.fsencode(self.root) + b"/" + bucket

    def buckets(self) -> list[tuple[str, float]]:
        found = []
        with told(), os.scandir(self.root) as entries:
            for entry in entries:
                try:
                    name = check_bucket(entry.name)
                except S3Error:
                    continue
                if entry.is_dir(follow_symlinks=False) and not name.startswith("."):
                    found.append((name, entry.stat(follow_symlinks=False).st_ctime))
        return found

    def check_bucket(self, name: str) -> None:
        with self.bucket(name):
            return

    def head(self, key: ObjectKey) -> Found:
        opened = self.open(key, None)
        opened.close()
        return opened.found

    def head_at_once(self, key: ObjectKey) -> Found | None:
        """Look at a file without a wait, for any thread; None: it is not known, or has changed.

        A file has the extended attributes that it had as long as it has its ctime.
        """
        known, root = self._versions.get(key), self._at_once.get(key.bucket)
        if known is None or root is None:
            return None
        seen, found = known
        bucket = file = -1
        try:
            bucket = open_at_once(_HERE, root, _LOOK | os.O_DIRECTORY | os.O_NOFOLLOW, beneath=False)
            file = open_at_once(bucket, key.key.encode(), _LOOK, beneath=True)
            now = os.fstat(file)  # on the device of its bucket: no mount is crossed
            return found if _identity(now) == seen and now.st_dev == self._devices[key.bucket] else None
        except OSError:
            return None
        finally:
            if bucket >= 0:
                os.close(bucket)
            if file >= 0:
                os.close(file)

    def _remember(self, key: ObjectKey, opened: OpenFile) -> None:
        changed_at = max(opened.seen.st_mtime, opened.seen.st_ctime)
        is_settled = opened.found.settles_at is None and changed_at < time.time() - SETTLE_SECONDS
        if is_settled and key.bucket in self._at_once and opened.is_file:
            with self._lock:
                self._versions[key] = _identity(opened.seen), opened.found
                if len(self._versions) > _VERSIONS_MAX:
                    del self._versions[next(iter(self._versions))]

    def open(self, key: ObjectKey, wanted: tuple[int, int | None] | None) -> OpenFile:
        """Open a file, and read its first bytes if `wanted` bytes are few. S3Error NoSuchKey.

        It is closed again if all of it was read.
        """
        path = components(key.key)
        if path is None:
            raise s3_error("NoSuchKey", Key=key.key)
        is_directory = key.key.endswith("/")
        flags = os.O_RDONLY | (os.O_DIRECTORY if is_directory else 0)
        with told(key), self.bucket(key.bucket) as bucket:
            descriptor = open_beneath(bucket, path, flags)
            try:
                opened = OpenFile(key.key, descriptor, bucket)
                self._remember(key, opened)
                if wanted is not None:
                    opened.read_ahead(wanted)
            except BaseException:
                os.close(descriptor)
                raise
        return opened

    def list(self, bucket: str, prefix: bytes, after: bytes, delimiter: bytes, limit: int) -> Page:
        found = list[ListedEntry | bytes]()
        with told(), self.bucket(bucket) as root:
            how = self.on_skipped, self._follows_links
            walk = Walk(root, self._directories, prefix, after, delimiter, *how)
            for entry in walk.entries():
                try:
                    listed = _listed(root, *entry) if entry.name else entry.key
                except OSError as error:
                    if error.errno in UNREADABLE:
                        self.on_skipped("unreadable")
                    elif error.errno not in _ABSENT:
                        raise
                    continue
                if listed is None:
                    continue
                if len(found) == limit:
                    return Page(found, is_truncated=True)
                found.append(listed)
        return Page(found, is_truncated=False)


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@contextmanager
def _opened(root: Path) -> Iterator[int]:
    descriptor = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _listed(root: int, key: bytes, directory: int, name: bytes) -> ListedEntry | None:
    """Return what a listing says of a file; None: there is none, no longer. OSError."""
    seen = os.lstat(name, dir_fd=directory)
    if stat.S_ISREG(seen.st_mode):
        return _entry(root, key, seen, b"/proc/self/fd/%d/%b" % (directory, name))
    if stat.S_ISLNK(seen.st_mode):
        with opened_beneath(root, key.split(b"/"), os.O_PATH) as target:
            seen, path = os.fstat(target), b"/proc/self/fd/%d" % target
            return _entry(root, key, seen, path, follows=True) if stat.S_ISREG(seen.st_mode) else None
    is_empty_object = name == b"." and not is_made(directory)
    return listed_entry(found_directory(key.decode(), seen)) if is_empty_object else None


def _entry(root: int, key: bytes, seen: os.stat_result, path: bytes, *, follows: bool = False) -> ListedEntry:
    written = attribute_of(path, seen, root, follows=follows)
    if written is not None:
        return listed_entry(found_in(key.decode(), seen, written, 0))
    return ListedEntry(key, timestamp(int(seen.st_mtime)), f'"{token(seen)}"', seen.st_size, STANDARD)


class OpenFile(HeldFile):
    """One version of a file, held open."""

    def __init__(self, key: str, descriptor: int, bucket: int) -> None:
        """OSError if it is no file, nor an empty directory."""
        super().__init__(descriptor)
        self._first: tuple[int, memoryview] | None = None
        self.seen = os.fstat(descriptor)
        self.is_file = stat.S_ISREG(self.seen.st_mode) and not key.endswith("/")
        if self.is_file:
            self.written = attribute_of(descriptor, self.seen, bucket)
            self.found = found_in(key, self.seen, self.written, time.time())
        elif stat.S_ISDIR(self.seen.st_mode) and key.endswith("/") and is_empty(descriptor) and not is_made(descriptor):
            self.written, self.found = None, found_directory(key, self.seen)
        else:
            raise OSError(errno.ENOENT, "no file")

    def forget(self, bucket: int) -> None:
        """Remove what lies beside it, as it has no name any more. It is still open, so no other file has its inode."""
        if os.fstat(self.descriptor).st_nlink <= 1:
            sidecars.remove(bucket, self.seen.st_ino)

    def read_ahead(self, wanted: tuple[int, int | None]) -> None:
        first, last = wanted
        end = self.found.size_bytes if last is None else min(last + 1, self.found.size_bytes)
        if 0 < end - first <= FIRST_BYTES_MAX:
            self._first = first, self.read(first, bytearray(end - first))
            if end - first == self.found.size_bytes:
                self.close()

    def first(self, wanted: ByteRange) -> memoryview | None:
        """Return these bytes if they were read with the opening."""
        begin, read = self._first or (0, memoryview(b""))
        is_read = begin <= wanted.first and wanted.stop <= begin + len(read)
        return read[wanted.first - begin : wanted.stop - begin] if is_read else None

    def read(self, offset: int, into: bytearray | memoryview) -> memoryview:
        """Fill `into`; OriginBodyError unless the file is still the version that was opened."""
        filled, view = 0, memoryview(into)
        while filled < len(view) and (count := os.preadv(self.descriptor, [view[filled:]], offset + filled)):
            filled += count
        now, seen = os.fstat(self.descriptor), self.seen
        is_same = (now.st_size, now.st_mtime_ns) == (seen.st_size, seen.st_mtime_ns)
        # A file that another one has taken the place of has a new ctime, too.
        if filled < len(view) or not is_same or (now.st_ctime_ns != seen.st_ctime_ns and now.st_nlink == seen.st_nlink):
            raise OriginBodyError("the file was changed while it was read")
        return view
