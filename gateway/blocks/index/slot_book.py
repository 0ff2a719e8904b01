"""One slot's files in the queues of its policy, and what the policy knows, inside one transaction of the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import lmdb

from gateway.blocks.index import records, tables
from gateway.blocks.index.keeping import ghosts
from gateway.blocks.index.keeping.book import Eviction, Queue, SlotState
from gateway.blocks.index.keeping.policies import POLICIES
from gateway.blocks.index.records import FileRecord
from gateway.blocks.index.tables import Tables

GHOSTS_PER_FILE_MAX = 64
"""Of a file of many blocks, so many are remembered when it goes: those with the smallest ids."""

_NEXT_TICK = b"next tick"


def next_tick(transaction: lmdb.Transaction, of: Tables, count: int = 1) -> int:
    """The first of `count` ticks that nobody else gets."""
    tick = records.unpack_counter(tables.get(transaction, of.counters, _NEXT_TICK))
    transaction.put(_NEXT_TICK, records.pack_counter(tick + count), db=of.counters)
    return tick


def begin_ticks_at(transaction: lmdb.Transaction, of: Tables, tick: int) -> None:
    """All ticks from now on are at least this."""
    transaction.put(_NEXT_TICK, records.pack_counter(tick), db=of.counters)


class SlotBook:
    """A `keeping.book.Book`. What changes something needs a write transaction, and `save` at its end."""

    def __init__(self, transaction: lmdb.Transaction, of: Tables, slot: int) -> None:
        self._transaction = transaction
        self._tables = of
        self._slot = slot
        packed = tables.get(transaction, of.usage, records.pack_slot(slot))
        self.state = SlotState.unpack(packed) if packed is not None else SlotState()
        self._saved = packed

    def save(self) -> None:
        """Write down the state where it has changed."""
        packed = self.state.pack()
        if packed != self._saved:
            self._transaction.put(records.pack_slot(self._slot), packed, db=self._tables.usage)

    # What happens to the slot.

    def entering(
        self, file: FileRecord, blocks: Sequence[bytes], size_bytes: int, *, new: bool, wanted: bool = False
    ) -> FileRecord:
        """Where a file that is new, or has grown by blocks of so many bytes, stands now; it is still to be `put`."""
        policy = POLICIES[self.state.eviction]
        if not new:
            return policy.growing(self, file, blocks, size_bytes)
        entered = policy.entering(self, file, blocks, size_bytes)
        return replace(entered, queue=Queue.MAIN) if wanted and entered.queue == Queue.SMALL else entered

    def used(self, file: FileRecord, times: int) -> None:
        """Blocks of a file were read so many times."""
        size_bytes = min(times, file.blocks) * (file.disk_bytes // max(1, file.blocks))
        POLICIES[self.state.eviction].used(self, file, size_bytes)

    def victim(self, *, wanted: bool = False) -> FileRecord | None:
        """The file that is to go next; None when there is none that may."""
        return POLICIES[Eviction.LRU if wanted else self.state.eviction].victim(self)

    def leaving(self, file: FileRecord, blocks: Sequence[bytes]) -> None:
        """A victim goes now."""
        POLICIES[self.state.eviction].leaving(self, file, blocks[:GHOSTS_PER_FILE_MAX])

    # The files.

    def put(self, file: FileRecord) -> None:
        """Enter a file that is not there."""
        self._transaction.put(file.file.encode(), records.pack_file(file), db=self._tables.files)
        self._transaction.put(records.access_key(file), b"", db=self._tables.access)
        self._account(file, 1)

    def take(self, file: FileRecord) -> None:
        """Take out a file that is there as it says."""
        self._transaction.delete(file.file.encode(), db=self._tables.files)
        self._transaction.delete(records.access_key(file), db=self._tables.access)
        self._account(file, -1)

    def _account(self, file: FileRecord, sign: int) -> None:
        self.state.blocks += sign * file.blocks
        self.state.queue_bytes[file.queue] += sign * file.disk_bytes

    def _file(self, name: str) -> FileRecord:
        packed = tables.get(self._transaction, self._tables.files, name.encode())
        if packed is None:
            raise lmdb.CorruptedError(f"{name} stands in a queue and is not there")
        return records.unpack_file(name, packed)

    # For policies.

    def head(self, queue: Queue) -> FileRecord | None:
        key = next(tables.keys(self._transaction, self._tables.access, records.queue_prefix(self._slot, queue)), None)
        return self._file(records.file_of_access_key(key)) if key is not None else None

    def next_tick(self) -> int:
        return next_tick(self._transaction, self._tables)

    def change(self, file: FileRecord) -> None:
        self.take(self._file(file.file))
        self.put(file)

    def recall(self, block_id: bytes) -> int | None:
        packed = tables.get(self._transaction, self._tables.ghosts, ghosts.place(self._slot, block_id))
        return ghosts.unpack_ghost(block_id, self.state.eviction, packed)

    def remember(self, block_id: bytes, mark: int) -> None:
        if ghosts.is_remembered(block_id, ghosts.rarity(self.state.blocks)):
            packed = ghosts.pack_ghost(block_id, self.state.eviction, mark)
            self._transaction.put(ghosts.place(self._slot, block_id), packed, db=self._tables.ghosts)
