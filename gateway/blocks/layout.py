"""The form of blocks on disk: ids, names, headers and rows of the index, packed and unpacked; and its settings. Pure.

A block is `length` bytes at `offset` of one object version. On disk it is an extent (file, offset, length, checksums of
every 64 KiB) of a file whose bytes never change. docs/on-disk-format.md is the reference for every field.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from awscrt import checksums

from gateway.core.errors import BlockDamaged, ConfigError
from gateway.core.model import ByteRange, Homes, ObjectKey, ObjectVersion, immutable
from gateway.policy.slots import DEFAULT_SLOT, Slots

CHUNK_BYTES = 64 * 1024
"""Bytes of one checksum; the last chunk of a block may be shorter."""

CHECKSUM_BYTES = 4
"""One chunk's CRC32C, little-endian."""

ALIGNMENT_BYTES = 4096
"""The block's bytes begin at a multiple of this, so that they lie in whole pages of the page cache."""

OBJECT_ID_BYTES = 16
_BLOCK_PERSON = b"forebay block v2"

FORMAT_VERSION = 1
HEADER_BYTES_MAX = 1024 * 1024

_MAGIC = b"FBYBLOCK"
MAGIC_BYTES = len(_MAGIC)
_FIXED = struct.Struct("<8sIIIQQQIII")
_CRC = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_RANGE = struct.Struct("<QQ")


@immutable
class Block:
    """One block of one object version. `id` is a hash over everything else, and its name everywhere."""

    id: bytes
    version: ObjectVersion
    offset: int
    length: int

    @property
    def range(self) -> ByteRange:
        return ByteRange(self.offset, self.offset + self.length - 1)


class Extent(NamedTuple):
    """The place of a block's bytes: `length` bytes at `offset` of the file named `file`.

    `checksums` holds the CRC32C of every chunk, 4 bytes little-endian each.
    """

    file: str
    offset: int
    length: int
    checksums: bytes

    def checksums_of(self, position: int, count: int) -> bytes:
        """Return the checksums of a part that begins with a chunk, and ends with one."""
        first, stop = position // CHUNK_BYTES, chunk_count(position + count)
        return self.checksums[first * CHECKSUM_BYTES : stop * CHECKSUM_BYTES]


def chunk_count(length: int) -> int:
    return -(-length // CHUNK_BYTES)


_TAG_BYTES = 8
_TAG = re.compile(r"/[0-9a-f]{16}$")
"""No bucket's name ends so: it holds no slash."""


class _Tags:
    """Suffix of a bucket's name in ids and headers: its home, unless that is the first one."""

    def __init__(self) -> None:
        self.others = ""
        self.of_bucket: dict[str, str] = {}


_TAGS = _Tags()


def set_home_tags(homes: Homes, first: str) -> None:
    """Keep blocks of buckets with the same name at different homes apart, in this process, from now on.

    There, too, one ETag may stand for other bytes. Blocks of the home `first` bear no tag: the main one when the
    directory was begun, wherever the main one is by now.
    """
    _TAGS.others = _tag(homes.main, first)
    _TAGS.of_bucket = {bucket: _tag(home, first) for bucket, home in homes.by_bucket.items()}


def _tag(home: str, first: str) -> str:
    if home == first:
        return ""
    return f"/{hashlib.blake2b(home.encode(), digest_size=_TAG_BYTES, person=b'forebay home 1').hexdigest()}"


def _tagged(bucket: str) -> str:
    return bucket + _TAGS.of_bucket.get(bucket, _TAGS.others)


class BlockIds:
    """The ids of the blocks of one version: what they share is hashed once.

    An id's last OBJECT_ID_BYTES are those of the object; the bytes before are a hash over them and everything else.
    """

    __slots__ = ("_object_id", "_state")

    def __init__(self, version: ObjectVersion, of_object: bytes | None = None) -> None:
        """`of_object` is the object's `object_id`, where it is known already."""
        self._begin(of_object or object_id(version.key), _encode(version.etag), version.size_bytes)

    @classmethod
    def of(cls, bucket: bytes, name: bytes, etag: bytes, object_bytes: int) -> BlockIds:
        ids = cls.__new__(cls)
        ids._begin(_object_id(b"%b\0%b" % (bucket, name)), etag, object_bytes)
        return ids

    def _begin(self, of_object: bytes, etag: bytes, object_bytes: int) -> None:
        self._object_id = of_object
        hashed = of_object + _LENGTH.pack(object_bytes) + etag
        self._state = hashlib.blake2b(hashed, digest_size=16, person=_BLOCK_PERSON)

    def at(self, offset: int, length: int) -> bytes:
        state = self._state.copy()
        state.update(_RANGE.pack(offset, length))
        return state.digest() + self._object_id


def object_id(key: ObjectKey) -> bytes:
    """Return the common end of the ids of all blocks of all versions of an object."""
    return _object_id(_encode(f"{_tagged(key.bucket)}\0{key.key}"))


def _object_id(whole: bytes) -> bytes:
    return hashlib.blake2b(whole, digest_size=OBJECT_ID_BYTES, person=b"forebay object 1").digest()


def block_at(version: ObjectVersion, number: int, block_size_bytes: int, ids: BlockIds | None = None) -> Block:
    """Block `number` of a version; `ids` saves hashing the version again for every block of it."""
    offset = number * block_size_bytes
    length = min(block_size_bytes, version.size_bytes - offset)
    return Block((ids or BlockIds(version)).at(offset, length), version, offset, length)


def block_id(version: ObjectVersion, number: int, block_size_bytes: int) -> bytes:
    """Return the id of block `number` of a version, without the block."""
    offset, size_bytes, of_object = number * block_size_bytes, version.size_bytes, object_id(version.key)
    byte_range = _RANGE.pack(offset, min(block_size_bytes, size_bytes - offset))
    hashed = of_object + _LENGTH.pack(size_bytes) + _encode(version.etag) + byte_range
    return hashlib.blake2b(hashed, digest_size=16, person=_BLOCK_PERSON).digest() + of_object


def block_numbers(byte_range: ByteRange, block_size_bytes: int) -> range:
    return range(byte_range.first // block_size_bytes, byte_range.last // block_size_bytes + 1)


def blocks_of(version: ObjectVersion, byte_range: ByteRange, block_size_bytes: int) -> Iterator[Block]:
    ids = BlockIds(version)
    for number in block_numbers(byte_range, block_size_bytes):
        yield block_at(version, number, block_size_bytes, ids)


def data_offset(block: Block, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the distance from a block's header to its bytes: known before the first byte has come."""
    return _data_offset(sum(map(len, _identity(block))), block.length, alignment_bytes)


def _data_offset(identity_bytes: int, length: int, alignment_bytes: int) -> int:
    return aligned(_FIXED.size + identity_bytes + chunk_count(length) * _CRC.size + _CRC.size, alignment_bytes)


def checksums_offset(block: Block) -> int:
    """Return the place of the checksums in the header: written during the fill, before the rest of the header."""
    return _FIXED.size + sum(map(len, _identity(block)))


def file_bytes(block: Block) -> int:
    return data_offset(block) + in_pages(block.length)


def in_pages(size_bytes: int) -> int:
    """Return a size rounded up to whole pages: the bytes that such a file takes on disk."""
    return aligned(size_bytes, ALIGNMENT_BYTES)


def aligned(size_bytes: int, alignment_bytes: int) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def file_name(block_id: bytes, nonce: str) -> str:
    """Return a name that no other file of the directory ever has: the block's id, and which writing of it this is."""
    return f"{block_id.hex()}-{nonce}"


def nonce_of(file: str) -> int:
    """Which writing of a block a file name is of."""
    return int(file.rpartition("-")[2], 16)


def beginning(block: Block, alignment_bytes: int = ALIGNMENT_BYTES) -> bytes:
    """Return the header from the magic, at MAGIC_BYTES, to the checksums: it identifies the block."""
    return _start(block, alignment_bytes)[MAGIC_BYTES:]


def _start(block: Block, alignment_bytes: int) -> bytes:
    bucket, key, etag = _identity(block)
    fixed = _FIXED.pack(
        _MAGIC,
        FORMAT_VERSION,
        _data_offset(len(bucket) + len(key) + len(etag), block.length, alignment_bytes),
        CHUNK_BYTES,
        block.version.size_bytes,
        block.offset,
        block.length,
        len(bucket),
        len(key),
        len(etag),
    )
    return b"".join((fixed, bucket, key, etag))


def pack_header(block: Block, chunk_checksums: bytes, alignment_bytes: int = ALIGNMENT_BYTES) -> bytes:
    """Return the header, padded with zeros to where the data begins."""
    covered = _start(block, alignment_bytes) + chunk_checksums
    header = covered + _CRC.pack(checksums.crc32c(covered))
    return header.ljust(aligned(len(header), alignment_bytes), b"\0")


def header_bytes(start: bytes, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the length of the header that begins with `start`; raise BlockDamaged if it is none of this format."""
    if len(start) < _FIXED.size:
        raise BlockDamaged("shorter than a header")
    magic, version, length, *_ = _FIXED.unpack_from(start)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise BlockDamaged("not a block file of this format")
    if not alignment_bytes <= length <= HEADER_BYTES_MAX or length % alignment_bytes:
        raise BlockDamaged(f"a header of {length} bytes")
    return int(length)


def unpack_header(header: bytes, alignment_bytes: int = ALIGNMENT_BYTES) -> tuple[Block, bytes]:
    """Return the block that a file says it holds, and its checksums; raise BlockDamaged if a byte of it is wrong."""
    start = header_bytes(header, alignment_bytes)
    _, _, _, chunk_bytes, object_size, offset, length, bucket_size, key_size, etag_size = _FIXED.unpack_from(header)
    key_at = _FIXED.size + bucket_size
    etag_at = key_at + key_size
    table_at = etag_at + etag_size
    end = table_at + chunk_count(length) * _CRC.size
    if chunk_bytes != CHUNK_BYTES or end + _CRC.size > min(start, len(header)):
        raise BlockDamaged("the header's lengths do not fit")
    if _CRC.unpack_from(header, end)[0] != checksums.crc32c(header[:end]):
        raise BlockDamaged("the header's checksum differs")
    bucket, key, etag = header[_FIXED.size : key_at], header[key_at:etag_at], header[etag_at:table_at]
    name = _TAG.sub("", _decode(bucket))
    version = ObjectVersion(ObjectKey(name, _decode(key)), _decode(etag), object_size)
    block_id = BlockIds.of(bucket, key, etag, object_size).at(offset, length)
    return Block(block_id, version, offset, length), header[table_at:end]


def _identity(block: Block) -> tuple[bytes, bytes, bytes]:
    version = block.version
    return _encode(_tagged(version.key.bucket)), _encode(version.key.key), _encode(version.etag)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


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
    False for a file that is on this disk already. `blocks` is the number of blocks to enter. `ahead_bytes` more are
    and stay set aside for what is appended to the file next. `copy`: another node looks after the blocks, so they take
    room that nobody else uses, and leave before all others.
    """

    file: str
    slot: str
    disk_bytes: int
    wanted: bool = False
    pin: int = 0
    to_write: bool = True
    blocks: int = 1
    ahead_bytes: int = 0
    copy: bool = False


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


@lru_cache(maxsize=64)
def file_key(file: str) -> bytes:
    """Return a file's key in the index: names are random, so these 64 bits are."""
    return hashlib.blake2b(file.encode(), digest_size=FILE_KEY_BYTES).digest()


def pack_block(extent: Extent) -> bytes:
    high, low = divmod(extent.offset, 1 << 32)
    return _BLOCK.pack(file_key(extent.file), high, low, extent.length) + extent.checksums


Rows: TypeAlias = dict[bytes, bytes]
"""Rows of blocks in the index by their keys, in the order of these, which is what LMDB does fastest."""


def rows_of(blocks: Iterable[BlockRecord]) -> Rows:
    """Return a row for each block: pack them before the index is locked."""
    return dict(sorted((block_key(block.block_id), pack_block(block.extent)) for block in blocks))


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


pack_reservation, unpack_reservation = _RESERVATION.pack, _RESERVATION.unpack
"""Pack and unpack the bytes on disk and the number of the slot."""


def pack_worker_file(holder: WorkerFile) -> bytes:
    return _WORKER.pack(holder.worker) + holder.file.encode()


def unpack_worker_file(packed: bytes) -> WorkerFile:
    return WorkerFile(_WORKER.unpack_from(packed)[0], packed[_WORKER.size :].decode())


def pack_numbers(*numbers: int) -> bytes:
    return _NUMBERS[len(numbers)].pack(*numbers)


def unpack_numbers(packed: bytes | None, count: int) -> tuple[int, ...]:
    """Zeros where nothing is written down."""
    return _NUMBERS[count].unpack(packed) if packed is not None else (0,) * count


BLOCK_SIZE_BYTES_MAX = 256 * 1024 * 1024

PACKED_BYTES_MAX = 1024 * 1024
"""A small block lies in memory as a whole until it is written: not more than a reader may hold (sources.READ_BYTES)."""


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """Every worker process that shares `directory` is given the same settings.

    `capacity_bytes` bounds the block files on disk, headers included, fills in progress included; `slots` have
    shares of it, and block sizes other than `block_size_bytes`. `fills_max` bounds the fills
    of one process that run at the same time; readahead takes at most two of three, so that a reader that waits for its
    first byte never queues behind bytes without a reader. Blocks of at most `small_object_bytes_max`, short last
    ones and whole small objects among them, are packed together in segments; the others have a file of their own.
    Fills write at most `daily_writes_bytes` a day (UTC), all processes together, with the index's
    own writes; None: no limit. The index takes `index_bytes_max` at most; None: as much as its map holds.
    Files that all processes have in memory lie in `shared_directory`; None: in `directory`. `homes` are the places of
    buckets: all parts of a process share one. `has_one_worker`: one process alone serves requests.
    `has_local_readers`: clients may get descriptors of files, so segments are locked until they are sealed.
    """

    directory: Path
    capacity_bytes: int
    block_size_bytes: int = 8 * 1024 * 1024
    readahead_bytes: int = 256 * 1024 * 1024
    fills_max: int = 48
    fill_retries: int = 3
    disk_threads: int = 8
    access_flush_seconds: float = 1.0
    slots: Slots = field(default_factory=Slots)
    small_object_bytes_max: int = PACKED_BYTES_MAX
    daily_writes_bytes: int | None = None
    index_bytes_max: int | None = None
    shared_directory: Path | None = None
    homes: Homes = field(default_factory=lambda: Homes(""))
    has_one_worker: bool = False
    has_local_readers: bool = False
    _block_sizes: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _kept_object_bytes_max: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _copies: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def block_size_of(self, slot: str) -> int:
        return self._block_sizes.get(slot, self.block_size_bytes)

    def copies_of(self, slot: str) -> str:
        """Return what a slot keeps of the blocks that other nodes look after: `idle`, `none` or `all`."""
        return self._copies.get(slot, DEFAULT_SLOT.copies)

    def slot_now(self, key: ObjectKey) -> str:
        """Return the slot on whose account a block of a key comes: slots may have changed since its read began."""
        return self.slots.find(key.bucket, key.key).name

    def keeps(self, slot: str, size_bytes: int) -> bool:
        size_max = self._kept_object_bytes_max.get(slot)
        return size_max is None or size_bytes <= size_max

    def follow_slots(self) -> None:
        """Follow a change of slots. Reads under way in a removed slot keep its size of blocks."""
        for slot in self.slots:
            self._kept_object_bytes_max.pop(slot.name, None)
            if slot.kept_object_bytes_max is not None:
                self._kept_object_bytes_max[slot.name] = slot.kept_object_bytes_max
            self._block_sizes[slot.name] = slot.block_size_bytes or self.block_size_bytes
            self._copies[slot.name] = slot.copies

    def __post_init__(self) -> None:
        self.follow_slots()
        for size in (self.block_size_bytes, *self._block_sizes.values()):
            if size % CHUNK_BYTES or not CHUNK_BYTES <= size <= BLOCK_SIZE_BYTES_MAX:
                raise ConfigError("cache.block_size", size, "a multiple of 64 KiB, 64 KiB to 256 MiB")
        if not 0 <= self.small_object_bytes_max <= PACKED_BYTES_MAX:
            raise ConfigError("cache.small_object_max", self.small_object_bytes_max, "0 to 1 MiB")
        if self.capacity_bytes < 0:
            raise ConfigError("cache.capacity", self.capacity_bytes, "0 or more bytes")
        if self.readahead_bytes < 0:
            raise ConfigError("cache.readahead", self.readahead_bytes, "0 or more bytes")
        if self.fills_max < 1 or self.disk_threads < 1:
            raise ConfigError("cache.fills_max", self.fills_max, "1 or more fills and 1 or more disk threads")
