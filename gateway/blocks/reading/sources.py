"""Sources of a reader's next bytes: a block on disk, a fetch in progress, or the origin itself.

A source gives one piece at a time, never empty. A piece that is a `FileSpan` is good until the next call or `close`.

A block on disk is verified piece by piece, the next piece while the client takes what it has (verifying.py).

Two short ways serve bytes without a wait. A range that lies in one block, indexed, verified and in
memory, is given as it lies (`warm_span`). An unknown small object is given from memory when its first
response has brought all of it, while it goes to disk (`arrived`). All else is the range reader's (reader.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gateway.blocks import layout
from gateway.blocks.directory import BlockDirectory, DiskThreads
from gateway.blocks.files.block_file import BlockLease, OpenFiles, read_verified
from gateway.blocks.files.page_cache import Residency
from gateway.blocks.files.store import BlockStore
from gateway.blocks.filling.origin_gets import PinnedGet, UnpinnedGets, UnpinnedResponse
from gateway.blocks.filling.single_flight import InflightFetch, MovedToFile, SingleFlight
from gateway.blocks.index.index import AccessLog
from gateway.blocks.layout import Block, BlockSettings, Extent
from gateway.blocks.maintenance.disk_health import CircuitBreaker
from gateway.blocks.reading.verifying import AheadRoom, PieceVerifier
from gateway.core.clock import Clock
from gateway.core.errors import BlockError, OriginBusy, StoreUnavailable
from gateway.core.model import BodyPiece, BorrowedBuffer, ByteRange, FileSpan, ObjectVersion, PinnedFileSpan
from gateway.origin.client import Origin, Purpose
from gateway.telemetry import metrics

_MARKS_MAX = 4096


@dataclass(slots=True)
class AheadMarks:
    """Blocks that this process fetched ahead and no reader has come to yet: reading one shows that its reader goes on.

    Event loop only.
    """

    _blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __contains__(self, block_id: bytes) -> bool:
        return block_id in self._blocks

    def add(self, block_id: bytes) -> None:
        self._blocks[block_id] = None
        if len(self._blocks) > _MARKS_MAX:
            self._blocks.popitem(last=False)

    def take(self, block_id: bytes) -> bool:
        return self._blocks.pop(block_id, self) is None


@dataclass(frozen=True, slots=True)
class ReadDependencies:
    """Built once by `BlockCache.open`."""

    settings: BlockSettings
    directory: BlockDirectory
    origin: Origin
    fetches: SingleFlight
    unpinned_gets: UnpinnedGets
    threads: DiskThreads
    residency: Residency
    ahead_marks: AheadMarks
    accesses: AccessLog
    open_files: OpenFiles
    isolation: CircuitBreaker
    clock: Clock
    ahead_room: AheadRoom = field(default_factory=AheadRoom)
    held_rows: dict[bytes, tuple[int, tuple[bytes, bytes]]] = field(default_factory=dict)
    """Rows that `HeldObject` has looked up for a block, and the index's commit at that time."""


BLOCKS_LOOKED_UP_MAX = 1024
"""Limit of a range's looked-up blocks: a 5 TiB object must not hold up the event loop."""


@dataclass(slots=True, eq=False)
class ReadRequest:
    """One reader's request; fills know the reader by it. `headers` go along with its requests to the origin.

    `answer` is the origin's earlier answer, if the version was unknown before. An object that is `too_large`
    is larger than those that its slot keeps.
    """

    numbers: range = field(init=False)
    """Numbers of the range's blocks."""
    version: ObjectVersion
    range: ByteRange
    slot: str
    headers: Mapping[str, str]
    purpose: Purpose
    answer: UnpinnedResponse | None
    block_size_bytes: int
    too_large: bool
    ids: layout.BlockIds = field(init=False)

    def __post_init__(self) -> None:
        self.ids = layout.BlockIds(self.version)
        self.numbers = layout.block_numbers(self.range, self.block_size_bytes)

    @property
    def blocks_of_object(self) -> int:
        return -(-self.version.size_bytes // self.block_size_bytes)

    def block(self, number: int) -> Block:
        return layout.block_at(self.version, number, self.block_size_bytes, self.ids)

    def block_before(self, block: Block) -> Block:
        return self.block(block.offset // self.block_size_bytes - 1)

    def part_in(self, block: Block) -> ByteRange:
        return ByteRange(max(self.range.first, block.offset), min(self.range.last, block.range.last))


READ_BYTES = 1024 * 1024
"""Bytes that a thread reads for one reader to hold in memory; also the first piece for which a reader waits."""

PIECE_BYTES_MAX = 8 * 1024 * 1024
"""Limit to which the pieces of a block grow for one reader: work for each piece is rare then."""


RESTORED_BYTES = 256 * 1024
"""Bytes kept in memory for a slow client when those of its file do not stay there."""


class Source(Protocol):
    cached: bool
    """True if the bytes count as hits."""

    stop: int
    """The first byte of the object behind those that it has."""

    async def read(self, first: int, stop: int) -> BodyPiece:
        """Bytes of the object from `first` on, one at least, none at or behind `stop`."""

    async def close(self) -> None: ...


class BlockSource:
    """A complete block. BlockDamaged when its bytes are not what they were.

    Bytes that must be read to be verified are then given as they lie in the file, too: what a slow client has not taken
    yet waits there and not in this process's memory. Unless they leave memory at once, or the file system cannot tell.
    """

    def __init__(
        self,
        block: Block,
        extent: Extent,
        file: BlockLease,
        residency: Residency,
        threads: DiskThreads,
        *,
        cached: bool,
    ) -> None:
        self.cached = cached
        self.stop = block.offset + block.length
        self.block = block
        self.extent = extent
        self._file = file
        self._residency = residency
        self._threads = threads
        self._pieces = PieceVerifier(file, extent, threads)
        self._spans = True
        self._begun_at: int | None = None

    def span(self, first: int, stop: int) -> FileSpan | None:
        """Bytes of the object `first` to `stop` as they lie, if all of them are verified and in memory."""
        return self._span(first - self.block.offset, stop - first)

    async def read(self, first: int, stop: int) -> BodyPiece:
        span = self.span(first, stop)
        if span is not None:
            return span
        position, last = first - self.block.offset, stop - self.block.offset
        if not self._spans:
            piece = min(last, (position // READ_BYTES + 1) * READ_BYTES) - position
            return await self._threads.disk_holding(self._file, _read_verified, self.extent, position, piece)
        return await self._piece(position, last)

    def take_file(self) -> BlockLease:
        """The block's file, for the caller to release: this source is over."""
        return self._file

    def distrust(self) -> None:
        """Bytes of the file could not be sent, or were not what they were."""
        self._file.file.distrust()

    @property
    def was_verified(self) -> bool:
        """True if any of its bytes had to be verified for this reader."""
        return self._pieces.has_worked

    async def close(self) -> None:
        self._pieces.stop()
        self._file.close()

    def _span(self, position: int, count: int) -> FileSpan | None:
        """The bytes as they lie, if all of them are verified and in memory."""
        offset = self.extent.offset + position
        return FileSpan(self._file.descriptor, offset, count, self) if self.intact(offset, count) else None

    # As `objects.SpanFile`.

    def intact(self, offset: int, count: int) -> bool:
        """Return True if bytes can be sent: those fetched for this reader as written, others after a check."""
        file = self._file.file
        if not self.cached and file.unwritten(self._residency, offset, count):
            return True
        return file.intact(self.extent, offset - self.extent.offset, count)

    stayed = intact

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return await restored(self._threads, self._file, self.extent, offset, count)

    async def _piece(self, position: int, stop: int) -> BodyPiece:
        """The next piece of what is wanted of the block, up to byte `stop` of it; the one behind it is begun."""
        reads_on, end = stop == self.extent.length, self._piece_end(position, stop)
        span = self._span(position, end - position)
        if span is None:
            await self._pieces.verify(position, end - position, reads_on=reads_on)
            span = self._span(position, end - position)
        if span is None:
            self._spans = False
            return await self.read(self.block.offset + position, self.block.offset + stop)
        if end < stop:
            count = self._piece_end(end, stop) - end
            if not self.intact(self.extent.offset + end, count):
                self._pieces.resume(end, count, reads_on=reads_on)
        return span

    def _piece_end(self, position: int, stop: int) -> int:
        """Return a piece's end: a piece is as long as the reader's earlier part of the block."""
        if self._begun_at is None:
            self._begun_at = position
        size = min(max(READ_BYTES, position - self._begun_at), PIECE_BYTES_MAX)
        return min(stop, (position + size) // READ_BYTES * READ_BYTES)


class FillSource:
    """A block that is being filled: its bytes as they arrive. Raises what makes the fill fail, and MovedToFile.

    One that another reader began, and whose bytes have all arrived, counts as cached.
    """

    def __init__(
        self,
        fill: InflightFetch,
        residency: Residency,
        threads: DiskThreads,
        *,
        reader: object,
        purpose: Purpose = Purpose.LIVE,
    ) -> None:
        self.cached = fill.all_arrived and fill.started_by is not reader
        self.stop = fill.block.offset + fill.block.length
        self.block = fill.block
        self._fill = fill
        self._purpose = purpose
        self._residency = residency
        self._threads = threads

    async def read(self, first: int, stop: int) -> BodyPiece:
        fill = self._fill
        position = first - fill.block.offset
        available = await fill.beyond(position)
        count = min(stop - fill.block.offset, available) - position
        if fill.content is not None:
            return BorrowedBuffer(fill.content[position : position + count])
        if fill.moved_to is not None:
            raise MovedToFile(fill.moved_to, fill.file)
        if position >= fill.unwritten_from():
            file, offset = _GrowingFile(fill, self._residency, self._threads), fill.extent.offset + position
            if file.intact(offset, count):
                return FileSpan(fill.file.descriptor, offset, count, file)
        return await self._read(position, min(count, READ_BYTES - position % READ_BYTES))

    def was_denied_another(self, error: OriginBusy) -> bool:
        return self._fill.was_denied_another(error)

    async def close(self) -> None:
        self._fill.leave(self._purpose)

    async def _read(self, position: int, count: int) -> memoryview:
        file, extent = self._fill.file, self._fill.extent
        return await self._threads.disk_holding(file, _read_verified, extent, position, count)


class _GrowingFile:
    """The file of a fill as `objects.SpanFile`: bytes that wait to be written to the device are those that came."""

    __slots__ = ("_extent", "_file", "_residency", "_threads", "_unwritten_from")

    def __init__(self, fill: InflightFetch, residency: Residency, threads: DiskThreads) -> None:
        self._file = fill.file  # the fill's own lease: its files stay open as long as it has readers
        self._extent = fill.extent
        self._unwritten_from = fill.unwritten_from
        self._residency = residency
        self._threads = threads

    def intact(self, offset: int, count: int) -> bool:
        waits = self._residency.unwritten(self._file.descriptor, offset, count)
        return waits and offset - self._extent.offset >= self._unwritten_from()

    stayed = intact

    async def restore(self, offset: int, count: int) -> memoryview:
        position = offset - self._extent.offset
        count = min(count, RESTORED_BYTES)
        return await self._threads.disk_holding(self._file, _read_verified, self._extent, position, count)


class OriginSource:
    """The rest of the range, straight from the origin."""

    cached = False

    def __init__(self, get: PinnedGet) -> None:
        self.stop = get.range.stop
        self._get = get
        self._pieces = get.pieces()

    async def read(self, first: int, stop: int) -> bytes | memoryview:
        while True:
            piece = await anext(self._pieces)
            if piece:
                return piece

    async def close(self) -> None:
        await self._pieces.aclose()
        await self._get.aclose()


async def restored(
    threads: DiskThreads, file: BlockLease, extent: Extent, offset: int, count: int
) -> memoryview | None:
    """`objects.SpanFile.restore` for bytes of a block."""
    return await threads.disk_holding(file, _restored, extent, offset - extent.offset, count)


def _restored(file: BlockLease, extent: Extent, position: int, count: int) -> memoryview | None:
    file.file.verify_unread(extent, position, count, reads_on=False)
    if file.file.intact(extent, position, count):
        return None
    return read_verified(file.descriptor, extent, position, min(count, RESTORED_BYTES))


def _read_verified(file: BlockLease, extent: Extent, position: int, count: int) -> memoryview:
    return read_verified(file.descriptor, extent, position, count)


class _GivenBack:
    """A closed span's file: it sends nothing more."""

    def intact(self, offset: int, count: int) -> bool:
        return False

    stayed = intact

    async def restore(self, offset: int, count: int) -> memoryview | None:
        raise StoreUnavailable("the block's file is closed")


_GIVEN_BACK = _GivenBack()


class WarmSpan(PinnedFileSpan):
    """A range that lies in one block, and the account that its bytes go on when it is closed."""

    __slots__ = ("_cached", "_extent", "_file", "_since", "_slot", "_tools")

    def __init__(
        self,
        tools: ReadDependencies,
        extent: Extent,
        file: BlockLease,
        position: int,
        count: int,
        slot: str,
        *,
        cached: bool | None = True,
        since: int = -1,
    ) -> None:
        """`count` intact bytes at a position of the block; the lease becomes this span's to end.

        `since` is of `BlockFile.stayed`.
        `cached`: whether the bytes count as hits, or as misses; None: they are counted elsewhere.
        """
        self.span = FileSpan(file.descriptor, extent.offset + position, count, self)
        self._tools = tools
        self._extent = extent
        self._file = file
        self._slot = slot
        self._since = since
        self._cached = cached

    # As `objects.SpanFile`.

    def intact(self, offset: int, count: int) -> bool:
        file = self._file.file
        if self._cached is False and file.unwritten(self._tools.residency, offset, count):
            return True
        return file.intact(self._extent, offset - self._extent.offset, count)

    def stayed(self, offset: int, count: int) -> bool:
        if self._cached is False:
            return self.intact(offset, count)
        return self._file.file.stayed(self._extent, offset - self._extent.offset, count, self._since)

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return await restored(self._tools.threads, self._file, self._extent, offset, count)

    # As `objects.PinnedFileSpan`.

    def failed(self, error: Exception) -> None:
        """Stop trusting the file from which bytes could not be sent."""
        self._file.file.distrust()
        self._tools.open_files.drop(self._extent.file)
        if isinstance(error, OSError):
            self._tools.isolation.gone(error)

    def close(self) -> None:
        if self.span.file is _GIVEN_BACK:
            return
        self._file.close()
        if self._cached is not None:
            counter = metrics.CACHE_HIT_BYTES if self._cached else metrics.CACHE_MISS_BYTES
            counter.add(self.span.count, self._slot)
        self.span.file = _GIVEN_BACK  # and no circle of references is left for the collector


class HeldObject:
    """Spans of one version's blocks, for repeated reads: constant values are computed once."""

    __slots__ = ("_ids", "_size_bytes", "_slot", "_tools", "_version")

    def __init__(self, tools: ReadDependencies, version: ObjectVersion, slot: str) -> None:
        self._tools = tools
        self._version = version
        self._slot = slot
        self._size_bytes = tools.settings.block_size_of(slot)
        self._ids: dict[int, bytes] = {}

    def span(self, first: int, count: int) -> WarmSpan | UnreadSpan | None:
        """Return a span as `warm_span`; the caller counts the bytes. A few unverified bytes give an UnreadSpan."""
        tools, extent = self._tools, self._extent(first, count)
        if extent is None:
            return None
        position = first % self._size_bytes
        found = _span_of(tools, extent, position, count, self._slot, cached=None)
        if found is None and count <= UNREAD_BYTES_MAX:
            return UnreadSpan(tools, extent, position, count, self._slot)
        return found

    def has(self, first: int, count: int) -> bool:
        """Return True if the index knows the block that holds all of the bytes."""
        return self._extent(first, count) is not None

    def _extent(self, first: int, count: int) -> Extent | None:
        tools, size_bytes = self._tools, self._size_bytes
        number = first // size_bytes
        if (first + count - 1) // size_bytes != number or not tools.isolation.readable:
            return None
        block_id = self._ids.get(number)
        if block_id is None:
            if len(self._ids) >= HELD_IDS_MAX:
                self._ids.clear()
            block_id = self._ids[number] = layout.block_id(self._version, number, size_bytes)
        return None if block_id in tools.ahead_marks else _held_extent(tools, block_id)


class UnreadSpan:
    """Bytes of one block that have to come from the device, or to be verified, before they are a `WarmSpan`."""

    __slots__ = ("_count", "_extent", "_position", "_slot", "_tools")

    def __init__(self, tools: ReadDependencies, extent: Extent, position: int, count: int, slot: str) -> None:
        self._tools = tools
        self._extent = extent
        self._position = position
        self._count = count
        self._slot = slot

    async def verified(self) -> WarmSpan | None:
        """Verify and return the bytes; None: an ordinary read finds out what is wrong. The caller counts them."""
        tools, extent, position, count = self._tools, self._extent, self._position, self._count
        file = tools.open_files.get(extent.file)
        if file is None:
            store = tools.directory.store
            await tools.threads.disk(_open_and_make_ready, tools.open_files, store, extent, position, count)
        else:
            with file:
                work = tools.threads.disk_holding(file, _make_ready, extent, position, count)
            await work
        return _span_of(tools, extent, position, count, self._slot, cached=None)


UNREAD_BYTES_MAX = 1024 * 1024
"""Bytes read at once before the first of them is sent. More are read piece by piece (verifying.py)."""


def _open_and_make_ready(open_files: OpenFiles, store: BlockStore, extent: Extent, position: int, count: int) -> None:
    with suppress(BlockError), open_files.opened(extent, store.open_published) as file:
        _make_ready(file, extent, position, count)


def _make_ready(file: BlockLease, extent: Extent, position: int, count: int) -> None:
    with suppress(BlockError):
        file.file.make_ready(extent, position, count)


def _held_extent(tools: ReadDependencies, block_id: bytes) -> Extent | None:
    index, held = tools.directory.index, tools.held_rows
    commit = index.last_commit.number()
    known = held.get(block_id)
    if known is not None and known[0] == commit:
        return layout.unpack_extent(*known[1])
    try:
        rows = index.rows(block_id)
    except StoreUnavailable:
        return None
    if rows is None:
        return None
    if len(held) >= HELD_ROWS_MAX:
        held.clear()
    held[block_id] = commit, rows
    return layout.unpack_extent(*rows)


HELD_IDS_MAX = 16
"""Limit for one object; 150 bytes each."""

HELD_ROWS_MAX = 16_384
"""Limit for all objects; 1 to 2 KiB each where blocks are large."""


def _span_of(
    tools: ReadDependencies, extent: Extent, position: int, count: int, slot: str, *, cached: bool | None
) -> WarmSpan | None:
    file = tools.open_files.get(extent.file)
    if file is None:
        return None
    block_file = file.file
    since = block_file.withdrawals
    if not block_file.intact(extent, position, count):
        since = -1
        if not block_file.verify_at_once(extent, position, count):
            file.close()
            return None
    tools.accesses.note(extent.file)
    return WarmSpan(tools, extent, file, position, count, slot, cached=cached, since=since)


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
    return _span_of(tools, extent, first - number * size_bytes, byte_range.length, slot, cached=True)


GIVEN_BYTES_MAX = 128 * 1024
"""Limit of bytes that are copied if the client's socket does not take them, for every slow client."""


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
    metrics.CACHE_MISS_BYTES.add(byte_range.length, slot)
    return content[byte_range.first : byte_range.stop]
