"""The directory in which Forebay works: the one that `cache.directory` names, or one of its own below that."""

from __future__ import annotations

import os
import stat
from pathlib import Path

NAME = "forebay"
"""The name of the directory that Forebay makes inside one that others use."""

LOCK_NAME = "lock"
LOCK_MARK = b"forebay "
"""The first bytes of the lock, which Forebay writes before it works in a directory."""

_MARKS = ((LOCK_NAME, LOCK_MARK), ("blocks/FORMAT", b"forebay blocks "), ("writeback/FORMAT", b"forebay writeback "))


def own_directory(given: Path) -> Path:
    """Return `given` if Forebay makes it, has worked in it, or finds it empty and closed to others; else one below it.

    So Forebay neither closes a directory that it did not make nor works among files of others.
    """
    try:
        status = given.stat()
        is_closed = not status.st_mode & 0o077
        if status.st_uid not in (0, os.geteuid()) or is_own(given) or (is_closed and not others_files(given)):
            return given  # that of another user is refused when it is prepared
    except OSError:  # it is not there; or the start says why it cannot be used
        return given
    return given / NAME


def are_same(one: Path, other: Path) -> bool:
    """Return whether both may name one cache directory: a user without access cannot tell which of the two it is."""
    return one == other or one == other / NAME or other == one / NAME


def is_own(directory: Path) -> bool:
    """Return whether Forebay has worked in a directory. False if the directory cannot be read."""
    return any(_begins_with(directory / name, mark) for name, mark in _MARKS)


def others_files(directory: Path) -> list[str]:
    """Return the names in a directory in which Forebay has not worked yet. Raise OSError."""
    return [] if is_own(directory) else sorted(set(os.listdir(directory)) - {"lost+found"})


def _begins_with(path: Path, mark: bytes) -> bool:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a link says nothing, and a pipe would be waited for
            return False
        with path.open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False
