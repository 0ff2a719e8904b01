"""Write generations: a number per key, in memory that all workers share, that every own write makes greater.

An entry carries the generation that its key had when the origin was asked, and is believed only while that is the
generation still. So whatever was asked before an own write is void on every worker in the moment of the write: entries
already there, and fills that are yet to land. Nothing has to be found and deleted for that.

The file is an array of 64-bit counters: one for everything, 4,096 for buckets, 2,097,152 for keys, which share them by
hash (a write voids, besides its own key, one entry in two million). A generation is the sum of the three, and counters
only grow: it changes when any of them does. Raising one takes a lock on its eight bytes for the moment: it waits for
another process's addition at most, needs no room on the disk, and may run on the event loop.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from functools import lru_cache
from pathlib import Path

from gateway.metadata.keys import catalog_key
from gateway.objects import ObjectKey

_BUCKETS = 4096
_KEYS = 2**21
_COUNTER_BYTES = 8
_FIRST_KEY = 1 + _BUCKETS
FILE_BYTES = (_FIRST_KEY + _KEYS) * _COUNTER_BYTES


def create(path: Path) -> None:
    """A file of zeros, whole on disk: a page that could not be backed would kill the process that touches it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
    finally:
        os.close(descriptor)


class WriteGenerations:
    """The counters, as one process sees them. `path` is a file made by `create`; FileNotFoundError when it is not."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self._descriptor).st_size != FILE_BYTES:
            os.close(self._descriptor)
            raise FileNotFoundError(f"{path} is no file of write generations")
        self._map = mmap.mmap(self._descriptor, FILE_BYTES)
        self._counters = memoryview(self._map).cast("Q")

    def of(self, key: ObjectKey) -> int:
        """The key's generation now."""
        return self.of_place(key.bucket, catalog_key(key))

    def of_place(self, bucket: str, place: bytes) -> int:
        """The same for the key whose catalog key is `place`."""
        counters = self._counters
        return counters[0] + counters[_bucket_counter(bucket)] + counters[_FIRST_KEY + zlib.crc32(place) % _KEYS]

    def of_bucket(self, bucket: str) -> int:
        """The generation of the bucket itself: what is said of it, and not of its keys."""
        return self._counters[0] + self._counters[_bucket_counter(bucket)]

    def raise_key(self, key: ObjectKey) -> None:
        """The key is being written, or was."""
        self._raise(_key_counter(key))

    def raise_bucket(self, bucket: str) -> None:
        """Any key of the bucket may be written."""
        self._raise(_bucket_counter(bucket))

    def raise_everything(self) -> None:
        """Any key of any bucket may be written."""
        self._raise(0)

    def sync(self) -> None:
        """Make the counters durable. Blocks."""
        self._map.flush()

    def close(self) -> None:
        self._counters.release()
        self._map.close()
        os.close(self._descriptor)

    def _raise(self, counter: int) -> None:
        start = counter * _COUNTER_BYTES
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, _COUNTER_BYTES, start)
        try:
            self._counters[counter] += 1
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, _COUNTER_BYTES, start)


@lru_cache(maxsize=1024)
def _bucket_counter(bucket: str) -> int:
    return 1 + zlib.crc32(bucket.encode("utf-8", "surrogatepass")) % _BUCKETS


def _key_counter(key: ObjectKey) -> int:
    return _FIRST_KEY + zlib.crc32(catalog_key(key)) % _KEYS
