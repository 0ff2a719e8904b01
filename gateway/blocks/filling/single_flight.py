"""One fetch per missing block, however many readers and processes wait for it.

A fetch is a task of its own: readers come and go, the fetch goes on to the end of its block, because what has been
asked of the origin is paid for. One that still waits for its turn when its last reader leaves is not begun. Readers
that send other headers to the origin never share a fetch: the origin may answer them differently.

Over processes, the one that has the block's lock fetches it. The others wait, of a large block while they read the file
that grows; whoever does not turn is not waited for (fetch_locks.py).

All state belongs to the event loop; nothing here awaits between looking and acting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from gateway import cancellation
from gateway.blocks.directory import BlockDirectory
from gateway.blocks.files.watching import FileWatcher
from gateway.blocks.filling.fetch_locks import FetchLocks, LockKey, lock_of_block, lock_of_place
from gateway.blocks.filling.inflight_fetch import BlockPublished, FetchKey, InflightFetch, fetch_key
from gateway.blocks.filling.large_block_fetch import LargeBlockFetcher
from gateway.blocks.filling.small_block_fetch import SmallBlockFetcher
from gateway.blocks.filling.unpinned_get import UnpinnedResponse
from gateway.blocks.layout import Block, object_id
from gateway.blocks.maintenance.disk_health import CircuitBreaker
from gateway.counting import CacheMetrics
from gateway.errors import ClientDisconnected, ForebayError, NotKept, StoreUnavailable
from gateway.origin.client import Purpose


@dataclass(frozen=True, slots=True)
class Fetchers:
    """What fetches blocks, and by which they are shared: blocks of at most `packed_bytes_max` are small."""

    small: SmallBlockFetcher
    large: LargeBlockFetcher
    packed_bytes_max: int
    directory: BlockDirectory
    locks: FetchLocks
    watcher: FileWatcher
    isolation: CircuitBreaker
    observer: CacheMetrics

    def is_small(self, block: Block) -> bool:
        return block.length <= self.packed_bytes_max

    @property
    def writable(self) -> bool:
        """Whether it makes sense to fetch anything for the disk now."""
        return self.isolation.writable and not self.directory.index.stalled

    def refuse(self) -> StoreUnavailable:
        """Readers go past the cache."""
        if not self.isolation.writable:
            return self.isolation.refuse_writing()
        return StoreUnavailable("another process keeps the block index from being written")


class SingleFlight:
    """The fetches of this process: at most `fetches_max` run, the others wait their turn in order."""

    def __init__(self, fetchers: Fetchers, fetches_max: int) -> None:
        self._fetchers = fetchers
        self._persisting: set[asyncio.Future[bool]] = set()
        self._turns = asyncio.Semaphore(fetches_max)
        self._ahead_max = fetches_max * 2 // 3
        self._ahead = 0
        self._fetches: dict[FetchKey, InflightFetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, block: Block, headers: Mapping[str, str]) -> InflightFetch | None:
        """The running fetch of a block, entered, or None."""
        fetch = self._fetches.get(fetch_key(block, headers))
        if fetch is not None:
            fetch.enter()
        return fetch

    def has(self, block: Block, headers: Mapping[str, str]) -> bool:
        """Whether this process fetches a block, or waits for who does."""
        return fetch_key(block, headers) in self._fetches

    def is_anywhere(self, block: Block, headers: Mapping[str, str]) -> bool:
        """Whether any process fetches a block."""
        return self.has(block, headers) or self._fetchers.locks.holder(_lock_of(block, headers)) is not None

    def all_arrived(self, block: Block, headers: Mapping[str, str]) -> bool:
        """Whether the block is being published: its fetch has every byte."""
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
        """A fetch that a reader waits for, entered: a new one, unless there is one by now."""
        running = self.join(block, headers)
        if running is not None:
            return running
        fetch = InflightFetch(block, slot, headers, purpose, reader, response)
        fetch.enter()
        if response is not None:
            response.get.hold()
        self._start(fetch)
        return fetch

    def start_inline(
        self, block: Block, slot: str, headers: Mapping[str, str], response: UnpinnedResponse
    ) -> memoryview | None:
        """A new fetch that has all it needs, for nobody to wait for; its content. None where it is no such one."""
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
        if self._ahead >= self._ahead_max or self._turns.locked():
            return False
        self._ahead += 1
        self._start(fetch)
        return True

    async def settle(self) -> None:
        """Wait until no fetch is running, waiting or on its way to the disk."""
        while self._tasks or self._persisting:
            await asyncio.gather(*self._tasks, *self._persisting, return_exceptions=True)

    async def close(self) -> None:
        """Cancel every fetch and wait for its task. What has arrived still goes to disk."""
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def _start(self, fetch: InflightFetch) -> None:
        self._fetches[fetch.key] = fetch
        if self._is_done_inline(fetch):
            return
        task = asyncio.create_task(self._run(fetch), name="block fetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        fetch.on_abandoned = partial(cancellation.abandon, task)

    def _is_done_inline(self, fetch: InflightFetch) -> bool:
        fetchers = self._fetchers
        if not (fetchers.is_small(fetch.block) and fetchers.writable and fetchers.small.fetch_inline(fetch)):
            return False
        self._persist(fetch)
        return True

    async def _run(self, fetch: InflightFetch) -> None:
        failure: BaseException | None = StoreUnavailable("the block cache is closing")
        cancellation.register_shared(lambda: fetch.is_abandoned, lambda: self._forget(fetch))
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
        try:
            with cancellation.turn():
                await self._turns.acquire()
            try:
                if not fetch.is_abandoned:
                    await self._fetch(fetch)
            finally:
                self._turns.release()
        finally:
            self._ahead -= fetch.purpose is Purpose.READAHEAD

    async def _fetch(self, fetch: InflightFetch) -> None:
        fetchers, response = self._fetchers, fetch.response
        if not fetchers.writable:
            raise fetchers.refuse()
        lock = _lock_of(fetch.block, fetch.headers)
        is_of_response = response is not None and response.get.becomes(lock)
        try:
            if is_of_response or await self._take_lock(fetch, lock):
                fetcher = fetchers.small if fetchers.is_small(fetch.block) else fetchers.large
                await fetcher.fetch(fetch, lock)
        except (BlockPublished, NotKept, ClientDisconnected):
            raise
        except ForebayError:
            fetchers.observer.fill_failed(fetch.slot)
            raise
        finally:
            if is_of_response:
                pass  # it is given back with the response
            elif fetch.persisted is not None:
                fetch.persisted.add_done_callback(lambda _: fetchers.locks.release(lock))
            else:
                fetchers.locks.release(lock)

    async def _take_lock(self, fetch: InflightFetch, lock: LockKey) -> bool:
        """Wait until no other process fetches the block; whether it is to be fetched here. BlockPublished."""
        fetchers, waited, given_up = self._fetchers, False, None
        while not fetch.is_abandoned:
            holder = fetchers.locks.take(lock, given_up)
            # Looked up again under the lock: whoever had it before has entered the block before giving it back.
            if fetchers.directory.index.lookup(fetch.block.id) is not None:
                if fetch.all_arrived:
                    return False
                raise BlockPublished("another process has published the block")
            if holder is None or holder == fetchers.locks.worker:
                return True
            if not fetchers.writable:
                raise fetchers.refuse()
            if fetch.purpose is Purpose.READAHEAD and not fetch.users:
                return False  # it is on its way, and nobody here waits for it yet
            if not waited:
                fetchers.observer.coalesced(fetch.slot)
            waited, given_up = True, await self._wait(fetch, lock, holder)
            if fetch.all_arrived and given_up is None:
                return False
        return False

    async def _wait(self, fetch: InflightFetch, lock: LockKey, holder: int) -> int | None:
        """Wait for another process that fetches a block; the process, where it is to be given up."""
        fetchers = self._fetchers
        if fetchers.is_small(fetch.block):
            ended = await fetchers.locks.released(
                lock, holder, fetchers.watcher, lambda: fetch.is_abandoned or not fetchers.writable
            )
        else:
            ended = await fetchers.large.follow(fetch, lock, holder)
        return None if ended else holder

    def _persist(self, fetch: InflightFetch) -> None:
        """All bytes are here: end the fetch when the disk has them."""
        assert fetch.persisted is not None  # noqa: S101 - that was looked at
        self._persisting.add(fetch.persisted)
        fetch.persisted.add_done_callback(partial(self._persisted, fetch))

    def _persisted(self, fetch: InflightFetch, persisted: asyncio.Future[bool]) -> None:
        self._persisting.discard(persisted)
        fetch.kept = not persisted.cancelled() and persisted.exception() is None and persisted.result()
        self._end(fetch, None)

    def _forget(self, fetch: InflightFetch) -> None:
        """Whoever comes now begins another."""
        if self._fetches.get(fetch.key) is fetch:
            del self._fetches[fetch.key]

    def _end(self, fetch: InflightFetch, failure: BaseException | None) -> None:
        self._forget(fetch)
        fetch.end(failure)
        if fetch.response is not None:
            fetch.response.get.let_go()


def _lock_of(block: Block, headers: Mapping[str, str]) -> LockKey:
    return lock_of_block(block, lock_of_place(object_id(block.version.key), block.offset, headers))
