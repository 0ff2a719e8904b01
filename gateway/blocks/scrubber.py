"""The scrubber: reads blocks on disk that have long been unread, and drops damaged ones.

All blocks in the order of their ids, slowly, a piece at a time, in a thread that gives way to all others. Bytes in
memory are passed over: they are verified when read, and say nothing about the disk. Other bytes do not
stay in memory. One pass each period; its place is recorded now and then, and at the end.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import orjson

from gateway.blocks.block_file import read_verified
from gateway.blocks.directory import BlockDirectory, DiskThreads
from gateway.blocks.disk_health import CircuitBreaker
from gateway.blocks.layout import CHUNK_BYTES, BlockRecord
from gateway.blocks.page_cache import Residency
from gateway.core.clock import Clock
from gateway.core.errors import BlockDamaged, StoreUnavailable
from gateway.disk.atomic_write import write_durably
from gateway.telemetry import metrics

BLOCKS_AT_ONCE = 64
PIECE_BYTES = 1024 * 1024
PASSED_OVER_BYTES = 16 * 1024
"""Bytes for which a piece in memory counts in the pace: the look costs processor time."""

SAVE_SECONDS = 30.0
PAUSE_SECONDS = 10.0
"""Seconds between looks while the directory is left alone."""

LEAD_SECONDS = 0.05
"""Seconds that it may be ahead of its pace: below that, sleeping costs more than it spares."""


@dataclass(frozen=True, slots=True)
class ScrubPass:
    """One pass over all blocks, in the order of their keys in the index. Times are in seconds since 1970.

    `after` is the id of the last block looked at, as hex; `ended_at` None while the pass is under way.
    """

    started_at: float
    ended_at: float | None = None
    after: str = ""
    blocks: int = 0
    read_bytes: int = 0
    dropped_blocks: int = 0

    @property
    def part_done(self) -> float:
        """From 0 to 1: ids are hashes, so that the id itself tells how far it is, by what blocks are sorted by."""
        return 1.0 if self.ended_at is not None else int(self.after[32:40] or "0", 16) / 2**32


def load_pass(path: Path) -> ScrubPass | None:
    """Return the pass that was written down last; None if there is none that makes sense. Blocks."""
    try:
        document: Any = orjson.loads(path.read_bytes())
        known = {field.name: document[field.name] for field in fields(ScrubPass)}
        record = ScrubPass(**known)
        bytes.fromhex(record.after)
        record.started_at + (record.ended_at or 0.0) + record.blocks + record.read_bytes + record.dropped_blocks
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def save_pass(path: Path, record: ScrubPass) -> None:
    """Write a pass down; StoreUnavailable when the disk does not take it. Blocks."""
    try:
        write_durably(path, orjson.dumps(asdict(record)))
    except OSError as error:
        raise StoreUnavailable(f"the scrubber's position cannot be written: {error}") from error


@dataclass(frozen=True, slots=True)
class ScrubSettings:
    """`period_seconds` from the start of one pass to the next; `bytes_per_second` at most."""

    record: Path
    period_seconds: float
    bytes_per_second: float


@dataclass(slots=True)
class Scrubber:
    """One process does it for all. `run` until cancelled; `progress` is how it stands."""

    settings: ScrubSettings
    directory: BlockDirectory
    threads: DiskThreads
    isolation: CircuitBreaker
    clock: Clock
    progress: ScrubPass | None = None
    _residency: Residency = field(default_factory=Residency)
    _ahead_until: float = 0.0
    _saved_at: float = 0.0

    async def run(self) -> None:
        self.progress = await self.threads.idle(load_pass, self.settings.record)
        try:
            while True:
                await self._pass(await self._due())
        finally:
            await asyncio.shield(self._save())

    async def _due(self) -> ScrubPass:
        last = self.progress
        if last is not None and last.ended_at is None:
            return last
        if last is not None:
            waited_seconds = max(0.0, self.clock.now() - last.started_at)  # the clock may have been set back
            await self.clock.sleep(max(0.0, self.settings.period_seconds - waited_seconds))
        return ScrubPass(self.clock.now())

    async def _pass(self, record: ScrubPass) -> None:
        self.progress = record
        while batch := await self._next_blocks(bytes.fromhex(self.progress.after)):
            for block, slot in batch:
                await self._look_at(block, slot)
                if self.clock.monotonic() - self._saved_at >= SAVE_SECONDS:
                    await self._save()
        self.progress = replace(self.progress, ended_at=self.clock.now())
        metrics.SCRUB_PASSES.add(1)
        await self._save()

    async def _next_blocks(self, after: bytes) -> list[tuple[BlockRecord, str]]:
        while True:
            await self._until_usable()
            try:
                return await self.threads.idle(self.directory.index.blocks_after, after, BLOCKS_AT_ONCE)
            except StoreUnavailable:
                await self.clock.sleep(PAUSE_SECONDS)

    async def _until_usable(self) -> None:
        while not self.isolation.writable:
            await self.clock.sleep(PAUSE_SECONDS)

    async def _look_at(self, block: BlockRecord, slot: str) -> None:
        assert self.progress is not None  # noqa: S101 - there is a pass
        read_bytes, dropped = 0, False
        await self._until_usable()
        try:
            for position in range(0, block.extent.length, PIECE_BYTES):
                count = min(PIECE_BYTES, block.extent.length - position)
                fresh_bytes = await self.threads.idle(self._verify, block, position, count)
                read_bytes += fresh_bytes
                await self._keep_pace(max(fresh_bytes, PASSED_OVER_BYTES))
        except BlockDamaged:
            dropped = await self._drop(block, slot)
        except StoreUnavailable:
            pass  # told to the isolation already; the next pass comes to it again
        metrics.SCRUB_BLOCKS.add(1)
        metrics.SCRUB_BYTES.add(read_bytes)
        self.progress = replace(
            self.progress,
            after=block.block_id.hex(),
            blocks=self.progress.blocks + 1,
            read_bytes=self.progress.read_bytes + read_bytes,
            dropped_blocks=self.progress.dropped_blocks + dropped,
        )

    def _verify(self, block: BlockRecord, position: int, count: int) -> int:
        """Read what is not in memory of a piece, and leave it out of memory; how many bytes. BlockDamaged."""
        file, extent, read_bytes = self.directory.store.open_published(block.extent), block.extent, 0
        try:
            for first in range(position, position + count, CHUNK_BYTES):
                size = min(CHUNK_BYTES, position + count - first)
                if not self._residency.resident(file.descriptor, extent.offset + first, size):
                    read_verified(file.descriptor, extent, first, size)
                    os.posix_fadvise(file.descriptor, extent.offset + first, size, os.POSIX_FADV_DONTNEED)
                    read_bytes += size
        finally:
            file.close()
        return read_bytes

    async def _drop(self, block: BlockRecord, slot: str) -> bool:
        if not self.isolation.writable:
            return False
        try:
            dropped = await self.threads.index(self.directory.drop, block.block_id, block.extent.file)
        except StoreUnavailable:
            return False
        if dropped:
            metrics.CACHE_DAMAGED.add(1, slot)
        return dropped

    async def _keep_pace(self, count: int) -> None:
        now = self.clock.monotonic()
        self._ahead_until = max(self._ahead_until, now) + count / self.settings.bytes_per_second
        if self._ahead_until - now > LEAD_SECONDS:
            await self.clock.sleep(self._ahead_until - now)

    async def _save(self) -> None:
        self._saved_at = self.clock.monotonic()
        if self.progress is not None and self.isolation.writable:
            try:
                await self.threads.idle(save_pass, self.settings.record, self.progress)
            except StoreUnavailable:
                return  # told to the isolation already; after a restart some blocks are read twice
