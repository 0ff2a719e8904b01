"""The index's records, packed and unpacked. Pure; docs/on-disk-format.md is the reference."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gateway.blocks.layout import Extent

_BLOCK = struct.Struct("<QQ16sH")
_FILE = struct.Struct("<QQHI")
_USAGE = struct.Struct("<QQ")
_RESERVATION = struct.Struct("<QH")
_ACCESS = struct.Struct(">HQ")
_SLOT = struct.Struct(">H")
_WORKER = struct.Struct(">I")
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
    """

    file: str
    slot: int
    disk_bytes: int
    tick: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room set aside on a slot's account for a file that is not in the index yet.

    `fill_key` is what other processes find a fill by: the block, and who may share it. None for a file that came
    another way.
    """

    file: str
    slot: str
    disk_bytes: int
    fill_key: bytes | None = None


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
    return _FILE.pack(record.tick, record.disk_bytes, record.slot, record.blocks)


def unpack_file(file: str, packed: bytes) -> FileRecord:
    tick, disk_bytes, slot, blocks = _FILE.unpack(packed)
    return FileRecord(file, slot, disk_bytes, tick, blocks)


def content_key(file: str, block_id: bytes = b"") -> bytes:
    """Says that a block lies in a file. The zero byte keeps a file whose name begins like another's apart."""
    return file.encode() + b"\0" + block_id


def access_key(slot: int, tick: int, file: str) -> bytes:
    """Sorts each slot's files by last use."""
    return _ACCESS.pack(slot, tick) + file.encode()


def file_of_access_key(key: bytes) -> str:
    return key[_ACCESS.size :].decode()


def pack_slot(number: int) -> bytes:
    """A slot's number, as keys begin with it."""
    return _SLOT.pack(number)


def unpack_slot(packed: bytes) -> int:
    return int(_SLOT.unpack(packed)[0])


def pack_usage(blocks: int, used_bytes: int) -> bytes:
    return _USAGE.pack(blocks, used_bytes)


def unpack_usage(packed: bytes | None) -> tuple[int, int]:
    return _USAGE.unpack(packed) if packed else (0, 0)


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
