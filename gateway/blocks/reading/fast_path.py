"""The short ways to bytes for which nobody has to wait. Whatever else there may be to do is the range reader's.

A range that lies in one block, indexed, verified and in memory, is given as it lies. A small object of which nothing
was known is given from memory when its first response has brought all of it, while it goes to disk."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.blocks import layout
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.blocks.layout import Extent
from gateway.blocks.reading.sources import ReadDependencies, restored
from gateway.errors import StoreUnavailable
from gateway.objects import ByteRange, FileSpan, HeldSpan, ObjectVersion


class _GivenBack:
    """What a span's file is once it is closed: nothing more may be sent of it."""

    def intact(self, offset: int, count: int) -> bool:
        return False

    async def restore(self, offset: int, count: int) -> memoryview | None:
        raise StoreUnavailable("the block's file is closed")


_GIVEN_BACK = _GivenBack()


class WarmSpan(HeldSpan):
    """A range that lies in one block, and the account that its bytes go on when it is closed."""

    __slots__ = ("_cached", "_extent", "_file", "_slot", "_tools")

    def __init__(
        self,
        tools: ReadDependencies,
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
        self.span.file = _GIVEN_BACK  # and no circle of references is left for the collector


def warm_span(tools: ReadDependencies, version: ObjectVersion, byte_range: ByteRange, slot: str) -> WarmSpan | None:
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


GIVEN_BYTES_MAX = 128 * 1024
"""What the client's socket does not take of them is copied, for every client that reads slowly."""


def arrived(
    tools: ReadDependencies,
    version: ObjectVersion,
    byte_range: ByteRange,
    slot: str,
    headers: Mapping[str, str],
    answer: UnpinnedResponse,
) -> memoryview | None:
    """The bytes of a range, and their block's fill begun that lacks nothing but the disk; None: open a reader."""
    size_bytes, settings = version.size_bytes, tools.settings
    if answer.range.length != size_bytes or size_bytes > min(GIVEN_BYTES_MAX, settings.block_size_of(slot)):
        return None
    if not (settings.keeps(slot, size_bytes) and tools.isolation.readable):
        return None
    block = layout.block_at(version, 0, size_bytes)
    content = tools.fetches.start_inline(block, slot, headers, answer)
    if content is None:
        return None
    tools.observer.miss_bytes(slot, byte_range.length)
    return content[byte_range.first : byte_range.stop]
