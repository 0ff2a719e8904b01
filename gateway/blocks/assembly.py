"""Putting a block cache together: which part is given which others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.blocks.directory import DiskThreads
from gateway.blocks.files.block_file import OpenFiles
from gateway.blocks.files.page_cache import Residency
from gateway.blocks.files.watching import FileWatcher
from gateway.blocks.filling.large_block_fetch import LargeBlockFetcher
from gateway.blocks.filling.origin_gets import UnpinnedGets
from gateway.blocks.filling.single_flight import Fetchers, SingleFlight
from gateway.blocks.filling.small_block_fetch import GroupCommitWriter, SegmentAppender, SmallBlockFetcher
from gateway.blocks.layout import BlockSettings
from gateway.blocks.maintenance.disk_health import CircuitBreaker, DirectoryProbe
from gateway.blocks.maintenance.opening import OpenDirectory
from gateway.blocks.reading.sources import AheadMarks, ReadDependencies
from gateway.core.clock import Clock
from gateway.origin.client import Origin


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a cache that it looks after itself, with those that its readers share."""

    tools: ReadDependencies
    opened: OpenDirectory
    watcher: FileWatcher
    writer: GroupCommitWriter


def assemble(
    settings: BlockSettings,
    opened: OpenDirectory,
    threads: DiskThreads,
    origin: Origin,
    clock: Clock,
) -> Parts:
    watcher, open_files = FileWatcher(), OpenFiles()
    blocks, locks, retries = opened.blocks, opened.locks, settings.fill_retries
    blocks.on_unlink = open_files.drop
    writer = GroupCommitWriter(SegmentAppender(blocks), threads, clock)
    probe = DirectoryProbe(blocks, threads, settings.block_size_bytes)
    isolation = CircuitBreaker(settings.directory, probe, clock)
    threads.on_error = isolation.note
    threads.stalled = lambda: blocks.index.stalled
    fetchers = Fetchers(
        SmallBlockFetcher(blocks, open_files, writer, origin, clock, retries),
        LargeBlockFetcher(blocks, locks, origin, threads, watcher, open_files, clock, retries),
        settings.small_object_bytes_max,
        blocks,
        locks,
        watcher,
        isolation,
    )
    tools = ReadDependencies(
        settings,
        blocks,
        origin,
        SingleFlight(fetchers, settings.fills_max),
        UnpinnedGets(locks, watcher, asyncio.Semaphore(settings.fills_max)),
        threads,
        Residency(),
        AheadMarks(),
        blocks.index.accesses,
        open_files,
        isolation,
        clock,
    )
    return Parts(tools, opened, watcher, writer)
