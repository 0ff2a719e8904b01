"""Trying what a cache directory can do, after it gave errors; and living with a disk that somebody else has filled.

A full disk makes the cache smaller: it gives back a little, counts as full at what is left, and so goes on with a part
of its capacity: what comes replaces what was. After GROW_SECONDS it tries its whole capacity again. It never gives back
more than half of what it held: a disk that is filled to the brim again and again is then left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.blocks.directory import BlockDirectory, Evicted
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.files.troubles import Trouble, trouble_of
from gateway.blocks.index.shares import Capacity
from gateway.blocks.observer import CacheObserver
from gateway.clock import Clock
from gateway.errors import BlockError

GROW_SECONDS = 600.0
YIELDED_PART = 64
BLOCKS_YIELDED_MIN = 4
BLOCKS_NEEDED = 2
"""A disk has room again when so many blocks fit."""


@dataclass(slots=True)
class DirectoryProbe:
    """The probe of one process's directory: call it on the event loop."""

    directory: BlockDirectory
    threads: DiskThreads
    clock: Clock
    observer: CacheObserver
    block_size_bytes: int
    _whole: Capacity = field(init=False)
    _floor_bytes: int | None = None
    _grows_at: float | None = None
    _yielded: Evicted = field(default_factory=Evicted)

    def __post_init__(self) -> None:
        self._whole = self.directory.capacity

    async def __call__(self, trouble: Trouble) -> Trouble | None:
        """What is wrong now; None: nothing."""
        if trouble is Trouble.FULL:
            self._grows_at = self.clock.monotonic() + GROW_SECONDS
        found = await self._try()
        if found is Trouble.FULL and await self._failure_of(self._yield_some) is None:
            self._yielded.tell(self.observer)
            found = await self._try()
        return found

    def grow_when_due(self) -> None:
        """The whole capacity again, when the disk was full long ago."""
        if self._grows_at is not None and self.clock.monotonic() >= self._grows_at:
            self.directory.capacity, self._grows_at, self._floor_bytes = self._whole, None, None

    async def _try(self) -> Trouble | None:
        if await self._failure_of(self._read_now) is not None:
            return Trouble.FAILING
        writing = await self._failure_of(self._write_now)
        return Trouble.READ_ONLY if writing is Trouble.FAILING else writing

    async def _failure_of(self, step: Callable[[], None]) -> Trouble | None:
        """What is wrong with the disk when a step fails."""
        try:
            await self.threads.probe(step)
        except BlockError as error:
            return trouble_of(error) or Trouble.FAILING
        return None

    def _read_now(self) -> None:
        self.directory.store.try_reading()
        self.directory.index.usage()

    def _write_now(self) -> None:
        self.directory.store.try_writing(BLOCKS_NEEDED * self.block_size_bytes)
        self.directory.index.touch()
        self.directory.store.keep_ballast()

    def _yield_some(self) -> None:
        self.directory.store.drop_ballast()
        usage = self.directory.index.usage()
        held_bytes = usage.used_bytes + usage.reserved_bytes
        if self._floor_bytes is None:
            self._floor_bytes = held_bytes // 2
        yielded = max(held_bytes // YIELDED_PART, BLOCKS_YIELDED_MIN * self.block_size_bytes)
        ceiling_bytes = max(held_bytes - yielded, self._floor_bytes)
        self.directory.capacity = self._whole.lowered_to(ceiling_bytes)
        self._yielded = self.directory.shrink()
