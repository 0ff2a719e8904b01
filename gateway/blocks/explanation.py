"""Explanations why an object is read from the origin: the cached parts of it, as far as the index remembers."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from gateway.blocks import layout
from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.plan import SUB_BLOCK_BYTES, are_used
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion

BLOCKS_EXPLAINED_MAX = 100_000
"""Limit of blocks of one object that are looked at: that takes a second."""

_AT_ONCE = 1000
"""Looked up in one transaction: long ones keep the index from using its pages again."""

MISSING_SHOWN = 20


class Presence(NamedTuple):
    """Cached parts of one version.

    `looked_at` of its `blocks` were looked at: `here` are complete, `partly` have smaller pieces, `evicted` were
    cached. `missing` are the first runs of bytes of blocks that are not complete.
    """

    blocks: int
    looked_at: int
    here: int
    partly: int
    evicted: int
    here_bytes: int
    missing: list[ByteRange]


class Explanation(NamedTuple):
    """`here` of the version that is known; None: none is. `why_not_kept` None: it is kept."""

    here: Presence | None
    holding: Holding
    why_not_kept: str | None


class Holding(NamedTuple):
    """Cached blocks and pieces of blocks of an object, of any version."""

    blocks: int
    size_bytes: int


def why_not_kept(dependencies: CacheDependencies, size_bytes: int | None, slot: str) -> str | None:
    """In words; None: it is kept. `size_bytes`: None where it is not known."""
    if not dependencies.isolation.writable:
        return f"the cache directory takes nothing: {dependencies.isolation.state}"
    if size_bytes is not None and not dependencies.settings.keeps(slot, size_bytes):
        return "it is larger than the objects that its slot keeps (max_cached_object_size)"
    return None


def presence(dependencies: CacheDependencies, version: ObjectVersion, slot: str) -> Presence:
    """Blocks; StoreUnavailable."""
    size_bytes, index, ids = (
        dependencies.settings.block_size_of(slot),
        dependencies.directory.index,
        layout.BlockIds(version),
    )
    blocks = -(-version.size_bytes // size_bytes)
    looked_at = min(blocks, BLOCKS_EXPLAINED_MAX)
    counts, here_bytes, missing = Counter[str](), 0, list[ByteRange]()
    pieces_left = BLOCKS_EXPLAINED_MAX if are_used(size_bytes) and version.size_bytes > SUB_BLOCK_BYTES else 0
    for first in range(0, looked_at, _AT_ONCE):
        some = [
            layout.block_at(version, number, size_bytes, ids)
            for number in range(first, min(first + _AT_ONCE, looked_at))
        ]
        for block, state in zip(some, index.states([block.id for block in some]), strict=True):
            if state == "here":
                counts["here"] += 1
                here_bytes += block.length
                continue
            numbers = layout.block_numbers(block.range, SUB_BLOCK_BYTES)
            pieces = [layout.block_at(version, number, SUB_BLOCK_BYTES, ids) for number in numbers[:pieces_left]]
            pieces_left -= len(pieces)
            states = index.states([piece.id for piece in pieces])
            found = [piece.length for piece, one in zip(pieces, states, strict=True) if one == "here"]
            here_bytes += sum(found)
            counts["partly"] += bool(found)
            counts["evicted"] += not found and "evicted" in (state, *states)
            if missing and missing[-1].stop == block.offset:
                missing[-1] = ByteRange(missing[-1].first, block.range.last)
            elif len(missing) < MISSING_SHOWN:
                missing.append(block.range)
    return Presence(blocks, looked_at, counts["here"], counts["partly"], counts["evicted"], here_bytes, missing)


def holding(dependencies: CacheDependencies, key: ObjectKey) -> Holding:
    """Blocks; StoreUnavailable."""
    return Holding(*dependencies.directory.index.held_of(layout.object_id(key), BLOCKS_EXPLAINED_MAX))
