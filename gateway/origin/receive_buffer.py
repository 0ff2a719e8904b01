"""Buffers for large bodies, used for one body after another, in place of an object for each packet.

A thread may receive a body that it also writes: it takes what has come from the socket a step at a time, and hands on
each step while its bytes are in the processor's cache. It never waits for the network. The event loop has found bytes
there, and watches the connection when there are none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from gateway.disk.file_lease import FileLease, SharedFile

GATHERING_SECONDS_MAX = 0.1
"""Seconds for which bytes of a slow origin wait in a buffer for the next ones."""

STEP_BYTES = 512 * 1024
"""Bytes that a thread receives and hands on at once: they stay in the second-level cache."""

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

    `on_thread` has a thread call its argument with a function that takes the bytes; None: the event loop receives all.
    Pieces that come another way have not been taken: the reader finds out by counting.
    """

    size_bytes: int
    enough_bytes: int
    on_thread: Callable[[Receive], Awaitable[None]] | None = None
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


@dataclass(slots=True)
class SocketReceiver:
    """Receives one piece of a body from a socket that does not block, on a thread.

    `filled_bytes` of the buffer are there before. `received_bytes` may be read meanwhile; `ended` says why nothing more
    will come.
    """

    buffer: memoryview
    filled_bytes: int
    received_bytes: int = 0
    ended: str = ""

    def receive(self, wire: FileLease[SharedFile], take: Take) -> None:
        """Receive what has come, up to the whole buffer, and have it taken. Raises what `take` raises."""
        taken_bytes, is_all = 0, False
        while not is_all and taken_bytes < len(self.buffer):
            stop = min(taken_bytes + STEP_BYTES, len(self.buffer))
            while not is_all and self.filled_bytes < stop:
                is_all = not self._receive(wire.descriptor, stop)
            if taken_bytes < self.filled_bytes:
                take(self.buffer[taken_bytes : self.filled_bytes])
                taken_bytes = self.filled_bytes

    def _receive(self, descriptor: int, stop: int) -> bool:
        """Return False if there was nothing."""
        try:
            count = os.readv(descriptor, [self.buffer[self.filled_bytes : stop]])
        except BlockingIOError:
            return False
        except OSError as error:
            self.ended = f"{type(error).__name__}: {error}"
            return False
        if not count:
            self.ended = "the origin closed the connection"
        self.filled_bytes += count
        self.received_bytes += count
        return count > 0


async def gathered(pieces: AsyncIterator[bytes], into: ReceiveBuffer) -> AsyncIterator[memoryview]:
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
