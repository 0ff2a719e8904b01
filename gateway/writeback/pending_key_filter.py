"""Tells whether anything may be pending under a key: from shared memory, in a fraction of a microsecond, at every read.

A byte for each of 65,536 hash slots, which keys share: 0 means that nothing is pending under any key of the slot, so
other reads never ask the journal. A process sets a byte within the transaction that makes something pending, before the
commit. It clears bytes within a transaction that changes nothing and has seen that nothing is pending in the slot.
SQLite's write lock orders the two, so no other lock is needed. A process that is killed in between leaves a byte too
many, which costs look-ups until garbage collection clears it (journal_gc.py).

Behind the bytes lies a version: a process that commits something due for the reconciler changes it, and the reconciler
sees that without asking the journal (change_notifier.py).
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from gateway.core.model import ObjectKey
from gateway.disk.atomic_write import map_shared

HASH_SLOTS = 65_536

_VERSION = struct.Struct("<QQ")
_FILE_BYTES = HASH_SLOTS + _VERSION.size


def hash_slot_of(key: ObjectKey) -> int:
    return zlib.crc32(f"{key.bucket}\0{key.key}".encode("utf-8", "surrogatepass")) % HASH_SLOTS


class PendingKeyFilter:
    """The hash slots, as one process sees them. Makes a missing file; OSError when the disk does not take it."""

    def __init__(self, path: Path) -> None:
        self._bytes = map_shared(path, _FILE_BYTES)

    def may_be(self, key: ObjectKey) -> bool:
        return self._bytes[hash_slot_of(key)] != 0

    def set(self, hash_slot: int) -> None:
        """Mark a hash slot before something is pending in it. Only within a transaction that writes the journal."""
        self._bytes[hash_slot] = 1

    def keep(self, hash_slots: Iterable[int]) -> None:
        """Clear all hash slots but these.

        Only within a transaction that holds the write lock, has looked, and changes nothing itself: if it undid a
        write, that would be pending unseen.
        """
        wanted = bytearray(HASH_SLOTS)
        for hash_slot in hash_slots:
            wanted[hash_slot] = 1
        self._bytes[:HASH_SLOTS] = bytes(wanted)

    def bump_version(self) -> None:
        """Report something due in the journal. Only after the commit: the reconciler must find it."""
        _VERSION.pack_into(self._bytes, HASH_SLOTS, time.monotonic_ns(), os.getpid())

    def version(self) -> bytes:
        """Return a value that differs after each bump."""
        return self._bytes[HASH_SLOTS:_FILE_BYTES]

    def close(self) -> None:
        self._bytes.close()
