"""Fifty nodes that read the same bytes at once: whole applications in one process, without sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.blocks import complete_ranges
from gateway.cluster.cluster_origin import FOLLOWED_MAX, ClusterOrigin, ClusterRoles
from gateway.cluster.members import Member
from gateway.cluster.peers import Peers
from gateway.core.clock import SystemClock
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.edge.peer_access import PeerAccess
from gateway.edge.peer_port import PeerApp
from gateway.operations import handouts
from gateway.operations.handouts import SENT_AT_ONCE
from gateway.origin import peer_protocol as peer
from gateway.origin.client import OriginRequest, OriginResponse
from gateway.s3.requests import Operation
from gateway.shared.seen_nonces import SeenNonces
from tests.cluster.nodes import FixedView
from tests.support.asgi import call
from tests.support.blocks import take, whole
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import Hold, on
from tests.support.memory_origin.response import MemoryResponse
from tests.support.peers import MEMORY_HOME, NAME, SECRET, signed

MIB = 1024 * 1024
BLOCK = 2 * MIB
ASKERS = 50
TURNS_OF_A_PIECE = 20
"""For so many turns of the event loop a piece is on its way."""


@dataclass(eq=False)
class Node:
    """A node, and in place of the client that others have for it."""

    address: str
    app: PeerApp
    gateway: GatewayApp
    statuses: Counter[int] = field(default_factory=Counter)
    questions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    last: int = 0
    sends: asyncio.Event = field(default_factory=asyncio.Event)
    """Until it is set, no body leaves."""

    async def send(self, request: OriginRequest) -> OriginResponse:
        self.questions.release()
        self.last += peer.LAST in request.headers
        target = f"/{request.bucket}/{request.key}"
        headers = signed(request.method, target, request.headers)
        called = call(self._over_a_link, request.method, target, headers, sign=False, by_client=False)
        answer = await asyncio.create_task(called)  # what is registered of the task is not the asker's
        self.statuses[answer.status] += 1
        return MemoryResponse(answer.status, dict(answer.headers), BytesContent(answer.body))

    async def _over_a_link(self, scope: Any, receive: Any, send: Any) -> None:
        async def slowly(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await self.sends.wait()
                for _ in range(TURNS_OF_A_PIECE):
                    await asyncio.sleep(0)
            await send(message)

        await self.app(scope, receive, slowly)

    def answers(self) -> bool:
        return True

    async def aclose(self) -> None: ...


@asynccontextmanager
async def nodes_of(directory: Path, origin: MemoryOrigin, count: int) -> AsyncIterator[list[Node]]:
    """Nodes of one cluster; the first owns all."""
    clock, found = SystemClock(), dict[str, Node]()
    members = tuple(Member(f"10.0.0.{number}:9002", f"10.0.0.{number}:9002") for number in range(count))
    async with AsyncExitStack() as stack:
        for member in members:
            view = FixedView(members, member, members[:1])
            peers = Peers(lambda address: cast("Any", found[address]), (SECRET,), clock)
            stack.push_async_callback(peers.aclose)

            def now(view: FixedView = view) -> Any:
                return view

            through = ClusterOrigin(origin, peers, now, lambda _: BLOCK, MEMORY_HOME, clock, 1)
            stack.push_async_callback(through.aclose)
            own = directory / member.address
            own.mkdir()
            options: dict[str, Any] = {"block_size_bytes": BLOCK, "roles": ClusterRoles(now), "clock": clock}
            gateway = await stack.enter_async_context(gateway_app(own, origin=origin, through=through, **options))
            gateway.app.services.homes = MEMORY_HOME
            access = PeerAccess(stack.enter_context(closing(SeenNonces(own / "nonces"))), clock, NAME, (SECRET,))
            found[member.address] = Node(member.address, PeerApp(gateway.app.services, access), gateway)
        yield list(found.values())


def once_all_wait(owner: Node, count: int) -> None:
    """Let the owner's first answers last until so many others have come to wait, and its later ones not at all."""
    turn, left = owner.app.reads.handouts.turn, iter(range(count - 1, -1, -1))

    async def counted(asked: Any, asker: str) -> Sequence[str]:
        if next(left, 0) == 0:
            owner.sends.set()
        return await turn(asked, asker)

    owner.app.reads.handouts.turn = counted  # type: ignore[method-assign]


async def read(node: Node, version: ObjectVersion) -> bytes:
    return await take(await node.gateway.blocks.open_range(version, whole(version)))


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [100_000, BLOCK])
def test_one_node_sends_a_few_what_fifty_want_at_once(
    size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get it from those. A slow machine is no reason to wait for less."""
    monkeypatch.setattr(handouts, "WAIT_SECONDS_MAX", 60.0)
    monkeypatch.setattr(complete_ranges, "ARRIVES_SECONDS_MAX", 60.0)

    async def scenario() -> None:
        origin = MemoryOrigin(SystemClock())
        origin.create_bucket("bucket")
        content = (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes]
        version = ObjectVersion(ObjectKey("bucket", "key"), origin.put("bucket", "key", content), size_bytes)
        async with nodes_of(tmp_path, origin, ASKERS + 1) as (owner, *askers):
            once_all_wait(owner, ASKERS - SENT_AT_ONCE)
            for asker in askers:
                asker.sends.set()
            held = asyncio.Event()
            origin.inject(on(Operation.GET_OBJECT), Hold(held))
            readers = [asyncio.create_task(read(asker, version)) for asker in askers]
            for _ in askers:
                await owner.questions.acquire()
            held.set()
            assert await asyncio.gather(*readers) == [content] * ASKERS
            assert len(origin.calls) == 1
            assert owner.statuses[206] <= 3 * SENT_AT_ONCE
            assert owner.last == 0
            sent = sum((node.statuses for node in (owner, *askers)), Counter[int]())
            assert sent[206] == ASKERS
            assert sent[303] <= ASKERS * FOLLOWED_MAX

    asyncio.run(scenario())
