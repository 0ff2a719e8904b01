"""Reading one range: block by block, each from its present place, as its plan says (plan.py).

For every block: in the index and whole → its file; being fetched, in any process → join; else → fetch it. A block that
is missing or damaged is dropped and fetched again; where the cache directory cannot be used, the rest of the range
comes straight from the origin, pinned to the same version. Only the origin's failures end a read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Protocol

from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.layout import CHUNK_BYTES, Block, Extent
from gateway.blocks.origin_gets import PinnedGet
from gateway.blocks.plan import Outcome, ReadPlan, why_block_missing
from gateway.blocks.single_flight import BlockPublished, InflightFetch, MovedToFile
from gateway.blocks.spans import READ_BYTES, RESTORED_BYTES, BlocksAhead, BlockSource, WarmSpan, read_leased
from gateway.core.errors import BlockDamaged, NotKept, OriginBusy, StoreUnavailable
from gateway.core.model import (
    BodyPiece,
    BodyStream,
    BorrowedBuffer,
    ByteRange,
    FileSpan,
    MissReason,
    ObjectVersion,
    size_of,
)
from gateway.origin.client import Purpose
from gateway.origin.http1_client.response_stream import WHOLE_BYTES_MAX
from gateway.origin.receive_buffer import Buffers, ReceiveBuffer
from gateway.telemetry import metrics


class Source(Protocol):
    cached: bool
    """True if the bytes count as hits."""

    @property
    def from_peer(self) -> bool:
        """Return True if another node gives the bytes: they count as neither hits nor misses."""

    stop: int
    """The first byte of the object behind those that it has."""

    async def read(self, first: int, stop: int) -> BodyPiece:
        """Bytes of the object from `first` on, one at least, none at or behind `stop`."""

    async def close(self) -> None: ...


class FillSource:
    """A block that is being filled: its bytes as they arrive. Raises what makes the fill fail, and MovedToFile.

    One that another reader began, and whose bytes have all arrived, counts as cached.
    """

    def __init__(self, fill: InflightFetch, plan: ReadPlan) -> None:
        self.cached = fill.all_arrived and fill.started_by is not plan
        self.stop = fill.block.offset + fill.block.length
        self.block = fill.block
        self.fill = fill
        self._plan = plan

    @property
    def from_peer(self) -> bool:
        return self.fill.is_from_peer and not self.cached

    async def read(self, first: int, stop: int) -> BodyPiece:
        fill = self.fill
        position = first - fill.block.offset
        available = await fill.beyond(position)
        count = min(stop - fill.block.offset, available) - position
        if fill.content is not None:
            return BorrowedBuffer(fill.content[position : position + count])
        if fill.moved_to is not None:
            raise MovedToFile(fill.moved_to, fill.file)
        if position >= fill.unwritten_from():
            file, offset = _GrowingFile(fill, self._plan.dependencies), fill.extent.offset + position
            if file.intact(offset, count):
                return FileSpan(fill.file.descriptor, offset, count, file)
        count = min(count, READ_BYTES - position % READ_BYTES)
        return await self._plan.dependencies.threads.disk_holding(fill.file, read_leased, fill.extent, position, count)

    async def close(self) -> None:
        self.fill.leave(self._plan.purpose)


class _GrowingFile:
    """The file of a fill as `model.SpanFile`: bytes that wait to be written to the device are those that came."""

    __slots__ = ("_dependencies", "_extent", "_file", "_unwritten_from")

    def __init__(self, fill: InflightFetch, dependencies: CacheDependencies) -> None:
        self._dependencies = dependencies
        self._file = fill.file  # the fill's own lease: its files stay open as long as it has readers
        self._extent = fill.extent
        self._unwritten_from = fill.unwritten_from

    def intact(self, offset: int, count: int) -> bool:
        waits = self._dependencies.residency.unwritten(self._file.descriptor, offset, count)
        return waits and offset - self._extent.offset >= self._unwritten_from()

    stayed = intact

    async def restore(self, offset: int, count: int) -> memoryview:
        position = offset - self._extent.offset
        count = min(count, RESTORED_BYTES)
        return await self._dependencies.threads.disk_holding(self._file, read_leased, self._extent, position, count)


class OriginSource:
    """The rest of the range, straight from the origin, which may be asked for bytes around it, too."""

    cached = False

    def __init__(self, get: PinnedGet, rest: ByteRange, buffers: Buffers) -> None:
        self.stop = rest.stop
        self._get = get
        is_large = get.range.length > WHOLE_BYTES_MAX  # what is not comes as a whole
        self._buffer = ReceiveBuffer(CHUNK_BYTES, CHUNK_BYTES, lender=buffers) if is_large else None
        self._pieces = get.pieces(self._buffer)
        self._piece = memoryview(b"")
        self._first = get.range.first
        """The first byte of the piece."""

    @property
    def from_peer(self) -> bool:
        return self._get.is_from_peer

    async def read(self, first: int, stop: int) -> BorrowedBuffer:
        while first >= self._first + len(self._piece):
            self._first += len(self._piece)
            if self._buffer is not None and self._piece:  # the reader has the first chunk, and needs no haste
                self._buffer.resize(RELAYED_BYTES)
            self._piece = memoryview(await anext(self._pieces))
        return BorrowedBuffer(self._piece[first - self._first : stop - self._first])

    async def close(self) -> None:
        await self._pieces.aclose()
        await self._get.aclose()
        self._piece = memoryview(b"")
        if self._buffer is not None:
            self._buffer.give_back()


RELAYED_BYTES = 8 * CHUNK_BYTES
"""Bytes of the origin that are passed on at once: whole chunks, which stay in the second-level cache."""

REFILLS_MAX = 3
"""A block found damaged this often in one read is not tried again: the disk eats what it is given."""


class RangeReader:
    """One range of one version, read once. Made by `BlockCache.open_range`.

    Holds one open file at a time, at most READ_BYTES of memory, and nothing after `aclose`.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self.outcome: Outcome = "miss"
        self._dependencies = plan.dependencies
        self._plan = plan
        self._blocks_ahead: BlocksAhead | None = None
        self._source: Source | None = None
        self._is_sub_block = False
        """True if the source is a sub-block's."""
        self._was_ahead = False
        """True if an earlier reader fetched the source's block ahead, and no reader had come to it."""
        self._first: BodyPiece | None = None
        """The first piece, taken before the answer's head is sent: its block may be damaged and irreplaceable, and the
        origin, asked again after its body was cut, may have another version. Then nothing has been promised yet."""
        self._given = 0
        self._damages = 0

    def is_cached(self) -> bool:
        """Return True if every block of the range is in the index; opens nothing."""
        try:
            return self._look_up() == "hit"
        except StoreUnavailable:
            return False

    def why_missing(self, before: ObjectVersion | None) -> MissReason | None:
        """Return why the first missing bytes were missing at `start`; `before` is the version known before this one."""
        plan = self._plan
        if self.outcome in ("hit", "peer"):
            return None
        if self.past_the_cache:
            return "not-kept"
        if plan.missing is None:  # it is being read again for another reason than any of these
            return "first-read"
        return why_block_missing(self._dependencies, plan.block_size_bytes, before, *plan.missing)

    @property
    def past_the_cache(self) -> bool:
        """True if the bytes now come straight from the origin, because the directory cannot take them."""
        return isinstance(self._source, OriginSource)

    async def start(self) -> None:
        """Decide the outcome and have the first bytes on their way. Raises what the origin says against it."""
        plan = self._plan
        first, several = plan.range.first, len(plan.numbers) > 1
        try:
            self.outcome = self._look_up() if several else "hit"
            source: Source = await self._open(first)
            if self._is_sub_block and source.cached and source.stop < plan.range.stop and self._look_up() == "miss":
                self.outcome = "partial"
        except StoreUnavailable as error:
            source = await self._open_origin(first, error)
        if isinstance(source, BlockSource) and self._was_ahead:  # the reader goes on: so shall be what follows
            with suppress(StoreUnavailable):
                plan.keep_ahead(first, beyond=True)
        try:
            self._first = await self._next(first)
        except BaseException:
            await self.aclose()
            raise
        source = self._source or source
        if self.outcome == "hit" and not source.cached:
            self.outcome = "partial" if several else "miss"
        if self.outcome != "hit" and plan.roles is not None and (source.from_peer or source.cached):
            with suppress(StoreUnavailable):  # the reader that comes to the block finds it out
                if plan.is_of_others():
                    self.outcome = "peer"

    def whole(self) -> WarmSpan | None:
        """Return the whole range, if one file has it, verified and in memory.

        A caller that takes it closes it, and does without this reader.
        """
        source, wanted = self._source, self._plan.range
        if not isinstance(source, BlockSource) or source.stop < wanted.stop:
            return None
        if source.span(wanted.first, wanted.stop) is None:
            return None
        self._source = None
        position, slot = wanted.first - source.block.offset, self._plan.slot
        return WarmSpan(
            self._dependencies,
            source.extent,
            source.file,
            position,
            wanted.length,
            slot,
            cached=None if self._plan.is_for_peer else source.cached,
            as_written=source.as_written,
        )

    async def body(self) -> BodyStream:
        """Yield the bytes of the range, in order; all of them, or raise."""
        position = self._plan.range.first
        try:
            while position < self._plan.range.stop:
                first, self._first = self._first, None
                piece = first if first is not None else await self._next(position)
                self._verify_ahead()
                if isinstance(piece, BorrowedBuffer):
                    yield piece
                    size = piece.taken
                    self._given += size
                else:
                    size = size_of(piece)
                    self._given += size
                    yield piece
                position += size
        finally:
            await self.aclose()

    def file_failed(self, error: Exception) -> None:
        """Stop trusting a file from which `body`'s bytes could not be sent."""
        if isinstance(self._source, BlockSource):
            self._source.file.file.distrust()
            self._dependencies.open_files.drop(self._source.extent.file)
        if isinstance(error, OSError) and not self.past_the_cache:
            self._dependencies.isolation.gone(error)

    async def aclose(self) -> None:
        """Let go of everything. Idempotent; the fills that this reader has begun go on."""
        if self._blocks_ahead is not None:
            self._blocks_ahead.stop()
        await self._close_source()

    async def _close_source(self) -> None:
        source, self._source, self._first = self._source, None, None
        if source is None:
            return
        count, self._given = self._given, 0
        # Warmed bytes have no reader, and readers of other nodes are counted there.
        is_read_here = self._plan.purpose is Purpose.LIVE and not self._plan.is_for_peer
        if count and is_read_here and not source.from_peer:
            counter = metrics.CACHE_HIT_BYTES if source.cached else metrics.CACHE_MISS_BYTES
            counter.add(count, self._plan.slot)
        await source.close()

    async def _next(self, position: int) -> BodyPiece:
        while True:
            try:
                piece = await self._read(position)
            except BlockPublished:
                await self._close_source()
            except StoreUnavailable as error:
                await self._open_origin(position, error)
            else:
                if piece is not None:
                    return piece

    async def _read(self, position: int) -> BodyPiece | None:
        """Return the bytes at a position; None to look again: their block was damaged, and dropped, or has moved."""
        try:
            source = await self._source_at(position)
            return await source.read(position, min(source.stop, self._plan.range.stop))
        except OriginBusy as error:
            if not isinstance(self._source, FillSource) or not self._source.fill.was_denied_another(error):
                raise
            await self._close_source()
        except MovedToFile as landed:  # read the rest of a small block like any other; it is the same use of it
            fill = self._source
            assert isinstance(fill, FillSource)  # noqa: S101 - no other source raises it
            of_file = BlockSource(
                fill.block,
                landed.extent,
                landed.file.share(),
                self._dependencies,
                cached=fill.cached,
                as_written=not fill.cached,
            )
            of_file.from_peer = fill.from_peer
            self._source = of_file
            await fill.close()
        except BlockDamaged:
            damaged, self._damages = self._source, self._damages + 1
            await self._close_source()
            if isinstance(damaged, BlockSource):
                await self._drop(damaged.block, damaged.extent)
            if self._damages > REFILLS_MAX or not isinstance(damaged, BlockSource):
                raise StoreUnavailable("what was written to the cache directory cannot be read back") from None
        return None

    async def _source_at(self, position: int) -> Source:
        source = self._source
        if source is None or position >= source.stop:
            await self._close_source()
            if self._blocks_ahead is not None:
                await self._blocks_ahead.come_to(position)
            source = await self._open(position)
        if not self._is_sub_block and not isinstance(source, OriginSource):
            self._plan.keep_ahead(position, beyond=isinstance(source, FillSource))
        return source

    def _verify_ahead(self) -> None:
        """Verify the following blocks ahead once bytes had to be read from the device."""
        source = self._source
        if self._is_sub_block or not isinstance(source, BlockSource):
            return
        if self._blocks_ahead is None and source.was_verified:
            self._blocks_ahead = BlocksAhead(self._plan)
        if self._blocks_ahead is not None:
            with suppress(StoreUnavailable):  # the reader that comes to them finds it out
                self._blocks_ahead.keep_on(source.stop)

    def _look_up(self) -> Outcome:
        self._check_readable()
        return self._plan.look_up()

    def _check_readable(self) -> None:
        if not self._dependencies.isolation.readable:
            raise self._dependencies.isolation.refuse_reading()

    # Sources

    async def _open(self, position: int) -> BlockSource | FillSource:
        """Open the source of the bytes at a position; StoreUnavailable when there can be none but the origin."""
        self._check_readable()
        source: BlockSource | FillSource | None = None
        while source is None:
            block, extent, self._is_sub_block = self._plan.plan(position)
            source = await (self._open_block(block, extent) if extent is not None else self._open_fill(block))
        self._source = source
        return source

    async def _open_block(self, block: Block, extent: Extent) -> BlockSource | None:
        """Open the block's file; if it is gone, drop the block and return None."""
        dependencies, is_own = self._dependencies, block.id in self._plan.fetched
        file = dependencies.open_files.get(extent.file)
        if file is None:
            try:
                file = await dependencies.threads.open(dependencies.directory.store.open_published, extent)
            except BlockDamaged:
                await self._drop(block, extent)
                return None
            dependencies.open_files.keep(extent.file, file)
        self._was_ahead = dependencies.ahead_marks.pop(block.id, True) is None
        if not self._was_ahead and not is_own:
            dependencies.accesses.note(extent.file)  # a first read, after the prefetch, is no return
        as_written = is_own or self._was_ahead
        return BlockSource(block, extent, file, dependencies, cached=not is_own, as_written=as_written)

    async def _open_fill(self, block: Block) -> FillSource | None:
        """Join the block's fill, or start it, and wait until the origin's answer is good.

        None: look for the block again, as another process has published it meanwhile, or begun to.
        """
        dependencies, plan = self._dependencies, self._plan
        if not plan.is_kept:
            raise NotKept("size", "the object is larger than those that the slot keeps")
        fetches, key, headers = dependencies.fetches, plan.version.key, plan.headers_of(block)
        if dependencies.passes_on(plan.slot, headers):
            raise NotKept("copy", "another node looks after the block, and the slot keeps no copies")
        fill = fetches.join(block, headers, plan.purpose)
        if fill is None:
            if plan.answer is None and await dependencies.unpinned_gets.settled(key, block.offset, headers):
                return None
            fill = fetches.start(block, plan.slot, headers, plan, plan.purpose, plan.answer)
        if fill.started_by is not plan:
            metrics.CACHE_COALESCED.add(1, plan.slot)
        try:
            await fill.begun()
        except BaseException as error:
            fill.leave(plan.purpose)
            if isinstance(error, BlockPublished):
                return None
            if isinstance(error, OriginBusy) and fill.was_denied_another(error):
                return None
            raise
        return FillSource(fill, plan)

    async def _open_origin(self, position: int, why: StoreUnavailable) -> OriginSource:
        """Open the rest of the range past the cache; bytes that are not kept end at the next cached block."""
        await self._close_source()
        dependencies, plan, last = self._dependencies, self._plan, self._plan.range.last
        if isinstance(why, NotKept):
            metrics.CACHE_NOT_KEPT.add(1, plan.slot, why.reason)
            last = plan.last_missing(position)
        else:
            metrics.CACHE_STORE_UNAVAILABLE.add(1)
        rest, asked, headers = plan.past_the_cache(position, last)
        get = dependencies.pinned_get(plan.version, asked, headers, plan.purpose, plan.slot)
        get.begin_with(plan.answer)
        try:
            await get.start()
        except BaseException:
            await get.aclose()
            raise
        self._source = source = OriginSource(get, rest, dependencies.buffers)
        return source

    async def _drop(self, block: Block, extent: Extent) -> None:
        """Take a block that is not what it was out of the index; StoreUnavailable where nothing may be written."""
        dependencies, plan = self._dependencies, self._plan
        plan.missing = plan.missing or (block, "evicted")
        dependencies.open_files.drop(extent.file)
        if not dependencies.isolation.writable:
            raise dependencies.isolation.refuse_writing()
        if await dependencies.threads.index(dependencies.directory.drop, block.id, extent.file):
            metrics.CACHE_DAMAGED.add(1, plan.slot)


async def bring(plan: ReadPlan, come: Callable[[int], None] = lambda _: None) -> tuple[int, bool]:
    """Bring a range to disk. Return the number of fetched bytes, and whether all of it is on disk.

    `come` gets the number of fetched bytes again and again. Raises as the reader does.
    """
    reader, fetches = RangeReader(plan), plan.dependencies.fetches
    if reader.is_cached():
        return 0, True
    try:
        await reader.start()
        async with aclosing(reader.body()) as body:
            come_bytes = 0
            async for given in body:
                if reader.past_the_cache:
                    return 0, False
                come_bytes += size_of(given)
                come(come_bytes)
    finally:
        await reader.aclose()
    kept = True
    for block in map(plan.block, plan.numbers):
        if (fill := fetches.join(block, plan.headers_of(block), plan.purpose)) is not None:
            try:
                await fill.over()  # what has only arrived is lost when the process ends
            finally:
                fill.leave(plan.purpose)
            kept = kept and fill.kept
    return plan.range.length, kept
