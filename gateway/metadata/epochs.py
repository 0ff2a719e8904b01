"""Invalidation epochs: what was observed of a key is void once the key's epoch has changed, on every worker at once.

An own write stores new numbers in memory that all workers share: nothing is searched for or deleted, and what lands
later is void as it lands. A number is never stored twice, so that a change is never missed: its upper 24 bits are the
opening of the file that it comes from, its lower 40 bits count within that. So a store replaces what is there: there
is no addition, no lock and no wait, for threads and processes, whichever of them is stopped or killed.

    cell 0                  how often the file was opened
    4,096 cells             buckets, by hash
    2 rows of 2,097,152     keys, by two hashes: a write stores in one cell of each row
    512 times 256           writes under way, by process

A key's epoch has changed when its bucket's cell has, or *both* of its own. So a write voids another key only together
with a second write that shares the other cell.

A process that is killed in the midst of a write can void nothing when the origin has done its work. So each write is
written down before it is sent, and the next process in that place voids what it finds (`left_behind`).

Where the origin has not answered, it may carry a write out later, and what is learned of the key meanwhile may be of
before. So a write in doubt is ended later than others: what was learned is
forgotten once more then, and until then LIST asks the origin about its keys.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Final

import lmdb
import structlog
from awscrt.checksums import crc64nvme

from gateway.clock import Clock
from gateway.errors import StoreUnavailable
from gateway.heartbeats import PROCESSES_MAX
from gateway.metadata.entries import ObservedAt, catalog_key
from gateway.objects import ObjectKey

_BUCKETS = 4096
_ROW_BITS = 21
_ROW_MASK = 2**_ROW_BITS - 1
_FIRST_KEY = 1 + _BUCKETS
_SECOND_KEY = _FIRST_KEY + 2**_ROW_BITS
_FIRST_WRITE = _SECOND_KEY + 2**_ROW_BITS
_WRITES_MAX = 256
"""Of a process, which are written down by themselves. With more at once, everything is void when it is killed."""

_KEYS_MAX = 8
"""Of one write, likewise: with more, all of its bucket is void."""

_OF_KEY: Final = 1 << 60
_OF_BUCKET: Final = 2 << 60
_OF_EVERYTHING: Final = 3 << 60
_DIGEST_MASK: Final = 2 ** (2 * _ROW_BITS) - 1
_CELL_BYTES = 8
_COUNT_BITS = 40
_OPENINGS_MAX = 2**24 - 1
FILE_BYTES = (_FIRST_WRITE + PROCESSES_MAX * _WRITES_MAX) * _CELL_BYTES


def create(path: Path) -> None:
    """A file of zeros, whole on disk: a page that could not be backed would kill the process that touches it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
    finally:
        os.close(descriptor)


class InvalidationEpochs:
    """The cells, as one process sees them. All but `sync` may run on the event loop.

    `path` is a file made by `create`, and nobody else opens it at this moment; None: they are this process's alone.
    `process` is the number that no other living process has. FileNotFoundError when it is not such a file, or was
    opened 16 million times.
    """

    def __init__(self, path: Path | None, process: int = 0) -> None:
        self._map = mmap.mmap(-1, FILE_BYTES) if path is None else _mapped(path)
        self._cells = memoryview(self._map).cast("Q")
        opening = self._cells[0] + 1
        if opening > _OPENINGS_MAX:
            self.close()
            raise FileNotFoundError(f"{path} has no more numbers to give")
        self._cells[0] = opening
        self._numbers = count(opening << _COUNT_BITS)  # next() of it is one step of the interpreter
        own = _FIRST_WRITE + process * _WRITES_MAX
        self._beyond, self._count_beyond = own, 0
        """Where it is written down that there are more writes than places, and how many."""
        self._places = [place for place in range(own + 1, own + _WRITES_MAX) if not self._cells[place]]
        self.left_behind = [place for place in range(own, own + _WRITES_MAX) if self._cells[place]]
        """Of writes that the process before was killed in: for `void`, and then for `end_write`."""
        if self._beyond in self.left_behind:
            self._count_beyond = 1

    def of_bucket(self, bucket: str) -> int:
        """The epoch of the bucket itself: of what is said of it and of its listings."""
        return self._cells[_bucket_cell(bucket)]

    def of_key(self, record_key: bytes) -> tuple[int, int]:
        """The key's own two numbers; `record_key` is its catalog key."""
        digest = crc64nvme(record_key)
        cells = self._cells
        return cells[_FIRST_KEY + (digest & _ROW_MASK)], cells[_SECOND_KEY + (digest >> _ROW_BITS & _ROW_MASK)]

    def is_current(self, observed: ObservedAt, bucket: str, record_key: bytes) -> bool:
        """Whether nothing was written since the moment `observed` that could have changed what was seen of the key."""
        cells, (first, second) = self._cells, observed.cells
        if observed.epoch != cells[_bucket_cell(bucket)]:
            return False
        digest: int = crc64nvme(record_key)
        if cells[_FIRST_KEY + (digest & _ROW_MASK)] == first:
            return True
        return bool(cells[_SECOND_KEY + (digest >> _ROW_BITS & _ROW_MASK)] == second)

    def change_key(self, key: ObjectKey) -> None:
        """The key is being written, or was."""
        self._change(crc64nvme(catalog_key(key)))

    def _change(self, digest: int) -> None:
        number = next(self._numbers)
        self._cells[_FIRST_KEY + (digest & _ROW_MASK)] = number
        self._cells[_SECOND_KEY + (digest >> _ROW_BITS & _ROW_MASK)] = number

    def change_bucket(self, bucket: str) -> None:
        """Any key of the bucket may be written."""
        self._cells[_bucket_cell(bucket)] = next(self._numbers)

    def change_everything(self) -> None:
        """Any key of any bucket may be written."""
        number = next(self._numbers)
        for cell in range(1, 1 + _BUCKETS):
            self._cells[cell] = number

    def begin_write(self, bucket: str | None, keys: Sequence[ObjectKey] | None) -> list[int]:
        """A write of these keys of a bucket is about to be sent; None: of all keys, of all buckets.

        Gives the places where it is written down, for `void` and `end_write`.
        """
        if keys is not None and len(keys) <= _KEYS_MAX:
            written = [_OF_KEY | crc64nvme(catalog_key(key)) & _DIGEST_MASK for key in keys]
        else:
            written = [_OF_EVERYTHING if bucket is None else _OF_BUCKET | _bucket_cell(bucket)]
        if len(written) > len(self._places):
            self._count_beyond += 1
            self._cells[self._beyond] = _OF_EVERYTHING
            return [self._beyond]
        places = [self._places.pop() for _ in written]
        for place, one in zip(places, written, strict=True):
            self._cells[place] = one
        return places

    def void(self, places: Sequence[int]) -> None:
        """What the writes in these places may have changed."""
        for place in places:
            kind, digest = self._cells[place] & ~_DIGEST_MASK, self._cells[place] & _DIGEST_MASK
            if kind == _OF_KEY:
                self._change(digest)
            elif kind == _OF_BUCKET:
                self._cells[digest] = next(self._numbers)
            else:
                self.change_everything()

    def end_write(self, places: Sequence[int]) -> None:
        """They have been answered, or never will be, and what they change is void."""
        for place in places:
            if place == self._beyond:
                self._count_beyond -= 1
                if self._count_beyond:
                    continue
            else:
                self._places.append(place)
            self._cells[place] = 0

    def sync(self) -> None:
        """Make the cells durable. Blocks."""
        self._map.flush()

    def close(self) -> None:
        self._cells.release()
        self._map.close()


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != FILE_BYTES:
            raise FileNotFoundError(f"{path} is no file of invalidation epochs")
        return mmap.mmap(descriptor, FILE_BYTES)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=1024)
def _bucket_cell(bucket: str) -> int:
    return 1 + zlib.crc32(bucket.encode("utf-8", "surrogatepass")) % _BUCKETS


IN_DOUBT_SECONDS = 60.0
"""A request of which nothing has been heard is carried out within so long, or never."""

IN_DOUBT_MAX = 10_000
"""With more, the oldest is ended sooner: an origin that is away must not fill the memory."""

_log = structlog.get_logger("forebay.catalog")


class InDoubtWrites:
    """Those of this process, each with what ends it. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], Awaitable[None]]]] = deque()
        self._ending: asyncio.Task[None] | None = None

    def add(self, end: Callable[[], Awaitable[None]]) -> None:
        """Call this when the time of doubt is over; not when the gateway stops before."""
        self._waiting.append((self._clock.monotonic() + IN_DOUBT_SECONDS, end))
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_all(), name="writes in doubt")

    async def close(self) -> None:
        """Nothing is ended any more."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_all(self) -> None:
        while self._waiting:
            due, _ = self._waiting[0]
            left = due - self._clock.monotonic()
            if left > 0 and len(self._waiting) <= IN_DOUBT_MAX:
                await self._clock.sleep(min(left, 1.0))
                continue
            _, end = self._waiting.popleft()
            try:
                await end()
            except (OSError, lmdb.Error, StoreUnavailable):  # the others are to be ended all the same
                _log.exception("a write in doubt could not be ended")
        self._ending = None
