"""What the connections of one server share, and those of them whose client sends no more and may have left."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

from uvicorn.server import ServerState


class HalfClosed:
    """Those of one server. `open` where the loop runs, `close` at the end."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._on_reset: dict[int, Callable[[], None]] = {}

    def open(self) -> None:
        self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._look)

    def watch(self, descriptor: int, on_reset: Callable[[], None]) -> None:
        """Call this once when the connection is reset, unless `forget` comes first."""
        if self._epoll is not None:
            self._on_reset[descriptor] = on_reset
            self._epoll.register(descriptor, 0)  # EPOLLERR and EPOLLHUP are always reported

    def forget(self, descriptor: int) -> None:
        """The socket is about to be closed. Idempotent."""
        if self._on_reset.pop(descriptor, None) is not None and self._epoll is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _look(self) -> None:
        if self._epoll is None:
            return
        for descriptor, _ in self._epoll.poll(0):
            on_reset = self._on_reset[descriptor]
            self.forget(descriptor)
            on_reset()


class S3ServerState(ServerState):
    """uvicorn's, and what the drain needs to know."""

    def __init__(self) -> None:
        super().__init__()
        self.default_lines = b""
        """`default_headers` once more, as lines of a response head."""
        self.draining = False
        self.nothing_open = asyncio.Event()
        self.nothing_open.set()
        self.half_closed = HalfClosed()
