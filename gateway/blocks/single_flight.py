"""One fetch per missing block, however many readers and processes wait for it.

A fetch is a task of its own: readers come and go, the fetch goes on to the end of its block, because the request is
paid for; one that still waits for its turn when its last reader leaves is not begun. Readers that send other headers to
the origin never share a fetch: the origin may answer them differently. Over processes, the one that has the block's
lock fetches it, and the others wait (fetch_locks.py).

All state belongs to the event loop; nothing here awaits between looking and acting.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from gateway.blocks.block_file import BlockLease, ChunkChecksums, OpenFiles
from gateway.blocks.directory import BlockDirectory, DiskThreads, kept_from_writing
from gateway.blocks.disk_health import CircuitBreaker
from gateway.blocks.fetch_locks import FetchLocks, FileWatcher, LockKey, lock_of_block, lock_of_place
from gateway.blocks.layout import Block, BlockSettings, Extent, data_offset, object_id
from gateway.blocks.origin_gets import PinnedGet, Turns, UnpinnedResponse
from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.core.errors import ClientDisconnected, ForebayError, NotKept, OriginBusy, StoreUnavailable
from gateway.core.model import ByteRange, ObjectVersion
from gateway.origin.client import ACCOUNT, IS_AWAITED, PATIENCE, Origin, Purpose
from gateway.origin.peer_protocol import COPY
from gateway.telemetry import metrics


class BlockPublished(ForebayError):
    """Another process has published the block meanwhile: it is in the index."""


class MovedToFile(Exception):
    """The block that was being read from memory lies in a file now: go on there. The catcher then holds the file."""

    def __init__(self, extent: Extent, file: BlockLease) -> None:
        super().__init__()
        self.extent = extent
        self.file = file


@dataclass(frozen=True, slots=True)
class FetchDependencies:
    """The parts of a cache that its fetches work with."""

    settings: BlockSettings
    directory: BlockDirectory
    locks: FetchLocks
    origin: Origin
    threads: DiskThreads
    watcher: FileWatcher
    open_files: OpenFiles
    isolation: CircuitBreaker
    clock: Clock

    @property
    def is_writable(self) -> bool:
        return self.isolation.writable and not self.directory.index.stalled

    def passes_on(self, slot: str, headers: Mapping[str, str]) -> bool:
        """Return True if a slot does not keep what is fetched with these headers: another node looks after it."""
        return COPY in headers and self.settings.copies_of(slot) == "none"

    def is_idle_copy(self, slot: str, headers: Mapping[str, str]) -> bool:
        """Return True if blocks fetched with these headers are kept in idle room only."""
        return COPY in headers and self.settings.copies_of(slot) == "idle"

    def refusal(self) -> StoreUnavailable:
        return kept_from_writing() if self.isolation.writable else self.isolation.refuse_writing()

    def pinned_get(
        self, version: ObjectVersion, byte_range: ByteRange, headers: Mapping[str, str], purpose: Purpose, slot: str
    ) -> PinnedGet:
        return PinnedGet(
            self.origin, version, byte_range, headers, purpose, slot, self.clock, self.settings.fill_retries
        )


FetchKey: TypeAlias = tuple[bytes, frozenset[tuple[str, str]]]


def fetch_key(block: Block, headers: Mapping[str, str]) -> FetchKey:
    return block.id, frozenset(headers.items())


class InflightFetch:
    """One block that is fetched: `available` bytes from its start can be read.

    They lie in `content`, of a small block; else in `file`. A reader that got it from `SingleFlight` is a user of it
    until `leave`: the file stays open that long. Bytes that this process has written to it from `unwritten_from` on
    need no verification while they wait to be written to the device (large_block_fetch.py): check that first, for they
    may be fewer any time.

    `is_copy`: another node looks after it. `is_from_peer`: another node sends its bytes, as far as that is known.

    A complete block still has to be published: then `persisted` is done, and `kept` is True if the disk took
    it. A small one may then `move` to its file, so that slow readers do not keep it in memory.
    """

    available = 0
    content: memoryview | None = None
    persisted: asyncio.Future[bool] | None = None
    kept = True
    moved_to: Extent | None = None
    on_abandoned: Callable[[], None] | None = None
    _checksums: ChunkChecksums | None = None
    _begun = False
    _failure: BaseException | None = None
    _users = 0
    _readers = 0
    _running = True

    def __init__(
        self,
        block: Block,
        slot: str,
        headers: Mapping[str, str],
        purpose: Purpose,
        reader: object,
        response: UnpinnedResponse | None = None,
    ) -> None:
        self.block = block
        self.key = fetch_key(block, headers)
        self.slot = slot
        self.headers = headers
        self.purpose = purpose
        self.started_by = reader
        self.response = response
        self.account = ACCOUNT.get()
        self.is_copy = COPY in headers
        self.is_from_peer = self.is_copy
        self.unwritten_from: Callable[[], int] = self._nothing
        self._files: list[BlockLease] = []
        self._is_awaited_elsewhere: Callable[[], bool] = bool
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def all_arrived(self) -> bool:
        """Every byte of the block is here, though the block may not be published yet."""
        return self.available == self.block.length

    @property
    def users(self) -> int:
        return self._users

    @property
    def file(self) -> BlockLease:
        """The growing file, once `begun` has returned, or the one that a small block has moved to."""
        return self._files[-1]

    @property
    def extent(self) -> Extent:
        """The place of the available bytes, with the checksums of their chunks."""
        packed = bytes(self._checksums.packed) if self._checksums is not None else b""
        return Extent("", data_offset(self.block), self.block.length, packed)

    @property
    def is_abandoned(self) -> bool:
        if self._users or self.purpose is Purpose.READAHEAD:
            return False
        return self.purpose is Purpose.LIVE or not (self.all_arrived or self.is_awaited)

    @property
    def is_awaited(self) -> bool:
        """A reader waits for it now, here or in another process, whatever it was begun for."""
        return self._readers > 0 or self._is_awaited_elsewhere()

    def _nothing(self) -> int:
        """From where on bytes need no verification where none do without."""
        return self.block.length

    # For readers.

    def was_denied_another(self, error: OriginBusy) -> bool:
        """Return True if it failed for lack of another account's connections; the caller's account may have some."""
        return error is self._failure and self.account != ACCOUNT.get()

    def enter(self, purpose: Purpose = Purpose.LIVE) -> None:
        """Count a user with this `purpose`; the user names it again on leaving."""
        self._users += 1
        self._readers += purpose is Purpose.LIVE

    def leave(self, purpose: Purpose = Purpose.LIVE) -> None:
        self._users -= 1
        self._readers -= purpose is Purpose.LIVE
        self._close_if_unused()
        if self._users == 0 and self.on_abandoned is not None and self.is_abandoned:
            self.on_abandoned()

    async def begun(self) -> None:
        """Wait until the origin's answer has proved good; raises what made the fetch fail."""
        while not self._begun:
            await self._changed()

    async def beyond(self, position: int) -> int:
        """Wait until more than `position` bytes can be read; returns how many. Raises what made the fetch fail."""
        while self.available <= position:
            await self._changed()
        return self.available

    async def over(self) -> None:
        """Wait until it runs no more: its block is published, unless it failed."""
        while self._running:
            await self._next_change()

    def _changed(self) -> asyncio.Future[None]:
        """To be awaited: something changes. Raises what made the fetch fail."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._next_change()

    def _next_change(self) -> asyncio.Future[None]:
        """Return a future of the caller's own: a cancelled caller cancels no other."""
        waiter = asyncio.get_running_loop().create_future()
        if len(self._waiters) > 2 * self._users:  # drop those of readers that have left
            self._waiters = [one for one in self._waiters if not one.done()]
        self._waiters.append(waiter)
        return waiter

    # For the task that fetches.

    def leads(self, is_awaited_elsewhere: Callable[[], bool]) -> None:
        """Note that this process fetches for all; the argument returns True while a reader in another one waits."""
        self._is_awaited_elsewhere = is_awaited_elsewhere

    def begin(self) -> None:
        self._begun = True
        self._notify()

    def advance(
        self, file: BlockLease, checksums: ChunkChecksums, unwritten_from: Callable[[], int] | None = None
    ) -> None:
        """Announce the bytes written to a file, with the checksums of its complete chunks.

        `unwritten_from` is of this file. A file that was begun anew must first reach the readers' position. Earlier
        files stay open: readers may be sending from them.
        """
        complete_bytes = checksums.complete_bytes
        if complete_bytes <= self.available:
            return
        if not self._files or self._files[-1].file is not file.file:
            self._files.append(file.share())
        self._checksums, self.unwritten_from = checksums, unwritten_from or self._nothing
        self.available, self._begun = complete_bytes, True
        self._notify()

    def give(self, content: memoryview, available: int) -> None:
        self.content, self.available, self._begun = content, available, True
        self._notify()

    def move(self, file: BlockLease, extent: Extent) -> None:
        """Note the small block's file, and hold it for those who still read it, whatever becomes of the block."""
        self._files.append(file.share())
        self.moved_to, self.content = extent, None

    def end(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._running = False
        self._notify()
        self._close_if_unused()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _close_if_unused(self) -> None:
        if self._users == 0 and not self._running:
            self.content = None
            while self._files:
                self._files.pop().close()


class BlockFetcher(Protocol):
    """Fetches blocks of one kind, small or large, in the task of each `InflightFetch`."""

    def fetch_inline(self, fetch: InflightFetch, on_end: Callable[[InflightFetch, bool], None]) -> bool:
        """Fetch it here and now, if its unpinned GET has brought all of it; return False if that is impossible.

        Later tell `on_end` if it is on disk.
        """

    async def fetch(self, fetch: InflightFetch, lock: LockKey) -> None:
        """Fetch all bytes, and begin to write or publish them (`persisted`). Raises BlockPublished and NotKept, too."""

    async def follow(self, fetch: InflightFetch, lock: LockKey, holder: int) -> bool:
        """Wait while another process fetches the block. Return False if it must be given up."""

    def move(self, fetch: InflightFetch) -> None:
        """Let readers of a block in memory go on from its file."""


REFUSED_MAX = 4096
"""Blocks that were not kept are remembered, the last ones of each process."""


@dataclass(slots=True)
class _Kind:
    """Counts of one kind of fetches: at most `ahead_max` may be ahead of their readers."""

    turns: Turns
    ahead_max: int
    ahead: int = 0


class SingleFlight:
    """The fetches of this process: at most `fills_max` of the settings run, the others wait their turn in order.

    Those that ask other nodes have as many turns of their own: what other nodes ask for never waits for them.
    """

    def __init__(self, dependencies: FetchDependencies, small: BlockFetcher, large: BlockFetcher) -> None:
        self._dependencies = dependencies
        self._small, self._large = small, large
        self._persisting: set[asyncio.Future[bool]] = set()
        self._inline: set[InflightFetch] = set()
        """Fetches that lack nothing but the disk, and have no task."""
        fills_max = dependencies.settings.fills_max
        self._own, self._copies = (_Kind(Turns(fills_max), fills_max * 2 // 3) for _ in range(2))
        self._fetches: dict[FetchKey, InflightFetch] = {}
        self.refused: OrderedDict[bytes, None] = OrderedDict()
        """Ids of recently fetched blocks that the disk did not take."""
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, block: Block, headers: Mapping[str, str], purpose: Purpose = Purpose.LIVE) -> InflightFetch | None:
        """Enter and return the running fetch of a block, or return None."""
        fetch = self._fetches.get(fetch_key(block, headers))
        if fetch is not None:
            fetch.enter(purpose)
        return fetch

    def has(self, block: Block, headers: Mapping[str, str]) -> bool:
        """Return True if this process fetches a block, or waits for another process that does."""
        return fetch_key(block, headers) in self._fetches

    def is_anywhere(self, block: Block, headers: Mapping[str, str]) -> bool:
        return self.has(block, headers) or self._dependencies.locks.holder(_lock_of(block, headers)) is not None

    def fetches_for_readers(self) -> bool:
        """Return True if this process fetches a block because a reader has come to it."""
        return any(fetch.purpose is Purpose.LIVE for fetch in self._fetches.values())

    def all_arrived(self, block: Block, headers: Mapping[str, str]) -> bool:
        """Return True if the block's fetch has every byte: the block is being published."""
        fetch = self._fetches.get(fetch_key(block, headers))
        return fetch is not None and fetch.all_arrived

    def start(
        self,
        block: Block,
        slot: str,
        headers: Mapping[str, str],
        reader: object,
        purpose: Purpose = Purpose.LIVE,
        response: UnpinnedResponse | None = None,
    ) -> InflightFetch:
        """Enter and return a fetch that a reader waits for: a new one, unless there is one by now."""
        running = self.join(block, headers, purpose)
        if running is not None:
            return running
        fetch = InflightFetch(block, slot, headers, purpose, reader, response)
        fetch.enter(purpose)
        if response is not None:
            response.get.hold()
        self._start(fetch)
        return fetch

    def start_inline(
        self, block: Block, slot: str, headers: Mapping[str, str], response: UnpinnedResponse
    ) -> memoryview | None:
        """Finish a new fetch without a wait, if the response has all of it, and return its content; else None."""
        fetch = InflightFetch(block, slot, headers, Purpose.LIVE, None, response)
        if fetch.key in self._fetches:
            return None
        response.get.hold()
        self._fetches[fetch.key] = fetch
        if not self._is_done_inline(fetch):
            del self._fetches[fetch.key]
            response.get.let_go()
        return fetch.content

    def start_ahead(self, block: Block, slot: str, headers: Mapping[str, str], reader: object) -> bool:
        """Begin a block that a reader will come to; False when others need the room more."""
        fetch = InflightFetch(block, slot, headers, Purpose.READAHEAD, reader)
        if fetch.key in self._fetches:
            return True
        kind = self._kind_of(fetch)
        if kind.ahead >= kind.ahead_max or kind.turns.locked() or self._dependencies.passes_on(slot, headers):
            return False
        self._start(fetch)
        return True

    async def settle(self) -> None:
        while self._tasks or self._persisting or self._inline:
            inline = [fetch.over() for fetch in self._inline]
            await asyncio.gather(*self._tasks, *self._persisting, *inline, return_exceptions=True)

    async def close(self) -> None:
        """Cancel every fetch and wait for its task. Bytes that have arrived still go to disk."""
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def _start(self, fetch: InflightFetch) -> None:
        self._fetches[fetch.key] = fetch
        if self._is_done_inline(fetch):
            return
        self._kind_of(fetch).ahead += fetch.purpose is Purpose.READAHEAD
        task = asyncio.create_task(self._run(fetch), name="block fetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        fetch.on_abandoned = partial(cancellation.abandon, task)

    def _is_done_inline(self, fetch: InflightFetch) -> bool:
        if not (self._dependencies.is_writable and self._fetcher(fetch).fetch_inline(fetch, self._over)):
            return False
        self._inline.add(fetch)
        return True

    async def _run(self, fetch: InflightFetch) -> None:
        failure: BaseException | None = StoreUnavailable("the block cache is closing")
        is_warming = fetch.purpose is Purpose.WARM  # cancelled by a person: it stops now, and not behind the block
        cancellation.register_shared(lambda: fetch.is_abandoned, lambda: self._forget(fetch), anywhere=is_warming)
        IS_AWAITED.set(lambda: fetch.is_awaited)  # this task's own
        if fetch.purpose is Purpose.READAHEAD:
            PATIENCE.set(None)  # nobody waits for it yet
        try:
            await self._take_turn(fetch)
            failure = None
        except ForebayError as error:
            failure = error
        except Exception as error:
            failure = error
            raise
        finally:
            if failure is None and fetch.persisted is not None:
                self._persist(fetch)
            else:
                self._end(fetch, failure)

    async def _take_turn(self, fetch: InflightFetch) -> None:
        kind = self._kind_of(fetch)
        try:
            with cancellation.turn():
                await kind.turns.acquire()
            try:
                if not fetch.is_abandoned:
                    await self._fetch(fetch)
            finally:
                kind.turns.release()
        finally:
            kind.ahead -= fetch.purpose is Purpose.READAHEAD

    def _kind_of(self, fetch: InflightFetch) -> _Kind:
        return self._copies if fetch.is_copy else self._own

    async def _fetch(self, fetch: InflightFetch) -> None:
        locks, response = self._dependencies.locks, fetch.response
        if not self._dependencies.is_writable:
            raise self._dependencies.refusal()
        lock = _lock_of(fetch.block, fetch.headers)
        is_of_response = response is not None and response.get.becomes(lock)
        try:
            if is_of_response or await self._take_lock(fetch, lock):
                fetch.leads(partial(locks.is_awaited, lock))
                await self._fetcher(fetch).fetch(fetch, lock)
        except (BlockPublished, NotKept, ClientDisconnected):
            raise
        except ForebayError:
            metrics.CACHE_FILLS.add(1, fetch.slot, "failed")
            raise
        finally:
            if is_of_response:
                pass  # it is given back with the response
            elif fetch.persisted is not None:
                fetch.persisted.add_done_callback(lambda _: locks.release(lock))
            else:
                locks.release(lock)

    async def _take_lock(self, fetch: InflightFetch, lock: LockKey) -> bool:
        """Wait until no other process fetches the block; True: this one must. Raises BlockPublished."""
        dependencies, waited, given_up = self._dependencies, False, None
        while not fetch.is_abandoned:
            holder = dependencies.locks.take(lock, given_up)
            if holder == dependencies.locks.worker:
                await dependencies.locks.all_listed()
            # Looked up again under the lock: its earlier holder has entered the block before giving it back.
            if dependencies.directory.index.lookup(fetch.block.id) is not None:
                if fetch.all_arrived:
                    return False
                raise BlockPublished("another process has published the block")
            if holder is None or holder == dependencies.locks.worker:
                return True
            if not dependencies.is_writable:
                raise dependencies.refusal()
            if fetch.purpose is Purpose.READAHEAD and not fetch.users:
                return False  # it is on its way, and no reader here waits for it yet
            if not waited:
                metrics.CACHE_COALESCED.add(1, fetch.slot)
            waited, given_up = True, None if await self._fetcher(fetch).follow(fetch, lock, holder) else holder
            if fetch.all_arrived and given_up is None:
                return False
        return False

    def _persist(self, fetch: InflightFetch) -> None:
        """All bytes are here: end the fetch when the disk has them."""
        assert fetch.persisted is not None  # noqa: S101 - that was looked at
        self._persisting.add(fetch.persisted)
        fetch.persisted.add_done_callback(partial(self._persisted, fetch))

    def _persisted(self, fetch: InflightFetch, persisted: asyncio.Future[bool]) -> None:
        self._persisting.discard(persisted)
        self._over(fetch, not persisted.cancelled() and persisted.exception() is None and persisted.result())

    def _over(self, fetch: InflightFetch, kept: bool) -> None:
        self._inline.discard(fetch)
        fetch.kept = kept
        if kept:
            self.refused.pop(fetch.block.id, None)
        else:
            self.refused[fetch.block.id] = None
            if len(self.refused) > REFUSED_MAX:
                self.refused.popitem(last=False)
        if fetch.kept and fetch.users and fetch.content is not None:
            self._fetcher(fetch).move(fetch)
        self._end(fetch, None)

    def _fetcher(self, fetch: InflightFetch) -> BlockFetcher:
        is_small = fetch.block.length <= self._dependencies.settings.small_object_bytes_max
        return self._small if is_small else self._large

    def _forget(self, fetch: InflightFetch) -> None:
        if self._fetches.get(fetch.key) is fetch:
            del self._fetches[fetch.key]

    def _end(self, fetch: InflightFetch, failure: BaseException | None) -> None:
        self._forget(fetch)
        fetch.end(failure)
        if fetch.response is not None:
            fetch.response.get.let_go()


def _lock_of(block: Block, headers: Mapping[str, str]) -> LockKey:
    return lock_of_block(block, lock_of_place(object_id(block.version.key), block.offset, headers))
