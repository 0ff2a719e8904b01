"""Ranges whose checksums are known before the first byte is sent, for other nodes.

    on disk, verified and in memory → its file, now
    on disk → its bytes as they are verified: what is damaged is fetched again on the way
    else the fetch of any reader: a small range from memory, as its bytes come, a large one when the disk has all of it

So what another node gets never waits for the origin in the middle, and has a checksum for each byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import NamedTuple

from gateway.blocks import layout
from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.layout import CHUNK_BYTES, Extent
from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.blocks.plan import PEER_PARTS_BYTES_MAX, SUB_BLOCK_BYTES, ReadPlan, are_used
from gateway.blocks.reader import RangeReader, bring
from gateway.blocks.spans import UnreadSpan, WarmSpan, span_of
from gateway.core.errors import OriginBusy, StoreUnavailable
from gateway.core.model import BodyStream, BorrowedBuffer, ByteRange, FileSpan, ObjectVersion
from gateway.origin.client import Purpose
from gateway.origin.peer_protocol import COPY_ALONE, chunk_checksums

_ATTEMPTS = 3
"""A block may be evicted between its fetch and its use."""

ARRIVES_SECONDS_MAX = 2.0
"""Seconds for which another node waits for bytes that are arriving here."""

_LOOK_SECONDS = 0.005

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class CompleteRange(NamedTuple):
    """The bytes of a range. `checksums` has the CRC32C of each 64 KiB from its first byte on.

    `was_cached`: the bytes were on disk. Close `reader` after a body that is a stream.
    """

    body: WarmSpan | bytes | BodyStream
    checksums: bytes
    was_cached: bool
    reader: RangeReader | None = None


class CompleteRanges:
    """Reads of one process's cache for other nodes. Ranges are whole chunks, the last of an object included."""

    def __init__(self, dependencies: CacheDependencies) -> None:
        self._dependencies = dependencies

    def may_be_asked(self, version: ObjectVersion, byte_range: ByteRange, slot: str) -> bool:
        """Return True if a range is of whole chunks of one block."""
        size_bytes, stop = self._dependencies.settings.block_size_of(slot), byte_range.stop
        if byte_range.first % CHUNK_BYTES or (stop % CHUNK_BYTES and stop != version.size_bytes):
            return False
        return byte_range.first // size_bytes == byte_range.last // size_bytes

    def are_copied(self, slot: str) -> bool:
        """Return whether nodes may keep what others send them."""
        return self._dependencies.settings.copies_of(slot) != "none"

    def now(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> CompleteRange | None:
        """Return a range that needs no wait; None: call `get`."""
        place = self._place(version, byte_range, slot)
        if place is None:
            return None
        span = span_of(self._dependencies, *place, byte_range.length, slot, cached=None)
        return _of_span(span) if span is not None else None

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
        dependencies, is_small = self._dependencies, byte_range.length <= PEER_PARTS_BYTES_MAX
        for number in range(_ATTEMPTS):
            place = self._place(version, byte_range, slot)
            plan = ReadPlan(dependencies, version, byte_range, slot, _NO_HEADERS, purpose, answer, is_for_peer=True)
            if place is not None or is_small:
                checksums = place[0].checksums_of(place[1], byte_range.length) if place is not None else b""
                complete = await _read(plan, checksums, is_small=is_small)
                if complete is not None:
                    return complete._replace(was_cached=complete.was_cached and not number)
            elif not dependencies.is_writable or not (await bring(plan))[1]:
                break
        raise OriginBusy("the disk does not take the block")

    async def cached(
        self, version: ObjectVersion, byte_range: ByteRange, *, slot: str, is_arriving: bool
    ) -> CompleteRange | None:
        """Return a range that is on disk, or if it `is_arriving` from another node, will be in moments; else None."""
        until = self._dependencies.clock.monotonic() + (ARRIVES_SECONDS_MAX if is_arriving else 0.0)
        while (place := self._place(version, byte_range, slot)) is None:
            if self._dependencies.clock.monotonic() >= until or not self._is_coming(version, byte_range, slot):
                return None
            await self._dependencies.clock.sleep(_LOOK_SECONDS)
        span = await UnreadSpan(self._dependencies, *place, byte_range.length, slot).verified()
        return _of_span(span) if span is not None else None

    def doubt(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> None:
        """Have a range that came damaged to another node verified, before any byte of it is sent again."""
        place = self._place(version, byte_range, slot)
        file = self._dependencies.open_files.get(place[0].file) if place is not None else None
        if file is not None:
            with file:
                file.file.distrust()

    def _is_coming(self, version: ObjectVersion, byte_range: ByteRange, slot: str) -> bool:
        """Return True if a process fetches what has the range from another node."""
        size_bytes = self._dependencies.settings.block_size_of(slot)
        sizes = (size_bytes, SUB_BLOCK_BYTES) if are_used(size_bytes) else (size_bytes,)
        blocks = (layout.block_at(version, byte_range.first // size, size) for size in sizes)
        return any(self._dependencies.fetches.is_anywhere(block, COPY_ALONE) for block in blocks)

    def _place(self, version: ObjectVersion, byte_range: ByteRange, slot: str) -> tuple[Extent, int] | None:
        """Return the block or sub-block on disk that has all of a range, and where the range is in it."""
        dependencies, first, last = self._dependencies, byte_range.first, byte_range.last
        if not dependencies.isolation.readable:
            return None
        size_bytes = dependencies.settings.block_size_of(slot)
        sizes = (size_bytes, SUB_BLOCK_BYTES) if are_used(size_bytes) else (size_bytes,)
        for size in sizes:
            if first // size != last // size:
                return None
            try:
                extent = dependencies.directory.index.lookup(layout.block_id(version, first // size, size))
            except StoreUnavailable:
                return None
            if extent is not None:
                return extent, first % size
        return None


async def _read(plan: ReadPlan, checksums: bytes, *, is_small: bool) -> CompleteRange | None:
    """Read a range whose checksums are known if it is on disk; None: it is not, and too large for memory."""
    reader, is_lent = RangeReader(plan), False
    try:
        await reader.start()
        was_cached, span = reader.outcome == "hit", reader.whole()
        if span is not None:
            return CompleteRange(span, span.checksums, was_cached)
        if is_small:
            content = await _content(reader)
            return CompleteRange(content, chunk_checksums(content), was_cached)
        if not was_cached:
            return None
        is_lent = True
        return CompleteRange(reader.body(), checksums, was_cached, reader)
    finally:
        if not is_lent:
            await reader.aclose()


async def _content(reader: RangeReader) -> bytes:
    content = bytearray()
    async with aclosing(reader.body()) as body:
        async for piece in body:
            if isinstance(piece, FileSpan):
                async with aclosing(piece.read()) as parts:
                    async for part in parts:
                        content += part
            else:
                content += piece.content if isinstance(piece, BorrowedBuffer) else piece
    return bytes(content)


def _of_span(span: WarmSpan) -> CompleteRange:
    return CompleteRange(span, span.checksums, was_cached=True)
