"""The origins that one suite is run against."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

from gateway.core.clock import SystemClock
from gateway.disk.pem import PemFile
from gateway.origin.client import KeyPair, Origin, OriginRequest, OriginResponse, OriginSettings, StreamedBody
from gateway.origin.dialects import AZURE
from gateway.origin.receive_buffer import Receive, ReceiveBuffer, TakenBytes
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.origin.stores.azure.shared_key import SharedKeySigner
from gateway.origin.stores.azure.store import AzureOrigin
from tests.support import azurite
from tests.support.azure_blob import ACCOUNT, KEY, AzureBlob
from tests.support.directory_origin import DirectoryOrigin
from tests.support.memory_origin import MemoryOrigin
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

STRICT_PAIR = KeyPair(ACCESS_KEY_ID, SECRET_ACCESS_KEY)


def s3_origin(endpoint_url: str, pair: KeyPair = STRICT_PAIR, **settings: object) -> S3Origin:
    """A client of the origin at `endpoint_url`; must be made on a running loop."""
    if isinstance(bundle := settings.get("ca_bundle"), str):
        settings["ca_bundle"] = PemFile(Path(bundle), Path(bundle).read_bytes() if Path(bundle).exists() else b"")
    given = OriginSettings(endpoint_url=endpoint_url, **settings)  # type: ignore[arg-type]
    return S3Origin(given, StaticCredentials(pair), SystemClock(), instance_id="test-gateway")


def azure_origin(address: str, account: str = ACCOUNT, key: str = KEY, **settings: float) -> AzureOrigin:
    """Azure Blob at this address as an origin; must be made on a running loop."""
    own: dict[str, Any] = {"addressing_style": "path", "dialect": AZURE.name, **settings}
    given = OriginSettings(endpoint_url=f"http://{address}/{account}", **own)
    pair, clock = StaticCredentials(KeyPair(account, key)), SystemClock()
    http = S3Origin(given, pair, clock, instance_id="test-gateway", signer=SharedKeySigner)
    return AzureOrigin(http, clock, name=address)


class Landing(ReceiveBuffer):
    """A buffer whose pieces are written as a block's fetch writes them: on the thread that receives them, or later."""

    def __init__(self, size: int, enough: int, *, threads: bool) -> None:
        super().__init__(size, enough, self._receive_on_thread if threads else None, trip_bytes=size)
        self.written = bytearray()
        self.from_threads = 0

    async def _receive_on_thread(self, receive: Receive) -> None:
        await asyncio.to_thread(receive, self._take)

    def _take(self, content: memoryview) -> None:
        self.written += content
        self.from_threads += len(content)

    async def pieces(self, response: OriginResponse) -> AsyncIterator[memoryview | bytes]:
        """Yield the pieces of a body; each has been written then, once."""
        received_bytes = 0
        self.written.clear()
        async for piece in response.stream(self):
            received_bytes += len(piece)
            if not isinstance(piece, TakenBytes):
                self.written += piece
            assert len(self.written) == received_bytes
            yield bytes(self.written[received_bytes - len(piece) :])


Scenario = Callable[[Origin, str], Awaitable[None]]
"""What a test does with a client and a fresh bucket."""


@dataclass(frozen=True)
class OriginUnderTest:
    """`connect` gives a client; `kind` is what stands behind it. Of Azure, `endpoint_url` is the address."""

    kind: str
    endpoint_url: str | None
    model: MemoryOrigin | None
    directory: Path | None = None

    async def make_bucket(self, origin: Origin, bucket: str) -> None:
        if self.directory is not None:
            (self.directory / bucket).mkdir()  # nobody makes one through Forebay
        elif isinstance(origin, AzureOrigin):
            await origin.azure.wire.told("PUT", bucket, None, [("restype", "container")])
        else:
            assert (await ask(origin, "PUT", bucket)).status == 200

    def connect(self) -> Origin:
        if self.directory is not None:
            return DirectoryOrigin(self.directory)
        if self.endpoint_url is None:
            assert self.model is not None
            return self.model
        if self.kind == "azure":
            return azure_origin(self.endpoint_url)
        if self.kind == "azurite":
            return azure_origin(self.endpoint_url, azurite.ACCOUNT, azurite.KEY)
        return s3_origin(self.endpoint_url)


@contextmanager
def running(kind: str) -> Iterator[OriginUnderTest]:
    if kind == "memory":
        yield OriginUnderTest(kind, None, MemoryOrigin(SystemClock()))
    elif kind == "directory":
        with tempfile.TemporaryDirectory() as name:
            yield OriginUnderTest(kind, None, None, Path(name))
    elif kind == "azure":
        with AzureBlob() as azure:
            yield OriginUnderTest(kind, azure.address, None)
    elif kind == "azurite":
        with tempfile.TemporaryDirectory() as name, azurite.running_azurite(Path(name)) as address:
            yield OriginUnderTest(kind, address, None)
    elif kind == "strict":
        with StrictOrigin() as strict:
            yield OriginUnderTest(kind, strict.endpoint_url, strict.model)
    else:
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        try:
            host, port = server.get_host_and_port()
            yield OriginUnderTest(kind, f"http://{host}:{port}", None)
        finally:
            server.stop()


@dataclass(frozen=True)
class Answer:
    """An answer read whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def ask(
    origin: Origin,
    method: str,
    bucket: str | None = None,
    key: str | None = None,
    *,
    query: Sequence[tuple[str, str | None]] = (),
    headers: Mapping[str, str] | None = None,
    body: bytes | StreamedBody = b"",
) -> Answer:
    """One request, its answer read to the end."""
    request = OriginRequest(method, bucket, key, query, headers or {}, body)
    async with await origin.send(request) as response:
        return Answer(response.status, response.headers, await response.read(64 * 1024 * 1024))


def xml(body: bytes) -> Element:
    """A document without its namespaces."""
    root = fromstring(body)
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root
