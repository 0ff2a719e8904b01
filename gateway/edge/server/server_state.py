"""The shared state of a server's connections: bounds on their memory, a watch for clients that left unread ones."""

from __future__ import annotations

import asyncio
import os
import select
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from gateway.core.errors import S3Error
from gateway.edge.server.limits import ServerLimits
from gateway.edge.server.response import Refusal, refusal


class SharedBytes:
    """Bytes that connections hold for callers who may be strangers: no more than `max_bytes` all together.

    Above it those give way that have held some for the longest. A holder is what is called then; it holds nothing any
    more at that time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[Callable[[], None], int] = OrderedDict()
        self.held_bytes = 0

    def hold(self, holder: Callable[[], None], size_bytes: int) -> None:
        self.held_bytes += size_bytes - self._sizes.get(holder, 0)
        if size_bytes:
            self._sizes[holder] = size_bytes
        else:
            self._sizes.pop(holder, None)
        while self.held_bytes > self._max_bytes:
            oldest, oldest_bytes = self._sizes.popitem(last=False)
            self.held_bytes -= oldest_bytes
            oldest()


@dataclass(slots=True)
class _Watched:
    descriptor: int
    on_left: Callable[[], None]
    on_end: Callable[[], None] | None


class ClientWatch:
    """Finds clients that leave while nothing is read from them. `open` where the loop runs, `close` at the end.

    asyncio asks the kernel nothing about a connection that it does not read from.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._watched: dict[object, _Watched] = {}
        self._owners: dict[int, object] = {}

    def open(self) -> None:
        self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._look)

    def watch(
        self, owner: object, descriptor: int, on_left: Callable[[], None], on_end: Callable[[], None] | None = None
    ) -> None:
        """Call `on_left` once when the connection is reset, and `on_end` once when the client ends its side before.

        Unless `forget` comes first. Watches a duplicate: the owner may close its descriptor at any time.
        """
        self.forget(owner)
        if self._epoll is not None:
            duplicate = os.dup(descriptor)
            self._watched[owner] = _Watched(duplicate, on_left, on_end)
            self._owners[duplicate] = owner
            # EPOLLERR and EPOLLHUP are always reported
            self._epoll.register(duplicate, select.EPOLLRDHUP if on_end is not None else 0)

    def forget(self, owner: object) -> None:
        """Forget an owner; may be repeated."""
        watched = self._watched.pop(owner, None)
        if watched is not None:
            del self._owners[watched.descriptor]
            if self._epoll is not None:
                self._epoll.unregister(watched.descriptor)
            os.close(watched.descriptor)

    def close(self) -> None:
        for owner in tuple(self._watched):
            self.forget(owner)
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _look(self) -> None:
        if self._epoll is None:
            return
        for descriptor, events in self._epoll.poll(0):
            owner = self._owners.get(descriptor)
            if owner is None:
                continue  # an earlier callback has ended this watch
            watched = self._watched[owner]
            if events & (select.EPOLLERR | select.EPOLLHUP):
                self.forget(owner)
                watched.on_left()
            elif watched.on_end is not None:
                self._epoll.modify(descriptor, 0)
                watched.on_end()


class InputFlow(FlowControl):
    """uvicorn's flow control; calls `on_unread` when reading pauses, and `on_read` when it resumes."""

    def __init__(
        self, transport: asyncio.Transport, on_unread: Callable[[], None], on_read: Callable[[], None]
    ) -> None:
        super().__init__(transport)
        self._on_unread = on_unread
        self._on_read = on_read

    def pause_reading(self) -> None:
        if not self.read_paused:
            super().pause_reading()
            self._on_unread()

    def resume_reading(self) -> None:
        if self.read_paused:
            super().resume_reading()
            self._on_read()

    def hand_over_reading(self) -> None:
        """Leave reading from the socket, and seeing its end, to the caller until it resumes."""
        self.resume_reading()
        super().pause_reading()


class S3ServerState(ServerState):
    """uvicorn's, and what the drain needs to know."""

    def __init__(self, limits: ServerLimits | None = None, on_refused: Callable[[int], None] = lambda _: None) -> None:
        """`on_refused` is called with the status of each request that the application does not get to see."""
        super().__init__()
        limits = limits or ServerLimits()
        self.on_refused = on_refused
        self.on_closed: Callable[[float, bool], None] = lambda *_: None
        """Called when a connection is gone: how many seconds it has lasted, and whether it was idle."""
        self.refusal: Callable[[S3Error], Refusal] = refusal
        self.default_lines = b""
        """`default_headers` once more, as lines of a response head."""
        self.draining = False
        self.nothing_open = asyncio.Event()
        self.nothing_open.set()
        self.client_watch = ClientWatch()
        self.unparsed = SharedBytes(limits.unparsed_bytes)
        self.unsent_refusals = SharedBytes(limits.unsent_refusals_bytes)
