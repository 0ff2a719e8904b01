"""Is anything pending under this key? Answered from shared memory in a fraction of a microsecond, for every read.

A byte for each of 65,536 hash slots, which keys share: 0 says that nothing is pending under any key of the slot, so
that reads of everything else never ask the journal. A byte is set within the transaction that makes something pending,
before it commits, and cleared within one that changes nothing and has seen that nothing is pending in the slot any
more: SQLite's write lock orders the two, so no lock of our own is needed. A process that is killed in between leaves a
byte too many, which costs look-ups until the collector of garbage comes by (journal_gc.py).

Behind them lies a version: who has committed something that the reconciler is to know of changes it, and the reconciler
sees that without a question to the journal (change_notifier.py).
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
    """The hash slots, as one process sees them. Made where it is not there; OSError when the disk does not take it."""

    def __init__(self, path: Path) -> None:
        self._bytes = map_shared(path, _FILE_BYTES)

    def may_be(self, key: ObjectKey) -> bool:
        return self._bytes[hash_slot_of(key)] != 0

    def set(self, hash_slot: int) -> None:
        """Something is about to be pending there. Only within a transaction that writes the journal."""
        self._bytes[hash_slot] = 1

    def keep(self, hash_slots: Iterable[int]) -> None:
        """In these and nowhere else is something pending. Only within a transaction that holds the write lock, has
        looked, and changes nothing itself: what it undid would be pending unseen."""
        wanted = bytearray(HASH_SLOTS)
        for hash_slot in hash_slots:
            wanted[hash_slot] = 1
        self._bytes[:HASH_SLOTS] = bytes(wanted)

    def bump_version(self) -> None:
        """The journal has something that is due. Only after the commit: the reconciler must find it."""
        _VERSION.pack_into(self._bytes, HASH_SLOTS, time.monotonic_ns(), os.getpid())

    def version(self) -> bytes:
        """Another value than before, where anybody has bumped it since."""
        return self._bytes[HASH_SLOTS:_FILE_BYTES]

    def close(self) -> None:
        self._bytes.close()
