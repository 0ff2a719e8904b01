"""Several gateways of one cluster in one process, over one bucket, and a registry of their writes.

async with writing_nodes(directory, 3) as nodes:
    await nodes.put(0, "key", b"content")
    assert (await nodes.get(1, "key")).body == b"content"
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gateway.cluster.earlier_writes import EarlierWrites
from gateway.cluster.members import Member, View
from gateway.cluster.peers import Peers
from gateway.cluster.stores import AskAll, PeerStores
from gateway.cluster.switched_registry import SwitchedRegistry
from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import OriginUnreachable, RegistryAway
from gateway.core.model import Claim, Known, ObjectKey
from gateway.core.prefixes import Prefix
from gateway.operations.cluster_writes import ClusterWrites
from gateway.origin.client import OriginRequest, OriginSettings, StreamedBody
from gateway.origin.signing import Addressing
from gateway.policy.registry import KEYS_MAX, KnownKeys, Registry
from gateway.policy.slots import Slot as AnySlot
from gateway.writeback.flushing.manifest_files import ManifestFiles
from tests.support.asgi import Answer, call, signed_headers
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.response import MemoryResponse
from tests.support.peers import MEMORY_HOME, NAME, SECRET, PeerGateway, peer_gateway
from tests.support.slots import Slot
from tests.support.write_back_gateway import Client

BUCKET = "bucket"


def writing_slot(write: str = "back", consistency: str = "ttl", **more: Any) -> Slot:
    values = {"buffer_bytes": 64 * 1024**2} if write == "back" else {}
    more = {"write": write, "own_writes": "cluster", **values, **more}
    return Slot("data", Prefix.parse(f"s3://{BUCKET}/"), "read-write", consistency, **more)


@dataclass(eq=False)
class SharedRegistry:
    """The registry's state, as a service would have it: key → its pending write's store and number, and its stamp."""

    pending: dict[ObjectKey, tuple[str, int]] = field(default_factory=dict)
    tokens: dict[ObjectKey, set[str]] = field(default_factory=dict)
    stamps: dict[ObjectKey, int] = field(default_factory=dict)
    number: int = 0
    is_away: bool = False

    def next(self) -> int:
        self.number += 1
        return self.number


class MemoryRegistry:
    """One node's registry, over the shared state."""

    can_claim = True

    def __init__(self, shared: SharedRegistry, store: str) -> None:
        self._shared = shared
        self._store = store

    def asks(self, slot: AnySlot) -> bool:
        return slot.asks_other_nodes

    async def look(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        await self._turn()
        return [self._known(key) for key in keys]

    async def rows(self, bucket: str, start: bytes, stop: bytes) -> KnownKeys:
        await self._turn()
        keys = {key for key in (*self._shared.pending, *self._shared.stamps) if key.bucket == bucket and key.key}
        named = sorted((key.key.encode(), key) for key in keys if start <= key.key.encode() < stop)
        rows = [(name, self._known(key)) for name, key in named[:KEYS_MAX]]
        return KnownKeys(rows, rows[-1][0] + b"\0" if len(named) > KEYS_MAX else None)

    async def holders(self, bucket: str, start: bytes, stop: bytes) -> Sequence[str]:
        await self._turn()
        found = [(key, store) for key, (store, _) in self._shared.pending.items() if key.bucket == bucket]
        return sorted({store for key, store in found if start <= key.key.encode() < stop} - {self._store})

    async def begin(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        await self._turn()
        self._shared.stamps |= {key: self._shared.next() for key in keys}
        return [self._known(key) for key in keys]

    async def end(self, keys: Sequence[ObjectKey]) -> None:
        await self._turn()
        self._shared.stamps |= {key: self._shared.next() for key in keys}

    async def claim(self, claim: Claim) -> Known:
        await self._turn()
        known = self._known(claim.key)
        if known.store is not None:
            return known
        order = self._shared.next()
        _, first = self._shared.pending.get(claim.key, ("", order))
        self._shared.pending[claim.key] = self._store, first
        self._shared.tokens.setdefault(claim.key, set()).add(claim.token)
        return replace(known, order=order)

    async def confirm(self, claim: Claim, known: Known, claimed_at: float) -> bool:
        await self._turn()
        return False

    async def release(self, claim: Claim) -> None:
        self.settled([claim])

    def settled(self, claims: Sequence[Claim]) -> None:
        """As the background process does it."""
        for claim in claims:
            tokens = self._shared.tokens.get(claim.key, set())
            tokens.discard(claim.token)
            if not tokens and self._shared.pending.pop(claim.key, None) is not None:
                self._shared.stamps[claim.key] = self._shared.next()

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        if self._shared.is_away:
            raise RegistryAway("the registry is away")

    def _known(self, key: ObjectKey) -> Known:
        store, claim = self._shared.pending.get(key, ("", 0))
        is_elsewhere = store not in ("", self._store)
        return Known(store if is_elsewhere else None, claim if is_elsewhere else 0, self._shared.stamps.get(key, 0))


class DirectPeer:
    """In the place of the `S3Origin` of a peer: asks its application at once."""

    def __init__(self, app_of: Callable[[], Any]) -> None:
        self._app_of = app_of
        self._addressing = Addressing(OriginSettings(endpoint_url="http://peer", addressing_style="path"))
        self.is_down = False

    async def send(self, request: OriginRequest) -> MemoryResponse:
        if self.is_down:
            raise OriginUnreachable("connection refused")
        body = request.body
        if isinstance(body, StreamedBody):
            body = b"".join([bytes(piece) async for piece in body.chunks])
        target = self._addressing.target(request.bucket, request.key, request.query)
        path = target.path + (f"?{target.query}" if target.query else "")
        key = {"access_key_id": f"forebay-{NAME}", "secret_access_key": SECRET.decode()}
        headers = signed_headers(request.method, path, dict(request.headers), body, **key)
        answer = await call(self._app_of(), request.method, path, headers, body, sign=False, by_client=False)
        return MemoryResponse(answer.status, answer.headers, BytesContent(answer.body), request.method != "HEAD")

    def answers(self) -> bool:
        return not self.is_down

    async def aclose(self) -> None:
        """Nothing is open."""


@dataclass(eq=False)
class WritingNodes:
    """The gateways; `direct[asker][asked]` are the connections between them."""

    origin: MemoryOrigin
    shared: SharedRegistry
    nodes: list[PeerGateway]
    direct: dict[tuple[int, int], DirectPeer]
    clients: list[Client] = field(default_factory=list)

    def app(self, number: int) -> Any:
        return self.nodes[number].gateway.app

    async def ask(self, number: int, method: str, target: str, **how: Any) -> Answer:
        return await call(self.app(number), method, target, **how)

    async def get(self, number: int, key: str, **how: Any) -> Answer:
        return await self.ask(number, "GET", f"/{BUCKET}/{key}", **how)

    async def put(self, number: int, key: str, content: bytes, **how: Any) -> Answer:
        return await self.ask(number, "PUT", f"/{BUCKET}/{key}", body=content, **how)

    async def learn(self) -> None:
        """Let the nodes know the bucket: the first write to it goes through."""
        for number, client in enumerate(self.clients):
            await self.put(number, f"first{number}", b"x")
            await client.learn_honoured()

    async def flush(self, number: int) -> None:
        """Until the bucket has all that a node has, and the registry knows."""
        client = self.clients[number]
        await client.flush()

    def is_pending(self, number: int, key: str) -> bool:
        buffer = self.nodes[number].gateway.buffer
        return buffer is not None and buffer.pending(ObjectKey(BUCKET, key)) is not None


@asynccontextmanager
async def writing_nodes(
    directory: Path,
    count: int = 2,
    *,
    slots: Sequence[Slot] = (),
    writeback: bool = True,
    asks_all: bool = False,
    clock: Clock | None = None,
    **options: Any,
) -> AsyncIterator[WritingNodes]:
    """`asks_all`: there is no registry, and nodes ask each other. `options` are of `gateway_app`."""
    clock = clock or SystemClock()
    origin = MemoryOrigin(clock)
    origin.create_bucket(BUCKET)
    slots = slots or [writing_slot()]
    shared, direct = SharedRegistry(), dict[tuple[int, int], DirectPeer]()
    nodes, of_flush = list[PeerGateway](), list[dict[str, Any]]()
    async with AsyncExitStack() as stack:
        for number in range(count):
            own = {"origin": origin, "slots": slots, "writeback": writeback, "clock": clock, **options}
            opened = peer_gateway(directory / str(number), **own)
            nodes.append(await stack.enter_async_context(opened))
        members = [Member(f"n{number}", f"n{number}:9002", store=_store(nodes[number])) for number in range(count)]
        for number, node in enumerate(nodes):
            services = node.gateway.app.services

            def connect(address: str, number: int = number) -> Any:
                asked = int(address[1:].partition(":")[0])
                return direct.setdefault((number, asked), DirectPeer(lambda: nodes[asked].app))

            peers = Peers(connect, [SECRET], clock)
            view = View(members, members[number].address, "", clock)
            stores = PeerStores(peers, partial(_same, view), MEMORY_HOME)
            memory = MemoryRegistry(shared, _store(node))
            registry: Registry = AskAll(stores, _asks) if asks_all else memory
            services.cluster_writes = ClusterWrites(registry, stores, services.catalog, services.slots, clock)
            switched = SwitchedRegistry(memory, AskAll(stores, _asks))
            earlier = ManifestFiles(EarlierWrites(switched, stores, services.slots))
            of_flush.append({"settled": memory.settled, "manifests": earlier})
        found = WritingNodes(origin, shared, nodes, direct)
        for node, more in zip(nodes if writeback else (), of_flush, strict=False):
            client = Client(node.gateway, **more)
            await stack.enter_async_context(client.running())
            found.clients.append(client)
        yield found


def _same(view: View) -> View:
    return view


def _asks(slot: AnySlot) -> bool:
    return slot.asks_other_nodes


def _store(node: PeerGateway) -> str:
    return node.gateway.buffer.node_id if node.gateway.buffer is not None else ""
