"""Small files that are there whole: after a power cut, and on a disk that is full. All of it blocks."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FILE_MODE = 0o600
UNFINISHED = ".new"
"""How the name of a file ends that is about to take another one's place."""


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file to write, made if missing; no link is followed. OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file; OSError when the disk does not take all of it, and then the file is as it was."""
    new = path.with_name(path.name + UNFINISHED)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(new, flags, _FILE_MODE), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    sync_directory(path.parent)


def remove_durably(*paths: Path) -> None:
    """Remove files of one directory, where they are there; they do not come back after a power cut. OSError."""
    for path in paths:
        path.unlink(missing_ok=True)
    sync_directory(paths[0].parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path, size_bytes: int) -> None:
    """Reserve disk room for a file, and for all of a longer one; create it if missing. Raises OSError."""
    with opened(path) as descriptor:
        os.posix_fallocate(descriptor, 0, max(size_bytes, os.fstat(descriptor).st_size))


def check_room(directory: Path, size_bytes: int) -> None:
    """Raise OSError unless the file system of a directory takes `size_bytes` more.

    The kernel's free space is no answer: a quota may allow less.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)


def map_shared(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a file into memory; make it where it does not exist. OSError.

    It is whole on its file system: a page that could not be backed would kill the process that touches it.
    """
    with opened(path) as descriptor:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
