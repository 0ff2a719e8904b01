"""Accepting connections from a listening socket that other processes accept from too."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

_logger = logging.getLogger(__name__)

_GONE_ALREADY = (BlockingIOError, InterruptedError, ConnectionAbortedError)
_TCP_FAMILIES = frozenset((socket.AF_INET, socket.AF_INET6))
_OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener:
    """Takes one connection per turn of the event loop, so that the processes that share the socket share the work.

    (`loop.create_server` would take up to its whole backlog at once.)
    The socket belongs to the listener: `close` closes this process's descriptor and leaves those of others open.
    """

    def __init__(self, listening: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
        self._socket = listening
        self._on_connection = on_connection
        self._accepting = False
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

    def _accept(self) -> None:
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
