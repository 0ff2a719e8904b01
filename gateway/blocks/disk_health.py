"""A cache directory that gives errors is left alone for a while, and the origin serves in its place.

    well ── an error that leaves no doubt, or FAILURES_MAX others within FAILURES_SECONDS ──▶ full, read-only or failing
    full and read-only: cached blocks are served, nothing is filled     failing: nothing in the directory is touched
    after a pause, twice as long each time ── a probe of the directory ──▶ the probe's result

Clients never are the probe. Each process finds out for itself: a disk may fail for one and not for the other. A full
disk makes the cache smaller for a while, for all processes (`BlockIndex.lower_ceiling`). Event loop only.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import lmdb
import structlog

from gateway.blocks.directory import BlockDirectory, DiskThreads
from gateway.core.clock import Clock
from gateway.core.errors import BlockDamaged, BlockError, StoreUnavailable
from gateway.telemetry import metrics


class Trouble(StrEnum):
    """Restricted use of the directory, the least harm first."""

    FULL = "full"
    """It gives, and takes nothing more: other programs have filled the disk, or a quota is used up."""

    READ_ONLY = "read-only"
    """It gives, and takes nothing: its file system went read-only, or writing fails."""

    FAILING = "failing"
    """It neither gives nor takes."""

    CLOSED = "closed"
    """It was not opened."""


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_OF_THE_PROCESS = frozenset(
    {errno.EBADF, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.EEXIST}
)
"""Errors that do not concern the disk. EBADF is a defect of this program: it closed another's descriptor."""


def trouble_of(error: BaseException) -> Trouble | None:
    """Return the disk trouble behind an error; None for others: no room in a slot, no descriptors, other bytes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, lmdb.Error | OSError):
        cause = cause.__cause__
    if cause is None or (isinstance(cause, FileNotFoundError) and isinstance(error, BlockDamaged)):
        return None
    number = cause.errno if isinstance(cause, OSError) else getattr(cause, "code", None)
    if number in _OF_THE_PROCESS:
        return None
    if number in _FULL or isinstance(cause, lmdb.MapFullError):
        return Trouble.FULL
    return Trouble.READ_ONLY if number == errno.EROFS else Trouble.FAILING


FAILURES_MAX = 3
FAILURES_SECONDS = 10.0
"""One bad sector costs one block; this many failures close together, the directory."""

PAUSE_SECONDS = 1.0
PAUSE_SECONDS_MAX = 60.0
STEADY_SECONDS = 300.0
"""Trouble that comes back sooner than this goes on where it was, with longer pauses."""

WELL = "well"

Probe = Callable[[Trouble], Awaitable[Trouble | None]]
"""Tries what the directory can do, after a trouble; None: everything."""

_log = structlog.get_logger("forebay.cache")


class CircuitBreaker:
    """One process's present permission to read and write its cache directory. `close` at the end."""

    def __init__(self, directory: Path, probe: Probe, clock: Clock) -> None:
        self.readable = True
        self.writable = True
        self._directory = directory
        self._probe = probe
        self._clock = clock
        self._trouble: Trouble | None = None
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)
        self._pause_seconds = PAUSE_SECONDS
        self._well_since = -STEADY_SECONDS
        self._mending: asyncio.Task[None] | None = None
        self._closed = False
        metrics.set_disk_state(WELL)

    @classmethod
    def open_for_good(cls, clock: Clock) -> CircuitBreaker:
        """Return the breaker of a directory that cannot be opened: nothing is read or written, and nothing is tried."""

        async def unchanged(trouble: Trouble) -> Trouble:
            return trouble

        breaker = cls(Path(), unchanged, clock)
        breaker._enter(Trouble.CLOSED)
        return breaker

    @property
    def state(self) -> str:
        return WELL if self._trouble is None else self._trouble.value

    def refuse_reading(self) -> StoreUnavailable:
        return StoreUnavailable(f"the cache directory is not used for now: it is {self.state}")

    def refuse_writing(self) -> StoreUnavailable:
        return StoreUnavailable(f"nothing is cached: the cache directory is {self.state}")

    def note(self, error: BaseException) -> None:
        """Something failed; what says nothing about the disk is passed over."""
        trouble = trouble_of(error)
        if trouble is None:
            return
        metrics.CACHE_DISK_ERRORS.add(1, trouble.value)
        if trouble is not Trouble.FAILING or self._too_many(self._clock.monotonic()):
            self._isolate(trouble, error)

    def gone(self, error: BaseException) -> None:
        """Bytes in memory could not be sent from their file: no doubt is left, the file system is gone."""
        if trouble_of(error) is None:
            return
        metrics.CACHE_DISK_ERRORS.add(1, Trouble.FAILING.value)
        self._isolate(Trouble.FAILING, error)

    async def close(self) -> None:
        self._closed = True
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.gather(self._mending, return_exceptions=True)

    def _too_many(self, now: float) -> bool:
        self._failures.append(now)
        return len(self._failures) == FAILURES_MAX and now - self._failures[0] <= FAILURES_SECONDS

    def _isolate(self, trouble: Trouble, error: BaseException) -> None:
        order = list(Trouble)
        if self._trouble is not None and order.index(trouble) <= order.index(self._trouble):
            return
        if self._trouble is None and self._clock.monotonic() - self._well_since >= STEADY_SECONDS:
            self._pause_seconds = PAUSE_SECONDS
        _log.error(
            "the cache directory is not used for now: the origin serves"
            if trouble is Trouble.FAILING
            else "the cache directory takes no writes: what is in it is served",
            directory=str(self._directory),
            state=trouble.value,
            error=str(error),
        )
        self._enter(trouble)
        if self._mending is None and not self._closed:
            self._mending = asyncio.create_task(self._mend(), name="cache directory probe")

    def _enter(self, trouble: Trouble | None) -> None:
        self._trouble = trouble
        self.readable = trouble not in (Trouble.FAILING, Trouble.CLOSED)
        self.writable = trouble is None
        self._failures.clear()
        metrics.set_disk_state(self.state)

    async def _mend(self) -> None:
        try:
            while self._trouble is not None:
                await self._clock.sleep(self._pause_seconds)
                self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
                found = await self._probe(self._trouble)
                if found is not self._trouble:
                    self._changed_to(found)
        finally:
            self._mending = None

    def _changed_to(self, trouble: Trouble | None) -> None:
        self._enter(trouble)
        self._well_since = self._clock.monotonic()
        tell = _log.info if trouble is None else _log.warning
        tell("the cache directory was probed", directory=str(self._directory), state=self.state)


BLOCKS_YIELDED_MIN = 4
BLOCKS_NEEDED = 2
"""A disk has room again when so many blocks fit."""


@dataclass(frozen=True, slots=True)
class DirectoryProbe:
    """The probe of one process's directory: call it on the event loop."""

    directory: BlockDirectory
    threads: DiskThreads
    block_size_bytes: int

    async def __call__(self, trouble: Trouble) -> Trouble | None:
        found = await self._try()
        if found is Trouble.FULL and await self._failure_of(self._yield_some) is None:
            found = await self._try()
        return found

    async def _try(self) -> Trouble | None:
        if await self._failure_of(self._read_now) is not None:
            return Trouble.FAILING
        writing = await self._failure_of(self._write_now)
        return Trouble.READ_ONLY if writing is Trouble.FAILING else writing

    async def _failure_of(self, step: Callable[[], None]) -> Trouble | None:
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
        self.directory.give_back(BLOCKS_YIELDED_MIN * self.block_size_bytes)
