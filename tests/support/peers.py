"""Another node of the cluster, as the peer port sees it: what it sends, and how it judges an answer."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awscrt.checksums import crc32c

from gateway.core.clock import Clock, SystemClock
from gateway.core.model import Homes, ObjectKey
from gateway.edge.peer_access import PeerAccess
from gateway.edge.peer_port import PeerApp
from gateway.origin import peer_protocol as peer
from gateway.shared.seen_nonces import SeenNonces
from tests.support.asgi import HOST, Answer, call, signed_headers
from tests.support.gateway_app import GatewayApp, gateway_app

NAME = "train"
SECRET = b"the secret of the cluster: 32 characters or more"
CHUNK_BYTES = 64 * 1024
MEMORY_HOME = Homes("memory")
ADDRESS = "10.0.0.1:9002"
HELLO = b'{"name": "this one"}'


@dataclass(frozen=True)
class PeerGateway:
    """A gateway, and the application of its peer port."""

    gateway: GatewayApp
    app: PeerApp
    nonces: SeenNonces

    async def ask(
        self, method: str = "GET", target: str = "/bucket/key", headers: Mapping[str, str] | None = None, **how: Any
    ) -> Answer:
        """One request of another node, its answer proved."""
        return await asked(self.app, method, target, headers, **how)

    async def read(self, key: ObjectKey, etag: str, size_bytes: int, first: int, last: int, **more: str) -> Answer:
        """A GET of bytes of a version; `more` headers with `_` for `-`, without `x-forebay-`."""
        headers = of_version(etag, size_bytes, first, last)
        headers |= {f"x-forebay-{name.replace('_', '-')}": value for name, value in more.items()}
        return await self.ask("GET", f"/{key.bucket}/{key.key}", headers)


def of_version(etag: str, size_bytes: int, first: int, last: int) -> dict[str, str]:
    return {"if-match": etag, peer.SIZE: str(size_bytes), "range": f"bytes={first}-{last}"}


def of_node(headers: Mapping[str, str] | None = None, home: str = "memory") -> dict[str, str]:
    """The headers of a node's request, with a nonce of its own."""
    told = {peer.PEER: peer.VERSION, peer.HOME: peer.home_digest(home), peer.NONCE: peer.new_nonce()}
    return {**told, **(headers or {})}


def signed(
    method: str,
    target: str,
    headers: Mapping[str, str],
    *,
    secret: bytes = SECRET,
    name: str = NAME,
    host: str = HOST,
) -> dict[str, str]:
    key = {"access_key_id": f"forebay-{name}", "secret_access_key": secret.decode()}
    return signed_headers(method, target, headers, b"", host=host, **key)


async def asked(
    app: Any, method: str, target: str, headers: Mapping[str, str] | None = None, *, secret: bytes = SECRET
) -> Answer:
    """Send a node's request; the answer proves that the other side knows the secret, and each byte of its body."""
    said = of_node(headers)
    answer = await call(app, method, target, signed(method, target, said, secret=secret), sign=False, by_client=False)
    assert is_proved(answer, said[peer.NONCE], secret), answer
    if method != "HEAD" and answer.status not in (204, 304):
        assert len(answer.body) == int(answer.headers["content-length"])
        assert checksums(answer.body) == answer.headers.get(peer.CRC32C, "")
    return answer


def is_proved(answer: Answer, nonce: str, secret: bytes = SECRET) -> bool:
    return answer.headers.get(peer.PROOF) == peer.proof(secret, nonce, answer.status, answer.headers)


def checksums(body: bytes) -> str:
    return base64.b64encode(packed(body)).decode()


def packed(body: bytes) -> bytes:
    """Checksums of chunks, computed apart from the gateway's own code."""
    parts = [body[at : at + CHUNK_BYTES] for at in range(0, len(body), CHUNK_BYTES)]
    return b"".join(crc32c(part).to_bytes(4, "little") for part in parts)


@asynccontextmanager
async def peer_gateway(
    directory: Path, *, secrets: Sequence[bytes] = (SECRET,), clock: Clock | None = None, **options: Any
) -> AsyncIterator[PeerGateway]:
    """A gateway as of `gateway_app`, with a peer port."""
    async with gateway_app(directory, clock=clock, **options) as gateway:
        with closing(SeenNonces(directory / "peer-nonces")) as nonces:
            access = PeerAccess(nonces, clock or SystemClock(), NAME, secrets, ADDRESS)
            gateway.app.services.homes, gateway.app.services.hello = MEMORY_HOME, lambda: HELLO
            yield PeerGateway(gateway, PeerApp(gateway.app.services, access), nonces)
