"""Files and index changed together, in the order that survives a kill between any two steps; and the threads for it.

    a fetch      partial file → reserve (index) → rename → commit (index)
    an ingest    reserve → link → commit
    an addition  reserve → append → extend (small_block_fetch.py)
    a removal    take out of the index, the unlink pending → unlink → no longer pending

So a file without a block, or longer than it is counted, is named by a reservation or a pending unlink, or lies in the
worker's own directory of partial files; and a block without a file never begins to exist. A file that cannot be
unlinked stays counted, and is tried again until it is gone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import lmdb

from gateway.blocks import layout
from gateway.blocks.block_file import BlockLease
from gateway.blocks.eviction import Capacity, Step
from gateway.blocks.index import BlockIndex, IndexFull, PinnedPrefixes, is_of_cluster
from gateway.blocks.layout import Block, BlockRecord, Extent, Reservation, WorkerFile
from gateway.blocks.pins import Pins
from gateway.blocks.store import BlockStore, Ingest
from gateway.core.errors import BlockError, NotKept, StoreUnavailable
from gateway.disk.file_lease import close_opened, with_lease
from gateway.disk.thread_priority import only_idle_disk
from gateway.telemetry import metrics

_SECONDS_OF_A_DAY = 86_400

_SHEDDINGS_MAX = 8
"""Limit of evictions for one step while the index's map is full."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FillFile:
    """The partial file of one fill, room for it reserved."""

    block: Block
    reservation: Reservation
    file: BlockLease
    data_offset: int


FREE_LOOK_SECONDS = 0.05
"""Seconds for which a look at the file system is valid; later grants are counted."""

GIVEN_BACK_TIMES = 2
"""A fill evicts at most its own size times this number where room is missing."""


class Reserve:
    """The bytes that one process's fills must leave free: `size_bytes`, which its owner keeps up to date.

    Index thread only. `free_bytes` returns the file system's free bytes, `promised_bytes` those that fills in progress
    have yet to write.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int],
        promised_bytes: Callable[[], int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size_bytes = 0
        self._free_bytes = free_bytes
        self._promised_bytes = promised_bytes
        self._monotonic = monotonic
        self._left_bytes = 0
        self._looked_at = float("-inf")

    def capacity_for(self, needed_bytes: int, used_bytes: Callable[[], int], capacity: Capacity) -> Capacity:
        """Return the cache's capacity for a fill of `needed_bytes`; `used_bytes` returns its usage. Raises OSError."""
        if not self.size_bytes:
            return capacity
        now = self._monotonic()
        if now >= self._looked_at + FREE_LOOK_SECONDS:
            self._left_bytes, self._looked_at = self._free_bytes() - self._promised_bytes(), now
        missing_bytes = self.size_bytes + needed_bytes - self._left_bytes
        if missing_bytes <= 0:
            self._left_bytes -= needed_bytes
            return capacity
        self._looked_at = float("-inf")  # bytes that leave now are room at once
        going_bytes = min(missing_bytes, GIVEN_BACK_TIMES * needed_bytes)
        return capacity.lowered_to(max(0, used_bytes() + needed_bytes - going_bytes))


class BlockDirectory:
    """The blocks of a cache directory, as one worker process changes them."""

    def __init__(
        self,
        store: BlockStore,
        index: BlockIndex,
        capacity: Capacity,
        pins: Pins,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.index = index
        self.configured_capacity = capacity
        self.pins = pins
        self.on_unlink: Callable[[str], None] = lambda _: None
        """Told of each file that is gone, on the thread that removed it: as long as it is open, it keeps its room."""
        self.reserve_of_others = Reserve(store.free_bytes, lambda: index.totals().reserved_bytes)
        self._lowered = capacity, capacity
        """Configured capacity, and the last one to which it was lowered."""

        self._now = now
        self._slot_names: dict[int, str] = {}
        self.owns: Callable[[Block, str], bool] = lambda _block, _slot: True
        """Returns True if this node owns a block of a slot. Any thread calls it."""

    @property
    def capacity(self) -> Capacity:
        """Capacity of all processes now: less than configured while other programs fill the disk."""
        ceiling_bytes = self.index.ceiling_bytes(self._now())
        if ceiling_bytes is None or ceiling_bytes >= self.configured_capacity.total_bytes:
            return self.configured_capacity
        configured, lowered = self._lowered
        if configured is not self.configured_capacity or lowered.total_bytes != ceiling_bytes:
            configured = self.configured_capacity
            self._lowered = configured, (lowered := configured.lowered_to(ceiling_bytes))
        return lowered

    def pin_of(self, pins: PinnedPrefixes, block: Block, slot: str) -> int:
        """Return the number of the pin that a block of a slot is under, or 0."""
        number = pins.number_of(block.version.key)
        return 0 if is_of_cluster(number) and not self.owns(block, slot) else number

    def begin(self, block: Block, slot: str, *, wanted: bool = False, copy: bool = False) -> FillFile | None:
        """Create a block's file, and make room for it on a slot's account.

        None when the block is there by now. StoreUnavailable when there can be no file; NotKept when there is no room,
        or not for this.
        """
        file = layout.file_name(block.id, secrets.token_hex(8))
        pin = self.pin_of(self.index.pins(), block, slot)
        reservation = Reservation(file, slot, layout.file_bytes(block), wanted=wanted, pin=pin, copy=copy)
        opened, has_room = self.store.create_partial(file), False
        try:
            self.store.write(opened, layout.beginning(block), layout.MAGIC_BYTES)
            if self.reserve(reservation, block.id):
                self.store.set_aside(opened, reservation.disk_bytes)
                has_room = True
        finally:
            if not has_room:
                opened.close()
                self.discard(reservation)
        return FillFile(block, reservation, opened, layout.data_offset(block)) if has_room else None

    def record_checksums(self, file: BlockLease, block: Block, packed: bytearray, recorded_bytes: int) -> None:
        """Write what is new among the chunks' checksums: always before the bytes that complete these chunks.

        So the file's length tells other processes which chunks are complete, and their checksums are there to be
        compared.
        """
        new = memoryview(packed)[recorded_bytes:].tobytes()
        self.store.write(file, new, layout.checksums_offset(block) + recorded_bytes)

    def finish(
        self, filled: FillFile, opened: BlockLease, checksums: bytes, on_publish: Callable[[], None] = lambda: None
    ) -> Extent | None:
        """Write the header of a fill's `opened` file, publish the file, call `on_publish`, enter the block.

        None when another process was first with the same block: its file is as good, and ours is gone.
        """
        block, file = filled.block, filled.reservation.file
        self.store.write(opened, layout.pack_header(block, checksums), 0)
        self.store.publish(file)
        on_publish()
        extent = Extent(file, filled.data_offset, block.length, checksums)
        record = BlockRecord(block.id, extent)
        return extent if self.commit(filled.reservation, [record]) else None

    def discard(self, reservation: Reservation) -> None:
        """Remove the file of a reservation that comes to nothing, as far as there is one, and give the room back."""
        try:
            self.store.unlink(reservation.file)
        except StoreUnavailable:
            self.index.release(reservation, left_bytes=reservation.disk_bytes)
            raise
        self.index.release(reservation)

    def ingest(self, ingest: Ingest) -> int:
        """Enter the blocks of a file that lies elsewhere, by a second name; how many.

        StoreUnavailable when there is no room, or when the file cannot be linked; nothing has changed then.
        """
        pin = self.pin_of(self.index.pins(), ingest.first, ingest.reservation.slot)
        reservation = replace(ingest.reservation, pin=pin)
        self.reserve(reservation)
        try:
            self.store.link(ingest.source, reservation.file)
            return self.commit(reservation, ingest.blocks)
        except BaseException:
            self.discard(reservation)
            raise

    def commit(self, reservation: Reservation, blocks: Sequence[BlockRecord]) -> int:
        """Enter the blocks of a reservation's file, which is in place; how many were new. The file goes if none was."""
        entered = self._with_room_in_index(lambda: self.index.commit(reservation, blocks, self.capacity))
        if not entered:
            self.unlink({reservation.file: reservation.disk_bytes})
        return entered

    def extend(self, reservation: Reservation, blocks: Sequence[BlockRecord]) -> bool:
        """Enter what was appended to a file; False when the file left the index meanwhile."""
        return self._with_room_in_index(lambda: self.index.extend(reservation, blocks))

    def drop(self, block_id: bytes, file: str) -> bool:
        """Remove a block, if it still lies in `file`."""
        return self._unlink_evicted(self.index.drop(block_id, file))

    def drop_object(self, object_id: bytes) -> None:
        while not self._unlink_evicted(self.index.drop_object(object_id)):
            pass

    def shrink(self) -> None:
        """Evict down to the capacity and each slot's limit."""
        for _ in self.shrinking():
            pass

    def shrinking(self) -> Iterator[None]:
        """Do the same one step at a time, so that others go on meanwhile."""
        while True:
            step = self.index.shrink(self.capacity)
            if self._evict(step) or not step.evicted:
                return
            yield

    def give_back(self, bytes_min: int) -> None:
        """Lower the capacity, as other programs fill the disk: one process decides it for all, now and then."""
        self.index.lower_ceiling(self._now(), bytes_min)
        self.shrink()

    def grow_again(self, step_bytes_min: int) -> None:
        """Raise the capacity after other programs have made room. Raises OSError."""
        self.index.raise_ceiling(self._now(), self.store.free_bytes, step_bytes_min)

    def try_index(self) -> None:
        self._with_room_in_index(self.index.try_writing)

    def count_appended(self, file: str) -> None:
        """Give back what this worker has reserved to append to a file, whatever part of it was written."""
        self.index.settle(self.index.worker, file, self.store.disk_bytes(file))

    def unlink(self, sizes: Mapping[str, int]) -> None:
        """Unlink files of these sizes, which this worker is to. StoreUnavailable where one cannot be."""
        self.unlink_pending({WorkerFile(self.index.worker, file): size for file, size in sizes.items()})

    def unlink_pending(self, sizes: Mapping[WorkerFile, int]) -> None:
        """Unlink files that workers were to, or have begun to write.

        StoreUnavailable where one cannot be: it is counted then, and stays pending.
        """
        gone: list[WorkerFile] = []
        failed: dict[WorkerFile, int] = {}
        first_error: StoreUnavailable | None = None
        for holder, size_bytes in sizes.items():
            try:
                self.store.unlink_of(holder.worker, holder.file)
                self.on_unlink(holder.file)
                gone.append(holder)
            except StoreUnavailable as error:
                failed[holder] = size_bytes
                first_error = first_error or error
        if sizes:
            self.index.end_unlinks(gone, failed)
        if first_error is not None:
            raise first_error

    def retry_unlinks(self) -> None:
        """Try again to unlink what could not be; StoreUnavailable while it still cannot."""
        with self.index.reading() as transaction:
            pending = transaction.pending_unlinks()
        own = self.index.worker
        self.unlink_pending({one: size for one, size in pending.items() if size or one.worker == own})

    def written_today_bytes(self) -> int:
        """Return the bytes granted to fills since midnight UTC, in all processes, with the index's own writes."""
        return self.index.written_bytes(self._day())

    def _day(self) -> int:
        return int(self._now()) // _SECONDS_OF_A_DAY

    def reserve(self, reservation: Reservation, block_id: bytes | None = None) -> bool:
        """Set room aside, others giving way; False if the block is there. StoreUnavailable when there is no room."""
        reserve = partial(self.index.reserve, reservation, self._capacity_for(reservation), block_id=block_id)
        while True:
            step = self._with_room_in_index(partial(reserve, day=self._day()))
            if step is None:
                return False
            try:
                if self._evict(step):
                    return True
            except BaseException:
                if step.done:
                    self.index.release(reservation)
                raise
            if not step.evicted:
                raise NotKept(
                    "room",
                    f"no room for {reservation.disk_bytes} bytes of slot {reservation.slot}: "
                    "all of it is being filled, is pinned, or belongs to other slots",
                )

    def _with_room_in_index(self, step: Callable[[], T]) -> T:
        """Take a step; where the index's map is full, files are evicted until it is done, or none is left."""
        for _ in range(_SHEDDINGS_MAX):
            try:
                return step()
            except IndexFull:
                shed = self.index.shed(self.capacity)
                self._evict(shed)
                if not shed.evicted:
                    raise
        return step()

    def _capacity_for(self, reservation: Reservation) -> Capacity:
        """Return the capacity without the room that others must find free."""
        # If the directory holds more, a fill evicts twice its size at most: none waits for all of a lowered capacity's.
        needed_bytes = reservation.disk_bytes
        try:
            capacity = self.reserve_of_others.capacity_for(needed_bytes, self._taken_bytes, self.capacity)
        except OSError as error:
            raise StoreUnavailable(f"the free space of the disk cannot be read: {error}") from error
        least_bytes = self._taken_bytes() - (GIVEN_BACK_TIMES - 1) * needed_bytes
        return replace(capacity, total_bytes=least_bytes) if least_bytes > capacity.total_bytes else capacity

    def _taken_bytes(self) -> int:
        return self.index.totals().taken_bytes

    def _evict(self, step: Step) -> bool:
        """Count and unlink what had to go; whether the step is done."""
        for file in step.evicted:
            if file.slot not in self._slot_names:
                self._slot_names = self.index.slot_names()
            metrics.CACHE_EVICTED_BLOCKS.add(file.blocks, self._slot_names[file.slot])
            metrics.CACHE_EVICTED_BYTES.add(file.disk_bytes, self._slot_names[file.slot])
        return self._unlink_evicted(step)

    def _unlink_evicted(self, step: Step) -> bool:
        self.unlink({file.file: file.disk_bytes for file in step.evicted})
        return step.done


_LOOK_SECONDS = 0.5
"""Seconds between two looks of a waiting caller whether another process keeps the index from being written."""

P = ParamSpec("P")
R = TypeVar("R")
Opened = TypeVar("Opened", BlockLease, BlockLease | None)


class DiskThreads:
    """The threads of one process's cache.

    Errors of the disk come out as BlockError after `on_error` got them, except those of probes. `stalled` returns True
    while another process keeps the index from being written: callers do not wait for that.
    """

    def __init__(self, disk_threads: int) -> None:
        self.on_error: Callable[[BlockError], None] = lambda _: None
        self.stalled: Callable[[], bool] = lambda: False
        self._index = ThreadPoolExecutor(1, thread_name_prefix="block-index")
        self._idle = ThreadPoolExecutor(1, thread_name_prefix="block-scrub", initializer=only_idle_disk)
        self._disk = ThreadPoolExecutor(disk_threads, thread_name_prefix="block-disk")

    async def index(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what writes the index; to its end, even when the caller is cancelled, once it has begun.

        StoreUnavailable when another process keeps the index from being written; what has begun then goes on later.
        """
        return await self._unless_stalled(lambda: self._index.submit(function, *arguments, **keywords), None)

    async def index_or_undo(
        self, undo: Callable[[R], None], function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs
    ) -> R:
        """Run work whose result needs an owner: `undo` gets it if the caller has left."""
        return await self._unless_stalled(lambda: self._index.submit(function, *arguments, **keywords), undo)

    async def index_later(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run what writes the index and no client waits for, however long that takes."""
        return await self._outcome(self._index.submit(function, *arguments, **keywords))

    async def probe(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run a test of the directory: its failures are its answer."""
        return await self._outcome(self._index.submit(function, *arguments, **keywords), lambda _: None)

    async def disk(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        return await self._outcome(self._disk.submit(function, *arguments, **keywords))

    async def open(self, function: Callable[P, Opened], *arguments: P.args, **keywords: P.kwargs) -> Opened:
        """Open a block file; close it again if the caller has left."""
        opening = self._disk.submit(function, *arguments, **keywords)
        try:
            return await self._outcome(opening)
        except BaseException:
            opening.add_done_callback(close_opened)
            raise

    async def idle(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Read block files with idle disk priority."""
        return await self._outcome(self._idle.submit(function, *arguments, **keywords))

    def disk_holding(
        self,
        file: BlockLease,
        function: Callable[Concatenate[BlockLease, P], R],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """Run work on the disk with a lease of its own, which lasts until it is done.

        This call takes the lease and begins the work at once, as its caller may be gone before it awaits the result.
        """
        return self._outcome(self._disk.submit(with_lease(file.share(), function), *arguments, **keywords))

    def index_holding(
        self,
        file: BlockLease,
        function: Callable[Concatenate[BlockLease, P], R],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """As `disk_holding`, for what writes the index."""
        return self._outcome(self._index.submit(with_lease(file.share(), function), *arguments, **keywords))

    async def _unless_stalled(self, submit: Callable[[], Future[R]], undo: Callable[[R], None] | None) -> R:
        if self.stalled():
            raise kept_from_writing()

        def undo_result(future: Future[R]) -> None:
            if undo is not None and not future.cancelled() and future.exception() is None:
                with suppress(RuntimeError):  # the threads are being shut down: the next process of the slot clears up
                    self._index.submit(undo, future.result())

        future = submit()
        outcome = asyncio.ensure_future(self._outcome(future))
        try:
            while not (await asyncio.wait((outcome,), timeout=_LOOK_SECONDS))[0]:
                if self.stalled():
                    raise kept_from_writing()
        except BaseException:
            outcome.cancel()
            if not future.cancel():
                future.add_done_callback(undo_result)
            raise
        return outcome.result()

    async def _outcome(self, future: Future[R], on_error: Callable[[BlockError], None] | None = None) -> R:
        try:
            return await asyncio.wrap_future(future)
        except BlockError as error:
            (on_error or self.on_error)(error)
            raise
        except (OSError, lmdb.Error) as error:
            failure = StoreUnavailable(f"the cache directory cannot be used: {error}")
            failure.__cause__ = error
            (on_error or self.on_error)(failure)
            raise failure from error

    def shut_down(self) -> None:
        self._idle.shutdown(wait=True)
        self._disk.shutdown(wait=True)
        self._index.shutdown(wait=True)


def kept_from_writing() -> StoreUnavailable:
    return StoreUnavailable("the block index cannot be written: another process holds its lock")
