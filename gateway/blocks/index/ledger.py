"""The index's books inside one transaction: what belongs together is changed together.

Every byte on disk is on exactly one account: a slot's usage (files in the index), a slot's reservation (files being
written), or nobody's (files that a survey has not come to).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import lmdb

from gateway.blocks.index import records, slot_book, tables
from gateway.blocks.index.keeping.book import Queue
from gateway.blocks.index.records import BLOCK_ID_BYTES, BlockRecord, FileRecord, FillHolder, Reservation
from gateway.blocks.index.shares import SlotUsage
from gateway.blocks.index.slot_book import SlotBook
from gateway.blocks.index.tables import Table, Tables

_WRITTEN = b"written"


@dataclass(frozen=True, slots=True)
class Ledger:
    """One transaction's view. What changes something needs a write transaction, and `close` at its end.

    `worker` names what it leaves.
    """

    transaction: lmdb.Transaction
    tables: Tables
    worker: int
    _books: dict[int, SlotBook] = field(default_factory=dict)

    def close(self) -> None:
        """Write down what is known of the slots that were changed."""
        for book in self._books.values():
            book.save()

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

    def book(self, slot: int) -> SlotBook:
        """A slot's files and what its policy knows, by its number."""
        book = self._books.get(slot)
        if book is None:
            book = self._books[slot] = SlotBook(self.transaction, self.tables, slot)
        return book

    # Accounts.

    def usage(self) -> dict[int, SlotUsage]:
        """What each slot has, by its number."""
        reserved = Counter[int]()
        for _, packed in tables.items(self.transaction, self.tables.reserved):
            disk_bytes, slot = records.unpack_reservation(packed)
            reserved[slot] += disk_bytes
        return {slot: self._used(slot, reserved[slot]) for slot in self.slots().values()}

    def unsurveyed_bytes(self) -> int:
        """What lies on disk without being in the index yet."""
        found = tables.items(self.transaction, self.tables.survey)
        return sum(records.unpack_counter(packed) for _, packed in found)

    def _used(self, slot: int, reserved_bytes: int) -> SlotUsage:
        state = self.book(slot).state
        return SlotUsage(state.blocks, state.used_bytes, reserved_bytes, pinned_bytes=state.queue_bytes[Queue.PINNED])

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

    def contents(self, file: str) -> list[bytes]:
        """The blocks that lie in a file."""
        found = tables.keys(self.transaction, self.tables.contents, records.content_key(file))
        return [key[-BLOCK_ID_BYTES:] for key in found]

    def insert(self, file: FileRecord, blocks: Iterable[BlockRecord]) -> None:
        """Enter a file with all its blocks, which the index has nowhere else."""
        self._enter_blocks(blocks)
        self.book(file.slot).put(file)

    def admit(self, reservation: Reservation, blocks: Sequence[BlockRecord], pin: int) -> None:
        """Enter the file of a reservation, which was asked for and not there, under a pin where that is not 0."""
        slot, size_bytes = self.slot(reservation.slot), reservation.disk_bytes
        queue = Queue.PINNED if pin else Queue.MAIN
        file = FileRecord(reservation.file, slot, size_bytes, self.next_tick(), len(blocks), queue, pin=pin)
        ids = [block.block_id for block in blocks]
        self.insert(self.book(slot).entering(file, ids, size_bytes, new=True, wanted=reservation.wanted), blocks)

    def extend(self, file: FileRecord, blocks: Sequence[BlockRecord], disk_bytes: int) -> None:
        """Enter what was appended to a file: `disk_bytes` more, and blocks that the index has nowhere else."""
        self._enter_blocks(blocks)
        book = self.book(file.slot)
        grown = replace(file, disk_bytes=file.disk_bytes + disk_bytes, blocks=file.blocks + len(blocks))
        book.take(file)
        book.put(book.entering(grown, [block.block_id for block in blocks], disk_bytes, new=False))

    def evict(self, file: FileRecord) -> None:
        """Take out a file that its policy gives up."""
        self.book(file.slot).leaving(file, self.contents(file.file))
        self.remove(file)

    def remove(self, file: FileRecord) -> None:
        """Take a file and its blocks out; it is doomed."""
        for block_id in self.contents(file.file):
            self._forget_block(block_id, file.file)
        self.book(file.slot).take(file)
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
        self.book(file.slot).change(replace(file, blocks=file.blocks - 1))
        return None

    def move(self, file: FileRecord, slot: int) -> None:
        """Put a file on another slot's account; its place in the order of use stays."""
        self.book(file.slot).take(file)
        book = self.book(slot)
        book.put(replace(file, slot=slot, used_at=book.state.position))

    def resize(self, file: FileRecord, disk_bytes: int) -> None:
        """Count what a file takes by what it was found to take."""
        self.book(file.slot).change(replace(file, disk_bytes=disk_bytes))

    def touch(self, uses: Iterable[tuple[str, int]]) -> None:
        """Note that blocks in these files were used, so many times, in this order."""
        for name, times in uses:
            file = self.file(name)
            if file is not None:
                self.book(file.slot).used(file, times)

    def _enter_blocks(self, blocks: Iterable[BlockRecord]) -> None:
        for block in blocks:
            self.transaction.put(block.block_id, records.pack_block(block), db=self.tables.blocks)
            self.transaction.put(block.object_id + block.block_id, b"", db=self.tables.objects)
            self.transaction.put(records.content_key(block.extent.file, block.block_id), b"", db=self.tables.contents)

    def _forget_block(self, block_id: bytes, file: str) -> None:
        self.transaction.delete(records.content_key(file, block_id), db=self.tables.contents)
        block = self.block(block_id)
        if block is not None:
            self.transaction.delete(block_id, db=self.tables.blocks)
            self.transaction.delete(block.object_id + block_id, db=self.tables.objects)

    # Pins.

    def pins(self) -> dict[str, int]:
        """The number of every pin, by the prefix that it holds."""
        found = tables.items(self.transaction, self.tables.pins)
        return {prefix.decode("utf-8", "surrogatepass"): records.unpack_counter(packed) for prefix, packed in found}

    def hold(self, file: FileRecord, pin: int) -> None:
        """Put a file under a pin; 0 lets go of it, and it stands as if it was just used."""
        queue = Queue.PINNED if pin else Queue.MAIN
        book = self.book(file.slot)
        used_at = book.state.position
        book.change(replace(file, queue=queue, pin=pin, tick=self.next_tick(), used_at=used_at))

    def held(self, slot: int, after: bytes, count_max: int) -> list[bytes]:
        """The access keys of pinned files of a slot, so many behind `after`."""
        prefix = records.queue_prefix(slot, Queue.PINNED)
        return list(islice(tables.keys(self.transaction, self.tables.access, prefix, after), count_max))

    # What fills write.

    def written_bytes(self, day: int) -> int:
        """What fills were given room for on a day, counted from 1970."""
        on, count = records.unpack_written(tables.get(self.transaction, self.tables.counters, _WRITTEN))
        return count if on == day else 0

    def add_written(self, day: int, count: int) -> None:
        packed = records.pack_written(day, self.written_bytes(day) + count)
        self.transaction.put(_WRITTEN, packed, db=self.tables.counters)

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
        return slot_book.next_tick(self.transaction, self.tables, count)

    def begin_ticks_at(self, tick: int) -> None:
        """All ticks from now on are at least this."""
        slot_book.begin_ticks_at(self.transaction, self.tables, tick)
