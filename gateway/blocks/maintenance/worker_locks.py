"""Who lives: each worker process holds a lock on its slot's file, which the kernel takes back however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.blocks.files.store import DIRECTORY_MODE, FILE_MODE
from gateway.errors import StartupError


class WorkerLocks:
    """The lock files of a directory: `slots/w<n>.lock` for each slot, `slots/opening.lock` for opening and closing."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory = directory / "slots"
        self._worker = worker
        self._own: int | None = None

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Alone among the processes that open or close the directory; waits for them. Blocks."""
        self._directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        descriptor = self._open("opening.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def take_own(self) -> None:
        """Take this worker's slot; StartupError when a living process has it."""
        descriptor = self._open(_file_name(self._worker))
        if not _try_lock(descriptor):
            os.close(descriptor)
            raise StartupError(
                f"another process uses worker slot {self._worker} of {self._directory.parent}: "
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
        """Whether no other process has the directory open. Call while `opening`."""
        return len(self.dead_slots()) == len([worker for worker in self._known() if worker != self._worker])

    def _known(self) -> list[int]:
        names = (path.stem for path in self._directory.glob("w*.lock"))
        return sorted(int(name[1:]) for name in names if name[1:].isdecimal())

    def _is_free(self, worker: int) -> bool:
        descriptor = self._open(_file_name(worker))
        try:
            return _try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> int:
        return os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def _file_name(worker: int) -> str:
    return f"w{worker}.lock"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
