"""A request body on its way to a sink: on threads, and straight from the socket where that pays.

Plain HTTP with a Content-Length, and more than DIRECT_BYTES_MIN of it still to come: the transport stops reading, what
it has read already is handed on first, then threads receive from the socket itself (direct_receive.py). A thread is
lent only while bytes wait: for a slow sender the event loop waits, so thousands of them hold no thread and no buffer.
All other bodies, encrypted, chunked or small, are queued by the event loop as ever, and handed on in batches.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from typing import ParamSpec, TypeVar

from gateway.edge.server.cycle import RequestCycle
from gateway.errors import ClientDisconnected
from gateway.operations.context import Sink

BUFFER_BYTES = 1024 * 1024
"""Measured: as good as 4 MiB, and better than 256 KiB (docs/decisions/0020-receiving-uploads.md)."""

P = ParamSpec("P")
R = TypeVar("R")


def default_threads() -> int:
    """More than cores, as a sink may wait for the disk; not many more, as each holds a buffer."""
    return min(16, 2 * len(os.sched_getaffinity(0)))


class ReceiveThreads:
    """A bounded number of threads, first come, first served; each has one buffer for as long as it lives."""

    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="receive")
        self._own = threading.local()
        self.asked = 0
        """How many have a thread or wait for one."""

    def buffer(self) -> memoryview:
        """The calling thread's: used again and again, so that it costs no page faults."""
        own: memoryview | None = getattr(self._own, "buffer", None)
        if own is None:
            own = self._own.buffer = memoryview(bytearray(BUFFER_BYTES))
        return own

    async def run(self, stop: Callable[[], None], work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """What `work` returns or raises; it has ended when this returns, whatever ends it.

        When the caller is cancelled, `stop` is called, which should make the work end soon.
        """
        self.asked += 1
        try:
            return await to_its_end(self._pool.submit(work, *arguments, **keywords), stop)
        finally:
            self.asked -= 1

    def shut_down(self) -> None:
        """Let the threads go once they are idle."""
        self._pool.shutdown(wait=False)


async def to_its_end(work: Future[R], stop: Callable[[], None]) -> R:
    """The outcome of work on a thread. A cancelled caller learns of it only when no thread is at the work any more."""
    outcome = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        if outcome.done() or work.cancel():
            raise
        stop()
        while not outcome.done():
            try:
                await asyncio.wait((outcome,))
            except asyncio.CancelledError:  # once more: the answer is the same
                continue
        if not outcome.cancelled():
            outcome.exception()  # looked at: nobody is left to be told
        raise


def readable(descriptor: int) -> bool:
    """Has the kernel bytes for us, or the end of the connection, that nobody has seen yet?"""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


DIRECT_BYTES_MIN = 64 * 1024
"""Less than that comes over the event loop: it costs one read there, and here a descriptor and a thread."""

SHARE_BYTES = 8 * 1024 * 1024
"""What one turn receives before the thread goes to whoever waits for one."""


class ReadBatch(Enum):
    """How a turn ended."""

    SHARE = auto()
    """With its share, or with all of the body."""
    NOTHING_MORE = auto()
    """No more has arrived yet."""
    CLIENT_LEFT = auto()


class DirectReceive:
    """The rest of one body: what has `arrived` already, then `left_bytes` from a non-blocking socket, never one more.

    `turn` runs on a thread, one at a time. The descriptor is the receiver's own: whatever becomes of the connection,
    its number means this socket until `close`.
    """

    def __init__(
        self,
        wire: socket.socket,
        arrived: Sequence[bytes],
        left_bytes: int,
        sink: Sink,
        threads: ReceiveThreads,
    ) -> None:
        # `wire.dup()` would make both block: `wire` does not know that it does not.
        self._socket = socket.socket(wire.family, wire.type, wire.proto, os.dup(wire.fileno()))
        self.left_bytes = left_bytes
        self._arrived = arrived
        self._sink = sink
        self._threads = threads
        self._stopped = False

    def stop(self) -> None:
        """End the turn that runs as soon as possible. From any thread."""
        self._stopped = True

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def readable_from(self, size_bytes: int) -> None:
        """So many bytes must have arrived from now on before the socket counts as readable; or its end.

        (SO_RCVLOWAT, socket(7); the kernel makes its own buffer large enough, tcp(7).)
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(size_bytes, self.left_bytes))

    def close(self) -> None:
        """Only when no turn runs."""
        self._socket.close()

    def turn(self) -> ReadBatch:
        """Receive what has arrived, at most a share, and hand it on. Raises what the sink raises."""
        arrived, self._arrived = self._arrived, ()
        for piece in arrived:
            self._sink(memoryview(piece))
        buffer, received_bytes = self._threads.buffer(), 0
        while self.left_bytes and received_bytes < SHARE_BYTES and not self._stopped:
            count, state = self._fill(buffer[: self.left_bytes])
            received_bytes += count
            if count:
                self._sink(buffer[:count].toreadonly())
            if state is not ReadBatch.SHARE:
                return state
        return ReadBatch.SHARE

    def _fill(self, wanted: memoryview) -> tuple[int, ReadBatch]:
        """How many bytes have come, and what there is behind them."""
        filled = 0
        while filled < len(wanted):
            try:
                count = self._socket.recv_into(wanted[filled:])
            except (BlockingIOError, InterruptedError):
                return filled, ReadBatch.NOTHING_MORE
            except OSError:  # reset, timed out, or no way to it any more (EHOSTUNREACH): nothing more will come
                return filled, ReadBatch.CLIENT_LEFT
            if not count:
                return filled, ReadBatch.CLIENT_LEFT
            filled += count
            self.left_bytes -= count
        return filled, ReadBatch.SHARE


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
                drain = BodyDrain(pieces, sink)
                await self._threads.run(drain.stop, drain.run)
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
            await self._take_turns(direct, ReadBatch.SHARE if arrived else ReadBatch.NOTHING_MORE)
        finally:
            direct.close()
            cycle.flow.resume_reading()

    async def _take_turns(self, direct: DirectReceive, state: ReadBatch) -> None:
        cycle = self._cycle
        while not cycle.request_body.complete:
            if state is ReadBatch.NOTHING_MORE:
                await self._wait_for_bytes(direct)
            self._check_client()
            state = await self._turn(direct)
            if state is ReadBatch.CLIENT_LEFT:
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

    async def _turn(self, direct: DirectReceive) -> ReadBatch:
        body, left_bytes = self._cycle.request_body, direct.left_bytes
        try:
            return await self._threads.run(direct.stop, direct.turn)
        finally:
            body.count(left_bytes - direct.left_bytes)
            if body.complete:
                self._on_body_complete()


class BodyDrain:
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
