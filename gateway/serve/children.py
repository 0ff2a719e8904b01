"""The children of a process: it waits once for each that ends, here.

SIGCHLD reports an end, and a look every second finds missed ones. No thread waits for a child.
Orphans become children of this process, too: those that the fork server makes for it, and, where it is PID 1 of a
container, all other orphans there. They are waited for as they end, so that none stays as a zombie.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog

from gateway.serve.signals import answered

LOOK_SECONDS = 1.0
UNKNOWN_STATUS = 255
"""Status of a child for which other code has waited: as asyncio has it."""

_AT_ONCE_MAX = 256
"""Limit of orphans handled before the event loop goes on: there may be any number."""

_PR_SET_CHILD_SUBREAPER = 36
_WNOTHREAD = 0x20000000
"""waitpid(2): not those that another thread has made (`subprocess.run`), which waits for them by itself. Orphans are
given to the main thread."""

_log = structlog.get_logger("forebay.serve")


def restart_delay_seconds(deaths_in_a_row: int) -> float:
    """Return 0 after the first death, then 0.1 s doubling to 10 s."""
    return 0.0 if deaths_in_a_row <= 1 else min(10.0, 0.1 * 2.0 ** min(deaths_in_a_row - 2, 10))


def describe_exit(status: int) -> str:
    """`exit code 1`, `SIGKILL`."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-status}"


class Child:
    """A followed child. `Children` makes it."""

    def __init__(self, pid: int, status: asyncio.Future[int]) -> None:
        self.pid = pid
        self._status = status

    @property
    def has_ended(self) -> bool:
        return self._status.done()

    async def wait(self) -> int:
        """Return the exit status; negative is a signal."""
        return await asyncio.shield(self._status)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless it is gone. Until its end is known it is a zombie, and no other process has its id."""
        if not self._status.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Children:
    """Main thread, and an event loop that runs there.

    `ends_orphans`: wait for unfollowed children, too. Only for a process that follows all children of its main
    thread.
    """

    def __init__(self, *, ends_orphans: bool = False) -> None:
        self._ends_orphans = ends_orphans
        self._followed: dict[int, asyncio.Future[int]] = {}
        self._expecting = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts, the end of each is noticed. Orphans are adopted from now on. OSError."""
        _adopt_orphans()
        looking = asyncio.create_task(self._look_again(), name="children")
        try:
            with answered(signal.SIGCHLD, self.look):
                yield
        finally:
            looking.cancel()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """While this lasts, a child that is not followed yet stays, ended or not, until it is."""
        self._expecting += 1
        try:
            yield
        finally:
            self._expecting -= 1
            self.look()

    def follow(self, pid: int) -> Child:
        """Care for a child. Its end is noticed also where it was before this."""
        status = self._followed[pid] = asyncio.get_running_loop().create_future()
        self._look_at(pid)
        return Child(pid, status)

    def look(self) -> None:
        """Notice who has ended."""
        for pid in list(self._followed):
            self._look_at(pid)
        if self._ends_orphans and not self._expecting:
            self._wait_for_orphans()

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def _look_at(self, pid: int) -> None:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            _log.warning("how a process ended is not known: something else has waited for it", process_id=pid)
            self._end(pid, UNKNOWN_STATUS)
        else:
            if ended:
                self._end(pid, os.waitstatus_to_exitcode(status))

    def _wait_for_orphans(self) -> None:
        for _ in range(_AT_ONCE_MAX):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | _WNOTHREAD)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._followed:  # it has ended since it was looked at
                self._end(pid, os.waitstatus_to_exitcode(status))
        asyncio.get_running_loop().call_soon(self.look)

    def _end(self, pid: int, status: int) -> None:
        future = self._followed.pop(pid)
        if not future.done():
            future.set_result(status)


def _adopt_orphans() -> None:
    """Make a process below this one whose parent has ended a child of this one: prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
