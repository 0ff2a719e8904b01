"""An S3 client of a gateway with a write-back buffer, in this process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.clock import SystemClock
from gateway.objects import ObjectKey
from gateway.operations.absorbing.publishing import Publisher
from gateway.policy.slots import Prefix, Slot
from gateway.s3.xml import text_of
from gateway.writeback.flushing.flush import OneFlush, Tools
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.flusher import Flusher
from gateway.writeback.flushing.lost_completions import FIRST_LOOK_SECONDS, LostCompletions
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.records import PendingObject, State, Waiting
from tests.support.asgi import Answer as Got
from tests.support.asgi import call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.writeback import key

SLOTS = [Slot("back", Prefix.parse("s3://bucket/back/"), write="back")]
PART_BYTES = 5 * 1024 * 1024


class _SomeSecondsLater(SystemClock):
    """When it is looked for what nobody has heard of."""

    def now(self) -> float:
        return super().now() + FIRST_LOOK_SECONDS


class Silent:
    """A flush that nobody watches, but for conflicts, where none is expected, and damages: there must be none."""

    def __init__(self, *, conflicts: bool = False) -> None:
        self._conflicts = conflicts

    def settled(self, pending: PendingObject) -> None:
        """As it should be."""

    def failing(self, pending: PendingObject, failures: int, reason: str) -> None:
        print(f"{pending.key}: {reason}")

    def goes_on(self, pending: PendingObject) -> None:
        """Nothing to be done."""

    def conflict(self, pending: PendingObject) -> None:
        assert self._conflicts, f"{pending.key} is a conflict"

    def damaged(self, pending: PendingObject, reason: str) -> None:
        raise AssertionError(reason)


class Client:
    """An S3 client of a gateway with a write-back buffer."""

    def __init__(self, gateway: GatewayApp) -> None:
        assert gateway.buffer is not None
        self.gateway, self.origin, self.buffer = gateway, gateway.origin, gateway.buffer

    async def ask(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None, status: int = 200
    ) -> Got:
        answer = await call(self.gateway.app, method, f"/bucket/{target}", headers, body)
        assert answer.status == status, answer.body
        return answer

    async def learn(self) -> None:
        """Make the bucket known: the first write to it goes through."""
        await self.ask("PUT", "back/first", b"x")

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

    def pending(self, name: str) -> PendingObject | None:
        return self.buffer.pending(key(name))

    @asynccontextmanager
    async def flushing(self, *, conflicts: bool = False) -> AsyncIterator[None]:
        """With the other process that flushes."""
        flusher = Flusher(self._tools(conflicts=conflicts), self.gateway.app.services.clock)
        running = asyncio.create_task(flusher.run())
        try:
            yield
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def flush_one(self, at: ObjectKey) -> None:
        """Until the origin has what is pending under a key."""
        while (first := self.buffer.look(lambda book: book.earliest(at))) is not None:
            await OneFlush(self._tools(), self.gateway.app.services.clock, random.Random(1), lambda: None).run(
                first.sequence
            )

    async def flush_until_conflict(self, name: str) -> None:
        """Until it is known that somebody else has written the key."""
        while (first := self.buffer.look(lambda book: book.earliest(key(name)))) is not None:
            if first.state is State.CONFLICT:
                return
            flush = OneFlush(
                self._tools(conflicts=True), self.gateway.app.services.clock, random.Random(1), lambda: None
            )
            await flush.run(first.sequence)
        raise AssertionError(f"{name} is no conflict")

    async def find_lost_completions(self) -> None:
        """What the process that flushes finds out some seconds later."""
        tools = self._tools()
        await LostCompletions(tools.journal, tools.requests, tools.publication, _SomeSecondsLater()).look()

    def _tools(self, *, conflicts: bool = False) -> Tools:
        requests = FlushRequests(self.origin, self.buffer.staging, self.buffer.threads)
        slots = self.gateway.app.services.slots
        publisher = Publisher(self.gateway.catalog, self.gateway.blocks, slots, self.buffer.staging)
        return Tools(self.buffer.journal, requests, publisher, Silent(conflicts=conflicts))

    async def flush(self) -> None:
        """Until the origin has everything, and this node nothing."""
        async with self.flushing():
            await eventually(self._is_empty)

    async def flush_objects(self) -> None:
        """Until the origin has every object; uploads may be open."""
        async with self.flushing():
            await eventually(lambda: self.buffer.look(lambda book: book.counts()[0]) == 0)

    async def flush_startable(self) -> None:
        """Until all that is left are conflicts, and uploads."""
        async with self.flushing(conflicts=True):
            await eventually(lambda: not self.buffer.look(_startable))

    def _is_empty(self) -> bool:
        left = self.buffer.look(lambda book: (*book.counts(), len(book.orphan_ids(1))))
        return left == (0, 0, 0) and not list(self.buffer.staging.names())


def _startable(book: Book) -> list[Waiting]:
    """What waits neither for a person nor for something that does."""
    found = [one for slot in book.slots() for one in (*book.urgent(slot, 0, 1000), *book.startable(slot, 0, 1000))]
    return [one for one in found if book.first_sequence(one.key) == one.sequence]


def with_client(
    path: Path,
    scenario: Callable[[Client], Coroutine[Any, Any, None]],
    slots: Sequence[Slot] = tuple(SLOTS),
    **options: Any,
) -> None:
    async def run() -> None:
        async with gateway_app(path, slots=slots, writeback=True, **options) as gateway:
            await scenario(Client(gateway))

    asyncio.run(run())


async def eventually(reached: Callable[[], bool]) -> None:
    """Other tasks and threads come to it, within seconds."""
    for _ in range(2000):
        if reached():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to it")
