"""The catalog's records in LMDB, shared by all workers. Looking up takes microseconds: it may run on the event loop.

    entries   catalog key → record
    extras    catalog key → the rest, if the record has no room for it
    versions  version key → length of the record (u16), record, extra: of versions that were asked for by their ETag

Unsynced while in use: a killed process loses nothing, an unclean boot may lose anything, so then everything is dropped
(opening.py). The origin can always repeat its content, so that trouble with the disk is a miss. Updates are
gathered on the event loop and written by a thread, a few per transaction.

`DiskThread` is for disk work that may hang: in LMDB and SQLite one process at a time writes, and that one may be
stopped. Callers have a deadline, and go on without the result; the work is carried out when possible. The
thread is a daemon: work that hangs keeps no process from ending.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

import lmdb

from gateway.core.clock import Clock
from gateway.core.model import ObjectKey, ObjectVersion, immutable
from gateway.disk.lmdb_environment import OLD_ENGINE, LastCommit, Table, open_environment
from gateway.metadata.entries import (
    CATALOG_KEY_BYTES_MAX,
    EXTRA_BYTES_MAX,
    CatalogEntry,
    InvalidationEpochs,
    Watch,
    catalog_key,
    has_extra,
    is_listed_so,
    is_version,
    pack,
    unpack,
    version_key,
)
from gateway.metadata.listing.records import version_of
from gateway.telemetry import metrics

P = ParamSpec("P")
R = TypeVar("R")


class DiskThread:
    """Carries out one work after the other, in order. To be used from one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._submitted = 0
        self._done = 0
        self._begun_seconds: float | None = None

    @property
    def waiting(self) -> int:
        return self._submitted - self._done

    def is_stuck(self, seconds: float) -> bool:
        begun = self._begun_seconds
        return begun is not None and time.monotonic() - begun > seconds

    def submit(self, work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> asyncio.Future[R]:
        """Run the work after everything submitted before. Callers may ignore the result."""
        if self._is_closing:
            raise RuntimeError("the thread is being closed")
        done: Future[R] = Future()
        done.set_running_or_notify_cancel()  # it cannot be cancelled any more
        self._submitted += 1
        self._works.put((done, partial(work, *arguments, **keywords)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        result = asyncio.wrap_future(done)
        result.add_done_callback(_looked_at)
        return result

    async def run(self, seconds_max: float, work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Return the work's result; raise TimeoutError when it is not done in time, though it may be done later."""
        if self.is_stuck(seconds_max):
            raise TimeoutError
        return await in_time(self.submit(work, *arguments, **keywords), seconds_max)

    async def close(self, seconds_max: float) -> bool:
        self._is_closing = True
        self._works.put(None)
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, seconds_max)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while (following := self._works.get()) is not None:
            done, work = following
            self._begun_seconds = time.monotonic()
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
                self._ended()
                done.set_exception(error)
            else:
                self._ended()
                done.set_result(result)
                del result
            del following, done, work

    def _ended(self) -> None:
        self._begun_seconds = None
        self._done += 1


async def in_time(result: asyncio.Future[R], seconds_max: float) -> R:
    """Return the result, or raise TimeoutError. The work goes on when its caller leaves."""
    async with asyncio.timeout(seconds_max):
        return await result


def _looked_at(result: asyncio.Future[Any]) -> None:
    if not result.cancelled():
        result.exception()


SIZE_BYTES_MAX = 16 * 1024**3
"""Limit of the entries' size: about 100 million objects without extra records."""

LANDED_PER_TRANSACTION = 32
"""About half a millisecond: own writes of other processes wait no longer than that."""

_SWEPT_PER_TRANSACTION = 2 * LANDED_PER_TRANSACTION
_MAP_BYTES_OVER_SIZE = 4
_LENGTH_BYTES = 2
_COMPARED = CATALOG_KEY_BYTES_MAX - 32
"""Bytes of a catalog key that always come from the bucket's name and the key, however long they are."""


@immutable
class CatalogUpdate:
    """An entry on its way into the catalog; `of_version`: it describes its version, whichever is current."""

    key: ObjectKey
    entry: CatalogEntry
    of_version: bool = False


class HeldRecord:
    """A record that was looked up, as many as are kept: so all of it in one object."""

    __slots__ = ("_clock", "_extra", "_key", "_record", "_seen", "_store", "_until", "_watch")

    def __init__(self, store: CatalogStore, key: bytes, record: bytes, extra: bytes, watch: Watch, seen: int) -> None:
        self._store = store
        self._key = key
        self._record = record
        self._extra = extra
        self._watch = watch
        self._seen = seen
        self._clock: Clock | None = None
        self._until = 0.0

    def limit(self, clock: Clock, until: float) -> None:
        """Believe it until a time of the monotonic clock, and no longer for good."""
        self._clock, self._until = clock, until

    def holds(self) -> bool:
        store = self._store
        if self._clock is not None and self._clock.monotonic() >= self._until:
            return False
        if not store.epochs.is_as_watched(self._watch):
            return False
        number = store.last_commit.number()
        if number != self._seen:
            if store.packed(self._key) != (self._record, self._extra):
                return False
            self._seen = number
        return True


class CatalogStore:
    """One process's view of the records."""

    def __init__(self, directory: Path, epochs: InvalidationEpochs, *, size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self.epochs = epochs
        self._size_bytes_max = size_bytes_max
        self._swept = b""
        self.last_commit = LastCommit(directory)
        self._environment, tables = open_environment(
            directory,
            (b"entries", b"extras", b"versions"),
            map_bytes=size_bytes_max * _MAP_BYTES_OVER_SIZE,
            engine=OLD_ENGINE,
        )
        self._entries, self._extras, self._versions = tables

    def lookup(self, key: ObjectKey) -> CatalogEntry | None:
        """Return the entry of a key unless an own write has voided it; None also when the disk fails."""
        record_key = catalog_key(key)
        entry = self._entry(key, record_key)
        if entry is None or not self.epochs.is_current(entry.observed_at, key.bucket, record_key):
            return None
        return entry

    def last(self, key: ObjectKey) -> CatalogEntry | None:
        """Return the last entry of a key even if void. Callers may compare it, but not answer with it."""
        return self._entry(key, catalog_key(key))

    def hold(self, key: ObjectKey) -> tuple[CatalogEntry, HeldRecord] | None:
        """Do the same as `lookup`, with a record for callers that check repeatedly whether the entry still holds."""
        record_key, seen = catalog_key(key), self.last_commit.number()
        record, extra = self.packed(record_key)
        entry = unpack(record_key, key, record, extra) if record is not None else None
        if record is None or entry is None:
            return None
        watch = self.epochs.watch(entry.observed_at, key.bucket, record_key)
        if not self.epochs.is_as_watched(watch):
            return None
        return entry, HeldRecord(self, record_key, record, extra, watch, seen)

    def lookup_version(self, version: ObjectVersion) -> CatalogEntry | None:
        """Return the entry of one version; no own write voids it. None also when the disk fails."""
        record_key = version_key(version)
        try:
            with self._environment.begin() as transaction:
                packed = _get(transaction, self._versions, record_key)
        except lmdb.Error:
            return None
        if packed is None:
            return None
        start = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "little")
        return unpack(record_key, version.key, packed[_LENGTH_BYTES:start], packed[start:])

    def land(self, updates: Sequence[CatalogUpdate]) -> None:
        """Keep what was learned, unless the key was written meanwhile; at most LANDED_PER_TRANSACTION. Blocks.

        Raises lmdb.Error when the disk cannot take it: then nothing of it is kept.
        """
        with self._environment.begin(write=True) as transaction:
            if self._size_bytes(transaction) >= self._size_bytes_max:
                self._sweep(transaction)
            for update in updates:
                self._land(transaction, update)

    def listed(self, key: ObjectKey, record: bytes | None) -> None:
        """Note that a listing has `key` otherwise than before: so (listing/records.py), or, with None, not at all.

        Knowledge of another version is void from then on, on every worker. Called in the listing's thread.
        """
        record_key = catalog_key(key)
        packed, extra = self.packed(record_key)
        entry = unpack(record_key, key, packed, extra) if packed is not None else None
        if entry is not None and not _is_of(entry, record):
            self.epochs.change_key(key)

    def void_if_listed_otherwise(self, bucket: str, listed: Sequence[tuple[bytes, tuple[str, int]]]) -> None:
        """Void entries whose keys the origin has listed, in order, with another version: ETag and size."""
        if not listed:
            return
        found = []
        try:
            with self._environment.begin(self._entries) as transaction:
                cursor, last = transaction.cursor(), catalog_key(ObjectKey(bucket, listed[-1][0].decode()))
                first = catalog_key(ObjectKey(bucket, listed[0][0].decode()))
                if not cursor.set_range(first[:_COMPARED]) or cursor.key()[:_COMPARED] > last:
                    return
                for raw, version in listed:
                    key = ObjectKey(bucket, raw.decode())
                    record = transaction.get(catalog_key(key))
                    if record is not None and not is_listed_so(record, *version):
                        found.append(key)
        except (lmdb.Error, struct.error):
            return  # unreadable entries answer no request
        for key in found:
            if self.lookup(key) is not None:
                self.epochs.change_key(key)

    def close(self, *, sync: bool = False) -> None:
        if sync:
            self._environment.sync(True)
        self._environment.close()
        self.last_commit.close()

    def packed(self, record_key: bytes) -> tuple[bytes | None, bytes]:
        """Record and extra record; what the disk does not give is not known."""
        try:
            with self._environment.begin(self._entries) as transaction:
                record: bytes | None = transaction.get(record_key)
                if record is None or not has_extra(record):
                    return record, b""
                return record, _get(transaction, self._extras, record_key) or b""
        except lmdb.Error:
            return None, b""

    def has(self, record_key: bytes) -> bool:
        """Return True if there is a record, void or not."""
        return self.packed(record_key)[0] is not None

    def _entry(self, key: ObjectKey, record_key: bytes) -> CatalogEntry | None:
        record, extra = self.packed(record_key)
        return unpack(record_key, key, record, extra) if record is not None else None

    def _land_version(self, transaction: lmdb.Transaction, update: CatalogUpdate) -> None:
        if update.entry.head is None:
            raise ValueError("a version that is not there has no head")
        record_key = version_key(update.entry.head.version)
        record, extra = pack(record_key, update.entry)
        if len(extra) <= EXTRA_BYTES_MAX:
            packed = len(record).to_bytes(_LENGTH_BYTES, "little") + record + extra
            transaction.put(record_key, packed, db=self._versions)

    def _land(self, transaction: lmdb.Transaction, update: CatalogUpdate) -> None:
        if update.of_version:
            self._land_version(transaction, update)
            return
        record_key = catalog_key(update.key)
        if not self.epochs.is_current(update.entry.observed_at, update.key.bucket, record_key):
            return
        record, extra = pack(record_key, update.entry)
        if len(extra) > EXTRA_BYTES_MAX:
            return
        transaction.put(record_key, record, db=self._entries)
        if extra:
            transaction.put(record_key, extra, db=self._extras)
        else:
            transaction.delete(record_key, db=self._extras)

    def _size_bytes(self, transaction: lmdb.Transaction) -> int:
        tables = [transaction.stat(table) for table in (self._entries, self._extras, self._versions)]
        return sum(
            int(table["psize"]) * int(table["branch_pages"] + table["leaf_pages"] + table["overflow_pages"])
            for table in tables
        )

    def _sweep(self, transaction: lmdb.Transaction) -> None:
        """Make room for others, going round through all keys: any can be asked for again."""
        self._sweep_versions(transaction)
        cursor = transaction.cursor(db=self._entries)
        for _ in range(_SWEPT_PER_TRANSACTION):
            if not cursor.set_range(self._swept) and not cursor.first():
                return
            self._swept = bytes(cursor.key())
            transaction.delete(self._swept, db=self._extras)
            cursor.delete()

    def _sweep_versions(self, transaction: lmdb.Transaction) -> None:
        """As many again, whichever: their places are digests."""
        cursor = transaction.cursor(db=self._versions)
        for _ in range(_SWEPT_PER_TRANSACTION):
            if not cursor.set_range(os.urandom(_LENGTH_BYTES)) and not cursor.first():
                return
            cursor.delete()


def _is_of(entry: CatalogEntry, record: bytes | None) -> bool:
    if entry.head is None or record is None:
        return entry.head is None and record is None
    modified, etag, size_bytes = version_of(record)
    return is_version(entry.head, modified, etag, size_bytes)


def _get(transaction: lmdb.Transaction, table: Table, key: bytes) -> bytes | None:
    return cast("bytes | None", transaction.get(key, db=table))


WAITING_MAX = 4096
"""Updates that wait at most; further ones are not kept, and their objects are asked for again."""

LAND_SECONDS_MAX = 10.0
"""A transaction that takes longer is not waited for: another process was stopped in the midst of one."""

GATHERING_SECONDS = 0.01
"""Seconds between two transactions: updates that come meanwhile are written together. A lone one does not wait."""


class CatalogWriter:
    """One process's queue. Callers do not wait for an update to land: until then its object is asked for again."""

    def __init__(self, store: CatalogStore | None) -> None:
        self._store = store
        self._thread = DiskThread("catalog")
        self._waiting: deque[CatalogUpdate] = deque()
        self._writing: asyncio.Task[None] | None = None

    def add(self, update: CatalogUpdate) -> None:
        if self._store is None:
            return
        if len(self._waiting) >= WAITING_MAX:
            metrics.CATALOG_NOT_KEPT.add(1)
            return
        self._waiting.append(update)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(self._store), name="catalog landing")

    async def settle(self) -> None:
        """Wait until everything added so far is written, or given up."""
        while self._writing is not None:
            await self._writing

    async def close(self) -> bool:
        """Write the remaining updates. Return False when that takes too long; the thread is left behind then."""
        if not self._thread.is_stuck(LAND_SECONDS_MAX):
            await self.settle()
        return await self._thread.close(LAND_SECONDS_MAX)

    async def _write(self, store: CatalogStore) -> None:
        try:
            while self._waiting:
                batch = list(islice(self._waiting, LANDED_PER_TRANSACTION))
                for _ in batch:
                    self._waiting.popleft()
                try:
                    await self._thread.run(LAND_SECONDS_MAX, store.land, batch)
                except (lmdb.Error, TimeoutError):
                    metrics.CATALOG_NOT_KEPT.add(len(batch))
                if len(self._waiting) < LANDED_PER_TRANSACTION:
                    await asyncio.sleep(GATHERING_SECONDS)  # not of the clock: no promise hangs on it
        finally:
            self._writing = None
