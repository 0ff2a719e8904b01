"""Bytes and keys that the client tests use."""

from __future__ import annotations

import random

from tests.clients.origins import IS_DIRECTORY

MIB = 1024 * 1024

# Every one of these is a legal S3 key, and each has been somebody's bug: a path that was normalised, a plus that became
# a space, an escape decoded twice, a name too long for a file system.
_ODD_KEYS = [
    "plain.bin",
    "..",
    ".",
    "../up",
    "a/../b",
    "./a/.",
    "/leading",
    "//leading",
    "x//y",
    "trailing/",
    "plus+sign",
    "with space",
    "percent%2Fescaped",
    "percent%",
    "100%41",
    "ünï/日本語.bin",
    "emoji😀",
    "a&b=c?d#e",
    "quote'\"<>&;",
    "a;b:c@d,e$f=g",
    "~!*()'",
    "back\\slash",
    "tab\tinside",
    "k" * 1024,
    "é" * 512,
]


def _may_be_file(key: str) -> bool:
    """Whether a directory as the origin can have it, with bytes in it (13.4)."""
    return not {"", ".", ".."} & set(key.split("/")) and all(len(name.encode()) <= 255 for name in key.split("/"))


ODD_KEYS = [key for key in _ODD_KEYS if not IS_DIRECTORY or _may_be_file(key)]


def random_bytes(size: int, seed: int = 1) -> bytes:
    """The same bytes for the same arguments."""
    return random.Random(f"{seed}/{size}").randbytes(size)
