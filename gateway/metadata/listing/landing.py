"""What the origin has told, on its way into the index: gathered on the event loop, written by a thread of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import lmdb

from gateway.clock import Clock
from gateway.metadata.listing.batches import Batch
from gateway.metadata.listing.store import ListingStore

R = TypeVar("R")

WAITING_MAX = 64
"""Pages that wait at most, a thousand keys each: about 20 MiB."""


class ListingLanding:
    """One process's queue. Nobody waits for it: until a page has landed, its keys are asked for again."""

    def __init__(self, store: ListingStore, clock: Clock, not_kept: Callable[[int], None]) -> None:
        self._store = store
        self._clock = clock
        self._not_kept = not_kept
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="listing")
        self._waiting: deque[tuple[Sequence[Batch], bool]] = deque()
        self._writing: asyncio.Task[None] | None = None

    def add(self, batches: Sequence[Batch], *, is_truth: bool = False) -> None:
        """Have them written soon; `is_truth`: each is about a single key whose range may be known already."""
        if len(self._waiting) >= WAITING_MAX:
            self._not_kept(_keys(batches))
            return
        self._waiting.append((batches, is_truth))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="listing landing")

    async def land(self, batches: Sequence[Batch]) -> list[bytes]:
        """Write them now, in transactions of a millisecond; gives the keys that the index knew otherwise.

        Raises lmdb.Error when the disk does not take it; then part of it may be kept.
        """
        changed: list[bytes] = []
        while batches:
            batches, found = await self._in_thread(self._store.land, batches)
            changed += found
        return changed

    async def settle(self) -> None:
        """Wait until everything added so far is written, or given up."""
        while self._writing is not None:
            await self._writing

    async def close(self) -> None:
        await self.settle()
        await asyncio.to_thread(self._thread.shutdown)

    async def _write(self) -> None:
        try:
            while self._waiting:
                batches, is_truth = self._waiting.popleft()
                try:
                    await (self._in_thread(self._store.put_truths, batches) if is_truth else self.land(batches))
                except lmdb.Error:
                    self._not_kept(_keys(batches))
        finally:
            self._writing = None

    async def _in_thread(self, write: Callable[[Sequence[Batch], float], R], batches: Sequence[Batch]) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, write, batches, self._clock.monotonic())


def _keys(batches: Sequence[Batch]) -> int:
    return sum(len(batch.listed) for batch in batches)
