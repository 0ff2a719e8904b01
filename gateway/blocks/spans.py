"""Bytes of one block that are sent as they lie: the ways that need no reader, and no wait.

A range that lies in one block, indexed, verified and in memory, is given as it lies (`span_of`). All else is the range
reader's (reader.py).
"""

from __future__ import annotations

from contextlib import suppress

from gateway.blocks import layout
from gateway.blocks.block_file import BlockLease, OpenFiles
from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.layout import Extent
from gateway.blocks.rows import unpack_extent
from gateway.blocks.sources import restored
from gateway.blocks.store import BlockStore
from gateway.core.errors import BlockError, StoreUnavailable
from gateway.core.model import FileSpan, ObjectVersion, PinnedFileSpan
from gateway.telemetry import metrics


class _GivenBack:
    """A closed span's file: it sends nothing more."""

    def intact(self, offset: int, count: int) -> bool:
        return False

    stayed = intact

    async def restore(self, offset: int, count: int) -> memoryview | None:
        raise StoreUnavailable("the block's file is closed")


_GIVEN_BACK = _GivenBack()


class WarmSpan(PinnedFileSpan):
    """A range that lies in one block, and the account that its bytes go on when it is closed."""

    __slots__ = ("_cached", "_dependencies", "_extent", "_file", "_since", "_slot")

    def __init__(
        self,
        dependencies: CacheDependencies,
        extent: Extent,
        file: BlockLease,
        position: int,
        count: int,
        slot: str,
        *,
        cached: bool | None = True,
        since: int = -1,
    ) -> None:
        """`count` intact bytes at a position of the block; the lease becomes this span's to end.

        `since` is of `BlockFile.stayed`.
        `cached`: whether the bytes count as hits, or as misses; None: they are counted elsewhere.
        """
        self.span = FileSpan(file.descriptor, extent.offset + position, count, self)
        self._dependencies = dependencies
        self._extent = extent
        self._file = file
        self._slot = slot
        self._since = since
        self._cached = cached

    # As `objects.SpanFile`.

    def intact(self, offset: int, count: int) -> bool:
        file = self._file.file
        if self._cached is False and file.unwritten(self._dependencies.residency, offset, count):
            return True
        return file.intact(self._extent, offset - self._extent.offset, count)

    def stayed(self, offset: int, count: int) -> bool:
        if self._cached is False:
            return self.intact(offset, count)
        return self._file.file.stayed(self._extent, offset - self._extent.offset, count, self._since)

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return await restored(self._dependencies.threads, self._file, self._extent, offset, count)

    # As `objects.PinnedFileSpan`.

    def failed(self, error: Exception) -> None:
        """Stop trusting the file from which bytes could not be sent."""
        self._file.file.distrust()
        self._dependencies.open_files.drop(self._extent.file)
        if isinstance(error, OSError):
            self._dependencies.isolation.gone(error)

    def close(self) -> None:
        if self.span.file is _GIVEN_BACK:
            return
        self._file.close()
        if self._cached is not None:
            counter = metrics.CACHE_HIT_BYTES if self._cached else metrics.CACHE_MISS_BYTES
            counter.add(self.span.count, self._slot)
        self.span.file = _GIVEN_BACK  # and no circle of references is left for the collector


class HeldObject:
    """Spans of one version's blocks, for repeated reads: constant values are computed once."""

    __slots__ = ("_dependencies", "_ids", "_size_bytes", "_slot", "_version")

    def __init__(self, dependencies: CacheDependencies, version: ObjectVersion, slot: str) -> None:
        self._dependencies = dependencies
        self._version = version
        self._slot = slot
        self._size_bytes = dependencies.settings.block_size_of(slot)
        self._ids: dict[int, bytes] = {}

    def span(self, first: int, count: int) -> WarmSpan | UnreadSpan | None:
        """Return a span as `warm_span`; the caller counts the bytes. A few unverified bytes give an UnreadSpan."""
        dependencies, extent = self._dependencies, self._extent(first, count)
        if extent is None:
            return None
        position = first % self._size_bytes
        found = span_of(dependencies, extent, position, count, self._slot, cached=None)
        if found is None and count <= UNREAD_BYTES_MAX:
            return UnreadSpan(dependencies, extent, position, count, self._slot)
        return found

    def has(self, first: int, count: int) -> bool:
        """Return True if the index knows the block that holds all of the bytes."""
        return self._extent(first, count) is not None

    def _extent(self, first: int, count: int) -> Extent | None:
        dependencies, size_bytes = self._dependencies, self._size_bytes
        number = first // size_bytes
        if (first + count - 1) // size_bytes != number or not dependencies.isolation.readable:
            return None
        block_id = self._ids.get(number)
        if block_id is None:
            if len(self._ids) >= HELD_IDS_MAX:
                self._ids.clear()
            block_id = self._ids[number] = layout.block_id(self._version, number, size_bytes)
        return None if block_id in dependencies.ahead_marks else _held_extent(dependencies, block_id)


class UnreadSpan:
    """Bytes of one block that have to come from the device, or to be verified, before they are a `WarmSpan`."""

    __slots__ = ("_count", "_dependencies", "_extent", "_position", "_slot")

    def __init__(self, dependencies: CacheDependencies, extent: Extent, position: int, count: int, slot: str) -> None:
        self._dependencies = dependencies
        self._extent = extent
        self._position = position
        self._count = count
        self._slot = slot

    async def verified(self) -> WarmSpan | None:
        """Verify and return the bytes; None: an ordinary read finds out what is wrong. The caller counts them."""
        dependencies, extent, position, count = self._dependencies, self._extent, self._position, self._count
        file = dependencies.open_files.get(extent.file)
        if file is None:
            store = dependencies.directory.store
            await dependencies.threads.disk(
                _open_and_make_ready, dependencies.open_files, store, extent, position, count
            )
        else:
            with file:
                work = dependencies.threads.disk_holding(file, _make_ready, extent, position, count)
            await work
        return span_of(dependencies, extent, position, count, self._slot, cached=None)


UNREAD_BYTES_MAX = 1024 * 1024
"""Bytes read at once before the first of them is sent. More are read piece by piece (sources.py)."""


def _open_and_make_ready(open_files: OpenFiles, store: BlockStore, extent: Extent, position: int, count: int) -> None:
    with suppress(BlockError), open_files.opened(extent, store.open_published) as file:
        _make_ready(file, extent, position, count)


def _make_ready(file: BlockLease, extent: Extent, position: int, count: int) -> None:
    with suppress(BlockError):
        file.file.make_ready(extent, position, count)


def _held_extent(dependencies: CacheDependencies, block_id: bytes) -> Extent | None:
    index, held = dependencies.directory.index, dependencies.held_rows
    commit = index.last_commit.number()
    known = held.get(block_id)
    if known is not None and known[0] == commit:
        return unpack_extent(*known[1])
    try:
        found = index.rows(block_id)
    except StoreUnavailable:
        return None
    if found is None:
        return None
    if len(held) >= HELD_ROWS_MAX:
        held.clear()
    held[block_id] = commit, found
    return unpack_extent(*found)


HELD_IDS_MAX = 16
"""Limit for one object; 150 bytes each."""

HELD_ROWS_MAX = 16_384
"""Limit for all objects; 1 to 2 KiB each where blocks are large."""


def span_of(
    dependencies: CacheDependencies, extent: Extent, position: int, count: int, slot: str, *, cached: bool | None
) -> WarmSpan | None:
    file = dependencies.open_files.get(extent.file)
    if file is None:
        return None
    block_file = file.file
    since = block_file.withdrawals
    if not block_file.intact(extent, position, count):
        since = -1
        if not block_file.verify_at_once(extent, position, count):
            file.close()
            return None
    dependencies.accesses.note(extent.file)
    return WarmSpan(dependencies, extent, file, position, count, slot, cached=cached, since=since)
