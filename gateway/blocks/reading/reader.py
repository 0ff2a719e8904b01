"""Reading one range: block by block, each from its present place; the extent of readahead, and parts of blocks.

For every block: in the index and whole → its file; being fetched, in any process → join; else → fetch it. Errors
are mended where the reader stands: a block that is missing or damaged is dropped and fetched again, and
where the cache directory cannot be used the rest of the range comes straight from the origin, pinned to the same
version. Only the origin's failures end a read.

Ahead of the reader, blocks are fetched all at once (`Prefetcher`). Inside its range a reader is known to go on: its
window begins small and grows with every byte that it reads. Behind the range the window is as long as the run before
it: the blocks in a row that are in the index or being filled, for any reader. So clients that read an object in
parts have the next ones on their way, and random reads, which have no run before them, cause none.

Readers that touch an object here and there are given small parts of large blocks (`SubBlocks`). A sub-block is a block
like any other, of a finer grid. A block is fetched as a whole when a read wants much of it and skips no more than
that, when the reads before came just before, and when many of its sub-blocks are cached.
The bytes of sub-blocks are then fetched once more: a quarter of a block at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from gateway.blocks import layout
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.filling.origin_gets import PinnedGet, UnpinnedGets, UnpinnedResponse
from gateway.blocks.filling.single_flight import BlockPublished, MovedToFile, SingleFlight
from gateway.blocks.index.index import BlockIndex, Standing
from gateway.blocks.layout import Block, Extent
from gateway.blocks.reading.sources import (
    BLOCKS_LOOKED_UP_MAX,
    AheadMarks,
    BlockSource,
    FillSource,
    OriginSource,
    ReadDependencies,
    ReadRequest,
    Source,
    WarmSpan,
)
from gateway.blocks.reading.verifying import BlocksAhead
from gateway.core.errors import BlockDamaged, NotKept, OriginBusy, StoreUnavailable
from gateway.core.model import BodyPiece, BodyStream, BorrowedBuffer, ByteRange, MissReason, ObjectVersion, size_of
from gateway.origin.client import Purpose
from gateway.telemetry import metrics

FIRST_WINDOW_BYTES = 32 * 1024 * 1024
"""Cost limit of a reader that asks for a large object and goes away at once."""

GROWTH = 32
"""Bytes by which the window grows for each byte read."""

RUN_MIN_BLOCKS = 2
"""One neighbour may be chance, and a range that is long is no sign of one that follows."""

_SHARE_OF_SLOT = 4


def window_blocks_max(readahead_bytes: int, block_size_bytes: int, obtainable_bytes: int) -> int:
    """The longest window; at least one block, unless `readahead_bytes` is 0."""
    if readahead_bytes == 0:
        return 0
    return max(1, min(readahead_bytes, obtainable_bytes // _SHARE_OF_SLOT) // block_size_bytes)


@dataclass(slots=True)
class Readahead:
    """One reader's readahead. With `beyond` it goes on behind the range if there is a run.

    Blocks that it fetches in the range go to `fetched`, those behind it to `marks`.
    """

    index: BlockIndex
    fetches: SingleFlight
    unpinned_gets: UnpinnedGets
    marks: AheadMarks
    request: ReadRequest
    window_max: int
    fetched: set[bytes]
    beyond: bool = False
    _done: int = -1
    _refused: int = -1
    _run_before: int | None = None

    def at(self, number: int, read_bytes: int) -> None:
        """The reader, that has read so much by now, is in a block: keep the next ones on their way.

        StoreUnavailable as the index raises it.
        """
        if number == self._refused:
            return
        self._done = max(self._done, number)
        stop = self._stop_after(number, read_bytes)
        while self._done + 1 < stop:
            if not self._begin(self._done + 1):
                self._refused = number
                return
            self._done += 1

    def _begin(self, number: int) -> bool:
        request, block = self.request, self.request.block(number)
        if self.index.lookup(block.id) is not None:
            return True
        if self.unpinned_gets.pending(block.version.key, block.offset, request.headers):
            return True
        if not self.fetches.start_ahead(block, request.slot, request.headers, request):
            return False
        if number < request.numbers.stop:
            self.fetched.add(block.id)
        else:
            self.marks.add(block.id)
        return True

    def _stop_after(self, number: int, read_bytes: int) -> int:
        window = (FIRST_WINDOW_BYTES + GROWTH * read_bytes) // self.request.block_size_bytes
        stop, end = number + 1 + min(max(1, window), self.window_max), self.request.numbers.stop
        if stop <= end:
            return stop
        return max(end, min(self.request.blocks_of_object, number + 1 + self._window_beyond(number)))

    def _window_beyond(self, number: int) -> int:
        request = self.request
        if not self.beyond or request.numbers.stop == request.blocks_of_object:
            return 0
        before = self._run_before_range()
        return min(before + number - request.numbers.start, self.window_max) if before >= RUN_MIN_BLOCKS else 0

    def _run_before_range(self) -> int:
        """Return the number of consecutive blocks before the range that are cached or on their way, up to the limit."""
        if self._run_before is None:
            first, length = self.request.numbers.start, 0
            while length < min(first, self.window_max) and self._is_coming(first - length - 1):
                length += 1
            self._run_before = length
        return self._run_before

    def _is_coming(self, number: int) -> bool:
        block, headers = self.request.block(number), self.request.headers
        return self.index.lookup(block.id) is not None or self.fetches.is_anywhere(block, headers)


class Prefetcher:
    """One reader's prefetches; those in the range go to `fetched`."""

    def __init__(self, tools: ReadDependencies, request: ReadRequest, fetched: set[bytes]) -> None:
        self._tools = tools
        self._request = request
        self._fetched = fetched
        self._readahead: Readahead | None = None

    def resume(self) -> None:
        """The reader begins in a block that was fetched ahead: so shall be what follows it."""
        with suppress(StoreUnavailable):
            self.prefetch(self._request.range.first, beyond=True)

    def prefetch(self, position: int, *, beyond: bool) -> None:
        """Keep the next blocks on their way while the one at a position is read; from now on those `beyond` the range.

        StoreUnavailable as the index raises it.
        """
        request = self._request
        if request.too_large or not self._tools.isolation.writable:
            return
        if self._readahead is None:
            self._readahead = self._begin()
        if beyond and request.purpose is Purpose.LIVE:
            self._readahead.beyond = True
        self._readahead.at(position // request.block_size_bytes, position - request.range.first)

    def _begin(self) -> Readahead:
        tools, request = self._tools, self._request
        obtainable_bytes = tools.directory.capacity.obtainable_bytes(request.slot)
        window_max = window_blocks_max(tools.settings.readahead_bytes, request.block_size_bytes, obtainable_bytes)
        index, fills = tools.directory.index, tools.fetches
        return Readahead(index, fills, tools.unpinned_gets, tools.ahead_marks, request, window_max, self._fetched)


SUB_BLOCK_BYTES = 128 * 1024
"""Two chunks: what a read of a few KiB costs the origin, and a 64 KiB read that lies across a boundary."""

MUCH = 8
"""A reader of an eighth of a block gets the whole block, unless it would wait for more than it wants."""

MANY = 4
"""A quarter of a block in sub-blocks is no random touch any more."""

_RUN_SUB_BLOCKS = 2


def are_used(block_size_bytes: int) -> bool:
    """Return True if blocks of this size are large enough to have sub-blocks."""
    return block_size_bytes >= MUCH * SUB_BLOCK_BYTES and block_size_bytes % SUB_BLOCK_BYTES == 0


def first_fetched(first: int, last: int | None, block_size_bytes: int) -> ByteRange:
    """Return the first range that a read of `first` to `last` (None: the end) of an unknown object fetches."""
    skipped, request = first % block_size_bytes, block_size_bytes if last is None else last - first + 1
    whole = not are_used(block_size_bytes) or is_much(
        skipped, min(request, block_size_bytes - skipped), block_size_bytes
    )
    size = block_size_bytes if whole else SUB_BLOCK_BYTES
    return ByteRange(first // size * size, first // size * size + size - 1)


def is_much(skipped_bytes: int, wanted_bytes: int, block_bytes: int) -> bool:
    """Return True if a read of so many bytes, behind the skipped ones, is reason enough to fill the block."""
    return wanted_bytes * MUCH >= block_bytes and skipped_bytes <= wanted_bytes


@dataclass(slots=True)
class SubBlocks:
    """Sub-blocks of one reader's range, in blocks that `are_used` for. Prefetched ones go to `fetched`."""

    index: BlockIndex
    fetches: SingleFlight
    request: ReadRequest
    fetched: set[bytes]
    _judged: bytes = b""
    _whole: bool = False

    def at(self, position: int, block: Block) -> Block | None:
        """Return the sub-block to read at a position of a missing block; None: fill the block.

        Begins fetches of the range's other sub-blocks in the block. Raises StoreUnavailable as the index does.
        """
        sub_block = self._sub_block(position // SUB_BLOCK_BYTES)
        if self._is_coming(sub_block):
            return sub_block
        if self._is_filled_whole(block):
            return None
        self._fetch_behind(sub_block, block)
        return sub_block

    def hold(self, block: Block) -> bool:
        """Return True if sub-blocks hold the range's whole part of a block."""
        asked = self.request.part_in(block)
        return asked != block.range and all(self._present(layout.block_numbers(asked, SUB_BLOCK_BYTES)))

    def _is_filled_whole(self, block: Block) -> bool:
        if self._judged != block.id:
            self._judged, self._whole = block.id, self._judge(block)
        return self._whole

    def _judge(self, block: Block) -> bool:
        asked, answer = self.request.part_in(block), self.request.answer
        if answer is not None and asked.first == self.request.range.first:
            return answer.range.first == block.offset and answer.range.stop >= block.range.stop
        skipped = asked.first - block.offset
        if block.length <= 2 * SUB_BLOCK_BYTES or is_much(skipped, asked.length, block.length):
            return True
        numbers = layout.block_numbers(block.range, SUB_BLOCK_BYTES)
        present = self._present(numbers)
        at = skipped // SUB_BLOCK_BYTES
        if at == 0 and block.offset and self._is_coming(self.request.block_before(block)):
            return True
        if at >= _RUN_SUB_BLOCKS and all(present[at - _RUN_SUB_BLOCKS : at]):
            return True
        return sum(present) * MANY >= len(present)

    def _fetch_behind(self, sub_block: Block, block: Block) -> None:
        for number in layout.block_numbers(self.request.part_in(block), SUB_BLOCK_BYTES):
            other = self._sub_block(number)
            if other.offset > sub_block.offset and self.index.lookup(other.id) is None:
                self.fetched.add(other.id)
                self.fetches.start_ahead(other, self.request.slot, self.request.headers, self.request)

    def _present(self, numbers: range) -> list[bool]:
        return self.index.present(self._sub_block(number).id for number in numbers)

    def _is_coming(self, block: Block) -> bool:
        return self.index.lookup(block.id) is not None or self.fetches.has(block, self.request.headers)

    def _sub_block(self, number: int) -> Block:
        return layout.block_at(self.request.version, number, SUB_BLOCK_BYTES, self.request.ids)


REFILLS_MAX = 3
"""A block found damaged this often in one read is not tried again: the disk eats what it is given."""


class RangeReader:
    """One range of one version, read once. Made by `BlockCache.open_range`.

    Holds one open file at a time, at most READ_BYTES of memory, and nothing after `aclose`.
    """

    def __init__(
        self,
        tools: ReadDependencies,
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
        self._request = ReadRequest(version, byte_range, slot, dict(headers), purpose, answer, block_size, too_large)
        self._opener = SourceOpener(tools, self._request)
        self._ahead = Prefetcher(tools, self._request, self._opener.fetched)
        self._blocks_ahead = BlocksAhead(tools, self._request, self._opener.fetched)
        self._source: Source | None = None
        self._first: BodyPiece | None = None
        """First piece of a block on disk, verified before the reply begins: later its bytes might be irreplaceable."""
        self._given = 0
        self._damages = 0

    def is_cached(self) -> bool:
        """Return True if every block of the range is in the index; opens nothing."""
        try:
            return self._opener.look_up() == "hit"
        except StoreUnavailable:
            return False

    def why_missing(self, before: ObjectVersion | None) -> MissReason | None:
        """Return why the first missing bytes were missing when `start` was called; None: none were. `before` is the
        object's version as known before the origin named this one."""
        if self.outcome == "hit":
            return None
        return "not-kept" if self.past_the_cache else self._opener.why_missing(before)

    @property
    def past_the_cache(self) -> bool:
        """True if the bytes now come straight from the origin, because the directory cannot take them."""
        return isinstance(self._source, OriginSource)

    async def start(self) -> None:
        """Decide the outcome and have the first bytes on their way. Raises what the origin says against it."""
        first, several = self._request.range.first, len(self._request.numbers) > 1
        try:
            self.outcome = self._opener.look_up() if several else "hit"
            source: Source = await self._open(first)
            if self._lacks_sub_blocks(source):
                self.outcome = "partial"
        except StoreUnavailable as error:
            source = await self._open_origin(first, error)
        if isinstance(source, BlockSource):
            if self._opener.was_ahead:
                self._ahead.resume()
            source = await self._begin_to_read(source)
        if self.outcome == "hit" and not source.cached:
            self.outcome = "partial" if several else "miss"

    async def _begin_to_read(self, source: Source) -> Source:
        try:
            self._first = await self._next(self._request.range.first)
        except BaseException:
            await self.aclose()
            raise
        return self._source or source

    def _lacks_sub_blocks(self, source: Source) -> bool:
        if not self._opener.is_sub_block or not source.cached or source.stop >= self._request.range.stop:
            return False
        return self._opener.look_up() == "miss"

    def whole(self) -> WarmSpan | None:
        """The whole range as it lies in one file, where it does, verified and in memory; None otherwise.

        A caller that takes it closes it, and does without this reader.
        """
        source, request = self._source, self._request.range
        if not isinstance(source, BlockSource) or source.stop < request.stop:
            return None
        if source.span(request.first, request.stop) is None:
            return None
        self._source = None
        position, slot = request.first - source.block.offset, self._request.slot
        file, cached = source.take_file(), source.cached
        return WarmSpan(self._tools, source.extent, file, position, request.length, slot, cached=cached)

    async def body(self) -> BodyStream:
        """The bytes of the range, in order; all of them, or an exception."""
        position = self._request.range.first
        try:
            while position < self._request.range.stop:
                first, self._first = self._first, None
                piece = first if first is not None else await self._next(position)
                self._read_on()
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
            self._source.distrust()
            self._tools.open_files.drop(self._source.extent.file)
        if isinstance(error, OSError) and not self.past_the_cache:
            self._tools.isolation.gone(error)

    async def aclose(self) -> None:
        """Let go of everything. Idempotent; the fills that this reader has begun go on."""
        self._blocks_ahead.stop()
        await self._close_source()

    async def _close_source(self) -> None:
        source, self._source, self._first = self._source, None, None
        if source is None:
            return
        count, self._given = self._given, 0
        if count and self._request.purpose is Purpose.LIVE:  # warmed bytes have no reader
            counter = metrics.CACHE_HIT_BYTES if source.cached else metrics.CACHE_MISS_BYTES
            counter.add(count, self._request.slot)
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
        """The bytes at a position; None: look again, their block was found damaged, and dropped, or has moved."""
        try:
            source = await self._source_at(position)
            return await source.read(position, min(source.stop, self._request.range.stop))
        except OriginBusy as error:
            if not isinstance(self._source, FillSource) or not self._source.was_denied_another(error):
                raise
            await self._close_source()
            return None
        except MovedToFile as landed:
            await self._go_on_in_file(landed)
            return None
        except BlockDamaged:
            await self._drop_damaged()
            return None

    async def _source_at(self, position: int) -> Source:
        source = self._source
        if source is None or position >= source.stop:
            await self._close_source()
            await self._blocks_ahead.come_to(position)
            source = await self._open(position)
        if not self._opener.is_sub_block and not isinstance(source, OriginSource):
            self._ahead.prefetch(position, beyond=isinstance(source, FillSource))
        return source

    def _read_on(self) -> None:
        """Verify the following blocks ahead while bytes must be read from the device."""
        source, ahead = self._source, self._blocks_ahead
        if (
            isinstance(source, BlockSource)
            and (ahead.is_active or source.was_verified)
            and not self._opener.is_sub_block
        ):
            with suppress(StoreUnavailable):  # the reader that comes to them finds it out
                ahead.keep_on(source.stop)

    async def _open(self, position: int) -> BlockSource | FillSource:
        """StoreUnavailable when there is no source but the origin."""
        self._source = source = await self._opener.open(position)
        return source

    async def _open_origin(self, position: int, why: StoreUnavailable) -> OriginSource:
        await self._close_source()
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
        await self._close_source()
        if isinstance(source, BlockSource):
            await self._opener.drop(source.block, source.extent)
        if self._damages > REFILLS_MAX or not isinstance(source, BlockSource):
            raise StoreUnavailable("what was written to the cache directory cannot be read back")


Outcome: TypeAlias = Literal["hit", "partial", "miss"]


class SourceOpener:
    """Opens one reader's sources, one after another. `is_sub_block`: the last one is a sub-block's.

    `fetched` are the blocks that were fetched ahead for this reader: they are no hits of its. `was_ahead`: an earlier
    reader fetched the last one ahead, and no reader had come to it.
    """

    def __init__(self, tools: ReadDependencies, request: ReadRequest) -> None:
        self.is_sub_block = False
        self.fetched: set[bytes] = set()
        self.was_ahead = False
        self._tools = tools
        self._request = request
        self._looks_first = request.answer is not None
        self._sub_blocks: SubBlocks | None = None
        self._missing: tuple[Block, Standing] | None = None
        """The first block that was missing, and how it stood before it was asked for: after that it is here."""

    def look_up(self) -> Outcome:
        """Return how much of the range is cached; opens nothing."""
        self._check_readable()
        request = self._request
        blocks = [request.block(number) for number in request.numbers[:BLOCKS_LOOKED_UP_MAX]]
        present = self._tools.directory.index.present(block.id for block in blocks)
        here = [indexed or self._arrived(block) for block, indexed in zip(blocks, present, strict=True)]
        if all(here):
            return "hit"
        first = blocks[here.index(False)]
        self._note_missing(first, max(first.offset, request.range.first))
        return "partial" if any(here) else "miss"

    def why_missing(self, before: ObjectVersion | None) -> MissReason:
        """As `RangeReader.why_missing`, where some were."""
        if self._missing is None:  # it is being read again for another reason than any of these
            return "first-read"
        request = self._request
        try:
            return _why(self._tools, request.version, request.block_size_bytes, before, *self._missing)
        except StoreUnavailable:
            return "not-kept"

    def _note_missing(self, block: Block, position: int) -> None:
        if self._missing is None and self._request.purpose is Purpose.LIVE:
            request = self._request
            standing = _standing(self._tools, block, position, request.block_size_bytes, request.ids)
            self._missing = block, standing

    async def open(self, position: int) -> BlockSource | FillSource:
        """The source of the bytes at a position; StoreUnavailable when there can be none but the origin."""
        self._check_readable()
        number = position // self._request.block_size_bytes
        while True:
            block, self.is_sub_block = self._request.block(number), False
            extent = self._tools.directory.index.lookup(block.id)
            if extent is None:
                whole = block
                if self._may_use_sub_blocks():
                    block, extent = self._sub_block_of(block, position)
                if extent is None:
                    self._note_missing(whole, position)
            source = await (self._open_block(block, extent) if extent is not None else self._open_fill(block))
            if source is not None:
                return source

    async def open_origin(self, position: int, why: StoreUnavailable) -> OriginSource:
        """Open the rest of the range past the cache; bytes that are not kept end at the next cached block."""
        tools, request = self._tools, self._request
        if isinstance(why, NotKept):
            metrics.CACHE_NOT_KEPT.add(1, request.slot, why.reason)
            rest = ByteRange(position, self._last_missing(position))
        else:
            metrics.CACHE_STORE_UNAVAILABLE.add(1)
            rest = ByteRange(position, request.range.last)
        get = PinnedGet(
            tools.origin,
            request.version,
            rest,
            request.headers,
            request.purpose,
            request.slot,
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
        tools, self._missing = self._tools, self._missing or (block, "evicted")
        tools.open_files.drop(extent.file)
        if not tools.isolation.writable:
            raise tools.isolation.refuse_writing()
        if await tools.threads.index(tools.directory.drop, block.id, extent.file):
            metrics.CACHE_DAMAGED.add(1, self._request.slot)

    def _check_readable(self) -> None:
        if not self._tools.isolation.readable:
            raise self._tools.isolation.refuse_reading()

    def _arrived(self, block: Block) -> bool:
        if self._tools.fetches.all_arrived(block, self._request.headers):
            return True
        return self._may_use_sub_blocks() and self._all_sub_blocks().hold(block)

    # SubBlocks

    def _may_use_sub_blocks(self) -> bool:
        request = self._request
        return request.purpose is Purpose.LIVE and are_used(request.block_size_bytes) and not request.too_large

    def _sub_block_of(self, block: Block, position: int) -> tuple[Block, Extent | None]:
        """Return the sub-block to read instead of a missing block, if any; else the block."""
        tools = self._tools
        if tools.fetches.has(block, self._request.headers):
            return block, None
        sub_block = self._all_sub_blocks().at(position, block)
        if sub_block is None:
            return block, None
        self.is_sub_block = True
        return sub_block, tools.directory.index.lookup(sub_block.id)

    def _all_sub_blocks(self) -> SubBlocks:
        if self._sub_blocks is None:
            self._sub_blocks = SubBlocks(self._tools.directory.index, self._tools.fetches, self._request, self.fetched)
        return self._sub_blocks

    # Files and fills

    async def _open_block(self, block: Block, extent: Extent) -> BlockSource | None:
        """The block's file; None, and the block dropped, when it is gone."""
        try:
            file = await self._open_file(block, extent)
        except BlockDamaged:
            await self.drop(block, extent)
            return None
        self.was_ahead = self._tools.ahead_marks.take(block.id)
        if not self.was_ahead and block.id not in self.fetched:
            self._tools.accesses.note(extent.file)  # a first read, after the prefetch, is no return
        return self.in_file(block, extent, file, cached=block.id not in self.fetched)

    async def _open_file(self, block: Block, extent: Extent) -> BlockLease:
        tools = self._tools
        file = tools.open_files.get(extent.file)
        if file is None:
            file = await tools.threads.open(tools.directory.store.open_published, extent)
            tools.open_files.keep(extent.file, file)
        return file

    async def _open_fill(self, block: Block) -> FillSource | None:
        """Join the block's fill, or start it, and wait until the origin's answer is good.

        None: look for the block again, as another process has published it meanwhile, or begun to.
        """
        tools, request = self._tools, self._request
        if request.too_large:
            raise NotKept("size", "the object is larger than those that the slot keeps")
        fill = tools.fetches.join(block, request.headers, request.purpose)
        if fill is None:
            if not self._looks_first and await tools.unpinned_gets.settled(
                request.version.key, block.offset, request.headers
            ):
                return None
            fill = tools.fetches.start(block, request.slot, request.headers, request, request.purpose, request.answer)
        if fill.started_by is not request:
            metrics.CACHE_COALESCED.add(1, request.slot)
        try:
            await fill.begun()
        except BlockPublished:
            fill.leave(request.purpose)
            return None
        except OriginBusy as error:
            fill.leave(request.purpose)
            if fill.was_denied_another(error):
                return None
            raise
        except BaseException:
            fill.leave(request.purpose)
            raise
        return FillSource(fill, tools.residency, tools.threads, reader=request, purpose=request.purpose)

    def _last_missing(self, position: int) -> int:
        """The last byte of the range before the next block behind `position` that is in the index."""
        request, size = self._request, self._request.block_size_bytes
        for number in range(position // size + 1, request.numbers.stop)[:BLOCKS_LOOKED_UP_MAX]:
            if self._tools.directory.index.lookup(request.block(number).id) is not None:
                return number * size - 1
        return request.range.last


def why_missing(
    tools: ReadDependencies, version: ObjectVersion, slot: str, before: ObjectVersion | None
) -> MissReason | None:
    if not tools.isolation.writable or not tools.settings.keeps(slot, version.size_bytes):
        return "not-kept"
    size_bytes, ids = tools.settings.block_size_of(slot), layout.BlockIds(version)
    try:
        block = layout.block_at(version, 0, size_bytes, ids)
        return _why(tools, version, size_bytes, before, block, _standing(tools, block, 0, size_bytes, ids))
    except StoreUnavailable:
        return "not-kept"


def _standing(tools: ReadDependencies, block: Block, position: int, size_bytes: int, ids: layout.BlockIds) -> Standing:
    """Return the state of a missing block; "evicted" also if the sub-block at a position was cached."""
    index, version = tools.directory.index, block.version
    [standing] = index.standings([block.id])
    if standing == "unknown" and version.size_bytes > SUB_BLOCK_BYTES and are_used(size_bytes):
        sub_block = layout.block_at(version, position // SUB_BLOCK_BYTES, SUB_BLOCK_BYTES, ids)
        [of_sub_block] = index.standings([sub_block.id])
        return "evicted" if of_sub_block == "evicted" else standing
    return standing


def _why(
    tools: ReadDependencies,
    version: ObjectVersion,
    size_bytes: int,
    before: ObjectVersion | None,
    block: Block,
    standing: Standing,
) -> MissReason:
    """Why a block of a version is missing, that stood so before it was asked for."""
    if standing != "unknown":
        return "evicted"  # a cached block was found damaged
    if block.id in tools.fetches.refused:  # a small one, whose bytes had left before that was known
        return "not-kept"
    if before is not None and before != version:
        return "changed"
    index, object_id = tools.directory.index, layout.object_id(version.key)
    if version.size_bytes > size_bytes or not index.has_others(object_id, ()):
        return "first-read"  # a larger object would need the ids of all its blocks
    ids = layout.BlockIds(version)
    own = [layout.block_at(version, 0, size_bytes, ids).id]
    if version.size_bytes > SUB_BLOCK_BYTES and are_used(size_bytes):
        count = -(-version.size_bytes // SUB_BLOCK_BYTES)
        own += [layout.block_at(version, number, SUB_BLOCK_BYTES, ids).id for number in range(count)]
    return "changed" if index.has_others(object_id, own) else "first-read"


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


async def fetch(
    tools: ReadDependencies,
    version: ObjectVersion,
    piece: ByteRange,
    slot: str,
    purpose: Purpose,
    come: Callable[[int], None],
) -> tuple[int, bool]:
    reader = RangeReader(tools, version, piece, slot, _NO_HEADERS, purpose)
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
    return piece.length, await _published(tools, version, piece, slot, purpose)


async def _published(
    tools: ReadDependencies, version: ObjectVersion, piece: ByteRange, slot: str, purpose: Purpose
) -> bool:
    """Wait until no fill of a piece runs here: what has arrived only is lost when the process ends.

    False when one has ended whose bytes the directory could not take.
    """
    kept = True
    for block in layout.blocks_of(version, piece, tools.settings.block_size_of(slot)):
        if (fill := tools.fetches.join(block, _NO_HEADERS, purpose)) is not None:
            try:
                await fill.over()
            finally:
                fill.leave(purpose)
            kept = kept and fill.kept
    return kept
