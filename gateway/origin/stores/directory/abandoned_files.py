"""Removes what dead nodes have left in Forebay's own directory of a bucket. Blocks."""

from __future__ import annotations

import os
from contextlib import suppress

from gateway.origin.stores.directory.beneath import opened_beneath
from gateway.origin.stores.directory.key_paths import OWN

WRITE_SECONDS_MAX = 86_400.0
"""A file of a write that nobody has gone on with for so long is removed."""

UPLOAD_SECONDS_MAX = 7 * WRITE_SECONDS_MAX
"""An upload that has got no part for so long is removed."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


def remove_abandoned(bucket: int) -> None:
    """Remove what is old. OSError."""
    for kind, seconds_max in ((b"tmp", WRITE_SECONDS_MAX), (b"uploads", UPLOAD_SECONDS_MAX)):
        with (
            suppress(FileNotFoundError),  # nothing was ever written
            opened_beneath(bucket, [OWN.encode(), kind], _DIRECTORY, follows_links=False) as directory,
            os.scandir(directory) as entries,
        ):
            os.utime(directory)
            now = os.fstat(directory).st_mtime  # by the clock of the file server
            for entry in entries:
                with suppress(FileNotFoundError):  # by another node
                    if entry.stat(follow_symlinks=False).st_mtime < now - seconds_max:
                        remove(directory, entry.name)


def remove(directory: int, name: str) -> None:
    """Remove a file, or a directory with the files in it, also while somebody else puts more into it."""
    try:
        os.unlink(name, dir_fd=directory)
        return
    except IsADirectoryError:
        pass
    with opened_beneath(directory, [name.encode()], _DIRECTORY, follows_links=False) as within:
        for _ in range(3):
            for one in os.listdir(within):
                with suppress(FileNotFoundError):
                    os.unlink(one, dir_fd=within)
            with suppress(OSError):
                os.rmdir(name, dir_fd=directory)
                return
