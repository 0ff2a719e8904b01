"""The index that all worker processes share: the blocks, the order of their use, and their sizes.

LMDB without sync: a killed process loses nothing, an unclean boot may lose anything, so then it is built anew from the
files (opening.py). Lookups take microseconds and may run on the event loop. Everything that writes waits for a lock
that other processes take, and must run on the index thread; every write transaction is short.

Usage plus reservations never exceed the capacity given to `reserve`. Related values change in one transaction: a
process killed between two of them leaves accounts that add up, and files that reservations and pending unlinks name.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import lmdb

from gateway.blocks import layout
from gateway.blocks.eviction import Capacity, Holdings, Step, make_room, shed_blocks, shrink
from gateway.blocks.layout import OBJECT_ID_BYTES, BlockRecord, Extent, FileRecord, Reservation, WorkerFile
from gateway.blocks.policies import Queue, SlotAccount
from gateway.blocks.transaction import SWEPT_MAX, TABLES_MAX, IndexTransaction, Tables, Totals, get_row, rows_from
from gateway.core.errors import NotKept, StoreUnavailable
from gateway.core.model import ObjectKey
from gateway.disk.lmdb_environment import READERS_MAX, LastCommit
from gateway.policy.slots import Prefix

MAP_BYTES = 64 * 1024**3
"""Address space, not disk."""

SLACK_BYTES = 64 * 1024**2
"""Additional address space for the largest transactions, which copy every page that they change."""

BUDGET_PART = 0.75
"""Share of the map. The rest is for free pages that readers still hold."""

TOUCHES_PER_TRANSACTION = 64
DROPPED_PER_TRANSACTION = 64

SHED_PART = 8
SHED_FROM = 0.75
SWEEPS_AFTER_SHEDDING = 16
"""While the map is full, this part of all blocks is evicted: pages become free when most in them is gone.

Not below this part of the budget: then a reader that does not end holds the pages, and evictions free none.
"""

HOLDINGS_SECONDS = 0.5
"""Seconds for which other processes' changes may go unseen where slots are compared."""

GROW_SECONDS = 600.0
"""After a full disk, the whole capacity is tried again at the latest."""

LOWERED_SECONDS = 5.0
"""All processes together give back room once in so long. So long after it, what the file system says is free is not
believed: twice as long each time that the disk is full again within GROW_SECONDS, as with a quota, which it does not
know."""

GROWN_PART = 2
"""Part of the free space that is taken at once: other programs may want some, too."""

LOWERED_PART = 64

TRIED_ROWS = 64

ROWS_LOOKED_AT_MAX = 64
"""By a question that is asked on the event loop."""

_WRITTEN, _CEILING, _CEILING_KEPT = b"written", b"ceiling", b"ceiling-kept"


BlockState: TypeAlias = Literal["here", "evicted", "unknown"]
"""State of a block, as far as is known."""


class IndexFull(StoreUnavailable):
    """There is no room in the index's map: evict, and try again."""


STALLED_SECONDS = 2.0
"""Transactions take milliseconds: who has waited so long for the write lock waits for a process that is stopped."""

FILES_NOTED_MAX = 65_536


class AccessLog:
    """Files in the order of their last use; beyond FILES_NOTED_MAX the oldest uses are forgotten.

    Noted on the event loop and taken by the index thread: every single step on the dictionary is atomic.
    """

    def __init__(self) -> None:
        self._noted: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, file: str) -> None:
        self._noted[file] = self._noted.pop(file, 0) + 1
        if len(self._noted) > FILES_NOTED_MAX:
            self.take(1)

    def take(self, count_max: int) -> list[tuple[str, int]]:
        """Up to `count_max` of the files with the number of their uses, the oldest first; they are the caller's now."""
        taken: list[tuple[str, int]] = []
        while len(taken) < count_max:
            try:
                taken.append(self._noted.popitem(last=False))
            except KeyError:  # the other thread may have had the last one
                break
        return taken


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of the directory: blocks, the bytes they take on disk, and the bytes set aside for fills in progress.

    `unsurveyed_bytes` lie on disk in files that the index does not know yet, `pending_unlink_bytes` in files that could
    not be unlinked. `slots` gives each slot's part.
    """

    blocks: int
    used_bytes: int
    reserved_bytes: int
    unsurveyed_bytes: int = 0
    slots: Mapping[str, SlotAccount] = field(default_factory=dict)
    pending_unlink_bytes: int = 0


_PATH = "/proc/thread-self/io"


class WrittenBytes:
    """The counters of whichever thread asks. They stand still where the kernel does not count."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def mark(self) -> tuple[int, int]:
        opened = getattr(self._of_thread, "opened", None)
        if opened is None:
            opened = self._of_thread.opened = _Opened()
        return opened.read()

    def since(self, mark: tuple[int, int]) -> int:
        passed, written_back = self.mark()
        return min(passed - mark[0], written_back - mark[1])


class _Opened:
    """One thread's file, closed when the thread is gone."""

    def __init__(self) -> None:
        try:
            self._descriptor = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self) -> tuple[int, int]:
        """`wchar` and `write_bytes`, which stand second and sixth."""
        if self._descriptor < 0:
            return 0, 0
        words = os.pread(self._descriptor, 512, 0).split()
        return int(words[3]), int(words[11])

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


OF_CLUSTER = 2**30
"""Numbers of pins over the cluster begin here, and end at twice that: of what lies under one, each node keeps the
blocks that it looks after."""


def is_of_cluster(number: int) -> bool:
    return OF_CLUSTER <= number < 2 * OF_CLUSTER


class PinnedPrefixes:
    """Finds the pin that a key is under, in a time that hardly depends on how many there are.

    No prefix in it begins with another, so that only the last that is not behind a key can be a prefix of it.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._prefixes: list[str] = []
        self._numbers: list[int] = []
        for prefix, number in sorted((_whole(text), number) for text, number in numbers.items()):
            if not (self._prefixes and prefix.startswith(self._prefixes[-1])):
                self._prefixes.append(prefix)
                self._numbers.append(number)

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def number_of(self, key: ObjectKey) -> int:
        """Return the number of the pin that an object is under, or 0."""
        whole = f"{key.bucket}/{key.key}"
        position = bisect_right(self._prefixes, whole) - 1
        return self._numbers[position] if position >= 0 and whole.startswith(self._prefixes[position]) else 0


def _whole(text: str) -> str:
    prefix = Prefix.parse(text)
    return f"{prefix.bucket}/{prefix.key_prefix}"


class BlockIndex:
    """One process's view of the shared index. `worker` names its reservations and pending unlinks.

    What was read is noted in `accesses`, and enters the index now and then (`touch`), at the latest before anything is
    evicted for a new file: a policy that sees hits later than the misses after them takes old data for young.

    The index takes `size_bytes_max` at most (None: what the map has room for), or little more: files are evicted for it
    as for lack of room.
    """

    def __init__(
        self,
        directory: Path,
        worker: int,
        size_bytes_max: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self.accesses = AccessLog()
        self._waits_since: float | None = None
        self._size_bytes_max = min(int(BUDGET_PART * MAP_BYTES), size_bytes_max or MAP_BYTES)
        map_bytes = MAP_BYTES + SLACK_BYTES
        self.last_commit = LastCommit(directory)
        """Number of the index's last commit by any process: older look-ups are repeated."""
        self._environment = lmdb.open(
            str(directory), map_size=map_bytes, max_dbs=TABLES_MAX, max_readers=READERS_MAX, sync=False, mode=0o600
        )
        self._tables = Tables.open(self._environment)
        self._environment.reader_check()
        self._monotonic = monotonic
        self.is_over_limit = False
        """True if it took more than its limit when room was last made: each new block then evicts others."""
        self._holdings: Holdings | None = None
        self._holdings_until = 0.0
        self._thread_bytes = WrittenBytes()
        self._uncounted_bytes = 0
        self._pinned: tuple[bytes | None, PinnedPrefixes] = (None, PinnedPrefixes({}))

    def close(self, *, sync: bool = False) -> None:
        if sync:
            self._environment.sync(True)
        self._environment.close()
        self.last_commit.close()

    @property
    def stalled(self) -> bool:
        """True while another process keeps this one from writing. Any thread."""
        since = self._waits_since
        return since is not None and time.monotonic() - since > STALLED_SECONDS

    # Reads: microseconds, no lock.

    def lookup(self, block_id: bytes) -> Extent | None:
        found = self.rows(block_id)
        return layout.unpack_extent(*found) if found is not None else None

    def rows(self, block_id: bytes) -> tuple[bytes, bytes] | None:
        """Return a block's row and its file's, where `lookup` finds it."""
        key = block_id[-OBJECT_ID_BYTES:] + block_id[:-OBJECT_ID_BYTES]
        try:  # without `reading`, which costs more than the look-up: this is on the path of every hit
            with self._environment.begin() as transaction:
                row: bytes | None = transaction.get(key, db=self._tables.blocks)
                if row is None:
                    return None
                file: bytes | None = transaction.get(row[: layout.FILE_KEY_BYTES], db=self._tables.files)
        except lmdb.Error as error:
            raise _unreadable(error) from error
        return None if file is None or file[layout.QUEUE_OFFSET] == Queue.EVICTED else (row, file)

    def present(self, block_ids: Iterable[bytes]) -> list[bool]:
        with self.reading() as transaction:
            return [transaction.has_block(block_id) for block_id in block_ids]

    def states(self, block_ids: Iterable[bytes]) -> list[BlockState]:
        """Return each block's state. An evicted one is known until its row is swept or too many are remembered."""
        try:  # as in `rows`: this is asked for every miss
            with self._environment.begin() as transaction:
                return [self._state(transaction, block_id) for block_id in block_ids]
        except lmdb.Error as error:
            raise _unreadable(error) from error

    def _state(self, transaction: lmdb.Transaction, block_id: bytes) -> BlockState:
        row = get_row(transaction, self._tables.blocks, layout.block_key(block_id))
        if row is None:
            return "unknown"
        return "here" if self._file_of(transaction, row) is not None else "evicted"

    def _file_of(self, transaction: lmdb.Transaction, row: bytes) -> bytes | None:
        """Return the row of the file that a block's row names; None: the block has left."""
        file = get_row(transaction, self._tables.files, row[: layout.FILE_KEY_BYTES])
        return None if file is None or file[layout.QUEUE_OFFSET] == Queue.EVICTED else file

    def held_of(self, object_id: bytes, rows_max: int) -> tuple[int, int]:
        """Return number and bytes of the blocks of all versions of an object, from `rows_max` rows at most."""
        with self.reading() as transaction:
            found = [transaction.block(block_id) for block_id in transaction.blocks_of_object(object_id, rows_max)]
        lengths = [one[0].extent.length for one in found if one is not None]
        return len(lengths), sum(lengths)

    def has_others(self, object_id: bytes, block_ids: Collection[bytes]) -> bool:
        """Return True if the index has or had further blocks of an object, among `ROWS_LOOKED_AT_MAX` rows."""
        with self.reading() as transaction:
            known = transaction.blocks_of_object(object_id, ROWS_LOOKED_AT_MAX)
        return not set(block_ids).issuperset(known)

    def has_object(self, object_id: bytes) -> bool:
        """Return True if there is a block of any version of an object.

        It may be wrong for an object that has more than `ROWS_LOOKED_AT_MAX` blocks and is being evicted whole.
        """
        try:  # as in `lookup`: this is called for every unknown object
            with self._environment.begin() as transaction:
                found = rows_from(transaction, self._tables.blocks, object_id)
                for _, row in islice(found, ROWS_LOOKED_AT_MAX):
                    if self._file_of(transaction, row) is not None:
                        return True
                return next(found, None) is not None
        except lmdb.Error as error:
            raise _unreadable(error) from error

    def usage(self) -> Usage:
        with self.reading() as transaction:
            known, totals = dict(transaction.accounts()), transaction.totals
            accounts = {name: known[slot] for name, slot in transaction.slots().items() if slot in known}
        return Usage(
            totals.blocks,
            totals.used_bytes,
            totals.reserved_bytes,
            totals.unindexed_bytes,
            accounts,
            totals.pending_bytes,
        )

    def totals(self) -> Totals:
        with self.reading() as transaction:
            return transaction.totals

    def slot_names(self) -> dict[int, str]:
        with self.reading() as transaction:
            return transaction.slot_names()

    def changes(self) -> int:
        """Return a number that grows with every change that any process makes."""
        try:
            return int(self._environment.info()["last_txnid"])
        except lmdb.Error as error:
            raise _unreadable(error) from error

    def pins(self) -> PinnedPrefixes:
        with self.reading() as transaction:
            return self.pinned_prefixes(transaction)

    def pinned_prefixes(self, transaction: IndexTransaction) -> PinnedPrefixes:
        """Return all that is pinned, read again where it has changed."""
        version = transaction.pins_version()
        if version != self._pinned[0]:
            self._pinned = version, PinnedPrefixes(transaction.pins())
        return self._pinned[1]

    def blocks(self) -> Iterator[BlockRecord]:
        """Every block, for checks and tests."""
        with self.reading() as transaction:
            for block, _ in transaction.blocks_from(b""):
                yield block

    def blocks_after(self, block_id: bytes, count_max: int) -> list[tuple[BlockRecord, str]]:
        """Return the next blocks in the order of their keys, each with the name of its slot; none at the end."""
        start = layout.block_key(block_id) + b"\0" if block_id else b""
        with self.reading() as transaction:
            names = transaction.slot_names()
            return [(block, names[file.slot]) for block, file in islice(transaction.blocks_from(start), count_max)]

    def files(self) -> Iterator[FileRecord]:
        """Every file, for checks and tests."""
        with self.reading() as transaction:
            yield from transaction.files()

    # Writes: index thread only.

    def reserve(
        self,
        reservation: Reservation,
        capacity: Capacity,
        *,
        day: int,
        block_id: bytes | None = None,
    ) -> Step | None:
        """Set room aside, for `block_id` where it is a block that is fetched, other files leaving the index for it.

        None: the block is there already. Not done: either more victims must go (call again once the evicted files are
        unlinked), or, when none was found, everything left is being filled. NotKept when enough was written on this
        `day` (counted from 1970).
        """
        holdings = self._holdings
        if holdings is None or holdings.capacity is not capacity or self._monotonic() >= self._holdings_until:
            with self.reading() as transaction:  # without the lock that others wait for
                self._read_holdings(transaction, capacity)
        with self.writing() as transaction:
            if block_id is not None and transaction.has_block(block_id):
                return None
            written_bytes = max(0, self._written_bytes(transaction, day) + self._uncounted_bytes)
            if reservation.to_write:
                written_bytes += reservation.disk_bytes
                bytes_max = capacity.daily_writes_bytes
                if bytes_max is not None and written_bytes > bytes_max:
                    raise NotKept("write-budget", f"cache.daily_writes, {bytes_max} bytes, is used up for today")
            transaction.touch(self.accesses.take(TOUCHES_PER_TRANSACTION))
            transaction.release(reservation)
            step = self._make_room(transaction, reservation, capacity)
            if step.done:
                transaction.reserve(reservation)
                transaction.set_numbers(_WRITTEN, day, written_bytes)
                self._uncounted_bytes = 0
            return step

    def apply_settings(self, capacity: Capacity) -> None:
        """Make the eviction of every slot's files follow its share from now on."""
        with self.writing() as transaction:
            for name, share in capacity.shares.items():
                transaction.account(transaction.slot(name)).apply_settings(share.eviction)

    def shrink(self, capacity: Capacity) -> Step:
        """Evict down to the capacity and each slot's limit; call again until done, as for `reserve`."""
        with self.writing() as transaction:
            return shrink(transaction, self._read_holdings(transaction, capacity))

    def shed(self, capacity: Capacity) -> Step:
        """Evict a part of all blocks: the map is full. Nothing, where it is full of something else than blocks."""
        with self.writing() as transaction:
            if transaction.size_bytes() < SHED_FROM * self._size_bytes_max:
                return Step(False, ())
            holdings = self._read_holdings(transaction, capacity)
            step = shed_blocks(transaction, holdings, transaction.totals.blocks // SHED_PART + 1)
        for _ in range(SWEEPS_AFTER_SHEDDING):
            with self.writing() as transaction:
                transaction.sweep(SWEPT_MAX)
        return step

    def commit(self, reservation: Reservation, blocks: Sequence[BlockRecord], capacity: Capacity) -> int:
        """Turn a reservation into the blocks of its file, which is in place; return the number of new ones.

        0 when the index has all of them by now: the reservation is gone and the file must be unlinked.
        """
        rows = layout.rows_of(blocks)
        with self.writing() as transaction:
            transaction.release(reservation)
            new, returning = transaction.without_known(rows)
            if not new:
                transaction.set_pending_unlink(WorkerFile(self.worker, reservation.file))
                return 0
            slot, pin = transaction.slot(reservation.slot), reservation.pin
            fits = pin and transaction.has_pin(pin)
            fits = fits and self.pins_fit(transaction, slot, reservation.disk_bytes, capacity)
            transaction.admit(reservation, new, returning, pin if fits else 0)
            return len(new)

    def extend(self, reservation: Reservation, blocks: Sequence[BlockRecord]) -> bool:
        """Turn a reservation into what was appended to its file; False when the file left the index meanwhile."""
        rows = layout.rows_of(blocks)
        with self.writing() as transaction:
            transaction.release(reservation)
            file = transaction.file(reservation.file)
            if file is not None:
                transaction.extend(file, reservation, *transaction.without_known(rows))
            return file is not None

    def settle(self, worker: int, file: str, disk_bytes: int | None) -> None:
        """Give back what a worker reserved to append to a file that takes this much now (None: it is gone)."""
        with self.writing() as transaction:
            transaction.release_file(WorkerFile(worker, file))
            known = transaction.file(file)
            if known is not None and disk_bytes is not None:
                transaction.change(replace(known, disk_bytes=disk_bytes))

    def release(self, reservation: Reservation, left_bytes: int = 0) -> None:
        """Give back a reservation whose file does not exist, or could not be unlinked and takes `left_bytes`."""
        with self.writing() as transaction:
            transaction.release(reservation)
            if left_bytes:
                transaction.set_pending_unlink(WorkerFile(self.worker, reservation.file), left_bytes)

    def give_back_ahead(self, file: str, disk_bytes: int) -> None:
        """Give back room in which nothing was written."""
        with self.writing() as transaction:
            transaction.release_file(WorkerFile(self.worker, file))
        self._uncounted_bytes -= disk_bytes

    def drop(self, block_id: bytes, file: str) -> Step:
        """Take a block out, if it still lies in `file`: done says whether. The file goes when nothing else is in it."""
        with self.writing() as transaction:
            found = transaction.block(block_id)
            if found is None or found[0].extent.file != file:
                return Step(False, ())
            emptied = transaction.remove_block(*found)
            return Step(True, [emptied] if emptied is not None else ())

    def drop_object(self, object_id: bytes) -> Step:
        """Take blocks of every version of an object out, a bounded number at a time: call again until done."""
        with self.writing() as transaction:
            found = list(islice(transaction.blocks_from(object_id, object_id), DROPPED_PER_TRANSACTION))
            there = (transaction.block(block.block_id) for block, _ in found)  # its file as the last one has left it
            emptied = [transaction.remove_block(*one) for one in there if one is not None]
            return Step(len(found) < DROPPED_PER_TRANSACTION, [file for file in emptied if file is not None])

    def touch(self) -> None:
        """Enter what was read longest ago: TOUCHES_PER_TRANSACTION files at most."""
        with self.writing() as transaction:
            transaction.touch(self.accesses.take(TOUCHES_PER_TRANSACTION))

    def end_unlinks(self, gone: Iterable[WorkerFile], failed: Mapping[WorkerFile, int]) -> None:
        """Enter which files are unlinked, and the bytes of those that could not be, until they are."""
        with self.writing() as transaction:
            for holder in gone:
                transaction.end_pending_unlink(holder)
            for holder, size_bytes in failed.items():
                transaction.set_pending_unlink(holder, size_bytes)

    def written_bytes(self, day: int) -> int:
        """Return the bytes granted to fills on a day, with the index's own writes."""
        with self.reading() as transaction:
            return self._written_bytes(transaction, day)

    def ceiling_bytes(self, now: float) -> int | None:
        """Return the directory's lowered limit while other programs fill the disk; None: the configured one."""
        with self.reading() as transaction:
            ceiling_bytes, _, lowered_at = transaction.numbers(_CEILING, 3)
        return ceiling_bytes if 0 <= now - lowered_at < GROW_SECONDS else None

    def lower_ceiling(self, now: float, step_bytes_min: int) -> bool:
        """Lower the directory's limit for GROW_SECONDS; return False if a process has just done so.

        Never below half of the first size: a disk that other programs fill again and again is then left as it is.
        """
        with self.writing() as transaction:
            ceiling_bytes, floor_bytes, lowered_at = transaction.numbers(_CEILING, 3)
            if 0 <= now - lowered_at < LOWERED_SECONDS:
                return False
            [kept_seconds] = transaction.numbers(_CEILING_KEPT, 1)
            kept_seconds = min(max(2 * kept_seconds, int(LOWERED_SECONDS)), int(GROW_SECONDS))
            held_bytes = transaction.totals.held_bytes
            if not 0 <= now - lowered_at < GROW_SECONDS:
                ceiling_bytes, floor_bytes, kept_seconds = held_bytes, held_bytes // 2, int(LOWERED_SECONDS)
            transaction.set_numbers(_CEILING_KEPT, kept_seconds)
            held_bytes = min(held_bytes, ceiling_bytes)
            lowered_bytes = held_bytes - max(held_bytes // LOWERED_PART, step_bytes_min)
            transaction.set_numbers(_CEILING, max(lowered_bytes, floor_bytes), floor_bytes, int(now))
            return True

    def raise_ceiling(self, now: float, free_bytes: Callable[[], int], step_bytes_min: int) -> None:
        """Raise the directory's limit as far as the file system has room."""

        def raised(transaction: IndexTransaction) -> tuple[int, int, int] | None:
            ceiling_bytes, floor_bytes, lowered_at = transaction.numbers(_CEILING, 3)
            [kept_seconds] = transaction.numbers(_CEILING_KEPT, 1)
            raised_bytes = transaction.totals.held_bytes + free_bytes() // GROWN_PART
            if not kept_seconds <= now - lowered_at < GROW_SECONDS or raised_bytes < ceiling_bytes + step_bytes_min:
                return None
            return raised_bytes, floor_bytes, lowered_at

        with self.reading() as transaction:  # without room, no writer is delayed
            if raised(transaction) is None:
                return
        with self.writing() as transaction:
            if (numbers := raised(transaction)) is not None:
                transaction.set_numbers(_CEILING, *numbers)

    def try_writing(self) -> None:
        """Write as much to the index as a batch of blocks needs, and delete it."""
        gone = Extent(secrets.token_hex(16), 0, 0, b"")
        blocks = [BlockRecord(secrets.token_bytes(32), gone) for _ in range(TRIED_ROWS)]
        with self.writing() as transaction:
            transaction.put_rows(layout.rows_of(blocks))
        with self.writing() as transaction:
            transaction.delete_rows(blocks)

    # Transactions.

    @contextmanager
    def reading(self) -> Iterator[IndexTransaction]:
        """One transaction that changes nothing."""
        try:
            with self._environment.begin() as transaction:
                yield IndexTransaction(transaction, self._tables, self.worker)
        except lmdb.Error as error:
            raise _unreadable(error) from error

    @contextmanager
    def writing(self) -> Iterator[IndexTransaction]:
        """One transaction; index thread only. IndexFull where its map has no room."""
        mark = self._thread_bytes.mark()
        self._waits_since = time.monotonic()
        try:
            with self._environment.begin(write=True) as lmdb_transaction:
                self._waits_since = None
                transaction = IndexTransaction(lmdb_transaction, self._tables, self.worker)
                yield transaction
                transaction.close()
            if self._holdings is not None:
                for slot, account in transaction.looked_at.items():
                    self._holdings.update(slot, account)
        except lmdb.MapFullError as error:
            self._holdings = None
            raise IndexFull(f"the block index is full: {error}") from error
        except lmdb.Error as error:
            self._holdings = None
            raise StoreUnavailable(f"the block index cannot be written: {error}") from error
        except BaseException:
            self._holdings = None
            raise
        finally:
            self._waits_since = None
            self._uncounted_bytes += self._thread_bytes.since(mark)

    # Parts.

    def _make_room(self, transaction: IndexTransaction, reservation: Reservation, capacity: Capacity) -> Step:
        assert self._holdings is not None  # noqa: S101 - `reserve` has just looked
        step = make_room(transaction, self._holdings, reservation, self._size_bytes_max)
        if not step.done and not step.evicted:  # only what is exact refuses
            holdings = self._read_holdings(transaction, capacity)
            step = make_room(transaction, holdings, reservation, self._size_bytes_max)
        self.is_over_limit = transaction.size_bytes() > self._size_bytes_max
        return step

    def _read_holdings(self, transaction: IndexTransaction, capacity: Capacity) -> Holdings:
        self._holdings = Holdings.read(transaction, capacity)
        self._holdings_until = self._monotonic() + HOLDINGS_SECONDS
        return self._holdings

    def pins_fit(self, transaction: IndexTransaction, slot: int, size_bytes: int, capacity: Capacity) -> bool:
        holdings = self._holdings
        if holdings is None or holdings.capacity is not capacity or slot not in holdings.names:
            holdings = self._read_holdings(transaction, capacity)
        holdings.update(slot, transaction.account(slot))
        return holdings.pins_fit(slot, size_bytes)

    def _written_bytes(self, transaction: IndexTransaction, day: int) -> int:
        on, count = transaction.numbers(_WRITTEN, 2)
        return count if on == day else 0


def _unreadable(error: lmdb.Error) -> StoreUnavailable:
    return StoreUnavailable(f"the block index cannot be read: {error}")
