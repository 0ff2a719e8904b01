"""The index that all worker processes share: which blocks there are, in which order they were used, what they take.

LMDB without sync: a killed process loses nothing, an unclean boot may lose anything, so then the index is rebuilt from
the files (opening.py). Lookups are read transactions of microseconds and may run on the event loop. Everything that
writes waits for a lock that other processes take, and must run on the index thread. Every write transaction is short.

    blocks      block id → BlockRecord
    access      (tick, block id) → nothing: the oldest first
    objects     (object id, block id) → nothing: the blocks of one object
    reserved    (worker, file) → Reservation: what fills in progress will take
    fills       fill key → FillHolder: which process leads a fill
    doomed      (worker, file) → nothing: files that left the index and are to be unlinked
    counters    usage, next tick

Usage plus reservations never exceed the capacity given to `reserve`. What belongs together changes in one transaction:
a process killed between two of them leaves accounts that add up, and files that `reserved` and `doomed` name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import lmdb

from gateway.blocks import records, tables
from gateway.blocks.eviction import least_recently_used
from gateway.blocks.layout import Extent
from gateway.blocks.records import BlockRecord, FillHolder, Reservation
from gateway.errors import StoreUnavailable

MAP_BYTES = 64 * 1024**3
"""Address space, not disk: room for more than 100 million blocks."""

VICTIMS_PER_TRANSACTION = 64
TOUCHES_PER_TRANSACTION = 64

_USAGE = b"usage"
_NEXT_TICK = b"next tick"


@dataclass(frozen=True, slots=True)
class Usage:
    """What the directory holds: blocks, the bytes they take on disk, and the bytes set aside for fills in progress."""

    blocks: int
    used_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One transaction's outcome: whether what was asked is done, and the files that left the index for it."""

    done: bool
    doomed: Sequence[BlockRecord]


class BlockIndex:
    """One process's view of the shared index. `worker` names its reservations and doomed files."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._worker = worker
        self._environment = lmdb.open(
            str(directory), map_size=MAP_BYTES, max_dbs=8, max_readers=1024, sync=False, mode=0o600, subdir=True
        )
        names = (b"blocks", b"access", b"objects", b"reserved", b"doomed", b"counters", b"fills")
        tables = [self._environment.open_db(name) for name in names]
        self._blocks, self._access, self._objects, self._reserved, self._doomed, self._counters, self._fills = tables
        self._environment.reader_check()

    def close(self, *, sync: bool = False) -> None:
        if sync:
            self._environment.sync(True)
        self._environment.close()

    # Reads: microseconds, no lock.

    def lookup(self, block_id: bytes) -> Extent | None:
        """Where a block lies, or None."""
        with self._read() as transaction:
            packed = tables.get(transaction, self._blocks, block_id)
        return records.unpack_extent(packed) if packed is not None else None

    def present(self, block_ids: Iterable[bytes]) -> list[bool]:
        """For each block, whether the index has it."""
        with self._read() as transaction:
            return [tables.get(transaction, self._blocks, block_id) is not None for block_id in block_ids]

    def has_object(self, object_id: bytes) -> bool:
        """Whether there is a block of any version of an object."""
        with self._read() as transaction:
            return next(tables.keys(transaction, self._objects, object_id), None) is not None

    def holder(self, fill_key: bytes) -> FillHolder | None:
        """Who leads a fill, or led it when it was killed."""
        with self._read() as transaction:
            return self._holder(transaction, fill_key)

    def usage(self) -> Usage:
        with self._read() as transaction:
            return self._usage(transaction)

    def records(self) -> Iterator[BlockRecord]:
        """Every block, for checks and tests."""
        with self._read() as transaction:
            for block_id, packed in tables.items(transaction, self._blocks):
                yield records.unpack_block(block_id, packed)

    def by_last_use(self) -> list[bytes]:
        """Every block id, the least recently used first, for checks and tests."""
        with self._read() as transaction:
            return [records.block_of_access_key(key) for key in tables.keys(transaction, self._access)]

    # Writes: index thread only.

    def reserve(self, reservation: Reservation, capacity_bytes: int, succeeds: FillHolder | None = None) -> Step | None:
        """Set room aside and lead the fill, the least recently used blocks leaving the index for it.

        None: the block is there already, or a process leads the fill that is not the one this one `succeeds`. A dead
        leader's room is free with that, and its file doomed. Not done: either more victims must go (call again once
        the doomed files are unlinked), or, when none was found, everything left is being filled.
        """
        with self._write() as transaction:
            holder = self._holder(transaction, reservation.fill_key)
            if holder not in (None, succeeds) or self._record(transaction, reservation.block_id) is not None:
                return None
            if holder is not None:
                self._succeed(transaction, reservation.fill_key, holder)
            doomed = self._evict(transaction, capacity_bytes - reservation.disk_bytes)
            done = self._total(transaction) + reservation.disk_bytes <= capacity_bytes
            if done:
                own = records.pack_holder(FillHolder(self._worker, reservation.file))
                transaction.put(own, records.pack_reservation(reservation), db=self._reserved)
                transaction.put(reservation.fill_key, own, db=self._fills)
            return Step(done, doomed)

    def shrink(self, capacity_bytes: int) -> Step:
        """Evict down to a capacity; call again until done, as for `reserve`."""
        with self._write() as transaction:
            doomed = self._evict(transaction, capacity_bytes)
            return Step(self._total(transaction) <= capacity_bytes, doomed)

    def commit(self, reservation: Reservation, object_id: bytes, extent: Extent) -> bool:
        """Turn a reservation into a block, whose file is in place.

        False when another process has filled the same block meanwhile: the reservation is gone and the file is doomed.
        """
        with self._write() as transaction:
            self._release(transaction, reservation)
            if tables.get(transaction, self._blocks, reservation.block_id) is not None:
                self._doom(transaction, reservation.file)
                return False
            tick = self._advance(transaction, 1)
            record = BlockRecord(reservation.block_id, object_id, extent, reservation.disk_bytes, tick)
            self._insert(transaction, record)
            return True

    def release(self, reservation: Reservation) -> None:
        """Give back a reservation whose file does not exist."""
        with self._write() as transaction:
            self._release(transaction, reservation)

    def drop(self, block_id: bytes, file: str) -> bool:
        """Take a block out, if it still lies in `file`, which is then doomed."""
        with self._write() as transaction:
            record = self._record(transaction, block_id)
            if record is None or record.extent.file != file:
                return False
            self._remove(transaction, record)
            return True

    def drop_object(self, object_id: bytes) -> Step:
        """Take blocks of every version of an object out, a bounded number at a time: call again until done."""
        with self._write() as transaction:
            keys = islice(tables.keys(transaction, self._objects, object_id), VICTIMS_PER_TRANSACTION)
            found = (self._record(transaction, key[len(object_id) :]) for key in keys)
            doomed = self._remove_all(transaction, [record for record in found if record is not None])
            return Step(len(doomed) < VICTIMS_PER_TRANSACTION, doomed)

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """Note that blocks were used, in this order; at most TOUCHES_PER_TRANSACTION of them."""
        with self._write() as transaction:
            tick = self._advance(transaction, len(block_ids))
            for place, block_id in enumerate(block_ids):
                self._touch(transaction, block_id, tick + place)

    def forget_doomed(self, files: Iterable[str]) -> None:
        """The files are unlinked."""
        with self._write() as transaction:
            for file in files:
                transaction.delete(records.worker_key(self._worker, file.encode()), db=self._doomed)

    def leftovers(self, worker: int) -> list[str]:
        """The files that a dead worker's slot may have left: fills begun, and doomed files not yet unlinked.

        A file that a block lies in is none of them.
        """
        prefix = records.worker_key(worker)
        with self._read() as transaction:
            doomed = list(tables.keys(transaction, self._doomed, prefix))
            reserved = list(tables.keys(transaction, self._reserved, prefix))
        return [key[len(prefix) :].decode() for key in (*doomed, *reserved)]

    def forget_slot(self, worker: int) -> None:
        """Drop a dead worker's reservations and doomed files, after what `leftovers` named is gone from the disk."""
        with self._write() as transaction:
            for table in (self._reserved, self._doomed):
                tables.clear_prefix(transaction, table, records.worker_key(worker))
            for fill_key, packed in list(tables.items(transaction, self._fills)):
                if records.unpack_holder(packed).worker == worker:
                    transaction.delete(fill_key, db=self._fills)

    def insert_scanned(self, found: Sequence[BlockRecord]) -> list[str]:
        """Take in blocks found on disk, whose ticks order them; returns files of blocks that were already there."""
        duplicates = []
        with self._write() as transaction:
            for record in found:
                if tables.get(transaction, self._blocks, record.block_id) is not None:
                    duplicates.append(record.extent.file)
                    continue
                self._insert(transaction, record)
                if record.tick >= self._counter(transaction, _NEXT_TICK):
                    transaction.put(_NEXT_TICK, records.pack_counter(record.tick + 1), db=self._counters)
        return duplicates

    # Inside a transaction.

    @contextmanager
    def _read(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._environment.begin() as transaction:
                yield transaction
        except lmdb.Error as error:
            raise StoreUnavailable(f"the block index cannot be read: {error}") from error

    @contextmanager
    def _write(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._environment.begin(write=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise StoreUnavailable(f"the block index cannot be written: {error}") from error

    def _usage(self, transaction: lmdb.Transaction) -> Usage:
        blocks = transaction.stat(self._blocks)["entries"]
        reserved = sum(records.reserved_bytes(packed) for _, packed in tables.items(transaction, self._reserved))
        return Usage(blocks, self._counter(transaction, _USAGE), reserved)

    def _total(self, transaction: lmdb.Transaction) -> int:
        usage = self._usage(transaction)
        return usage.used_bytes + usage.reserved_bytes

    def _evict(self, transaction: lmdb.Transaction, target_bytes: int) -> list[BlockRecord]:
        usage = self._usage(transaction)
        if usage.reserved_bytes > target_bytes:  # no eviction could make that much room
            return []
        excess = usage.used_bytes + usage.reserved_bytes - target_bytes
        victims = least_recently_used(self._oldest_first(transaction), excess, VICTIMS_PER_TRANSACTION)
        return self._remove_all(transaction, victims)

    def _oldest_first(self, transaction: lmdb.Transaction) -> Iterator[BlockRecord]:
        for key in tables.keys(transaction, self._access):
            record = self._record(transaction, records.block_of_access_key(key))
            if record is not None:
                yield record

    def _record(self, transaction: lmdb.Transaction, block_id: bytes) -> BlockRecord | None:
        packed = tables.get(transaction, self._blocks, block_id)
        return records.unpack_block(block_id, packed) if packed is not None else None

    def _remove_all(self, transaction: lmdb.Transaction, victims: list[BlockRecord]) -> list[BlockRecord]:
        for victim in victims:
            self._remove(transaction, victim)
        return victims

    def _remove(self, transaction: lmdb.Transaction, record: BlockRecord) -> None:
        transaction.delete(record.block_id, db=self._blocks)
        transaction.delete(records.access_key(record.tick, record.block_id), db=self._access)
        transaction.delete(record.object_id + record.block_id, db=self._objects)
        self._add(transaction, _USAGE, -record.disk_bytes)
        self._doom(transaction, record.extent.file)

    def _insert(self, transaction: lmdb.Transaction, record: BlockRecord) -> None:
        transaction.put(record.block_id, records.pack_block(record), db=self._blocks)
        transaction.put(records.access_key(record.tick, record.block_id), b"", db=self._access)
        transaction.put(record.object_id + record.block_id, b"", db=self._objects)
        self._add(transaction, _USAGE, record.disk_bytes)

    def _touch(self, transaction: lmdb.Transaction, block_id: bytes, tick: int) -> None:
        packed = tables.get(transaction, self._blocks, block_id)
        if packed is None:
            return
        transaction.delete(records.access_key(records.tick_of(packed), block_id), db=self._access)
        transaction.put(records.access_key(tick, block_id), b"", db=self._access)
        transaction.put(block_id, records.with_tick(packed, tick), db=self._blocks)

    def _holder(self, transaction: lmdb.Transaction, fill_key: bytes) -> FillHolder | None:
        packed = tables.get(transaction, self._fills, fill_key)
        return records.unpack_holder(packed) if packed is not None else None

    def _release(self, transaction: lmdb.Transaction, reservation: Reservation) -> None:
        holder = FillHolder(self._worker, reservation.file)
        transaction.delete(records.pack_holder(holder), db=self._reserved)
        if self._holder(transaction, reservation.fill_key) == holder:
            transaction.delete(reservation.fill_key, db=self._fills)

    def _succeed(self, transaction: lmdb.Transaction, fill_key: bytes, dead: FillHolder) -> None:
        transaction.delete(records.pack_holder(dead), db=self._reserved)
        transaction.delete(fill_key, db=self._fills)
        self._doom(transaction, dead.file)

    def _doom(self, transaction: lmdb.Transaction, file: str) -> None:
        transaction.put(records.worker_key(self._worker, file.encode()), b"", db=self._doomed)

    def _advance(self, transaction: lmdb.Transaction, count: int) -> int:
        return self._add(transaction, _NEXT_TICK, count) - count

    def _add(self, transaction: lmdb.Transaction, name: bytes, difference: int) -> int:
        value = self._counter(transaction, name) + difference
        transaction.put(name, records.pack_counter(value), db=self._counters)
        return value

    def _counter(self, transaction: lmdb.Transaction, name: bytes) -> int:
        return records.unpack_counter(tables.get(transaction, self._counters, name))
