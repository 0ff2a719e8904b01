"""An S3 client of a gateway with a write-back buffer, in this process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.core.clock import Clock, SystemClock
from gateway.core.model import ObjectKey
from gateway.operations.writeback.cache_promotion import CachePromoter
from gateway.policy.slots import Prefix
from gateway.s3.xml import text_of
from gateway.telemetry.metrics import FailureKind
from gateway.writeback.flushing.flush_logger import FlushLogger
from gateway.writeback.flushing.flush_task import FlushDependencies
from gateway.writeback.flushing.reconciler import Reconciler
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.journal.buckets import Conditions, Honoured
from gateway.writeback.journal.records import Priority, State, Write
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.turns import Due
from tests.support.asgi import Answer as Got
from tests.support.asgi import call
from tests.support.gateway_app import AsyncTest, GatewayApp, gateway_app, within
from tests.support.slots import Slot
from tests.support.waiting import until
from tests.support.writeback import key

SLOTS = [Slot("back", Prefix.parse("s3://bucket/back/"), write="back")]
PART_BYTES = 5 * 1024 * 1024


TIMES_AS_QUICK = 10


class _Ahead(SystemClock):
    """Some time later, when it is looked for what nobody has heard of; a pause between two looks is a tenth as long."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = 0.0

    def now(self) -> float:
        return self._clock.now() + self.seconds

    def monotonic(self) -> float:
        return self._clock.monotonic() + self.seconds

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds / TIMES_AS_QUICK)


class _Impatient(random.Random):
    """Lets pauses before another attempt, which are its shares of the longest, be a tenth as long."""

    def uniform(self, a: float, b: float) -> float:
        share = super().uniform(a, b)
        return share / TIMES_AS_QUICK if (a, b) == (0.5, 1.0) else share


class _Gated(Reconciler):
    """That carries out what clients wait for, and the rest when it is told to."""

    flushes = False

    def _chosen(
        self, tx: JournalTransaction, name: tuple[str, str], lane: Any, priority: Priority, now: float, room: int
    ) -> Sequence[Due]:
        if self.flushes or any(_is_waited_for(tx, one) for one in tx.turns.due(name, priority, now, 1000)):
            return super()._chosen(tx, name, lane, priority, now, room)
        return ()

    async def _take_up(self, slot: str, lane: Any, priority: Priority, due: Due) -> None:
        if not self.flushes and not self._journal.read(lambda tx: _is_waited_for(tx, due)):
            await self._clock.sleep(0.01)
            lane.end(priority, due.id)
            self._tasks.pop(due.id, None)
            return
        await super()._take_up(slot, lane, priority, due)


def _is_waited_for(tx: JournalTransaction, due: Due) -> bool:
    write = tx.writes.get(due.id)
    return write is not None and write.is_completed_at_origin and write.answer is None


class Silent(FlushLogger):
    """Refuses conflicts, damages and expiries that the test does not expect."""

    conflicts = False
    damages = False
    expiries = False

    def failing(self, write: Write, failures: int, reason: str, kind: FailureKind) -> None:
        print(f"{write.key}: {reason}")

    def conflict(self, write: Write, reason: str) -> None:
        assert self.conflicts, f"{write.key} is a conflict"

    def damaged(self, write_id: int, name: str, slot: str, reason: str) -> None:
        assert self.damages, reason

    def expired(self, write: Write, reason: str) -> None:
        assert self.expiries, f"{write.key}: {reason}"


class Client:
    """An S3 client of a gateway with a write-back buffer."""

    def __init__(self, gateway: GatewayApp, **of_flush: Any) -> None:
        """`of_flush`: as in `FlushDependencies`."""
        assert gateway.buffer is not None
        self.gateway, self.origin, self.buffer = gateway, gateway.origin, gateway.buffer
        slots = gateway.app.services.slots
        self._clock = _Ahead(gateway.app.services.clock)
        self._observer = Silent(self._clock)
        requests = Requests(self.origin, self.buffer.staging, self.buffer.threads, self._clock)
        publisher = CachePromoter(gateway.catalog, gateway.blocks, slots, self.buffer.staging)
        orders = {slot.name: slot for slot in slots}
        observed = (self._observer, self._clock)
        tools = FlushDependencies(self.buffer.journal, requests, publisher, *observed, orders, **of_flush)
        self.reconciler = _Gated(tools, _Impatient(1))
        self._running: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """With the other process, which carries out what clients wait for."""
        self._running = asyncio.create_task(self.reconciler.run())
        try:
            yield
            assert not self._running.done()
        finally:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def ask(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None, status: int = 200
    ) -> Got:
        answer = await call(self.gateway.app, method, f"/bucket/{target}", headers, body)
        assert answer.status == status, answer.body
        return answer

    async def learn(self) -> None:
        """Make the bucket known: the first write to it goes through."""
        await self.ask("PUT", "back/first", b"x")
        await self.learn_honoured()

    async def learn_honoured(self) -> None:
        """The bucket, which has taken a write, honours conditions."""
        honoured = Conditions(Honoured.YES, Honoured.YES, Honoured.YES, self.gateway.app.services.clock.now())
        capabilities = self.buffer.look(lambda tx: tx.buckets.capabilities("bucket"))
        if capabilities is not None:
            known = replace(capabilities, conditions=honoured)
            await self.buffer.journal.change(lambda tx: tx.buckets.learn("bucket", known))

    async def learn_storage_class(self, name: str) -> None:
        """The bucket has taken such an object."""
        known = self.buffer.look(lambda tx: tx.buckets.capabilities("bucket"))
        assert known is not None
        told = replace(known, accepted=frozenset({("x-amz-storage-class", name)}))
        await self.buffer.journal.change(lambda tx: tx.buckets.learn("bucket", told))

    async def create(self, name: str, headers: Mapping[str, str] | None = None) -> str:
        answer = await self.ask("POST", f"{name}?uploads", headers=headers)
        return text_of(answer.body, "UploadId") or ""

    async def part(self, name: str, upload_id: str, number: int, body: bytes, **headers: str) -> str:
        target = f"{name}?partNumber={number}&uploadId={upload_id}"
        answer = await self.ask("PUT", target, body, {n.replace("_", "-"): v for n, v in headers.items()})
        return answer.headers["etag"]

    async def complete(
        self,
        name: str,
        upload_id: str,
        etags: Mapping[int, str],
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> Got:
        parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>" for n, etag in etags.items())
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        return await self.ask("POST", f"{name}?uploadId={upload_id}", body, headers, status)

    def pending(self, name: str) -> Write | None:
        return self.buffer.pending(key(name))

    @asynccontextmanager
    async def flushing(
        self, *, conflicts: bool = False, damages: bool = False, expiries: bool = False, ahead_seconds: float = 0.0
    ) -> AsyncIterator[None]:
        """With the other process flushing."""
        self._observer.conflicts, self._observer.damages, self._observer.expiries = conflicts, damages, expiries
        self._clock.seconds, self.reconciler.flushes = ahead_seconds, True
        self.reconciler.prioritise(Prefix(""))
        try:
            yield
        finally:
            self.reconciler.flushes = False
            await self.reconciler.drain()
            self._observer.conflicts = self._observer.damages = self._observer.expiries = False
            self._clock.seconds = 0.0

    async def flush_one(self, at: ObjectKey) -> None:
        """Until the origin has what is pending under a key."""
        async with self.flushing():
            await until(lambda: self.buffer.look(lambda tx: tx.writes.earliest(at)) is None)

    async def flush_until_conflict(self, name: str) -> None:
        """Until it is known that somebody else has written the key."""
        async with self.flushing(conflicts=True):
            await until(lambda: self.buffer.look(lambda tx: _is_conflict(tx, name)))

    async def find_lost_completions(self) -> None:
        """What the process that flushes finds out some seconds later."""
        async with self.flushing(ahead_seconds=10.0):
            await until(lambda: not self.buffer.look(lambda tx: _are_due(tx, self._clock.now())))

    async def flush(self) -> None:
        """Until the origin has everything, and this node nothing."""
        async with self.flushing():
            await until(self._is_empty)

    async def flush_objects(self) -> None:
        """Until the origin has every object; uploads may be open."""
        async with self.flushing():
            await until(lambda: self.buffer.look(lambda tx: tx.counts()[0]) == 0)

    async def flush_startable(self) -> None:
        """Until all that is left are conflicts, and uploads."""
        async with self.flushing(conflicts=True):
            await until(lambda: not self.buffer.look(_are_due))

    def _is_empty(self) -> bool:
        """Uploads that may be another writer's do not count: the gateway leaves them alone for half a day."""
        left = self.buffer.look(
            lambda tx: (
                *tx.counts(),
                sum(one.origin_upload_id is not None and one.asked is None for one in tx.uploads.aborting()),
            )
        )
        return left == (0, 0, 0) and not list(self.buffer.staging.names())


def _is_conflict(tx: JournalTransaction, name: str) -> bool:
    first = tx.writes.earliest(key(name))
    assert first is not None, f"{name} is no conflict"
    return first.state is State.CONFLICT


def _are_due(tx: JournalTransaction, until: float = 2.0**40) -> bool:
    """Whether anything is to be done that waits neither for a person nor for something that does."""
    return any(
        tx.turns.due(lane, priority, until, 1)
        for lane in tx.turns.lanes()
        for priority in Priority
        if priority not in (Priority.UPLOAD, Priority.ABORT)
    )


@asynccontextmanager
async def a_client(path: Path, slots: Sequence[Slot] = tuple(SLOTS), **options: Any) -> AsyncIterator[Client]:
    async with gateway_app(path, slots=slots, writeback=True, **options) as gateway:
        client = Client(gateway)
        async with client.running():
            yield client


def with_client(
    path: Path,
    scenario: Callable[[Client], Coroutine[Any, Any, None]],
    slots: Sequence[Slot] = tuple(SLOTS),
    **options: Any,
) -> None:
    async def run() -> None:
        async with a_client(path, slots, **options) as client:
            await scenario(client)

    asyncio.run(run())


def with_a_client(slots: Sequence[Slot] = tuple(SLOTS), **options: Any) -> Callable[[AsyncTest], Any]:
    """Make a test of an async function that begins with a client; the arguments are those of `with_client`."""
    return within(a_client, slots=slots, **options)
