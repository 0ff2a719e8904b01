"""The write-back buffer in a gateway: where it lies, whether it is needed, and the process that flushes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.blocks.cache import BlockCache
from gateway.clock import Clock
from gateway.config import Settings
from gateway.errors import BufferUnavailable, StoreUnavailable
from gateway.metadata.catalog import Catalog
from gateway.operations.absorbing.publishing import Publisher
from gateway.origin.client import Origin
from gateway.policy.slots import Slots
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.early_parts import EarlyParts
from gateway.writeback.flush import FlushObserver, Tools
from gateway.writeback.flush_requests import FlushRequests
from gateway.writeback.flusher import Flusher
from gateway.writeback.lost_uploads import LostUploads


def buffer_directory(settings: Settings) -> Path:
    """Where it lies in the cache directory."""
    return settings.cache.directory / "writeback"


def is_needed(settings: Settings) -> bool:
    """Whether anything may be written to it, or may still lie in it from slots that had `write = "back"` before."""
    return any(slot.write == "back" for slot in settings.slots) or buffer_directory(settings).exists()


@asynccontextmanager
async def opened_buffer(settings: Settings, worker: int) -> AsyncIterator[WritebackBuffer | None]:
    """The buffer, as worker slot `worker` uses it; None where none is needed.

    StartupError for one that this version does not read, StoreUnavailable when the disk under it fails.
    """
    if not is_needed(settings):
        yield None
        return
    try:
        buffer = await WritebackBuffer.open(buffer_directory(settings), worker)
    except BufferUnavailable as error:
        raise StoreUnavailable(str(error)) from error
    try:
        yield buffer
    finally:
        await buffer.close()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a flush reads from, and tells of what it has done."""

    origin: Origin
    catalog: Catalog
    blocks: BlockCache
    slots: Slots
    clock: Clock
    observer: FlushObserver


class Flushing:
    """What takes the buffer's content to the origin; in one process of a gateway."""

    def __init__(self, buffer: WritebackBuffer, around: Surroundings) -> None:
        publisher = Publisher(around.catalog, around.blocks, around.slots, buffer.staging)
        requests = FlushRequests(around.origin, buffer.staging, buffer.threads)
        tools = Tools(buffer.journal, requests, publisher, around.observer)
        self.buffer = buffer
        self.flusher = Flusher(tools, around.clock)
        self._early_parts = EarlyParts(tools, around.clock)
        self._lost_uploads = LostUploads(buffer.journal, requests, around.clock)

    async def run(self) -> None:
        """For ever. What is under way when this is cancelled is found out by the next one."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.flusher.run())
            group.create_task(self._early_parts.run())
            group.create_task(self._lost_uploads.run())
