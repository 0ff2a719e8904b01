"""Clients that take an answer as they like: at once, slowly, half of it; and judge every byte that they get."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from urllib.parse import urlsplit

PATIENCE_SECONDS = 120.0
"""Nothing takes that long, on the busiest machine."""

RECEIVE_BYTES = 256 * 1024


class WrongBytes(AssertionError):
    """A client got a byte that the object does not have."""


class BrokenOff(Exception):
    """The connection ended within an answer's body, of which every byte so far was right."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of an object whose content is known; `whole`: asked for without a Range."""

    target: str
    content: bytes
    first: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return (self.first, self.stop) == (0, len(self.content))


class Client:
    """One connection, made when it is needed. AssertionError where a read fails before its first byte."""

    def __init__(self, url: str, receive_buffer_bytes: int | None = None) -> None:
        address = urlsplit(url)
        self._address = address.hostname, address.port
        self._receive_buffer_bytes = receive_buffer_bytes
        self._socket: socket.socket | None = None
        self._rest = b""
        self._wanted: Wanted | None = None
        self._at = 0
        self.cached = ""
        """What the last answer said of the cache: hit, partial, miss."""

    async def ask(self, wanted: Wanted) -> None:
        """Send the request, and read the head of the answer."""
        await self.say(wanted)
        await self.hear(wanted)

    async def say(self, wanted: Wanted) -> None:
        """Send the request."""
        connection = await self._connected()
        some = "" if wanted.is_whole else f"Range: bytes={wanted.first}-{wanted.stop - 1}\r\n"
        request = f"GET {wanted.target} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n{some}\r\n"
        await asyncio.get_running_loop().sock_sendall(connection, request.encode())

    async def hear(self, wanted: Wanted) -> None:
        """Read the head of the answer to what was said."""
        received = b""
        while b"\r\n\r\n" not in received:
            piece = await self._receive(65_536)
            assert piece, f"no answer to {wanted.target}: {received!r}"
            received += piece
        head, _, self._rest = received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        status = int(lines[0].split(" ")[1])
        assert status == (200 if wanted.is_whole else 206), f"{wanted.target}: {received!r}"
        fields = dict(line.split(": ", 1) for line in lines[1:])
        assert fields["content-length"] == str(wanted.stop - wanted.first), f"{wanted.target}: {head!r}"
        self.cached = fields["x-forebay-cache"].partition(";")[0]
        self._wanted, self._at = wanted, wanted.first

    async def take(self, count_max: int) -> int:
        """At most so many bytes of the body, judged; how many came, 0 at its end. WrongBytes, BrokenOff."""
        wanted, end = self._wanted, 0
        assert wanted is not None
        end = min(self._at + count_max, wanted.stop)
        begun = self._at
        while self._at < end:
            piece = await self._piece(min(end - self._at, RECEIVE_BYTES))
            if not piece:
                self.close()
                raise BrokenOff(f"{wanted.target} at {self._at}, asked for {wanted.first} to {wanted.stop}")
            if piece != wanted.content[self._at : self._at + len(piece)]:
                raise WrongBytes(self._difference(wanted, piece))
            self._at += len(piece)
        return self._at - begun

    async def read(self, wanted: Wanted) -> None:
        """The whole answer."""
        await self.ask(wanted)
        await self.take(len(wanted.content))

    def reset(self) -> None:
        """Leave without a word: the server gets a RST."""
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def stop_reading(self) -> None:
        """Read no more, but stay; `close` or `reset` ends it."""
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket, self._rest = None, b""

    async def _piece(self, count: int) -> bytes:
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece or await self._receive(count)

    async def _receive(self, count: int) -> bytes:
        assert self._socket is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                return await asyncio.get_running_loop().sock_recv(self._socket, count)
            except ConnectionError:
                return b""

    async def _connected(self) -> socket.socket:
        if self._socket is None:
            made = socket.socket()
            made.setblocking(False)
            if self._receive_buffer_bytes is not None:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
            self._socket = made
            await asyncio.get_running_loop().sock_connect(made, self._address)
        return self._socket

    def _difference(self, wanted: Wanted, piece: bytes) -> str:
        at = next(n for n, byte in enumerate(piece) if byte != wanted.content[self._at + n])
        other = sum(a != b for a, b in zip(piece, wanted.content[self._at :], strict=False))
        return (
            f"{wanted.target} asked for {wanted.first} to {wanted.stop} [{self.cached}]: "
            f"byte {self._at + at} is wrong, {other} of {len(piece)} from {self._at} on"
        )
