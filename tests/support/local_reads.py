"""A gateway's local socket and its S3 port in this process, and clients that read through them."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from forebay import wire
from forebay.local import Reader
from forebay.s3_get import Credentials
from gateway.edge.local_port import LocalPort
from gateway.edge.prepared import PreparedRequests
from gateway.serve.listeners import open_local
from tests.support.asgi import ACCESS_KEY_ID, SECRET_ACCESS_KEY
from tests.support.gateway_app import GatewayApp
from tests.support.serving import PATIENCE_SECONDS, serving

KEYS = Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY)


@dataclass
class LocalGateway:
    """A gateway with both ways to it."""

    port: LocalPort
    prepared: PreparedRequests
    path: Path
    url: str
    readers: list[Reader] = field(default_factory=list)

    def reader(self, credentials: Credentials = KEYS, **options: object) -> Reader:
        made = Reader(socket_path=str(self.path), endpoint_url=self.url, credentials=credentials, **options)  # type: ignore[arg-type]
        self.readers.append(made)
        return made

    async def read(self, reader: Reader, *keys: str | tuple[str, int, int]) -> list[bytes]:
        return [bytes(one) for one in await asyncio.to_thread(reader.read_many, keys)]

    async def warm(self, reader: Reader, *keys: str) -> None:
        """Read until nothing comes by HTTP any more."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                before = reader.http_reads
                await self.read(reader, *keys)
                if reader.http_reads == before:
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def local_gateway(gateway: GatewayApp) -> AsyncIterator[LocalGateway]:
    prepared = PreparedRequests(gateway.app)
    with tempfile.TemporaryDirectory(prefix="forebay-") as directory:
        path = Path(directory, "read.sock")
        clock = gateway.app.services.clock
        async with serving(gateway.app, clock=clock, prepared=prepared) as server:
            port, stop = LocalPort(prepared, [open_local(path)], clock), asyncio.Event()
            running = asyncio.create_task(port.serve(stop))
            local = LocalGateway(port, prepared, path, f"http://127.0.0.1:{server.port}")
            try:
                yield local
            finally:
                for reader in local.readers:
                    await asyncio.to_thread(reader.close)
                stop.set()
                await running
                prepared.close()


class Stranger:
    """A client that says what it likes."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.connect(str(path))
        self.descriptors: list[int] = []

    async def hears(self) -> bytes:
        """The next message; empty when the gateway has closed the connection."""
        try:
            message, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, self.socket, 1 << 17, 253)
        except ConnectionError:
            return b""
        self.descriptors += descriptors
        return message

    def says(self, message: bytes) -> None:
        with suppress(ConnectionError):
            self.socket.send(message)

    async def greets(
        self, credentials: Credentials = KEYS, secret: str | None = None, agent: str = "stranger"
    ) -> bytes:
        """Say HELLO with a proof by `secret`; return the answer."""
        nonce = (await self.hears())[len(wire.GREETING) :]
        name, own_secret, token = credentials
        texts = [text.encode() for text in (name, token, agent)]
        proof = wire.proof(own_secret if secret is None else secret, nonce, name, token)
        self.says(bytes([wire.HELLO]) + wire.LENGTHS.pack(*map(len, texts)) + b"".join(texts) + proof)
        return await self.hears()

    async def asks(self, *names: str) -> list[bool]:
        """Which of these objects the gateway gives it."""
        self.says(bytes([wire.RESOLVE]) + b"".join(wire.pack_read(name.encode(), 0, 0) for name in names))
        return [status == wire.GIVEN for status in statuses_of(await self.hears())]

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            with suppress(OSError):
                socket.close(descriptor)


def statuses_of(answer: bytes) -> Sequence[int]:
    _, count, new = wire.ANSWER.unpack_from(answer)
    at, found = wire.ANSWER.size + new * wire.FILE_ID_BYTES, []
    for _ in range(count):
        found.append(answer[at])
        if answer[at] != wire.GIVEN:
            at += 1
            continue
        _, etag, extents, _, _ = wire.OBJECT.unpack_from(answer, at)
        at += wire.OBJECT.size + etag
        for _ in range(extents):
            _, _, length, _ = wire.EXTENT.unpack_from(answer, at)
            at += wire.EXTENT.size + 4 * -(-length // wire.CHUNK_BYTES)
    return found
