"""How much of request bodies may lie in memory at once in one worker, and who of those that send them comes next.

A body that is received whole is small, but a slow client takes as long over it as its rate allows, and there may be
thousands. So each has room before any of it is read. No credential takes more than what it leaves free: one alone gets
half, two get a third each, and whoever comes next always finds some. What finds none waits a little, in order; those
who wait are served by turns, a credential at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from gateway import cancellation
from gateway.clock import Clock
from gateway.errors import S3Error
from gateway.s3.error_codes import s3_error

BUFFERED_SIZE_BYTES_MAX_TOTAL = 64 * 1024**2

WAIT_SECONDS_MAX = 5.0
"""Clients wait a minute for an answer: most of that is left for what they asked for."""

_GATEWAY = ""
"""Whose room it is where the gateway itself receives something: no access key id is empty."""


@dataclass(slots=True, eq=False)
class _Waiter:
    size_bytes: int
    has_room: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Buffers:
    """The room of one worker. Event loop only."""

    def __init__(self, size_bytes_max: int = BUFFERED_SIZE_BYTES_MAX_TOTAL) -> None:
        self._size_bytes_max = size_bytes_max
        self._of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self.held_bytes = 0

    @asynccontextmanager
    async def room(self, credential: str, size_bytes: int, clock: Clock) -> AsyncIterator[None]:
        """Room for one body of a credential's, as long as this lasts; S3Error SlowDown when it takes too long.

        ClientDisconnected when the client leaves meanwhile.
        """
        if self._waiting or not self._fits(credential, size_bytes):
            await self._wait(credential, size_bytes, clock)
        else:
            self._take(credential, size_bytes)
        try:
            yield
        finally:
            self._give_back(credential, size_bytes)

    @contextmanager
    def holding(self) -> Iterator[Held]:
        """Room for something that the gateway itself receives; what it has taken is given back at the end."""
        held = Held(self)
        try:
            yield held
        finally:
            self._give_back(_GATEWAY, held.size_bytes)

    def take(self, size_bytes: int) -> None:
        """Count more bytes that the gateway receives; S3Error SlowDown when there are too many."""
        if not self._fits(_GATEWAY, size_bytes):
            raise _too_many()
        self._take(_GATEWAY, size_bytes)

    def _fits(self, credential: str, size_bytes: int) -> bool:
        return self._of[credential] + size_bytes <= self._size_bytes_max - self.held_bytes

    def _take(self, credential: str, size_bytes: int) -> None:
        self._of[credential] += size_bytes
        self.held_bytes += size_bytes

    def _give_back(self, credential: str, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._of[credential] -= size_bytes
        if not self._of[credential]:
            del self._of[credential]
        self._serve()

    async def _wait(self, credential: str, size_bytes: int, clock: Clock) -> None:
        waiter = _Waiter(size_bytes)
        self._waiting.setdefault(credential, deque()).append(waiter)
        self._serve()
        if waiter.has_room.done():
            return
        pause = asyncio.ensure_future(clock.sleep(WAIT_SECONDS_MAX))
        try:
            with cancellation.turn():
                await asyncio.wait((waiter.has_room, pause), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            if waiter.has_room.done():
                self._give_back(credential, size_bytes)
            raise
        finally:
            pause.cancel()
            self._leave(credential, waiter)
        if not waiter.has_room.done():
            raise _too_many()

    def _leave(self, credential: str, waiter: _Waiter) -> None:
        queue = self._waiting.get(credential)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[credential]
            self._serve()  # one behind it may fit

    def _serve(self) -> None:
        """Give room by turns: one body of each credential that waits, until none of those in front fits."""
        passed = 0
        while passed < len(self._waiting):
            credential, queue = next(iter(self._waiting.items()))
            if not self._fits(credential, queue[0].size_bytes):
                self._waiting.move_to_end(credential)
                passed += 1
                continue
            waiter, passed = queue.popleft(), 0
            if queue:
                self._waiting.move_to_end(credential)
            else:
                del self._waiting[credential]
            self._take(credential, waiter.size_bytes)
            waiter.has_room.set_result(None)


class Held:
    """What the gateway itself receives takes."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.size_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """As `Buffers.take`."""
        self._buffers.take(size_bytes)
        self.size_bytes += size_bytes


def _too_many() -> S3Error:
    return s3_error("SlowDown", "Too many request bodies are arriving at once. Please reduce your request rate.")
