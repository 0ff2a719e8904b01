"""Writes into a directory: whole or not there, and on the disk before anybody is told. All of it blocks.

    a file of its own in .forebay-origin/tmp → bytes → attribute → fsync → rename → fsync of the directory

A lock of the key, which all nodes see that share the file system, keeps other Forebays from coming between a condition
and the rename. Of what others do with the files it knows nothing: only a file that is not there yet is made so that
nobody's is overwritten (link).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from gateway.core.errors import OriginBodyError, OriginUnreachable, S3Error
from gateway.core.model import ObjectKey
from gateway.origin.stores.directory import sidecars
from gateway.origin.stores.directory.beneath import open_beneath, opened_beneath, rename_new
from gateway.origin.stores.directory.files import Files, OpenFile, told
from gateway.origin.stores.directory.held import HeldFile, lock
from gateway.origin.stores.directory.key_paths import OWN, components, refusal
from gateway.origin.stores.directory.versions import (
    ATTRIBUTE,
    CANNOT_KEEP,
    MADE,
    found_directory,
    found_in,
    is_empty,
    is_made,
    packed_attribute,
)
from gateway.origin.stores.store import Condition, Found, Headers
from gateway.s3.error_codes import s3_error

_FILE_MODE, _DIRECTORY_MODE, _OWN_MODE = 0o666, 0o777, 0o700
"""The umask takes bits from them: other programs share the files of the directory."""

_TRIES_MAX = 16
LOCKS = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_CANNOT_RENAME_NEW = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
_CANNOT_LINK = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
_NO_ROOM_IN_ATTRIBUTE = frozenset({errno.ENOSPC, errno.E2BIG, errno.ERANGE})
_NO_WAY = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EXDEV})
_FULL_BYTES = 1024 * 1024
"""Room that is left where a file system takes no more."""


class NewFile(HeldFile):
    """A file that is being written; it is in `tmp` under `name`, until it is the object."""

    def __init__(self, bucket: str, name: bytes, descriptor: int) -> None:
        super().__init__(descriptor)
        self.bucket, self.name = bucket, name

    def write(self, data: bytes | memoryview, offset: int) -> None:
        with told(), self.in_use():
            write_all(self.descriptor, data, offset)


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


class Writer:
    """Writes into the buckets of `files`."""

    def __init__(self, files: Files, file_mode: int | None = None) -> None:
        """`file_mode`: rights of new files, whatever the umask; who may read a file may enter its directories."""
        self._files = files
        self._file_mode = file_mode
        self._locks = [threading.Lock() for _ in range(LOCKS)]

    # A write, step by step

    def begin(self, key: ObjectKey) -> NewFile:
        """Begin a file. S3Error if none can ever have this key, or none can now."""
        if (refused := refusal(key.key)) is not None:
            raise refused
        with told(), self._files.bucket(key.bucket) as bucket:
            self._check_place(bucket, key)
            with self.own(bucket, b"tmp") as directory:
                return self._new_file(key.bucket, directory)

    def write_whole(
        self,
        key: ObjectKey,
        content: memoryview,
        judged: Callable[[], tuple[str, Headers]],
        headers: Headers,
        condition: Condition,
    ) -> Found:
        """Do all steps at once. `judged` returns ETag and checksums of the content; S3Error if it is no good.

        The place is looked at only if something goes wrong there: then that is why.
        """
        if (refused := refusal(key.key)) is not None:
            raise refused
        with told(key), self._files.bucket(key.bucket) as bucket, self.own(bucket, b"tmp") as directory:
            etag, checksums = judged()
            new = self._new_file(key.bucket, directory)
            try:
                write_all(new.descriptor, content, 0)
                return self._finish(bucket, directory, new, key, etag, headers, checksums, condition)
            except BaseException as error:
                self.give_up(new)
                if isinstance(error, S3Error):
                    self._check_place(bucket, key)
                raise

    def give_up(self, new: NewFile) -> None:
        """Remove it, and what lies beside it."""
        with (
            suppress(OSError, S3Error, OriginBodyError),
            self._files.bucket(new.bucket) as bucket,
            self.own(bucket, b"tmp") as directory,
        ):
            os.unlink(new.name, dir_fd=directory)
            with new.in_use():
                sidecars.remove(bucket, os.fstat(new.descriptor).st_ino)
        new.close()

    def finish(
        self,
        new: NewFile,
        key: ObjectKey,
        etag: str,
        headers: Headers,
        checksums: Headers,
        condition: Condition,
    ) -> Found:
        """Make the file the object. S3Error if the condition does not hold; it is given up in any case."""
        try:
            with told(key), self._files.bucket(key.bucket) as bucket, self.own(bucket, b"tmp") as directory:
                return self._finish(bucket, directory, new, key, etag, headers, checksums, condition)
        except BaseException:
            self.give_up(new)
            raise

    def _finish(
        self,
        bucket: int,
        directory: int,
        new: NewFile,
        key: ObjectKey,
        etag: str,
        headers: Headers,
        checksums: Headers,
        condition: Condition,
    ) -> Found:
        seen = self.keep(bucket, new.descriptor, etag, headers, checksums)
        self.publish(bucket, key, directory, new.name, condition)
        new.close()
        return found_in(key.key, seen, {"etag": etag, "headers": headers, "checksums": checksums, "parts": ()}, 0)

    def publish(
        self,
        bucket: int,
        key: ObjectKey,
        directory: int,
        name: bytes,
        condition: Condition,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Give the synced file `name` in `directory` the key's place, and sync that. `before` runs under the lock."""
        with self.locked(bucket, key):
            for _ in range(_TRIES_MAX):
                try:
                    with self._replaced(bucket, key, condition) as current:
                        before()
                        with self._parent(bucket, key) as (parent, last):
                            _place(directory, name, parent, last, is_new=current is None)
                            os.fsync(parent)
                    return
                except FileExistsError:
                    self._check_place(bucket, key)  # a directory, or a file that somebody has just made
                except FileNotFoundError:
                    continue  # somebody has just removed the directory
                except OSError as error:
                    raise self._why(bucket, key, error) from error
        raise s3_error("ConditionalRequestConflict")

    def make_directory(self, key: ObjectKey, condition: Condition) -> Found:
        """Make the empty directory that the object `dir/` is."""
        if (refused := refusal(key.key)) is not None:
            raise refused
        with told(key), self._files.bucket(key.bucket) as bucket, self.locked(bucket, key):
            for _ in range(_TRIES_MAX):
                try:
                    with self._replaced(bucket, key, condition), self._parent(bucket, key) as (parent, last):
                        return found_directory(key.key, self._make_object(parent, last))
                except FileNotFoundError:
                    continue  # somebody has just removed the directory
                except OSError as error:
                    raise self._why(bucket, key, error) from error
        raise s3_error("ConditionalRequestConflict")

    def delete(self, key: ObjectKey, condition: Condition) -> None:
        path = components(key.key)
        with told(key), self._files.bucket(key.bucket) as bucket:
            if path is None:
                condition(None)
                return
            with self.locked(bucket, key), self._replaced(bucket, key, condition) as current:
                if current is None:
                    return
                with opened_beneath(bucket, path[:-1], _DIRECTORY) as parent:
                    (os.rmdir if key.key.endswith("/") else os.unlink)(path[-1], dir_fd=parent)
                    os.fsync(parent)
            self._remove_empty(bucket, key.bucket, path[:-1])

    def _new_file(self, bucket: str, directory: int) -> NewFile:
        name = uuid.uuid4().hex.encode()
        return NewFile(bucket, name, self.create(directory, name))

    def create(self, directory: int, name: bytes) -> int:
        """Make and open a file that becomes an object later. OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(name, flags, _FILE_MODE, dir_fd=directory)
        if self._file_mode is not None:
            os.fchmod(file, self._file_mode)
        return file

    def _set_rights(self, directory: int) -> None:
        """Give a directory that is new those that go with the files'. OSError."""
        if self._file_mode is not None:
            os.fchmod(directory, self._file_mode | (self._file_mode & 0o444) >> 2)

    def keep(
        self,
        bucket: int,
        file: int,
        etag: str,
        headers: Headers,
        checksums: Headers,
        parts: Sequence[int] = (),
        upload_id: str = "",
    ) -> os.stat_result:
        """Write down what the file is, and sync it. S3Error where the file system has no room for it.

        A file server may set the mtime when it gets the bytes: then it is written down again.
        """
        for _ in range(_TRIES_MAX):
            seen = os.fstat(file)
            packed = packed_attribute(seen, etag, headers, checksums, parts, upload_id)
            try:
                os.setxattr(file, ATTRIBUTE, packed)
            except OSError as error:
                if error.errno in CANNOT_KEEP:
                    with self.own(bucket, *sidecars.directory_of(seen.st_ino)) as directory:
                        sidecars.write(directory, seen.st_ino, packed)
                elif error.errno in _NO_ROOM_IN_ATTRIBUTE and parts:
                    parts = ()  # so many parts of so many sizes that only their number is told, by the ETag
                    continue
                elif error.errno not in _NO_ROOM_IN_ATTRIBUTE or _is_full(file):
                    raise
                else:
                    raise s3_error("MetadataTooLarge") from error
            os.fsync(file)
            now = os.fstat(file)
            if (now.st_ino, now.st_size, now.st_mtime_ns) == (seen.st_ino, seen.st_size, seen.st_mtime_ns):
                return now
        raise OriginUnreachable("the file system says something else of a file each time that it is asked")

    # Places

    @contextmanager
    def own(self, bucket: int, *path: bytes) -> Iterator[int]:
        """Open a directory of Forebay's own in the bucket; make it if missing."""
        names = [OWN.encode(), *path]
        try:
            directory = open_beneath(bucket, names, _DIRECTORY, follows_links=False)
        except FileNotFoundError:
            for count in range(1, len(names) + 1):
                with opened_beneath(bucket, names[: count - 1], _DIRECTORY) as above, suppress(FileExistsError):
                    os.mkdir(names[count - 1], _OWN_MODE, dir_fd=above)
                    os.fsync(above)
            directory = open_beneath(bucket, names, _DIRECTORY, follows_links=False)
        try:
            yield directory
        finally:
            os.close(directory)

    @contextmanager
    def _replaced(self, bucket: int, key: ObjectKey, condition: Condition) -> Iterator[Found | None]:
        """Hold open what has the key now, if the condition lets a write follow it; the block takes the key from it."""
        opened = self.open(bucket, key)
        try:
            condition(opened.found.etag if opened is not None else None)
            yield opened.found if opened is not None else None
            if opened is not None:
                opened.forget(bucket)
        finally:
            if opened is not None:
                opened.close()

    def open(self, bucket: int, key: ObjectKey) -> OpenFile | None:
        path = components(key.key) or ()
        flags = os.O_RDONLY | (os.O_DIRECTORY if key.key.endswith("/") else 0)
        try:
            descriptor = open_beneath(bucket, path, flags)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EXDEV, errno.ENXIO):
                return None
            raise
        try:
            return OpenFile(key.key, descriptor, bucket)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError) and error.errno == errno.ENOENT:
                return None
            raise

    def check_place(self, key: ObjectKey) -> None:
        """Raise S3Error if no file of this key can be there now."""
        with told(), self._files.bucket(key.bucket) as bucket:
            self._check_place(bucket, key)

    def _check_place(self, bucket: int, key: ObjectKey) -> None:
        path = components(key.key)
        if path is None:
            return
        is_directory = key.key.endswith("/")
        for count in range(1, len(path) + 1):
            try:
                with opened_beneath(bucket, path[:count], os.O_PATH) as place:
                    mode = os.fstat(place).st_mode
            except FileNotFoundError:
                if not _is_link(bucket, path[:count]):
                    return
                raise _below_a_file(key) from None  # a link that leads nowhere
            except OSError as error:
                if error.errno not in _NO_WAY:
                    raise
                raise _below_a_file(key) from error  # a link that leads out
            if count < len(path) and not stat.S_ISDIR(mode):
                raise _below_a_file(key)
        if is_directory and not stat.S_ISDIR(mode):
            raise _below_a_file(key)
        if not is_directory and stat.S_ISDIR(mode):
            raise _is_a_directory(key)
        if not is_directory and not stat.S_ISREG(mode):
            raise s3_error("InvalidRequest", "Something that is no file lies under this key.", status=409)

    def _why(self, bucket: int, key: ObjectKey, error: OSError) -> Exception:
        """Return what an error of the file system means for a write that has come so far."""
        if error.errno in (errno.EISDIR, errno.ENOTEMPTY):
            return _is_a_directory(key)
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return _below_a_file(key)
        if error.errno == errno.EXDEV:
            return s3_error("InvalidRequest", "The key lies on another file system than its bucket, or outside.")
        return error

    @contextmanager
    def _parent(self, bucket: int, key: ObjectKey) -> Iterator[tuple[int, bytes]]:
        """Open the directory of a key, and make what is missing on the way; each is synced."""
        *parents, last = components(key.key) or (b"",)
        with ExitStack() as stack:
            try:
                at = stack.enter_context(opened_beneath(bucket, parents, _DIRECTORY))
            except FileNotFoundError:
                at = stack.enter_context(opened_beneath(bucket, [], _DIRECTORY))
                for count in range(1, len(parents) + 1):
                    try:
                        following = stack.enter_context(opened_beneath(bucket, parents[:count], _DIRECTORY))
                    except FileNotFoundError:
                        self._make(bucket, at, parents[count - 1])
                        following = stack.enter_context(opened_beneath(at, [parents[count - 1]], _DIRECTORY))
                    at = following
            except NotADirectoryError:
                raise _below_a_file(key) from None
            yield at, last

    def _make(self, bucket: int, parent: int, name: bytes) -> None:
        """Make a directory that Forebay may remove again, and that is no object while it is empty."""
        new = uuid.uuid4().hex.encode()
        with self.own(bucket, b"tmp") as directory:
            os.mkdir(new, _DIRECTORY_MODE, dir_fd=directory)
            try:
                with opened_beneath(directory, [new], _DIRECTORY) as made:
                    self._set_rights(made)
                    with suppress(OSError):
                        os.setxattr(made, MADE, b"1")
                    os.fsync(made)
                rename_new(directory, new, parent, name)
            except OSError as error:
                os.rmdir(new, dir_fd=directory)
                if error.errno in _CANNOT_RENAME_NEW:
                    self._make_in_place(parent, name)
                elif error.errno != errno.EEXIST:
                    raise
        with opened_beneath(parent, [], _DIRECTORY) as above:
            os.fsync(above)

    def _make_in_place(self, parent: int, name: bytes) -> None:
        with suppress(FileExistsError):
            os.mkdir(name, _DIRECTORY_MODE, dir_fd=parent)
            with opened_beneath(parent, [name], _DIRECTORY) as made:
                self._set_rights(made)
                with suppress(OSError):
                    os.setxattr(made, MADE, b"1")
                os.fsync(made)

    def _make_object(self, parent: int, name: bytes) -> os.stat_result:
        """Make a directory that is the object `dir/` while it is empty. OSError."""
        is_new = True
        try:
            os.mkdir(name, _DIRECTORY_MODE, dir_fd=parent)
        except FileExistsError:
            is_new = False
        with opened_beneath(parent, [name], _DIRECTORY, follows_links=False) as made:
            if is_new:
                self._set_rights(made)
            with suppress(OSError):
                os.removexattr(made, MADE)
            os.fsync(made)
            os.fsync(parent)
            return os.fstat(made)

    def _remove_empty(self, bucket: int, name: str, path: Sequence[bytes]) -> None:
        """Remove the directories on the way to what was deleted that are empty now, if Forebay has made them.

        Who makes one of them the object `dir/` has the lock of that key meanwhile.
        """
        while path:
            try:
                with opened_beneath(bucket, path, _DIRECTORY, follows_links=False) as directory:
                    if not is_made(directory) or not is_empty(directory):
                        return
                    with (
                        self.locked(bucket, ObjectKey(name, f"{b'/'.join(path).decode()}/")),
                        opened_beneath(bucket, path[:-1], _DIRECTORY, follows_links=False) as parent,
                    ):
                        if not is_made(directory):
                            return
                        os.rmdir(path[-1], dir_fd=parent)
            except OSError:
                return  # it is in use, or somebody else's
            path = path[:-1]

    @contextmanager
    def locked(self, bucket: int, key: ObjectKey) -> Iterator[None]:
        """Hold the lock of a key, against threads, processes and nodes. S3Error where the file system has none."""
        number = lock_number(key)
        path, flags = [OWN.encode(), b"locks", b"%02x" % number], os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with self._locks[number]:
            try:
                descriptor = open_beneath(bucket, path, flags, 0o600, follows_links=False)
            except FileNotFoundError:
                with self.own(bucket, b"locks"):
                    descriptor = open_beneath(bucket, path, flags, 0o600, follows_links=False)
            try:
                lock(descriptor)
                yield
            finally:
                os.close(descriptor)


def lock_number(key: ObjectKey) -> int:
    return hashlib.blake2b(key.key.encode(), digest_size=1).digest()[0]


def _place(directory: int, name: bytes, parent: int, last: bytes, *, is_new: bool) -> None:
    """Rename a file; one that must be new so that it overwrites nobody's. Raise FileExistsError."""
    for make, cannot in ((rename_new, _CANNOT_RENAME_NEW), (_link, _CANNOT_LINK)) if is_new else ():
        try:
            make(directory, name, parent, last)
            return
        except OSError as error:
            if error.errno not in cannot:
                raise
    os.rename(name, last, src_dir_fd=directory, dst_dir_fd=parent)


def _link(directory: int, name: bytes, parent: int, last: bytes) -> None:
    try:
        os.link(name, last, src_dir_fd=directory, dst_dir_fd=parent, follow_symlinks=False)
    except FileExistsError:  # perhaps made by this very call, if a file server was asked twice
        if not os.path.samestat(os.lstat(name, dir_fd=directory), os.lstat(last, dir_fd=parent)):
            raise
    os.unlink(name, dir_fd=directory)


def _is_link(bucket: int, path: Sequence[bytes]) -> bool:
    try:
        with opened_beneath(bucket, path, os.O_PATH | os.O_NOFOLLOW) as place:
            return stat.S_ISLNK(os.fstat(place).st_mode)
    except FileNotFoundError:
        return False


def _is_full(file: int) -> bool:
    """Return whether a file system has no room: ENOSPC is also what says that an attribute is too long. OSError."""
    about = os.fstatvfs(file)
    return about.f_bavail * about.f_frsize < _FULL_BYTES or (about.f_files > 0 and not about.f_favail)


def _below_a_file(key: ObjectKey) -> S3Error:
    message = "The origin is a directory, and a file lies where this key needs a directory."
    return s3_error("ObjectParentIsFile", message, status=409, Key=key.key)


def _is_a_directory(key: ObjectKey) -> S3Error:
    message = "The origin is a directory, and a directory lies under this key."
    return s3_error("ExistingObjectIsDirectory", message, status=409, Key=key.key)
