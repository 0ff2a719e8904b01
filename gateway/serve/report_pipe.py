"""A child's way to speak to the supervisor: lines on a pipe, written without ever waiting for it to read."""

from __future__ import annotations

import asyncio
import os

import structlog

WAITING_BYTES_MAX = 2**20
"""Limit of lines that the supervisor has not read, as it may be stopped. Indispensable lines are short."""

_log = structlog.get_logger("forebay.serve")


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
