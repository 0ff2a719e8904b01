"""A cache's regular work: it enters used blocks into the index, updates metrics, and closes evicted files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from gateway.blocks.index.index import TOUCHES_PER_TRANSACTION
from gateway.blocks.reading.sources import ReadDependencies
from gateway.core.errors import ForebayError, StoreUnavailable
from gateway.telemetry import metrics

UNLINKS_RETRIED_SECONDS = 60.0


class Maintenance:
    """Regular work of one process's cache."""

    def __init__(self, tools: ReadDependencies) -> None:
        self._tools = tools
        self._unlinks_tried_at = tools.clock.monotonic()
        self._rights_of_others: Callable[[], int] | None = None
        self._changes_seen = -1

    def keep_free(self, rights_of_others: Callable[[], int]) -> None:
        """Make fills leave room to which others have a right; the right is read again from time to time."""
        self._rights_of_others = rights_of_others
        self._look_at_rights()

    async def resume(self) -> None:
        while True:
            self._report_usage()
            self._look_at_rights()
            await self._tools.clock.sleep(self._tools.settings.access_flush_seconds)
            self._tools.unpinned_gets.locks.release_late()
            await self._drop_evicted()
            await self.flush_accesses()
            await self._retry_unlinks()
            await self._grow_again()

    async def _drop_evicted(self) -> None:
        """Close evicted files, as open ones take room; without changes in the index, none were evicted."""
        tools = self._tools
        try:
            changes = tools.directory.index.changes()
        except StoreUnavailable:
            return
        if changes != self._changes_seen:
            self._changes_seen = changes
            with suppress(StoreUnavailable):  # told to the isolation already
                await tools.open_files.drop_unlinked(tools.threads.disk)

    async def flush_accesses(self) -> None:
        """Tell the index which files were used until now, a short transaction at a time.

        What is used meanwhile has its turn the next time: under load, this would never end.
        """
        tools = self._tools
        index = tools.directory.index
        for _ in range(-(-len(index.accesses) // TOUCHES_PER_TRANSACTION)):
            if not tools.isolation.writable:
                return
            try:
                await tools.threads.index(index.touch)
            except StoreUnavailable:
                metrics.CACHE_STORE_UNAVAILABLE.add(1)
                return

    async def _retry_unlinks(self) -> None:
        tools, now = self._tools, self._tools.clock.monotonic()
        if not tools.isolation.writable or now - self._unlinks_tried_at < UNLINKS_RETRIED_SECONDS:
            return
        self._unlinks_tried_at = now
        with suppress(StoreUnavailable):  # told to the isolation already
            await tools.threads.index(tools.directory.retry_unlinks)

    async def _grow_again(self) -> None:
        tools = self._tools
        directory = tools.directory
        with suppress(StoreUnavailable, OSError):  # told to the isolation already, or at the next write
            if tools.isolation.writable and directory.capacity is not directory.configured_capacity:
                await tools.threads.index(partial(directory.grow_again, tools.settings.block_size_bytes))

    def _look_at_rights(self) -> None:
        if self._rights_of_others is not None:
            with suppress(ForebayError):  # the writer reports it; the last known values stay
                self._tools.directory.reserve_of_others.size_bytes = self._rights_of_others()

    def _report_usage(self) -> None:
        tools = self._tools
        if not tools.isolation.readable:
            return
        try:
            usage, written_bytes = tools.directory.index.usage(), tools.directory.written_today_bytes()
        except StoreUnavailable as error:
            tools.isolation.note(error)
        else:
            for slot, of_slot in usage.slots.items():
                metrics.CACHE_USAGE_BYTES.set(of_slot.used_bytes, slot)
                metrics.CACHE_RESERVED_BYTES.set(of_slot.reserved_bytes, slot)
                metrics.CACHE_PINNED_BYTES.set(of_slot.pinned_bytes, slot)
            metrics.CACHE_UNSURVEYED_BYTES.set(usage.unsurveyed_bytes)
            metrics.CACHE_WRITTEN_TODAY_BYTES.set(written_bytes)
