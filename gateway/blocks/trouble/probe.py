"""Trying what a cache directory can do, after it gave errors; and living with a disk that somebody else has filled.

A full disk makes the cache smaller: it gives back a little, counts as full at what is left, and so goes on with a part
of its capacity: what comes replaces what was. The index says what is left, to all processes; a while later it is the
whole capacity again (`BlockIndex.lower_ceiling`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.blocks.directory import BlockDirectory, Evicted
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.files.troubles import Trouble, trouble_of
from gateway.blocks.observer import CacheObserver
from gateway.errors import BlockError

BLOCKS_YIELDED_MIN = 4
BLOCKS_NEEDED = 2
"""A disk has room again when so many blocks fit."""


@dataclass(slots=True)
class DirectoryProbe:
    """The probe of one process's directory: call it on the event loop."""

    directory: BlockDirectory
    threads: DiskThreads
    observer: CacheObserver
    block_size_bytes: int
    _yielded: Evicted = field(default_factory=Evicted)

    async def __call__(self, trouble: Trouble) -> Trouble | None:
        """What is wrong now; None: nothing."""
        found = await self._try()
        if found is Trouble.FULL and await self._failure_of(self._yield_some) is None:
            self._yielded.tell(self.observer)
            found = await self._try()
        return found

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
        self.directory.try_index()
        self.directory.store.keep_ballast()

    def _yield_some(self) -> None:
        self.directory.store.drop_ballast()
        self._yielded = self.directory.give_back(BLOCKS_YIELDED_MIN * self.block_size_bytes)
