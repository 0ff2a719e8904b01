"""One node: workers that serve S3, a background process that flushes, and what they share on its disk."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

from gateway.app.write_back import Flushing, FlushServices
from gateway.blocks.cache import PassthroughCache
from gateway.core.clock import Moment
from gateway.core.errors import StoreUnavailable
from gateway.core.model import ObjectKey
from gateway.edge import asgi
from gateway.edge.access import Authenticator, ConfiguredKeyring
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog, SeenVersion
from gateway.operations.context import AppContext
from gateway.policy import slots as policy
from gateway.policy.slots import Prefix, Slots
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import State
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.opening import recover
from tests.simulation.disk import SimulatedDisk
from tests.simulation.origins import SimulatedOrigin
from tests.simulation.processes import CURRENT, Killed, Process
from tests.simulation.virtual_time import NumberedTask, VirtualClock
from tests.support.asgi import Answer, call

BACKGROUND = -1


@dataclass(frozen=True, slots=True)
class Kept:
    """What a node has of writes that are not over, by bucket and key; its open uploads, those in doubt, of which
    others may be another writer's, its files, the buckets whose writes it absorbs."""

    pending: frozenset[tuple[str, str]] = frozenset()
    conflicts: frozenset[tuple[str, str]] = frozenset()
    open_uploads: int = 0
    in_doubt: int = 0
    perhaps_others: int = 0
    files: int = 0
    known: frozenset[str] = frozenset()
    local: frozenset[tuple[str, str]] = frozenset()
    """Of what is pending, what is not to be sent."""


NOTHING_KEPT = Kept()
REMEMBERED_SECONDS = 60.0
"""The `metadata_ttl` of slots that are `ttl`."""

_EVERYWHERE = Prefix.parse("s3://")
_MANY = 10_000


def _absorbs(tx: JournalTransaction, bucket: str, *, with_local_etags: bool) -> bool:
    capabilities = tx.buckets.capabilities(bucket)
    if capabilities is None or not capabilities.may_look:
        return False
    return with_local_etags or capabilities.foretells(of_parts=False)


class _NoBlocks(PassthroughCache):
    """No block cache: what is flushed is not kept."""

    def keep_free(self, _: Callable[[], int]) -> None:
        """Nothing is taken."""

    async def ingest(self, *_: Any, **__: Any) -> bool:
        raise StoreUnavailable("this node keeps no blocks")

    async def keep_only(self, prefixes: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
        return {}, dict.fromkeys(prefixes, "this node keeps no blocks")


class StaleCatalog(Catalog):
    """Remembers nothing for readers, and for writes whatever a key has had within the slot's bound, or longer ago.

    A real one forgets more: all that this node has written since.
    """

    versions: SimulatedOrigin
    dice: Random

    def last_seen(self, key: ObjectKey, slot: policy.Slot) -> SeenVersion:
        now, versions = self.versions.clock.monotonic(), self.versions.versions[key]
        if slot.consistency == "strict" or self.dice.random() < 0.2:
            return SeenVersion(None, is_current=False)
        ended = [at for at, _ in versions[1:]] + [now]
        fresh = [etag for (_, etag), until in zip(versions, ended, strict=True) if now - until < REMEMBERED_SECONDS]
        if self.dice.random() < 0.8:
            return SeenVersion(self.dice.choice(fresh), is_current=True)
        return SeenVersion(self.dice.choice(versions)[1], is_current=False)


class BodyThreads:
    """In the place of the threads that take bodies: at once, as they come."""

    async def run(self, stop: Callable[[], None], drain: Callable[[], None]) -> None:
        drain()


class Node:
    """Its processes come and go; its disk stays."""

    def __init__(
        self,
        disk: SimulatedDisk,
        origin: SimulatedOrigin,
        slots: Sequence[policy.Slot],
        clock: VirtualClock,
        dice: Random,
        directory: Path | None = None,
    ) -> None:
        """`directory`: where its buffer lies, if others have theirs on the same disk."""
        self.directory = directory or disk.root
        self.disk = disk
        self.slots = Slots(slots)
        self.clock = clock
        self._origin = origin
        self._dice = dice
        self._processes: dict[int, Process] = {}
        """That serve; a new one when it has begun."""
        self._all: list[Process] = []
        self._apps: dict[int, asgi.S3App] = {}
        self._buffers: dict[int, WritebackBuffer] = {}
        self.tasks: dict[Process, set[asyncio.Task[Any]]] = {}
        self._running: asyncio.Task[None] | None = None
        self._bounded = [slot for slot in slots if slot.write == "back"]

    # Processes

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the tasks of each process be known."""

        def make(
            running: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], *, context: Any = None, **more: Any
        ) -> asyncio.Task[Any]:
            task = NumberedTask(coro, loop=running, context=context, **more)
            process = CURRENT.get() if context is None else context.get(CURRENT)
            if process is not None:
                tasks = self.tasks.setdefault(process, set())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            return task

        loop.set_task_factory(cast(Any, make))
        loop.set_exception_handler(lambda _, __: None)  # of processes that were killed; what matters, invariants see

    def alive(self, number: int) -> bool:
        process = self._processes.get(number)
        return process is not None and process.alive

    async def start(self, workers: int) -> None:
        """All of it, as after a boot."""
        await self._as(Process("supervisor"), self._recover())
        for number in range(workers):
            await self.start_worker(number)
        await self.start_background()

    async def _recover(self) -> None:
        recover(self.directory, Moment.of(self.clock))

    async def start_worker(self, number: int) -> None:
        process = self._new(number)

        async def begin() -> None:
            buffer = await WritebackBuffer.open(self.directory, number, self._bounded, clock=self.clock)
            origin = self._origin.of(process)
            catalog = StaleCatalog(origin, None, self.clock)
            catalog.versions, catalog.dice = self._origin, self._dice
            answers = BucketMetadataCache(self.directory.with_name("answers"), catalog.listing.moment, ttl_seconds=0)
            blocks = _NoBlocks.without_directory(origin, self.clock)
            services = AppContext(origin, catalog, answers, blocks, self.slots, self.clock, writeback=buffer)
            authenticator = Authenticator(ConfiguredKeyring([]), self.clock, allow_unsigned=True)
            self._apps[number] = asgi.S3App(services, authenticator, (), "feedfacefeedface")
            self._buffers[number] = buffer

        await self._as(process, begin())
        self._processes[number] = process

    async def start_background(self) -> None:
        process = self._new(BACKGROUND)

        async def begin() -> None:
            buffer = await WritebackBuffer.open(self.directory, 99, self._bounded, clock=self.clock)
            origin = self._origin.of(process)
            around = FlushServices(
                origin,
                Catalog.switched_off(origin, self.clock),
                cast(Any, _NoBlocks.without_directory(origin, self.clock)),
                self.slots,
                self.clock,
            )
            flushing = Flushing(buffer, CheckpointQueries(self.directory), around)
            self._buffers[BACKGROUND] = buffer
            self._running = asyncio.create_task(flushing.run())

        await self._as(process, begin())
        self._processes[BACKGROUND] = process

    def kill(self, number: int) -> None:
        self._processes[number].kill()

    def kill_all(self) -> None:
        for process in self._all:
            process.kill()

    async def write_tombstone(self) -> None:
        """What the dead have left in this process's memory is gone."""
        for _ in range(100):
            dead = [task for process, tasks in self.tasks.items() if not process.alive for task in tasks]
            if not dead:
                break
            for task in dead:
                task.cancel()
            await asyncio.wait(dead, timeout=0.001)
        for process in [one for one in self.tasks if not one.alive]:
            del self.tasks[process]

    async def cut_power(self, workers: int) -> None:
        self.kill_all()
        await self.write_tombstone()
        gc.collect()
        self.disk.all_dead()
        self.disk.cut_power(self._dice)
        await self.start(workers)

    # Requests

    async def ask(
        self, number: int, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer | None:
        """None: the worker was killed over it."""
        process = self._processes[number]
        asking = call(self._apps[number], method, target, headers or {}, body, sign=False)
        try:
            answer: Answer = await self._as(process, asking)
        except (Killed, asyncio.CancelledError):
            if process.alive:
                raise
            return None
        return answer if process.alive else None  # what the dead have on their lips nobody hears

    # What it keeps, seen by nobody: no process dies of it

    def kept(self) -> Kept:
        """Nothing where nobody lives who could say."""

        def look(tx: JournalTransaction) -> Kept:
            waiting = tx.writes.waiting(0, _MANY)
            return Kept(
                frozenset((one.key.bucket, one.key.key) for one in waiting),
                frozenset((one.key.bucket, one.key.key) for one in waiting if one.state is State.CONFLICT),
                tx.counts()[1],
                tx.uploads.aborting_count(),
                len(tx.uploads.aborting()) - tx.uploads.aborting_count(),
                sum(1 for _ in self.directory.glob("staged/*/*")),
                frozenset(
                    name
                    for name in self._origin.inner.buckets
                    if _absorbs(tx, name, with_local_etags=self._origin.dialect.local_etags)
                ),
                frozenset((one.key.bucket, one.key.key) for one in waiting if one.state is State.LOCAL),
            )

        number = next((one for one in sorted(self._buffers) if self.alive(one)), None)
        if number is None:
            return NOTHING_KEPT
        process = self._processes[number]
        dies_in, process.dies_in = process.dies_in, None
        try:
            return self._buffers[number].look(look)
        finally:
            process.dies_in = dies_in

    async def shown(self) -> Mapping[tuple[str, str], int]:
        """How many parts of what is pending the origin has, as people are told."""
        queries = CheckpointQueries(self.directory)
        try:
            page = await queries.page(_EVERYWHERE, ("", "", 0), _MANY)
        finally:
            queries.close()
        return {(one.bucket, one.key): one.parts_sent for one in page if one.parts > 1}

    async def _as(self, process: Process, coro: Coroutine[Any, Any, Any]) -> Any:
        context = contextvars.copy_context()
        context.run(CURRENT.set, process)
        return await asyncio.get_running_loop().create_task(coro, context=context)

    def _new(self, number: int) -> Process:
        name = "background" if number == BACKGROUND else f"worker{number}"
        process = Process(name)
        process.on_kill = lambda dead: self._origin.traffic.killed(dead, self.clock.monotonic())
        self._all = [one for one in self._all if one.alive] + [process]
        return process

    def dies_in(self, number: int, operations: int) -> None:
        """Have a process be killed at one of its next operations."""
        self._processes[number].dies_in = operations
