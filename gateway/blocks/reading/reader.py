"""Reading one range: block by block, each from wherever it is now (source_opening.py).

What goes wrong on the way is mended where the reader stands: a damaged block is dropped and filled again, and where the
cache directory cannot be used the rest of the range comes straight from the origin, pinned to the same version. Only
the origin's failures end a read.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.blocks.filling.inflight_fetch import BlockPublished, MovedToFile
from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.blocks.reading.going_on import GoingOn
from gateway.blocks.reading.reading_tools import ReadingTools
from gateway.blocks.reading.source_opening import Outcome, SourceOpener
from gateway.blocks.reading.sources import BlockSource, FillSource, OriginSource, Source
from gateway.blocks.reading.wanted import Wanted
from gateway.blocks.reading.warm import WarmSpan
from gateway.errors import BlockDamaged, StoreUnavailable
from gateway.objects import BodyPiece, BodyStream, ByteRange, FileSpan, LentBytes, ObjectVersion
from gateway.origin.client import Purpose

REFILLS_MAX = 3
"""A block found damaged this often in one read is not tried again: the disk eats what it is given."""


class RangeReader:
    """One range of one version, read once. Made by `BlockCache.open_range`.

    Holds one open file at a time, at most READ_BYTES of memory, and nothing after `aclose`.
    """

    def __init__(
        self,
        tools: ReadingTools,
        version: ObjectVersion,
        byte_range: ByteRange,
        slot: str,
        headers: Mapping[str, str],
        purpose: Purpose = Purpose.LIVE,
        answer: UnpinnedResponse | None = None,
    ) -> None:
        self.outcome: Outcome = "miss"
        block_size, too_large = tools.settings.block_size_of(slot), not tools.settings.keeps(slot, version.size_bytes)
        self._tools = tools
        self._wanted = Wanted(version, byte_range, slot, dict(headers), purpose, answer, block_size, too_large)
        self._opener = SourceOpener(tools, self._wanted)
        self._ahead = GoingOn(tools, self._wanted, self._opener.fetched)
        self._source: Source | None = None
        self._given = 0
        self._damages = 0

    def is_cached(self) -> bool:
        """Whether every block of the range is in the index; nothing is opened for the answer."""
        try:
            return self._opener.look_up() == "hit"
        except StoreUnavailable:
            return False

    @property
    def past_the_cache(self) -> bool:
        """Whether the bytes now come straight from the origin, because the directory cannot take them."""
        return isinstance(self._source, OriginSource)

    async def start(self) -> None:
        """Decide the outcome and have the first bytes on their way. Raises what the origin says against it."""
        first, several = self._wanted.range.first, len(self._wanted.numbers) > 1
        try:
            self.outcome = self._opener.look_up() if several else "hit"
            source: Source = await self._open(first)
            if self._lacks_patches(source):
                self.outcome = "partial"
        except StoreUnavailable as error:
            source = await self._open_origin(first, error)
        if self.outcome == "hit" and not source.cached:
            self.outcome = "partial" if several else "miss"
        if isinstance(source, BlockSource):
            self._ahead.came_to(source.block)

    def _lacks_patches(self, source: Source) -> bool:
        """Whether patches are missing behind the first one, which is there."""
        if not self._opener.patched or not source.cached or source.stop >= self._wanted.range.stop:
            return False
        return self._opener.look_up() == "miss"

    def whole(self) -> WarmSpan | None:
        """The whole range as it lies in one file, where it does, verified and in memory; None otherwise.

        Whoever takes it, and closes it, does without this reader.
        """
        source, wanted = self._source, self._wanted.range
        if not isinstance(source, BlockSource) or source.stop < wanted.stop:
            return None
        if source.span(wanted.first, wanted.stop) is None:
            return None
        self._source = None
        position, slot = wanted.first - source.block.offset, self._wanted.slot
        file, cached = source.take_file(), source.cached
        return WarmSpan(self._tools, source.extent, file, position, wanted.length, slot, cached=cached)

    async def body(self) -> BodyStream:
        """The bytes of the range, in order; all of them, or an exception."""
        position = self._wanted.range.first
        try:
            while position < self._wanted.range.stop:
                piece = await self._next(position)
                if isinstance(piece, LentBytes):
                    yield piece
                    size = piece.taken
                    self._given += size
                else:
                    size = piece.count if isinstance(piece, FileSpan) else len(piece)
                    self._given += size
                    yield piece
                position += size
        finally:
            await self.aclose()

    def file_failed(self, error: Exception) -> None:
        """What `body` gave as it lies in a file could not be sent from there: it is not believed again."""
        if isinstance(self._source, BlockSource):
            self._source.distrust()
            self._tools.open_files.drop(self._source.extent.file)
        if isinstance(error, OSError) and not self.past_the_cache:
            self._tools.isolation.gone(error)

    async def aclose(self) -> None:
        """Let go of everything. Idempotent; the fills that this reader has begun go on."""
        source, self._source = self._source, None
        if source is None:
            return
        count, self._given = self._given, 0
        if count:
            observer = self._tools.observer
            (observer.hit_bytes if source.cached else observer.miss_bytes)(self._wanted.slot, count)
        await source.close()

    async def _next(self, position: int) -> BodyPiece:
        while True:
            try:
                piece = await self._read(position)
            except BlockPublished:
                await self.aclose()
            except StoreUnavailable as error:
                await self._open_origin(position, error)
            else:
                if piece is not None:
                    return piece

    async def _read(self, position: int) -> BodyPiece | None:
        """The bytes at a position; None: look again, their block was found damaged, and dropped, or has moved."""
        try:
            source = await self._source_at(position)
            piece = await source.read(position, min(source.stop, self._wanted.range.stop))
            if isinstance(source, BlockSource) and source.from_device:
                self._ahead.comes_from_device(source.stop)
            return piece
        except MovedToFile as landed:
            await self._go_on_in_file(landed)
            return None
        except BlockDamaged:
            await self._drop_damaged()
            return None

    async def _source_at(self, position: int) -> Source:
        source = self._source
        if source is None or position >= source.stop:
            await self.aclose()
            source = await self._open(position)
        if not self._opener.patched and not isinstance(source, OriginSource):
            self._ahead.keep_on(position, beyond=isinstance(source, FillSource))
        return source

    async def _open(self, position: int) -> BlockSource | FillSource:
        """StoreUnavailable when there is no source but the origin."""
        self._source = source = await self._opener.open(position)
        return source

    async def _open_origin(self, position: int, why: StoreUnavailable) -> OriginSource:
        await self.aclose()
        self._source = source = await self._opener.open_origin(position, why)
        return source

    async def _go_on_in_file(self, landed: MovedToFile) -> None:
        """Read the rest of a small block, that was in memory, like any other; it is the same use of it."""
        fill = self._source
        assert isinstance(fill, FillSource)  # noqa: S101 - no other source raises it
        self._source = self._opener.in_file(fill.block, landed.extent, landed.file.share(), cached=fill.cached)
        await fill.close()

    async def _drop_damaged(self) -> None:
        """Drop the block that has just been found damaged; StoreUnavailable when this goes on and on."""
        source = self._source
        self._damages += 1
        await self.aclose()
        if isinstance(source, BlockSource):
            await self._opener.drop(source.block, source.extent)
        if self._damages > REFILLS_MAX or not isinstance(source, BlockSource):
            raise StoreUnavailable("what is written to the cache directory does not come back")
