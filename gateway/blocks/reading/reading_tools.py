"""What every reader of one process shares."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.blocks.directory import BlockDirectory
from gateway.blocks.files.open_files import OpenFiles
from gateway.blocks.files.residency import Residency
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.filling.single_flight import SingleFlight
from gateway.blocks.filling.unpinned_get import UnpinnedGets
from gateway.blocks.index.access_log import AccessLog
from gateway.blocks.observer import CacheObserver
from gateway.blocks.reading.readahead import AheadMarks
from gateway.blocks.settings import BlockSettings
from gateway.blocks.trouble.isolation import Isolation
from gateway.clock import Clock
from gateway.origin.client import Origin


@dataclass(frozen=True, slots=True)
class ReadingTools:
    """Built once by `BlockCache.open`."""

    settings: BlockSettings
    directory: BlockDirectory
    origin: Origin
    fetches: SingleFlight
    unpinned_gets: UnpinnedGets
    threads: DiskThreads
    residency: Residency
    ahead_marks: AheadMarks
    accesses: AccessLog
    open_files: OpenFiles
    isolation: Isolation
    clock: Clock
    observer: CacheObserver
