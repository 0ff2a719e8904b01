"""The shared state of a server's connections: limits on clients, bounds on memory, a watch for clients that left."""

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
from gateway.edge.response import Refusal, refusal

_RECEIVE_BUFFER_BYTES_MIN = 64 * 1024


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of one connection, and how many there may be.

    Timeouts are noticed by a sweep over all connections, up to a second late.
    """

    head_timeout_seconds: float = 20.0
    """From the connection, or from the first byte of a later request, to the end of the request's head."""
    body_timeout_seconds: float = 30.0
    """Longest silence in a request body while the gateway waits for it."""
    min_body_rate_bytes_per_second: int = 1024
    """Slowest average of a request body over the time spent waiting for it; judged after `body_timeout_seconds`."""
    keep_alive_timeout_seconds: float = 90.0
    """An idle connection stays open for this time; SDK connection pools expect more than a minute."""
    write_timeout_seconds: float = 60.0
    """A client may take no byte of a response for this time."""
    linger_seconds: float = 10.0
    """After a refusal: how long the rest of what the client sends is read and thrown away, so that it gets to read."""
    linger_bytes: int = 64 * 1024 * 1024
    """After a refusal: how much of what the client sends is read and thrown away."""
    max_header_bytes: int = 32 * 1024
    """Request line and header fields together."""
    max_headers: int = 256
    receive_buffer_bytes: int = 1024 * 1024
    """Received body that the application has not asked for yet: reading stops above it."""
    receive_buffers_bytes: int = 64 * 1024 * 1024
    """Limit for all connections together: each of many gets its share, 64 KiB at least."""
    unparsed_bytes: int = 4 * 1024 * 1024
    """Heads that are not whole, and what came behind a request, of all connections together: above it those that began
    first make room."""
    unsent_refusals_bytes: int = 4 * 1024 * 1024
    """Refusals that clients do not take, of all connections together: above it the oldest are dropped."""
    refusal_timeout_seconds: float = 5.0
    """A client may take this time over a refusal."""
    max_connections: int = 16_384
    """Above it connections that wait for a request make room, the longest first, then those that linger; else 503
    SlowDown."""
    refused_connections: int = 64
    """Connections accepted above the limit, to be refused. Further clients wait in the listener's queue, where another
    process may take them."""

    def connections_max(self, descriptors: int) -> int:
        """Return the limit of connections for a process that may open `descriptors` files.

        A connection may take up to three descriptors. The rest is for block files and the origin.
        """
        return max(1, min(self.max_connections, descriptors // 4))

    def receive_buffer_of_one(self, connections: int) -> int:
        """Return the bytes that one of `connections` may receive ahead."""
        share = self.receive_buffers_bytes // max(1, connections)
        return min(self.receive_buffer_bytes, max(share, _RECEIVE_BUFFER_BYTES_MIN))

    def sweep_seconds(self) -> float:
        """Return the time between two sweeps of the connections, so that a timeout is late by a quarter at most."""
        shortest = min(
            self.head_timeout_seconds,
            self.body_timeout_seconds,
            self.keep_alive_timeout_seconds,
            self.write_timeout_seconds,
            self.linger_seconds,
            self.refusal_timeout_seconds,
        )
        return min(1.0, shortest / 4)


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
