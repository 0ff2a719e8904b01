"""A cache's regular work: it enters used blocks into the index, updates metrics, and closes evicted files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.index import TOUCHES_PER_TRANSACTION
from gateway.core.errors import ForebayError, StoreUnavailable
from gateway.telemetry import metrics

UNLINKS_RETRIED_SECONDS = 60.0


class Maintenance:
    """Regular work of one process's cache."""

    def __init__(self, dependencies: CacheDependencies) -> None:
        self._dependencies = dependencies
        self._unlinks_tried_at = dependencies.clock.monotonic()
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
            await self._dependencies.clock.sleep(self._dependencies.settings.access_flush_seconds)
            self._dependencies.unpinned_gets.locks.release_late()
            await self._drop_evicted()
            await self.flush_accesses()
            await self._retry_unlinks()
            await self._grow_again()

    async def _drop_evicted(self) -> None:
        """Close evicted files, as open ones take room; without changes in the index, none were evicted."""
        dependencies = self._dependencies
        try:
            changes = dependencies.directory.index.changes()
        except StoreUnavailable:
            return
        if changes != self._changes_seen:
            self._changes_seen = changes
            with suppress(StoreUnavailable):  # told to the isolation already
                await dependencies.open_files.drop_unlinked(dependencies.threads.disk)

    async def flush_accesses(self) -> None:
        """Tell the index which files were used until now, a short transaction at a time.

        What is used meanwhile has its turn the next time: under load, this would never end.
        """
        dependencies = self._dependencies
        index = dependencies.directory.index
        for _ in range(-(-len(index.accesses) // TOUCHES_PER_TRANSACTION)):
            if not dependencies.isolation.writable:
                return
            try:
                await dependencies.threads.index(index.touch)
            except StoreUnavailable:
                metrics.CACHE_STORE_UNAVAILABLE.add(1)
                return

    async def _retry_unlinks(self) -> None:
        dependencies, now = self._dependencies, self._dependencies.clock.monotonic()
        if not dependencies.isolation.writable or now - self._unlinks_tried_at < UNLINKS_RETRIED_SECONDS:
            return
        self._unlinks_tried_at = now
        with suppress(StoreUnavailable):  # told to the isolation already
            await dependencies.threads.index(dependencies.directory.retry_unlinks)

    async def _grow_again(self) -> None:
        dependencies = self._dependencies
        directory = dependencies.directory
        with suppress(StoreUnavailable, OSError):  # told to the isolation already, or at the next write
            if dependencies.isolation.writable and directory.capacity is not directory.configured_capacity:
                await dependencies.threads.index(partial(directory.grow_again, dependencies.settings.block_size_bytes))

    def _look_at_rights(self) -> None:
        if self._rights_of_others is not None:
            with suppress(ForebayError):  # the writer reports it; the last known values stay
                self._dependencies.directory.reserve_of_others.size_bytes = self._rights_of_others()

    def _report_usage(self) -> None:
        dependencies = self._dependencies
        if not dependencies.isolation.readable:
            return
        try:
            usage, written_bytes = dependencies.directory.index.usage(), dependencies.directory.written_today_bytes()
        except StoreUnavailable as error:
            dependencies.isolation.note(error)
        else:
            for slot, of_slot in usage.slots.items():
                metrics.CACHE_USAGE_BYTES.set(of_slot.used_bytes, slot)
                metrics.CACHE_RESERVED_BYTES.set(of_slot.reserved_bytes, slot)
                metrics.CACHE_PINNED_BYTES.set(of_slot.pinned_bytes, slot)
            metrics.CACHE_UNSURVEYED_BYTES.set(usage.unsurveyed_bytes)
            metrics.CACHE_WRITTEN_TODAY_BYTES.set(written_bytes)
