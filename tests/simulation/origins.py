"""One origin, as a node and others use it: how it understands requests, and what goes wrong with it."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from random import Random

from gateway.core.clock import Clock
from gateway.core.errors import OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.origin.stores.listing import parameter
from gateway.s3.headers import format_http_date, is_of_parts, md5s_etag, sendable
from tests.simulation.dialects import Conditions, Dialect
from tests.simulation.processes import Killed, Process
from tests.simulation.traffic import Sent, Traffic
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import Answer
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import Bucket, StoredObject

_CONDITIONS = ("if-match", "if-none-match")
_ERRORS = {"503": (503, "SlowDown"), "500": (500, "InternalError")}
_ERROR_DOCUMENT = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"

OTHERS = "others"
"""Who writes past the node."""

DENIED = "denied/"
"""Under this prefix everything but a look is refused, for ever: a policy that nobody mends."""

PROBES = ".forebay/"
"""Under this prefix a node may try what its bucket is like, and leaves nothing."""

BYTES_PER_SECOND = 1_000_000.0
"""Of all connections of the node together, which share it piece by piece."""

PIECE_BYTES = 32 * 1024

SILENT_SECONDS = 8.0
"""After so long a silent origin is taken for a dead one, as the gateway's own client does."""

CORRUPTED_MAX = 3


@dataclass(frozen=True, slots=True)
class Change:
    """What has become of a key at the origin: `by` a process of the node, or others."""

    at: float
    key: str
    before: StoredObject | None
    after: StoredObject | None
    by: str


OF_A_CLIENT: contextvars.ContextVar[bool] = contextvars.ContextVar("of_a_client", default=False)
"""Whether an upload that is begun is the client's own, of which the node keeps nothing."""


class _WatchedBucket(Bucket):
    """Tells of each change of an object, when it is made."""

    __slots__ = ("made", "on_change")

    on_change: Callable[[str, StoredObject | None, StoredObject | None], None]
    made: Callable[[StoredObject], StoredObject]

    def put(self, stored: StoredObject) -> None:
        stored = self.made(stored)
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


class _Line:
    """What all bodies go over, in turns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at = 0.0

    async def send(self, size_bytes: int) -> None:
        self._free_at = max(self._clock.monotonic(), self._free_at) + size_bytes / BYTES_PER_SECOND
        await asyncio.sleep(self._free_at - self._clock.monotonic())


@dataclass
class SimulatedOrigin:
    """One S3. `clock` is its own, and right."""

    dialect: Dialect
    clock: Clock
    dice: Random
    on_change: Callable[[str, Change], None]
    traffic: Traffic
    trouble: Trouble | None = None
    refused: set[str] = field(default_factory=set)
    """Buckets in which everything is 403."""

    is_opaque: bool = False
    failed_inside_at: float = -1.0
    """When it has answered InternalError the last time."""

    def __post_init__(self) -> None:
        self.inner = MemoryOrigin(self.clock)
        self.is_opaque = self.dialect.opaque_etags
        self._late: set[asyncio.Task[MemoryResponse]] = set()
        self._line = _Line(self.clock)
        self._numbers = 0
        self.spoiled: dict[bytes, bytes] = {}
        """What has become of objects on its disks, and what was sent."""

        self._of_clients: set[str] = set()
        self.versions: dict[ObjectKey, list[tuple[float, str | None]]] = defaultdict(lambda: [(0.0, None)])
        """The ETags that each key has had, and since when; None: no object."""

    def create_bucket(self, name: str) -> None:
        bucket = _WatchedBucket(name, self.clock.now())
        bucket.on_change = lambda key, before, after: self._changed(name, key, before, after)
        bucket.made = self._made
        bucket.is_kms = self.dialect.local_etags and self.dialect.opaque_etags
        self.inner.buckets[name] = bucket

    def current(self, bucket: str, key: str) -> StoredObject | None:
        return self.inner.buckets[bucket].objects.get(key)

    def data(self, bucket: str, key: str) -> bytes | None:
        stored = self.current(bucket, key)
        return None if stored is None else stored.content.read(0, stored.size_bytes)

    def write_as_others(self, bucket: str, key: str, data: bytes | None, begun_seconds: float | None = None) -> None:
        """Past the node; in parts, and dated by the beginning of the upload so long ago, where that is said."""
        if data is None:
            self.inner.buckets[bucket].remove(key)
            return
        md5 = hashlib.md5(data, usedforsecurity=False)
        etag, at = f'"{md5.hexdigest()}"', self.clock.now()
        if begun_seconds is not None:
            etag, at = md5s_etag([md5.digest()]), at - begun_seconds
        self.inner.buckets[bucket].put(StoredObject(key, BytesContent(data), etag, at))

    def forget_uploads(self) -> None:
        """As a lifecycle rule for incomplete uploads does, or an operator."""
        self.traffic.uploads_forgotten()
        for bucket in self.inner.buckets.values():
            bucket.uploads.clear()

    def has_upload(self, bucket: str, upload_id: str) -> bool:
        return upload_id in self.inner.buckets[bucket].uploads

    def uploads(self) -> list[tuple[str, str, str, bool]]:
        """Bucket, key and id of those that are open; whether a client has begun it, of which the node keeps nothing."""
        buckets = self.inner.buckets.items()
        return [
            (bucket, one.key, name, name in self._of_clients)
            for bucket, of in buckets
            for name, one in of.uploads.items()
        ]

    def probes(self) -> int:
        """What is left of a node's trials."""
        buckets = self.inner.buckets.values()
        keys = [key for bucket in buckets for key in bucket.objects]
        if self.dialect.lists_uploads:  # else one whose beginning nobody has heard of cannot be found
            keys += [key for _, key, _, _ in self.uploads()]
        return sum(key.startswith(PROBES) for key in keys)

    def of(self, process: Process) -> ProcessOrigin:
        """As one process reaches it."""
        return ProcessOrigin(self, process)

    async def settle(self) -> None:
        """What was on its way has arrived."""
        while self._late:
            await asyncio.wait(self._late)

    # A request on its way

    async def carry(self, request: OriginRequest, sent: Sent) -> MemoryResponse:
        request = self._metered(request, sent)
        await self._travel(request.bucket)
        is_lost = self._refuse_or_lose(request)
        before = {name for *_, name, _ in self.uploads()}
        response = self._impossible(request) or await self.inner.send(self._as_understood(request))
        if self.dialect.hides_absence and request.method == "HEAD" and request.key and response.status == 404:
            response = self._refusal(request, 403, "AccessDenied")
        response = self._told(request, response)
        if OF_A_CLIENT.get():
            self._of_clients |= {name for *_, name, _ in self.uploads()} - before
        if is_lost:
            raise OriginUnreachable("the origin's answer was lost")
        await self._travel(request.bucket)
        return response

    def _metered(self, request: OriginRequest, sent: Sent) -> OriginRequest:
        """A body takes its time, and is counted as far as it was sent."""
        if isinstance(request.body, StreamedBody):
            return replace(request, body=replace(request.body, chunks=self._slowly(request.body.chunks, sent)))
        sent.sent_bytes = len(request.body)
        return request

    async def _slowly(self, chunks: AsyncIterator[bytes | memoryview], sent: Sent) -> AsyncIterator[bytes | memoryview]:
        async for chunk in chunks:
            for position in range(0, len(chunk), PIECE_BYTES):
                piece = chunk[position : position + PIECE_BYTES]
                await self._line.send(len(piece))
                self.traffic.piece(sent, len(piece), self.clock.monotonic())
                yield piece

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
        return None if code is None else self._refusal(request, *code)

    def _refusal(self, request: OriginRequest, status: int, code: str, body: bytes | None = None) -> MemoryResponse:
        refusal = self.inner.refusal(Answer(status, code, body=body))
        size_bytes = refusal.content.size_bytes
        told = {"content-length": str(size_bytes), "date": format_http_date(self.clock.now())}
        refusal.headers = {**refusal.headers, **told}
        refusal.with_body = request.method != "HEAD"
        return refusal

    def _refusal_of(self, request: OriginRequest) -> tuple[int, str] | None:
        trouble = self.trouble
        if trouble is not None and request.bucket in trouble.buckets and trouble.kind in _ERRORS:
            if trouble.kind == "500":
                self.failed_inside_at = self.clock.monotonic()
            return _ERRORS[trouble.kind]
        is_denied = (request.key or "").startswith(DENIED) and request.method not in ("GET", "HEAD")
        if request.bucket in self.refused or is_denied:
            return 403, "AccessDenied"
        is_unknown = not self.dialect.lists_uploads and _is_list_of_uploads(request)
        policy = self._policy(request)
        is_refused = policy == "refused" or (policy == "creates" and "if-match" in request.headers)
        if is_unknown or (_conditions_of(request) and is_refused):
            return 501, "NotImplemented"
        return None

    def _as_understood(self, request: OriginRequest) -> OriginRequest:
        policy = self._policy(request)
        if policy in ("honoured", "creates") or not _conditions_of(request):
            return request
        if policy == "unquoted":
            bare = {name: NEVER if name == "if-match" else value for name, value in request.headers.items()}
            return replace(request, headers=bare)
        left = {name: value for name, value in request.headers.items() if name not in _CONDITIONS}
        return replace(request, headers=left)

    def _policy(self, request: OriginRequest) -> Conditions:
        if request.method == "PUT":
            return self.dialect.on_put
        return self.dialect.on_complete if request.method == "POST" else self.dialect.on_delete

    def _told(self, request: OriginRequest, response: MemoryResponse) -> MemoryResponse:
        """What it has made has the ETag that it has. A Complete may be carried out, and a failure told behind a 200."""
        if response.status != 200 or request.key is None:
            return response
        if self.dialect.opaque_etags and parameter(request, "uploads") is not None:  # as S3's directory buckets
            response.headers = {**response.headers, "x-amz-server-side-encryption": "AES256"}
        is_complete = request.method == "POST" and parameter(request, "uploadId") is not None
        trouble = self.trouble
        if is_complete and trouble is not None and trouble.kind == "errors in 200" and self.dice.random() < 0.7:
            self.failed_inside_at = self.clock.monotonic()
            return self._refusal(request, 200, "InternalError", _ERROR_DOCUMENT)
        stored = self.current(request.bucket or "", request.key)
        if stored is None:
            return response
        if request.method == "PUT" and "etag" in response.headers and not request.query:
            response.headers = {**response.headers, "etag": stored.etag}
        elif is_complete:
            body = response.content.read(0, response.content.size_bytes).decode()
            before, found, rest = body.partition("<ETag>")
            if found:
                body = before + "<ETag>" + stored.etag.replace('"', "&quot;") + rest[rest.index("</ETag>") :]
            response.content = BytesContent(body.encode())
            response.headers = {**response.headers, "content-length": str(len(body))}
        return response

    def _made(self, stored: StoredObject) -> StoredObject:
        """What becomes of an object on its way to the origin's disks; a client can tell of what it sends through."""
        may_rot = self.dialect.corrupts and SENDER.get() == "background" and len(self.spoiled) < CORRUPTED_MAX
        if may_rot and stored.size_bytes and self.dice.random() < 0.03:
            sent = stored.content.read(0, stored.size_bytes)
            data = bytearray(sent)
            data[len(data) // 2] ^= 1
            self.spoiled[bytes(data)] = sent
            etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
            stored = replace(stored, content=BytesContent(bytes(data)), etag=etag)
        if not self.is_opaque and not (self.dialect.own_multipart_etags and is_of_parts(stored.etag)):
            return stored
        self._numbers += 1
        _, dash, count = stored.etag.strip('"').partition("-")  # with SSE-KMS, too, S3 says of how many parts it is
        return replace(stored, etag=f'"{self._numbers:032x}{dash}{count}"')

    def _changed(self, bucket: str, key: str, before: StoredObject | None, after: StoredObject | None) -> None:
        process = SENDER.get()
        change = Change(self.clock.monotonic(), key, before, after, process or OTHERS)
        self.versions[ObjectKey(bucket, key)].append((change.at, after.etag if after is not None else None))
        self.on_change(bucket, change)


NEVER = '"no ETag has its quotes"'


def _conditions_of(request: OriginRequest) -> list[str]:
    is_write = request.method in ("PUT", "POST", "DELETE")
    return [name for name in request.headers if name in _CONDITIONS] if is_write else []


def _is_list_of_uploads(request: OriginRequest) -> bool:
    return request.method == "GET" and request.key is None and parameter(request, "uploads") is not None


SENDER: contextvars.ContextVar[str | None] = contextvars.ContextVar("sender", default=None)


class ProcessOrigin:
    """`Origin` as one process has it. What it has sent may arrive when it is dead."""

    def __init__(self, shared: SimulatedOrigin, process: Process) -> None:
        self._shared = shared
        self._process = process

    async def send(self, request: OriginRequest) -> MemoryResponse:
        self._process.operation()
        request = replace(request, headers=dict(sendable(request.headers)))  # as the client of the gateway does
        sent = self._shared.traffic.begin(_sent(request, self._process, self._shared.clock.monotonic()))
        if isinstance(request.body, StreamedBody):
            request = replace(request, body=replace(request.body, chunks=self._chunks(request.body.chunks)))
        context = contextvars.copy_context()
        context.run(SENDER.set, self._process.name)
        carried = asyncio.get_running_loop().create_task(self._shared.carry(request, sent), context=context)
        self._shared._late.add(carried)
        carried.add_done_callback(self._done)
        try:
            response = await asyncio.shield(carried)
        except asyncio.CancelledError:
            if self._shared.dice.random() < 0.5 or isinstance(request.body, StreamedBody):  # whose bytes stay away
                carried.cancel()
            raise
        finally:
            self._shared.traffic.over(sent)
        self._process.operation()
        self._shared.traffic.answered(sent, response.status, self._shared.clock.monotonic())
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


def _sent(request: OriginRequest, process: Process, now: float) -> Sent:
    size_bytes = request.body.length_bytes or 0 if isinstance(request.body, StreamedBody) else len(request.body)
    return Sent(
        process,
        request.method,
        request.bucket or "",
        request.key or "",
        now,
        size_bytes,
        request.headers.get("content-md5"),
        parameter(request, "uploadId"),
    )
