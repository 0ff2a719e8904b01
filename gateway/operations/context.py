"""The input and output of every operation: the request, the parts of the gateway that it may combine, and the answer.

One of those parts is the room for request bodies in a worker's memory, shared by turns (`BodyBuffers`). A body that is
received whole is small, but a slow client takes as long over it as its rate allows, and there may be thousands. So each
has room before any of it is read. No credential takes more than it leaves free: one alone gets half, two get a third
each, and the next always finds some. Bodies without room wait a little, in order; they are served by turns, a
credential at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import structlog

from gateway.blocks.cache import BlockCache, PassthroughCache
from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.core.errors import (
    BufferUnavailable,
    CredentialsUnavailable,
    OriginAnswered,
    OriginBodyError,
    OriginBusy,
    OriginUnreachable,
    OutcomeUnknown,
    RegistryAway,
    S3Error,
)
from gateway.core.model import BodyStream, Homes, MissReason, ObjectKey, PinnedFileSpan
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog, ObjectHead
from gateway.metadata.snapshots.registry import SnapshotRegistry
from gateway.operations.cluster_writes import ClusterWrites
from gateway.operations.warm_up_queue import WarmUpQueue
from gateway.origin.client import BeginRead, KeyPair, Origin, never_begun
from gateway.origin.peer_protocol import Roles
from gateway.policy.remembered_rights import RememberedRights
from gateway.policy.slots import Grant, Slot, Slots
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import NO_HEADERS, EncodedHeaders, filter_response_headers
from gateway.s3.requests import S3Request
from gateway.s3.signature_v4 import SeedSignature
from gateway.s3.xml import error_code_of, text_of
from gateway.telemetry.logs import RateLimitedLog
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.checkpoints.reads import CheckpointReads, counted_file

if TYPE_CHECKING:
    from gateway.writeback.admin.flush_report import FlushReport

Sink = Callable[[memoryview], None]
"""Takes the next bytes of a body, which are valid only during the call. Runs on threads, one call at a time."""


class ClientBody(Protocol):
    """The bytes of a request body as they were on the wire, without HTTP framing."""

    @property
    def length_bytes(self) -> int | None:
        """Return the Content-Length; None when the body came in HTTP chunks."""

    async def read(self) -> bytes:
        """Return the next bytes, however many have arrived; `b""` once the body is complete.

        Raises S3Error `RequestTimeout` when nothing, or too little, arrives in time, and ClientDisconnected when the
        client leaves before the end.
        """

    async def receive(self, sink: Sink) -> None:
        """Hand all the rest of the body to `sink`, in order, on threads.

        Raises as `read`, and what the sink raises, which ends the receiving; then nothing more can be read. When the
        caller is cancelled, no call of the sink is under way any more once this has raised.
        """


class NoBody:
    """The body of a request that has none."""

    length_bytes = 0
    complete = True
    received_bytes = 0

    async def read(self) -> bytes:
        return b""

    async def receive(self, sink: Sink) -> None:
        return

    def pace(self, _limits: object) -> None:
        """Do nothing: there is no body to pace."""


NO_BODY = NoBody()

CacheLabel: TypeAlias = Literal["hit", "partial", "miss", "peer", "bypass", "forwarded", "absorbed"]
"""The source of an answer; `peer`: other nodes of the cluster, and not the origin; `absorbed`: the write-back buffer,
or the answer acknowledges a write in it."""


class Closable(Protocol):
    """A resource of a streamed body: a connection to the origin, open block files."""

    async def aclose(self) -> None:
        """Release it. Idempotent."""


@dataclass(slots=True)
class Response:
    """An HTTP answer. Its receiver calls `aclose` in the end.

    `headers` are lower-case (name, value) pairs, values latin-1 decoded; the edge adds date, server, request ids and
    the content length of a body in memory. `encoded` are more of them, as they go onto the wire. `length_bytes` is a
    content length that the body does not show: a HEAD's, or a streamed body's, which otherwise has its own
    `content-length` header, or is sent in HTTP chunks. A body that is whole in a file can be its `PinnedFileSpan`.
    `cache` becomes the `x-forebay-cache` header. `resource` is closed after the body: a stream that was never started
    could not release it. `on_failure` gets the error that broke the body off, unless the client left. `reason` goes
    with a `cache` of "miss" or "partial". `error_code` is S3's, for a failure that the gateway has put into words.
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
        if self.on_failure is not None:
            self.on_failure(error)

    def close_now(self) -> bool:
        """Close it like `aclose` if that needs no waiting; otherwise return False."""
        if isinstance(self.body, PinnedFileSpan):
            self.body.close()
        elif not isinstance(self.body, (bytes, memoryview)):
            return False
        return self.resource is None

    async def aclose(self) -> None:
        if isinstance(self.body, PinnedFileSpan):
            self.body.close()
        elif not isinstance(self.body, (bytes, memoryview)):
            await self.body.aclose()
        if self.resource is not None:
            await self.resource.aclose()


def xml_response(document: bytes, cache: CacheLabel | None = None, headers: Sequence[tuple[str, str]] = ()) -> Response:
    return Response(200, [("content-type", "application/xml"), *headers], document, cache)


Answer: TypeAlias = Response | Coroutine[Any, Any, Response]
"""A handler's result: the response itself if nothing had to be waited for, else a coroutine for it."""


async def awaited(answer: Answer) -> Response:
    return answer if isinstance(answer, Response) else await answer


def changed(answer: Answer, change: Callable[[Response], Response]) -> Answer:

    async def later(coming: Coroutine[Any, Any, Response]) -> Response:
        return change(await coming)

    return change(answer) if isinstance(answer, Response) else later(answer)


BUFFERED_SIZE_BYTES_MAX_TOTAL = 64 * 1024**2

WAIT_SECONDS_MAX = 5.0
"""Clients wait a minute for an answer: this leaves most of it for their request."""

_GATEWAY = ""
"""Owns the room for data that the gateway itself receives: no access key id is empty."""


class BodyBuffers:
    """The room of one worker. Event loop only."""

    def __init__(self, size_bytes_max: int = BUFFERED_SIZE_BYTES_MAX_TOTAL) -> None:
        self._size_bytes_max = size_bytes_max
        self._of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        """The bodies that wait, by credential, the next in turn first: the size of each, and its turn."""
        self.held_bytes = 0

    @asynccontextmanager
    async def room(self, credential: str, size_bytes: int, clock: Clock) -> AsyncIterator[None]:
        """Hold room for a credential's body. S3Error SlowDown: too late; ClientDisconnected: the client leaves."""
        if self._waiting or not self._fits(credential, size_bytes):
            await self._wait(credential, size_bytes, clock)
        else:
            self._take(credential, size_bytes)
        try:
            yield
        finally:
            self._give_back(credential, size_bytes)

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Hold room for data that the gateway itself receives until the end; call what is yielded before each piece.

        It counts more bytes, and raises S3Error SlowDown when there are too many.
        """
        held_bytes = 0

        def grow(size_bytes: int) -> None:
            nonlocal held_bytes
            if not self._fits(_GATEWAY, size_bytes):
                raise _too_many()
            self._take(_GATEWAY, size_bytes)
            held_bytes += size_bytes

        try:
            yield grow
        finally:
            self._give_back(_GATEWAY, held_bytes)

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
        has_room = asyncio.get_running_loop().create_future()
        waiter = size_bytes, has_room
        self._waiting.setdefault(credential, deque()).append(waiter)
        self._serve()
        if has_room.done():
            return
        pause = asyncio.ensure_future(clock.sleep(WAIT_SECONDS_MAX))
        try:
            with cancellation.turn():
                await asyncio.wait((has_room, pause), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            if has_room.done():
                self._give_back(credential, size_bytes)
            raise
        finally:
            pause.cancel()
            queue = self._waiting.get(credential, deque())
            if waiter in queue:
                queue.remove(waiter)
                if not queue:
                    del self._waiting[credential]
                self._serve()  # one behind it may fit
        if not has_room.done():
            raise _too_many()

    def _serve(self) -> None:
        """Give room by turns: to one body of each waiting credential, until none of the first ones fits."""
        passed = 0
        while passed < len(self._waiting):
            credential, queue = next(iter(self._waiting.items()))
            if not self._fits(credential, queue[0][0]):
                self._waiting.move_to_end(credential)
                passed += 1
                continue
            (size_bytes, has_room), passed = queue.popleft(), 0
            if queue:
                self._waiting.move_to_end(credential)
            else:
                del self._waiting[credential]
            self._take(credential, size_bytes)
            has_room.set_result(None)


def _too_many() -> S3Error:
    return s3_error("SlowDown", "Too many request bodies are arriving at once. Please reduce your request rate.")


@dataclass(eq=False, slots=True)
class AppContext:
    """The parts of one S3 worker. `writeback` is added later if no slot wrote back at first."""

    origin: Origin
    catalog: Catalog
    answers: BucketMetadataCache
    blocks: PassthroughCache
    slots: Slots
    clock: Clock
    buffers: BodyBuffers = field(default_factory=BodyBuffers)
    snapshots: SnapshotRegistry = field(default_factory=SnapshotRegistry.switched_off)
    writeback: WritebackBuffer | None = None
    homes: Homes = field(default_factory=lambda: Homes(""))
    """The homes of buckets: a request must not name buckets of two homes."""

    begin_read: BeginRead = never_begun
    """Asks the origin what needs no wait."""

    reads_near: Callable[[ObjectKey, str], bool] = lambda key, slot: False
    """Returns True if a replica probably gives the bytes of a key of this slot: then a HEAD asks for the version."""

    check_place: Callable[[ObjectKey], Awaitable[bool]] | None = None
    """Raises S3Error if the key's origin cannot take it; False: it takes any. None: all origins do."""

    reads: CheckpointReads | None = None
    """Counts the bytes sent of checkpoints' files; None: nothing counts them."""

    roles: Roles | None = None
    """Says which objects other nodes look after; None: none."""

    hello: Callable[[], bytes] = bytes
    """Returns this node's word on itself, for the other nodes of its cluster."""

    cluster_writes: ClusterWrites | None = None
    """Knows what other nodes of the cluster have written; None: they write nothing that this node must know."""

    flush_report: Callable[[], FlushReport | None] = lambda: None
    """Returns what tells other nodes of flushes and checkpoints; None: there is no buffer."""

    buffer_closed: bool = False
    """This node's disk may have acknowledged writes, but cannot be used."""

    unanswered: set[asyncio.Task[Any]] = field(default_factory=set)
    """Questions to the origin whose answers come too late to be used (put_object.py)."""

    rights: RememberedRights = field(init=False)
    """The origin's answers about callers' rights."""

    warm_ups: WarmUpQueue | None = field(init=False)
    """Fetches objects in the background at clients' requests; None: there is no cache."""

    def __post_init__(self) -> None:
        self.rights = RememberedRights(self.clock)
        self.warm_ups = None
        if isinstance(self.blocks, BlockCache):
            self.warm_ups = WarmUpQueue(self.blocks, self.catalog, self.clock, self._is_pending)

    def _is_pending(self, key: ObjectKey) -> bool:
        return self.writeback is not None and self.writeback.pending(key) is not None

    async def close(self) -> None:
        """End the background work. Call it before the parts are closed."""
        if self.warm_ups is not None:
            await self.warm_ups.close()
        for asking in self.unanswered:
            asking.cancel()
        await asyncio.gather(*self.unanswered, return_exceptions=True)


class Told(NamedTuple):
    """The origin's answer about an object, or its error, for a request that began then (`time.perf_counter`)."""

    outcome: ObjectHead | Exception | None
    began: float
    question: Callable[[], Any] | None = None
    """Returns, once, the question about version and bytes that the origin was asked already (cold_reads.py)."""


@dataclass(slots=True)
class RequestContext:
    """One authenticated request on its way to an answer.

    `seed` is the signature that signed chunks of the body build on; None for unsigned and SigV2 requests. `anonymous`
    requests had no signature at all (and the configuration allows them). `slot` is that of the request's key, or of its
    bucket if it names no key, or of the prefix that it lists. `credential` is the access key id, for shares of scarce
    resources. `not_absorbed` is why a write goes through although the slot writes back: it becomes the answer's
    `x-forebay-not-absorbed` header. `made_of` are the ETags of the parts that a CompleteMultipartUpload lists, once
    read. `named_keys` are the keys of a DeleteObjects. `told` is the origin's answer about the object that it reads,
    given since the request came: good for one answer.

    `pair` is the caller's own key pair; None: the gateway's, or none. `signed_by` is that pair if the request is about
    a slot with `authorization = "origin"`: it is then forwarded in the caller's own name. `may_read`: the origin lets
    the caller read the object (origin_rights.py). `of_peer`: another node asks: none is asked for it. `past_memory`:
    the origin is asked, whatever is remembered. `stamps`: its keys' last changes by other nodes (registry.py).
    """

    services: AppContext
    request: S3Request
    body: ClientBody
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
    of_peer: bool = False
    past_memory: bool = False
    stamps: Mapping[ObjectKey, int | None] = field(default_factory=dict)

    @property
    def buffer(self) -> WritebackBuffer:
        """Return the write-back buffer; only for requests that it may concern."""
        assert self.services.writeback is not None  # noqa: S101 - router.py asks
        return self.services.writeback

    @property
    def cluster_writes(self) -> ClusterWrites | None:
        """Return the knowledge of other nodes' writes; None if another node has sent the request: it asks nobody."""
        return None if self.of_peer else self.services.cluster_writes

    def begin_reading(self) -> bytes | None:
        """Count the object's bytes for its checkpoint from here. Return its file id for `end`; None: nothing counts."""
        reads = self.services.reads
        file = counted_file(self.object_key, self.slot) if reads is not None else None
        if reads is not None and file is not None:
            reads.begin(file)
        return file

    @property
    def object_key(self) -> ObjectKey:
        if self.request.bucket is None or self.request.key is None:
            raise s3_error("InvalidRequest", "This operation needs a bucket and a key.")
        return ObjectKey(self.request.bucket, self.request.key)


_FORBIDDEN = 403

_log = structlog.get_logger("forebay.requests")
_refusals = RateLimitedLog(_log)

_LATER = {"Retry-After": "1"}


def reply_to(error: Exception, request_id: str, resource: str) -> Response:
    """Return the answer to a request that failed before the head of its answer was sent.

    The origin's own refusals reach the client as they are. An unexpected error is InternalError; the request id finds
    its log line.
    """
    if isinstance(error, OriginAnswered):
        headers = filter_response_headers(dict(error.headers))
        own = [pair for pair in headers if pair[0] != "content-length"]
        if not error.body and error.status >= 429:  # to a HEAD, which has no document: a GET gets one
            return _document(s3_error_of(error), request_id, resource, [p for p in own if p[0] != "content-type"])
        return Response(error.status, own, error.body, error_code=error_code_of(error.body))
    event = next((event for kind, event in _EXPECTED.items() if isinstance(error, kind)), None)
    if event is not None:
        _log.warning(event, request_id=request_id, reason=str(error))
    elif not isinstance(error, S3Error):
        _log.error("internal error", request_id=request_id, exc_info=error)
    elif error.status == _FORBIDDEN:
        _refusals.warning("callers are refused", error.code, code=error.code, example=request_id, why=error.message)
    return _document(s3_error_of(error), request_id, resource)


def s3_error_of(error: Exception) -> S3Error:
    """Return the S3 error for a failure; InternalError for an unexpected one.

    For the origin's own refusal, return its code and message, for answers that need a document.
    """
    match error:
        case S3Error():
            return error
        case OriginAnswered():
            code = error_code_of(error.body) or _CODES_OF_HEADS.get(error.status, "ServiceUnavailable")
            return S3Error(code, text_of(error.body, "Message") or str(error), error.status)
        case OutcomeUnknown():
            return s3_error("OutcomeUnknown")
        case OriginBusy():
            return s3_error("SlowDown", headers=_LATER)
        case CredentialsUnavailable():
            return s3_error("ServiceUnavailable", "The gateway has no key to ask the origin with now.", headers=_LATER)
        case OriginUnreachable():
            return s3_error("ServiceUnavailable", "The origin does not answer. Try again later.", headers=_LATER)
        case BufferUnavailable():
            return s3_error("ServiceUnavailable", f"The write-back buffer cannot be used now: {error}")
        case RegistryAway():
            message = f"It cannot be found out now what other nodes have written: {error}. Try again."
            return s3_error("ServiceUnavailable", message, headers=_LATER)
        case OriginBodyError():
            return s3_error("ServiceUnavailable", "The origin's answer broke off or did not match. Please try again.")
    return s3_error("InternalError")


_CODES_OF_HEADS = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    429: "SlowDown",
    503: "SlowDown",
}
"""Codes for answers to HEAD, which have no document."""


_EXPECTED: Mapping[type[Exception], str] = {
    OutcomeUnknown: "outcome of a write unknown",
    OriginBusy: "origin busy",
    CredentialsUnavailable: "no key to ask the origin with",
    OriginUnreachable: "origin unreachable",
    BufferUnavailable: "write-back buffer unavailable",
    RegistryAway: "other nodes' writes unknown",
    OriginBodyError: "origin body refused",
}
"""Log events for expected errors: the first class that fits counts."""


def _document(error: S3Error, request_id: str, resource: str, of_origin: Sequence[tuple[str, str]] = ()) -> Response:
    headers = [*of_origin, *((name.lower(), value) for name, value in error.headers.items())]
    if error.status == 304:
        return Response(304, headers, error_code=error.code)
    body = error_document(error, resource=resource, request_id=request_id, host_id=f"forebay/{request_id}")
    return Response(error.status, [("content-type", "application/xml"), *headers], body, error_code=error.code)
