"""What lies between nodes: clients of peer ports, as `S3Origin` is one, over links that fail and harm."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, Protocol, cast

from gateway.cluster.peers import IDLE_SECONDS
from gateway.core.clock import Clock
from gateway.core.errors import OriginUnreachable
from gateway.origin import peer_protocol as peer
from gateway.origin.client import KeyPair, OriginRequest, OriginSettings, StreamedBody
from gateway.origin.request_body import request_body
from gateway.origin.retry import CircuitBreaker
from gateway.origin.signing import Addressing, RequestSigner, StaticCredentials
from tests.cluster.test_harmed_answers import Harmed
from tests.support.asgi import Answer, call
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import CutBody
from tests.support.memory_origin.response import MemoryResponse

NAME = "simulated"
SECRET = b"the secret of the cluster: 32 characters or more"
QUIET_SECONDS = 1.0
"""As gateway/app/cluster.py has it."""

PATIENCE_SECONDS = 60.0
BACK_SECONDS = 1.5
"""So long a request waits for the news that a peer lives again."""

KNOWN_SECONDS = 4.0
"""So long after the first request that got no answer, its node knows that it gets none."""

_NAMES = {"host": "Host", "content-length": "Content-Length"}
"""As `call` knows them."""

HELLO, LIFE = "/-/hello", "/"

OF_PEER: contextvars.ContextVar[bool] = contextvars.ContextVar("of a peer", default=False)
"""What is done because another node has asked."""

Kind = Literal["sound", "slow", "hangs", "deaf", "resets", "refuses", "harms", "replays", "mixes up", "repeats"]
KINDS: tuple[Kind, ...] = ("slow", "hangs", "deaf", "resets", "refuses", "harms", "replays", "mixes up", "repeats")
"""`hangs`: nothing arrives as long as it does. `deaf`: no answer does. `replays`: an earlier answer comes.
`mixes up`: what was asked is another object or range. `repeats`: requests come twice."""


class Peer(Protocol):
    """A node, as links see it."""

    address: str

    @property
    def app(self) -> Any: ...
    @property
    def is_busy(self) -> bool: ...
    def alive(self) -> bool: ...
    async def awake(self) -> None: ...
    async def working(self, work: Coroutine[Any, Any, Any]) -> Any: ...


@dataclass(eq=False)
class Link:
    """One way of asking: from one node to another."""

    dice: Random
    kind: Kind = "sound"
    earlier: list[Answer] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    unanswered: list[float] = field(default_factory=list)
    """When what had no answer was asked, since the last answer."""

    process: Any = None
    """Of the node that asks."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def become(self, kind: Kind) -> None:
        self.kind = kind
        self.changed.set()
        self.changed.clear()

    async def is_no_more(self, kind: Kind) -> None:
        while self.kind == kind:
            await self.changed.wait()

    async def pass_through(self) -> None:
        low, high = (0.3, 3.0) if self.kind == "slow" else (0.0002, 0.004)
        await asyncio.sleep(low + (high - low) * self.dice.random() ** 2)


@dataclass(eq=False)
class Wires:
    """All links, and all nodes by address."""

    dice: Random
    violated: Callable[[str, str], None]
    may_tell: Callable[[str], bool]
    """Whether a node may say which version is the current one of what is at a path."""

    now: Callable[[], float]
    seen: Counter[str] = field(default_factory=Counter)
    """What has happened, and how often."""

    nodes: dict[str, Peer] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)

    def link(self, asker: str, asked: str) -> Link:
        return self.links.setdefault((asker, asked), Link(self.dice))

    async def carry(
        self, asker: Peer, address: str, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> Answer:
        """The answer of whoever is at an address. OriginUnreachable."""
        link = self.link(asker.address, address)
        if path not in (HELLO, LIFE) and peer.STORE not in headers:
            self._judge_question(asker, link, address, method, path, headers)
        before = self.nodes.get(address)
        app = before.app if before is not None else None
        await link.pass_through()
        await link.is_no_more("hangs")
        node = self.nodes.get(address)
        if link.kind == "refuses" or node is None or not node.alive() or node.app is not app:
            link.unanswered.clear()
            raise OriginUnreachable("connection refused")
        await node.awake()
        if link.kind == "mixes up" and link.asked:
            method, path = self.dice.choice(link.asked)
        link.asked = [*link.asked[-20:], (method, path)]
        answer = await self._answer(node, method, path, headers, body)
        if link.kind == "repeats" and "authorization" in headers:
            again = await self._answer(node, method, path, headers, body)
            if again.status not in (403, 503):
                self.violated(
                    "no request counts twice",
                    f"{method} {path} came twice, and was answered {again.status}",
                )
        await node.awake()
        await link.is_no_more("deaf")
        await link.pass_through()
        link.unanswered.clear()
        link.earlier = [*link.earlier[-20:], answer]
        if link.kind == "replays":
            answer = self.dice.choice(link.earlier)
        if link.kind == "harms" and answer.body:
            answer = replace(answer, body=Harmed(self.dice)(answer.body))
        await asker.awake()
        if path not in (HELLO, LIFE):
            only = headers.get(peer.ONLY)
            self.seen[f"answer {answer.status}{f' to only {only}' if only else ''}"] += 1
        return answer

    def _judge_question(
        self, asker: Peer, link: Link, address: str, method: str, path: str, headers: Mapping[str, str]
    ) -> None:
        self.seen[link.kind] += 1
        what = f"{method} {path} of {address} by {asker.address}"
        if peer.SIZE not in headers and not self.may_tell(path):
            self.violated("peers tell versions only where nobody writes", what)
        if OF_PEER.get() and peer.ONLY not in headers and peer.DOUBT not in headers:
            self.violated("who is asked asks nobody to ask", what)
        if link.kind not in ("hangs", "deaf"):
            return
        now, asked = self.now(), link.unanswered
        if link.process is not asker.app or (asked and asked[-1] + IDLE_SECONDS < now):
            link.process = asker.app
            asked.clear()
        asked.append(now)
        if now - asked[0] > KNOWN_SECONDS:
            self.violated("who is silent is asked no more", f"{what}, which has been silent for {now - asked[0]:.1f} s")

    async def _answer(self, node: Peer, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if method == "HEAD" and path == LIFE:  # is anybody there?
            return Answer(403, {}, b"", True)
        app = node.app
        if app is None:
            raise OriginUnreachable("the connection was reset")
        if node.is_busy and path != HELLO:
            return _busy(headers)
        sent = {_NAMES.get(name, name): value for name, value in headers.items()}
        asking = call(app, method, path, sent, body, sign=False, by_client=False)
        before = OF_PEER.set(True)
        try:
            answer: Answer = await node.working(asking)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise OriginUnreachable("the connection was reset") from None
        finally:
            OF_PEER.reset(before)
        if not node.alive() or node.app is not app:
            raise OriginUnreachable("the connection was reset")
        return answer


def _busy(asked: Mapping[str, str]) -> Answer:
    headers = {"retry-after": "1", "content-length": "0"}
    proof = peer.proof(SECRET, asked.get(peer.NONCE, ""), 503, headers)
    return Answer(503, {**headers, peer.PROOF: proof}, b"", complete=True)


class PeerClient:
    """In the place of the `S3Origin` of a peer: one attempt, and a question after its life when it is quiet."""

    def __init__(self, wires: Wires, here: Peer, address: str, clock: Clock) -> None:
        self._wires, self._here, self._address, self._clock = wires, here, address, clock
        settings = OriginSettings(endpoint_url=f"http://{address}", addressing_style="path")
        credentials = StaticCredentials(KeyPair(f"forebay-{NAME}", SECRET.decode()))
        self._addressing = Addressing(settings)
        self._signer = RequestSigner(lambda _: credentials, "us-east-1", clock, "feedfacefeedface")
        self._breaker = CircuitBreaker(clock)
        self._probing: asyncio.Task[None] | None = None

    async def send(self, request: OriginRequest) -> MemoryResponse:
        if self._breaker.is_open:
            await asyncio.wait((self._probe(),), timeout=BACK_SECONDS)
            if self._breaker.is_open:
                raise OriginUnreachable("the peer has not answered lately")
        target = self._addressing.target(request.bucket, request.key, request.query)
        if isinstance(request.body, StreamedBody):
            request = replace(request, body=b"".join([bytes(piece) async for piece in request.body.chunks]))
        body = request_body(request)
        headers = await self._signer.headers(request, target, body)
        path = f"{target.path}?{target.query}" if target.query else target.path
        asking = asyncio.create_task(self._carry(request.method, path, headers, cast(bytes, body.content)))
        try:
            answer = await self._heard(asking)
        except OriginUnreachable:
            self._breaker.unanswered()
            raise
        finally:
            asking.cancel()
        self._breaker.answered()
        return self._response(request, answer)

    def answers(self) -> bool:
        if self._breaker.is_open:
            self._probe()
        return not self._breaker.is_open

    async def aclose(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _heard(self, asking: asyncio.Task[Answer]) -> Answer:
        began = self._clock.monotonic()
        while self._clock.monotonic() < began + PATIENCE_SECONDS:
            done, _ = await asyncio.wait((asking,), timeout=QUIET_SECONDS)
            if done:
                return asking.result()
            if self._breaker.is_open:
                break
            self._probe()
        raise OriginUnreachable("the peer says nothing")

    def _probe(self) -> asyncio.Task[None]:
        if self._probing is None or (self._probing.done() and self._breaker.may_be_probed()):
            self._probing = asyncio.create_task(self._ask_for_life(), name="probe a peer")
        return self._probing

    async def _ask_for_life(self) -> None:
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                await self._carry("HEAD", LIFE, {})
        except (OriginUnreachable, TimeoutError) as error:
            self._breaker.probe_failed(began, silent=isinstance(error, TimeoutError))
        else:
            self._breaker.answered()

    def _carry(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Coroutine[Any, Any, Answer]:
        return self._wires.carry(self._here, self._address, method, path, headers, body)

    def _response(self, request: OriginRequest, answer: Answer) -> MemoryResponse:
        link, headers = self._wires.link(self._here.address, self._address), answer.headers
        told_bytes = int(headers.get("content-length", len(answer.body)))
        left, cut = answer.body[:told_bytes], None
        if link.kind == "resets" and left:
            cut = CutBody(self._wires.dice.randrange(len(left)))
        elif len(left) < told_bytes and request.method != "HEAD":
            cut, left = CutBody(len(left)), left + bytes(told_bytes - len(left))
        return MemoryResponse(answer.status, headers, BytesContent(left), request.method != "HEAD", cut)
