"""Whether anything was written to an LMDB environment since: one look at memory, instead of a look-up.

LMDB keeps the number of the last transaction in its lock file, and a reader sees the state of that number. It is read
here from a mapping of our own. Whoever takes the number before a look-up, and finds it unchanged later, would be told
the same again, whichever process writes.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import lmdb

_HEAD, _MAGIC, _FORMAT = struct.Struct("=2I"), 0xBEEFC0DE, 0x10001
_NUMBER_AT = 48
"""In a lock file of this format: LMDB 0.9, 64 bits (`MDB_txbody` of mdb.c)."""

LastCommit: TypeAlias = Callable[[], int]
"""Another number when any process has committed a transaction since. Never blocks; any thread."""


def last_commit(environment: lmdb.Environment) -> LastCommit:
    """To be asked for as long as the environment is open. Where its lock file is not as known here, each call gives
    another number. OSError."""
    with (Path(environment.path()) / "lock.mdb").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)
    if _HEAD.unpack_from(mapped) != (_MAGIC, _FORMAT):
        return itertools.count().__next__
    words, number_at = memoryview(mapped).cast("Q"), _NUMBER_AT // 8
    return lambda: words[number_at]
