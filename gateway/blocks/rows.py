"""The rows of the index, packed and unpacked. Pure, except for the tables.

The index is LMDB tables:

blocks   block key → where the block lies. A row whose file the index has no more, or remembers only, counts for nothing
files    file key → FileRecord
queues   (slot, queue, sequence, file key) → nothing: the files of each slot's queues in order
state    a letter, then:
    s  slot name → its number, given once
    a  slot number → SlotAccount
    r  (worker, file) → bytes and slot: what files that are being written will take
    u  (worker, file) → bytes: files that left the index and await their unlink, with their counted bytes
    p  pin number → its prefix
    b  directory of data files → bytes in it that the index does not know yet
    c  name → totals, counters and marks

docs/on-disk-format.md is the reference for every field.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

import lmdb

from gateway.blocks.layout import OBJECT_ID_BYTES, Extent
from gateway.core.model import immutable

_BLOCK = struct.Struct("<8sBII")
_FILE = struct.Struct("<BBHIQQQI")
_RESERVATION = struct.Struct("<QH")
_QUEUE = struct.Struct(">HBQ")
_SLOT = struct.Struct(">H")
_WORKER = struct.Struct(">I")
_PIN = struct.Struct(">Q")
_NUMBERS = {count: struct.Struct(f"<{count}Q") for count in range(1, 8)}

FILE_KEY_BYTES = 8
QUEUE_OFFSET = 0
"""Place of the queue's number in a packed FileRecord."""


@immutable
class BlockRecord:
    block_id: bytes
    extent: Extent


@immutable
class FileRecord:
    """One file, in which one or more blocks lie: what is counted, and what goes when room is needed.

    `disk_bytes` is what unlinking it gives back; `slot` the number of the one on whose account it is. `sequence` is its
    place in the order of use: a counter kept in the index, so that no clock, no time zone and no reboot can disturb the
    order. `blocks` is how many lie in it.

    `queue` is where it stands in its slot, `frequency` how often it was used there and `used_at` when last, as far as
    the slot's policy counts and in its time (policies.py). `pin` is the number of the pin that holds it, or 0.
    """

    file: str
    slot: int
    disk_bytes: int
    sequence: int
    blocks: int = 1
    queue: int = 0
    frequency: int = 0
    used_at: int = 0
    pin: int = 0


@immutable
class Reservation:
    """Room set aside on a slot's account for a file that is not in the index yet.

    `wanted` is room that a user has asked for expressly: the least recently used files give way,
    whatever the slot's policy prefers. `pin` is the number of the pin that the file is under, or 0. `to_write` is
    False for a file that is on this disk already. `blocks` is the number of blocks to enter.
    """

    file: str
    slot: str
    disk_bytes: int
    wanted: bool = False
    pin: int = 0
    to_write: bool = True
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class WorkerFile:
    """A file that a worker writes, or is to unlink."""

    worker: int
    file: str


def block_key(block_id: bytes) -> bytes:
    """Sorts the blocks of one object together: the part of its id that they share comes first."""
    return block_id[-OBJECT_ID_BYTES:] + block_id[:-OBJECT_ID_BYTES]


def block_id_of(key: bytes) -> bytes:
    return key[OBJECT_ID_BYTES:] + key[:OBJECT_ID_BYTES]


def file_key(file: str) -> bytes:
    """Return a file's key in the index: names are random, so these 64 bits are."""
    return hashlib.blake2b(file.encode(), digest_size=FILE_KEY_BYTES).digest()


def pack_block(extent: Extent) -> bytes:
    high, low = divmod(extent.offset, 1 << 32)
    return _BLOCK.pack(file_key(extent.file), high, low, extent.length) + extent.checksums


def unpack_extent(packed: bytes, packed_file: bytes) -> Extent:
    """Return a block's place from its row and that of its file."""
    _, high, low, length = _BLOCK.unpack_from(packed)
    return Extent(packed_file[_FILE.size :].decode(), high << 32 | low, length, packed[_BLOCK.size :])


def pack_file(record: FileRecord) -> bytes:
    return (
        _FILE.pack(
            record.queue,
            record.frequency,
            record.slot,
            record.blocks,
            record.sequence,
            record.disk_bytes,
            record.used_at,
            record.pin,
        )
        + record.file.encode()
    )


def unpack_file(packed: bytes) -> FileRecord:
    queue, frequency, slot, blocks, sequence, disk_bytes, used_at, pin = _FILE.unpack_from(packed)
    file = packed[_FILE.size :].decode()
    return FileRecord(file, slot, disk_bytes, sequence, blocks, queue, frequency, used_at, pin)


def queue_key(file: FileRecord) -> bytes:
    """Sorts the files of each queue of a slot."""
    return _QUEUE.pack(file.slot, file.queue, file.sequence) + file_key(file.file)


def queue_prefix(slot: int, queue: int) -> bytes:
    return _QUEUE.pack(slot, queue, 0)[: _SLOT.size + 1]


pack_slot, pack_pin = _SLOT.pack, _PIN.pack
"""A slot's number, as keys begin with it; a pin's."""


def unpack_slot(packed: bytes) -> int:
    return int(_SLOT.unpack(packed)[0])


def unpack_pin(packed: bytes) -> int:
    return int(_PIN.unpack(packed)[0])


def worker_key(worker: int, name: bytes = b"") -> bytes:
    """Return a key of one worker's part of a table."""
    return _WORKER.pack(worker) + name


pack_reservation, unpack_reservation = _RESERVATION.pack, _RESERVATION.unpack
"""Pack and unpack the bytes on disk and the number of the slot."""


def pack_worker_file(holder: WorkerFile) -> bytes:
    return worker_key(holder.worker, holder.file.encode())


def unpack_worker_file(packed: bytes) -> WorkerFile:
    return WorkerFile(_WORKER.unpack_from(packed)[0], packed[_WORKER.size :].decode())


def pack_numbers(*numbers: int) -> bytes:
    return _NUMBERS[len(numbers)].pack(*numbers)


def unpack_numbers(packed: bytes | None, count: int) -> tuple[int, ...]:
    """Zeros where nothing is written down."""
    return _NUMBERS[count].unpack(packed) if packed is not None else (0,) * count


Table: TypeAlias = Any
"""An LMDB named database: an opaque handle."""

SLOTS, ACCOUNTS, RESERVED = b"s", b"a", b"r"
PENDING_UNLINKS, PINS, REBUILD, COUNTERS = b"u", b"p", b"b", b"c"


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


def get(transaction: lmdb.Transaction, table: Table, key: bytes) -> bytes | None:
    return cast("bytes | None", transaction.get(key, db=table))


def items(
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


def size_bytes(transaction: lmdb.Transaction, of: Tables) -> int:
    """Return the bytes of all tables' pages, without those free for reuse or kept for readers."""
    pages, page_bytes = 0, 0
    for table in fields(of):
        facts = transaction.stat(getattr(of, table.name))
        pages += facts["branch_pages"] + facts["leaf_pages"] + facts["overflow_pages"]
        page_bytes = facts["psize"]
    return pages * page_bytes
