"""Fetching small blocks: into memory, given to their readers from there, then many at once appended to a segment.

    room reserved (index) → bytes appended → blocks entered and room counted (index)

Each slot has one segment at a time that this process, and no other, appends to; sealing it means forgetting it. It may
be evicted like any other file. The memory for blocks is bounded, from a block's first byte until it is written: beyond
that, fetching goes no faster than the disk takes it. Only other processes and slow readers wait for the disk; one that
takes nothing costs readers nothing.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from gateway.blocks import layout, store
from gateway.blocks.directory import BlockDirectory
from gateway.blocks.fetch_locks import LockKey
from gateway.blocks.layout import Block, Reservation
from gateway.blocks.origin_gets import BodyCheck, PinnedGet, UnpinnedResponse, is_as_promised
from gateway.blocks.single_flight import FetchDependencies, InflightFetch
from gateway.blocks.store import RECORDS_MAX, SEGMENT_BYTES_MAX, Placed, SmallBlock
from gateway.core.errors import BlockDamaged, NotKept, StoreUnavailable
from gateway.core.model import ByteRange
from gateway.disk.file_lease import FileLease, SharedFile
from gateway.origin.client import Purpose
from gateway.origin.peer_protocol import chunk_checksums
from gateway.telemetry import metrics

PARTS_OF_CAPACITY = 256
"""A segment takes at most this part of what its slot may take: policies need files that are small beside it."""

_ROUNDS_MAX = 100
"""Each is lost to a process that evicts the segment under our hands: so many in a row never happen."""


class _Alike(NamedTuple):
    """Common properties of a segment's blocks: slot, `wanted`, `copy` and pin, as of layout.Reservation."""

    slot: str
    wanted: bool
    copy: bool
    pin: int


@dataclass(slots=True)
class _Segment:
    """The segment that a slot's blocks are appended to now."""

    file: str
    room_bytes: int
    size_bytes: int = 0
    records: int = 0
    ahead_bytes: int = 0
    """Room that is set aside for the blocks to come."""

    unsealed: FileLease[SharedFile] | None = None
    """A lock on the file. It ends with this segment, and when the file is evicted: nothing is appended then."""

    @property
    def new(self) -> bool:
        return self.records == 0

    def close(self) -> None:
        """End the lock at once: the exception that ended the segment may refer to it, and live long."""
        if self.unsealed is not None:
            self.unsealed.close()
            self.unsealed = None


@dataclass(slots=True)
class SegmentAppender:
    directory: BlockDirectory
    has_local_readers: bool = False
    _open: dict[_Alike, _Segment] = field(default_factory=dict)

    def append(self, slot: str, blocks: Sequence[SmallBlock], wanted: bool = False, copy: bool = False) -> int:
        """Keep the first of the blocks, as many as one segment has room for; return how many.

        StoreUnavailable when there is no room for them on the slot's account, or the disk takes nothing.
        """
        pins = self.directory.index.pins()
        numbers = [self.directory.pin_of(pins, small.block, slot) for small in blocks]
        alike = _Alike(slot, wanted, copy, numbers[0])
        blocks = blocks[: sum(1 for _ in takewhile(lambda number: number == alike.pin, numbers))]
        for _ in range(_ROUNDS_MAX):
            segment = self._open.pop(alike, None)
            placed = self._place(segment, blocks) if segment is not None else None
            if segment is None or placed is None or not placed.blocks:
                self._give_back(segment)
                segment = _Segment(store.new_name(), self._segment_bytes(slot))
                placed = self._place(segment, blocks)
            if self._append(alike, segment, placed):
                return len(placed.blocks)
        raise StoreUnavailable("other processes keep evicting the block that was just written")

    def _place(self, segment: _Segment, blocks: Sequence[SmallBlock]) -> Placed:
        return store.place(
            segment.file, segment.size_bytes, blocks[: RECORDS_MAX - segment.records], segment.room_bytes
        )

    def _segment_bytes(self, slot: str) -> int:
        capacity = self.directory.capacity
        limit_bytes = capacity.share(slot).limit_bytes
        available_bytes = capacity.total_bytes if limit_bytes is None else limit_bytes
        return min(SEGMENT_BYTES_MAX, available_bytes // PARTS_OF_CAPACITY)

    @property
    def is_ahead(self) -> bool:
        """Return True if room is set aside for blocks that may not come."""
        return any(segment.ahead_bytes for segment in self._open.values())

    def let_go(self, file: str | None = None) -> None:
        """Close an evicted segment, as it keeps its room while it is open; None: all that are. Index thread.

        The next append finds it gone.
        """
        for segment in self._open.values():
            if segment.unsealed is None or file not in (None, segment.file):
                continue
            if file is not None or not os.fstat(segment.unsealed.descriptor).st_nlink:
                segment.unsealed = None

    def seal(self) -> None:
        """Append no more to any segment without room set aside. Not while another call is under way."""
        self._open = {alike: segment for alike, segment in self._open.items() if segment.ahead_bytes}

    def give_back(self) -> None:
        """Give back the room that no block has come for."""
        for segment in self._open.values():
            self._give_back(segment)

    def _give_back(self, segment: _Segment | None) -> None:
        if segment is not None and segment.ahead_bytes:
            self.directory.index.give_back_ahead(segment.file, segment.ahead_bytes)
            segment.ahead_bytes = 0

    def _append(self, alike: _Alike, segment: _Segment, placed: Placed) -> bool:
        """Return False when the segment was evicted; then, and when this fails, nothing is appended to it any more."""
        count = len(placed.blocks)
        taken_bytes = layout.in_pages(placed.stop) - layout.in_pages(segment.size_bytes)
        reservation = Reservation(
            segment.file, alike.slot, taken_bytes, alike.wanted, alike.pin, blocks=count, copy=alike.copy
        )
        try:
            if taken_bytes > segment.ahead_bytes:
                segment.ahead_bytes = self._reserve(segment, reservation)
            segment.ahead_bytes -= taken_bytes
            return self._write(alike, segment, placed, replace(reservation, ahead_bytes=segment.ahead_bytes))
        except NotKept:
            segment.close()
            self._give_back(segment)
            raise
        except BaseException:
            segment.close()
            self._give_up(segment, reservation)
            raise

    def _reserve(self, segment: _Segment, reservation: Reservation) -> int:
        """Set room aside, if blocks come fast also for the next ones; return how much."""
        taken_bytes, room_bytes = reservation.disk_bytes, segment.room_bytes - layout.in_pages(segment.size_bytes)
        is_busy = reservation.blocks >= BUSY_BLOCKS and not self.directory.index.is_over_limit
        if is_busy and room_bytes > taken_bytes:
            with suppress(NotKept):  # then there may be room for less
                several_bytes = min(BATCHES_AHEAD * taken_bytes, layout.in_pages(room_bytes))
                self.directory.reserve(replace(reservation, disk_bytes=several_bytes))
                return several_bytes
        self.directory.reserve(reservation)
        return taken_bytes

    def _give_up(self, segment: _Segment, reservation: Reservation) -> None:
        """After a failed write: what has come of it is counted."""
        if segment.new:
            self.directory.discard(reservation)
        else:
            self.directory.count_appended(segment.file)

    def _write(self, alike: _Alike, segment: _Segment, placed: Placed, reservation: Reservation) -> bool:
        directory = self.directory
        if not directory.store.append(segment.file, placed.buffers, segment.size_bytes, new=segment.new):
            directory.index.release(reservation)
            return False
        if segment.new and self.has_local_readers:
            segment.unsealed = directory.store.keep_unsealed(segment.file)
        if not segment.new and not directory.extend(reservation, placed.blocks):
            return False
        if segment.new and not directory.commit(reservation, placed.blocks):
            return True  # other processes have just kept every one of the blocks
        segment.size_bytes = placed.stop
        segment.records += len(placed.blocks)
        self._open[alike] = segment
        return True


GATHERING_SECONDS = 0.01
"""Seconds for which the first of a batch waits for others; a process that waits for the object waits as long."""

BUSY_BLOCKS, BUSY_GATHERING_SECONDS = 16, 0.03
"""From this many blocks in GATHERING_SECONDS on, batches become larger: all processes share the index's lock."""

BATCHES_AHEAD = 8
"""Room for so many batches is set aside at once then, as far as their segment goes. That saves transactions. What is
left is given back when no more blocks come."""

BATCH_BYTES = 8 * 1024 * 1024
BATCH_BLOCKS = 256
"""One transaction of about a millisecond."""

_LOOK_SECONDS = 0.5

SEALED_SECONDS = 5.0
"""Seconds without a block after which segments are sealed: some local readers get no other ones (handed_out.py)."""

HELD_BYTES_MAX = 32 * 1024 * 1024
"""Limit of one process's small blocks in memory: 30 ms at 1 GB/s, and they are written meanwhile."""


@dataclass(slots=True)
class Waiting:
    """A small block to be kept on a slot's account; `on_end` is told in the end whether it is.

    `wanted` and `copy` are of layout.Reservation.
    """

    small: SmallBlock
    slot: str
    wanted: bool
    copy: bool
    started: float
    on_end: Callable[[bool], None]


def gathering_seconds(blocks: int, held_bytes: int, seconds: float) -> float:
    """Return how long to gather after `blocks` came in `seconds`, and the process holds so many bytes."""
    is_busy = blocks * GATHERING_SECONDS >= BUSY_BLOCKS * seconds
    has_memory = held_bytes * BUSY_GATHERING_SECONDS <= HELD_BYTES_MAX / 2 * seconds
    return BUSY_GATHERING_SECONDS if is_busy and has_memory else GATHERING_SECONDS


class GroupCommitWriter:
    """The writer of one process's small objects. Event loop only."""

    def __init__(self, dependencies: FetchDependencies) -> None:
        self._dependencies = dependencies
        self._has_local_readers = dependencies.settings.has_local_readers
        self._appender = SegmentAppender(dependencies.directory, self._has_local_readers)
        self._waiting: deque[Waiting] = deque()
        self._eased = asyncio.Event()
        self._pumping: asyncio.Task[None] | None = None
        self._sealing: asyncio.TimerHandle | None = None
        self.held_bytes = 0

    def has_room(self, count: int) -> bool:
        return not self.held_bytes or self.held_bytes + count <= HELD_BYTES_MAX

    async def take_room(self, count: int) -> None:
        """Wait for room in memory for a block of so many bytes, and take it; `put` or `give_back` must follow.

        StoreUnavailable when another process keeps the index from being written.
        """
        while not self.has_room(count):
            if self._dependencies.threads.stalled():
                raise StoreUnavailable("memory is full of blocks that cannot be written: another process is in the way")
            self._eased.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._eased.wait()
        self.hold(count)

    def hold(self, count: int) -> None:
        self.held_bytes += count

    def give_back(self, count: int) -> None:
        """Give back the room of a block that does not come, or needs none any more."""
        self.held_bytes -= count
        self._eased.set()

    def put(
        self,
        small: SmallBlock,
        slot: str,
        started: float,
        on_end: Callable[[bool], None],
        *,
        wanted: bool = False,
        copy: bool = False,
    ) -> None:
        """Write a block soon, then give its room back, which is taken already, and tell `on_end` if it is on disk."""
        self._waiting.append(Waiting(small, slot, wanted, copy, started, on_end))
        if self._pumping is None:
            self._seal_no_more()
            self._pumping = asyncio.create_task(self._pump(), name="small object writer")

    def let_go(self, file: str | None = None) -> None:
        """Do as `SegmentAppender.let_go`."""
        self._appender.let_go(file)

    def seal(self) -> None:
        """Append no more to the segments that there are now. Index thread."""
        try:
            self._appender.give_back()
        finally:
            self._appender.seal()

    def _seal_no_more(self) -> None:
        if self._sealing is not None:
            self._sealing.cancel()
            self._sealing = None

    async def drain(self) -> None:
        while self._pumping is not None:
            await asyncio.shield(self._pumping)
        self._seal_no_more()
        self._appender.seal()

    async def _pump(self) -> None:
        batches, seconds = deque[list[Waiting]](), GATHERING_SECONDS
        try:
            while self._waiting:
                await asyncio.sleep(seconds)  # not of the clock, as no promise hangs on it
                seconds = gathering_seconds(len(self._waiting), self.held_bytes, seconds)
                batches = self._take_batches()
                while batches:
                    await self._write(batches.popleft())
                if not self._waiting and self._appender.is_ahead:
                    with suppress(StoreUnavailable):  # it is given back after the next batch
                        await self._dependencies.threads.index_later(self._appender.give_back)
        except BaseException:
            for batch in (*batches, *self._take_batches()):
                self._not_kept(batch)
            raise
        finally:
            self._pumping = None
            if self._has_local_readers:
                self._sealing = asyncio.get_running_loop().call_later(SEALED_SECONDS, self._appender.seal)

    def _take_batches(self) -> deque[list[Waiting]]:
        """All that waits now, in batches that are kept alike."""
        batches: deque[list[Waiting]] = deque()
        open_batches: dict[tuple[str, bool, bool], list[Waiting]] = {}
        sizes: dict[tuple[str, bool, bool], int] = {}
        while self._waiting:
            waiting = self._waiting.popleft()
            waiting.slot = self._dependencies.settings.slot_now(waiting.small.block.version.key)
            alike = waiting.slot, waiting.wanted, waiting.copy
            batch = open_batches.get(alike)
            if batch is None or sizes[alike] > BATCH_BYTES or len(batch) == BATCH_BLOCKS:
                batch = open_batches[alike] = []
                sizes[alike] = 0
                batches.append(batch)
            batch.append(waiting)
            sizes[alike] += waiting.small.block.length
        return batches

    async def _write(self, batch: list[Waiting]) -> None:
        while batch:
            blocks = [waiting.small for waiting in batch]
            try:
                threads, append = self._dependencies.threads, self._appender.append
                appended = await threads.index_later(append, batch[0].slot, blocks, batch[0].wanted, batch[0].copy)
            except StoreUnavailable as error:
                self._not_kept(batch, error.reason if isinstance(error, NotKept) else "disk")
                return
            except BaseException:
                self._not_kept(batch)
                raise
            now = self._dependencies.clock.monotonic()
            kept = batch[:appended]
            seconds = [now - waiting.started for waiting in kept]
            metrics.count_fills(batch[0].slot, seconds, sum(waiting.small.block.length for waiting in kept))
            self._settle(kept, kept=True)
            batch = batch[appended:]

    def _not_kept(self, batch: Sequence[Waiting], reason: str = "disk") -> None:
        for waiting in batch:
            metrics.CACHE_FILLS.add(1, waiting.slot, "failed")
        metrics.CACHE_NOT_KEPT.add(len(batch), batch[0].slot, reason)
        self._settle(batch, kept=False)

    def _settle(self, batch: Sequence[Waiting], *, kept: bool) -> None:
        self.give_back(sum(_held_bytes(waiting.small.content) for waiting in batch))
        for waiting in batch:
            try:
                waiting.on_end(kept)
            except Exception as error:  # noqa: BLE001 - the others of the batch hear of their end, too
                told = {"message": "the end of a block's fetch failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)


def _held_bytes(content: memoryview) -> int:
    """Return the size of the buffer that a view keeps in memory: that of a short answer is larger than its body."""
    return memoryview(content.obj).nbytes


def whole_of(block: Block, response: UnpinnedResponse) -> memoryview | None:
    """Return a block's bytes, if the unpinned GET has brought them all, as promised. It has ended then."""
    headers, told, content = response.headers, response.told, response.whole(block.range)
    if content is None or not _is_promised(content, headers, block):
        return None
    if told is not None and not is_as_promised(chunk_checksums(content), told.checksums):
        told.doubt()
        return None
    return content


GATHERED_BYTES = 256 * 1024
GATHERING_SECONDS_MAX = 0.1
"""Readers learn of this many bytes, or of all that came in this time: mostly once, when the block is complete."""

_MEMORY_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

MAPPED_BYTES_MIN = 256 * 1024
"""From this size on a buffer is a mapping of its own: freed, it is the kernel's again. malloc keeps what it has
once got, and with it holes: 45 MiB of them with a thousand readers of blocks of a MiB."""


@dataclass(frozen=True, slots=True)
class SmallBlockFetcher:
    """Fetches small blocks: called in the task of each `InflightFetch`."""

    dependencies: FetchDependencies
    own_writer: GroupCommitWriter
    copy_writer: GroupCommitWriter
    """The writer of other nodes' blocks. It has memory of its own: fetches for other nodes never wait for it."""

    def writer(self, fetch: InflightFetch) -> GroupCommitWriter:
        return self.copy_writer if fetch.is_copy else self.own_writer

    def fetch_inline(self, fetch: InflightFetch, on_end: Callable[[InflightFetch, bool], None]) -> bool:
        """Fetch it here and now, if the unpinned GET has brought all of the block, as promised, and memory has room.

        Only writing it remains then. The GET's lock, which no other process can have had meanwhile, ends with the
        fetch.
        """
        response, block = fetch.response, fetch.block
        if response is None or not self.writer(fetch).has_room(block.length):
            return False
        told, content = response.told, whole_of(block, response)
        if content is None:
            return False
        fetch.is_from_peer = told is not None
        response.get.whole = True
        fetch.give(content, block.length)
        self.writer(fetch).hold(_held_bytes(content))
        self._put(fetch, content, self.dependencies.clock.monotonic(), partial(on_end, fetch))
        return True

    async def fetch(self, fetch: InflightFetch, lock: LockKey) -> None:
        started, block = self.dependencies.clock.monotonic(), fetch.block
        whole = ByteRange(block.offset, block.range.last)
        get = self.dependencies.pinned_get(block.version, whole, fetch.headers, fetch.purpose, fetch.slot)
        get.begin_with(fetch.response)
        try:
            await get.start()
            fetch.is_from_peer = get.is_from_peer
            content = await self._receive(fetch, get)
            fetch.persisted = persisted = asyncio.get_running_loop().create_future()
            self._put(fetch, content, started, partial(_end, persisted))
        finally:
            await get.aclose()

    async def follow(self, fetch: InflightFetch, lock: LockKey, holder: int) -> bool:
        own = self.dependencies
        return await own.locks.released(
            lock, holder, own.watcher, lambda: fetch.is_abandoned or not own.is_writable, lambda: fetch.is_awaited
        )

    def _put(self, fetch: InflightFetch, content: memoryview, started: float, on_end: Callable[[bool], None]) -> None:
        small, wanted = SmallBlock(fetch.block, content), fetch.purpose is Purpose.WARM
        copy = self.dependencies.is_idle_copy(fetch.slot, fetch.headers)
        self.writer(fetch).put(small, fetch.slot, started, on_end, wanted=wanted, copy=copy)

    async def _receive(self, fetch: InflightFetch, get: PinnedGet) -> memoryview:
        """Return the block's bytes. Takes room for them only now, as an origin may take long to answer."""
        await self.writer(fetch).take_room(fetch.block.length)
        try:
            length = fetch.block.length
            mapped = length >= MAPPED_BYTES_MIN
            content = memoryview(mmap.mmap(-1, length, _MEMORY_FLAGS) if mapped else bytearray(length))
            await self._receive_into(fetch, get, content)
        except BaseException:
            self.writer(fetch).give_back(fetch.block.length)
            raise
        return content

    async def _receive_into(self, fetch: InflightFetch, get: PinnedGet, content: memoryview) -> None:
        clock = self.dependencies.clock
        received, since = 0, clock.monotonic()
        async with aclosing(get.pieces()) as pieces:
            async for piece in pieces:
                content[received : received + len(piece)] = piece
                received += len(piece)
                late = clock.monotonic() - since >= GATHERING_SECONDS_MAX
                if received < fetch.block.length and (late or received - fetch.available >= GATHERED_BYTES):
                    fetch.give(content, received)
                    since = clock.monotonic()
        fetch.give(content, received)

    def move(self, fetch: InflightFetch) -> None:
        """Let the block's readers go on from its file; if that is impossible, it stays in memory for them."""
        directory = self.dependencies.directory
        with suppress(BlockDamaged, StoreUnavailable):  # evicted already, or the disk fails: the next fetch meets it
            extent = directory.index.lookup(fetch.block.id)
            if extent is None:
                return
            # Opened here and now: a file that has just been written costs no look at the disk.
            with self.dependencies.open_files.opened(extent, directory.store.open_published) as file:
                fetch.move(file, extent)


def _end(persisted: asyncio.Future[bool], kept: bool) -> None:
    if not persisted.done():
        persisted.set_result(kept)


def _is_promised(content: memoryview, headers: Mapping[str, str], block: Block) -> bool:
    """Return False if a block that is a whole object does not match the checksum that came with it."""
    check = BodyCheck.of(headers) if block.length == block.version.size_bytes else None
    if check is None:
        return True
    check.update(content)
    return check.holds()
