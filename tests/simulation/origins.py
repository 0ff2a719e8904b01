"""Origins that a node may meet: dialects of S3, and what goes wrong with them for a while."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from gateway.clock import Clock
from gateway.errors import OriginUnreachable
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.s3.headers import sendable
from tests.simulation.processes import Killed, Process
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import Answer
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import Bucket, StoredObject

Conditions = Literal["honoured", "ignored", "refused"]
_CONDITIONS = ("if-match", "if-none-match")
_ERRORS = {"503": (503, "SlowDown"), "500": (500, "InternalError")}
OTHERS = "others"
"""Who writes past the node."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What kind of S3 the origin is. Latencies in seconds, one way."""

    name: str
    on_put: Conditions = "honoured"
    on_complete: Conditions = "honoured"
    on_delete: Conditions = "honoured"
    opaque_etags: bool = False
    lists_uploads: bool = True
    forgets_uploads: bool = False
    latency_seconds: tuple[float, float] = (0.001, 0.05)
    outages: tuple[str, ...] = ("unreachable", "503", "silent", "500", "lost answers")


DIALECTS: Mapping[str, Dialect] = {
    one.name: one
    for one in (
        Dialect("aws"),
        Dialect("rgw", on_complete="ignored", on_delete="ignored"),
        Dialect("no-conditions", on_put="refused", on_complete="refused", on_delete="refused"),
        Dialect("ignored-conditions", on_put="ignored", on_complete="ignored", on_delete="ignored"),
        Dialect("opaque-etags", opaque_etags=True),
        Dialect("no-upload-lists", lists_uploads=False),
        Dialect("forgetful", forgets_uploads=True),
        Dialect("slow", latency_seconds=(1.0, 15.0)),
    )
}

BYTES_PER_SECOND = 200_000.0
"""Of one connection, of what is large."""

SILENT_SECONDS = 8.0
"""After so long a silent origin is taken for a dead one, as the gateway's own client does."""


@dataclass(frozen=True, slots=True)
class Change:
    """What has become of a key at the origin: `by` a process of the node, or others."""

    at: float
    key: str
    before: StoredObject | None
    after: StoredObject | None
    by: str


class _WatchedBucket(Bucket):
    """Tells of each change of an object, when it is made."""

    __slots__ = ("on_change", "opaque")

    on_change: Callable[[str, StoredObject | None, StoredObject | None], None]
    opaque: Callable[[StoredObject], StoredObject]

    def put(self, stored: StoredObject) -> None:
        stored = self.opaque(stored)
        before = self.objects.get(stored.key)
        Bucket.put(self, stored)
        self.on_change(stored.key, before, stored)

    def remove(self, key: str) -> None:
        before = self.objects.get(key)
        Bucket.remove(self, key)
        if before is not None:
            self.on_change(key, before, None)


@dataclass
class Trouble:
    """What goes wrong at the moment, for which buckets."""

    kind: str
    buckets: frozenset[str]
    since: float


@dataclass
class SimulatedOrigin:
    """One S3, which all processes of the node and others use."""

    dialect: Dialect
    clock: Clock
    dice: Random
    on_change: Callable[[str, Change], None]
    trouble: Trouble | None = None
    refused: set[str] = field(default_factory=set)
    """Buckets in which everything is 403."""
    sent_bytes: int = 0
    tries: int = 0

    def __post_init__(self) -> None:
        self.inner = MemoryOrigin(self.clock)
        self._late: set[asyncio.Task[MemoryResponse]] = set()
        self._numbers = 0

    def create_bucket(self, name: str) -> None:
        bucket = _WatchedBucket(name, self.clock.now())
        bucket.on_change = lambda key, before, after: self._changed(name, key, before, after)
        bucket.opaque = self._opaque
        self.inner.buckets[name] = bucket

    def current(self, bucket: str, key: str) -> StoredObject | None:
        return self.inner.buckets[bucket].objects.get(key)

    def data(self, bucket: str, key: str) -> bytes | None:
        stored = self.current(bucket, key)
        return None if stored is None else stored.content.read(0, stored.size_bytes)

    def write_as_others(self, bucket: str, key: str, data: bytes | None) -> None:
        """Past the node."""
        if data is None:
            self.inner.buckets[bucket].remove(key)
        else:
            etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
            self.inner.buckets[bucket].put(StoredObject(key, BytesContent(data), etag, self.clock.now()))

    def forget_uploads(self) -> None:
        """As a lifecycle rule for incomplete uploads does, or an operator."""
        for bucket in self.inner.buckets.values():
            bucket.uploads.clear()

    def open_uploads(self) -> int:
        return sum(len(bucket.uploads) for bucket in self.inner.buckets.values())

    def of(self, process: Process) -> ProcessOrigin:
        """As one process reaches it."""
        return ProcessOrigin(self, process)

    async def settle(self) -> None:
        """What was on its way has arrived."""
        while self._late:
            await asyncio.wait(self._late)

    # A request on its way

    async def carry(self, request: OriginRequest) -> MemoryResponse:
        request = self._metered(request)
        await self._travel(request.bucket)
        lost = self._refuse_or_lose(request)
        response = self._impossible(request) or await self.inner.send(self._as_understood(request))
        response = self._told(request, response)
        if lost:
            raise OriginUnreachable("the origin's answer was lost")
        await self._travel(request.bucket)
        return response

    def _metered(self, request: OriginRequest) -> OriginRequest:
        """A body takes its time, and is counted as far as it was sent."""
        if isinstance(request.body, StreamedBody):
            return replace(request, body=replace(request.body, chunks=self._slowly(request.body.chunks)))
        self.sent_bytes += len(request.body)
        return request

    async def _slowly(self, chunks: AsyncIterator[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
        async for chunk in chunks:
            await asyncio.sleep(len(chunk) / BYTES_PER_SECOND)
            self.sent_bytes += len(chunk)
            yield chunk

    async def _travel(self, bucket: str | None) -> None:
        trouble = self.trouble
        low, high = self.dialect.latency_seconds
        await asyncio.sleep(low + (high - low) * self.dice.random() ** 3)
        if trouble is not None and trouble.kind == "silent" and bucket in trouble.buckets and trouble is self.trouble:
            quiet = self.clock.monotonic() - trouble.since
            await asyncio.sleep(SILENT_SECONDS if quiet < SILENT_SECONDS else 0.01)
            raise OriginUnreachable("the origin says nothing")

    def _refuse_or_lose(self, request: OriginRequest) -> bool:
        """Raises where it does not arrive; True where its answer will not."""
        trouble = self.trouble
        if trouble is None or request.bucket not in trouble.buckets:
            return False
        if trouble.kind == "unreachable":
            raise OriginUnreachable("connection refused")
        return trouble.kind == "lost answers" and self.dice.random() < 0.5

    def _impossible(self, request: OriginRequest) -> MemoryResponse | None:
        code = self._refusal_of(request)
        if code is None:
            return None
        refusal = self.inner.refusal(Answer(*code))
        refusal.headers = {**refusal.headers, "content-length": str(refusal.content.size_bytes)}
        refusal.with_body = request.method != "HEAD"
        return refusal

    def _refusal_of(self, request: OriginRequest) -> tuple[int, str] | None:
        trouble = self.trouble
        if trouble is not None and request.bucket in trouble.buckets and trouble.kind in _ERRORS:
            return _ERRORS[trouble.kind]
        if request.bucket in self.refused:
            return 403, "AccessDenied"
        is_unknown = not self.dialect.lists_uploads and _is_list_of_uploads(request)
        if is_unknown or (_conditions_of(request) and self._policy(request) == "refused"):
            return 501, "NotImplemented"
        return None

    def _as_understood(self, request: OriginRequest) -> OriginRequest:
        if self._policy(request) == "honoured" or not _conditions_of(request):
            return request
        left = {name: value for name, value in request.headers.items() if name not in _CONDITIONS}
        return replace(request, headers=left)

    def _policy(self, request: OriginRequest) -> Conditions:
        if request.method == "PUT":
            return self.dialect.on_put
        return self.dialect.on_complete if request.method == "POST" else self.dialect.on_delete

    def _told(self, request: OriginRequest, response: MemoryResponse) -> MemoryResponse:
        """What it has made has the ETag that it has."""
        if not self.dialect.opaque_etags or response.status != 200 or request.key is None:
            return response
        stored = self.current(request.bucket or "", request.key)
        if stored is None:
            return response
        if request.method == "PUT" and "etag" in response.headers and not request.query:
            response.headers = {**response.headers, "etag": stored.etag}
        elif request.method == "POST" and any(name == "uploadId" for name, _ in request.query):
            body = response.content.read(0, response.content.size_bytes).decode()
            before, _, rest = body.partition("<ETag>")
            body = before + "<ETag>" + stored.etag + rest[rest.index("</ETag>") :]
            response.content = BytesContent(body.encode())
            response.headers = {**response.headers, "content-length": str(len(body))}
        return response

    def _opaque(self, stored: StoredObject) -> StoredObject:
        if not self.dialect.opaque_etags:
            return stored
        self._numbers += 1
        return replace(stored, etag=f'"{self._numbers:032x}"')

    def _changed(self, bucket: str, key: str, before: StoredObject | None, after: StoredObject | None) -> None:
        process = SENDER.get()
        change = Change(self.clock.monotonic(), key, before, after, process or OTHERS)
        self.on_change(bucket, change)


def _conditions_of(request: OriginRequest) -> list[str]:
    is_write = request.method in ("PUT", "POST", "DELETE")
    return [name for name in request.headers if name in _CONDITIONS] if is_write else []


def _is_list_of_uploads(request: OriginRequest) -> bool:
    return request.method == "GET" and request.key is None and any(name == "uploads" for name, _ in request.query)


SENDER: contextvars.ContextVar[str | None] = contextvars.ContextVar("sender", default=None)


class ProcessOrigin:
    """`Origin` as one process has it. What it has sent may arrive when it is dead."""

    def __init__(self, shared: SimulatedOrigin, process: Process) -> None:
        self._shared = shared
        self._process = process

    async def send(self, request: OriginRequest) -> MemoryResponse:
        self._process.operation()
        self._shared.tries += 1
        request = replace(request, headers=dict(sendable(request.headers)))  # as the client of the gateway does
        if isinstance(request.body, StreamedBody):
            request = replace(request, body=replace(request.body, chunks=self._chunks(request.body.chunks)))
        context = contextvars.copy_context()
        context.run(SENDER.set, self._process.name)
        carried = asyncio.get_running_loop().create_task(self._shared.carry(request), context=context)
        self._shared._late.add(carried)
        carried.add_done_callback(self._done)
        try:
            response = await asyncio.shield(carried)
        except asyncio.CancelledError:
            if self._shared.dice.random() < 0.5:
                carried.cancel()
            raise
        self._process.operation()
        return response

    async def aclose(self) -> None:
        return

    async def _chunks(self, chunks: AsyncIterator[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
        async for chunk in chunks:
            if not self._process.alive:
                raise OriginUnreachable("the sender is dead")
            yield chunk

    def _done(self, carried: asyncio.Task[MemoryResponse]) -> None:
        self._shared._late.discard(carried)
        if not carried.cancelled():
            error = carried.exception()
            if error is not None and not isinstance(error, (Killed, Exception)):
                raise error
