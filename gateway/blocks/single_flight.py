"""One fetch per missing block, however many readers and processes wait for it.

A fetch is a task of its own: readers come and go, the fetch goes on to the end of its block, because the request is
paid for. One that still waits for its turn when its last reader leaves is not begun. Readers
that send other headers to the origin never share a fetch: the origin may answer them differently.

Over processes, the one that has the block's lock fetches it. The others wait, of a large block while they read the file
that grows; they do not wait for a hung process (fetch_locks.py).

All state belongs to the event loop; nothing here awaits between looking and acting.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

from gateway.blocks.directory import kept_from_writing
from gateway.blocks.fetch_locks import LockKey, lock_of_block, lock_of_place
from gateway.blocks.inflight_fetch import BlockPublished, FetchDependencies, FetchKey, InflightFetch, fetch_key
from gateway.blocks.large_block_fetch import LargeBlockFetcher
from gateway.blocks.layout import Block, object_id
from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.blocks.small_block_fetch import GroupCommitWriter, SmallBlockFetcher
from gateway.core import cancellation
from gateway.core.errors import ClientDisconnected, ForebayError, NotKept, StoreUnavailable
from gateway.origin.client import IS_AWAITED, Purpose
from gateway.telemetry import metrics

REFUSED_MAX = 4096
"""Blocks that were not kept are remembered, the last ones of each process."""


class SingleFlight:
    """The fetches of this process: at most `fills_max` of the settings run, the others wait their turn in order."""

    def __init__(self, dependencies: FetchDependencies, writer: GroupCommitWriter) -> None:
        self._dependencies = dependencies
        self._small = SmallBlockFetcher(dependencies, writer)
        self._large = LargeBlockFetcher(dependencies)
        self._persisting: set[asyncio.Future[bool]] = set()
        self._turns = asyncio.Semaphore(dependencies.settings.fills_max)
        self._ahead_max = dependencies.settings.fills_max * 2 // 3
        self._ahead = 0
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
        """Cancel every fetch and wait for its task. Bytes that have arrived still go to disk."""
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
        if not (self._is_small(fetch.block) and self._is_writable and self._small.fetch_inline(fetch)):
            return False
        self._persist(fetch)
        return True

    async def _run(self, fetch: InflightFetch) -> None:
        failure: BaseException | None = StoreUnavailable("the block cache is closing")
        is_warming = fetch.purpose is Purpose.WARM  # cancelled by a person: it stops now, and not behind the block
        cancellation.register_shared(lambda: fetch.is_abandoned, lambda: self._forget(fetch), anywhere=is_warming)
        IS_AWAITED.set(lambda: fetch.is_awaited)  # this task's own
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
        locks, response = self._dependencies.locks, fetch.response
        if not self._is_writable:
            raise self._refusal()
        lock = _lock_of(fetch.block, fetch.headers)
        is_of_response = response is not None and response.get.becomes(lock)
        try:
            if is_of_response or await self._take_lock(fetch, lock):
                fetch.leads(partial(locks.is_awaited, lock))
                await (self._small if self._is_small(fetch.block) else self._large).fetch(fetch, lock)
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
            # Looked up again under the lock: its earlier holder has entered the block before giving it back.
            if dependencies.directory.index.lookup(fetch.block.id) is not None:
                if fetch.all_arrived:
                    return False
                raise BlockPublished("another process has published the block")
            if holder is None or holder == dependencies.locks.worker:
                return True
            if not self._is_writable:
                raise self._refusal()
            if fetch.purpose is Purpose.READAHEAD and not fetch.users:
                return False  # it is on its way, and no reader here waits for it yet
            if not waited:
                metrics.CACHE_COALESCED.add(1, fetch.slot)
            waited, given_up = True, await self._wait(fetch, lock, holder)
            if fetch.all_arrived and given_up is None:
                return False
        return False

    async def _wait(self, fetch: InflightFetch, lock: LockKey, holder: int) -> int | None:
        """Wait for another process that fetches a block; return the process if it must be given up."""
        dependencies = self._dependencies
        if self._is_small(fetch.block):
            ended = await dependencies.locks.released(
                lock,
                holder,
                dependencies.watcher,
                lambda: fetch.is_abandoned or not self._is_writable,
                lambda: fetch.is_awaited,
            )
        else:
            ended = await self._large.follow(fetch, lock, holder)
        return None if ended else holder

    def _persist(self, fetch: InflightFetch) -> None:
        """All bytes are here: end the fetch when the disk has them."""
        assert fetch.persisted is not None  # noqa: S101 - that was looked at
        self._persisting.add(fetch.persisted)
        fetch.persisted.add_done_callback(partial(self._persisted, fetch))

    def _persisted(self, fetch: InflightFetch, persisted: asyncio.Future[bool]) -> None:
        self._persisting.discard(persisted)
        fetch.kept = not persisted.cancelled() and persisted.exception() is None and persisted.result()
        if fetch.kept:
            self.refused.pop(fetch.block.id, None)
        else:
            self.refused[fetch.block.id] = None
            if len(self.refused) > REFUSED_MAX:
                self.refused.popitem(last=False)
        if fetch.kept and fetch.users and fetch.content is not None:
            self._small.move(fetch)
        self._end(fetch, None)

    def _is_small(self, block: Block) -> bool:
        return block.length <= self._dependencies.settings.small_object_bytes_max

    @property
    def _is_writable(self) -> bool:
        return self._dependencies.isolation.writable and not self._dependencies.directory.index.stalled

    def _refusal(self) -> StoreUnavailable:
        """Return the reason for which readers go past the cache."""
        if not self._dependencies.isolation.writable:
            return self._dependencies.isolation.refuse_writing()
        return kept_from_writing()

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
