"""One node of a cluster that writes: the single node's processes, with peer port, registry, and a real catalog."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from gateway.app.registry import MEMBERS, InRedis, beating, members_on_disk
from gateway.app.write_back import Flushing, FlushServices
from gateway.cluster.belief import Belief, SharedBelief
from gateway.cluster.earlier_writes import EarlierWrites
from gateway.cluster.members import VIEW, Member, Members, view_document
from gateway.cluster.peers import Peers
from gateway.cluster.redis_link import RedisLink, RedisPlace
from gateway.cluster.redis_registry import RedisRegistry
from gateway.cluster.registry_beats import RegistryBeats, member_of
from gateway.cluster.stores import AskAll, PeerStores
from gateway.cluster.switched_registry import SwitchedRegistry
from gateway.core.errors import OriginUnreachable
from gateway.core.model import Homes
from gateway.disk.atomic_write import write_durably
from gateway.edge import asgi
from gateway.edge.access import Authenticator, ConfiguredKeyring
from gateway.edge.peer_access import PeerAccess
from gateway.edge.peer_port import PeerApp
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog
from gateway.metadata.entries import InvalidationEpochs
from gateway.metadata.opening import OpenCatalog, open_directory
from gateway.metadata.store import DiskThread
from gateway.operations.cluster_writes import ClusterWrites
from gateway.operations.context import AppContext
from gateway.origin.client import OriginRequest
from gateway.policy.registry import BOUND_SECONDS_MAX
from gateway.shared.heartbeats import BACKGROUND_PROCESS
from gateway.shared.seen_nonces import SeenNonces
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import Write
from tests.simulation.cluster.node import NodeClock
from tests.simulation.cluster.wires import NAME, SECRET, PeerClient, Wires
from tests.simulation.disk import SimulatedDisk
from tests.simulation.node import BACKGROUND, Node, _NoBlocks
from tests.simulation.origins import SimulatedOrigin
from tests.simulation.processes import CURRENT, Killed, Process
from tests.simulation.virtual_time import VirtualThreads
from tests.simulation.writing.judge import Question
from tests.support.memory_origin.response import MemoryResponse
from tests.support.slots import Slot

HOMES = Homes("memory")
VIEW_SECONDS = 1.0
_BASE = 200
"""The number of the process that has the catalog's files open: no other one has it."""


class ProcessThreads(VirtualThreads):
    """Their work is not done once their process is dead."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        process = CURRENT.get()

        def work() -> Any:
            if process is not None and not process.alive:
                raise Killed(process.name)
            return fn(*args, **kwargs)

        return super().submit(work)


class ProcessDiskThread(DiskThread):
    """In the place of the catalog's thread."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._threads = ProcessThreads()

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


class WatchedBelief(SharedBelief):
    """Tells when its node begins to believe, or goes on."""

    def __init__(self, path: Path, tell: Callable[[], None]) -> None:
        super().__init__(path)
        self._tell = tell

    def write(self, belief: Belief) -> None:
        super().write(belief)
        self._tell()


class SlowBuffer(WritebackBuffer):
    """Its disk takes as long as its node says, between a claim and the commit."""

    node: WritingNode

    async def acknowledge(self, write: Write) -> Write:
        await self.node.stall()
        return await super().acknowledge(write)

    async def complete(self, made: Write) -> Write | None:
        await self.node.stall()
        return await super().complete(made)

    async def write_tombstone(self, tombstone: Write) -> Write | None:
        await self.node.stall()
        return await super().write_tombstone(tombstone)


class BucketOfNode:
    """The bucket as a process reaches it, unless its node is cut off."""

    def __init__(self, node: WritingNode, process: Process) -> None:
        self._node = node
        self._inner = node._origin.of(process)

    async def send(self, request: OriginRequest) -> MemoryResponse:
        if self._node.is_cut_from_bucket:
            await asyncio.sleep(0.01)
            raise OriginUnreachable("connection refused")
        begun = self._node._origin.clock.monotonic()
        response = await self._inner.send(request)
        if self._node.is_cut_from_bucket:
            raise OriginUnreachable("the connection was reset")
        if request.method in ("GET", "HEAD"):
            is_list = request.key is None
            prefix = next((value for name, value in request.query if name == "prefix"), None)
            self._node.questions.append(Question(begun, (prefix if is_list else request.key) or "", is_list))
        return response

    async def aclose(self) -> None:
        return


class WritingNode(Node):
    """Its home directory stays; what its processes share in memory ends with it."""

    def __init__(
        self,
        address: str,
        home: Path,
        disk: SimulatedDisk,
        origin: SimulatedOrigin,
        slots: Sequence[Slot],
        clock: NodeClock,
        dice: Random,
        wires: Wires,
        workers: int,
        on_belief: Callable[[WritingNode], None],
    ) -> None:
        bounded = [one.believing_at_most(BOUND_SECONDS_MAX) if one.asks_other_nodes else one for one in slots]
        super().__init__(disk, origin, bounded, clock, dice, home / "writeback")
        self.address = address
        self.home = home
        self.workers = workers
        self.is_cut_from_bucket = False
        self.commit_seconds_max = 0.0
        self.beats: RegistryBeats | None = None
        self.questions: list[Question] = []
        self._wires = wires
        self._on_belief = on_belief
        self._shared = home / "shared"
        self._catalog: OpenCatalog | None = None
        self._epochs: list[InvalidationEpochs] = []
        self._ports: dict[int, PeerApp] = {}
        self._belief: SharedBelief | None = None
        self._nonces: SeenNonces | None = None
        home.mkdir(parents=True)
        self.port = Port(self)
        wires.nodes[address] = self.port

    def is_up(self) -> bool:
        return any(self.alive(one) for one in range(self.workers))

    async def stall(self) -> None:
        await asyncio.sleep(self.commit_seconds_max * self._dice.random())

    def belief(self) -> Belief:
        return self._belief.read() if self._belief is not None else Belief()

    def believes(self) -> bool:
        return self.is_up() and self.clock.monotonic() < self.belief().until

    @property
    def store(self) -> str:
        """What it calls its buffer."""
        return next((one.node_id for one in self._buffers.values()), "")

    # Processes

    async def boot(self) -> None:
        """All of it starts, after everything has died."""
        shutil.rmtree(self._shared, ignore_errors=True)
        self._shared.mkdir()
        self._catalog = open_directory(self.home / "catalog", HOMES, process=_BASE, clock=self.clock)
        self._nonces = SeenNonces(self._shared / "peer-nonces")
        self._belief = SharedBelief(self._shared / "registry")
        await self.start(self.workers)

    def spare(self) -> None:
        """Nobody who was to be killed is."""
        for process in self._processes.values():
            process.dies_in = None

    async def kill_node(self) -> None:
        """As kill -9 of all its processes."""
        for number in list(self._processes):
            self.kill(number)
        await self.write_tombstone()
        self.disk.all_dead(self.home)
        for one in self._epochs:
            one.close()
        self._epochs.clear()
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None
        for shared in (self._nonces, self._belief):
            if shared is not None:
                shared.close()
        self._nonces = self._belief = None

    def _catalog_of(self, number: int, origin: Any) -> Catalog:
        assert self._catalog is not None
        epochs = InvalidationEpochs(self._catalog.path / "epochs", number, self.clock)
        self._epochs.append(epochs)
        return Catalog(origin, replace(self._catalog, epochs=epochs), self.clock)

    def _connect(self, address: str) -> PeerClient:
        return PeerClient(self._wires, self.port, address, self.clock)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Its process's tasks are kept until it dies."""
        asyncio.get_running_loop().create_task(work)

    def _own(self) -> Member:
        return Member(self.address, self.address)

    async def _way(self, buffer: WritebackBuffer) -> tuple[InRedis, PeerStores]:
        """A process's way to the registry, and to the other nodes."""
        peers = Peers(
            cast(Any, lambda address: PeerClient(self._wires, self.port, address, self.clock)), (SECRET,), self.clock
        )
        known = await members_on_disk(self.home)
        first = [self._own(), *(one for one in known if one.name != self.address)]
        members = Members(self._shared / VIEW, first, self.address, "", self.clock)
        self._begin(members.follow())
        link = RedisLink(RedisPlace(((self.address, 0),)), "", self.clock, buffer.node_id)
        self._begin(link.run())
        belief = WatchedBelief(self._shared / "registry", lambda: self._on_belief(self))
        registry = RedisRegistry(link, belief.read, lambda: members.view, self.clock)
        return InRedis(link, belief, registry), PeerStores(peers, lambda: members.view, HOMES)

    async def start_worker(self, number: int) -> None:
        process = self._new(number)

        async def begin() -> None:
            buffer = await SlowBuffer.open(self.directory, number, self._bounded, clock=self.clock)
            buffer.node = self
            origin = BucketOfNode(self, process)
            catalog = self._catalog_of(number, origin)
            answers = BucketMetadataCache(self.home / "answers", catalog.listing.moment, ttl_seconds=0)
            blocks = _NoBlocks.without_directory(origin, self.clock)
            services = AppContext(
                origin, catalog, answers, blocks, self.slots, self.clock, writeback=buffer, homes=HOMES
            )
            way, stores = await self._way(buffer)
            services.cluster_writes = ClusterWrites(_registry(way, stores), stores, catalog, self.slots, self.clock)
            authenticator = Authenticator(ConfiguredKeyring([]), self.clock, allow_unsigned=True)
            self._apps[number] = asgi.S3App(services, authenticator, (), "feedfacefeedface")
            assert self._nonces is not None
            self._ports[number] = PeerApp(services, PeerAccess(self._nonces, self.clock, NAME, (SECRET,)))
            self._buffers[number] = buffer

        await self._as(process, begin())
        self._processes[number] = process

    async def start_background(self) -> None:
        process = self._new(BACKGROUND)

        async def begin() -> None:
            buffer = await WritebackBuffer.open(self.directory, 99, self._bounded, clock=self.clock)
            origin = BucketOfNode(self, process)
            catalog = self._catalog_of(BACKGROUND_PROCESS, origin)
            way, stores = await self._way(buffer)
            earlier = EarlierWrites(_registry(way, stores), stores, self.slots)
            blocks = cast(Any, _NoBlocks.without_directory(origin, self.clock))
            self._buffers[BACKGROUND] = buffer
            self._running = asyncio.create_task(
                self._run(buffer, way, FlushServices(origin, catalog, blocks, self.slots, self.clock, others=earlier))
            )

        await self._as(process, begin())
        self._processes[BACKGROUND] = process

    async def _run(self, buffer: WritebackBuffer, way: InRedis, services: FlushServices) -> None:
        live = cast(Any, SimpleNamespace(now=SimpleNamespace(slots=list(self.slots))))
        queries = CheckpointQueries(self.directory)
        file = self.home / MEMBERS
        async with beating(live, way, self._own, services.catalog, buffer, file, self.clock) as beats:
            self.beats = beats
            flushing = Flushing(buffer, queries, replace(services, settled=beats.settle))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(flushing.run())
                tasks.create_task(self._keep_view(beats))

    async def _keep_view(self, beats: RegistryBeats) -> None:
        """As the polling does of what Redis has told."""
        told = beats.listed
        while True:
            if beats.listed is not told:
                told = beats.listed
                known = {name: member_of(name, info) for name, info in told.members.items()}
                members = [known.pop(self.address, self._own()), *known.values()]
                write_durably(self._shared / VIEW, view_document(members, []))
            await self.clock.sleep(VIEW_SECONDS)


def _registry(way: InRedis, stores: PeerStores) -> SwitchedRegistry:
    return SwitchedRegistry(way.registry, AskAll(stores, way.registry.asks))


class Port:
    """The node as others reach it: one of its workers answers."""

    is_busy = False

    def __init__(self, node: WritingNode) -> None:
        self.address = node.address
        self._node = node

    @property
    def _number(self) -> int | None:
        return next((one for one in range(self._node.workers) if self._node.alive(one)), None)

    @property
    def app(self) -> Any:
        return None if self._number is None else self._node._ports[self._number]

    def alive(self) -> bool:
        return self._number is not None

    async def awake(self) -> None:
        """It is never stopped."""

    async def working(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._number is None:
            work.close()
            raise OriginUnreachable("connection refused")
        try:
            return await self._node._as(self._node._processes[self._number], work)
        except Killed:
            raise OriginUnreachable("the connection was reset") from None
