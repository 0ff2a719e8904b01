"""Bytes of blocks on disk, given to a client as they lie in their file: verified, and in memory.

A range in one block that is indexed, verified and in memory needs no reader and no wait (`span_of`). Other blocks are
verified ahead of their readers, so that device, processor and network are busy at once: within a block piece by piece,
the next one while the client takes the last (`PieceVerifier`); behind it, once bytes had to be verified, the blocks
that the reader comes to next (`BlocksAhead`): one, and more as long as the reader has to wait. So little is read for a
client that takes its time, and what is read ahead for all readers of a process is bounded.

Bytes verified ahead stay in the page cache, and their open file remembers it: bytes read for one reader are read for
all. The reader that comes to them finds out any damage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.blocks import layout
from gateway.blocks.block_file import BlockLease, read_verified
from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.directory import DiskThreads
from gateway.blocks.handed_out import BLOCKS_MAX, HandedOut, HeldBlock, hand_out
from gateway.blocks.layout import Block, Extent, unpack_extent
from gateway.blocks.plan import ReadPlan
from gateway.core.errors import BlockError, StoreUnavailable
from gateway.core.model import BodyPiece, FileSpan, ObjectVersion, PinnedFileSpan
from gateway.telemetry import metrics


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

    __slots__ = ("_as_written", "_cached", "_dependencies", "_extent", "_file", "_since", "_slot")

    def __init__(
        self,
        dependencies: CacheDependencies,
        extent: Extent,
        file: BlockLease,
        position: int,
        count: int,
        slot: str,
        *,
        cached: bool | None = True,
        as_written: bool = False,
        since: int = -1,
    ) -> None:
        """`count` intact bytes at a position of the block; the lease becomes this span's to end.

        `since` is of `BlockFile.stayed`.
        `cached`: whether the bytes count as hits, or as misses; None: they are counted elsewhere. `as_written` is of
        BlockSource.
        """
        self.span = FileSpan(file.descriptor, extent.offset + position, count, self)
        self._dependencies = dependencies
        self._extent = extent
        self._file = file
        self._slot = slot
        self._since = since
        self._cached = cached
        self._as_written = as_written

    @property
    def checksums(self) -> bytes:
        """As `Extent.checksums_of`."""
        return self._extent.checksums_of(self.span.offset - self._extent.offset, self.span.count)

    # As `model.SpanFile`.

    def intact(self, offset: int, count: int) -> bool:
        file = self._file.file
        if self._as_written and file.unwritten(self._dependencies.residency, offset, count):
            return True
        return file.intact(self._extent, offset - self._extent.offset, count)

    def stayed(self, offset: int, count: int) -> bool:
        if self._as_written:
            return self.intact(offset, count)
        return self._file.file.stayed(self._extent, offset - self._extent.offset, count, self._since)

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return await restored(self._dependencies.threads, self._file, self._extent, offset, count)

    # As `objects.PinnedFileSpan`.

    def failed(self, error: Exception) -> None:
        """Stop trusting the file from which bytes could not be sent."""
        self._file.file.distrust()
        self._dependencies.open_files.drop(self._extent.file)
        if isinstance(error, OSError):
            self._dependencies.isolation.gone(error)

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

    __slots__ = ("_commit", "_dependencies", "_handed_out", "_ids", "_size_bytes", "_slot", "version")

    def __init__(self, dependencies: CacheDependencies, version: ObjectVersion, slot: str) -> None:
        self._dependencies = dependencies
        self.version = version
        self._slot = slot
        self._size_bytes = dependencies.settings.block_size_of(slot)
        self._ids: dict[int, bytes] = {}
        self._handed_out: HandedOut | None = None
        self._commit = 0
        """The last one, and the index's last commit when its blocks were looked up."""

    def hand_out(self, first: int, count: int) -> HandedOut | None:
        """Return the first of these bytes, as far as their blocks are here, for a client that reads files itself."""
        known, dependencies = self._handed_out, self._dependencies
        commit = dependencies.directory.index.last_commit.number()
        if known is None or known.asked != (first, count) or not (commit == self._commit or self._are_there(known)):
            known = self._handed_out = self._hand_out(first, first + count)
        if known is None or not dependencies.isolation.readable:
            return None
        self._commit = commit
        note = dependencies.accesses.note
        for place in known.places:
            note(place.extent.file)
        return known

    def _are_there(self, known: HandedOut) -> bool:
        for place in known.places:
            rows = _held_rows(self._dependencies, place.block_id)
            if rows is None or rows[0] != place.row:
                return False
        return True

    def _hand_out(self, first: int, stop: int) -> HandedOut | None:
        size_bytes, begin = self._size_bytes, first
        blocks: list[HeldBlock] = []
        while begin < stop and len(blocks) < BLOCKS_MAX:
            rows, number = self._rows(begin, 1), begin // size_bytes
            if rows is None:
                break
            end = min(stop, (number + 1) * size_bytes)
            blocks.append((self._ids[number], begin % size_bytes, end - begin, rows))
            begin = end
        return hand_out(self.version, (first, stop - first), blocks) if blocks else None

    def span(self, first: int, count: int) -> WarmSpan | UnreadSpan | None:
        """Return a span as `warm_span`; the caller counts the bytes. A few unverified bytes give an UnreadSpan."""
        dependencies, rows = self._dependencies, self._rows(first, count)
        if rows is None:
            return None
        extent, position = unpack_extent(*rows), first % self._size_bytes
        found = span_of(dependencies, extent, position, count, self._slot, cached=None)
        if found is None and count <= UNREAD_BYTES_MAX:
            return UnreadSpan(dependencies, extent, position, count, self._slot)
        return found

    def _rows(self, first: int, count: int) -> tuple[bytes, bytes] | None:
        dependencies, size_bytes = self._dependencies, self._size_bytes
        number = first // size_bytes
        if (first + count - 1) // size_bytes != number or not dependencies.isolation.readable:
            return None
        block_id = self._ids.get(number)
        if block_id is None:
            if len(self._ids) >= HELD_IDS_MAX:
                self._ids.clear()
            block_id = self._ids[number] = layout.block_id(self.version, number, size_bytes)
        return None if block_id in dependencies.ahead_marks else _held_rows(dependencies, block_id)


class UnreadSpan:
    """Bytes of one block that have to come from the device, or to be verified, before they are a `WarmSpan`."""

    __slots__ = ("_count", "_dependencies", "_extent", "_position", "_slot")

    def __init__(self, dependencies: CacheDependencies, extent: Extent, position: int, count: int, slot: str) -> None:
        self._dependencies = dependencies
        self._extent = extent
        self._position = position
        self._count = count
        self._slot = slot

    async def verified(self) -> WarmSpan | None:
        """Verify and return the bytes; None: an ordinary read finds out what is wrong. The caller counts them."""
        dependencies, extent, position, count = self._dependencies, self._extent, self._position, self._count
        await _on_file(dependencies, extent, lambda file: file.file.make_ready(extent, position, count))
        return span_of(dependencies, extent, position, count, self._slot, cached=None)


UNREAD_BYTES_MAX = 1024 * 1024
"""Bytes read at once before the first of them is sent. More are read piece by piece (reader.py)."""


def _held_rows(dependencies: CacheDependencies, block_id: bytes) -> tuple[bytes, bytes] | None:
    """Return what `unpack_extent` unpacks."""
    index, held = dependencies.directory.index, dependencies.held_rows
    commit = index.last_commit.number()
    known = held.get(block_id)
    if known is not None and known[0] == commit:
        return known[1]
    try:
        found = index.rows(block_id)
    except StoreUnavailable:
        return None
    if found is None:
        return None
    if len(held) >= HELD_ROWS_MAX:
        held.clear()
    held[block_id] = commit, found
    return found


HELD_IDS_MAX = 16
"""Limit for one object; 150 bytes each."""

HELD_ROWS_MAX = 16_384
"""Limit for all objects; 1 to 2 KiB each where blocks are large."""


def span_of(
    dependencies: CacheDependencies, extent: Extent, position: int, count: int, slot: str, *, cached: bool | None
) -> WarmSpan | None:
    file = dependencies.open_files.get(extent.file)
    if file is None:
        return None
    block_file = file.file
    since = block_file.withdrawals
    if not block_file.intact(extent, position, count):
        since = -1
        if not block_file.verify_at_once(extent, position, count):
            file.close()
            return None
    dependencies.accesses.note(extent.file)
    return WarmSpan(dependencies, extent, file, position, count, slot, cached=cached, since=since)


READ_BYTES = 1024 * 1024
"""Bytes that a thread reads for one reader to hold in memory; also the first piece for which a reader waits."""

PIECE_BYTES_MAX = 8 * 1024 * 1024
"""Limit to which the pieces of a block grow for one reader: work for each piece is rare then."""


RESTORED_BYTES = 256 * 1024
"""Bytes kept in memory for a slow client when those of its file do not stay there."""


BLOCK_AHEAD_BYTES = 8 * 1024 * 1024
"""Bytes at the beginning of a block that are verified before a reader comes to it."""

READER_AHEAD_BYTES = 32 * 1024 * 1024
"""Most that is verified in further blocks for one reader: at 2 GB/s, 16 milliseconds of work."""


@dataclass(eq=False, slots=True)
class _Piece:
    position: int
    count: int
    is_wanted: bool = True
    verifying: asyncio.Task[Any] | None = None

    def has_reader(self) -> bool:
        return self.is_wanted

    def let_be(self) -> None:
        """Let the piece go on without a reader; the next reader finds its result again."""
        self.is_wanted = False
        if self.verifying is not None:
            self.verifying.add_done_callback(lambda task: task.cancelled() or task.exception())


class PieceVerifier:
    """Verifies one block for one reader, piece by piece, at most one of them ahead. Event loop only.

    `reads_on` says of a piece whether all that follows it in the block is wanted, too.
    """

    def __init__(self, file: BlockLease, extent: Extent, threads: DiskThreads) -> None:
        self._file = file
        self._extent = extent
        self._threads = threads
        self._ahead: _Piece | None = None
        self.has_worked = False
        """True if any of the bytes had to be verified."""

    async def verify(self, position: int, count: int, *, reads_on: bool) -> None:
        """Verify the bytes at a position of the block; raise BlockDamaged when they have changed."""
        piece = self._taken(position, count) or self._begin(position, count, reads_on)
        assert piece.verifying is not None  # noqa: S101 - `_begin` has set it
        await piece.verifying

    def resume(self, position: int, count: int, *, reads_on: bool) -> None:
        """Begin with the piece that comes next, unless there is nothing to do for it."""
        if self._file.file.intact(self._extent, position, count):
            return
        self._ahead = self._taken(position, count) or self._begin(position, count, reads_on)

    def stop(self) -> None:
        self._taken(-1, 0)

    def _taken(self, position: int, count: int) -> _Piece | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.position, ahead.count) != (position, count):
            ahead.let_be()
            return None
        return ahead

    def _begin(self, position: int, count: int, reads_on: bool) -> _Piece:
        self.has_worked = True
        piece = _Piece(position, count)
        work = self._threads.disk_holding(self._file, _verify, self._extent, piece, reads_on)
        piece.verifying = asyncio.create_task(work)
        return piece


class BlockSource:
    """A complete block. BlockDamaged when its bytes are not what they were.

    `as_written`: it was fetched for this reader, or ahead for the first that comes, who gets what this process wrote as
    long as that waits to be written to the device. All others get what was read and checked.

    Bytes that must be read to be verified are then given as they lie in the file, too: what a slow client has not taken
    yet waits there and not in this process's memory. Unless they leave memory at once, or the file system cannot tell.
    """

    def __init__(
        self,
        block: Block,
        extent: Extent,
        file: BlockLease,
        dependencies: CacheDependencies,
        *,
        cached: bool,
        as_written: bool,
    ) -> None:
        self.cached = cached
        self.as_written = as_written
        self.from_peer = False
        self.stop = block.offset + block.length
        self.block = block
        self.extent = extent
        self.file = file
        self._dependencies = dependencies
        self._pieces = PieceVerifier(file, extent, dependencies.threads)
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
            return await self._dependencies.threads.disk_holding(self.file, read_leased, self.extent, position, piece)
        return await self._piece(position, last)

    @property
    def was_verified(self) -> bool:
        """True if any of its bytes had to be verified for this reader."""
        return self._pieces.has_worked

    async def close(self) -> None:
        self._pieces.stop()
        self.file.close()

    def _span(self, position: int, count: int) -> FileSpan | None:
        offset = self.extent.offset + position
        return FileSpan(self.file.descriptor, offset, count, self) if self.intact(offset, count) else None

    # As `model.SpanFile`.

    def intact(self, offset: int, count: int) -> bool:
        """Return True if bytes can be sent, as written or after a check."""
        file = self.file.file
        if self.as_written and file.unwritten(self._dependencies.residency, offset, count):
            return True
        return file.intact(self.extent, offset - self.extent.offset, count)

    stayed = intact

    async def restore(self, offset: int, count: int) -> memoryview | None:
        return await restored(self._dependencies.threads, self.file, self.extent, offset, count)

    async def _piece(self, position: int, stop: int) -> BodyPiece:
        """Return the next wanted piece of the block, up to byte `stop` of it, and begin the one behind it."""
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


def read_leased(file: BlockLease, extent: Extent, position: int, count: int) -> memoryview:
    return read_verified(file.descriptor, extent, position, count)


async def restored(
    threads: DiskThreads, file: BlockLease, extent: Extent, offset: int, count: int
) -> memoryview | None:
    """`model.SpanFile.restore` for bytes of a block."""
    return await threads.disk_holding(file, _restored, extent, offset - extent.offset, count)


def _restored(file: BlockLease, extent: Extent, position: int, count: int) -> memoryview | None:
    file.file.verify_unread(extent, position, count, reads_on=False)
    if file.file.intact(extent, position, count):
        return None
    return read_verified(file.descriptor, extent, position, min(count, RESTORED_BYTES))


class BlocksAhead:
    """Verifies the blocks behind the one that a reader is in, once bytes had to be verified. Event loop only.

    Those that were fetched for the reader it lets be: what this process has just written need not be verified.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._dependencies = plan.dependencies
        self._plan = plan
        self._pieces: dict[int, _Piece] = {}
        self._next = 0
        self._depth = 1
        self._depth_max = max(1, READER_AHEAD_BYTES // plan.block_size_bytes)

    def keep_on(self, stop: int) -> None:
        """Keep blocks behind the one ending at `stop` on their way if they are here. Raises StoreUnavailable."""
        first = stop // self._plan.block_size_bytes
        self._next = max(self._next, first)
        while self._next < min(first + self._depth, self._plan.numbers.stop) and self._begin(self._next):
            self._next += 1

    async def come_to(self, position: int) -> None:
        """Wait until what was begun with the block at a position is done: the reader is about to open it."""
        piece = self._pieces.pop(position // self._plan.block_size_bytes, None)
        if piece is None or piece.verifying is None:
            return
        self._dependencies.ahead_room.left_bytes += piece.count
        if not piece.verifying.done():  # the client is faster than the device
            self._depth = min(self._depth + 1, self._depth_max)
            await asyncio.wait((piece.verifying,))

    def stop(self) -> None:
        """End, as the reader goes no further. Idempotent."""
        while self._pieces:
            piece = self._pieces.popitem()[1]
            self._dependencies.ahead_room.left_bytes += piece.count
            piece.let_be()

    def _begin(self, number: int) -> bool:
        dependencies, block = self._dependencies, self._plan.block(number)
        if block.id in self._plan.fetched:
            return True
        extent = dependencies.directory.index.lookup(block.id)
        if extent is None:
            return False
        wanted = self._plan.part_in(block).length
        piece = _Piece(0, min(wanted, BLOCK_AHEAD_BYTES))
        if dependencies.ahead_room.left_bytes < piece.count:
            return False
        if (file := dependencies.open_files.get(extent.file)) is not None:
            with file:
                if file.file.intact(extent, 0, piece.count):
                    return True
        verify = partial(_verify, extent=extent, piece=piece, reads_on=wanted == block.length)
        piece.verifying = asyncio.create_task(_on_file(dependencies, extent, verify))
        dependencies.ahead_room.left_bytes -= piece.count
        self._pieces[number] = piece
        return True


def _verify(file: BlockLease, extent: Extent, piece: _Piece, reads_on: bool) -> None:
    file.file.verify_unread(extent, piece.position, piece.count, reads_on=reads_on, is_wanted=piece.has_reader)


def _on_file(
    dependencies: CacheDependencies, extent: Extent, work: Callable[[BlockLease], None]
) -> Coroutine[Any, Any, None]:
    """Run `work` on a disk thread with a block's file, which is opened first if it is closed. Damage is ignored."""

    def quietly(file: BlockLease) -> None:
        with suppress(BlockError):
            work(file)

    def open_first() -> None:
        with (
            suppress(BlockError),
            dependencies.open_files.opened(extent, dependencies.directory.store.open_published) as file,
        ):
            work(file)

    file = dependencies.open_files.get(extent.file)
    if file is None:
        return dependencies.threads.disk(open_first)
    with file:
        return dependencies.threads.disk_holding(file, quietly)
