"""The parts that one process's block cache is made of: put together once, when the cache opens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.blocks.block_file import OpenFiles
from gateway.blocks.directory import DiskThreads
from gateway.blocks.disk_health import CircuitBreaker, DirectoryProbe
from gateway.blocks.fetch_locks import FileWatcher
from gateway.blocks.index import AccessLog
from gateway.blocks.large_block_fetch import LargeBlockFetcher
from gateway.blocks.layout import BlockSettings
from gateway.blocks.opening import OpenDirectory
from gateway.blocks.origin_gets import Turns, UnpinnedGets
from gateway.blocks.page_cache import Residency
from gateway.blocks.single_flight import FetchDependencies, SingleFlight
from gateway.blocks.small_block_fetch import GroupCommitWriter, SmallBlockFetcher
from gateway.core.clock import Clock
from gateway.origin.client import Origin
from gateway.origin.peer_protocol import Roles
from gateway.origin.receive_buffer import Buffers

PROCESS_AHEAD_BYTES = 256 * 1024 * 1024
"""Limit of what is verified ahead for all readers of a process. Readers without room verify pieces when they come to
them."""


@dataclass(slots=True)
class AheadRoom:
    """Bytes that may still be verified ahead for the readers of a process. Event loop only."""

    left_bytes: int = PROCESS_AHEAD_BYTES


@dataclass(frozen=True, slots=True)
class CacheDependencies(FetchDependencies):
    opened: OpenDirectory
    accesses: AccessLog
    fetches: SingleFlight
    unpinned_gets: UnpinnedGets
    writers: tuple[GroupCommitWriter, GroupCommitWriter]
    """The writers of own small blocks, and of copies of other nodes' blocks."""

    residency: Residency = field(default_factory=Residency)
    ahead_marks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Blocks that this process fetched ahead and no reader has come to yet: reading one shows that its reader goes on.
    Event loop only."""
    ahead_room: AheadRoom = field(default_factory=AheadRoom)
    roles: Roles | None = None
    """Says which blocks other nodes look after; None: none."""

    buffers: Buffers = field(default_factory=Buffers)

    held_rows: dict[bytes, tuple[int, tuple[bytes, bytes]]] = field(default_factory=dict)
    """Rows that `HeldObject` has looked up for a block, and the index's commit at that time."""

    @classmethod
    def assemble(
        cls,
        settings: BlockSettings,
        opened: OpenDirectory,
        threads: DiskThreads,
        origin: Origin,
        clock: Clock,
        roles: Roles | None = None,
    ) -> CacheDependencies:
        blocks, locks, watcher, open_files = opened.blocks, opened.locks, FileWatcher(), OpenFiles()
        if roles is not None:
            blocks.owns = lambda one, slot: roles.owns(one.version.key, one.offset // settings.block_size_of(slot))
        probe = DirectoryProbe(blocks, threads, settings.block_size_bytes)
        isolation = CircuitBreaker(settings.directory, probe, clock)
        threads.on_error = isolation.note
        threads.stalled = lambda: blocks.index.stalled
        shared = settings, blocks, locks, origin, threads, watcher, open_files, isolation, clock
        of_fetches = FetchDependencies(*shared)
        writers, buffers = (GroupCommitWriter(of_fetches), GroupCommitWriter(of_fetches)), Buffers()

        def on_unlink(file: str) -> None:
            open_files.drop(file)
            for writer in writers:
                writer.let_go(file)

        blocks.on_unlink = on_unlink
        fetches = SingleFlight(
            of_fetches, SmallBlockFetcher(of_fetches, *writers), LargeBlockFetcher(of_fetches, buffers)
        )
        turns = Turns(settings.fills_max), Turns(settings.fills_max)
        unpinned_gets = UnpinnedGets(locks, watcher, *turns)
        accesses = blocks.index.accesses
        return cls(*shared, opened, accesses, fetches, unpinned_gets, writers, roles=roles, buffers=buffers)

    @classmethod
    def without_directory(cls, origin: Origin, clock: Clock) -> CacheDependencies:
        """Return the parts of a cache without a directory. Its breaker is open: no reader comes to a missing part."""
        settings, breaker = BlockSettings(Path(), 0), CircuitBreaker.open_for_good(clock)
        none: Any = SimpleNamespace(index=None)
        return cls(settings, none, none, origin, none, none, none, breaker, clock, none, none, none, none, none)
