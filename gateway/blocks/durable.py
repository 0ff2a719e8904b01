"""Small files that are there whole after a power cut, as they are now or as they were before. All of it blocks."""

from __future__ import annotations

import os
from pathlib import Path

_FILE_MODE = 0o600


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file."""
    new = path.with_name(path.name + ".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(new, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Have the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
