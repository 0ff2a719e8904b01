"""Ranges that are complete before the first byte of them is sent, with the checksums of their chunks: for other nodes.

    a block or sub-block on disk has all of it? → its file, verified
    else the fetch of any reader: then its file; a small range from memory, as its bytes come

So what another node gets never breaks off because the origin does, and has a checksum for each byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import NamedTuple

from gateway.blocks import layout
from gateway.blocks.block_file import check, read_verified
from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.layout import CHECKSUM_BYTES, CHUNK_BYTES, Extent
from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.blocks.plan import SUB_BLOCK_BYTES, ReadPlan, are_used
from gateway.blocks.reader import RangeReader
from gateway.blocks.spans import READ_BYTES, UnreadSpan, WarmSpan, read_leased, span_of
from gateway.core.errors import BlockDamaged, BlockError, OriginBusy, StoreUnavailable
from gateway.core.model import BodyStream, BorrowedBuffer, ByteRange, FileSpan, ObjectVersion
from gateway.origin.client import Purpose
from gateway.origin.peer_protocol import COPY_ALONE, chunk_checksums
from gateway.telemetry import metrics

_ATTEMPTS = 3
"""A block may be evicted, or found damaged, between its fetch and its use."""

ARRIVES_SECONDS_MAX = 2.0
"""Seconds for which another node waits for bytes that are arriving here."""

_LOOK_SECONDS = 0.005

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class CompleteRange(NamedTuple):
    """The bytes of a range. `checksums` has the CRC32C of each 64 KiB from its first byte on.

    `was_cached`: they were on disk. A stream verifies each piece as it reads it.
    """

    body: WarmSpan | bytes | BodyStream
    checksums: bytes
    was_cached: bool


class _Place(NamedTuple):
    """A block or sub-block on disk that has all of a range, and where the range is in it."""

    block_id: bytes
    extent: Extent
    position: int


class CompleteRanges:
    """Reads of one process's cache for other nodes. Ranges begin on the grid of chunks, and lie in one block."""

    def __init__(self, dependencies: CacheDependencies) -> None:
        self._dependencies = dependencies

    def may_be_asked(self, byte_range: ByteRange, slot: str) -> bool:
        size_bytes = self._dependencies.settings.block_size_of(slot)
        return byte_range.first % CHUNK_BYTES == 0 and byte_range.first // size_bytes == byte_range.last // size_bytes

    def now(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> CompleteRange | None:
        """Return a range that needs no wait; None: call `get`."""
        place = self._place(version, byte_range, slot)
        if place is None:
            return None
        with suppress(BlockError):
            return self._of_file(place, byte_range.length, slot)
        return None

    async def get(
        self,
        version: ObjectVersion,
        byte_range: ByteRange,
        *,
        slot: str,
        purpose: Purpose,
        answer: UnpinnedResponse | None = None,
    ) -> CompleteRange:
        """Return a range, fetched from the origin if it is missing.

        Raises as `BlockCache.open_range`, and OriginBusy if the disk does not take what is too large for memory.
        """
        was_cached = True
        for _ in range(_ATTEMPTS):
            complete = await self._on_disk(version, byte_range, slot)
            if complete is not None:
                return complete._replace(was_cached=was_cached)
            was_cached = False
            content = await self._fetched(version, byte_range, slot, purpose, answer)
            if content is not None:
                return CompleteRange(content, chunk_checksums(content), was_cached=False)
        raise OriginBusy("the disk does not keep the block")

    async def cached(
        self, version: ObjectVersion, byte_range: ByteRange, *, slot: str, is_arriving: bool
    ) -> CompleteRange | None:
        """Return a range that is on disk, or if it `is_arriving` from another node, will be in moments; else None."""
        until = self._dependencies.clock.monotonic() + (ARRIVES_SECONDS_MAX if is_arriving else 0.0)
        while (complete := await self._on_disk(version, byte_range, slot)) is None:
            if self._dependencies.clock.monotonic() >= until or not self._is_coming(version, byte_range, slot):
                return None
            await self._dependencies.clock.sleep(_LOOK_SECONDS)
        return complete

    async def _on_disk(self, version: ObjectVersion, byte_range: ByteRange, slot: str) -> CompleteRange | None:
        place = self._place(version, byte_range, slot)
        return await self._verified(place, byte_range.length, slot) if place is not None else None

    def _is_coming(self, version: ObjectVersion, byte_range: ByteRange, slot: str) -> bool:
        """Return True if a process fetches what has the range from another node."""
        size_bytes = self._dependencies.settings.block_size_of(slot)
        sizes = (size_bytes, SUB_BLOCK_BYTES) if are_used(size_bytes) else (size_bytes,)
        blocks = (layout.block_at(version, byte_range.first // size, size) for size in sizes)
        return any(self._dependencies.fetches.is_anywhere(block, COPY_ALONE) for block in blocks)

    async def drop_if_damaged(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> None:
        """Verify what is on disk of a range that came damaged to another node."""
        place = self._place(version, byte_range, slot)
        if place is not None:
            await self._is_dropped(place, slot)

    def _place(self, version: ObjectVersion, byte_range: ByteRange, slot: str) -> _Place | None:
        dependencies, first = self._dependencies, byte_range.first
        if not dependencies.isolation.readable:
            return None
        size_bytes, index = dependencies.settings.block_size_of(slot), dependencies.directory.index
        try:
            block_id = layout.block_id(version, first // size_bytes, size_bytes)
            extent = index.lookup(block_id)
            if extent is not None:
                return _Place(block_id, extent, first % size_bytes)
            if not are_used(size_bytes) or first // SUB_BLOCK_BYTES != byte_range.last // SUB_BLOCK_BYTES:
                return None
            block_id = layout.block_id(version, first // SUB_BLOCK_BYTES, SUB_BLOCK_BYTES)
            extent = index.lookup(block_id)
        except StoreUnavailable:
            return None
        return _Place(block_id, extent, first % SUB_BLOCK_BYTES) if extent is not None else None

    def _of_file(self, place: _Place, count: int, slot: str, span: WarmSpan | None = None) -> CompleteRange | None:
        """Return the bytes as they lie in the file, if they are verified and in memory. BlockDamaged."""
        extent, position = place.extent, place.position
        span = span or span_of(self._dependencies, extent, position, count, slot, cached=None)
        if span is None:
            return None
        try:
            return CompleteRange(span, _packed(span.span.descriptor, extent, position, count), was_cached=True)
        except BaseException:
            span.close()
            raise

    async def _verified(self, place: _Place, count: int, slot: str) -> CompleteRange | None:
        """Return the bytes of a place; None: they were damaged or gone, and are no longer in the index."""
        dependencies, (_, extent, position) = self._dependencies, place
        with suppress(BlockDamaged):
            complete = self._of_file(place, count, slot)
            if complete is not None:
                return complete
            span = await UnreadSpan(dependencies, extent, position, count, slot).verified()
            if span is not None:
                return self._of_file(place, count, slot, span)
        if await self._is_dropped(place, slot):
            return None
        last = await dependencies.threads.disk(self._packed_of_file, extent, position, count)
        return CompleteRange(self._pieces(extent, position, count), last, was_cached=True)

    def _packed_of_file(self, extent: Extent, position: int, count: int) -> bytes:
        dependencies = self._dependencies
        with dependencies.open_files.opened(extent, dependencies.directory.store.open_published) as file:
            return _packed(file.descriptor, extent, position, count)

    async def _pieces(self, extent: Extent, position: int, count: int) -> BodyStream:
        """Yield bytes that cannot be sent as they lie, because they do not stay in memory or the system cannot tell."""
        dependencies, stop = self._dependencies, position + count
        file = await dependencies.threads.open(dependencies.directory.store.open_published, extent)
        with file:
            while position < stop:
                size = min(stop - position, READ_BYTES)
                yield await dependencies.threads.disk_holding(file, read_leased, extent, position, size)
                position += size

    async def _is_dropped(self, place: _Place, slot: str) -> bool:
        """Read all of a block, and drop it if it is damaged or gone. Return whether it was."""
        dependencies, extent = self._dependencies, place.extent
        try:
            await dependencies.threads.disk(self._check, extent)
        except BlockDamaged:
            dependencies.open_files.drop(extent.file)
            if not dependencies.isolation.writable:
                raise dependencies.isolation.refuse_writing() from None
            if await dependencies.threads.index(dependencies.directory.drop, place.block_id, extent.file):
                metrics.CACHE_DAMAGED.add(1, slot)
            return True
        return False

    def _check(self, extent: Extent) -> None:
        dependencies = self._dependencies
        with dependencies.open_files.opened(extent, dependencies.directory.store.open_published) as file:
            check(file.descriptor, extent, 0, extent.length)

    async def _fetched(
        self,
        version: ObjectVersion,
        byte_range: ByteRange,
        slot: str,
        purpose: Purpose,
        answer: UnpinnedResponse | None,
    ) -> bytes | None:
        """Fetch what is missing of a range, and return it; None: it is too large for memory, and on disk."""
        dependencies, is_small = self._dependencies, byte_range.length <= READ_BYTES
        if not is_small and not (dependencies.isolation.writable and dependencies.is_writable):
            raise OriginBusy("the disk takes nothing")
        plan = ReadPlan(dependencies, version, byte_range, slot, _NO_HEADERS, purpose, answer, is_for_peer=True)
        reader, content = RangeReader(plan), bytearray()
        try:
            await reader.start()
            async with aclosing(reader.body()) as body:
                async for piece in body:
                    if is_small:
                        await _add(piece, content)
                    elif reader.past_the_cache:
                        raise OriginBusy("the disk does not take the block")
        finally:
            await reader.aclose()
        if is_small:
            return bytes(content)
        fill = dependencies.fetches.join(plan.block(plan.numbers.start), _NO_HEADERS, purpose)
        if fill is not None:
            try:
                await fill.over()
            finally:
                fill.leave(purpose)
            if not fill.kept:
                raise OriginBusy("the disk has not taken the block")
        return None


async def _add(piece: bytes | memoryview | FileSpan | BorrowedBuffer, content: bytearray) -> None:
    if isinstance(piece, FileSpan):
        async with aclosing(piece.read()) as parts:
            async for part in parts:
                content += part
    else:
        content += piece.content if isinstance(piece, BorrowedBuffer) else piece


def _packed(descriptor: int, extent: Extent, position: int, count: int) -> bytes:
    """Return the checksums of verified bytes, as they were computed when the origin sent them. BlockDamaged."""
    stop = position + count
    first, behind = position // CHUNK_BYTES, layout.chunk_count(stop)
    packed = extent.checksums[first * CHECKSUM_BYTES : behind * CHECKSUM_BYTES]
    rest = stop % CHUNK_BYTES
    if rest and stop != extent.length:
        part = read_verified(descriptor, extent, stop - rest, rest)
        return packed[:-CHECKSUM_BYTES] + chunk_checksums(part)
    return packed
