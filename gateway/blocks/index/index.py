"""The index that all worker processes share: which blocks there are, in which order they were used, what they take.

LMDB without sync: a killed process loses nothing, an unclean boot may lose anything, so then the index is dropped and a
survey of the files builds it anew (upkeep/survey.py). Lookups are read transactions of microseconds and may run on the
event loop. Everything that writes waits for a lock that other processes take, and must run on the index thread. Every
write transaction is short. `tables.py` says what is kept.

Usage plus reservations never exceed the capacity given to `reserve`. What belongs together changes in one transaction:
a process killed between two of them leaves accounts that add up, and files that `reserved` and `doomed` name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import lmdb

from gateway.blocks.index import records, tables
from gateway.blocks.index.access_log import AccessLog
from gateway.blocks.index.ledger import Ledger
from gateway.blocks.index.records import BlockRecord, FileRecord, FillHolder, Reservation
from gateway.blocks.index.room import VICTIMS_PER_TRANSACTION, Step, make_room, pins_fit
from gateway.blocks.index.shares import Capacity, SlotUsage
from gateway.blocks.index.tables import TABLES_MAX, Tables
from gateway.blocks.layout import Extent
from gateway.errors import NotKept, StoreUnavailable

MAP_BYTES = 64 * 1024**3
"""Address space, not disk: room for more than 100 million blocks."""

TOUCHES_PER_TRANSACTION = 64

STALLED_SECONDS = 2.0
"""Transactions take milliseconds: who has waited so long for the write lock waits for a process that is stopped."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the directory holds: blocks, the bytes they take on disk, and the bytes set aside for fills in progress.

    `unsurveyed_bytes` lie on disk in files that the index does not know yet. `slots` gives each slot's part.
    """

    blocks: int
    used_bytes: int
    reserved_bytes: int
    unsurveyed_bytes: int = 0
    slots: Mapping[str, SlotUsage] = field(default_factory=dict)


class BlockIndex:
    """One process's view of the shared index. `worker` names its reservations and doomed files.

    What was read is noted in `accesses`, and enters the index now and then (`touch`), at the latest before anything is
    evicted for a new file: a policy that sees hits later than the misses after them takes old data for young.
    """

    def __init__(self, directory: Path, worker: int) -> None:
        self.worker = worker
        self.accesses = AccessLog()
        self._waits_since: float | None = None
        self._environment = lmdb.open(
            str(directory), map_size=MAP_BYTES, max_dbs=TABLES_MAX, max_readers=1024, sync=False, mode=0o600
        )
        self._tables = Tables.open(self._environment)
        self._environment.reader_check()

    def close(self, *, sync: bool = False) -> None:
        if sync:
            self._environment.sync(True)
        self._environment.close()

    @property
    def stalled(self) -> bool:
        """Whether another process keeps this one from writing. Any thread."""
        since = self._waits_since
        return since is not None and time.monotonic() - since > STALLED_SECONDS

    # Reads: microseconds, no lock.

    def lookup(self, block_id: bytes) -> Extent | None:
        """Where a block lies, or None."""
        try:  # without `_read`, which costs more than the look-up: this is on the path of every hit
            with self._environment.begin() as transaction:
                packed = tables.get(transaction, self._tables.blocks, block_id)
        except lmdb.Error as error:
            raise StoreUnavailable(f"the block index cannot be read: {error}") from error
        return records.unpack_extent(packed) if packed is not None else None

    def present(self, block_ids: Iterable[bytes]) -> list[bool]:
        """For each block, whether the index has it."""
        with self._read() as ledger:
            return [ledger.has_block(block_id) for block_id in block_ids]

    def has_object(self, object_id: bytes) -> bool:
        """Whether there is a block of any version of an object."""
        try:  # as in `lookup`: this is asked for every object of which nothing is remembered
            with self._environment.begin() as transaction:
                return tables.has_prefix(transaction, self._tables.objects, object_id)
        except lmdb.Error as error:
            raise StoreUnavailable(f"the block index cannot be read: {error}") from error

    def holder(self, fill_key: bytes) -> FillHolder | None:
        """Who leads a fill, or led it when it was killed."""
        with self._read() as ledger:
            return ledger.holder(fill_key)

    def usage(self) -> Usage:
        with self._read() as ledger:
            names, by_number = ledger.slots(), ledger.usage()
            unsurveyed_bytes = ledger.unsurveyed_bytes()
        return Usage(
            sum(used.blocks for used in by_number.values()),
            sum(used.used_bytes for used in by_number.values()),
            sum(used.reserved_bytes for used in by_number.values()),
            unsurveyed_bytes,
            {name: by_number[number] for name, number in names.items()},
        )

    def slot_names(self) -> dict[int, str]:
        """The slots behind the numbers of `FileRecord.slot`."""
        with self._read() as ledger:
            return {number: name for name, number in ledger.slots().items()}

    def changes(self) -> int:
        """A number that grows with every change that any process makes."""
        try:
            return int(self._environment.info()["last_txnid"])
        except lmdb.Error as error:
            raise StoreUnavailable(f"the block index cannot be read: {error}") from error

    def knows_file(self, file: str) -> bool:
        with self._read() as ledger:
            return ledger.file(file) is not None

    def others_fill(self) -> bool:
        """Whether other workers have reserved room for fills in progress."""
        own = records.worker_key(self.worker)
        with self._read() as ledger:
            return any(not key.startswith(own) for key in tables.keys(ledger.transaction, self._tables.reserved))

    def blocks(self) -> Iterator[BlockRecord]:
        """Every block, for checks and tests."""
        with self._read() as ledger:
            for block_id, packed in tables.items(ledger.transaction, self._tables.blocks):
                yield records.unpack_block(block_id, packed)

    def contents(self, file: str) -> list[bytes]:
        """The blocks that lie in a file."""
        with self._read() as ledger:
            return ledger.contents(file)

    def blocks_after(self, block_id: bytes, count_max: int) -> list[tuple[BlockRecord, str]]:
        """The next blocks in the order of their ids, each with the name of its slot; none at the end."""
        with self._read() as ledger:
            names = {number: name for name, number in ledger.slots().items()}
            following = tables.items(ledger.transaction, self._tables.blocks, block_id + b"\0")
            blocks = [records.unpack_block(found, packed) for found, packed in islice(following, count_max)]
            files = [ledger.file(block.extent.file) for block in blocks]
        return [(block, names[file.slot]) for block, file in zip(blocks, files, strict=True) if file is not None]

    def files(self) -> Iterator[FileRecord]:
        """Every file, for checks and tests."""
        with self._read() as ledger:
            for file, packed in tables.items(ledger.transaction, self._tables.files):
                yield records.unpack_file(file.decode(), packed)

    # Writes: index thread only.

    def reserve(
        self,
        reservation: Reservation,
        capacity: Capacity,
        *,
        day: int,
        block_id: bytes | None = None,
        succeeds: FillHolder | None = None,
    ) -> Step | None:
        """Set room aside, and lead the fill of `block_id` where it is one, other files leaving the index for it.

        None: the block is there already, or a process leads the fill that is not the one this one `succeeds`. A dead
        leader's room is free with that, and its file doomed. Not done: either more victims must go (call again once
        the doomed files are unlinked), or, when none was found, everything left is being filled. NotKept when enough
        was written on this `day` (counted from 1970).
        """
        with self._write() as ledger:
            holder = ledger.holder(reservation.fill_key) if reservation.fill_key is not None else None
            if holder not in (None, succeeds) or (block_id is not None and ledger.has_block(block_id)):
                return None
            self._check_writes(ledger, reservation, capacity, day)
            if holder is not None and reservation.fill_key is not None:
                ledger.succeed(reservation.fill_key, holder)
            ledger.touch(self.accesses.take(TOUCHES_PER_TRANSACTION))
            step = make_room(ledger, capacity, reservation.slot, reservation.disk_bytes, wanted=reservation.wanted)
            if step.done:
                ledger.reserve(reservation)
                ledger.add_written(day, reservation.disk_bytes if reservation.to_write else 0)
            return step

    def follow(self, capacity: Capacity) -> None:
        """Have every slot's files evicted as its share says from now on."""
        with self._write() as ledger:
            for name, share in capacity.shares.items():
                ledger.book(ledger.slot(name)).state.follow(share.eviction)

    def shrink(self, capacity: Capacity) -> Step:
        """Evict down to the capacity and each slot's limit; call again until done, as for `reserve`."""
        with self._write() as ledger:
            return make_room(ledger, capacity)

    def commit(self, reservation: Reservation, blocks: Sequence[BlockRecord], capacity: Capacity) -> int:
        """Turn a reservation into the blocks of its file, which is in place; how many were new.

        None, when the index has all of them by now: the reservation is gone and the file is doomed.
        """
        with self._write() as ledger:
            ledger.release(reservation)
            new = ledger.unknown(blocks)
            if not new:
                ledger.doom(reservation.file)
                return 0
            pin = reservation.pin
            if pin not in ledger.pins().values() or not _fits(ledger, reservation, capacity):
                pin = 0
            ledger.admit(reservation, new, pin)
            return len(new)

    def extend(self, reservation: Reservation, blocks: Sequence[BlockRecord]) -> bool:
        """Turn a reservation into what was appended to its file; False when the file left the index meanwhile."""
        with self._write() as ledger:
            ledger.release(reservation)
            file = ledger.file(reservation.file)
            if file is not None:
                ledger.extend(file, ledger.unknown(blocks), reservation.disk_bytes)
            return file is not None

    def settle(self, worker: int, file: str, disk_bytes: int | None) -> None:
        """Give back what a worker reserved to append to a file that takes this much now (None: it is gone)."""
        with self._write() as ledger:
            ledger.transaction.delete(records.worker_key(worker, file.encode()), db=self._tables.reserved)
            known = ledger.file(file)
            if known is not None and disk_bytes is not None:
                ledger.resize(known, disk_bytes)

    def release(self, reservation: Reservation) -> None:
        """Give back a reservation whose file does not exist."""
        with self._write() as ledger:
            ledger.release(reservation)

    def drop(self, block_id: bytes, file: str) -> Step:
        """Take a block out, if it still lies in `file`: done says whether. The file goes when nothing else is in it."""
        with self._write() as ledger:
            block = ledger.block(block_id)
            if block is None or block.extent.file != file:
                return Step(False, ())
            emptied = ledger.remove_block(block)
            return Step(True, [emptied] if emptied is not None else ())

    def drop_object(self, object_id: bytes) -> Step:
        """Take blocks of every version of an object out, a bounded number at a time: call again until done."""
        with self._write() as ledger:
            keys = list(
                islice(tables.keys(ledger.transaction, self._tables.objects, object_id), VICTIMS_PER_TRANSACTION)
            )
            found = (ledger.block(key[len(object_id) :]) for key in keys)
            emptied = [ledger.remove_block(block) for block in found if block is not None]
            return Step(len(keys) < VICTIMS_PER_TRANSACTION, [file for file in emptied if file is not None])

    def touch(self) -> None:
        """Enter what was read longest ago: TOUCHES_PER_TRANSACTION files at most."""
        with self._write() as ledger:
            ledger.touch(self.accesses.take(TOUCHES_PER_TRANSACTION))

    def forget_doomed(self, files: Iterable[str]) -> None:
        """The files are unlinked."""
        with self._write() as ledger:
            for file in files:
                ledger.transaction.delete(records.worker_key(self.worker, file.encode()), db=self._tables.doomed)

    @contextmanager
    def reading(self) -> Iterator[Ledger]:
        """One transaction that changes nothing."""
        with self._read() as ledger:
            yield ledger

    @contextmanager
    def writing(self) -> Iterator[Ledger]:
        """One transaction; index thread only."""
        with self._write() as ledger:
            yield ledger

    @staticmethod
    def _check_writes(ledger: Ledger, reservation: Reservation, capacity: Capacity, day: int) -> None:
        bytes_max = capacity.daily_writes_bytes
        if bytes_max is None or not reservation.to_write:
            return
        if ledger.written_bytes(day) + reservation.disk_bytes > bytes_max:
            raise NotKept("write-budget", f"the {bytes_max} bytes that may be written in a day are written")

    # Transactions.

    @contextmanager
    def _read(self) -> Iterator[Ledger]:
        try:
            with self._environment.begin() as transaction:
                yield Ledger(transaction, self._tables, self.worker)
        except lmdb.Error as error:
            raise StoreUnavailable(f"the block index cannot be read: {error}") from error

    @contextmanager
    def _write(self) -> Iterator[Ledger]:
        self._waits_since = time.monotonic()
        try:
            with self._environment.begin(write=True) as transaction:
                self._waits_since = None
                ledger = Ledger(transaction, self._tables, self.worker)
                yield ledger
                ledger.close()
        except lmdb.Error as error:
            raise StoreUnavailable(f"the block index cannot be written: {error}") from error
        finally:
            self._waits_since = None


def _fits(ledger: Ledger, reservation: Reservation, capacity: Capacity) -> bool:
    return pins_fit(ledger, capacity, ledger.slot(reservation.slot), reservation.disk_bytes)
