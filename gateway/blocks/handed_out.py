"""Blocks whose files local clients read themselves (docs/local-reads.md): where they lie, and descriptors of the files.

A descriptor shows all that its file holds, now and later. A block file holds blocks of one object. A segment holds many
objects, and its process appends to it: a caller who may not read everything gets its descriptor only when it is sealed,
so that nothing more comes, and if the caller may read each object in it, whatever slots there were when it was written.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from forebay import wire
from gateway.blocks import layout
from gateway.blocks.block_file import check, chunk_aligned
from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.layout import Extent
from gateway.blocks.store import ALIGNMENT_BYTES, is_segment, walk
from gateway.core.errors import BlockDamaged, BlockError
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.disk.file_lease import FileLease, SharedFile
from gateway.telemetry import metrics

MayRead = Callable[[ObjectKey], bool]

BLOCKS_MAX = 16
"""Blocks of one read in one answer."""


class Place(NamedTuple):
    """One block of a read, and its row of the index, which says where it is."""

    file_id: bytes
    block_id: bytes
    extent: Extent
    row: bytes


class HandedOut(NamedTuple):
    """The first `size_bytes` bytes of the `asked` ones (first, number). `packed` is their part of an answer."""

    asked: tuple[int, int]
    packed: bytes
    size_bytes: int
    places: Sequence[Place]
    files: Sequence[bytes]
    """The ids of the places' files."""


HeldBlock = tuple[bytes, int, int, tuple[bytes, bytes]]
"""A block of a read: its id, the first wanted byte in it, the number of these bytes, and the rows of block and file."""


def hand_out(version: ObjectVersion, asked: tuple[int, int], blocks: Sequence[HeldBlock]) -> HandedOut:
    """Return what a client needs to read these bytes itself."""
    extents: list[bytes] = []
    places: list[Place] = []
    for block_id, position, count, rows in blocks:
        extent, file_id = layout.unpack_extent(*rows), rows[0][: layout.FILE_KEY_BYTES]
        start, stop = chunk_aligned(extent, position, count)
        packed = wire.EXTENT.pack(file_id, extent.offset + start, stop - start, position - start)
        extents += packed, extent.checksums_of(start, stop - start)
        places.append(Place(file_id, block_id, extent, rows[0]))
    etag, total = version.etag.encode("latin-1", "replace"), sum(count for _, _, count, _ in blocks)
    head = wire.OBJECT.pack(wire.GIVEN, len(etag), len(places), version.size_bytes, total)
    return HandedOut(asked, b"".join((head, etag, *extents)), total, places, [place.file_id for place in places])


def open_for_client(
    dependencies: CacheDependencies, extent: Extent, may_read: MayRead | None
) -> FileLease[SharedFile] | None:
    """Return a block's file for a client; None: it is gone, or the client may not have it. Blocks.

    `may_read` tells which objects the client may read; None: all.
    """
    # The description is of its own: a client that changes its flags or locks it does nothing to this process.
    with suppress(BlockError, OSError):  # who reads by HTTP finds out what is wrong
        lease = FileLease(SharedFile(dependencies.directory.store.open_description(extent.file)))
        if may_read is None or not is_segment(extent.file) or _may_be_shown(lease.descriptor, extent.file, may_read):
            return lease
    return None


def _may_be_shown(descriptor: int, file: str, may_read: MayRead) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # it is not sealed
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    size_bytes, stop = os.fstat(descriptor).st_size, 0
    for block, extent in walk(file, descriptor, size_bytes):
        # A bucket of that name at another home is another bucket, whose ids are others.
        is_of_this_home = layout.BlockIds(block.version).at(block.offset, block.length) == block.id
        if not (is_of_this_home and may_read(block.version.key)):
            return False
        stop = extent.offset + layout.aligned(extent.length, ALIGNMENT_BYTES)
    return stop >= size_bytes  # nobody knows what lies behind a torn record


async def drop_if_damaged(dependencies: CacheDependencies, places: Sequence[Place], slot: str) -> None:
    """Check blocks that a client found wrong, and drop the damaged ones."""
    for place in places:
        opened = dependencies.open_files.get(place.extent.file)
        if opened is not None:
            with opened:
                opened.file.distrust()
        with suppress(BlockError):  # told to the isolation: an HTTP reader drops it, once that is possible
            if await dependencies.threads.disk(_is_damaged, dependencies, place.extent):
                dependencies.open_files.drop(place.extent.file)
                drop = dependencies.directory.drop
                dropped = await dependencies.threads.index(drop, place.block_id, place.extent.file)
                metrics.CACHE_DAMAGED.add(dropped, slot)


def _is_damaged(dependencies: CacheDependencies, extent: Extent) -> bool:
    try:
        with dependencies.directory.store.open_published(extent) as file:
            check(file.descriptor, extent, 0, extent.length)
    except BlockDamaged:
        return True
    return False
