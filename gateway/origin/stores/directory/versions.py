"""Versions of files: a token of what the file system says of them, or the ETag that Forebay wrote down with its own.

The token is of inode, size, mtime and ctime. Nobody can set a ctime, so a restored mtime is seen. The number of the
device is left out: it differs between nodes that share a file system. The token has 22 characters and no `-N` at its
end, so that no client takes it for an MD5 or an upload.

A file that has just been changed may change once more within a tick of its clock, and keep its token. Until it has
settled, its ETag is a weak one (RFC 9110, 8.8.1): the bytes are served, and not kept.
"""

from __future__ import annotations

import errno
import os
import struct
from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import groupby, islice
from typing import Any

import orjson

from gateway.origin.stores.directory import sidecars
from gateway.origin.stores.store import Found
from gateway.s3.headers import MD5_OF_NOTHING

ATTRIBUTE = "user.forebay"
"""The extended attribute of files that Forebay wrote."""

MADE = "user.forebay.made"
"""The mark of directories that Forebay made for a key below, and may remove: they are no objects, though empty."""

SETTLE_SECONDS = 2.0

_pack = struct.Struct("<QQqq").pack
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_NONE: Mapping[str, str] = {}
_HAS_NONE = frozenset({errno.ENODATA, errno.ENOENT, errno.ELOOP})
CANNOT_KEEP = frozenset({errno.ENOTSUP, errno.EPERM, errno.EACCES})
"""Errors of file systems that have no attributes for users."""


def token(stat: os.stat_result) -> str:
    """Return the unquoted ETag of a file that somebody else wrote."""
    digest = blake2b(_pack(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns), digest_size=15).digest()
    return f"{b2a_base64(digest, newline=False).translate(_URL_SAFE).decode()}.f"


def found_in(key: str, stat: os.stat_result, written: Mapping[str, Any] | None, now: float) -> Found:
    """Return the version of a file; `written` is what Forebay wrote down with it."""
    if written is not None:
        headers, checksums = written["headers"], written["checksums"]
        parts = tuple(size for size, count in written["parts"] for _ in range(count))
        return Found(key, stat.st_size, written["etag"], stat.st_mtime, headers, checksums, parts)
    modified, changed_at = stat.st_mtime, stat.st_ctime
    changed_at = max(changed_at, modified)
    settles_at = changed_at + SETTLE_SECONDS if now - SETTLE_SECONDS < changed_at < now + 3600 else None
    return Found(key, stat.st_size, f'"{token(stat)}"', modified, _NONE, _NONE, (), settles_at)


def found_directory(key: str, stat: os.stat_result) -> Found:
    """Return the version of an empty directory, which is the object `dir/`."""
    return Found(key, 0, f'"{MD5_OF_NOTHING}"', stat.st_mtime)


def is_made(directory: int) -> bool:
    """Return whether a directory has the mark. OSError."""
    try:
        return bool(os.getxattr(directory, MADE))
    except OSError as error:
        if error.errno in _HAS_NONE or error.errno in CANNOT_KEEP:
            return False
        raise


def is_empty(directory: int) -> bool:
    with os.scandir(directory) as entries:
        return not any(islice(entries, 1))


def attribute_of(
    file: int | bytes, stat: os.stat_result, bucket: int, *, follows: bool = False
) -> dict[str, Any] | None:
    """Return what Forebay wrote down with a file; None: somebody else has written it, or since. OSError."""
    packed: bytes | None
    try:
        packed = os.getxattr(file, ATTRIBUTE, follow_symlinks=follows or isinstance(file, int))
    except OSError as error:
        if error.errno in _HAS_NONE:
            return None
        if error.errno not in CANNOT_KEEP or (
            isinstance(file, bytes) and not os.access(file, os.R_OK, effective_ids=True)
        ):
            raise
        packed = sidecars.read(bucket, stat.st_ino)
    if packed is None:
        return None
    try:
        written: dict[str, Any] = orjson.loads(packed)
        is_of_file = written["v"] == 1 and written["of"] == [stat.st_ino, stat.st_size, stat.st_mtime_ns]
    except (ValueError, KeyError, TypeError):
        return None
    return written if is_of_file else None


def packed_attribute(
    stat: os.stat_result,
    etag: str,
    headers: Mapping[str, str],
    checksums: Mapping[str, str],
    parts: Sequence[int] = (),
    upload_id: str = "",
) -> bytes:
    of = [stat.st_ino, stat.st_size, stat.st_mtime_ns]
    runs = [(size, len(list(run))) for size, run in groupby(parts)]
    written = {"v": 1, "of": of, "etag": etag, "headers": headers, "checksums": checksums, "parts": runs}
    return orjson.dumps({**written, "upload": upload_id})
