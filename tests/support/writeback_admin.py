"""A write-back buffer on an origin in memory with its flusher and its admin, without any gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.api.documents import FlushProgress
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.admin.writeback_admin import WritebackAdmin
from gateway.writeback.flushing.reconciler import Reconciler
from tests.support.flushing import Buffer
from tests.support.writeback import key, upload

_EVERYTHING = Prefix("")


class AdminHarness:
    """A buffer, its flusher and its admin."""

    def __init__(self, directory: Path) -> None:
        self.buffer = Buffer(directory)
        self.queries = CheckpointQueries(directory)
        self.tools = self.buffer.tools()
        self.reconciler = Reconciler(self.tools, random.Random(1))
        self.admin = WritebackAdmin(self.queries, self.tools, self.reconciler, {"slot": 1000})
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self.reconciler.run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        await self.buffer.close()
        self.queries.close()

    async def conflict(self, name: str) -> None:
        """Others write while our write is on its way."""
        await self.buffer.put(key(name), b"ours")
        self.buffer.origin.put("bucket", name, b"theirs")
        if self._running is None:
            self.start()
        await self.buffer.until(lambda: name in self.buffer.observer.conflicts)

    async def open_upload(self, name: str, upload_id: str) -> None:
        """A client has just begun one."""
        begun = replace(upload(upload_id, key(name)), began_at=self.buffer.clock.now())
        await self.buffer.journal.change(lambda tx: tx.uploads.begin(begun))

    async def progress(self, prefix: Prefix = _EVERYTHING, through: int = 2**60) -> FlushProgress:
        return await self.admin.progress(prefix, through)


def with_harness(path: Path, scenario: Callable[[AdminHarness], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        harness = AdminHarness(path)
        try:
            await scenario(harness)
        finally:
            await harness.close()

    asyncio.run(run())
