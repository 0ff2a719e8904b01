"""Keeps facts about a file in another file, where the file system has no extended attributes.

    .forebay-origin/meta/HH/INODE

The name is the inode's number, so the facts follow a file that others rename. They name the file's size and mtime, so
nobody takes them for those of a later file with the same inode. All functions block.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

from gateway.origin.stores.directory.beneath import opened_beneath
from gateway.origin.stores.directory.key_paths import OWN


def directory_of(inode: int) -> tuple[bytes, bytes]:
    return b"meta", b"%02x" % (inode & 0xFF)


def read(bucket: int, inode: int) -> bytes | None:
    """OSError."""
    try:
        path = [OWN.encode(), *directory_of(inode), b"%d" % inode]
        with opened_beneath(bucket, path, os.O_RDONLY, follows_links=False) as file:
            return os.pread(file, os.fstat(file).st_size, 0)
    except FileNotFoundError:
        return None


def write(directory: int, inode: int, content: bytes) -> None:
    """Write it whole, and sync it. OSError."""
    new = f"new.{uuid.uuid4().hex}"
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        os.write(file, content)
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(new, b"%d" % inode, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def remove(bucket: int, inode: int) -> None:
    """Only while a descriptor of the file is open: no other file has its inode then."""
    with suppress(OSError), opened_beneath(bucket, [OWN.encode(), *directory_of(inode)], os.O_PATH) as directory:
        os.unlink(b"%d" % inode, dir_fd=directory)
