"""A small HTTP client for measuring: raw asyncio, one receive buffer, no copy of any body.

The bodies' bytes are counted and their beginning is compared with what the object holds; the client's cost is the same
whoever serves.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from loadtests.harness.content import LoadObject
from loadtests.harness.signed_requests import Signer

_BUFFER_BYTES = 1024 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_CHECKED_BYTES = 1024


class WrongAnswer(Exception):
    """A server answered with another status, another length or other bytes than the object has."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer: seconds from the request to the first and to the last byte of the body."""

    first_byte_seconds: float
    seconds: float
    size_bytes: int


class _Connection(asyncio.BufferedProtocol):
    """`buffer` may be shared by all connections of one event loop: what came is taken before the next read."""

    def __init__(self, buffer: memoryview) -> None:
        self._view = buffer
        self._answer: asyncio.Future[None] | None = None
        self._head = b""
        self._left = -1
        self.status = 0
        self.begin = b""
        self.size_bytes = 0
        self.first_byte_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    async def send(self, request: bytes) -> None:
        self._answer = asyncio.get_running_loop().create_future()
        self._head, self.begin, self._left, self.size_bytes = b"", b"", -1, 0
        self.transport.write(request)
        await self._answer

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        if self._left < 0:
            nbytes = self._take_head(nbytes)
            if self._left < 0:
                return
        elif not self.begin:
            self._first(bytes(self._view[: min(nbytes, _CHECKED_BYTES)]))
        self.size_bytes += nbytes
        self._left -= nbytes
        if self._left <= 0 and self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _take_head(self, count: int) -> int:
        """Bytes of the body that came with the head's end."""
        self._head += bytes(self._view[:count])
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return 0
        length = _LENGTH.search(self._head, 0, end + 2)
        self.status, self._left = int(self._head[9:12]), int(length[1]) if length else 0
        body = len(self._head) - end - 4
        if body:
            self._first(self._head[end + 4 : end + 4 + _CHECKED_BYTES])
        return body

    def _first(self, begin: bytes) -> None:
        self.begin, self.first_byte_at = begin, time.perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed in the middle of an answer"))


class Reader:
    """Up to `connections` connections to one server. Use it inside `reader(...)`."""

    def __init__(self, connections: Sequence[_Connection], signer: Signer) -> None:
        self._idle: asyncio.Queue[_Connection] = asyncio.Queue()
        for connection in connections:
            self._idle.put_nowait(connection)
        self._signer = signer

    async def get(self, of: LoadObject, first: int = 0, length: int | None = None) -> Reading:
        """GET the object, or `length` bytes from `first` on. Raises WrongAnswer."""
        size_bytes = of.size_bytes if length is None else length
        byte_range = None if length is None else f"{first}-{first + length - 1}"
        connection = await self._idle.get()
        try:
            request = self._signer.get(of.path, byte_range)
            started = time.perf_counter()
            await connection.send(request)
            ended = time.perf_counter()
            _check(connection, of, first, size_bytes)
            return Reading(connection.first_byte_at - started, ended - started, size_bytes)
        finally:
            self._idle.put_nowait(connection)


def _check(connection: _Connection, of: LoadObject, first: int, size_bytes: int) -> None:
    """Length and bytes tell a range from a whole object; rclone answers a range with status 200."""
    begin = connection.begin
    if connection.status not in (200, 206) or connection.size_bytes != size_bytes:
        raise WrongAnswer(f"{of.path}: {connection.status} with {connection.size_bytes} bytes: {begin[:300]!r}")
    if bytes(of.piece(first, len(begin))) != begin:
        raise WrongAnswer(f"{of.path}: other bytes than the object's at {first}")


@asynccontextmanager
async def reader(address: tuple[str, int], connections: int) -> AsyncIterator[Reader]:
    """A client with that many connections, opened before and closed after."""
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    opened = []
    try:
        for _ in range(connections):
            _, connection = await loop.create_connection(lambda: _Connection(buffer), *address)
            opened.append(connection)
        yield Reader(opened, Signer(f"{address[0]}:{address[1]}"))
    finally:
        for connection in opened:
            connection.transport.close()


async def in_parallel(work: Sequence[tuple[LoadObject, int, int | None]], client: Reader, tasks: int) -> list[Reading]:
    """Read every piece of `work` in order by `tasks` tasks; the readings in the order of their ends."""
    readings: list[Reading] = []
    waiting = iter(work)

    async def one() -> None:
        for of, first, length in waiting:
            readings.append(await client.get(of, first, length))

    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(one())
    return readings
