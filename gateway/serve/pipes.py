"""The two pipes of a child: its standard input, whose end proves that the supervisor is gone, and that of its reports.

Lines for the supervisor are written without ever waiting for it to read.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator

import structlog

_STDIN = 0
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 65536

WAITING_BYTES_MAX = 2**20
"""Limit of lines that the supervisor has not read, as it may be stopped. Indispensable lines are short."""

_log = structlog.get_logger("forebay.serve")


def lines(descriptor: int = _STDIN) -> Iterator[bytes]:
    """Yield complete lines until the other end is closed.

    Reads the descriptor itself: a thread that waits in a buffered reader when the interpreter ends makes it abort.
    """
    rest = b""
    while piece := os.read(descriptor, _READ_BYTES):
        *complete, rest = (rest + piece).split(b"\n")
        yield from complete


def end_with_parent() -> None:
    """Make the kernel end this process when its parent ends, even if it is stopped: prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hold(lines: Iterator[bytes], obey: Callable[[bytes], None]) -> None:
    """From a thread, hand every further line to `obey`; end this process at once when the supervisor is gone.

    The kernel ends it, too, where it is stopped then: no gateway could start on its cache directory.
    """
    end_with_parent()

    def follow() -> None:
        for line in lines:
            obey(line)
        os._exit(1)

    threading.Thread(target=follow, name="parent-death-pipe", daemon=True).start()


class ReportPipe:
    """One thread: the event loop's, or before and after it the only one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        os.set_blocking(descriptor, False)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on what waits is written by this loop whenever there is room."""
        self._loop = loop

    def tell(self, message: str) -> bool:
        """Say a line; False, and nothing is said, where too much waits to be taken."""
        line = message.replace("\n", " ").encode(errors="backslashreplace") + b"\n"
        if self._waiting and len(self._waiting) + len(line) > WAITING_BYTES_MAX:
            return False
        self._waiting += line
        self._write()
        return True

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except BlockingIOError:
            if self._loop is not None:
                self._loop.add_writer(self._descriptor, self._write)
            return
        except OSError as error:
            _log.debug("nobody reads reports", error=str(error))
            self._waiting.clear()
        if self._loop is not None:
            self._loop.remove_writer(self._descriptor)
