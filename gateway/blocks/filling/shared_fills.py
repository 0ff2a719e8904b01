"""Which process fills a block: exactly one leads, the others follow its file, and the first to notice succeeds it.

The index names the leader of every fill, and the leader holds a lock on the file that it writes until the block is in
the index or the fill has failed; the kernel unlocks the file of a killed process. A file is judged by its lock only
after it was found through the index, where it never stands unlocked while its leader lives. All of this blocks and
belongs on the index thread or a disk thread.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.blocks import layout
from gateway.blocks.directory import BlockDirectory, Evicted, FillFile
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.verification import ChunkChecksums, read_verified
from gateway.blocks.filling.audience import audience
from gateway.blocks.index.records import FillHolder
from gateway.blocks.layout import CHECKSUM_BYTES, CHUNK_BYTES, Block, Extent
from gateway.errors import BlockDamaged, StoreUnavailable

ROUNDS_MAX = 100
"""Each round is lost to another process that got further: so many in a row never happen in a sound directory."""

VERIFIED_AT_ONCE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class OtherFill:
    """A file that another process fills, or filled until it was killed."""

    block: Block
    holder: FillHolder
    file: BlockLease


@dataclass(frozen=True, slots=True)
class OwnFill:
    """This process leads."""

    filled: FillFile
    evicted: Evicted


def fill_key(block: Block, headers: Mapping[str, str]) -> bytes:
    """What fills that may be shared have in common: the block, and what goes to the origin along with the request."""
    return block.id + audience(headers)


def lead_or_find(
    directory: BlockDirectory, block: Block, slot: str, key: bytes, given_up: FillHolder | None, wanted: bool = False
) -> OwnFill | OtherFill | None:
    """Lead a block's fill on a slot's account, or say who does; None when the block is in the index by now.

    `given_up` led the fill and was seen dead, its file read to the end. `wanted` is of records.Reservation.
    """
    for _ in range(ROUNDS_MAX):
        if directory.index.lookup(block.id) is not None:
            return None
        holder = directory.index.holder(key)
        if holder is not None and holder != given_up:
            file = directory.store.open_of(holder.worker, holder.file)
            if file is not None:
                return OtherFill(block, holder, file)
        begun = directory.begin(block, slot, key, holder, wanted=wanted)
        if begun is not None:
            return OwnFill(*begun)
    raise StoreUnavailable("other processes begin and end fills of this block all the time")


def is_led(file: BlockLease) -> bool:
    """Whether a living process still fills the file, or is about to publish it."""
    try:
        fcntl.flock(file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file.descriptor, fcntl.LOCK_UN)
    return False


def complete_bytes(file: BlockLease, block: Block) -> int:
    """How much of a growing file lies in chunks that are written whole, by the file's length."""
    written = os.fstat(file.descriptor).st_size - layout.data_offset(block)
    if written >= block.length:
        return block.length
    return max(0, written // CHUNK_BYTES * CHUNK_BYTES)


def take_in(file: BlockLease, block: Block, checksums: ChunkChecksums) -> None:
    """Compare the complete chunks that `checksums` has not got yet with what their writer recorded, and take them in.

    BlockDamaged at the first that differs; those before it are in.
    """
    stop, beginning = complete_bytes(file, block), layout.beginning(block)
    size = len(beginning) + layout.chunk_count(stop) * CHECKSUM_BYTES
    header = os.pread(file.descriptor, size, layout.MAGIC_BYTES)
    if len(header) < size or not header.startswith(beginning):
        raise BlockDamaged("a fill's file is shorter than it was, or another block's")
    packed = header[len(beginning) :]
    extent = Extent("", layout.data_offset(block), block.length, packed)
    while (position := checksums.complete_bytes) < stop:
        count = min(VERIFIED_AT_ONCE_BYTES, stop - position)
        read_verified(file.descriptor, extent, position, count)
        checksums.take(extent, position + count)
