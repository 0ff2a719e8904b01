"""Heartbeats: a time stamp for each process of a gateway, in memory that all of them share.

Each process writes its own a few times a second, from its event loop. So the others can tell a process that hangs from
one that is busy: a lock tells no more than that a process lives, and a stopped one keeps its locks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.disk.atomic_write import map_shared

PROCESSES_MAX = 512

BACKGROUND_PROCESS = 256
"""The background process's number; S3 workers have 0 to 255."""

BEAT_SECONDS = 0.2

HUNG_SECONDS = 2.0
"""A process that has not beaten for so long is not waited for."""

_STAMP_BYTES = 8
FILE_BYTES = PROCESSES_MAX * _STAMP_BYTES


class Heartbeats:
    """The stamps of all processes. `path` is made where it does not exist."""

    def __init__(self, path: Path, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._map = map_shared(path, FILE_BYTES)
        self._stamps = memoryview(self._map).cast("Q")
        self.now_ns = now_ns
        """A clock that all processes of the machine share."""

    def close(self) -> None:
        """Close the stamps; may be repeated."""
        self._stamps.release()
        self._map.close()

    def beat(self, process: int) -> None:
        self._stamps[process] = self.now_ns()

    def stamp(self, process: int) -> int:
        """Return the process's last time stamp: another one than before, where it has turned since."""
        return self._stamps[process]

    def is_hung(self, process: int) -> bool:
        """Return True if a process has not turned for HUNG_SECONDS. One that has never turned counts as hung."""
        return self.now_ns() - self._stamps[process] > HUNG_SECONDS * 1e9

    @asynccontextmanager
    async def beating(self, process: int) -> AsyncIterator[None]:
        """Beat for the process with this number as long as this lasts."""
        self.beat(process)
        task = asyncio.create_task(self.beat_on(process), name="heartbeat")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def beat_on(self, process: int) -> None:
        while True:
            self.beat(process)
            await asyncio.sleep(BEAT_SECONDS)
