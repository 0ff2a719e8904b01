"""Liveness of workers: each holds a lock on its slot's file, which the kernel releases at its end, a kill included."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.blocks.files.store import DIRECTORY_MODE, FILE_MODE
from gateway.core.errors import StartupError
from gateway.disk.file_lock import lock_within, try_lock

OPENING_LOOKS_MAX = 45
OPENING_LOOK_SECONDS = 1.0
"""Seconds between looks at a process that opens the directory. After OPENING_LOOKS_MAX looks, counted as the machine
may stand still, it is not waited for: the supervisor has failed to end it."""


class WorkerLocks:
    """The lock files of a directory: `slots/w<n>.lock` for each slot, `slots/opening.lock` for opening and closing."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory = directory / "slots"
        self._worker = worker
        self._own: int | None = None

    @contextmanager
    def opening(self, stamp: Callable[[int], int]) -> Iterator[None]:
        """Alone among the processes that open or close the directory. Blocks.

        One that opens it is waited for as long as it turns: `stamp` gives a worker's last heartbeat. BlockingIOError
        where it does not.
        """
        self._directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        descriptor = self._open("opening.lock")
        try:
            self._wait_for(descriptor, stamp)
            self._leave_number(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _wait_for(self, descriptor: int, stamp: Callable[[int], int]) -> None:
        looks = 0
        seen: tuple[int | None, int] = None, 0
        while not lock_within(descriptor, OPENING_LOOK_SECONDS):
            holder = _number_in(descriptor)
            before, seen = seen, (holder, stamp(holder) if holder is not None else 0)
            looks = looks + 1 if seen == before and holder is not None else 0
            if looks >= OPENING_LOOKS_MAX:
                raise BlockingIOError(errno.EAGAIN, f"worker {holder} hangs while it opens or closes it")

    def _leave_number(self, descriptor: int) -> None:
        try:
            os.pwrite(descriptor, b"%-8d" % self._worker, 0)
        except OSError:  # a full disk: then its owner is unknown
            with suppress(OSError):
                os.ftruncate(descriptor, 0)

    def take_own(self) -> None:
        """Take this worker's slot; StartupError when a living process has it."""
        descriptor = self._open(_file_name(self._worker))
        if not try_lock(descriptor):
            os.close(descriptor)
            raise StartupError(
                f"another process runs as worker {self._worker} on {self._directory.parent}: "
                "stop it, or give this gateway a cache directory of its own"
            )
        self._own = descriptor

    def give_back_own(self) -> None:
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def dead_slots(self) -> list[int]:
        """Every slot ever used that no process holds now, the own one excepted. Call while `opening`."""
        return [worker for worker in self._known() if worker != self._worker and self._is_free(worker)]

    def alone(self) -> bool:
        """Return True if no other process has the directory open. Call while `opening`."""
        return len(self.dead_slots()) == len([worker for worker in self._known() if worker != self._worker])

    def _known(self) -> list[int]:
        names = (path.stem for path in self._directory.glob("w*.lock"))
        return sorted(int(name[1:]) for name in names if name[1:].isdecimal())

    def _is_free(self, worker: int) -> bool:
        descriptor = self._open(_file_name(worker))
        try:
            return try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> int:
        return os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def _file_name(worker: int) -> str:
    return f"w{worker}.lock"


def _number_in(descriptor: int) -> int | None:
    text = os.pread(descriptor, 8, 0).strip()
    return int(text) if text.isdigit() else None
