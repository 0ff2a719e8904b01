"""Putting a block cache together: which part is given which others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.blocks.files.open_segments import OpenSegments
from gateway.blocks.files.residency import Residency
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.files.verification import VerifiedMemory
from gateway.blocks.files.watching import FileWatcher
from gateway.blocks.filling.coalescing import Fills
from gateway.blocks.filling.fill import BlockFiller
from gateway.blocks.filling.filling import Filler
from gateway.blocks.filling.first_looks import FirstLooks
from gateway.blocks.filling.following import Follower
from gateway.blocks.filling.guarded_fills import GuardedFiller
from gateway.blocks.filling.packer import Packer
from gateway.blocks.filling.packing import SegmentAppender
from gateway.blocks.filling.small_fills import SmallFiller
from gateway.blocks.observer import CacheObserver
from gateway.blocks.reading.readahead import AheadMarks
from gateway.blocks.reading.reading_tools import ReadingTools
from gateway.blocks.settings import BlockSettings
from gateway.blocks.trouble.isolation import Isolation
from gateway.blocks.trouble.probe import DirectoryProbe
from gateway.blocks.upkeep.opening import OpenDirectory
from gateway.clock import Clock
from gateway.origin.client import Origin


@dataclass(frozen=True, slots=True)
class Parts:
    """What a cache must see to itself, and what its readers share."""

    tools: ReadingTools
    opened: OpenDirectory
    watcher: FileWatcher
    packer: Packer


def assemble(
    settings: BlockSettings,
    opened: OpenDirectory,
    threads: DiskThreads,
    origin: Origin,
    clock: Clock,
    observer: CacheObserver,
) -> Parts:
    """Everything that works on an open directory."""
    watcher, segments, verified = FileWatcher(), OpenSegments(), VerifiedMemory()
    retries = settings.fill_retries
    packer = Packer(SegmentAppender(opened.blocks), threads, clock, observer)
    filler = Filler(
        BlockFiller(opened.blocks, origin, threads, Follower(threads, watcher), verified, clock, observer, retries),
        SmallFiller(opened.blocks, segments, opened.claims, packer, watcher, origin, clock, observer, retries),
        settings.packed_bytes_max,
    )
    probe = DirectoryProbe(opened.blocks, threads, observer, settings.block_size_bytes)
    isolation = Isolation(settings.directory, probe, clock, observer)
    threads.on_error = isolation.note
    guarded = GuardedFiller(filler, isolation)
    tools = ReadingTools(
        settings,
        opened.blocks,
        origin,
        Fills(guarded, settings.fills_max, guarded.at_once),
        FirstLooks(opened.claims, watcher, asyncio.Semaphore(settings.fills_max)),
        threads,
        verified,
        Residency(),
        AheadMarks(),
        opened.blocks.index.accesses,
        segments,
        isolation,
        clock,
        observer,
    )
    return Parts(tools, opened, watcher, packer)
