"""The gateway's interface to an origin: one request in, one streamed answer out.

Everything that leaves for the origin is an `OriginRequest`; `S3Origin` (s3.py) signs and sends it, `MemoryOrigin`
answers it in tests. Header names are lower case. Header values are latin-1 decoded text, that is, each
character stands for one byte of the wire, so that every value passes through unchanged.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Literal, Protocol, Self

from gateway.core.errors import OriginAnswered
from gateway.core.model import immutable
from gateway.disk.pem import PemFile
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.s3.list_result import ListedPage

AddressingStyle = Literal["auto", "path", "virtual"]
Symlinks = Literal["read", "follow"]


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """How to reach an origin.

    `endpoint_url` None is AWS's own endpoint of the region; `dialect` names a row of dialects.py; `datanodes`
    are the hosts to which a namenode may send reads (none: those of its own domain). `symlinks` and `file_mode` are for
    directories: whether listings follow links, and what new files may (None: what the umask leaves). `ca_bundle` are
    certificates; None trusts the system's authorities. `proxy` is an http:// URL, hidden because
    it may carry a password.

    `first_byte_timeout_seconds`: a GET of an object or a HEAD is given up when its answer has not begun; and what else
    waits is given up when the origin does not answer a simple question either. `stall_timeout_seconds`: a body that is
    read and does not come forward is given up. `read_timeout_seconds`: other requests of an origin that lives, until
    they are answered; `slow_timeout_seconds`: those that take S3 minutes (CompleteMultipartUpload, copies, LIST, …).
    `connection_wait_seconds` bounds the wait for a free connection, `unreachable_after_seconds` how long an origin that
    gives no answer at all is tried again. `quiet_seconds_max`: after so long without an answer it is asked whether it
    lives, and given up if it does not say so as fast.
    """

    endpoint_url: str | None = None
    region: str = "us-east-1"
    addressing_style: AddressingStyle = "auto"
    dialect: str = "auto"
    datanodes: tuple[str, ...] = ()
    symlinks: Symlinks = "read"
    file_mode: int | None = None
    ca_bundle: PemFile | None = None
    proxy: str | None = field(default=None, repr=False)
    connect_timeout_seconds: float = 3.0
    first_byte_timeout_seconds: float = 8.0
    stall_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 60.0
    slow_timeout_seconds: float = 300.0
    connection_wait_seconds: float = 20.0
    max_connections: int = 256
    max_attempts: int = 4
    backoff_base_seconds: float = 0.05
    backoff_cap_seconds: float = 5.0
    retry_after_cap_seconds: float = 10.0
    unreachable_after_seconds: float = 5.0
    quiet_seconds_max: float = math.inf


UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"

OWN_KEY_REFUSED = "The origin refuses the key of this gateway"
"""Beginning of a 403's message that is about the gateway's own key, and not about the key's rights."""

OWN_CLOCK_REFUSED = "The origin has another time than this gateway, and refuses what it signs"
"""Error text where the clock, not the key, is to blame."""


Direction = Literal["read", "write"]
"""Which way the bytes of bodies go: read from the origin, or written to it."""


class Purpose(StrEnum):
    """Why a byte goes to or comes from the origin: a label of metrics, and what bandwidth is metered by."""

    LIVE = "live"
    READAHEAD = "readahead"
    WARM = "warm"
    REFRESH = "refresh"
    FLUSH = "flush"
    FORWARD = "forward"


class HedgeOutcome(StrEnum):
    """Outcome of a read that was sent again because it was stuck: a label of metrics."""

    WON = "won"
    """The second connection brought the bytes."""

    LOST = "lost"
    """The first one did, after all."""

    FAILED = "failed"


ACCOUNT: ContextVar[str] = ContextVar("origin_account", default="")
"""Account of the caller whose request needs the origin: accounts share out connections. Empty: the gateway's own."""


IS_AWAITED: ContextVar[Callable[[], bool] | None] = ContextVar("origin_is_awaited", default=None)
"""True if a client waits for the work that a request belongs to, whatever its purpose. It may change during the
request. None: the purpose decides."""


class Patience:
    """The time that one request has for all waits for its turns until its answer begins."""

    __slots__ = ("_until",)

    def __init__(self, seconds: float) -> None:
        self._until = asyncio.get_running_loop().time() + seconds

    def left_seconds(self) -> float:
        return self._until - asyncio.get_running_loop().time()

    def end(self) -> None:
        """Bound nothing any more: the answer begins, and what was begun for it may go on for others."""
        self._until = math.inf


PATIENCE: ContextVar[Patience | None] = ContextVar("origin_patience", default=None)
"""Patience of the request for which something waits. Those who share a wait share that of the first."""


def turn_seconds(seconds_max: float) -> float:
    """Return how long a wait for a turn may last: as long as such a wait, and as the request's patience."""
    patience = PATIENCE.get()
    return seconds_max if patience is None else min(seconds_max, patience.left_seconds())


@dataclass(frozen=True, slots=True)
class KeyPair:
    """An access key; `session_token` comes with temporary ones. Its repr shows no secret."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


class CredentialSource(Protocol):
    """A source of the key pair for requests to the origin."""

    async def current(self) -> KeyPair:
        """Return the pair to sign with now. CredentialsUnavailable when there is none."""


class OriginCredentials(CredentialSource, Protocol):
    """A source that also tells, without waiting, which pairs callers may sign with."""

    async def start(self) -> None:
        """Begin to look for a pair; returns at once, whether or not there is one."""

    def known(self) -> tuple[KeyPair, ...]:
        """Return the current pair and, after a rotation, the one before; empty if none was found so far. No I/O."""

    def renew(self) -> None:
        """Look for another pair in the background: a home refused this one, or it may be old. It is used meanwhile."""

    @property
    def problem(self) -> str | None:
        """Why the pair is not renewed, where its source knows; it may be good still."""

    async def aclose(self) -> None:
        """Stop looking."""


@immutable
class StreamedBody:
    """A request body that passes through once and is never held whole.

    `length_bytes` is the length of the payload (decoded, where the client sent aws-chunked); None sends HTTP chunks.
    `payload_hash` is the value for `x-amz-content-sha256`: 64 hex digits that the client vouched for, or
    UNSIGNED-PAYLOAD. With `trailer_name` the body goes out as aws-chunked with that one checksum trailer, whose value
    `trailer_value` gives once `chunks` is exhausted.

    If `chunks` raises, the origin must be left with an unfinished request (the connection is closed), never with a
    shorter object; the exception reaches the caller of `send`.
    """

    chunks: AsyncIterator[bytes | memoryview]
    length_bytes: int | None
    payload_hash: str = UNSIGNED_PAYLOAD
    trailer_name: str | None = None
    trailer_value: Callable[[], str] | None = None


class AnswerAges(Protocol):
    """How old another node's answer about an object's current version may be."""

    @property
    def seconds_max(self) -> float:
        """The greatest age of an answer that there is an object."""

    def allow(self, status: int, headers: Mapping[str, str], age_seconds: float) -> bool:
        """Return True if an answer of this age counts; the age may be NaN."""


@immutable
class OriginRequest:
    """One S3 request, unsigned.

    `query` holds decoded (name, value) pairs in order; a value of None is a name without `=` (`?uploads`). `headers` is
    everything that goes along except what the sender adds itself: host, authorization, x-amz-date,
    x-amz-content-sha256, x-amz-security-token, content-length, transfer-encoding, connection, expect.
    A request with a `StreamedBody` is sent once, and so is one with `sent_once`: what it is based on may have changed
    since. Every other may be sent again by the retry policy, where `retry.repetition` allows that. `purpose` and `slot`
    (its name) say on whose account it goes. `keys` are those that its body names. `signed_by` is the key pair of a
    caller in whose own name it goes; None: it goes in the gateway's. `size_bytes` is the length of the version that
    If-Match names, where it is known. `ages`: which answers of another node will do. Earlier requests for the same
    bytes have taken `waited_seconds`, by which this one waits less for its turn.
    """

    method: str
    bucket: str | None = None
    key: str | None = None
    query: Sequence[tuple[str, str | None]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | StreamedBody = b""
    purpose: Purpose = Purpose.LIVE
    slot: str = "default"
    sent_once: bool = False
    keys: Sequence[str] = ()
    signed_by: KeyPair | None = None
    size_bytes: int | None = None
    ages: AnswerAges | None = None
    waited_seconds: float = 0.0
    begun: BegunRead | None = None
    """The request as it was sent already: `send` goes on with it."""

    replica: int | None = None
    """Which of the bucket's replicas is asked, and nobody else, by its place in the configuration."""

    takes_rows: bool = False
    """A page of a listing may come as `page_rows_of` the answer, with no document: its sender would only parse that."""


class OriginHead(Protocol):
    """Status and headers of an answer of the origin."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Lower-case name → value. Hop-by-hop headers are gone; repeated ones are joined by `, `."""


class BegunRead(OriginHead, Protocol):
    """A GET or HEAD that was sent without a wait (`begin_read`).

    When `on_end` is called, `is_whole` tells if a good and short answer is complete; then take the `whole` of it.
    Otherwise, or if it is not the answer that was expected, `onward` is the same request for `Origin.send`, which goes
    on with it. Call it in `on_end`: afterwards others may have the connection.
    """

    passes: Callable[[int], bool]
    """Lets the bytes of its body pass if they need not wait."""

    @property
    def is_whole(self) -> bool: ...

    def whole(self) -> memoryview | None:
        """Count a whole answer, and return its body; None: its bytes must wait, so call `onward`."""

    def onward(self) -> OriginRequest: ...

    def close(self) -> None:
        """Want no more of it. Idempotent; no effect on an answer that was taken."""


ERROR_DOCUMENT_BYTES_MAX = 64 * 1024


async def error_of(response: OriginResponse) -> OriginAnswered:
    """Read the document of an error, for its caller to raise."""
    document = await response.read(ERROR_DOCUMENT_BYTES_MAX)
    return OriginAnswered(response.status, list(response.headers.items()), document)


OnEnd = Callable[[BegunRead], None]
BeginRead = Callable[[OriginRequest, OnEnd], BegunRead | None]
"""Sends a GET or HEAD without parameters if that needs no wait, and calls back; None: call `send`."""


def never_begun(request: OriginRequest, on_end: OnEnd) -> BegunRead | None:
    """`BeginRead` of an origin that always waits."""


class OriginResponse(OriginHead, Protocol):
    """The origin's answer, whatever its status. Must be closed: use `async with`."""

    def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes | memoryview]:
        """Yield the body in pieces as they arrive. A body shorter than its Content-Length raises OriginBodyError.

        With a buffer, pieces may be views of it: good until the next one is asked for. Its `on_thread` may have taken
        them (`TakenBytes`).
        """

    def whole(self) -> memoryview | None:
        """Return the whole body where it is small, has arrived and may pass at once: nothing else may follow.

        Call it once, before any other.
        """

    async def read(self, limit_bytes: int) -> bytes:
        """Return the whole body; OriginBodyError when it is longer than `limit_bytes` or cut short."""

    async def aclose(self) -> None:
        """Give the connection back (or close it, when the body was not read to its end). Idempotent."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ClosedAtExit(ABC):
    """An answer that `async with` closes."""

    @abstractmethod
    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class WrappedResponse(ClosedAtExit):
    """An `OriginResponse` that another one gives its bytes to."""

    def __init__(self, response: OriginResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.rows = page_rows_of(response)
        self._response = response

    def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes | memoryview]:
        return self._response.stream(buffer)

    def whole(self) -> memoryview | None:
        return self._response.whole()

    async def read(self, limit_bytes: int) -> bytes:
        return await self._response.read(limit_bytes)

    def doubt(self) -> None:
        """Have its replica, if it came from one, not asked for this version for a while: its body was no good."""
        doubt(self._response)

    async def aclose(self) -> None:
        await self._response.aclose()


def page_rows_of(response: object) -> ListedPage | None:
    """Return the page of a listing that came without a document, as its request `takes_rows`."""
    return getattr(response, "rows", None)


StillSo = Callable[[], bool]
"""Looks at the object itself, at once, and counts as the request did: the same request would be answered the same."""


def still_of(response: OriginHead) -> StillSo | None:
    """Return how to find out whether an answer still holds; None: ask again."""
    return getattr(response, "still", None)


def doubt(response: object) -> None:
    """As `WrappedResponse.doubt`, of any response."""
    getattr(response, "doubt", lambda: None)()


@immutable
class FromPeer:
    """Facts about an answer that another node has given.

    `checksums` are those of the body's chunks, packed; nobody has compared them with the body. `doubt` tells the peer
    that they differ. Call `broke_off` if the body stalls, or ends early: others are asked first for a while.
    """

    age_seconds: float = 0.0
    checksums: bytes = b""
    doubt: Callable[[], None] = lambda: None
    broke_off: Callable[[], None] = lambda: None


def from_peer(response: object) -> FromPeer | None:
    """Return the facts about a peer's answer; None for an answer of the bucket."""
    return getattr(response, "from_peer", None)


def age_of(response: object) -> float:
    """Return how many seconds before this answer the bucket was asked."""
    told = from_peer(response)
    return told.age_seconds if told is not None else 0.0


def is_of_s3(headers: Mapping[str, str]) -> bool:
    """Return whether S3 gave an answer that has no document: a proxy in its stead sends no S3 request id."""
    return bool(headers.get("x-amz-request-id"))


class Origin(Protocol):
    """The durable home of the data."""

    async def send(self, request: OriginRequest) -> OriginResponse:
        """Send and return the head of the answer, of any status, the body not yet read.

        Raises OriginUnreachable when there is no answer; OutcomeUnknown when a write that must not be sent again may
        have been carried out. Other error statuses are answers: nothing is raised for them here.
        """

    async def aclose(self) -> None:
        """Close every connection."""


def begin_read_of(origin: Origin) -> BeginRead:
    begin: BeginRead = getattr(origin, "begin_read", never_begun)
    return begin


class RoutedOrigin:
    """An `Origin`: `main`, except for buckets that have a home of their own. It closes them all, and `behind` them.

    A copy goes to the home of its target: its sender has checked that its source is there, too.
    """

    def __init__(self, main: Origin, by_bucket: Mapping[str, Origin], behind: Sequence[Origin] = ()) -> None:
        self._main = main
        self._behind = behind
        self._by_bucket = dict(by_bucket)
        self._begin_main = begin_read_of(main)
        self._begin_by_bucket = {bucket: begin_read_of(origin) for bucket, origin in by_bucket.items()}

    async def send(self, request: OriginRequest) -> OriginResponse:
        return await self._by_bucket.get(request.bucket or "", self._main).send(request)

    def begin_read(self, request: OriginRequest, on_end: OnEnd) -> BegunRead | None:
        """As `BeginRead`."""
        return self._begin_by_bucket.get(request.bucket or "", self._begin_main)(request, on_end)

    async def aclose(self) -> None:
        for origin in {id(one): one for one in (self._main, *self._by_bucket.values(), *self._behind)}.values():
            await origin.aclose()
