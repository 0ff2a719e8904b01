"""What the origin has told, on its way into the index: gathered on the event loop, written by a thread of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

import lmdb

from gateway.clock import Clock
from gateway.metadata.disk_thread import DiskThread
from gateway.metadata.listing.batches import Batch
from gateway.metadata.listing.store import ListingStore

P = ParamSpec("P")
R = TypeVar("R")

WAITING_MAX = 64
"""Pages that wait at most, a thousand keys each: about 20 MiB."""


SWEEPS_MAX = 1024
"""Sweeps that wait at most."""

SWEEPS_BEHIND_MAX = 16
"""With more, own writes wait."""

LAND_SECONDS_MAX = 10.0
"""A transaction that takes longer is not waited for: another process was stopped in the midst of one."""


class ListingLanding:
    """One process's queue. Nobody waits for it: until a page has landed, its keys are asked for again."""

    def __init__(self, store: ListingStore, clock: Clock, not_kept: Callable[[int], None]) -> None:
        self._store = store
        self._clock = clock
        self._not_kept = not_kept
        self._thread = DiskThread("listing")
        self._sweeping: asyncio.Task[None] | None = None
        self._sweeps = 0
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

        Raises lmdb.Error when the disk does not take it, or not in time; then part of it may be kept.
        """
        changed: list[bytes] = []
        while batches:
            batches, found = await self._in_thread(self._store.land, batches)
            changed += found
        return changed

    def sweep(self) -> None:
        """Have some dirty keys let go of, if their time has come."""
        self._sweeps = min(self._sweeps + 1, SWEEPS_MAX)
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="dirty keys sweep")

    async def keep_up(self, seconds_max: float) -> None:
        """Wait until few sweeps wait, or for so long: whoever writes faster than they come, writes slower then."""
        if self._sweeping is not None and self._sweeps > SWEEPS_BEHIND_MAX:
            await asyncio.wait((self._sweeping,), timeout=seconds_max)

    async def settle(self) -> None:
        """Wait until everything added so far is written, or given up."""
        while (going_on := self._writing or self._sweeping) is not None:
            await going_on

    async def close(self) -> bool:
        """Write what is left; False when that takes too long, and the thread is left behind."""
        if not self._thread.is_stuck(LAND_SECONDS_MAX):
            await self.settle()
        return await self._thread.close(LAND_SECONDS_MAX)

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

    async def _sweep(self) -> None:
        try:
            while self._sweeps:
                self._sweeps -= 1
                with suppress(lmdb.Error):  # the disk is in trouble: own writes void more than their key meanwhile
                    await self._in_time(self._store.sweep, self._clock.monotonic())
        finally:
            self._sweeping = None

    async def _in_thread(self, write: Callable[[Sequence[Batch], float], R], batches: Sequence[Batch]) -> R:
        return await self._in_time(write, batches, self._clock.monotonic())

    async def _in_time(self, write: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Raises lmdb.Error when it is not done in time, though it may be done later."""
        try:
            return await self._thread.run(LAND_SECONDS_MAX, write, *arguments, **keywords)
        except TimeoutError:
            raise lmdb.LockError("another process does not finish its transaction") from None


def _keys(batches: Sequence[Batch]) -> int:
    return sum(len(batch.listed) for batch in batches)
