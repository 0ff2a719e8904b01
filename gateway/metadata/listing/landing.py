"""What the origin has told, on its way into the index: gathered on the event loop, written by a thread of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import lmdb

from gateway.clock import Clock
from gateway.metadata.listing.store import Batch, ListingStore

WAITING_MAX = 64
"""Parts of pages that wait at most, a thousand keys each: about 20 MiB."""


class ListingLanding:
    """One process's queue. Nobody waits for it: until a page has landed, its keys are asked for again."""

    def __init__(self, store: ListingStore, clock: Clock, not_kept: Callable[[int], None]) -> None:
        self._store = store
        self._clock = clock
        self._not_kept = not_kept
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="listing")
        self._waiting: deque[tuple[Batch, bool]] = deque()
        self._writing: asyncio.Task[None] | None = None

    def add(self, batch: Batch, *, is_truth: bool = False) -> None:
        """Have it written soon; `is_truth`: it is about a single key whose range may be known already."""
        if len(self._waiting) >= WAITING_MAX:
            self._not_kept(len(batch.listed))
            return
        self._waiting.append((batch, is_truth))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="listing landing")

    async def land(self, batch: Batch) -> list[bytes]:
        """Write it now, in transactions of a millisecond; gives the keys in it that the index knew otherwise.

        Raises lmdb.Error when the disk does not take it; then part of it may be kept.
        """
        loop = asyncio.get_running_loop()
        changed: list[bytes] = []
        while batch.start < batch.stop:
            reach, found = await loop.run_in_executor(self._thread, self._store.land, batch, self._clock.monotonic())
            changed += found
            place = next((number for number, (key, _) in enumerate(batch.listed) if key >= reach), len(batch.listed))
            batch = replace(batch, start=reach, listed=batch.listed[place:])
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
                batch, is_truth = self._waiting.popleft()
                try:
                    await (self._put_truth(batch) if is_truth else self.land(batch))
                except lmdb.Error:
                    self._not_kept(len(batch.listed))
        finally:
            self._writing = None

    async def _put_truth(self, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._store.put_truth, batch, self._clock.monotonic())
