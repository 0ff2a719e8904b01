"""What every reader of one process shares."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.blocks.access_log import AccessLog
from gateway.blocks.coalescing import Fills
from gateway.blocks.directory import BlockDirectory
from gateway.blocks.first_looks import FirstLooks
from gateway.blocks.isolation import Isolation
from gateway.blocks.observer import CacheObserver
from gateway.blocks.open_segments import OpenSegments
from gateway.blocks.readahead import AheadMarks
from gateway.blocks.residency import Residency
from gateway.blocks.settings import BlockSettings
from gateway.blocks.threads import DiskThreads
from gateway.blocks.verification import VerifiedMemory
from gateway.clock import Clock
from gateway.origin.client import Origin


@dataclass(frozen=True, slots=True)
class ReadingTools:
    """Built once by `BlockCache.open`."""

    settings: BlockSettings
    directory: BlockDirectory
    origin: Origin
    fills: Fills
    looks: FirstLooks
    threads: DiskThreads
    verified: VerifiedMemory
    residency: Residency
    ahead_marks: AheadMarks
    accesses: AccessLog
    segments: OpenSegments
    isolation: Isolation
    clock: Clock
    observer: CacheObserver
