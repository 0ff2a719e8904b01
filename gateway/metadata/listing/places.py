"""Places in a bucket's key space. Keys are UTF-8 here: their byte order is S3's (S3 API, "ListObjectsV2")."""

from __future__ import annotations

END = b"\xff"
"""Behind every key: no byte of UTF-8 is as great."""


def behind(key: bytes) -> bytes:
    """The first place behind `key`."""
    return key + b"\0"


def behind_all(prefix: bytes) -> bytes:
    """The first place behind every key that begins with `prefix`."""
    for last in range(len(prefix) - 1, -1, -1):
        if prefix[last] < 0xFF:
            return prefix[:last] + bytes([prefix[last] + 1])
    return END
