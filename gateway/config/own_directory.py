"""Which directory Forebay works in: the one that `cache.directory` names, or one of its own below that."""

from __future__ import annotations

import os
import stat
from pathlib import Path

NAME = "forebay"
"""Of the directory that Forebay makes in one that others use, too."""

LOCK_NAME = "lock"
LOCK_MARK = b"forebay "
"""What the lock begins with, from the first moment that Forebay works in a directory."""

_MARKS = ((LOCK_NAME, LOCK_MARK), ("blocks/FORMAT", b"forebay blocks "), ("writeback/FORMAT", b"forebay writeback "))


def own_directory(given: Path) -> Path:
    """`given`, where Forebay makes it, has worked in it, or finds it empty and closed to others; else one below it.

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
    """Whether one may be the other as it was given: who may not look into a directory cannot tell which it is."""
    return one == other or one == other / NAME or other == one / NAME


def is_own(directory: Path) -> bool:
    """Whether Forebay has worked in a directory. False where nobody can say."""
    return any(_begins_with(directory / name, mark) for name, mark in _MARKS)


def others_files(directory: Path) -> list[str]:
    """What lies in a directory that Forebay has not worked in. OSError."""
    return [] if is_own(directory) else sorted(set(os.listdir(directory)) - {"lost+found"})


def _begins_with(path: Path, mark: bytes) -> bool:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a link says nothing, and a pipe would be waited for
            return False
        with path.open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False
