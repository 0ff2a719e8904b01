"""Runs the S3 port's server for a test, and talks to it over real sockets, byte by byte."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from gateway.core.clock import Clock
from gateway.edge.connection import S3Protocol
from gateway.edge.prepared import PreparedRequests
from gateway.edge.receiving import ReceiveThreads
from gateway.edge.s3_server import ASGIApp, S3Server, TlsFiles
from gateway.edge.server_state import ServerLimits
from tests.support.waiting import until

PATIENCE_SECONDS = 60.0
"""How long a test waits for what must come at once: long enough for a busy machine."""


@dataclass(frozen=True)
class Answer:
    """A response as it was on the wire, transfer coding taken off."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Serving:
    """A server that runs."""

    server: S3Server
    port: int
    stop: asyncio.Event
    finished: asyncio.Task[None]
    wires: list[Wire] = field(default_factory=list)

    async def connect(self, **options: Any) -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        self.wires.append(wire)
        return wire

    async def connections(self, number: int) -> None:
        """Wait until the server has `number` connections."""
        await until(lambda: self.server.open_connections == number)

    async def requests(self, number: int) -> None:
        """Wait until the application has `number` requests in hand."""
        await until(lambda: self.server.requests_in_flight == number)

    def protocols(self) -> list[S3Protocol]:
        """The connections themselves, for what only they know."""
        return cast("list[S3Protocol]", list(self.server._state.connections))

    async def unread(self) -> None:
        """Wait until there is a connection that nobody reads from."""
        await until(lambda: any(one.flow.read_paused for one in self.protocols()))


class Wire:
    """A client that says exactly what it is told to say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def say_repeatedly(self, data: bytes, times: int) -> None:
        for _ in range(times):
            await self.say(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """The next response head: status, lower-case header names."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
        status_line, *lines = head[:-4].decode("latin-1").split("\r\n")
        fields = [line.split(": ", 1) for line in lines]
        names = [name.lower() for name, _ in fields]
        assert len(set(names)) == len(names), f"a header came twice: {names}"
        return int(status_line.split(" ")[1]), {name.lower(): value for name, value in fields}

    async def answer(self, *, to_head: bool = False) -> Answer:
        status, headers = await self.head()
        body = b"" if to_head or status in (204, 304) else await self.body(headers)
        return Answer(status, headers, body)

    async def body(self, headers: Mapping[str, str]) -> bytes:
        """What comes behind a response head with these headers."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._body(headers)

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return body

    async def rest(self) -> bytes:
        """All that comes until the server closes its side."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, ssl.SSLError):
            return  # the server has closed more roughly than we do

    def abort(self) -> None:
        """Leave without a word; nothing happens when the connection is closed already."""
        if not self.writer.is_closing():
            self.writer.transport.abort()


def listening_socket() -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener


@asynccontextmanager
async def serving(
    app: ASGIApp,
    *,
    limits: ServerLimits | None = None,
    tls: TlsFiles | None = None,
    clock: Clock | None = None,
    grace_seconds: float = 5.0,
    receive_threads: ReceiveThreads | None = None,
    prepared: PreparedRequests | None = None,
    on_refused: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[Serving]:
    """A server for `app` on a free port; stopped, and checked for what it left behind, at the end."""
    listener = listening_socket()
    port = listener.getsockname()[1]
    server = S3Server(
        app,
        sockets=[listener],
        limits=limits,
        tls=tls,
        clock=clock,
        receive_threads=receive_threads,
        prepared=prepared,
        on_refused=on_refused,
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    finished = asyncio.create_task(server.serve(stop, grace_seconds=grace_seconds, on_ready=ready.set))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.wait((finished, asyncio.create_task(ready.wait())), return_when=asyncio.FIRST_COMPLETED)
    if finished.done():
        finished.result()
    running = Serving(server, port, stop, finished)
    try:
        yield running
    finally:
        for wire in running.wires:
            wire.abort()
        if not finished.done():
            # What the test still holds open is its own affair; the drain is tested elsewhere.
            finished.cancel()
            await asyncio.wait((finished,))
        assert server.open_connections == 0
        assert server.requests_in_flight == 0
    if not finished.cancelled():
        finished.result()


@asynccontextmanager
async def talking(app: ASGIApp, said: bytes = b"", **options: Any) -> AsyncIterator[tuple[Serving, Wire]]:
    """A server as of `serving`, and a client of it that has said something."""
    async with serving(app, **options) as port:
        wire = await port.connect()
        await wire.say(said)
        yield port, wire


def request(
    method: str, target: str = "/bucket/key", body: bytes = b"", *headers: str, host: str = "s3.local"
) -> bytes:
    """A well-formed HTTP/1.1 request; a body brings its Content-Length unless the headers delimit it."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers]
    named = " ".join(headers).lower()
    if body and "transfer-encoding" not in named and "content-length" not in named:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
