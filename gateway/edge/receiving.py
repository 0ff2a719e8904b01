"""The rest of a request body on its way to a sink: in batches from its queue, or by threads straight from the socket.

Plain HTTP with a Content-Length, and more than DIRECT_BYTES_MIN of it still to come: the transport stops reading, bytes
that it has read already are handed on first, then threads receive from the socket itself (`BodyDrain`). A thread is
lent only while bytes wait: for a slow sender the event loop waits, so thousands of them hold no thread and no buffer.
All other bodies, encrypted, chunked or small, are queued by the event loop (`BodyQueue`), and handed on in batches.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import Any, ParamSpec, TypeAlias, TypeVar

from gateway.core.cancellation import to_its_end
from gateway.core.errors import ClientDisconnected
from gateway.disk.thread_priority import prefer_event_loop
from gateway.edge.cycle import RequestCycle
from gateway.md5_lanes.streams import LANES
from gateway.operations.context import NoBody, Sink
from gateway.policy.callers import Admission

BUFFER_BYTES = 1024 * 1024
"""Measured: as good as 4 MiB, and better than 256 KiB (docs/decisions/0020-receiving-uploads.md)."""

P = ParamSpec("P")
R = TypeVar("R")


def default_threads() -> int:
    """More than cores, as a sink may wait for the disk; not many more, as each holds a buffer.

    As many as there are lanes at least: MD5s of what several bring at the same moment cost hardly more than one.
    """
    return min(16, max(LANES, 2 * len(os.sched_getaffinity(0))))


THREADS_BESIDE_READS = 3
"""Limit of receiving threads while reads are answered: each more takes the interpreter, and the processor, from reads
(docs/decisions/0038-reads-beside-uploads.md)."""

_READS_PER_SECOND = 50.0
_READS_WINDOW_SECONDS = 0.1


class ReadRate:
    """Detects many GET and HEAD requests. Each call that begins an answer adds 1 to `begun`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted, self._since_seconds = 0, clock()
        self._is_high = False
        self.begun = 0

    def is_high(self) -> bool:
        """Return True at 50 requests a second, over a tenth of a second or the longer time since the last call."""
        elapsed_seconds = self._clock() - self._since_seconds
        if elapsed_seconds >= _READS_WINDOW_SECONDS:
            self._is_high = self.begun - self._counted >= _READS_PER_SECOND * elapsed_seconds
            self._counted, self._since_seconds = self.begun, self._since_seconds + elapsed_seconds
        return self._is_high


class LoopTurns:
    """Uploads begin one by one, one in each turn of the event loop, so that what else is ready goes on between them.

    The first step of an upload (signature, rights, where it goes) costs as much as two answers. Hundreds begin at the
    same moment where a checkpoint is saved.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled: its client has left
                turn.set_result(None)
                break
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next)


class ReceiveThreads:
    """A bounded number of threads, first come, first served; each has one buffer for as long as it lives.

    They yield to the event loop: the scheduler prefers it, and `THREADS_BESIDE_READS` are at work while reads come.
    """

    def __init__(self, threads: int | None = None, reads: ReadRate | None = None) -> None:
        self._threads = threads or default_threads()
        self._pool = ThreadPoolExecutor(self._threads, "receive", prefer_event_loop)
        self._own = threading.local()
        self._at_work = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.reads = reads or ReadRate()
        self.begin = LoopTurns()
        """For the first step of an upload."""

        self.asked = 0
        """Number of calls that have a thread or wait for one."""

    def buffer(self) -> memoryview:
        """Return the calling thread's buffer: used again and again, so that it costs no page faults."""
        own: memoryview | None = getattr(self._own, "buffer", None)
        if own is None:
            own = self._own.buffer = memoryview(bytearray(BUFFER_BYTES))
        return own

    async def run(self, stop: Callable[[], None], work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run `work` on a thread and return or raise its result; `work` has ended when this returns, even by an error.

        When the caller is cancelled, `stop` is called, which should make the work end soon.
        """
        self.asked += 1
        try:
            await self._turn()
            try:
                return await to_its_end(self._pool.submit(work, *arguments, **keywords), stop)
            finally:
                self._release()
        finally:
            self.asked -= 1

    def _limit(self) -> int:
        return min(self._threads, THREADS_BESIDE_READS) if self.reads.is_high() else self._threads

    async def _turn(self) -> None:
        """Wait until a thread is free, and take it."""
        if not self._waiting and self._at_work < self._limit():
            self._at_work += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._release()
            elif turn in self._waiting:  # unless a released thread has taken it out meanwhile
                self._waiting.remove(turn)
            raise

    def _release(self) -> None:
        self._at_work -= 1
        limit = self._limit()
        while self._waiting and self._at_work < limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._at_work += 1
                turn.set_result(None)

    def shut_down(self) -> None:
        self._pool.shutdown(wait=False)


def readable(descriptor: int) -> bool:
    """Return True if the kernel has unread bytes, or the end of the connection."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


DIRECT_BYTES_MIN = 64 * 1024
"""Less than that comes over the event loop: it costs one read there, and here a descriptor and a thread."""

SHARE_BYTES = 8 * 1024 * 1024
"""Bytes that one turn receives before the thread goes to the next waiting body."""


class ReadBatch(Enum):
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
        """Let the socket count as readable when `size_bytes` more have arrived, or its end.

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
"""Key in the scope of an async function that receives all the rest of the body into a sink."""

GATHERED_BYTES = 1024 * 1024
"""Bytes in the kernel, or the rest of the body, for which a thread is requested."""

QUEUED_BYTES = 256 * 1024
"""Bytes gathered when the event loop receives."""

GATHERING_SECONDS = 0.02
"""Seconds for which fewer bytes wait for more."""

SLOW_GATHERING_SECONDS_MAX = 1.0
"""Seconds for which they wait when a sender has turned out to be slow."""

SLOW_BYTES = 64 * 1024
"""A sender that brings less in that time waits longer the next time."""


class Gathering:
    """The time for which bytes of one body wait for more.

    A turn on a thread costs the same for a packet as for a MiB, and there may be thousands of slow senders. So the time
    grows eightfold while turns bring little. Neither a fast sender nor the end of a body waits for it: GATHERED_BYTES
    end the waiting, and so does all that is left.
    """

    def __init__(self) -> None:
        self._seconds = GATHERING_SECONDS

    def seconds(self) -> float:
        """Until the next turn. By chance up to a quarter less, so that bodies that began together spread out."""
        return self._seconds * random.uniform(0.75, 1.0)

    def came(self, size_bytes: int) -> None:
        longer = size_bytes < SLOW_BYTES
        self._seconds = min(SLOW_GATHERING_SECONDS_MAX, self._seconds * 8) if longer else GATHERING_SECONDS


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
        self._gathering = Gathering()

    async def receive_into(self, sink: Sink) -> None:
        """Hand the rest of the body to `sink`, as `ClientBody.receive` says, and with its errors."""
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
                self._gathering.came(sum(map(len, pieces)))
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
        until = loop.time() + self._gathering.seconds()
        while not (body.complete or body.failure or self._cycle.abandoned or flow.read_paused):
            left_seconds = until - loop.time()
            if not body or body.queued_bytes >= QUEUED_BYTES or left_seconds <= 0:
                return
            with self._cycle.clients_time():
                await self._cycle.something_happens(seconds=left_seconds)

    async def _from_socket(self, wire: socket.socket, left_bytes: int, sink: Sink) -> None:
        self._check_client()  # of one that has left, the transport may have closed the socket
        cycle = self._cycle
        cycle.flow.hand_over_reading()
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
            await self._cycle.something_happens(direct.descriptor, self._gathering.seconds())
        finally:
            direct.readable_from(1)

    async def _turn(self, direct: DirectReceive) -> ReadBatch:
        body, left_bytes = self._cycle.request_body, direct.left_bytes
        try:
            return await self._threads.run(direct.stop, direct.turn)
        finally:
            body.count(left_bytes - direct.left_bytes)
            self._gathering.came(left_bytes - direct.left_bytes)
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


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
ReceiveInto = Callable[[Sink], Awaitable[None]]


class AsgiRequestBody:
    """Reads `http.request` events. The first read makes the server answer `Expect: 100-continue`.

    `receive_into` is what our own server offers beside them (`Receiving`).
    """

    def __init__(self, receive: Receive, headers: Mapping[str, str], receive_into: ReceiveInto | None = None) -> None:
        self._receive = receive
        self._receive_into = receive_into or self._read_into
        length = headers.get("content-length", "")
        self._length_bytes = int(length) if length.isdecimal() else None
        if self._length_bytes is None and "transfer-encoding" not in headers:
            self._length_bytes = 0
        self._complete = self._length_bytes == 0
        self._admission: Admission | None = None
        self.received_bytes = 0

    @property
    def length_bytes(self) -> int | None:
        return self._length_bytes

    @property
    def complete(self) -> bool:
        return self._complete

    def pace(self, admission: Admission) -> None:
        """Give no more than there is room for: not straight from the socket, which brings whatever there is."""
        if admission.piece_bytes("write") is not None:
            self._admission, self._receive_into = admission, self._read_into

    async def read(self) -> bytes:
        piece = await self._next()
        self.received_bytes += len(piece)
        return piece

    async def receive(self, sink: Sink) -> None:
        def counted(data: memoryview) -> None:
            self.received_bytes += len(data)
            sink(data)

        if not self._complete:
            await self._receive_into(counted)
            self._complete = True

    async def _next(self) -> bytes:
        while not self._complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected("the client left before its request was complete")
            self._complete = not message.get("more_body", False)
            body: bytes = message.get("body", b"")
            if body:
                if self._admission is not None:
                    await self._pass(self._admission, len(body))
                return body
        return b""

    async def _pass(self, admission: Admission, count: int) -> None:
        piece_bytes = admission.piece_bytes("write") or count
        for begun in range(0, count, piece_bytes):
            await admission.pass_bytes("write", min(piece_bytes, count - begun))

    async def _read_into(self, sink: Sink) -> None:
        while piece := await self._next():
            drain = BodyDrain([piece], sink)
            await _shared_threads().run(drain.stop, drain.run)


CountedBody: TypeAlias = NoBody | AsgiRequestBody

_shared_threads = functools.cache(ReceiveThreads)
