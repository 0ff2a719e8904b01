"""An event loop over real sockets and threads, whose time passes only while all of this process waits.

So a busy machine is no silent origin: no timer overtakes what is ready to be done, or what a thread is doing.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_SECONDS = 0.001


def run_patiently(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        return runner.run(main)


class _PatientSelector(selectors.EpollSelector):
    def __init__(self) -> None:
        super().__init__()
        self.passed_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        while not found and timeout and timeout > 0:
            works = _threads_work()
            found = super().select(_LOOK_SECONDS if works else 0)
            if not (found or works):
                self.passed_seconds += timeout
                break
        return found


class PatientLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._patient = _PatientSelector()
        super().__init__(self._patient)

    def time(self) -> float:
        return self._patient.passed_seconds


def _threads_work() -> bool:
    """Return True if another thread of this process runs, waits for a processor, or for a disk."""
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").iterdir():
        if task.name == own:
            continue
        try:
            stat = (task / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if stat.rpartition(") ")[2][0] in "RD":
            return True
    return False
