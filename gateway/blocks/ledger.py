"""The index's books inside one transaction: what belongs together is changed together.

Every byte on disk is on exactly one account: a slot's usage (files in the index), a slot's reservation (files being
written), or nobody's (files that a survey has not come to).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import lmdb

from gateway.blocks import records, tables
from gateway.blocks.records import BLOCK_ID_BYTES, BlockRecord, FileRecord, FillHolder, Reservation
from gateway.blocks.shares import SlotUsage
from gateway.blocks.tables import Table, Tables

_NEXT_TICK = b"next tick"


@dataclass(frozen=True, slots=True)
class Ledger:
    """One transaction's view. What changes something needs a write transaction. `worker` names what it leaves."""

    transaction: lmdb.Transaction
    tables: Tables
    worker: int

    # Slots.

    def slots(self) -> dict[str, int]:
        """The number of every slot ever seen, by name."""
        found = tables.items(self.transaction, self.tables.slots)
        return {name.decode("utf-8", "surrogatepass"): records.unpack_slot(packed) for name, packed in found}

    def slot(self, name: str) -> int:
        """A slot's number, given now if it has none."""
        encoded = name.encode("utf-8", "surrogatepass")
        packed = tables.get(self.transaction, self.tables.slots, encoded)
        if packed is not None:
            return records.unpack_slot(packed)
        number = int(self.transaction.stat(self.tables.slots)["entries"])
        self.transaction.put(encoded, records.pack_slot(number), db=self.tables.slots)
        return number

    # Accounts.

    def usage(self) -> dict[int, SlotUsage]:
        """What each slot has, by its number."""
        usage = {slot: self._used(slot) for slot in self.slots().values()}
        for _, packed in tables.items(self.transaction, self.tables.reserved):
            disk_bytes, slot = records.unpack_reservation(packed)
            usage[slot] = replace(usage[slot], reserved_bytes=usage[slot].reserved_bytes + disk_bytes)
        return usage

    def unsurveyed_bytes(self) -> int:
        """What lies on disk without being in the index yet."""
        found = tables.items(self.transaction, self.tables.survey)
        return sum(records.unpack_counter(packed) for _, packed in found)

    def _used(self, slot: int) -> SlotUsage:
        packed = tables.get(self.transaction, self.tables.usage, records.pack_slot(slot))
        return SlotUsage(*records.unpack_usage(packed))

    def _account(self, slot: int, blocks: int, disk_bytes: int) -> None:
        used = self._used(slot)
        packed = records.pack_usage(used.blocks + blocks, used.used_bytes + disk_bytes)
        self.transaction.put(records.pack_slot(slot), packed, db=self.tables.usage)

    # Blocks and files.

    def block(self, block_id: bytes) -> BlockRecord | None:
        packed = tables.get(self.transaction, self.tables.blocks, block_id)
        return records.unpack_block(block_id, packed) if packed is not None else None

    def has_block(self, block_id: bytes) -> bool:
        return tables.get(self.transaction, self.tables.blocks, block_id) is not None

    def unknown(self, blocks: Iterable[BlockRecord]) -> list[BlockRecord]:
        """Those that the index has nowhere, each once."""
        return [block for block_id, block in {b.block_id: b for b in blocks}.items() if not self.has_block(block_id)]

    def file(self, file: str) -> FileRecord | None:
        packed = tables.get(self.transaction, self.tables.files, file.encode())
        return records.unpack_file(file, packed) if packed is not None else None

    def oldest(self, slot: int) -> FileRecord | None:
        """The least recently used file of a slot."""
        key = next(tables.keys(self.transaction, self.tables.access, records.pack_slot(slot)), None)
        return self.file(records.file_of_access_key(key)) if key is not None else None

    def contents(self, file: str) -> list[bytes]:
        """The blocks that lie in a file."""
        found = tables.keys(self.transaction, self.tables.contents, records.content_key(file))
        return [key[-BLOCK_ID_BYTES:] for key in found]

    def insert(self, file: FileRecord, blocks: Iterable[BlockRecord]) -> None:
        """Enter a file with all its blocks, which the index has nowhere else."""
        self._enter_blocks(blocks)
        self._put(file)
        self._account(file.slot, file.blocks, file.disk_bytes)

    def extend(self, file: FileRecord, blocks: Sequence[BlockRecord], disk_bytes: int, tick: int) -> None:
        """Enter what was appended to a file: `disk_bytes` more, and blocks that the index has nowhere else."""
        self._enter_blocks(blocks)
        self._take(file)
        self._put(replace(file, disk_bytes=file.disk_bytes + disk_bytes, tick=tick, blocks=file.blocks + len(blocks)))
        self._account(file.slot, len(blocks), disk_bytes)

    def remove(self, file: FileRecord) -> None:
        """Take a file and its blocks out; it is doomed."""
        for block_id in self.contents(file.file):
            self._forget_block(block_id, file.file)
        self._take(file)
        self._account(file.slot, -file.blocks, -file.disk_bytes)
        self.doom(file.file)

    def remove_block(self, block: BlockRecord) -> FileRecord | None:
        """Take one block out; returns its file when nothing else was in it, which then is out and doomed, too."""
        file = self.file(block.extent.file)
        if file is None:
            raise lmdb.CorruptedError(f"a block lies in {block.extent.file}, which the index does not have")
        if file.blocks == 1:
            self.remove(file)
            return file
        self._forget_block(block.block_id, file.file)
        left = replace(file, blocks=file.blocks - 1)
        self.transaction.put(file.file.encode(), records.pack_file(left), db=self.tables.files)
        self._account(file.slot, -1, 0)
        return None

    def move(self, file: FileRecord, slot: int) -> None:
        """Put a file on another slot's account; its place in the order of use stays."""
        self._take(file)
        self._account(file.slot, -file.blocks, -file.disk_bytes)
        self._put(replace(file, slot=slot))
        self._account(slot, file.blocks, file.disk_bytes)

    def resize(self, file: FileRecord, disk_bytes: int) -> None:
        """Count what a file takes by what it was found to take."""
        self._take(file)
        self._put(replace(file, disk_bytes=disk_bytes))
        self._account(file.slot, 0, disk_bytes - file.disk_bytes)

    def touch(self, files: Sequence[str]) -> None:
        """Note that blocks in these files were used, in this order."""
        tick = self.next_tick(len(files))
        for place, name in enumerate(files):
            file = self.file(name)
            if file is not None:
                self._take(file)
                self._put(replace(file, tick=tick + place))

    def _enter_blocks(self, blocks: Iterable[BlockRecord]) -> None:
        for block in blocks:
            self.transaction.put(block.block_id, records.pack_block(block), db=self.tables.blocks)
            self.transaction.put(block.object_id + block.block_id, b"", db=self.tables.objects)
            self.transaction.put(records.content_key(block.extent.file, block.block_id), b"", db=self.tables.contents)

    def _put(self, file: FileRecord) -> None:
        self.transaction.put(file.file.encode(), records.pack_file(file), db=self.tables.files)
        self.transaction.put(records.access_key(file.slot, file.tick, file.file), b"", db=self.tables.access)

    def _take(self, file: FileRecord) -> None:
        self.transaction.delete(file.file.encode(), db=self.tables.files)
        self.transaction.delete(records.access_key(file.slot, file.tick, file.file), db=self.tables.access)

    def _forget_block(self, block_id: bytes, file: str) -> None:
        self.transaction.delete(records.content_key(file, block_id), db=self.tables.contents)
        block = self.block(block_id)
        if block is not None:
            self.transaction.delete(block_id, db=self.tables.blocks)
            self.transaction.delete(block.object_id + block_id, db=self.tables.objects)

    # Files on their way in and out.

    def reserve(self, reservation: Reservation) -> None:
        """Set room aside, and lead the fill where it is one."""
        own = records.pack_holder(FillHolder(self.worker, reservation.file))
        packed = records.pack_reservation(reservation.disk_bytes, self.slot(reservation.slot))
        self.transaction.put(own, packed, db=self.tables.reserved)
        if reservation.fill_key is not None:
            self.transaction.put(reservation.fill_key, own, db=self.tables.fills)

    def release(self, reservation: Reservation) -> None:
        """Give the room back, and no longer lead."""
        holder = FillHolder(self.worker, reservation.file)
        self.transaction.delete(records.pack_holder(holder), db=self.tables.reserved)
        if reservation.fill_key is not None and self.holder(reservation.fill_key) == holder:
            self.transaction.delete(reservation.fill_key, db=self.tables.fills)

    def succeed(self, fill_key: bytes, dead: FillHolder) -> None:
        """Free what a dead leader had set aside; its file is doomed."""
        self.transaction.delete(records.pack_holder(dead), db=self.tables.reserved)
        self.transaction.delete(fill_key, db=self.tables.fills)
        self.doom(dead.file)

    def holder(self, fill_key: bytes) -> FillHolder | None:
        packed = tables.get(self.transaction, self.tables.fills, fill_key)
        return records.unpack_holder(packed) if packed is not None else None

    def doom(self, file: str) -> None:
        """The file is to be unlinked by this worker, or by who clears up behind it."""
        self.transaction.put(records.worker_key(self.worker, file.encode()), b"", db=self.tables.doomed)

    def files_of(self, table: Table, worker: int) -> Iterator[str]:
        """One worker slot's part of `reserved` or `doomed`."""
        prefix = records.worker_key(worker)
        return (key[len(prefix) :].decode() for key in tables.keys(self.transaction, table, prefix))

    def in_transit(self) -> Iterator[str]:
        """The files that are being written or unlinked, in any process."""
        for table in (self.tables.reserved, self.tables.doomed):
            for key in tables.keys(self.transaction, table):
                yield records.unpack_holder(key).file

    def found_in_survey(self, directory: int, disk_bytes: int) -> None:
        """What was nobody's in a directory is on an account now, or doomed."""
        packed = tables.get(self.transaction, self.tables.survey, bytes([directory]))
        left = max(0, records.unpack_counter(packed) - disk_bytes)
        self.transaction.put(bytes([directory]), records.pack_counter(left), db=self.tables.survey)

    # Ticks.

    def next_tick(self, count: int = 1) -> int:
        """The first of `count` ticks that nobody else gets."""
        tick = records.unpack_counter(tables.get(self.transaction, self.tables.counters, _NEXT_TICK))
        self.transaction.put(_NEXT_TICK, records.pack_counter(tick + count), db=self.tables.counters)
        return tick

    def begin_ticks_at(self, tick: int) -> None:
        """All ticks from now on are at least this."""
        self.transaction.put(_NEXT_TICK, records.pack_counter(tick), db=self.tables.counters)
