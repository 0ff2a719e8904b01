"""One node of a cluster: its worker with S3 port and peer port, its look at the members, and its disk."""

from __future__ import annotations

import asyncio
import contextvars
import shutil
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import orjson

from gateway.blocks.cache import BlockCache, PassthroughCache
from gateway.blocks.layout import BlockSettings
from gateway.cluster.cluster_origin import ClusterOrigin, ClusterRoles
from gateway.cluster.hello import Hello
from gateway.cluster.members import VIEW, Member, Members
from gateway.cluster.peers import Peers
from gateway.cluster.polling import Membership, Polling
from gateway.core.errors import OriginUnreachable
from gateway.core.model import Homes, ObjectKey
from gateway.edge.access import Authenticator, ConfiguredKeyring
from gateway.edge.asgi import S3App
from gateway.edge.peer_access import PeerAccess
from gateway.edge.peer_port import PeerApp
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog
from gateway.metadata.store import DiskThread
from gateway.operations.context import AppContext
from gateway.origin.client import OriginRequest, begin_read_of
from gateway.policy.slots import Slots
from gateway.shared.seen_nonces import SeenNonces
from tests.simulation.cluster.wires import NAME, SECRET, PeerClient, Wires
from tests.simulation.origins import SENDER
from tests.simulation.virtual_time import NumberedTask, VirtualClock, VirtualThreads, _pending
from tests.support.asgi import Answer, call
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse

HOMES = Homes("memory")
FALLBACK_REQUESTS = 3
OF_NODE: contextvars.ContextVar[ClusterNode | None] = contextvars.ContextVar("node", default=None)


class NodeClock(VirtualClock):
    """A machine's own: its wall clock may be wrong, its monotonic one began some time, and it may be stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, skew_seconds: float, booted_seconds: float) -> None:
        super().__init__(loop, skew_seconds)
        self._booted_seconds = booted_seconds
        self.runs = asyncio.Event()
        self.runs.set()

    def monotonic(self) -> float:
        return super().monotonic() + self._booted_seconds

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        await self.runs.wait()


class NodeThreads(VirtualThreads):
    """They end with their node, whatever they were about to do."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        node = OF_NODE.get()
        if node is not None:
            node.threads.append(self)

    def drop(self) -> None:
        for number in self._own:
            _pending.pop(number, None)


class VirtualDiskThread(DiskThread):
    """In the place of the catalog's thread."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._threads = NodeThreads()

    def submit(self, work: Any, *arguments: Any, **keywords: Any) -> asyncio.Future[Any]:
        self._submitted += 1
        future = self._threads.submit(work, *arguments, **keywords)
        future.add_done_callback(lambda _: self._ended())
        result = asyncio.wrap_future(future)
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.shield(result)

    async def close(self, seconds_max: float) -> bool:
        self._threads.shutdown()
        return True


@dataclass(eq=False)
class Bucket:
    """The bucket as one node reaches it. `on_answer` is told of each answer about an object."""

    node: ClusterNode
    inner: MemoryOrigin
    dice: Random
    on_answer: Any
    is_cut: bool = False

    async def send(self, request: OriginRequest) -> MemoryResponse:
        begun = self.node.wires.now()
        await self._travel()
        response = await self._sent(request)
        if request.key:
            self.on_answer(self.node, request, response, begun)
        await self._travel()
        return response

    async def _sent(self, request: OriginRequest) -> MemoryResponse:
        before = SENDER.set(self.node.address)
        try:
            return await self.inner.send(request)
        finally:
            SENDER.reset(before)

    async def _travel(self) -> None:
        await asyncio.sleep(0.005 + 0.1 * self.dice.random() ** 3)
        await self.node.awake()
        if self.is_cut:
            raise OriginUnreachable("connection refused")

    async def aclose(self) -> None:
        return


@dataclass(eq=False)
class ClusterNode:
    """It may be killed, stopped and started again; its directory stays."""

    address: str
    directory: Path
    slots: Slots
    clock: NodeClock
    wires: Wires
    inner: MemoryOrigin
    dice: Random
    on_answer: Any
    listed: list[str]
    block_bytes: int
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    threads: list[NodeThreads] = field(default_factory=list)
    app: PeerApp | None = None
    has_directory: bool = True
    busy_until: float = -1.0
    """Until then, it asks other nodes to come again."""

    troubled_at: float = -1.0
    """When something of its own went wrong the last time."""

    def __post_init__(self) -> None:
        self.bucket = Bucket(self, self.inner, self.dice, self.on_answer)
        self.wires.nodes[self.address] = self

    @property
    def is_busy(self) -> bool:
        return self.wires.now() < self.busy_until

    def alive(self) -> bool:
        return self.app is not None

    def member_for_seconds(self) -> float:
        return self.clock.monotonic() - self.polling._membership.since

    async def awake(self) -> None:
        await self.clock.runs.wait()

    async def working(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something as this node, to its death at most."""
        context = contextvars.copy_context()
        context.run(OF_NODE.set, self)
        task = asyncio.get_running_loop().create_task(work, context=context)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def start(self, member_for_seconds: float = 0.0) -> None:
        """Start it, at its first start as one that has been a member for so long."""
        note = self.directory / "cluster.json"
        if member_for_seconds and not note.exists():
            now = self.clock.now()
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_bytes(orjson.dumps({"cluster": NAME, "seen": now, "since": now - member_for_seconds}))
        await self.working(self._start())

    async def _start(self) -> None:
        shared = self.directory / "shared"
        shutil.rmtree(shared, ignore_errors=True)
        shared.mkdir(parents=True)
        self.peers = Peers(cast(Any, self._connect), (SECRET,), self.clock)
        first = [Member(one, one) for one in self.listed]
        self.members = Members(shared / VIEW, first, self.address, "", self.clock, self.peers.is_away)
        settings = BlockSettings(
            self.directory / "blocks", 256 * 1024**2, self.block_bytes, access_flush_seconds=30.0, slots=self.slots,
            small_object_bytes_max=64 * 1024, shared_directory=shared, homes=HOMES, has_one_worker=True, fills_max=3,
        )  # fmt: skip
        self.origin = ClusterOrigin(
            self.bucket, self.peers, lambda: self.members.view, settings.block_size_of, HOMES, self.clock,
            FALLBACK_REQUESTS,
        )  # fmt: skip
        roles = ClusterRoles(lambda: self.members.view)
        blocks: PassthroughCache
        if self.has_directory:
            blocks = await BlockCache.open(settings, self.origin, worker=0, clock=self.clock, roles=roles)
            catalog = await Catalog.open(
                self.directory / "catalog", self.origin, homes=HOMES, clock=self.clock, slots=self.slots, roles=roles
            )
        else:
            blocks = PassthroughCache.without_directory(self.origin, self.clock)
            catalog = Catalog.switched_off(self.origin, self.clock)
        self.blocks, self.catalog = blocks, catalog
        answers = BucketMetadataCache(self.directory / "answers", catalog.listing.moment, ttl_seconds=0)
        begin = begin_read_of(self.origin)
        services = AppContext(
            self.origin, catalog, answers, blocks, self.slots, self.clock, homes=HOMES, begin_read=begin, roles=roles,
            hello=self._hello,
        )  # fmt: skip
        self.services, self.nonces = services, SeenNonces(shared / "peer-nonces")
        self.s3 = S3App(
            services, Authenticator(ConfiguredKeyring([]), self.clock, allow_unsigned=True), (), "feedfacefeedface"
        )
        membership = Membership(self.directory / "cluster.json", NAME, self.clock)
        self.polling = Polling(
            ["listed"], self._own, membership, shared / VIEW, self.clock, self.peers.hello, resolve=self._resolve
        )
        self.background = [asyncio.create_task(one) for one in (self.polling.run(), self.members.follow())]
        self.app = PeerApp(services, PeerAccess(self.nonces, self.clock, NAME, (SECRET,), self.address))

    def _connect(self, address: str) -> PeerClient:
        return PeerClient(self.wires, self, address, self.clock)

    def _own(self) -> Member:
        return Member(self.address, self.address, caches=self.has_directory)

    def _hello(self) -> bytes:
        me = self.members.view.me
        age_seconds = max(0.0, self.clock.monotonic() - me.since) if me is not None and me.since is not None else 0.0
        told = Hello(
            name=self.address, address=self.address, version="1", caches=self.has_directory,
            age_seconds=age_seconds, at=self.clock.now(),
        )  # fmt: skip
        return told.content()

    async def _resolve(self, _: Any) -> list[str]:
        return list(self.listed)

    async def kill(self) -> None:
        """As kill -9: nothing is written down any more."""
        self.app = None
        self.clock.runs.set()
        for _ in range(100):
            left = [one for one in self.tasks if not one.done()]
            if not left:
                break
            for one in left:
                one.cancel()
            await asyncio.wait(left, timeout=0.001)
        self.nonces.close()
        for pool in self.threads:
            pool.drop()
        self.threads.clear()
        if isinstance(self.blocks, BlockCache):
            parts = self.blocks._dependencies
            parts.open_files.close()
            parts.watcher.close()
            parts.opened.let_go()
        if self.catalog._opened is not None:
            self.catalog._opened.close()

    async def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answer | None:
        """None: the node was killed over it."""
        await self.awake()
        if not self.alive():
            return None
        try:
            asking = call(self.s3, method, path, headers, body, sign=False, by_client=False)
            answer: Answer = await self.working(asking)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return None
        await self.awake()
        return answer

    def held(self) -> list[str]:
        """What it holds that nobody waits for in quiet."""
        found = [f"{self.origin._ration._value} of the ration"] * (self.origin._ration._value != FALLBACK_REQUESTS)
        found += [f"doubts: {self.peers._in_background}"] * bool(self.peers._in_background)
        if isinstance(self.blocks, BlockCache):
            parts = self.blocks._dependencies
            fetches, unpinned = parts.fetches, parts.unpinned_gets
            turns = [fetches._own.turns, fetches._copies.turns, unpinned.turns, unpinned.turns_of_copies]
            found += [f"{one._value} turns" for one in turns if one._value != 3]
            found += [f"fetches: {one}" for one in (fetches._fetches, fetches._tasks, fetches._inline) if one]
            found += [f"locks: {parts.locks._held}"] * bool(parts.locks._held)
        found += [f"{one.get_name()} has ended" for one in self.background if one.done()]
        if self.app is not None:
            found += [f"sending {one}" for one, of in self.app.reads.handouts._of.items() if of.count]
        return found

    def names_of_tasks(self) -> set[str]:
        return {one.get_name() for one in self.tasks if not one.get_name().startswith("Task-")}

    async def evict(self, key: ObjectKey) -> None:
        """As if others had taken the room of its blocks."""
        await self.working(self.blocks.invalidate(key))


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Have the tasks of each node be known, and come in the same order in every replay."""

    def make(
        running: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], *, context: Any = None, **more: Any
    ) -> asyncio.Task[Any]:
        task = NumberedTask(coro, loop=running, context=context, **more)
        node = OF_NODE.get() if context is None else context.get(OF_NODE)
        if node is not None:
            node.tasks.add(task)
            task.add_done_callback(node.tasks.discard)
        return task

    loop.set_task_factory(cast(Any, make))
    loop.set_exception_handler(lambda _, __: None)
