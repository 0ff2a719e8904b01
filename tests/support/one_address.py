"""Several gateways of one cluster behind one address, as behind a load balancer.

with one_address(directory, {"origin": {...}}, 3) as cluster:
    requests go to cluster.s3_url
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import httpx

from gateway.demo.ports import free_port
from tests.support.connections import answering_aside
from tests.support.gateway_process import GatewayProcess
from tests.support.nodes import SECRET
from tests.support.redis_server import RedisServer

PATIENCE_SECONDS = 60.0
_PIECE_BYTES = 256 * 1024
_HEAD_BYTES_MAX = 2**20
_REST_SECONDS = 2.0


class RoundRobin:
    """Passes each request of a connection to the next of some servers, and the answer back, byte for byte.

    What is no request by the book goes to one server, with all that follows on its connection. `trust`: the servers
    speak TLS.
    """

    def __init__(self, ports: Sequence[int], trust: ssl.SSLContext | None = None) -> None:
        self._ports = itertools.cycle(ports)
        self._count = len(ports)
        self._trust = trust

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = b""
        while first := rest or await reader.read(_PIECE_BYTES):
            exchange = _Exchange(reader, writer, *await self._connected())
            if not await exchange.run(first):
                return
            rest = exchange.rest

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the next server that can be reached."""
        for port in itertools.islice(self._ports, self._count):
            with suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port, ssl=self._trust, limit=_PIECE_BYTES)
        raise ConnectionRefusedError("no server")


class _Exchange:
    """One request and its answer."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._far_reader = far_reader
        self._far_writer = far_writer
        self._method = asyncio.get_running_loop().create_future()
        self.rest = b""
        """What has come behind the request."""

    async def run(self, first: bytes) -> bool:
        """Return whether the connection may go on."""
        forth, back = asyncio.create_task(self._forth(first)), asyncio.create_task(self._back())
        try:
            await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
            if forth.done() and forth.exception() is None and not back.done():
                await self._wait_for(back)
            goes_on = back.done() and back.result()
            if goes_on:
                await forth
            elif back.done() and not forth.done():  # refused before it was sent
                await self._take_rest(forth)
            return goes_on
        finally:
            for task in (forth, back):
                task.cancel()
            await asyncio.gather(forth, back, return_exceptions=True)
            self._far_writer.transport.abort()

    async def _wait_for(self, back: asyncio.Task[bool]) -> None:
        """Wait for the answer, or until the client leaves."""
        ahead = asyncio.create_task(self._reader.read(_PIECE_BYTES))
        await asyncio.wait({ahead, back}, return_when=asyncio.FIRST_COMPLETED)
        if ahead.done() and (piece := ahead.result()):
            self.rest += piece
            await asyncio.wait({back})
        elif not ahead.done():
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)

    async def _take_rest(self, forth: asyncio.Task[None]) -> None:
        """Take what the client still sends, so that it reads the answer before it learns that nobody listens."""
        forth.cancel()
        await asyncio.gather(forth, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_REST_SECONDS):
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                while await self._reader.read(_PIECE_BYTES):
                    pass

    async def _forth(self, piece: bytes) -> None:
        parser: h11.Connection | None = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES_MAX)
        while piece:
            rest = None
            if parser is not None:
                try:
                    rest = self._end_of(parser, piece)
                except h11.ProtocolError:
                    parser = None
                    self._found(None)
            self._far_writer.write(piece[: len(piece) - len(rest or b"")])
            await self._far_writer.drain()
            if rest is not None:
                self.rest = rest
                return
            piece = await self._reader.read(_PIECE_BYTES)
        if self._far_writer.can_write_eof():
            self._far_writer.write_eof()
        self._found(None)

    def _found(self, method: bytes | None) -> None:
        if not self._method.done():
            self._method.set_result(method)

    def _end_of(self, parser: h11.Connection, piece: bytes) -> bytes | None:
        """Return what of a piece is behind its message; None: that goes on."""
        parser.receive_data(piece)
        while (event := parser.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                self._found(event.method)
            if isinstance(event, h11.EndOfMessage):
                return parser.trailing_data[0]
        return None

    async def _back(self) -> bool:
        method = await self._method
        parser = None
        if method is not None:
            parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
            parser.send(h11.Request(method=method, target="/", headers=[("host", "any")]))
            parser.send(h11.EndOfMessage())
        while piece := await self._far_reader.read(_PIECE_BYTES):
            self._writer.write(piece)
            await self._writer.drain()
            if parser is not None and self._end_of(parser, piece) is not None:
                return parser.their_state is h11.DONE
        return False


@dataclass(frozen=True)
class OneAddress:
    """`s3_url` is the address of all gateways."""

    s3_url: str
    gateways: Sequence[GatewayProcess]
    redis: RedisServer


@contextmanager
def one_address(
    directory: Path,
    config: Mapping[str, Any],
    count: int,
    *,
    ca_file: Path | None = None,
) -> Iterator[OneAddress]:
    """Yield a cluster of gateways with these settings, which believe Redis. `ca_file`: what to trust of their TLS."""
    secret_file = directory / "secret"
    secret_file.write_text(SECRET)
    secret_file.chmod(0o600)
    server = {"workers": 1, **config.get("server", {})}
    with RedisServer(directory) as redis, ExitStack() as stack:
        gateways = list[GatewayProcess]()
        for number in range(count):
            address = f"127.0.0.1:{free_port()}"
            cluster = {
                "name": "clients",
                "secret_file": str(secret_file),
                "listen": address,
                "advertise": address,
                "node": f"node-{number}",
                "redis": redis.url,
            }
            gateway = GatewayProcess({**config, "server": server, "cluster": cluster})
            gateways.append(stack.enter_context(gateway))
        for gateway in gateways:
            _wait_for_all(gateway, count)
        trust, tls = None, None
        if ca_file is not None:
            trust = ssl.create_default_context(cafile=str(ca_file))
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(server["certificate_file"], server["key_file"])
        proxy = RoundRobin([urlsplit(one.s3_url).port or 0 for one in gateways], trust)
        port = stack.enter_context(answering_aside(proxy.talk, limit=_PIECE_BYTES, ssl=tls))
        yield OneAddress(f"{'https' if tls else 'http'}://127.0.0.1:{port}", gateways, redis)


def _wait_for_all(gateway: GatewayProcess, count: int) -> None:
    """Until a node believes Redis, and knows all others."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        while True:
            state = client.get(f"{gateway.admin_url}/api/v1/cluster").json()
            if state["redis"]["believed"] and sum(one["state"] == "up" for one in state["members"]) == count:
                return
            assert time.monotonic() < deadline, f"{state}\n{gateway.log}"
            time.sleep(0.05)
