"""The demo's bucket, and a relay that gives it the distance of an object store; each prints `listening on PORT`.

`python -m gateway.demo.bucket` is moto's S3. With `UPSTREAM_PORT FIRST_BYTE_SECONDS BYTES_PER_SECOND` it is the relay.
It works below HTTP, so it can neither change nor misread a request: whenever a connection's traffic turns from request
to answer, the first bytes of the answer wait until the first-byte time has passed since the last bytes of the request;
and each direction of a connection carries at most the given bandwidth. What the server itself takes counts towards the
first-byte time. Bytes pass through in pieces of at most 256 KiB.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.core.clock import Clock, SystemClock


def _serve_bucket() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # one line per request would be the log's only content
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    sys.stdout.write(f"listening on {server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


_PIECE_BYTES = 256 * 1024
_FINEST_SLEEP_SECONDS = 0.002  # finer waits cost more than they shape: they add up until one is worth sleeping


@dataclass(frozen=True, slots=True)
class Shape:
    """The latency and rate of one connection to the distant server."""

    first_byte_seconds: float
    bytes_per_second: float


@dataclass(slots=True)
class _Pace:
    """Spreads one direction's bytes over time, so that none leaves before the wire could have carried it."""

    bytes_per_second: float
    clock: Clock
    _free_at: float = 0.0

    async def carry(self, count: int) -> None:
        now = self.clock.monotonic()
        self._free_at = max(self._free_at, now) + count / self.bytes_per_second
        if self._free_at - now > _FINEST_SLEEP_SECONDS:
            await self.clock.sleep(self._free_at - now)


@dataclass(slots=True)
class _Connection:
    """One client connection and its own connection to the server."""

    shape: Shape
    clock: Clock
    _request_at: float | None = field(default=None)

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        """Carry one direction: the requests, or the answers to them."""
        pace = _Pace(self.shape.bytes_per_second, self.clock)
        while piece := await source.read(_PIECE_BYTES):
            if answers and self._request_at is not None:
                due, self._request_at = self._request_at + self.shape.first_byte_seconds, None
                await self.clock.sleep(max(0.0, due - self.clock.monotonic()))
            await pace.carry(len(piece))
            sink.write(piece)
            if not answers:
                self._request_at = self.clock.monotonic()
            await sink.drain()


class ShapingRelay:
    """Listens on a port of 127.0.0.1 and relays every connection to `upstream_port`, shaped."""

    def __init__(self, upstream_port: int, shape: Shape, clock: Clock | None = None) -> None:
        self._upstream_port = upstream_port
        self._shape = shape
        self._clock = clock or SystemClock()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Start listening; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_PIECE_BYTES, backlog=512)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        await _end(*self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port, limit=_PIECE_BYTES)
            try:
                await self._between(reader, writer, far_reader, far_writer)
            finally:
                far_writer.transport.abort()
        except ConnectionRefusedError:
            pass  # a client of a dead server sees its connection end
        finally:
            writer.transport.abort()  # nothing is left to abort after an orderly end

    async def _between(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        connection = _Connection(self._shape, self._clock)
        upstream = asyncio.create_task(connection.carry(reader, far_writer, answers=False))
        downstream = asyncio.create_task(connection.carry(far_reader, writer, answers=True))
        try:
            await asyncio.wait({upstream, downstream}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(upstream, downstream)
        far_writer.close()
        writer.close()
        for one in (far_writer, writer):
            with suppress(OSError):  # the other end was faster
                await one.wait_closed()


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError):
            raise outcome


async def _serve_relay(upstream_port: int, shape: Shape) -> None:
    sys.stdout.write(f"listening on {await ShapingRelay(upstream_port, shape).start()}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _serve_bucket()
    else:
        asyncio.run(_serve_relay(int(sys.argv[1]), Shape(float(sys.argv[2]), float(sys.argv[3]))))
