"""The short way to bytes that are here: in one block, indexed, verified and in memory. Nothing is waited for.

Whatever else there may be to do, a fill, a look at the disk, the next blocks of a reader that goes on, is the range
reader's (reader.py).
"""

from __future__ import annotations

from gateway.blocks import layout
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.layout import Extent
from gateway.blocks.reading.reading_tools import ReadingTools
from gateway.blocks.reading.sources import restored
from gateway.errors import StoreUnavailable
from gateway.objects import ByteRange, FileSpan, HeldSpan, ObjectVersion


class WarmSpan(HeldSpan):
    """A range that lies in one block, and the account that its bytes go on when it is closed."""

    __slots__ = ("_cached", "_extent", "_file", "_slot", "_tools")

    def __init__(
        self,
        tools: ReadingTools,
        extent: Extent,
        file: BlockLease,
        position: int,
        count: int,
        slot: str,
        *,
        cached: bool = True,
    ) -> None:
        """`count` intact bytes at a position of the block; the lease becomes this span's to end.

        `cached`: whether the bytes count as hits.
        """
        self.span = FileSpan(file.descriptor, extent.offset + position, count, self)
        self._tools = tools
        self._extent = extent
        self._file = file
        self._slot = slot
        self._cached = cached

    # As `objects.SpanFile`.

    def intact(self, offset: int, count: int) -> bool:
        return self._file.file.intact(self._extent, offset - self._extent.offset, count)

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return await restored(self._tools.threads, self._file, self._extent, offset, count)

    # As `objects.HeldSpan`.

    def failed(self, error: Exception) -> None:
        """What could not be sent from its file is not believed again."""
        self._file.file.distrust()
        self._tools.open_files.drop(self._extent.file)
        if isinstance(error, OSError):
            self._tools.isolation.gone(error)

    def close(self) -> None:
        if not self._file.is_open:
            return
        self._file.close()
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
    file = tools.open_files.get(extent.file)
    if file is None:
        return None
    position = first - number * size_bytes
    if not file.file.intact(extent, position, byte_range.length):
        file.close()
        return None
    tools.accesses.note(extent.file)
    return WarmSpan(tools, extent, file, position, byte_range.length, slot)
