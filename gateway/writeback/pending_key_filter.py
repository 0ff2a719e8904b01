"""Tells whether anything may be pending under a key: from shared memory, in a fraction of a microsecond, at every read.

A byte for each of 65,536 hash slots, which keys share: 0 means that nothing is pending under any key of the slot, so
other reads never ask the journal. A process sets a byte within the transaction that makes something pending, before the
commit. It clears bytes within a transaction that changes nothing and has seen that nothing is pending in the slot.
SQLite's write lock orders the two, so no other lock is needed. A process that is killed in between leaves a byte too
many, which costs look-ups until `JournalGC` clears it.

Behind the bytes lies a version: a process that commits something due for the reconciler changes it, and the reconciler
sees that without asking the journal (`ChangeNotifier`): a poll takes a fraction of a microsecond.
"""

from __future__ import annotations

import asyncio
import math
import os
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.core.clock import Clock
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


QUICK_SECONDS = 0.02
"""Seconds between two polls while the version changes."""

QUIET_SECONDS = 0.1
"""Seconds between two polls when it has not changed for a while."""

LOOK_SECONDS = 1.0
"""Seconds after which the task reads the journal even without a change, for events that no process reports."""

_QUIET_AFTER_SECONDS = 2.0


class ChangeNotifier:
    """Notifies one task. `version` returns the version of the part of the journal that the task reads."""

    def __init__(self, version: Callable[[], bytes], clock: Clock) -> None:
        self._version = version
        self._clock = clock
        self._event = asyncio.Event()
        self._notify_at = math.inf

    def notify(self) -> None:
        """Report a change in this process."""
        self._event.set()

    def notify_at(self, monotonic: float) -> None:
        """Report that something will be due at a monotonic time."""
        self._notify_at = min(self._notify_at, monotonic)

    async def wait(self) -> None:
        """Wait for a change since the last wait, a due time, or LOOK_SECONDS."""
        await self._event.wait()
        self._event.clear()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Notice changes by other processes while the context lasts."""
        polling = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    async def _poll(self) -> None:
        seen, notified_at = b"", self._clock.monotonic()
        quiet_from = notified_at
        while True:
            version, now = self._version(), self._clock.monotonic()
            if version != seen:
                quiet_from = now + _QUIET_AFTER_SECONDS
            if version != seen or now >= min(self._notify_at, notified_at + LOOK_SECONDS):
                seen, notified_at = version, now
                if now >= self._notify_at:
                    self._notify_at = math.inf
                self.notify()
            await self._clock.sleep(QUICK_SECONDS if now < quiet_from else QUIET_SECONDS)
