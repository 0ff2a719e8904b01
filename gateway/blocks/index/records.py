"""The index's records, packed and unpacked. Pure; docs/on-disk-format.md is the reference."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gateway.blocks.layout import Extent

_BLOCK = struct.Struct("<QQ16sH")
_FILE = struct.Struct("<QQHIBBQI")
_RESERVATION = struct.Struct("<QH")
_ACCESS = struct.Struct(">HBQ")
_SLOT = struct.Struct(">H")
_WORKER = struct.Struct(">I")
_WRITTEN = struct.Struct("<QQ")
_BYTES = struct.Struct("<Q")

BLOCK_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What the index knows of one block."""

    block_id: bytes
    object_id: bytes
    extent: Extent


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file, in which one or more blocks lie: what is counted, and what goes when room is needed.

    `disk_bytes` is what unlinking it gives back; `slot` the number of the one on whose account it is. `tick` is its
    place in the order of use: a counter kept in the index, so that no clock, no time zone and no reboot can disturb the
    order. `blocks` is how many lie in it; which, the ledger's `contents` tells.

    `queue` is where it stands in its slot, `frequency` how often it was used there and `used_at` when last, as far as
    the slot's policy counts and in its time (keeping/book.py). `pin` is the number of the pin that holds it, or 0.
    """

    file: str
    slot: int
    disk_bytes: int
    tick: int
    blocks: int = 1
    queue: int = 0
    frequency: int = 0
    used_at: int = 0
    pin: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room set aside on a slot's account for a file that is not in the index yet.

    `fill_key` is what other processes find a fill by: the block, and who may share it. None for a file that came
    another way. `wanted` is room that somebody has asked for in so many words: what was used longest ago gives way,
    whatever the slot's policy makes of it. `pin` is the number of the pin that the file is under, or 0. `to_write` is
    False for what lies on this disk already.
    """

    file: str
    slot: str
    disk_bytes: int
    fill_key: bytes | None = None
    wanted: bool = False
    pin: int = 0
    to_write: bool = True


@dataclass(frozen=True, slots=True)
class FillHolder:
    """Who leads a fill: a worker slot, and the name of the file that it writes."""

    worker: int
    file: str


def pack_block(record: BlockRecord) -> bytes:
    extent = record.extent
    name = extent.file.encode()
    return _BLOCK.pack(extent.offset, extent.length, record.object_id, len(name)) + name + extent.checksums


def unpack_block(block_id: bytes, packed: bytes) -> BlockRecord:
    return BlockRecord(block_id, _BLOCK.unpack_from(packed)[2], unpack_extent(packed))


def unpack_extent(packed: bytes) -> Extent:
    """The extent of a packed block: all that a reader needs."""
    offset, length, _, name_bytes = _BLOCK.unpack_from(packed)
    data = _BLOCK.size + name_bytes
    return Extent(packed[_BLOCK.size : data].decode(), offset, length, packed[data:])


def pack_file(record: FileRecord) -> bytes:
    return _FILE.pack(
        record.tick,
        record.disk_bytes,
        record.slot,
        record.blocks,
        record.queue,
        record.frequency,
        record.used_at,
        record.pin,
    )


def unpack_file(file: str, packed: bytes) -> FileRecord:
    tick, disk_bytes, slot, *others = _FILE.unpack(packed)
    return FileRecord(file, slot, disk_bytes, tick, *others)


def content_key(file: str, block_id: bytes = b"") -> bytes:
    """Says that a block lies in a file. The zero byte keeps a file whose name begins like another's apart."""
    return file.encode() + b"\0" + block_id


def access_key(file: FileRecord) -> bytes:
    """Sorts the files of each queue of a slot."""
    return _ACCESS.pack(file.slot, file.queue, file.tick) + file.file.encode()


def queue_prefix(slot: int, queue: int) -> bytes:
    """What the access keys of a queue begin with."""
    return _ACCESS.pack(slot, queue, 0)[: _SLOT.size + 1]


def file_of_access_key(key: bytes) -> str:
    return key[_ACCESS.size :].decode()


def pack_slot(number: int) -> bytes:
    """A slot's number, as keys begin with it."""
    return _SLOT.pack(number)


def unpack_slot(packed: bytes) -> int:
    return int(_SLOT.unpack(packed)[0])


def pack_written(day: int, count: int) -> bytes:
    return _WRITTEN.pack(day, count)


def unpack_written(packed: bytes | None) -> tuple[int, int]:
    """A day and the bytes written on it."""
    return _WRITTEN.unpack(packed) if packed else (0, 0)


def worker_key(worker: int, name: bytes = b"") -> bytes:
    """A key of one worker slot's part of a table."""
    return _WORKER.pack(worker) + name


def pack_reservation(disk_bytes: int, slot: int) -> bytes:
    return _RESERVATION.pack(disk_bytes, slot)


def unpack_reservation(packed: bytes) -> tuple[int, int]:
    """Bytes on disk, and the number of the slot."""
    return _RESERVATION.unpack(packed)


def pack_holder(holder: FillHolder) -> bytes:
    return worker_key(holder.worker, holder.file.encode())


def unpack_holder(packed: bytes) -> FillHolder:
    return FillHolder(_WORKER.unpack_from(packed)[0], packed[_WORKER.size :].decode())


def pack_counter(value: int) -> bytes:
    return _BYTES.pack(value)


def unpack_counter(packed: bytes | None) -> int:
    return int(_BYTES.unpack(packed)[0]) if packed else 0
