"""A request body on its way to a sink: on threads, and straight from the socket where that pays.

Plain HTTP with a Content-Length, and more than DIRECT_BYTES_MIN of it still to come: the transport stops reading, what
it has read already is handed on first, then threads receive from the socket itself (direct_receive.py). A thread is
lent only while bytes wait: for a slow sender the event loop waits, so thousands of them hold no thread and no buffer.
All other bodies, encrypted, chunked or small, are queued by the event loop as ever, and handed on in batches.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from gateway.edge.server.cycle import RequestCycle
from gateway.edge.server.direct_receive import DIRECT_BYTES_MIN, DirectReceive, Turn
from gateway.edge.server.readable import readable
from gateway.edge.server.receive_threads import ReceiveThreads
from gateway.errors import ClientDisconnected
from gateway.operations.request_body import Sink

RECEIVE_INTO = "forebay.receive_into"
"""Where in the scope the application finds an async function that receives all the rest of the body into a sink."""

GATHERED_BYTES = 1024 * 1024
"""So much should wait in the kernel before a thread is asked for, or the rest of the body."""

QUEUED_BYTES = 256 * 1024
"""The same for what the event loop receives."""

GATHERING_SECONDS_MAX = 0.02
"""How long bytes of a slow sender wait for more of them."""


class Receiving:
    """The body of one request.

    `wire` is the transport's own socket, None where the connection is encrypted; `on_body_complete` is called once the
    last byte has come past the transport.
    """

    def __init__(
        self,
        cycle: RequestCycle,
        wire: socket.socket | None,
        threads: ReceiveThreads,
        on_body_complete: Callable[[], None],
    ) -> None:
        self._cycle = cycle
        self._wire = wire
        self._threads = threads
        self._on_body_complete = on_body_complete

    async def receive_into(self, sink: Sink) -> None:
        """Hand the rest of the body to `sink`, as `RequestBody.receive` says, and with its errors."""
        self._cycle.send_continue()
        wire, left_bytes = self._wire, self._cycle.request_body.left_bytes
        if wire is None or left_bytes is None or left_bytes <= DIRECT_BYTES_MIN:
            await self._from_queue(sink)
        else:
            await self._from_socket(wire, left_bytes, sink)

    async def _from_queue(self, sink: Sink) -> None:
        body = self._cycle.request_body
        while True:
            if pieces := body.take_all():
                self._cycle.flow.resume_reading()
                handing = HandingOn(pieces, sink)
                await self._threads.run(handing.stop, handing.run)
            self._check_client()
            if body.complete and not body:
                return
            await self._gather_in_queue()

    async def _gather_in_queue(self) -> None:
        """As `_gather`, by the event loop: until the queue is full, the body complete, or what came has waited."""
        body, flow, loop = self._cycle.request_body, self._cycle.flow, asyncio.get_running_loop()
        if not body:
            await self._cycle.wait_for_client()
        until = loop.time() + GATHERING_SECONDS_MAX
        while not (body.complete or body.failure or self._cycle.abandoned or flow.read_paused):
            left_seconds = until - loop.time()
            if not body or body.queued_bytes >= QUEUED_BYTES or left_seconds <= 0:
                return
            with self._cycle.clients_time():
                await self._cycle.something_happens(seconds=left_seconds)

    async def _from_socket(self, wire: socket.socket, left_bytes: int, sink: Sink) -> None:
        self._check_client()  # of one that has left, the transport may have closed the socket
        cycle = self._cycle
        cycle.flow.pause_reading()
        arrived = cycle.request_body.take_all()
        direct = DirectReceive(wire, arrived, left_bytes, sink, self._threads)
        try:
            await self._take_turns(direct, Turn.SHARE if arrived else Turn.NOTHING_MORE)
        finally:
            direct.close()
            cycle.flow.resume_reading()

    async def _take_turns(self, direct: DirectReceive, state: Turn) -> None:
        cycle = self._cycle
        while not cycle.request_body.complete:
            if state is Turn.NOTHING_MORE:
                await self._wait_for_bytes(direct)
            self._check_client()
            state = await self._turn(direct)
            if state is Turn.CLIENT_LEFT:
                cycle.transport.abort()

    async def _wait_for_bytes(self, direct: DirectReceive) -> None:
        """Until so many wait that they are worth a thread, or fewer, and no more come soon; or something happens."""
        with self._cycle.clients_time():
            await self._gather(direct)
            if readable(direct.descriptor):
                return
            self._check_client()
            await self._cycle.something_happens(direct.descriptor)
        self._check_client()
        with self._cycle.clients_time():  # from here on it has said something
            await self._gather(direct)

    def _check_client(self) -> None:
        if self._cycle.abandoned:
            raise ClientDisconnected("the client left before its request was complete")
        if self._cycle.request_body.failure is not None:
            raise self._cycle.request_body.failure

    async def _gather(self, direct: DirectReceive) -> None:
        direct.readable_from(GATHERED_BYTES)
        try:
            await self._cycle.something_happens(direct.descriptor, GATHERING_SECONDS_MAX)
        finally:
            direct.readable_from(1)

    async def _turn(self, direct: DirectReceive) -> Turn:
        body, left_bytes = self._cycle.request_body, direct.left_bytes
        try:
            return await self._threads.run(direct.stop, direct.turn)
        finally:
            body.count(left_bytes - direct.left_bytes)
            if body.complete:
                self._on_body_complete()


class HandingOn:
    """Pieces that the event loop has received, on their way to a sink on a thread."""

    def __init__(self, pieces: Sequence[bytes], sink: Sink) -> None:
        self._pieces = pieces
        self._sink = sink
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        for piece in self._pieces:
            if self._stopped:
                return
            self._sink(memoryview(piece))
