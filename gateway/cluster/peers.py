"""The other nodes as this process asks them: one client for each, made when it is first needed.

An answer counts only with the proof that the peer knows the cluster's secret. A peer that is silent or slow is left out
for a while: the next owner takes its place.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final

import structlog

from gateway.cluster.hello import HELLO_BYTES_MAX
from gateway.cluster.members import Member
from gateway.core.clock import Clock
from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.client import FromPeer, OriginRequest, OriginResponse, WrappedResponse
from gateway.origin.peer_protocol import (
    BY,
    CHECKSUM_BYTES,
    CHUNK_BYTES,
    CRC32C,
    DATE,
    FOR_CLIENTS,
    NONCE,
    PROOF,
    TO,
    chunk_checksums,
    new_nonce,
    proof_of,
    proved_text,
)
from gateway.origin.s3 import S3Origin
from gateway.telemetry import metrics
from gateway.telemetry.logs import RateLimitedLog

SAMPLES: Final = 20
SLOW_TIMES: Final = 10.0
SLOW_SECONDS_MIN: Final = 0.1
"""A peer is slow if the median of its last SAMPLES hits is later than this, and SLOW_TIMES the median of the others."""

LEFT_OUT_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 300.0
TOLD_MAX: Final = 16

_log = RateLimitedLog(structlog.get_logger("forebay.cluster"))


@dataclass(eq=False, slots=True)
class _Peer:
    origin: S3Origin
    calls_itself: str = ""
    used_at: float = 0.0
    left_out_until: float = 0.0
    hit_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))


class Peers:
    """The peers of one process. Event loop only."""

    def __init__(self, connect: Callable[[str], S3Origin], secrets: Sequence[bytes], clock: Clock) -> None:
        """`connect` makes the client for an address, which signs by the first of the secrets."""
        self._connect = connect
        self._secrets = tuple(secrets)
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._in_background: set[asyncio.Task[None]] = set()

    def apply_settings(self, secrets: Sequence[bytes]) -> None:
        """Accept proofs by one of these secrets from now on."""
        self._secrets = tuple(secrets)

    def is_away(self, member: Member) -> bool:
        """Return True if a member is silent or left out."""
        peer = self._peers.get(member.address)
        return peer is not None and (self.is_left_out(member.address) or not peer.origin.answers())

    def is_left_out(self, address: str) -> bool:
        """Return True if a node has lately been slow, has let a request wait in vain, or has broken a body off."""
        peer = self._peers.get(address)
        return peer is not None and peer.left_out_until > self._clock.monotonic()

    def leave_out(self, address: str) -> None:
        self._peer(address).left_out_until = self._clock.monotonic() + LEFT_OUT_SECONDS

    async def ask(self, address: str, request: OriginRequest) -> PeerAnswer | None:
        """Return the proved answer to a request, to be closed; None: there is none. Its headers have a new nonce."""
        try:
            return await self._proved(address, request)
        except OriginUnreachable:
            return None

    def tell(self, address: str, request: OriginRequest) -> None:
        """Send a request whose answer does not matter, unless many of these are under way."""

        async def send() -> None:
            answer = await self.ask(address, request)
            if answer is not None:
                await answer.aclose()

        if len(self._in_background) < TOLD_MAX:
            self._begin(send())

    async def _proved(self, address: str, request: OriginRequest) -> PeerAnswer:
        peer, began = self._peer(address), self._clock.monotonic()
        if peer.calls_itself:
            request = replace(request, headers={**request.headers, TO: peer.calls_itself})
        response = await peer.origin.send(request)
        seconds = self._clock.monotonic() - began
        if not self._is_proved(request.headers[NONCE], response):
            await response.aclose()
            problem = "a node of the cluster does not prove that it knows the secret"
            _log.warning(problem, address, address=address)
            raise OriginUnreachable(f"{problem}, or does not accept this node's: it answers {response.status}")
        peer.calls_itself = response.headers.get(BY, "")
        metrics.CLUSTER_PEER_SECONDS.observe(seconds)
        if response.headers.get("x-forebay-cache") == "hit":
            self._took(address, peer, seconds)
        return PeerAnswer(response)

    async def hello(self, address: str) -> bytes:
        """Return what the node at an address says of itself. Raises OriginUnreachable or OriginBodyError."""
        request = OriginRequest("GET", "-", "hello", headers={NONCE: new_nonce()})
        async with await self._proved(address, request) as answer:
            if answer.status != 200:
                raise OriginUnreachable(f"{address} answers {answer.status}")
            content = await answer.read(HELLO_BYTES_MAX)
        if chunk_checksums(content) != answer.checksums:
            raise OriginBodyError(f"the hello of {address} came damaged")
        return content

    async def aclose(self) -> None:
        peers, self._peers = list(self._peers.values()), {}
        await asyncio.gather(*(peer.origin.aclose() for peer in peers), *self._in_background)

    def _peer(self, address: str) -> _Peer:
        now, peer = self._clock.monotonic(), self._peers.get(address)
        if peer is None:
            self._close_idle(now)
            peer = self._peers[address] = _Peer(self._connect(address))
        peer.used_at = now
        return peer

    def _close_idle(self, now: float) -> None:
        for address, peer in list(self._peers.items()):
            if peer.used_at + IDLE_SECONDS < now:
                del self._peers[address]
                self._begin(peer.origin.aclose())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="peers")
        self._in_background.add(task)
        task.add_done_callback(self._in_background.discard)

    def _is_proved(self, nonce: str, response: OriginResponse) -> bool:
        told = response.headers.get(PROOF, "").encode("latin-1")
        text = proved_text(nonce, response.status, response.headers)
        return any(hmac.compare_digest(told, proof_of(one, text).encode()) for one in self._secrets)

    def _took(self, address: str, peer: _Peer, seconds: float) -> None:
        peer.hit_seconds.append(seconds)
        if len(peer.hit_seconds) < SAMPLES or seconds < SLOW_SECONDS_MIN:
            return
        own = median(peer.hit_seconds)
        others = [median(one.hit_seconds) for one in self._peers.values() if one is not peer and one.hit_seconds]
        if own > SLOW_SECONDS_MIN and others and own > SLOW_TIMES * median(others):
            self.leave_out(address)
            peer.hit_seconds.clear()


class PeerAnswer(WrappedResponse):
    """An answer of a peer. Its headers are S3's: those between nodes are in `told`."""

    def __init__(self, response: OriginResponse) -> None:
        super().__init__(response)
        self.told: Mapping[str, str] = response.headers
        told = response.headers.items()
        own = {name: value for name, value in told if name in FOR_CLIENTS or not name.startswith("x-forebay-")}
        own.pop("date", None)
        if DATE in self.told:
            own["date"] = self.told[DATE]
        self.headers = own
        self.from_peer: FromPeer = FromPeer()

    @property
    def checksums(self) -> bytes | None:
        """Return the checksums of the body, packed as blocks have them; None: they are not all there."""
        try:
            packed = base64.b64decode(self.told.get(CRC32C, ""), validate=True)
        except (binascii.Error, ValueError):
            return None
        return packed if len(packed) == CHECKSUM_BYTES * -(-self.length_bytes // CHUNK_BYTES) else None

    @property
    def length_bytes(self) -> int:
        """Return the length of the body; -1: the answer does not say it."""
        length = self.told.get("content-length", "")
        return int(length) if length.isdecimal() else -1
