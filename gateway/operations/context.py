"""What every operation is given, the request and the parts of the gateway that it may combine, and what it gives back.

Among those parts is the room that request bodies may take in one worker's memory, shared out by turns (`Buffers`). A
body that is received whole is small, but a slow client takes as long over it as its rate allows, and there may be
thousands. So each has room before any of it is read. No credential takes more than what it leaves free: one alone gets
half, two get a third each, and whoever comes next always finds some. What finds none waits a little, in order; those
who wait are served by turns, a credential at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from gateway.blocks.cache import BlockCache
from gateway.blocks.disabled_cache import Blocks
from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.core.errors import S3Error
from gateway.core.model import BodyStream, Homes, MissReason, ObjectKey, PinnedFileSpan
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog, ObjectHead
from gateway.metadata.snapshots.registry import SnapshotRegistry
from gateway.operations.warm_up_queue import WarmUpQueue
from gateway.origin.client import KeyPair, Origin
from gateway.policy.remembered_rights import RememberedRights
from gateway.policy.slots import Grant, Slot, Slots
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import NO_HEADERS, EncodedHeaders
from gateway.s3.requests import S3Request
from gateway.s3.signature_v4 import SeedSignature
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.checkpoints.reads import CheckpointReads, counted_file

Sink = Callable[[memoryview], None]
"""Takes the next bytes of a body, which are good only during the call. Runs on threads, never two calls at once."""


class RequestBody(Protocol):
    """The bytes of a request body as they were on the wire, HTTP framing taken off."""

    @property
    def length_bytes(self) -> int | None:
        """The Content-Length; None when the body came in HTTP chunks."""

    async def read(self) -> bytes:
        """The next bytes, however many have arrived; `b""` once the body is complete.

        Raises S3Error `RequestTimeout` when nothing, or too little, arrives in time, and ClientDisconnected when the
        client leaves before the end.
        """

    async def receive(self, sink: Sink) -> None:
        """Hand all the rest of the body to `sink`, in order, on threads.

        Raises as `read`, and what the sink raises, which ends the receiving; then nothing more can be read. When the
        caller is cancelled, no call of the sink is under way any more once this has raised.
        """


class NoBody:
    """The body of a request that is known to have none."""

    length_bytes = 0
    complete = True
    received_bytes = 0

    async def read(self) -> bytes:
        return b""

    async def receive(self, sink: Sink) -> None:
        return

    def pace(self, _limits: object) -> None:
        """There is nothing to pace."""


NO_BODY = NoBody()

CacheLabel: TypeAlias = Literal["hit", "partial", "miss", "bypass", "forwarded", "absorbed"]
"""Where an answer came from; `absorbed`: from the write-back buffer, or it acknowledges what lies there now."""


class Closable(Protocol):
    """Something that a streamed body holds on to: a connection to the origin, open block files."""

    async def aclose(self) -> None:
        """Give it back. Idempotent."""


@dataclass(slots=True)
class Response:
    """An HTTP answer. Whoever receives one calls `aclose` in the end.

    `headers` are lower-case (name, value) pairs, values latin-1 decoded; the edge adds date, server, request ids and
    the content length of a body in memory. `encoded` are more of them, as they go onto the wire. `length_bytes` is the
    content length that the body does not tell: a HEAD's, or a streamed body's, which else brings its own
    `content-length` header, or is sent in HTTP chunks. A body that lies in a file whole can be given as its
    `PinnedFileSpan`. `cache` becomes the `x-forebay-cache` header. `resource` is closed after the body: a stream that
    was never started could not give it back by itself. `on_failure` is told why the body could not be sent to its end,
    unless the client left. `reason` goes with a `cache` that says "miss" or "partial". `error_code`: S3's, of a failure
    that the gateway has put into words.
    """

    status: int
    headers: Sequence[tuple[str, str]] = field(default_factory=list)
    body: bytes | memoryview | PinnedFileSpan | BodyStream = b""
    cache: CacheLabel | None = None
    resource: Closable | None = None
    encoded: EncodedHeaders = NO_HEADERS
    on_failure: Callable[[Exception], None] | None = None
    length_bytes: int | None = None
    reason: MissReason | None = None
    error_code: str | None = None

    def failed(self, error: Exception) -> None:
        """The body broke off."""
        if self.on_failure is not None:
            self.on_failure(error)

    def close_now(self) -> bool:
        """As `aclose`, where nothing has to be waited for; False where something has."""
        if isinstance(self.body, PinnedFileSpan):
            self.body.close()
        elif not isinstance(self.body, (bytes, memoryview)):
            return False
        return self.resource is None

    async def aclose(self) -> None:
        """Give back all that the body holds, sent or not."""
        if isinstance(self.body, PinnedFileSpan):
            self.body.close()
        elif not isinstance(self.body, (bytes, memoryview)):
            await self.body.aclose()
        if self.resource is not None:
            await self.resource.aclose()


Answer: TypeAlias = Response | Coroutine[Any, Any, Response]
"""What a handler returns: the response itself where nothing had to be waited for, else who brings it."""


BUFFERED_SIZE_BYTES_MAX_TOTAL = 64 * 1024**2

WAIT_SECONDS_MAX = 5.0
"""Clients wait a minute for an answer: most of that is left for what they asked for."""

_GATEWAY = ""
"""Whose room it is where the gateway itself receives something: no access key id is empty."""


@dataclass(slots=True, eq=False)
class _Waiter:
    size_bytes: int
    has_room: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Buffers:
    """The room of one worker. Event loop only."""

    def __init__(self, size_bytes_max: int = BUFFERED_SIZE_BYTES_MAX_TOTAL) -> None:
        self._size_bytes_max = size_bytes_max
        self._of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self.held_bytes = 0

    @asynccontextmanager
    async def room(self, credential: str, size_bytes: int, clock: Clock) -> AsyncIterator[None]:
        """Room for one body of a credential's, as long as this lasts; S3Error SlowDown when it takes too long.

        ClientDisconnected when the client leaves meanwhile.
        """
        if self._waiting or not self._fits(credential, size_bytes):
            await self._wait(credential, size_bytes, clock)
        else:
            self._take(credential, size_bytes)
        try:
            yield
        finally:
            self._give_back(credential, size_bytes)

    @contextmanager
    def holding(self) -> Iterator[Held]:
        """Room for something that the gateway itself receives; what it has taken is given back at the end."""
        held = Held(self)
        try:
            yield held
        finally:
            self._give_back(_GATEWAY, held.size_bytes)

    def take(self, size_bytes: int) -> None:
        """Count more bytes that the gateway receives; S3Error SlowDown when there are too many."""
        if not self._fits(_GATEWAY, size_bytes):
            raise _too_many()
        self._take(_GATEWAY, size_bytes)

    def _fits(self, credential: str, size_bytes: int) -> bool:
        return self._of[credential] + size_bytes <= self._size_bytes_max - self.held_bytes

    def _take(self, credential: str, size_bytes: int) -> None:
        self._of[credential] += size_bytes
        self.held_bytes += size_bytes

    def _give_back(self, credential: str, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._of[credential] -= size_bytes
        if not self._of[credential]:
            del self._of[credential]
        self._serve()

    async def _wait(self, credential: str, size_bytes: int, clock: Clock) -> None:
        waiter = _Waiter(size_bytes)
        self._waiting.setdefault(credential, deque()).append(waiter)
        self._serve()
        if waiter.has_room.done():
            return
        pause = asyncio.ensure_future(clock.sleep(WAIT_SECONDS_MAX))
        try:
            with cancellation.turn():
                await asyncio.wait((waiter.has_room, pause), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            if waiter.has_room.done():
                self._give_back(credential, size_bytes)
            raise
        finally:
            pause.cancel()
            self._leave(credential, waiter)
        if not waiter.has_room.done():
            raise _too_many()

    def _leave(self, credential: str, waiter: _Waiter) -> None:
        queue = self._waiting.get(credential)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[credential]
            self._serve()  # one behind it may fit

    def _serve(self) -> None:
        """Give room by turns: one body of each credential that waits, until none of those in front fits."""
        passed = 0
        while passed < len(self._waiting):
            credential, queue = next(iter(self._waiting.items()))
            if not self._fits(credential, queue[0].size_bytes):
                self._waiting.move_to_end(credential)
                passed += 1
                continue
            waiter, passed = queue.popleft(), 0
            if queue:
                self._waiting.move_to_end(credential)
            else:
                del self._waiting[credential]
            self._take(credential, waiter.size_bytes)
            waiter.has_room.set_result(None)


class Held:
    """What the gateway itself receives takes."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.size_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """As `Buffers.take`."""
        self._buffers.take(size_bytes)
        self.size_bytes += size_bytes


def _too_many() -> S3Error:
    return s3_error("SlowDown", "Too many request bodies are arriving at once. Please reduce your request rate.")


@dataclass(eq=False, slots=True)
class AppContext:
    """The parts of one S3 worker, built by the composition root. `writeback` comes later where the first slot that
    writes back does."""

    origin: Origin
    catalog: Catalog
    answers: BucketMetadataCache
    blocks: Blocks
    slots: Slots
    clock: Clock
    buffers: Buffers = field(default_factory=Buffers)
    snapshots: SnapshotRegistry = field(default_factory=SnapshotRegistry.switched_off)
    writeback: WritebackBuffer | None = None
    homes: Homes = field(default_factory=lambda: Homes(""))
    """Where buckets are: no request may name two that are not at one home."""

    reads: CheckpointReads | None = None
    """Counts what is sent of checkpoints' files; None: nobody does."""

    buffer_closed: bool = False
    """There may be acknowledged writes on this node's disk, and it cannot be used."""

    rights: RememberedRights = field(init=False)
    """What the origin has said of callers."""

    warm_ups: WarmUpQueue | None = field(init=False)
    """What is fetched in the background because clients have asked; None: there is no cache."""

    def __post_init__(self) -> None:
        self.rights = RememberedRights(self.clock)
        self.warm_ups = None
        if isinstance(self.blocks, BlockCache):
            self.warm_ups = WarmUpQueue(self.blocks, self.catalog, self.clock, self._is_pending)

    def _is_pending(self, key: ObjectKey) -> bool:
        return self.writeback is not None and self.writeback.pending(key) is not None

    async def close(self) -> None:
        """End what goes on in the background. Before the parts are closed."""
        if self.warm_ups is not None:
            await self.warm_ups.close()


class Told(NamedTuple):
    """What the origin has said of an object, or why it has not, to a request that began then (`time.perf_counter`)."""

    outcome: ObjectHead | Exception | None
    began: float


@dataclass(slots=True)
class RequestContext:
    """One authenticated request on its way to an answer.

    `seed` is the signature that signed chunks of the body build on; None for unsigned and SigV2 requests. `anonymous`
    requests carried no signature at all (and were let in by configuration). `slot` is the one that the request's key
    belongs to, or its bucket where it names no key, or the prefix that it lists. `credential` is the access key id, by
    which what is scarce is shared out. `not_absorbed` is why a write goes through where the slot writes back: it
    becomes the `x-forebay-not-absorbed` header of whatever is answered. `made_of` are the ETags of the parts that a
    CompleteMultipartUpload lists, once it is read. `named_keys` are the keys that a
    DeleteObjects names. `told` is what the origin has said already, since the request came,
    of the object that it reads: good for one answer.

    `pair` is the caller's own key pair; None: it has the gateway's, or none. `signed_by` is that pair where the
    request is about a slot with `authorization = "origin"`: what is forwarded then goes in the caller's own name.
    `may_read`: the origin has said that the caller may read the object (origin_rights.py).
    """

    services: AppContext
    request: S3Request
    body: RequestBody
    grant: Grant
    seed: SeedSignature | None
    slot: Slot
    anonymous: bool = False
    credential: str = "anonymous"
    not_absorbed: str | None = None
    made_of: Sequence[str] = ()
    named_keys: Sequence[str] = ()
    told: Told | None = None
    pair: KeyPair | None = None
    signed_by: KeyPair | None = None
    may_read: bool = False

    def begin_reading(self) -> bytes | None:
        """The object's bytes are about to be sent: what they count for, of a checkpoint (`CheckpointReads`), until they
        `end`; None: nothing."""
        reads = self.services.reads
        file = counted_file(self.object_key, self.slot) if reads is not None else None
        if reads is not None and file is not None:
            reads.begin(file)
        return file

    @property
    def object_key(self) -> ObjectKey:
        """The object that the request is about."""
        if self.request.bucket is None or self.request.key is None:
            raise s3_error("InvalidRequest", "This operation needs a bucket and a key.")
        return ObjectKey(self.request.bucket, self.request.key)
