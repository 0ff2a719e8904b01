"""Accepting connections from a listening socket that other processes accept from too."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from gateway.disk.atomic_write import map_shared
from gateway.shared.heartbeats import PROCESSES_MAX, Heartbeats

PASSING_SECONDS = 0.0005
"""Seconds for which a process leaves a connection to those that have fewer; then it takes it itself. An idle process
wakes up sooner, and a busy one is not waited for."""

_ANOTHER_SECONDS = 0.0002
"""A listener that passes a connection on is called at each turn of the loop. After a longer pause it is another one, or
the loop was busy."""

_PASSED_ON_MAX = 16
"""Limit of connections passed on in a row, as each may have been the same one."""

_COUNT_BYTES = 8

_logger = logging.getLogger(__name__)

_GONE_ALREADY = (BlockingIOError, InterruptedError, ConnectionAbortedError)
_TCP_FAMILIES = frozenset((socket.AF_INET, socket.AF_INET6))
_OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class ConnectionCounts:
    """Number of connections at work in each process that accepts from the same sockets, in shared memory."""

    def __init__(self, path: Path, process: int, processes: int, heartbeats: Heartbeats) -> None:
        """Open the counts, made if missing, as `process` of `processes`; OSError. `close` closes `heartbeats`, too."""
        self._map = map_shared(path, PROCESSES_MAX * _COUNT_BYTES)
        self._counts = memoryview(self._map).cast("Q")  # one more than there are; 0: it does not accept
        self._process = process
        self._others = [number for number in range(processes) if number != process]
        self._heartbeats = heartbeats
        self.leave()

    def tell(self, count: int) -> None:
        """Tell the others that this process accepts, and has `count` connections."""
        self._counts[self._process] = count + 1

    def leave(self) -> None:
        """Tell the others that this process does not accept."""
        self._counts[self._process] = 0

    def others_have_fewer(self, count: int) -> bool:
        counts = self._counts
        return any(0 < counts[other] <= count and not self._heartbeats.is_hung(other) for other in self._others)

    def close(self) -> None:
        """Close the counts; may be repeated."""
        self._counts.release()
        self._map.close()
        self._heartbeats.close()


class Listener:
    """Takes one connection per turn of the event loop, so that the processes that share the socket share the work.

    (`loop.create_server` would take up to its whole backlog at once.)
    The kernel wakes all of them, and often the same one is the first. `is_others_turn` is asked before each connection:
    others then get a moment to take it, in which this loop turns on. Clients keep their connections for long, so what
    was shared out unevenly stays so: without it one of two processes gets 15 of 16.
    The socket belongs to the listener: `close` closes this process's descriptor and leaves those of others open.
    """

    def __init__(
        self,
        listening: socket.socket,
        on_connection: Callable[[socket.socket], None],
        is_others_turn: Callable[[], bool] = lambda: False,
    ) -> None:
        self._socket = listening
        self._on_connection = on_connection
        self._is_others_turn = is_others_turn
        self._accepting = False
        self._passing_until = self._passed_on_at = 0.0
        self._passed_on = 0
        listening.setblocking(False)

    def resume(self) -> None:
        """Accept from now on. Idempotent."""
        if not self._accepting:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)
            self._accepting = True

    def pause(self) -> None:
        """Leave connections in the kernel's queue. Idempotent."""
        if self._accepting:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._accepting = False

    def close(self) -> None:
        """Never accept again."""
        self.pause()
        self._socket.close()

    def _is_passed_on(self) -> bool:
        if not self._is_others_turn():
            return False
        now = asyncio.get_running_loop().time()
        if now >= self._passed_on_at + _ANOTHER_SECONDS and self._passed_on < _PASSED_ON_MAX:
            self._passed_on += 1
            self._passing_until = now + PASSING_SECONDS
        self._passed_on_at = now
        return now < self._passing_until

    def _accept(self) -> None:
        if self._is_passed_on():
            return
        self._passed_on = 0
        try:
            connection, _ = self._socket.accept()
        except _GONE_ALREADY:
            return
        except OSError as error:
            if error.errno not in _OUT_OF_RESOURCES:
                raise
            _logger.error("cannot accept connections for now: %s", error)
            self.pause()
            return
        if connection.family in _TCP_FAMILIES:
            # asyncio does this only for sockets made with an explicit protocol number, and a listener seldom is.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._on_connection(connection)
