"""Where the bytes at a position are now: in a file, on their way in a fill, or at the origin only.

For every block: in the index and whole → its file; being filled, in any process → join; else → fill it. What is found
missing or damaged on the way is dropped from the index, and filled again.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.filling.inflight_fetch import BlockPublished
from gateway.blocks.filling.pinned_get import PinnedGet
from gateway.blocks.layout import Block, Extent
from gateway.blocks.reading.patches import Patches, are_used
from gateway.blocks.reading.reading_tools import ReadingTools
from gateway.blocks.reading.sources import BlockSource, FillSource, OriginSource
from gateway.blocks.reading.wanted import BLOCKS_LOOKED_UP_MAX, Wanted
from gateway.errors import BlockDamaged, NotKept, StoreUnavailable
from gateway.objects import ByteRange
from gateway.origin.client import Purpose

Outcome: TypeAlias = Literal["hit", "partial", "miss"]


class SourceOpener:
    """Opens one reader's sources, one after another. `patched` says of the last one whether it is of a patch.

    `fetched` are the blocks that were fetched ahead for this reader: they are no hits of its.
    """

    def __init__(self, tools: ReadingTools, wanted: Wanted) -> None:
        self.patched = False
        self.fetched: set[bytes] = set()
        self._tools = tools
        self._wanted = wanted
        self._looks_first = wanted.answer is not None
        self._patches: Patches | None = None

    def look_up(self) -> Outcome:
        """How much of the range is here; nothing is opened for the answer."""
        self._check_readable()
        wanted = self._wanted
        blocks = [wanted.block(number) for number in wanted.numbers[:BLOCKS_LOOKED_UP_MAX]]
        present = self._tools.directory.index.present(block.id for block in blocks)
        here = [indexed or self._arrived(block) for block, indexed in zip(blocks, present, strict=True)]
        if all(here):
            return "hit"
        return "partial" if any(here) else "miss"

    async def open(self, position: int) -> BlockSource | FillSource:
        """The source of the bytes at a position; StoreUnavailable when there can be none but the origin."""
        self._check_readable()
        number = position // self._wanted.block_size_bytes
        while True:
            block, self.patched = self._wanted.block(number), False
            extent = self._tools.directory.index.lookup(block.id)
            if extent is None and self._may_be_patched():
                block, extent = self._patch_of(block, position)
            source = await (self._open_block(block, extent) if extent is not None else self._open_fill(block))
            if source is not None:
                return source

    async def open_origin(self, position: int, why: StoreUnavailable) -> OriginSource:
        """The rest of the range past the cache, or what is not to be kept up to the next block that is there."""
        tools, wanted = self._tools, self._wanted
        if isinstance(why, NotKept):
            tools.observer.not_kept(wanted.slot, why.reason, 1)
            rest = ByteRange(position, self._last_missing(position))
        else:
            tools.observer.store_unavailable()
            rest = ByteRange(position, wanted.range.last)
        get = PinnedGet(
            tools.origin,
            wanted.version,
            rest,
            wanted.headers,
            wanted.purpose,
            wanted.slot,
            tools.clock,
            tools.settings.fill_retries,
        )
        try:
            await get.start()
        except BaseException:
            await get.aclose()
            raise
        return OriginSource(get)

    def in_file(self, block: Block, extent: Extent, file: BlockLease, *, cached: bool) -> BlockSource:
        """A block in an open file, which becomes the source's to release."""
        return BlockSource(block, extent, file, self._tools.residency, self._tools.threads, cached=cached)

    async def drop(self, block: Block, extent: Extent) -> None:
        """Take a block that is not what it was out of the index; StoreUnavailable where nothing may be written."""
        tools = self._tools
        tools.open_files.drop(extent.file)
        if not tools.isolation.writable:
            raise tools.isolation.refuse_writing()
        if await tools.threads.index(tools.directory.drop, block.id, extent.file):
            tools.observer.damaged(self._wanted.slot)

    def _check_readable(self) -> None:
        if not self._tools.isolation.readable:
            raise self._tools.isolation.refuse_reading()

    def _arrived(self, block: Block) -> bool:
        if self._tools.fetches.all_arrived(block, self._wanted.headers):
            return True
        return self._may_be_patched() and self._all_patches().hold(block)

    # Patches

    def _may_be_patched(self) -> bool:
        wanted = self._wanted
        return wanted.purpose is Purpose.LIVE and are_used(wanted.block_size_bytes) and not wanted.too_large

    def _patch_of(self, block: Block, position: int) -> tuple[Block, Extent | None]:
        """A patch of a block that is not here, where it is to be read from one; else the block."""
        tools = self._tools
        if tools.fetches.has(block, self._wanted.headers):
            return block, None
        patch = self._all_patches().at(position, block)
        if patch is None:
            return block, None
        self.patched = True
        return patch, tools.directory.index.lookup(patch.id)

    def _all_patches(self) -> Patches:
        if self._patches is None:
            self._patches = Patches(self._tools.directory.index, self._tools.fetches, self._wanted, self.fetched)
        return self._patches

    # Files and fills

    async def _open_block(self, block: Block, extent: Extent) -> BlockSource | None:
        """The block's file; None, and the block dropped, when it is gone."""
        try:
            file = await self._open_file(block, extent)
        except BlockDamaged:
            await self.drop(block, extent)
            return None
        self._tools.accesses.note(extent.file)
        return self.in_file(block, extent, file, cached=block.id not in self.fetched)

    async def _open_file(self, block: Block, extent: Extent) -> BlockLease:
        tools = self._tools
        file = tools.open_files.get(extent.file)
        if file is None:
            file = await tools.threads.disk(tools.directory.store.open_published, extent)
            tools.open_files.keep(extent.file, file)
        return file

    async def _open_fill(self, block: Block) -> FillSource | None:
        """Join the block's fill, or start it, and wait until the origin's answer is good.

        None when it is to be looked for again: another process has published the block meanwhile, or begun to.
        """
        tools, wanted = self._tools, self._wanted
        if wanted.too_large:
            raise NotKept("size", "the object is larger than those that the slot keeps")
        fill = tools.fetches.join(block, wanted.headers)
        if fill is None:
            if not self._looks_first and await tools.unpinned_gets.settled(
                wanted.version.key, block.offset, wanted.headers
            ):
                return None
            fill = tools.fetches.start(block, wanted.slot, wanted.headers, wanted, wanted.purpose, wanted.answer)
        elif fill.started_by is not wanted:
            tools.observer.coalesced(wanted.slot)
        try:
            await fill.begun()
        except BlockPublished:
            fill.leave()
            return None
        except BaseException:
            fill.leave()
            raise
        return FillSource(fill, tools.residency, tools.threads, reader=wanted)

    def _last_missing(self, position: int) -> int:
        """The last byte of the range before the next block behind `position` that is in the index."""
        wanted, size = self._wanted, self._wanted.block_size_bytes
        for number in range(position // size + 1, wanted.numbers.stop)[:BLOCKS_LOOKED_UP_MAX]:
            if self._tools.directory.index.lookup(wanted.block(number).id) is not None:
                return number * size - 1
        return wanted.range.last
