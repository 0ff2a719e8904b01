"""Small files that are there whole after a power cut, as they are now or as they were before. All of it blocks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_FILE_MODE = 0o600


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file; OSError when the disk does not take all of it, and then the file is as it was."""
    new = path.with_name(path.name + ".new")
    try:
        _write(new, content)
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


def _write(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, _FILE_MODE), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Have the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
