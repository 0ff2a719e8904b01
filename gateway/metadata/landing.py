"""Fills on their way into the catalog: gathered on the event loop, written by a thread, a few per transaction."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

import lmdb

from gateway.metadata.disk_thread import DiskThread
from gateway.metadata.forgetful import ForgetfulStore
from gateway.metadata.observer import CatalogObserver
from gateway.metadata.store import LANDED_PER_TRANSACTION, CatalogStore, Fill

WAITING_MAX = 4096
"""Fills that wait at most; further ones are not kept, and their objects are asked for again."""

LAND_SECONDS_MAX = 10.0
"""A transaction that takes longer is not waited for: another process was stopped in the midst of one."""

GATHERING_SECONDS = 0.01
"""Between two transactions: what comes meanwhile is written together. Who comes alone does not wait."""


class Landing:
    """One process's queue. Nobody waits for a fill to land: until then its object is asked for again."""

    def __init__(self, store: CatalogStore | ForgetfulStore, observer: CatalogObserver) -> None:
        self._store = store
        self._observer = observer
        self._thread = DiskThread("catalog")
        self._waiting: deque[Fill] = deque()
        self._writing: asyncio.Task[None] | None = None

    def add(self, fill: Fill) -> None:
        """Have a fill written soon."""
        if len(self._waiting) >= WAITING_MAX:
            self._observer.not_kept(1)
            return
        self._waiting.append(fill)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="catalog landing")

    async def settle(self) -> None:
        """Wait until everything added so far is written, or given up."""
        while self._writing is not None:
            await self._writing

    async def close(self) -> bool:
        """Write what is left; False when that takes too long, and the thread is left behind."""
        if not self._thread.is_stuck(LAND_SECONDS_MAX):
            await self.settle()
        return await self._thread.close(LAND_SECONDS_MAX)

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch = list(islice(self._waiting, LANDED_PER_TRANSACTION))
                for _ in batch:
                    self._waiting.popleft()
                try:
                    await self._thread.run(LAND_SECONDS_MAX, self._store.land, batch)
                except (lmdb.Error, TimeoutError):
                    self._observer.not_kept(len(batch))
                if len(self._waiting) < LANDED_PER_TRANSACTION:
                    await asyncio.sleep(GATHERING_SECONDS)  # not of the clock: no promise hangs on it
        finally:
            self._writing = None
