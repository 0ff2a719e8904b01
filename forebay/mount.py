"""A prefix of a bucket as a file system that can only be read (docs/files.md): FUSE, by mfusepy, over local reads.

    serve(Mount("train", "images/", 1.0, Reader), "/mnt/images", foreground=True, allow_other=False)

A file that is open stays the version that it was: once the object has changed, reads and further opens fail with ESTALE
until it is closed, so that no reader ever gets a mixture, or a version cut off at another's size.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from forebay.local import Reader
from forebay.s3_get import ReadError
from forebay.tree import DIRECTORY, NAME_BYTES_MAX, REMEMBERED_MAX, Entry, Tree

FRESH_SECONDS = 1.0
"""At an open, what was learned longer ago is asked for again."""

AHEAD_BYTES_MAX = 4 * 1024**2
AHEAD_BYTES_MAX_IN_ALL = 256 * 1024**2
"""Bytes read ahead of one that reads a file from front to back, and of all of them."""

NEAR_BYTES = 1024**2
"""The kernel's own requests overtake each other by so much."""

ENDED_BY_SIGNAL = 8
"""Exit code of libfuse's loop."""

THREADS_MAX = 32
TIMEOUT_SECONDS = 60

_log = logging.getLogger("forebay.mount")

T = TypeVar("T")


@dataclass(slots=True)
class _Opened:
    """A path that is open: how many files of it are, and the version that all of them show."""

    entry: Entry
    count: int = 0


@dataclass(slots=True)
class _Shown:
    """The version that the kernel was told of. The path is not open; when it is, the kernel ends reads at that size."""

    entry: Entry
    is_doubtful: bool
    """It was told of others, too. When it asks several times at once, it may keep any of the answers."""


@dataclass(slots=True)
class _File:
    """An open file, and what was read ahead of one that reads it from front to back."""

    path: str
    entry: Entry
    lock: threading.Lock = field(default_factory=threading.Lock)
    next: int = 0
    window: int = 0
    start: int = 0
    ahead: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def held_bytes(self) -> int:
        """Count the memory that is held: the reader may have taken more than it was asked for."""
        held: Any = self.ahead.obj
        return len(held)

    def has(self, offset: int, size: int) -> bool:
        return self.start <= offset <= offset + size <= self.start + len(self.ahead)


def _told(method: Callable[..., T]) -> Callable[..., T]:
    """Turn what libraries raise into errors of a file system. A cause that the errno does not tell is logged."""

    @functools.wraps(method)
    def operation(*of: Any) -> T:
        try:
            return method(*of)
        except FileNotFoundError as error:
            raise OSError(error.errno or errno.ESTALE, str(error)) from error
        except PermissionError as error:
            raise OSError(errno.EACCES, str(error)) from error
        except ReadError as error:
            if error.status in (412, 416):
                raise OSError(errno.ESTALE, str(error)) from error
            cause: Exception = error
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 403:
                raise OSError(errno.EACCES, str(error)) from error
            cause = error
        except BotoCoreError as error:
            cause = error
        _log.warning("%s of %s: %s", method.__name__, of[1], cause)
        raise OSError(errno.EIO, str(cause)) from cause

    return operation


class Mount:
    """The operations, as mfusepy calls them from several threads. Paths begin with a slash."""

    use_ns = True
    """Times are in nanoseconds."""

    def __init__(self, bucket: str, prefix: str, remember_seconds: float, reader: Callable[[], Reader]) -> None:
        """`prefix` is empty or ends in a slash; `reader` makes one, and is called in the process that serves."""
        self.bucket = bucket
        self._prefix = prefix
        self.remember_seconds = remember_seconds / 2
        """Here, and then in the kernel once more."""
        self.forget: Callable[[str], None] = lambda path: None
        """Let the kernel ask for a path's size anew, and ignore answers to what it asked before; `serve` sets it."""
        self._new_reader = reader
        self._owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._files: dict[int, _File] = {}
        self._opened: dict[str, _Opened] = {}
        self._shown: OrderedDict[str, _Shown] = OrderedDict()
        self._ahead_bytes = 0

    def init(self, path: str) -> None:
        """Begin. The process that serves is a fork that Python does not know of, so that nothing is made before."""
        self._reader = self._new_reader()
        self._tree = Tree(s3_client(self._reader), self._reader.http, self.bucket, self._prefix)

    @_told
    def getattr(self, path: str, _: int | None = None) -> dict[str, Any]:
        """Return the attributes, of the version that is open if one is."""
        with self._lock:
            opened = self._opened.get(path)
        entry = opened.entry if opened is not None else self._tree.entry(path[1:], self.remember_seconds)
        with self._lock:
            opened = self._opened.get(path)  # it may have been opened or closed meanwhile
            if opened is not None:
                entry = opened.entry
            elif entry is not None:
                shown = self._shown.pop(path, None)
                is_doubtful = shown is not None and (shown.is_doubtful or shown.entry != entry)
                self._shown[path] = _Shown(entry, is_doubtful)
                if len(self._shown) > REMEMBERED_MAX:
                    self._shown.popitem(last=False)
        if entry is None:
            raise OSError(errno.ENOENT, path)
        return self._attributes(entry)

    @_told
    def readdir(self, path: str, _: int) -> list[tuple[str, dict[str, Any], int]]:
        found = [(".", DIRECTORY), ("..", DIRECTORY), *self._tree.list(path[1:]).items()]
        return [(name, {"st_mode": _mode(entry)}, 0) for name, entry in found]

    @_told
    def open(self, path: str, flags: int) -> int:
        """Open the version that the kernel was told of. If it is another by now, the kernel asks for it, and again."""
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, path)
        entry = self._tree.entry(path[1:], min(self.remember_seconds, FRESH_SECONDS))
        with self._lock:
            told = self._opened.get(path) or self._shown.get(path)
            if entry is None or told is None or entry != told.entry:
                raise OSError(errno.ESTALE, path)
            opened = self._opened.setdefault(path, _Opened(entry))
            opened.count += 1
            shown = self._shown.pop(path, None)
            if shown is not None and shown.is_doubtful:
                self.forget(path)
            number = next(self._numbers)
            self._files[number] = _File(path, entry)
        return number

    def release(self, path: str, number: int) -> int:
        with self._lock:
            file = self._files.pop(number)
            self._ahead_bytes -= file.held_bytes
            opened = self._opened[file.path]
            opened.count -= 1
            if not opened.count:
                self._shown[file.path] = _Shown(self._opened.pop(file.path).entry, False)
        return 0

    @_told
    def read(self, path: str, size: int, offset: int, number: int) -> bytes:
        file = self._files[number]
        size = min(size, file.entry.size_bytes - offset)
        if size <= 0:
            return b""
        with file.lock:
            gap = offset - file.next
            is_near = -NEAR_BYTES <= gap <= NEAR_BYTES
            if not is_near:
                file.window = 0
            elif gap >= 0 and not file.has(offset, size):
                self._read_ahead(file, offset, size)
            file.next = max(file.next, offset + size) if is_near else offset + size
            if file.has(offset, size):
                return bytes(file.ahead[offset - file.start : offset - file.start + size])
        return bytes(self._content(file, offset, size))

    def statfs(self, _: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": NAME_BYTES_MAX}

    def _read_ahead(self, file: _File, offset: int, size: int) -> None:
        """Read more than is asked for: each time twice as much."""
        file.window = min(2 * max(file.window, size), AHEAD_BYTES_MAX)
        with self._lock:
            self._ahead_bytes -= file.held_bytes
            file.ahead = memoryview(b"")
            wanted = min(file.window, file.entry.size_bytes - offset)
            if wanted <= size or self._ahead_bytes + wanted > AHEAD_BYTES_MAX_IN_ALL:
                return
            self._ahead_bytes += wanted
        try:
            file.start, file.ahead = offset, self._content(file, offset, wanted)
        finally:
            with self._lock:
                self._ahead_bytes += file.held_bytes - wanted

    def _content(self, file: _File, offset: int, size: int) -> memoryview:
        path = file.path[1:]
        try:
            return self._reader.read(f"{self.bucket}/{self._tree.key(path)}", offset, size, etag=file.entry.etag)
        except OSError:
            self._tree.forget(path)  # it may be of another version by now, and one that opens it anew gets that
            raise

    def _attributes(self, entry: Entry) -> dict[str, Any]:
        modified = int(entry.modified_at * 10**9)
        return {
            **self._owner,
            "st_mode": _mode(entry),
            "st_nlink": 2 if entry.is_directory else 1,
            "st_size": entry.size_bytes,
            "st_blocks": -(-entry.size_bytes // 512),
            "st_blksize": 128 * 1024,
            "st_mtime": modified,
            "st_ctime": modified,
            "st_atime": modified,
        }


def _mode(entry: Entry) -> int:
    return stat.S_IFDIR | 0o555 if entry.is_directory else stat.S_IFREG | 0o444


def s3_client(reader: Reader) -> Any:
    """Return botocore's client of the endpoint that a reader reads from by HTTP."""
    name, secret, token = reader.credentials
    config = Config(
        max_pool_connections=THREADS_MAX, read_timeout=TIMEOUT_SECONDS, retries={"mode": "standard", "max_attempts": 4}
    )
    return Session().create_client(
        "s3",
        region_name=reader.region,
        endpoint_url=reader.endpoint_url,
        aws_access_key_id=name,
        aws_secret_access_key=secret,
        aws_session_token=token or None,
        config=config,
    )


def check(bucket: str, prefix: str, reader: Reader) -> None:
    """Ask the gateway for the prefix. Raises OSError, with a text for people."""
    try:
        Tree(s3_client(reader), reader.http, bucket, prefix).check()
    except (ClientError, BotoCoreError) as error:
        raise OSError(str(error)) from error


def serve(mount: Mount, directory: str, *, foreground: bool, allow_other: bool) -> None:
    """Mount it, and serve until it is unmounted, here or in a process of its own.

    RuntimeError: not mounted. ImportError, OSError: mfusepy is missing, or the system's libfuse.
    """
    if "FUSE_LIBRARY_PATH" not in os.environ:  # it prefers libfuse 2, which s3fs brings
        os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    def forget(path: str) -> None:
        library = mfusepy._libfuse
        library.fuse_invalidate_path(ctypes.c_void_p(library.fuse_get_context().contents.fuse), os.fsencode(path))

    mount.forget = forget
    options = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), mount.remember_seconds)
    if mfusepy.fuse_version_minor >= 12:
        options |= dict.fromkeys(("max_threads", "max_idle_threads"), THREADS_MAX)
    try:
        mfusepy.FUSE(
            mount,
            directory,
            foreground=foreground,
            allow_other=allow_other,
            ro=True,
            default_permissions=True,
            fsname=f"s3://{mount.bucket}",
            subtype="forebay",
            **options,
        )
    except RuntimeError as error:
        if error.args[0] != ENDED_BY_SIGNAL:
            raise
