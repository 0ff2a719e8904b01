"""Is anything pending under this key? Answered from shared memory in a fraction of a microsecond, for every read.

A byte for each of 65,536 places, which keys share by hash: 0 says that nothing is pending under any key of the place,
so that reads of everything else never ask the journal. A byte is set within the transaction that makes something
pending, before it commits, and cleared within one that changes nothing and has seen that nothing is pending in the
place any more: SQLite's write lock orders the two, so no lock of our own is needed. A process that is killed in between
leaves a byte too many, which costs look-ups until somebody tidies up.

Behind them lies a stamp: who has committed something that the reconciler is to know of stamps, and it sees that without
a question to the journal.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from gateway.durable import map_shared
from gateway.objects import ObjectKey

PLACES = 65_536

_STAMP = struct.Struct("<QQ")
_FILE_BYTES = PLACES + _STAMP.size


def place_of(key: ObjectKey) -> int:
    return zlib.crc32(f"{key.bucket}\0{key.key}".encode("utf-8", "surrogatepass")) % PLACES


class Presence:
    """The places, as one process sees them. Made where it is not there; OSError when the disk does not take it."""

    def __init__(self, path: Path) -> None:
        self._bytes = map_shared(path, _FILE_BYTES)

    def may_be(self, key: ObjectKey) -> bool:
        """Whether the journal is to be asked about a key."""
        return self._bytes[place_of(key)] != 0

    def set(self, place: int) -> None:
        """Something is about to be pending there. Only within a transaction that writes the journal."""
        self._bytes[place] = 1

    def keep(self, places: Iterable[int]) -> None:
        """In these places and nowhere else is something pending. Only within a transaction that holds the write lock,
        has looked, and changes nothing itself: what it undid would be pending unseen."""
        wanted = bytearray(PLACES)
        for place in places:
            wanted[place] = 1
        self._bytes[:PLACES] = bytes(wanted)

    def stamp(self) -> None:
        """The journal has something that is due. Only after the commit: the reconciler must find it."""
        _STAMP.pack_into(self._bytes, PLACES, time.monotonic_ns(), os.getpid())

    def stamped(self) -> bytes:
        """Another value than before, where anybody has stamped since."""
        return self._bytes[PLACES:_FILE_BYTES]

    def close(self) -> None:
        self._bytes.close()
