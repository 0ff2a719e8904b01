"""Opens what lies below a directory, and nothing else: no name leads out of it, not `..`, and no symbolic link.

`openat2(RESOLVE_BENEATH)` has the kernel watch over that (Linux 5.6). Without it, each component is opened by itself,
and no link is followed at all. `rename_new` is the other call that Python does not have.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from gateway.origin.stores.directory.key_paths import OWN

_OPENAT2 = 437
"""The number of the system call, the same on all architectures but alpha."""

_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _CACHED = 0x01, 0x02, 0x04, 0x08, 0x20
_WITHOUT_WAIT = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994})
"""Types of file systems that say what a file is without asking anybody: ext4, XFS, Btrfs, tmpfs (linux/magic.h)."""

_NO_REPLACE = 1
_TRIES_MAX = 32
"""The kernel answers EAGAIN while a directory on the way is being moved."""

_ALWAYS = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""Not even a FIFO or a terminal may keep a thread."""


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


@lru_cache(64)
def _how(flags: int, mode: int, resolve: int) -> Any:
    return ctypes.byref(_How(flags, mode, resolve))


def _openat2(directory: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
    how = _how(flags, mode, resolve)
    for _ in range(_TRIES_MAX):
        descriptor: int = _libc.syscall(_OPENAT2, directory, path, how, ctypes.sizeof(_How))
        if descriptor >= 0:
            return descriptor
        if (number := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def _is_known() -> bool:
    """Return whether the kernel has openat2, and lets this process use it."""
    try:
        os.close(_openat2(os.open("/", os.O_RDONLY | os.O_CLOEXEC), b".", os.O_RDONLY | os.O_CLOEXEC, 0, 0))
    except OSError:
        return False
    return True


HAS_OPENAT2 = _is_known()


def open_beneath(
    directory: int, path: Sequence[bytes], flags: int, mode: int = 0, *, follows_links: bool = True
) -> int:
    """Open `path`, whose components are names as `key_paths.components` gives them; none at all: the directory itself.

    OSError: ENOENT, ENOTDIR, …; EXDEV or ELOOP for a link that leads out, or to Forebay's own directory in this one.
    """
    flags |= os.O_CLOEXEC if flags & os.O_PATH else _ALWAYS  # openat2 takes no flag without a meaning
    if HAS_OPENAT2:
        joined, resolve = b"/".join(path) or b".", _BENEATH | _NO_MAGICLINKS
        try:
            return _openat2(directory, joined, flags, mode, resolve | _NO_SYMLINKS)
        except OSError as error:
            if not follows_links or error.errno != errno.ELOOP:
                raise
        descriptor = _openat2(directory, joined, flags, mode, resolve)
        try:
            _check_not_own(directory, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    *parents, name = path or [b"."]
    at = os.dup(directory)
    try:
        for parent in parents:
            following = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = following
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=at)
    finally:
        os.close(at)


def _check_not_own(directory: int, opened: int) -> None:
    """Raise OSError ELOOP if links have led into Forebay's own directory: unfinished writes are nobody's to read."""
    own = b"%b/%b/" % (os.readlink(b"/proc/self/fd/%d" % directory), OWN.encode())
    if (os.readlink(b"/proc/self/fd/%d" % opened) + b"/").startswith(own):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(own))


def answers_at_once(descriptor: int) -> bool:
    """Return whether the file system of an open file has what `fstat` asks for in memory. OSError."""
    about = (ctypes.c_long * 32)()
    if _libc.fstatfs(descriptor, about) < 0:
        raise OSError(ctypes.get_errno(), "fstatfs")
    return about[0] in _WITHOUT_WAIT


def open_at_once(directory: int, path: bytes, flags: int, *, beneath: bool) -> int:
    """Open a path that the kernel has in memory. OSError EAGAIN: it has not; EXDEV: the path crosses a mount."""
    resolve = _CACHED | (_BENEATH | _NO_MAGICLINKS | _NO_XDEV if beneath else 0)
    descriptor: int = _libc.syscall(_OPENAT2, directory, path, _how(flags, 0, resolve), ctypes.sizeof(_How))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "openat2")
    return descriptor


@contextmanager
def opened_beneath(
    directory: int, path: Sequence[bytes], flags: int, mode: int = 0, *, follows_links: bool = True
) -> Iterator[int]:
    descriptor = open_beneath(directory, path, flags, mode, follows_links=follows_links)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def rename_new(directory: int, name: bytes, parent: int, last: bytes) -> None:
    """Rename to a name that nothing has. OSError: EEXIST; EINVAL or ENOSYS where the file system cannot."""
    renameat2 = getattr(_libc, "renameat2", None)  # glibc 2.28
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(directory, name, parent, last, _NO_REPLACE) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fsdecode(last))
