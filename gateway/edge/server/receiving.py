"""A request body on its way to a sink: on threads, and straight from the socket where that pays.

Plain HTTP with a Content-Length, and more than DIRECT_BYTES_MIN of it still to come: the transport stops reading, what
it has read already is handed on first, then threads receive from the socket itself (direct_receive.py). A thread is
lent only while bytes wait: for a slow sender the event loop waits, so thousands of them hold no thread and no buffer.
All other bodies, encrypted, chunked or small, are queued by the event loop as ever, and handed on in batches.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from gateway.edge.server.cycle import S3Cycle
from gateway.edge.server.direct_receive import DIRECT_BYTES_MIN, DirectReceive, HandingOn, Turn
from gateway.edge.server.receive_threads import ReceiveThreads
from gateway.errors import ClientDisconnected
from gateway.operations.request_body import Sink

RECEIVE_INTO = "forebay.receive_into"
"""Where in the scope the application finds an async function that receives all the rest of the body into a sink."""


class Receiving:
    """The body of one request.

    `wire` is the transport's own socket, None where the connection is encrypted; `on_body_complete` is called once the
    last byte has come past the transport.
    """

    def __init__(
        self,
        cycle: S3Cycle,
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
            await self._from_socket(wire.fileno(), left_bytes, sink)

    async def _from_queue(self, sink: Sink) -> None:
        body = self._cycle.request_body
        while not self._cycle.abandoned:
            if pieces := body.take_all():
                self._cycle.flow.resume_reading()
                handing = HandingOn(pieces, sink)
                await self._threads.run(handing.stop, handing.run)
            elif body.failure is not None:
                raise body.failure
            elif body.complete:
                return
            else:
                await self._cycle.wait_for_client()
        raise _gone()

    async def _from_socket(self, socket_descriptor: int, left_bytes: int, sink: Sink) -> None:
        cycle = self._cycle
        if cycle.abandoned:  # then the descriptor may be another's
            raise _gone()
        cycle.flow.pause_reading()
        arrived = cycle.request_body.take_all()
        direct = DirectReceive(socket_descriptor, arrived, left_bytes, sink, self._threads)
        try:
            await self._take_turns(direct, Turn.SHARE if arrived else Turn.NOTHING_MORE)
        finally:
            direct.close()
            cycle.flow.resume_reading()

    async def _take_turns(self, direct: DirectReceive, state: Turn) -> None:
        cycle = self._cycle
        while not cycle.request_body.complete:
            if state is Turn.NOTHING_MORE:
                await cycle.wait_for_client(direct.descriptor)
            if cycle.abandoned:
                raise _gone()
            if cycle.request_body.failure is not None:
                raise cycle.request_body.failure
            state = await self._turn(direct)
            if state is Turn.CLIENT_LEFT:
                cycle.transport.abort()

    async def _turn(self, direct: DirectReceive) -> Turn:
        body, left_bytes = self._cycle.request_body, direct.left_bytes
        try:
            return await self._threads.run(direct.stop, direct.turn)
        finally:
            body.count(left_bytes - direct.left_bytes)
            if body.complete:
                self._on_body_complete()


def _gone() -> ClientDisconnected:
    return ClientDisconnected("the client left before its request was complete")
