"""Reading one range: block by block, each from wherever it is now.

For every block: in the index and whole → its file; being filled, in any process → join; else → fill it. What goes
wrong on the way is mended where the reader stands: a damaged block is dropped and filled again, and where the cache
directory cannot be used the rest of the range comes straight from the origin, pinned to the same version. Only the
origin's failures end a read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Literal, TypeAlias

from gateway.blocks import layout
from gateway.blocks.ahead_verification import hint_beginning
from gateway.blocks.coalescing import FillLanded, FillUnneeded
from gateway.blocks.first_answer import FirstAnswer
from gateway.blocks.layout import Block, Extent
from gateway.blocks.open_file import OpenFile
from gateway.blocks.patches import Patches, are_used
from gateway.blocks.pinned_get import PinnedGet
from gateway.blocks.readahead import Readahead, window_blocks_max
from gateway.blocks.reading_tools import ReadingTools
from gateway.blocks.sources import BlockSource, FillSource, OriginSource, Source
from gateway.blocks.verification import fingerprint
from gateway.blocks.warm import WarmSpan
from gateway.errors import BlockDamaged, NotKept, StoreUnavailable
from gateway.objects import BodyPiece, BodyStream, ByteRange, FileSpan, LentBytes, ObjectVersion
from gateway.origin.client import Purpose

Outcome: TypeAlias = Literal["hit", "partial", "miss"]

BLOCKS_LOOKED_UP_MAX = 1024
"""The outcome of a longer range is that of its first blocks: a 5 TiB object must not hold up the event loop."""

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
        answer: FirstAnswer | None = None,
    ) -> None:
        self.outcome: Outcome = "miss"
        self._tools = tools
        self._version = version
        self._range = byte_range
        self._slot = slot
        self._purpose = purpose
        self._headers = dict(headers)
        self._ids = layout.block_ids(version)
        self._block_size_bytes = tools.settings.block_size_of(slot)
        self._numbers = layout.block_numbers(byte_range, self._block_size_bytes)
        self._answer = answer
        self._looks_first = answer is not None
        self._readahead: Readahead | None = None
        self._patches: Patches | None = None
        self._patched = False
        self._source: Source | None = None
        self._source_stop = 0
        self._given = 0
        self._hinted_stop = 0
        self._damages = 0

    def is_cached(self) -> bool:
        """Whether every block of the range is in the index; nothing is opened for the answer."""
        try:
            return self._look_up() == "hit"
        except StoreUnavailable:
            return False

    @property
    def past_the_cache(self) -> bool:
        """Whether the bytes now come straight from the origin, because the directory cannot take them."""
        return isinstance(self._source, OriginSource)

    async def start(self) -> None:
        """Decide the outcome and have the first bytes on their way. Raises what the origin says against it."""
        first = self._range.first
        try:
            self.outcome = "hit" if len(self._numbers) == 1 else self._look_up()
            await self._open(first)
            if self._lacks_patches():
                self.outcome = "partial"
        except StoreUnavailable as error:
            await self._open_origin(first, error)
        assert self._source is not None  # noqa: S101 - one of the two has opened it
        if self.outcome == "hit" and not self._source.cached:
            self.outcome = "partial" if len(self._numbers) > 1 else "miss"
        if self._tools.ahead_marks and isinstance(self._source, BlockSource):
            self._go_on_ahead(self._source.block)

    def _lacks_patches(self) -> bool:
        """Whether patches are missing behind the first one, which is there."""
        source = self._source
        if not self._patched or source is None or not source.cached or self._source_stop >= self._range.stop:
            return False
        return self._look_up() == "miss"

    def _go_on_ahead(self, block: Block) -> None:
        """A reader has come to a block that was fetched ahead, perhaps all of its range: more shall be."""
        if self._tools.ahead_marks.take(block.id):
            self._readahead = self._begin_readahead()
            self._readahead.beyond = self._purpose is Purpose.LIVE
            with suppress(StoreUnavailable):
                self._fill_ahead(self._range.first)

    def whole(self) -> WarmSpan | None:
        """The whole range as it lies in one file, where it does, verified and in memory; None otherwise.

        Whoever takes it, and closes it, does without this reader.
        """
        source = self._source
        if not isinstance(source, BlockSource) or self._source_stop < self._range.stop:
            return None
        span = source.span(self._range.first, self._range.stop)
        if span is None:
            return None
        self._source = None
        return WarmSpan(
            self._tools, source.block.id, source.extent, source.take_file(), span, self._slot, cached=source.cached
        )

    async def body(self) -> BodyStream:
        """The bytes of the range, in order; all of them, or an exception."""
        position = self._range.first
        try:
            while position < self._range.stop:
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
            self._tools.verified.forget(self._source.block.id)
            self._tools.segments.drop(self._source.extent.file)
        if isinstance(error, OSError) and not self.past_the_cache:
            self._tools.isolation.gone(error)

    async def aclose(self) -> None:
        """Let go of everything. Idempotent; the fills that this reader has begun go on."""
        source, self._source = self._source, None
        if source is None:
            return
        count, self._given = self._given, 0
        if count:
            (self._tools.observer.hit_bytes if source.cached else self._tools.observer.miss_bytes)(self._slot, count)
        await source.close()

    async def _next(self, position: int) -> BodyPiece:
        while True:
            try:
                piece = await self._read(position)
            except FillUnneeded:
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
            piece = await source.read(position, min(self._source_stop, self._range.stop))
            if isinstance(source, BlockSource) and source.from_device:
                self._hint_next_block()
            return piece
        except FillLanded as landed:
            await self._go_on_in_file(landed)
            return None
        except BlockDamaged:
            await self._drop_damaged()
            return None

    def _hint_next_block(self) -> None:
        """This block comes from the device: have it go on with the next one, if that is here."""
        if self._hinted_stop == self._source_stop or self._source_stop >= self._range.stop:
            return
        self._hinted_stop = self._source_stop
        extent = self._tools.directory.index.lookup(self._block(self._source_stop // self._block_size_bytes).id)
        if extent is not None:
            self._tools.threads.hint(hint_beginning, self._tools.directory.store, extent)

    async def _source_at(self, position: int) -> Source:
        if self._source is None or position >= self._source_stop:
            await self.aclose()
            await self._open(position)
        assert self._source is not None  # noqa: S101 - `_open` opens it or raises
        if not self._patched and not isinstance(self._source, OriginSource):
            self._fill_ahead(position)
        return self._source

    async def _open(self, position: int) -> None:
        """Open the source of the block at a position; StoreUnavailable when there can be none."""
        if not self._tools.isolation.readable:
            raise self._tools.isolation.refuse_reading()
        number = position // self._block_size_bytes
        source: Source | None = None
        while source is None:
            block, self._patched = self._block(number), False
            extent = self._tools.directory.index.lookup(block.id)
            if extent is None and self._may_be_patched():
                block, extent = self._patch_of(block, position)
            source = await (self._open_block(block, extent) if extent is not None else self._open_fill(block))
        self._source, self._source_stop = source, block.range.stop

    def _may_be_patched(self) -> bool:
        return self._purpose is Purpose.LIVE and are_used(self._block_size_bytes) and not self._too_large()

    def _patch_of(self, block: Block, position: int) -> tuple[Block, Extent | None]:
        """A patch of a block that is not here, where it is to be read from one; else the block."""
        tools = self._tools
        if tools.fills.has(block, self._headers):
            return block, None
        patch = self._all_patches().at(position, block)
        if patch is None:
            return block, None
        self._patched = True
        return patch, tools.directory.index.lookup(patch.id)

    def _all_patches(self) -> Patches:
        if self._patches is None:
            self._patches = Patches(
                self._tools.directory.index,
                self._tools.fills,
                self._version,
                self._range,
                self._ids,
                self._slot,
                self._headers,
                self,
                self._answer,
                lambda block: self._block(block.offset // self._block_size_bytes - 1),
            )
        return self._patches

    async def _open_block(self, block: Block, extent: Extent) -> BlockSource | None:
        """The block's file; None, and the block dropped, when it is gone."""
        tools = self._tools
        try:
            file = await self._open_file(block, extent)
        except BlockDamaged:
            await self._drop(block, extent)
            return None
        tools.accesses.note(extent.file)
        ahead = self._patches if self._patched else self._readahead
        return self._block_source(block, extent, file, cached=ahead is None or block.id not in ahead.fetched)

    def _block_source(self, block: Block, extent: Extent, file: OpenFile, *, cached: bool) -> BlockSource:
        tools = self._tools
        try:
            verified = tools.verified.of(block.id, fingerprint(file.descriptor))
        except OSError as error:
            file.release()
            raise StoreUnavailable(f"a block file cannot be looked at: {error}") from error
        return BlockSource(block, extent, file, verified, tools.residency, tools.threads, cached=cached)

    async def _go_on_in_file(self, landed: FillLanded) -> None:
        """Read the rest of a small block, that was in memory, like any other; it is the same use of it."""
        fill = self._source
        assert isinstance(fill, FillSource)  # noqa: S101 - no other source raises it
        landed.file.hold()
        self._source = self._block_source(fill.block, landed.extent, landed.file, cached=fill.cached)
        await fill.close()

    async def _open_file(self, block: Block, extent: Extent) -> OpenFile:
        tools = self._tools
        file = tools.segments.get(extent.file)
        if file is not None:
            return file
        if tools.verified.knows(block.id):
            file = tools.directory.store.open_published(extent)
        else:
            file = await tools.threads.disk(tools.directory.store.open_published, extent)
        tools.segments.keep(extent.file, file)
        return file

    async def _open_fill(self, block: Block) -> FillSource | None:
        """Join the block's fill, or start it, and wait until the origin's answer is good.

        None when it is to be looked for again: another process has published the block meanwhile, or begun to.
        """
        tools = self._tools
        if self._too_large():
            raise NotKept("size", "the object is larger than those that the slot keeps")
        fill = tools.fills.join(block, self._headers)
        if fill is None:
            if not self._looks_first and await tools.looks.settled(self._version.key, block.offset, self._headers):
                return None
            fill = tools.fills.start(block, self._slot, self._headers, self, self._purpose, self._answer)
        elif fill.started_by is not self:
            tools.observer.coalesced(self._slot)
        try:
            await fill.begun()
        except FillUnneeded:
            fill.leave()
            return None
        except BaseException:
            fill.leave()
            raise
        return FillSource(fill, tools.residency, tools.threads, reader=self)

    async def _open_origin(self, position: int, why: StoreUnavailable) -> None:
        """Serve the rest of the range past the cache, or what is not to be kept up to the next block that is there."""
        await self.aclose()
        tools = self._tools
        if isinstance(why, NotKept):
            tools.observer.not_kept(self._slot, why.reason, 1)
            rest = ByteRange(position, self._last_missing(position))
        else:
            tools.observer.store_unavailable()
            rest = ByteRange(position, self._range.last)
        get = PinnedGet(
            tools.origin,
            self._version,
            rest,
            self._headers,
            self._purpose,
            self._slot,
            tools.clock,
            tools.settings.fill_retries,
        )
        try:
            await get.start()
        except BaseException:
            await get.aclose()
            raise
        self._source, self._source_stop = OriginSource(get), rest.stop

    def _last_missing(self, position: int) -> int:
        """The last byte of the range before the next block behind `position` that is in the index."""
        size = self._block_size_bytes
        for number in range(position // size + 1, self._numbers.stop)[:BLOCKS_LOOKED_UP_MAX]:
            if self._tools.directory.index.lookup(self._block(number).id) is not None:
                return number * size - 1
        return self._range.last

    def _too_large(self) -> bool:
        size_max = self._tools.settings.kept_object_bytes_max_of(self._slot)
        return size_max is not None and self._version.size_bytes > size_max

    async def _drop_damaged(self) -> None:
        """Drop the block that has just been found damaged; StoreUnavailable when this goes on and on."""
        source = self._source
        self._damages += 1
        await self.aclose()
        if isinstance(source, BlockSource):
            await self._drop(source.block, source.extent)
        if self._damages > REFILLS_MAX or not isinstance(source, BlockSource):
            raise StoreUnavailable("what is written to the cache directory does not come back")

    async def _drop(self, block: Block, extent: Extent) -> None:
        tools = self._tools
        tools.verified.forget(block.id)
        tools.segments.drop(extent.file)
        if not tools.isolation.writable:
            raise tools.isolation.refuse_writing()
        if await tools.threads.index(tools.directory.drop, block.id, extent.file):
            tools.observer.damaged(self._slot)

    def _fill_ahead(self, position: int) -> None:
        """Keep the next blocks on their way while the one at a position is read."""
        if not self._tools.isolation.writable or self._too_large():
            return
        if self._readahead is None:
            self._readahead = self._begin_readahead()
        if isinstance(self._source, FillSource) and self._purpose is Purpose.LIVE:
            self._readahead.beyond = True
        self._readahead.at(position // self._block_size_bytes, position - self._range.first)

    def _begin_readahead(self) -> Readahead:
        tools, size = self._tools, self._block_size_bytes
        obtainable_bytes = tools.directory.capacity.obtainable_bytes(self._slot)
        return Readahead(
            tools.directory.index,
            tools.fills,
            tools.looks,
            tools.ahead_marks,
            self._block,
            self._numbers,
            -(-self._version.size_bytes // size),
            self._slot,
            self._headers,
            self,
            size,
            window_blocks_max(tools.settings.readahead_bytes, size, obtainable_bytes),
        )

    def _look_up(self) -> Outcome:
        if not self._tools.isolation.readable:
            raise self._tools.isolation.refuse_reading()
        blocks = [self._block(number) for number in self._numbers[:BLOCKS_LOOKED_UP_MAX]]
        present = self._tools.directory.index.present(block.id for block in blocks)
        here = [indexed or self._arrived(block) for block, indexed in zip(blocks, present, strict=True)]
        if all(here):
            return "hit"
        return "partial" if any(here) else "miss"

    def _arrived(self, block: Block) -> bool:
        if self._tools.fills.all_arrived(block, self._headers):
            return True
        return self._may_be_patched() and self._all_patches().hold(block)

    def _block(self, number: int) -> Block:
        return layout.block_at(self._version, number, self._block_size_bytes, self._ids)
