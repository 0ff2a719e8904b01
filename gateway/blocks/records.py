"""The index's records, packed and unpacked. Pure; docs/on-disk-format.md is the reference."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gateway.blocks.layout import Extent

_BLOCK = struct.Struct("<QQQQ16sH")
_TICK = struct.Struct(">Q")
_WORKER = struct.Struct(">I")
_BYTES = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What the index knows of one block.

    `disk_bytes` is what unlinking its file gives back. `tick` is its place in the order of use: a counter kept in the
    index, so that no clock, no time zone and no reboot can disturb the order.
    """

    block_id: bytes
    object_id: bytes
    extent: Extent
    disk_bytes: int
    tick: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room set aside for a fill in progress, and the name of the file that it writes.

    `fill_key` is what other processes find the fill by: the block, and who may share it.
    """

    block_id: bytes
    fill_key: bytes
    file: str
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class FillHolder:
    """Who leads a fill: a worker slot, and the name of the file that it writes."""

    worker: int
    file: str


def pack_block(record: BlockRecord) -> bytes:
    extent = record.extent
    name = extent.file.encode()
    fixed = _BLOCK.pack(record.tick, record.disk_bytes, extent.offset, extent.length, record.object_id, len(name))
    return fixed + name + extent.checksums


def unpack_block(block_id: bytes, packed: bytes) -> BlockRecord:
    tick, disk_bytes, offset, length, object_id, name_bytes = _BLOCK.unpack_from(packed)
    data = _BLOCK.size + name_bytes
    extent = Extent(packed[_BLOCK.size : data].decode(), offset, length, packed[data:])
    return BlockRecord(block_id, object_id, extent, disk_bytes, tick)


def unpack_extent(packed: bytes) -> Extent:
    """The extent of a packed record: all that a reader needs."""
    _, _, offset, length, _, name_bytes = _BLOCK.unpack_from(packed)
    data = _BLOCK.size + name_bytes
    return Extent(packed[_BLOCK.size : data].decode(), offset, length, packed[data:])


def with_tick(packed: bytes, tick: int) -> bytes:
    return _BYTES.pack(tick) + packed[_BYTES.size :]


def tick_of(packed: bytes) -> int:
    return int(_BYTES.unpack_from(packed)[0])


def access_key(tick: int, block_id: bytes) -> bytes:
    """Sorts by last use."""
    return _TICK.pack(tick) + block_id


def block_of_access_key(key: bytes) -> bytes:
    return key[_TICK.size :]


def worker_key(worker: int, name: bytes = b"") -> bytes:
    """A key of one worker slot's part of a table."""
    return _WORKER.pack(worker) + name


def pack_reservation(reservation: Reservation) -> bytes:
    return _BYTES.pack(reservation.disk_bytes) + reservation.block_id


def reserved_bytes(packed: bytes) -> int:
    return int(_BYTES.unpack_from(packed)[0])


def pack_holder(holder: FillHolder) -> bytes:
    return worker_key(holder.worker, holder.file.encode())


def unpack_holder(packed: bytes) -> FillHolder:
    return FillHolder(_WORKER.unpack_from(packed)[0], packed[_WORKER.size :].decode())


def pack_counter(value: int) -> bytes:
    return _BYTES.pack(value)


def unpack_counter(packed: bytes | None) -> int:
    return int(_BYTES.unpack(packed)[0]) if packed else 0
