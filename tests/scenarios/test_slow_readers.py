"""Hundreds of clients that read slowly cost a connection and a descriptor each: no thread, hardly any memory."""

from __future__ import annotations

import asyncio
import hashlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

READERS = 400
RSS_BYTES_MAX = 300 * 1024**2
"""78 MiB without a connection, and a busy machine adds up to 120 for blocks that wait for the disk, however many read
them. A block kept for each reader would be 400 more."""
THREADS_MAX = 40
BUCKET = "bucket"
SIP_BYTES = 4096
SIPS = 8
SIP_SECONDS = 0.1
RECEIVE_BUFFER_BYTES = 16 * 1024
"""What a client has not read waits at the gateway, and not in the client's kernel."""


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        yield origin


def gateway_for(origin: StrictOrigin, directory: Path) -> GatewayProcess:
    config: dict[str, Any] = {
        "server": {"allow_unsigned": True},
        "origin": origin.settings,
        "cache": {"capacity": "2GiB", "block_size": "1MiB"},
        "slots": [{"name": "all", "prefix": f"s3://{BUCKET}/", "consistency": "immutable"}],
    }
    return GatewayProcess(config, directory=directory / "cache")


class Crowd:
    """The readers, each of one key of `keys`, and what the worker took while they all were in the midst of it."""

    def __init__(self, gateway: GatewayProcess, keys: list[str], *, slow: bool = True) -> None:
        self._host, port = gateway.s3_url.removeprefix("http://").split(":")
        self._port = int(port)
        self._keys = keys
        self._slow = slow
        [pid] = gateway.worker_pids()
        self._status = Path(f"/proc/{pid}/status")
        self._sipping = 0
        self._all_sip = asyncio.Event()
        self.rss_bytes = 0
        self.threads = 0

    async def read(self) -> list[str]:
        """The digests of what the readers got."""
        watching = asyncio.create_task(self._watch())
        try:
            return await asyncio.gather(*(self._read(key) for key in self._keys))
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
            self.rss_bytes = max(self.rss_bytes, int(fields["RssAnon"].split()[0]) * 1024)
            self.threads = max(self.threads, int(fields["Threads"]))
            await asyncio.sleep(0.05)

    async def _read(self, key: str) -> str:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            await loop.sock_connect(client, (self._host, self._port))
            await loop.sock_sendall(client, f"GET /{BUCKET}/{key} HTTP/1.1\r\nHost: gateway\r\n\r\n".encode())
            head, body = await self._head(client)
            assert head.startswith(b"HTTP/1.1 200"), head
            [length] = [int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
            digest, left = hashlib.blake2b(body), length - len(body)
            if self._slow:
                left -= await self._sip(client, digest)
            while left:
                piece = await loop.sock_recv(client, min(left, 64 * 1024))
                assert piece, "a short answer"
                digest.update(piece)
                left -= len(piece)
            return digest.hexdigest()

    async def _head(self, client: socket.socket) -> tuple[bytes, bytes]:
        received = b""
        while b"\r\n\r\n" not in received:
            piece = await asyncio.get_running_loop().sock_recv(client, SIP_BYTES)
            assert piece, received
            received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        return head, body

    async def _sip(self, client: socket.socket, digest: Any) -> int:
        """A little at a time, and then not another byte before every reader has come so far."""
        taken = 0
        for _ in range(SIPS):
            piece = await asyncio.get_running_loop().sock_recv(client, SIP_BYTES)
            assert piece, "a short answer"
            digest.update(piece)
            taken += len(piece)
            await asyncio.sleep(SIP_SECONDS)
        self._sipping += 1
        if self._sipping == READERS:
            self._all_sip.set()
        await self._all_sip.wait()
        return taken


def digest_of(origin: StrictOrigin, key: str) -> str:
    content = origin.model.buckets[BUCKET].objects[key].content
    return hashlib.blake2b(content.read(0, content.size_bytes)).hexdigest()


def check(gateway: GatewayProcess, origin: StrictOrigin, keys: list[str]) -> None:
    crowd = Crowd(gateway, keys)
    found = asyncio.run(crowd.read())
    expected = {key: digest_of(origin, key) for key in set(keys)}
    assert found == [expected[key] for key in keys]
    print(f"{READERS} readers: own memory {crowd.rss_bytes / 2**20:.0f} MiB, {crowd.threads} threads")
    assert crowd.rss_bytes < RSS_BYTES_MAX
    assert crowd.threads < THREADS_MAX


def objects(origin: StrictOrigin, count: int, size_bytes: int) -> list[str]:
    keys = [f"k{number}" for number in range(count)]
    for seed, key in enumerate(keys):
        origin.model.put_generated(BUCKET, key, size_bytes, seed)
    return [keys[number % count] for number in range(READERS)]


@pytest.mark.parametrize(
    ("count", "size_bytes"),
    [(20, 3_000_000), (400, 300_000), (400, 100_000)],
    ids=["large", "small", "small enough to come whole"],
)
def test_slow_readers_cold_and_warm(tmp_path: Path, origin: StrictOrigin, count: int, size_bytes: int) -> None:
    """All at once of objects that are not here yet, that are, and that this process has not verified yet."""
    keys = objects(origin, count, size_bytes)
    with gateway_for(origin, tmp_path) as gateway:
        check(gateway, origin, keys)
        check(gateway, origin, keys)
        gateway.terminate()
        gateway.start()
        check(gateway, origin, keys)
