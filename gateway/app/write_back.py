"""The write-back buffer in a gateway: its directory, the need for it, and the process that flushes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gateway.blocks.cache import BlockCache, PassthroughCache
from gateway.config import Settings
from gateway.core.clock import Clock
from gateway.core.errors import BufferUnavailable, StoreUnavailable
from gateway.core.model import Claim
from gateway.metadata.catalog import Catalog
from gateway.operations.writeback.cache_promotion import CachePromoter, KeptCheckpoints
from gateway.origin.client import Origin
from gateway.policy.slots import Slot, Slots
from gateway.writeback import DIRECTORY
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.admin.checkpoint_retention import CheckpointRetention
from gateway.writeback.admin.flush_report import FlusherElsewhere, FlushReport
from gateway.writeback.admin.monitor import PendingMonitor
from gateway.writeback.admin.writeback_admin import WritebackAdmin
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.checkpoints.reads import reads_by_checkpoint
from gateway.writeback.flushing.flush_logger import FlushLogger
from gateway.writeback.flushing.flush_task import FlushDependencies
from gateway.writeback.flushing.manifest_files import ManifestFiles, OtherNodes
from gateway.writeback.flushing.reconciler import Reconciler
from gateway.writeback.flushing.requests import Requests

RESERVE_SECONDS = 10.0
"""Seconds between two attempts to set room aside again after it was given up."""


def buffer_directory(settings: Settings) -> Path:
    return settings.cache.directory / DIRECTORY


def is_needed(settings: Settings) -> bool:
    """Return whether anything may be written to it, or remain in it from slots that had `write = "back"` before."""
    return any(slot.is_buffered for slot in settings.slots) or buffer_directory(settings).exists()


@asynccontextmanager
async def opened_buffer(
    settings: Settings, worker: int, slots: Slots, clock: Clock, blocks: PassthroughCache
) -> AsyncIterator[WritebackBuffer | None]:
    """Yield the buffer, as worker slot `worker` uses it; None if none is needed. `blocks` leave room for it.

    StartupError for a buffer that this version does not read, StoreUnavailable when the disk under it fails.
    """
    if not is_needed(settings):
        yield None
        return
    try:
        buffer = await WritebackBuffer.open(buffer_directory(settings), worker, slots, clock=clock)
    except BufferUnavailable as error:
        raise StoreUnavailable(str(error)) from error
    buffer.journal.tell(is_failing=buffer.journal.has_failed)
    if isinstance(blocks, BlockCache) and any(slot.is_buffered for slot in slots):
        blocks.keep_free(buffer.bounds.unused_bytes)
    try:
        yield buffer
    finally:
        await buffer.close()


async def follow_slots(buffer: WritebackBuffer, slots: Slots, blocks: PassthroughCache) -> None:
    """Follow changed slots; BufferUnavailable."""
    await buffer.apply_settings(slots)
    if isinstance(blocks, BlockCache) and any(slot.is_buffered for slot in slots):
        blocks.keep_free(buffer.bounds.unused_bytes)


def no_claim(_claims: Sequence[Claim]) -> None:
    """Tell nobody: no other node looks for what is pending here."""


@dataclass(frozen=True, slots=True)
class FlushServices:
    """The services that a flush reads from and updates."""

    origin: Origin
    catalog: Catalog
    blocks: BlockCache
    slots: Slots
    clock: Clock
    settled: Callable[[Sequence[Claim]], None] = no_claim
    """As `FlushDependencies.settled`."""

    others: OtherNodes | None = None
    """The other nodes' pending writes; None: no other node writes."""


class Flushing:
    """Takes the buffer's content to the origin, in one process of a gateway."""

    def __init__(self, buffer: WritebackBuffer, queries: CheckpointQueries, services: FlushServices) -> None:
        publisher = CachePromoter(services.catalog, services.blocks, services.slots, buffer.staging)
        requests = Requests(services.origin, buffer.staging, buffer.threads, services.clock)
        self._slots = services.slots
        self._known = dict[str, Slot]()
        self._buffers = dict[str, int]()
        self.follow_slots()
        self._log = FlushLogger(services.clock)
        tools = FlushDependencies(
            *(buffer.journal, requests, publisher, self._log, services.clock, self._known),
            manifests=ManifestFiles(services.others),
            settled=services.settled,
        )
        self.buffer = buffer
        self._clock = services.clock
        self.reconciler = Reconciler(tools)
        self.admin = WritebackAdmin(queries, tools, self.reconciler, self._buffers)
        cache = KeptCheckpoints(services.blocks)
        self.retention = CheckpointRetention(queries, buffer.journal, services.slots, cache, services.clock)
        self.admin.report.kept = lambda: self.retention.kept
        self._monitor = PendingMonitor(queries, self._buffers, services.clock)

    def follow_slots(self) -> None:
        """Follow changed slots. Pending writes of a removed slot go to the origin as before."""
        self._known.update({slot.name: slot for slot in self._slots})
        self._buffers.clear()
        self._buffers.update({slot.name: slot.buffer_bytes or 0 for slot in self._slots if slot.is_buffered})

    async def run(self) -> None:
        """Flush until cancelled. The next run finds out the outcome of what was under way."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.reconciler.run())
            group.create_task(self._log.run())
            group.create_task(self.buffer.bounds.tell_exposure())
            group.create_task(self._keep_reserve())
            group.create_task(self.retention.run())
            group.create_task(self._monitor.run())
            group.create_task(self.admin.report.watch(self._buffers))

    async def _keep_reserve(self) -> None:
        while True:
            await self.buffer.keep_reserve()
            await self._clock.sleep(RESERVE_SECONDS)


@contextmanager
def reports_of(
    settings: Settings,
    buffer: WritebackBuffer,
    origin: Origin,
    slots: Slots,
    clock: Clock,
    shared_directory: Path | None,
) -> Iterator[FlushReport]:
    """Yield a worker's word on what this node flushes. It opens nothing before the first question."""

    def scratch_slots() -> frozenset[str]:
        return frozenset(slot.name for slot in slots if slot.write == "scratch")

    queries = CheckpointQueries(buffer_directory(settings))
    try:
        made = FlushReport(queries, buffer.journal, origin, clock, FlusherElsewhere(scratch_slots))
        made.report.reads = partial(reads_by_checkpoint, shared_directory)
        yield made
    finally:
        queries.close()


@asynccontextmanager
async def flushing(
    settings: Settings, buffer: WritebackBuffer | None, services: FlushServices, shared_directory: Path | None = None
) -> AsyncIterator[Flushing | None]:
    """Yield a buffer's flushing, to run; None without one. `shared_directory` has the workers' counts of sent bytes."""
    if buffer is None:
        await services.blocks.keep_only([])  # what `keep_last` kept while a slot wrote back
        yield None
        return
    queries = CheckpointQueries(buffer_directory(settings))
    try:
        made = Flushing(buffer, queries, services)
        made.admin.report.reads = partial(reads_by_checkpoint, shared_directory)
        yield made
    finally:
        await asyncio.to_thread(queries.close)
