"""One transaction of the index: related values change together.

The tables: `blocks` (block key → extent), `files` (file key → FileRecord), `queues` (slot, queue, sequence, file key)
and `state`, whose rows begin with a letter (below).

Every byte on disk is on exactly one account: a slot's usage (files in the index), a slot's reservation (files being
written), or on no slot's (files that could not be unlinked, and those that a rebuild has not come to).

A file leaves the index in one step, however many blocks lie in it: the rows of its blocks count for nothing from then
on. They are overwritten when the blocks come back, or removed by `sweep`, which goes round all rows, a few for every
block that is entered. Until then they give policies the last use of returning blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from operator import attrgetter
from typing import Any, TypeAlias, cast

import lmdb

from gateway.blocks import layout
from gateway.blocks.layout import FILE_KEY_BYTES, BlockRecord, FileRecord, Reservation, Rows, WorkerFile
from gateway.blocks.policies import FIRST_TO_LEAVE, OF_COPY, POLICIES, Queue, SlotAccount, is_copy

REMEMBERED_BLOCKS_MAX = 1 << 18
"""Limit of a slot's remembered evicted blocks; some 25 MB of layout."""

REMEMBERED_TIMES = 16
"""Remembered blocks, or a sample of them, as a multiple of a slot's blocks."""

FORGOTTEN_AT_ONCE = 64
"""Evicted files, within one transaction."""

SWEPT_PER_BLOCK = 8
SWEPT_MIN = 64
SWEPT_MAX = 512
"""Rows that are looked at for each block that is entered, and in one transaction at least and at most."""

STALE_PART = 8
"""Void rows are left alone while fewer than one row in this many is void."""

_TOTALS, _SEQUENCE, _SWEPT, _PINS_VERSION = b"totals", b"sequence", b"swept", b"pins"
_SLOT_NUMBERS = b"slot numbers"


Table: TypeAlias = Any
"""An LMDB named database: an opaque handle."""

_SLOTS, _ACCOUNTS = b"s", b"a"
"""Slot name → its number, given once; number → SlotAccount."""
_RESERVED, _PENDING_UNLINKS = b"r", b"u"
"""(Worker, file) → what a file that is written will take, and its slot; → the counted bytes of one to be unlinked."""
_PINS, _REBUILD, _COUNTERS = b"p", b"b", b"c"
"""Pin number → prefix; directory of data files → bytes that the index does not know yet; name → counters and marks."""


@dataclass(frozen=True, slots=True)
class Tables:
    """A handle of each table."""

    blocks: Table
    files: Table
    queues: Table
    state: Table

    @classmethod
    def open(cls, environment: lmdb.Environment) -> Tables:
        """Open all of them, made where they do not exist."""
        return cls(*(environment.open_db(table.name.encode()) for table in fields(cls)))


TABLES_MAX = len(fields(Tables))


def get_row(transaction: lmdb.Transaction, table: Table, key: bytes) -> bytes | None:
    return cast("bytes | None", transaction.get(key, db=table))


def rows_from(
    transaction: lmdb.Transaction, table: Table, prefix: bytes = b"", start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys that begin with `prefix` and their values, in order, from the key `start` on."""
    cursor = transaction.cursor(db=table)
    start = max(prefix, start)
    if start and not cursor.set_range(start):
        return
    for key, value in cast("Iterator[tuple[bytes, bytes]]", cursor.iternext()):
        if not key.startswith(prefix):
            return
        yield key, value


def first_key(transaction: lmdb.Transaction, table: Table, prefix: bytes) -> bytes | None:
    cursor = transaction.cursor(db=table)
    if not cursor.set_range(prefix):
        return None
    key = cast(bytes, cursor.key())
    return key if key.startswith(prefix) else None


def size_of_tables(transaction: lmdb.Transaction, of: Tables) -> int:
    """Return the bytes of all tables' pages, without those free for reuse or kept for readers."""
    pages, page_bytes = 0, 0
    for table in fields(of):
        facts = transaction.stat(getattr(of, table.name))
        pages += facts["branch_pages"] + facts["leaf_pages"] + facts["overflow_pages"]
        page_bytes = facts["psize"]
    return pages * page_bytes


@dataclass(slots=True)
class Totals:
    """Totals of all slots and of files on no account: unlinks that failed, and files not yet in the index."""

    blocks: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    remembered_blocks: int = 0
    pending_bytes: int = 0
    unindexed_bytes: int = 0

    @property
    def unowned_bytes(self) -> int:
        return self.pending_bytes + self.unindexed_bytes

    @property
    def held_bytes(self) -> int:
        return self.used_bytes + self.reserved_bytes

    @property
    def taken_bytes(self) -> int:
        return self.held_bytes + self.unowned_bytes


_numbers_of = attrgetter(*(field.name for field in fields(Totals)))


class IndexTransaction:
    """One transaction's view. Changes need a write transaction and `close`; `worker` owns the files that it leaves."""

    def __init__(self, transaction: lmdb.Transaction, of: Tables, worker: int) -> None:
        self.worker = worker
        self._transaction = transaction
        self._tables = of
        self.looked_at: dict[int, SlotAccount] = {}
        """The accounts that this transaction has looked at, and may have changed."""
        self._saved: dict[int, bytes | None] = {}
        self._next_sequence: int | None = None
        self._totals: Totals | None = None

    def close(self) -> None:
        """Write down what was changed in memory."""
        for slot, account in self.looked_at.items():
            packed = account.pack()
            if packed != self._saved[slot]:
                self._put(_ACCOUNTS + layout.pack_slot(slot), packed)
        if self._totals is not None:
            self.set_numbers(_TOTALS, *_numbers_of(self._totals))
        if self._next_sequence is not None:
            self.set_numbers(_SEQUENCE, self._next_sequence)

    @property
    def totals(self) -> Totals:
        if self._totals is None:
            self._totals = Totals(*self.numbers(_TOTALS, 6))
        return self._totals

    # Slots.

    def slots(self) -> dict[str, int]:
        """Return the number of every slot ever seen, by name."""
        found = rows_from(self._transaction, self._tables.state, _SLOTS)
        return {name[1:].decode("utf-8", "surrogatepass"): layout.unpack_slot(packed) for name, packed in found}

    def slot_names(self) -> dict[int, str]:
        return {number: name for name, number in self.slots().items()}

    def slot(self, name: str) -> int:
        """Return a slot's number, given now if it has none."""
        key = _SLOTS + name.encode("utf-8", "surrogatepass")
        packed = self._get(key)
        if packed is not None:
            return layout.unpack_slot(packed)
        number = self.numbers(_SLOT_NUMBERS, 1)[0]
        self.set_numbers(_SLOT_NUMBERS, number + 1)
        self._put(key, layout.pack_slot(number))
        return number

    def account(self, slot: int) -> SlotAccount:
        account = self.looked_at.get(slot)
        if account is None:
            packed = self._saved[slot] = self._get(_ACCOUNTS + layout.pack_slot(slot))
            account = self.looked_at[slot] = SlotAccount.unpack(packed) if packed is not None else SlotAccount()
        return account

    def accounts(self) -> Iterator[tuple[int, SlotAccount]]:
        """Yield every slot's account without the policies' knowledge."""
        for key, packed in rows_from(self._transaction, self._tables.state, _ACCOUNTS):
            slot = layout.unpack_slot(key[1:])
            yield slot, self.looked_at.get(slot) or SlotAccount.unpack(packed, learned=False)
        yield from ((slot, account) for slot, account in self.looked_at.items() if self._saved[slot] is None)

    def unindexed(self) -> dict[int, int]:
        """Return the directories of files that the index does not know yet, and the unknown bytes in each."""
        found = rows_from(self._transaction, self._tables.state, _REBUILD)
        return {key[1]: layout.unpack_numbers(packed, 1)[0] for key, packed in found}

    def set_unindexed(self, directory: int, size_bytes: int | None) -> None:
        """Set the bytes in a directory that the index does not know; None: the directory is done."""
        key = _REBUILD + bytes([directory])
        self.totals.unindexed_bytes += (size_bytes or 0) - layout.unpack_numbers(self._get(key), 1)[0]
        if size_bytes is None:
            self._delete(key)
        else:
            self._put(key, layout.pack_numbers(size_bytes))

    # Blocks and files.

    def block(self, block_id: bytes) -> tuple[BlockRecord, FileRecord] | None:
        row = self._block_row(block_id)
        return self._described(block_id, row) if row is not None else None

    def blocks_of_object(self, object_id: bytes, count_max: int | None = None) -> list[bytes]:
        """Return the ids of an object's blocks, those that have left included."""
        found = islice(rows_from(self._transaction, self._tables.blocks, object_id), count_max)
        return [layout.block_id_of(key) for key, _ in found]

    def has_block(self, block_id: bytes) -> bool:
        row = self._block_row(block_id)
        return row is not None and self._live_file(row) is not None

    def without_known(self, rows: Rows) -> tuple[Rows, list[bytes]]:
        """Return the rows of blocks that the index lacks, and the ids of those among them that have left it."""
        cursor = self._transaction.cursor(db=self._tables.blocks)
        found = cast("list[tuple[bytes, bytes]]", cursor.getmulti(list(rows)))
        known = {key for key, row in found if self._live_file(row) is not None}
        new = {key: row for key, row in rows.items() if key not in known} if known else rows
        return new, [layout.block_id_of(key) for key, _ in found if key not in known]

    def file(self, file: str) -> FileRecord | None:
        found = self._file_at(layout.file_key(file))
        return found if found is not None and found.file == file and found.queue != Queue.EVICTED else None

    def blocks_from(self, key: bytes, prefix: bytes = b"") -> Iterator[tuple[BlockRecord, FileRecord]]:
        for found, row in rows_from(self._transaction, self._tables.blocks, prefix, key):
            described = self._described(layout.block_id_of(found), row)
            if described is not None:
                yield described

    def files(self) -> Iterator[FileRecord]:
        for _, packed in rows_from(self._transaction, self._tables.files):
            file = layout.unpack_file(packed)
            if file.queue != Queue.EVICTED:
                yield file

    def admit(self, reservation: Reservation, blocks: Rows, returning: Sequence[bytes], pin: int) -> None:
        """Enter the file of a reservation, which was asked for and not there, under a pin where that is not 0.

        `blocks` and `returning` are of `without_known`.
        """
        slot, size_bytes = self.slot(reservation.slot), reservation.disk_bytes
        queue = Queue.PINNED if pin else Queue.MAIN
        file = FileRecord(reservation.file, slot, size_bytes, self.next_sequence(), len(blocks), queue, pin=pin)
        if reservation.copy and not pin:
            entered = replace(file, sequence=FIRST_TO_LEAVE, frequency=OF_COPY)
        else:
            entered = POLICIES[self.account(slot).eviction].entering(self, file, returning, size_bytes)
        if reservation.wanted and entered.queue == Queue.SMALL:
            entered = replace(entered, queue=Queue.MAIN)
        self.put(entered)
        self._enter(reservation, blocks)

    def extend(self, file: FileRecord, reservation: Reservation, blocks: Rows, returning: Sequence[bytes]) -> None:
        """Enter what was appended to a file: `disk_bytes` of the reservation more; blocks as in `admit`."""
        disk_bytes = reservation.disk_bytes
        policy = POLICIES[self.account(file.slot).eviction]
        grown = replace(file, disk_bytes=file.disk_bytes + disk_bytes, blocks=file.blocks + len(blocks))
        self.change(grown if is_copy(file) else policy.growing(self, grown, returning, disk_bytes))
        self._enter(reservation, blocks)

    def evict(self, file: FileRecord) -> None:
        """Take out a file that its policy gives up; the caller unlinks it."""
        account = self.account(file.slot)
        self.remove(file)
        one_in = max(1, REMEMBERED_TIMES * account.blocks // REMEMBERED_BLOCKS_MAX)
        if POLICIES[account.eviction].remembers and not int.from_bytes(layout.file_key(file.file)) % one_in:
            self.put(replace(file, queue=Queue.EVICTED, disk_bytes=0, sequence=self.next_sequence(), pin=0))
        self.forget(file.slot, min(REMEMBERED_BLOCKS_MAX, REMEMBERED_TIMES * (account.blocks + SWEPT_MIN)))

    def remove(self, file: FileRecord) -> None:
        self.take(file)
        self.set_pending_unlink(WorkerFile(self.worker, file.file))

    def forget(self, slot: int, blocks_max: int) -> None:
        """Remember no more of what was evicted from a slot than so many blocks."""
        account = self.account(slot)
        for _ in range(FORGOTTEN_AT_ONCE):
            oldest = self.head(slot, Queue.EVICTED) if account.remembered_blocks > blocks_max else None
            if oldest is None:
                return
            self.take(oldest)

    def remove_block(self, block: BlockRecord, file: FileRecord) -> FileRecord | None:
        """Take one block out; returns its file when nothing else was in it, which then is out, too."""
        self.delete_rows([block])
        if file.blocks == 1:
            self.remove(file)
            return file
        self.change(replace(file, blocks=file.blocks - 1))
        return None

    def move(self, file: FileRecord, slot: int) -> None:
        """Put a file on another slot's account; its place in the order of use stays."""
        self.take(file)
        self.put(replace(file, slot=slot, used_at=self.account(slot).position))

    def touch(self, uses: Iterable[tuple[str, int]]) -> None:
        """Note that blocks in these files were used, so many times, in this order."""
        for name, times in uses:
            file = self.file(name)
            if file is not None and not is_copy(file):
                size_bytes = min(times, file.blocks) * (file.disk_bytes // max(1, file.blocks))
                POLICIES[self.account(file.slot).eviction].used(self, file, size_bytes)

    def size_bytes(self) -> int:
        return size_of_tables(self._transaction, self._tables)

    def stale_rows(self) -> int:
        """Rows of blocks that count for nothing, about."""
        entries = int(self._transaction.stat(self._tables.blocks)["entries"])
        return entries - self.totals.blocks - self.totals.remembered_blocks

    def sweep(self, count: int) -> int:
        """Go on through the rows of blocks, so many; how many were removed because they count for nothing."""
        position = self.counter(_SWEPT) or b""
        found = list(islice(rows_from(self._transaction, self._tables.blocks, start=position), count))
        known: dict[bytes, bool] = {}
        for _, row in found:
            file = row[:FILE_KEY_BYTES]
            if file not in known:
                known[file] = get_row(self._transaction, self._tables.files, file) is not None
        stale = [key for key, row in found if not known[row[:FILE_KEY_BYTES]]]
        for key in stale:
            self._transaction.delete(key, db=self._tables.blocks)
        self.set_counter(_SWEPT, found[-1][0] + b"\0" if len(found) == count else b"")
        return len(stale)

    def put_rows(self, rows: Rows) -> None:
        """Write down where blocks lie."""
        self._transaction.cursor(db=self._tables.blocks).putmulti(rows.items())

    def delete_rows(self, blocks: Iterable[BlockRecord]) -> None:
        for block in blocks:
            self._transaction.delete(layout.block_key(block.block_id), db=self._tables.blocks)

    def _enter(self, reservation: Reservation, blocks: Rows) -> None:
        if reservation.ahead_bytes:
            self._set_aside(reservation, reservation.ahead_bytes)
        self.put_rows(blocks)
        if self.stale_rows() > self.totals.blocks // STALE_PART + SWEPT_MIN:
            self.sweep(min(SWEPT_MAX, SWEPT_MIN + SWEPT_PER_BLOCK * len(blocks)))

    def _block_row(self, block_id: bytes) -> bytes | None:
        return get_row(self._transaction, self._tables.blocks, layout.block_key(block_id))

    def _file_at(self, key: bytes) -> FileRecord | None:
        packed = get_row(self._transaction, self._tables.files, key)
        return layout.unpack_file(packed) if packed is not None else None

    def _live_file(self, row: bytes) -> bytes | None:
        """Return the row of the file that a block's row names; None: the block has left."""
        packed = get_row(self._transaction, self._tables.files, row[:FILE_KEY_BYTES])
        return None if packed is None or packed[layout.QUEUE_OFFSET] == Queue.EVICTED else packed

    def _described(self, block_id: bytes, row: bytes) -> tuple[BlockRecord, FileRecord] | None:
        packed = self._live_file(row)
        if packed is None:
            return None
        return BlockRecord(block_id, layout.unpack_extent(row, packed)), layout.unpack_file(packed)

    # The queues: what policies see and change.

    def put(self, file: FileRecord) -> None:
        self._transaction.put(layout.file_key(file.file), layout.pack_file(file), db=self._tables.files)
        self._transaction.put(layout.queue_key(file), b"", db=self._tables.queues)
        self._count(file, 1)

    def take(self, file: FileRecord) -> None:
        """Take out a file whose row says this."""
        self._transaction.delete(layout.file_key(file.file), db=self._tables.files)
        self._transaction.delete(layout.queue_key(file), db=self._tables.queues)
        self._count(file, -1)

    def change(self, file: FileRecord) -> None:
        known = self._file_at(layout.file_key(file.file))
        if known is None:
            raise lmdb.CorruptedError(f"the index has no row for {file.file}, which is to change")
        if layout.queue_key(known) != layout.queue_key(file):
            self.take(known)
            self.put(file)
            return
        self._transaction.put(layout.file_key(file.file), layout.pack_file(file), db=self._tables.files)
        self._count(known, -1)
        self._count(file, 1)

    def head(self, slot: int, queue: Queue) -> FileRecord | None:
        key = first_key(self._transaction, self._tables.queues, layout.queue_prefix(slot, queue))
        if key is None:
            return None
        file = self._file_at(key[-FILE_KEY_BYTES:])
        if file is None:
            raise lmdb.CorruptedError("a queue names a file that the index does not have")
        return file

    def queued(self, slot: int, queue: Queue, after: bytes, count_max: int) -> list[tuple[bytes, FileRecord]]:
        """Return at most `count_max` files of a queue behind the place `after`, with their places."""
        start = after + b"\0" if after else b""
        prefix = layout.queue_prefix(slot, queue)
        found = islice(rows_from(self._transaction, self._tables.queues, prefix, start), count_max)
        files = [(key, self._file_at(key[-FILE_KEY_BYTES:])) for key, _ in found]
        return [(key, file) for key, file in files if file is not None]

    def recall(self, slot: int, block_id: bytes) -> int | None:
        """When the file of a block that was evicted was used last, where that is remembered."""
        row = self._block_row(block_id)
        file = self._file_at(row[:FILE_KEY_BYTES]) if row is not None else None
        return file.used_at if file is not None and (file.queue, file.slot) == (Queue.EVICTED, slot) else None

    def next_sequence(self) -> int:
        number = self.sequence()
        self._next_sequence = number + 1
        return number

    def sequence(self) -> int:
        return self.numbers(_SEQUENCE, 1)[0] if self._next_sequence is None else self._next_sequence

    def begin_sequence_at(self, number: int) -> None:
        self._next_sequence = max(number, self.sequence())

    def _count(self, file: FileRecord, sign: int) -> None:
        account, totals = self.account(file.slot), self.totals
        if file.queue == Queue.EVICTED:
            account.remembered_blocks += sign * file.blocks
            totals.remembered_blocks += sign * file.blocks
            return
        account.blocks += sign * file.blocks
        account.queue_bytes[file.queue] += sign * file.disk_bytes
        totals.blocks += sign * file.blocks
        totals.used_bytes += sign * file.disk_bytes

    # Pins.

    def pins(self) -> dict[str, int]:
        found = rows_from(self._transaction, self._tables.state, _PINS)
        return {prefix.decode("utf-8", "surrogatepass"): layout.unpack_pin(key[1:]) for key, prefix in found}

    def pins_version(self) -> bytes | None:
        """Another whenever the pins were changed."""
        return self.counter(_PINS_VERSION)

    def has_pin(self, number: int) -> bool:
        return self._get(_PINS + layout.pack_pin(number)) is not None

    def set_pins(self, numbers: dict[str, int]) -> None:
        for key, _ in list(rows_from(self._transaction, self._tables.state, _PINS)):
            self._delete(key)
        for prefix, number in numbers.items():
            self._put(_PINS + layout.pack_pin(number), prefix.encode("utf-8", "surrogatepass"))
        version = layout.unpack_numbers(self.pins_version(), 1)[0] + 1
        self.set_numbers(_PINS_VERSION, version)

    def hold(self, file: FileRecord, pin: int) -> None:
        """Put a file under a pin; 0 lets go of it, and it stands as if it was just used."""
        queue = Queue.PINNED if pin else Queue.MAIN
        used_at = self.account(file.slot).position
        self.change(replace(file, queue=queue, pin=pin, sequence=self.next_sequence(), used_at=used_at))

    def let_go_first(self, file: FileRecord) -> None:
        """Let go of a file that was under a pin: it is the first to leave its slot, unless it is used before that."""
        self.change(replace(file, queue=Queue.MAIN, pin=0, sequence=FIRST_TO_LEAVE, frequency=0, used_at=0))

    # Files on their way in and out.

    def reserve(self, reservation: Reservation) -> None:
        self._set_aside(reservation, reservation.disk_bytes)

    def _set_aside(self, reservation: Reservation, disk_bytes: int) -> None:
        own, slot = WorkerFile(self.worker, reservation.file), self.slot(reservation.slot)
        self._put(_RESERVED + layout.pack_worker_file(own), layout.pack_reservation(disk_bytes, slot))
        self._count_reserved(slot, disk_bytes)

    def release(self, reservation: Reservation) -> None:
        self.release_file(WorkerFile(self.worker, reservation.file))

    def release_file(self, holder: WorkerFile) -> None:
        """Give back the room that a worker has set aside for a file, if it has."""
        key = _RESERVED + layout.pack_worker_file(holder)
        packed = self._get(key)
        if packed is not None:
            disk_bytes, slot = layout.unpack_reservation(packed)
            self._count_reserved(slot, -disk_bytes)
            self._delete(key)

    def reserved(self) -> Iterator[WorkerFile]:
        found = rows_from(self._transaction, self._tables.state, _RESERVED)
        return (layout.unpack_worker_file(key[1:]) for key, _ in found)

    def pending_unlinks(self) -> dict[WorkerFile, int]:
        """Return the pending unlinks, with their workers and counted bytes."""
        found = rows_from(self._transaction, self._tables.state, _PENDING_UNLINKS)
        return {layout.unpack_worker_file(key[1:]): layout.unpack_numbers(packed, 1)[0] for key, packed in found}

    def set_pending_unlink(self, holder: WorkerFile, counted_bytes: int = 0) -> None:
        """Note that this worker must unlink the file; `counted_bytes` become free then."""
        self.end_pending_unlink(holder)
        self._put(_PENDING_UNLINKS + layout.pack_worker_file(holder), layout.pack_numbers(counted_bytes))
        self.totals.pending_bytes += counted_bytes

    def end_pending_unlink(self, holder: WorkerFile) -> None:
        key = _PENDING_UNLINKS + layout.pack_worker_file(holder)
        packed = self._get(key)
        if packed is not None:
            self.totals.pending_bytes -= layout.unpack_numbers(packed, 1)[0]
            self._delete(key)

    def _count_reserved(self, slot: int, disk_bytes: int) -> None:
        self.account(slot).reserved_bytes += disk_bytes
        self.totals.reserved_bytes += disk_bytes

    # Rows of `state`.

    def counter(self, name: bytes) -> bytes | None:
        return self._get(_COUNTERS + name)

    def set_counter(self, name: bytes, packed: bytes) -> None:
        if self.counter(name) != packed:
            self._put(_COUNTERS + name, packed)

    def numbers(self, name: bytes, count: int) -> tuple[int, ...]:
        """Return the numbers of a counter; zeros if it was never set."""
        return layout.unpack_numbers(self.counter(name), count)

    def set_numbers(self, name: bytes, *numbers: int) -> None:
        self.set_counter(name, layout.pack_numbers(*numbers))

    def _get(self, key: bytes) -> bytes | None:
        return get_row(self._transaction, self._tables.state, key)

    def _put(self, key: bytes, value: bytes) -> None:
        self._transaction.put(key, value, db=self._tables.state)

    def _delete(self, key: bytes) -> None:
        self._transaction.delete(key, db=self._tables.state)
