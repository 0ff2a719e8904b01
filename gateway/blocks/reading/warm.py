"""The short way to bytes that are here: in one block, indexed, verified and in memory. Nothing is waited for.

Whatever else there may be to do, a fill, a look at the disk, the next blocks of a reader that goes on, is the range
reader's (reader.py).
"""

from __future__ import annotations

from gateway.blocks import layout
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.verification import fingerprint
from gateway.blocks.layout import Extent
from gateway.blocks.reading.reading_tools import ReadingTools
from gateway.errors import BlockDamaged, StoreUnavailable
from gateway.objects import ByteRange, FileSpan, HeldSpan, ObjectVersion


class WarmSpan(HeldSpan):
    """A range that lies in one block, and the account that its bytes go on when it is closed."""

    __slots__ = ("_block_id", "_cached", "_extent", "_file", "_slot", "_tools")

    def __init__(
        self,
        tools: ReadingTools,
        block_id: bytes,
        extent: Extent,
        file: BlockLease,
        span: FileSpan,
        slot: str,
        *,
        cached: bool = True,
    ) -> None:
        """`file` becomes this span's to release. `cached`: whether the bytes count as hits."""
        self.span = span
        self._tools = tools
        self._block_id = block_id
        self._extent = extent
        self._file: BlockLease | None = file
        self._slot = slot
        self._cached = cached

    def failed(self, error: Exception) -> None:
        """What could not be sent from its file is not believed again."""
        tools = self._tools
        tools.verified.forget(self._block_id)
        tools.segments.drop(self._extent.file)
        if isinstance(error, OSError):
            tools.isolation.gone(error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        file.close()
        observer = self._tools.observer
        (observer.hit_bytes if self._cached else observer.miss_bytes)(self._slot, self.span.count)


def warm_span(tools: ReadingTools, version: ObjectVersion, byte_range: ByteRange, slot: str) -> WarmSpan | None:
    """The bytes of a range, if they can be sent at once; None: open a reader."""
    size_bytes, first = tools.settings.block_size_of(slot), byte_range.first
    number = first // size_bytes
    if byte_range.last // size_bytes != number or not tools.isolation.readable:
        return None
    block_id = layout.block_id(version, number, size_bytes)
    if block_id in tools.ahead_marks:
        return None
    try:
        extent = tools.directory.index.lookup(block_id)
    except StoreUnavailable:
        return None
    if extent is None:
        return None
    file = _open(tools, block_id, extent)
    if file is None:
        return None
    span = _span(tools, block_id, extent, file, first - number * size_bytes, byte_range.length)
    if span is None:
        file.close()
        return None
    tools.accesses.note(extent.file)
    return WarmSpan(tools, block_id, extent, file, span, slot)


def _open(tools: ReadingTools, block_id: bytes, extent: Extent) -> BlockLease | None:
    """The block's file, where opening it does not touch the disk."""
    file = tools.segments.get(extent.file)
    if file is not None or not tools.verified.knows(block_id):
        return file
    try:
        file = tools.directory.store.open_published(extent)
    except (BlockDamaged, StoreUnavailable):
        return None  # the reader meets it again, and does what is to be done
    tools.segments.keep(extent.file, file)
    return file


def _span(
    tools: ReadingTools, block_id: bytes, extent: Extent, file: BlockLease, position: int, count: int
) -> FileSpan | None:
    """The bytes as they lie, if all of them are verified and in memory."""
    descriptor, offset = file.descriptor, extent.offset + position
    try:
        verified = tools.verified.of(block_id, fingerprint(descriptor))
    except OSError:
        return None
    if verified.covers(position, count) and tools.residency.resident(descriptor, offset, count):
        return FileSpan(descriptor, offset, count)
    return None
