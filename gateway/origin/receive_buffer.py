"""Buffers for large bodies, used for one body after another, in place of an object for each packet.

A thread may receive a body that it also writes: it takes what has come from the socket a step at a time, into the one
buffer that it has, and hands on each step while its bytes are in the processor's cache. It never waits for the network.
The event loop has found bytes there, and watches the connection when there are none.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from gateway.disk.file_lease import FileLease, SharedFile

GATHERING_SECONDS_MAX = 0.1
"""Seconds for which bytes of a slow origin wait in a buffer for the next ones."""

STEP_BYTES = 512 * 1024
"""Bytes that a thread receives and hands on at once: they stay in the second-level cache."""

TRIP_BYTES = 1024 * 1024
"""The most that a thread receives before the event loop hears of it, unless the reader says otherwise."""

Take: TypeAlias = Callable[[memoryview], None]
"""Takes bytes that have come, and may block. Runs on the thread that receives them."""

Receive: TypeAlias = Callable[[Take], None]


BUFFERS_KEPT_BYTES_MAX = 16 * 1024 * 1024
"""Limit of buffers kept for later use: memory that was touched before costs no page faults."""


@dataclass(slots=True)
class Buffers:
    """Lends buffers, the one first that was given back last: it may be in the processor's cache. Event loop only."""

    _kept: dict[int, list[memoryview]] = field(default_factory=dict)
    _kept_bytes: int = 0

    def take(self, size_bytes: int) -> memoryview:
        kept = self._kept.get(size_bytes)
        if not kept:
            return memoryview(bytearray(size_bytes))
        self._kept_bytes -= size_bytes
        return kept.pop()

    def give_back(self, buffer: memoryview) -> None:
        """Only when no thread can still be reading it."""
        if self._kept_bytes + len(buffer) <= BUFFERS_KEPT_BYTES_MAX:
            self._kept_bytes += len(buffer)
            self._kept.setdefault(len(buffer), []).append(buffer)


@dataclass(slots=True)
class ReceiveBuffer:
    """A buffer, and how many bytes make a piece worth having; the reader may change that between two pieces.

    Pieces are at least that long, unless the body ends, or GATHERING_SECONDS_MAX pass; at most as long as the buffer.
    It is lent when bytes come. Who has done with a piece may give it back until the next one.

    `on_thread` has a thread call its argument with a function that takes the bytes, up to `trip_bytes`; None: the event
    loop receives all. What was taken so comes as `TakenBytes`.
    """

    size_bytes: int
    enough_bytes: int
    on_thread: Callable[[Receive], Awaitable[None]] | None = None
    trip_bytes: int = TRIP_BYTES
    lender: Buffers = field(default_factory=Buffers)
    _lent: memoryview | None = None

    @property
    def buffer(self) -> memoryview:
        if self._lent is None:
            self._lent = self.lender.take(self.size_bytes)
        return self._lent

    def resize(self, size_bytes: int) -> None:
        """Have pieces of this size from the next one on; nobody needs the last one any more."""
        if size_bytes != self.size_bytes:
            self.give_back()
            self.size_bytes = self.enough_bytes = size_bytes

    def give_back(self) -> None:
        """Only when no thread can still be reading it. Idempotent."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self.lender.give_back(lent)


class TakenBytes(bytes):
    """A piece whose bytes a thread has received and had taken: it has their number, and no content."""

    def __new__(cls, count: int) -> Self:
        taken = super().__new__(cls)
        taken._count = count
        return taken

    _count: int

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: Any) -> Any:
        return TakenBytes(len(range(self._count)[part]))


_of_thread = threading.local()


def _buffer_of_this_thread() -> memoryview:
    buffer: memoryview | None = getattr(_of_thread, "buffer", None)
    if buffer is None:
        buffer = _of_thread.buffer = memoryview(bytearray(STEP_BYTES))
    return buffer


@dataclass(slots=True)
class SocketReceiver:
    """Receives up to `most_bytes` of a body from a socket that does not block, on a thread, behind what has `begun`.

    `received_bytes` may be read meanwhile; `ended` says why nothing more will come.
    """

    begun: Sequence[bytes]
    most_bytes: int
    received_bytes: int = 0
    ended: str = ""

    def receive(self, wire: FileLease[SharedFile], take: Take) -> None:
        """Receive what has come, and have it taken. Raises what `take` raises."""
        begun, self.begun = self.begun, ()
        for piece in begun:
            take(memoryview(piece))
        buffer, is_all = _buffer_of_this_thread(), False
        while not is_all and (step := min(STEP_BYTES, self.most_bytes - self.received_bytes)):
            filled = 0
            while filled < step and not is_all:
                count = self._receive(wire.descriptor, buffer[filled:step])
                filled, is_all = filled + count, not count
            if filled:
                take(buffer[:filled])

    def _receive(self, descriptor: int, room: memoryview) -> int:
        """Return 0 if there was nothing."""
        try:
            count = os.readv(descriptor, [room])
        except BlockingIOError:
            return 0
        except OSError as error:
            self.ended = f"{type(error).__name__}: {error}"
            return 0
        if not count:
            self.ended = "the origin closed the connection"
        self.received_bytes += count
        return count


async def gathered(pieces: AsyncIterator[bytes | memoryview], into: ReceiveBuffer) -> AsyncGenerator[memoryview, None]:
    """Gather pieces in a buffer: each result is a view of it, valid until the next is requested.

    Bytes that came before a failure are yielded before it is raised.
    """
    loop, filled, since = asyncio.get_running_loop(), 0, 0.0
    try:
        async for piece in pieces:
            rest = memoryview(piece)
            while rest:
                since = since if filled else loop.time()
                count = min(len(rest), into.size_bytes - filled)
                into.buffer[filled : filled + count] = rest[:count]
                filled, rest = filled + count, rest[count:]
                late = loop.time() - since >= GATHERING_SECONDS_MAX
                if late or filled >= min(into.enough_bytes, into.size_bytes):
                    yield into.buffer[:filled]
                    filled = 0
    except Exception:
        if filled:
            yield into.buffer[:filled]
        raise
    if filled:
        yield into.buffer[:filled]
