"""Other nodes of a cluster, as the asking side sees them: they answer from an origin in memory, and prove it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from gateway.cluster.cluster_origin import ClusterOrigin, ClusterRoles
from gateway.cluster.members import Member
from gateway.cluster.peers import Peers
from gateway.core.clock import Clock
from gateway.core.errors import OriginUnreachable
from gateway.core.model import Homes, ObjectKey, ObjectVersion
from gateway.origin import peer_protocol as peer
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.policy.slots import Slots
from tests.support.blocks import BLOCK, TestClock, make_origin, stored
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.response import MemoryResponse
from tests.support.peers import SECRET, checksums

HOME = Homes("memory")


class AtOnce(MemoryResponse):
    """An answer whose body has come together with its head."""

    def whole(self) -> memoryview | None:
        return memoryview(self.content.read(0, self.content.size_bytes))


Harm = Callable[[bytes], bytes]
"""Changes a body between two nodes."""


@dataclass(eq=False)
class Node:
    """A peer, in place of the client for it. It has what `origin` has."""

    origin: MemoryOrigin
    clock: Clock
    secret: bytes = SECRET
    harm: Harm | None = None
    age_seconds: float | None = 0.0
    date: str | None = None
    silent: bool = False
    unreachable: bool = False
    says_nothing: bool = False
    """For ever; it lives all the same."""

    seconds: float = 0.0
    cache: str = "hit"
    at_once: bool = False
    """Bodies are here with their heads."""

    replies: list[MemoryResponse | None] = field(default_factory=list)
    """Answers to the next requests, before they are proved; None: the object's."""

    asked: list[OriginRequest] = field(default_factory=list)
    is_closed: bool = False

    async def send(self, request: OriginRequest) -> OriginResponse:
        self.asked.append(request)
        if self.unreachable or self.silent:
            raise OriginUnreachable("no answer")
        if self.says_nothing:
            await asyncio.Event().wait()
        if self.seconds:
            cast("TestClock", self.clock).time += self.seconds
        given = self.replies.pop(0) if self.replies else None
        reply = given or await self._of_object(request)
        nonce = request.headers[peer.NONCE]
        reply.headers = {**reply.headers, peer.PROOF: peer.proof(self.secret, nonce, reply.status, reply.headers)}
        if self.harm is not None and reply.content.size_bytes:
            reply.content = BytesContent(self.harm(reply.content.read(0, reply.content.size_bytes)))
        if self.at_once:
            return AtOnce(reply.status, reply.headers, reply.content, reply.with_body)
        return reply

    async def _of_object(self, request: OriginRequest) -> MemoryResponse:
        if peer.DOUBT in request.headers:
            return MemoryResponse(204)
        plain = {name: value for name, value in request.headers.items() if not name.startswith("x-forebay-")}
        response = await self.origin.send(replace(request, headers=plain))
        body = await response.read(1 << 30)
        headers = {**response.headers, "x-forebay-cache": self.cache}
        if body:
            headers[peer.CRC32C] = checksums(body)
        if self.age_seconds is not None and peer.SIZE not in request.headers:
            headers[peer.AGE] = str(self.age_seconds)
            if self.date is not None:
                headers[peer.DATE] = self.date
        return MemoryResponse(response.status, headers, BytesContent(body))

    def answers(self) -> bool:
        return not self.silent

    async def aclose(self) -> None:
        self.is_closed = True

    def headers(self, number: int = -1) -> Mapping[str, str]:
        return self.asked[number].headers


@dataclass
class FixedView:
    """As `View`: the same owners for every block."""

    members: tuple[Member, ...]
    me: Member | None
    order: Sequence[Member]
    before: Member | None = None

    def owners(self, key: ObjectKey, number: int) -> tuple[Member, ...]:
        return tuple(self.order)

    def owner_before(self, key: ObjectKey, number: int) -> Member | None:
        return self.before


@dataclass(eq=False)
class Cluster:
    """This node's side of a cluster: `bucket`, and `nodes` by address, which have what `at_nodes` has.

    Member "me" is this node. Blocks are owned by "one", then "two".
    """

    bucket: MemoryOrigin = field(default_factory=make_origin)
    at_nodes: MemoryOrigin = field(default_factory=make_origin)
    clock: Any = field(default_factory=TestClock)
    slots: Slots = field(default_factory=Slots)
    fallback_requests: int = 4
    nodes: dict[str, Node] = field(default_factory=dict)
    connected: list[str] = field(default_factory=list)
    origin: ClusterOrigin = field(init=False)
    view: FixedView = field(init=False)

    def __post_init__(self) -> None:
        me, one, two, three = (Member(name, name) for name in ("me", "one", "two", "three"))
        self.view = FixedView((me, one, two, three), me, (one, two))
        for name in ("one", "two", "three"):
            self.nodes[name] = Node(self.at_nodes, self.clock)
        self.peers = Peers(self._connect, (SECRET, b"the one before: thirty-two characters"), self.clock)
        self.origin = ClusterOrigin(
            self.bucket, self.peers, lambda: cast("Any", self.view), lambda _: BLOCK, HOME, self.clock,
            self.fallback_requests,
        )  # fmt: skip
        self.roles = ClusterRoles(lambda: cast("Any", self.view))

    def _connect(self, address: str) -> Any:
        self.connected.append(address)
        return self.nodes[address]

    def store(self, key: str, size_bytes: int, seed: int = 0) -> ObjectVersion:
        stored(self.at_nodes, key, size_bytes, seed)
        return stored(self.bucket, key, size_bytes, seed)

    def member(self, name: str) -> Member:
        return next(one for one in self.view.members if one.name == name)

    async def read(self, version: ObjectVersion, first: int = 0, last: int | None = None, **copy: str) -> bytes:
        async with await self.origin.send(pinned(version, first, last, **copy)) as response:
            assert response.status == 206, response.status
            return await response.read(1 << 30)

    def asked(self) -> dict[str, int]:
        return {name: len(node.asked) for name, node in self.nodes.items() if node.asked}

    def from_bucket(self) -> int:
        return len(self.bucket.calls)

    async def settle(self) -> None:
        await asyncio.gather(*self.peers._in_background)


def pinned(version: ObjectVersion, first: int = 0, last: int | None = None, copy: str = "1") -> OriginRequest:
    last = min(first + BLOCK, version.size_bytes) - 1 if last is None else last
    headers = {"if-match": version.etag, "range": f"bytes={first}-{last}", "accept-encoding": "identity"}
    if copy:
        headers[peer.COPY] = copy
    key = version.key
    return OriginRequest(
        "GET", key.bucket, key.key, headers=headers, purpose=Purpose.LIVE, size_bytes=version.size_bytes
    )
