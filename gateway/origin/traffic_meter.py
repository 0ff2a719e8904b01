"""A meter that every request to an origin passes, with its slot and purpose: it counts, and enforces ceilings.

Bodies are held back piece by piece. Bytes that are not taken from the connection soon fill the receive buffers, and the
origin stops sending; it waits for bytes that it is not given. No time-out of the connection runs meanwhile: the wait is
before the next piece is asked for, or before a piece is handed over to be sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol, Self

from gateway.core import cancellation
from gateway.core.model import immutable
from gateway.origin.client import (
    IS_AWAITED,
    BegunRead,
    Direction,
    OnEnd,
    Origin,
    OriginRequest,
    OriginResponse,
    Purpose,
    StreamedBody,
    WrappedResponse,
    begin_read_of,
)
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.shared.recent_requests import RecentRequests
from gateway.telemetry import metrics

LARGE_BYTES = 2**20


class AnswerKind(IntEnum):
    """Answers whose times can be compared with each other."""

    GET = 0
    HEAD = 1
    WRITE = 2
    LARGE_WRITE = 3

    @property
    def direction(self) -> Direction:
        return "read" if self <= AnswerKind.HEAD else "write"


@dataclass(frozen=True, slots=True)
class Traffic:
    """One process's traffic over the link in one direction.

    `arrived_bytes`: all that came through the link, received by the machine or acknowledged by the origin's.
    `unacknowledged_bytes`: handed over to be sent, and not acknowledged. `waiting`: how long the requests that are
    complete and have no answer have waited, in seconds, each with its kind. `bodies`: how many are under way;
    `starved_bodies`: of them, those whose reader waits for bytes that have not arrived.
    """

    arrived_bytes: int
    unacknowledged_bytes: int = 0
    waiting: Sequence[tuple[AnswerKind, float]] = ()
    bodies: int = 0
    starved_bodies: int = 0


class LinkEnd(Protocol):
    def traffic(self) -> Mapping[Direction, Traffic]:
        """Return the traffic in each direction."""

    def limit_windows(self, size_bytes: int) -> None:
        """Let no more than this be on its way to any connection."""


def in_all(ends: Sequence[Mapping[Direction, Traffic]]) -> dict[Direction, Traffic]:
    return {direction: _sum([end[direction] for end in ends]) for direction in _DIRECTIONS}


_DIRECTIONS: tuple[Direction, ...] = ("read", "write")


def _sum(parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        sum(one.arrived_bytes for one in parts),
        sum(one.unacknowledged_bytes for one in parts),
        tuple(waiting for one in parts for waiting in one.waiting),
        sum(one.bodies for one in parts),
        sum(one.starved_bodies for one in parts),
    )


@dataclass(slots=True)
class Moved:
    """Bytes that all connections of a process have received, and have handed over to be sent."""

    received_bytes: int = 0
    handed_bytes: int = 0


_NOT_OF_BYTES = frozenset({"uploadId", "attributes", "acl", "tagging", "retention", "legal-hold", "torrent"})


def answer_kind(request: OriginRequest) -> AnswerKind | None:
    """None: how long its answer takes says nothing about the link."""
    if request.key is None:
        return None
    if request.method in ("GET", "HEAD"):
        if request.query and any(name in _NOT_OF_BYTES for name, _ in request.query):
            return None
        return AnswerKind.GET if request.method == "GET" else AnswerKind.HEAD
    if request.method != "PUT" or not request.body:
        return None
    body = request.body
    length_bytes = body.length_bytes if isinstance(body, StreamedBody) else len(body)
    return AnswerKind.LARGE_WRITE if length_bytes is None or length_bytes >= LARGE_BYTES else AnswerKind.WRITE


@immutable
class Attempt:
    """One attempt that is over, for metrics: `status` None is no answer. The body of the answer is not in `seconds`.

    `sent_again_bytes` is the size of a body in memory in every attempt but the first. `answer_seconds`: from the last
    byte of the request to the head of its answer, where that can be compared with others of its `kind`. `origin` is the
    host and port of the endpoint.
    """

    slot: str
    purpose: Purpose
    method: str
    status: int | None
    seconds: float
    sent_again_bytes: int = 0
    kind: AnswerKind | None = None
    answer_seconds: float = 0.0
    origin: str = ""
    bucket: str | None = None
    key: str | None = None


RANKS: Mapping[Purpose, tuple[int, int]] = {
    Purpose.LIVE: (2, 0),
    Purpose.FORWARD: (2, 0),
    Purpose.READAHEAD: (2, 0),
    Purpose.WARM: (2, 0),
    Purpose.FLUSH: (2, 1),
    Purpose.REFRESH: (3, 3),
}
"""Order in which the pieces of a slot pass, by purpose, 0 first: without a waiting client, and with one (`IS_AWAITED`):
a reader has come to what is warmed or was read ahead, a request needs what is flushed. So work has its client's rank
while the client waits, and does not wait behind work that no client waits for."""

_FOR_CLIENTS = frozenset({Purpose.LIVE, Purpose.FORWARD})


def rank_of(purpose: Purpose) -> Callable[[], int]:
    """Tells the rank of what is done here and now for a purpose, whenever it is asked."""
    unawaited, awaited = RANKS[purpose]
    is_awaited = IS_AWAITED.get()
    if is_awaited is None:
        return _ALWAYS[awaited if purpose in _FOR_CLIENTS else unawaited]
    return lambda: awaited if is_awaited() else unawaited


_ALWAYS: tuple[Callable[[], int], ...] = (lambda: 0, lambda: 1, lambda: 2, lambda: 3)


class RateLimit(Protocol):
    """The limiter of one slot's bytes in one direction. The waiting piece of the least present `rank` passes first."""

    async def take(self, count: int, rank: Callable[[], int]) -> tuple[float, float]:
        """Wait until `count` bytes may pass; return the seconds waited for the slot's own ceiling, and for the link.

        A cancelled caller has taken nothing.
        """

    def passes(self, count: int, rank: Callable[[], int]) -> bool:
        """Let `count` bytes pass if they need not wait; False, and nothing taken, when they would."""

    def charge(self, count: int) -> None:
        """`count` bytes pass without waiting, on account of what comes behind them."""


class Ceilings(Protocol):
    def limiter(self, direction: Direction, slot: str) -> RateLimit | None:
        """Return the present limiter of a slot's bytes; None: nothing limits them."""

    def answered(self, kind: AnswerKind, seconds: float) -> None:
        """Note that an answer has begun `seconds` after the last byte of its request."""

    def slowed(self, direction: Direction) -> None:
        """Note that the origin has asked for less."""


class RequestRateLimits(Protocol):
    """Holds back requests of kinds that the origin refuses for their number (policy/request_rates.py)."""

    def passes(self, request: OriginRequest) -> bool:
        """Let a request pass if nothing keeps it; False, and nothing taken, when it must wait."""

    async def wait(self, request: OriginRequest, waited_seconds: float = 0.0) -> None:
        """Wait until it may pass; raise OriginBusy when that takes too long, with the seconds that it waited before."""

    def charge(self, request: OriginRequest) -> None:
        """Charge a request that is sent without having waited to those behind it."""

    def refused(self, request: OriginRequest, sent_at: float) -> None:
        """Note that the origin refused a request, sent at a monotonic time, for the number of requests."""


_METERS_MAX = 1024


class OriginMeter:
    """Counts all requests of this process to its origins, and keeps `ceilings` and `requests`, where there are any.

    `recent` keeps the failures. `S3Origin` asks it before it sends a request.
    """

    def __init__(
        self,
        ceilings: Ceilings | None = None,
        requests: RequestRateLimits | None = None,
        recent: RecentRequests | None = None,
    ) -> None:
        self._recent = recent
        self._meters: dict[tuple[Direction, str, Purpose], TrafficMeter] = {}
        """Meters of bodies whose rank does not change."""

        self.ceilings = ceilings
        self.requests = requests

    def of_body(self, direction: Direction, request: OriginRequest) -> TrafficMeter:
        if IS_AWAITED.get() is not None:
            return TrafficMeter(self, direction, request.slot, request.purpose)
        kind = direction, request.slot, request.purpose
        known = self._meters.get(kind)
        if known is None:
            if len(self._meters) >= _METERS_MAX:
                self._meters.clear()
            known = self._meters[kind] = TrafficMeter(self, *kind)
        return known

    def attempt(self, attempt: Attempt) -> None:
        """Count a try that is over; a body in memory that was sent again counts again."""
        status = "unreachable" if attempt.status is None else str(attempt.status)
        purpose = str(attempt.purpose)
        metrics.ORIGIN_REQUESTS.add(1, attempt.method, status, purpose, attempt.slot, attempt.origin)
        metrics.ORIGIN_REQUEST_SECONDS.observe(attempt.seconds, purpose, attempt.origin)
        if self._recent is not None and (attempt.status is None or attempt.status >= 500 or attempt.status == 429):
            of_request = attempt.method, attempt.bucket, attempt.key, attempt.slot, purpose
            self._recent.origin_failed(*of_request, status, attempt.seconds)
        if self.ceilings is not None:
            if attempt.kind is not None:
                self.ceilings.answered(attempt.kind, attempt.answer_seconds)
            elif attempt.status in (429, 503):
                self.ceilings.slowed("read" if attempt.method in ("GET", "HEAD") else "write")
        if attempt.sent_again_bytes:
            metrics.ORIGIN_BYTES.add(attempt.sent_again_bytes, "write", purpose, attempt.slot)
            limiter = self.limiter("write", attempt.slot)
            if limiter is not None:
                limiter.charge(attempt.sent_again_bytes)

    def passes(self, request: OriginRequest) -> bool:
        """As `RequestRateLimits`."""
        return self.requests is None or self.requests.passes(request)

    async def wait(self, request: OriginRequest, waited_seconds: float = 0.0) -> None:
        """As `RequestRateLimits`."""
        if self.requests is not None:
            await self.requests.wait(request, waited_seconds)

    def charge(self, request: OriginRequest) -> None:
        """As `RequestRateLimits`."""
        if self.requests is not None:
            self.requests.charge(request)

    def refused(self, request: OriginRequest, sent_at: float) -> None:
        """As `RequestRateLimits`."""
        if self.requests is not None:
            self.requests.refused(request, sent_at)

    def limiter(self, direction: Direction, slot: str) -> RateLimit | None:
        """Return the present limiter of a slot's bytes; None: no limit."""
        return self.ceilings.limiter(direction, slot) if self.ceilings is not None else None


class TrafficMeter:
    """Counts one body, and holds its pieces back."""

    def __init__(self, of_all: OriginMeter, direction: Direction, slot: str, purpose: Purpose) -> None:
        self._of_all = of_all
        self._direction: Direction = direction
        self._slot = slot
        self._purpose = purpose.value
        self._rank = rank_of(purpose)

    @property
    def limited(self) -> bool:
        return self._limiter() is not None

    def _limiter(self) -> RateLimit | None:
        return self._of_all.limiter(self._direction, self._slot)

    def count(self, count: int) -> None:
        metrics.ORIGIN_BYTES.add(count, self._direction, self._purpose, self._slot)

    def passes(self, count: int) -> bool:
        """Return True if a piece of `count` bytes passes without waiting; it is counted then."""
        limiter = self._limiter()
        if limiter is not None and not limiter.passes(count, self._rank):
            return False
        self.count(count)
        return True

    async def wait(self, count: int) -> None:
        """Wait until a piece of `count` bytes may pass."""
        limiter = self._limiter()
        if limiter is not None:
            for by, seconds in zip(("ceiling", "link"), await limiter.take(count, self._rank), strict=True):
                if seconds > 0:
                    metrics.BANDWIDTH_WAIT_SECONDS.add(seconds, by, self._direction, self._slot)


class MeteredOrigin:
    """An `Origin` whose bodies pass `meter`. A streamed body counts as far as it was taken."""

    def __init__(self, origin: Origin, meter: OriginMeter) -> None:
        self._origin = origin
        self._begin_read = begin_read_of(origin)
        self._meter = meter

    async def send(self, request: OriginRequest) -> OriginResponse:
        """As `Origin.send`. A body in memory waits for its bandwidth before anything is sent."""
        if isinstance(request.body, StreamedBody):
            chunks = _MeteredChunks(request.body.chunks, self._meter.of_body("write", request))
            request = replace(request, body=replace(request.body, chunks=chunks))
        elif request.body:
            meter = self._meter.of_body("write", request)
            with cancellation.turn():
                await meter.wait(len(request.body))
            meter.count(len(request.body))
        response = await self._origin.send(request)
        return _MeteredResponse(response, self._meter.of_body("read", request))

    def begin_read(self, request: OriginRequest, on_end: OnEnd) -> BegunRead | None:
        """As `BeginRead`. The body passes the meter when it is taken."""
        begun = self._begin_read(request, on_end)
        if begun is not None:
            begun.passes = self._meter.of_body("read", request).passes
        return begun

    async def aclose(self) -> None:
        await self._origin.aclose()


class _MeteredChunks:
    def __init__(self, chunks: AsyncIterator[bytes | memoryview], meter: TrafficMeter) -> None:
        self._chunks = chunks
        self._meter = meter

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | memoryview:
        chunk = await anext(self._chunks)
        if self._meter.limited:
            await self._meter.wait(len(chunk))
        self._meter.count(len(chunk))
        return chunk


class _MeteredResponse(WrappedResponse):
    """Counts each piece at once, as it has crossed the link, and makes it wait before the reader gets it."""

    def __init__(self, response: OriginResponse, meter: TrafficMeter) -> None:
        super().__init__(response)
        self._meter = meter

    async def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes | memoryview]:
        pieces, meter = self._response.stream(buffer), self._meter
        try:
            async for piece in pieces:
                meter.count(len(piece))
                if meter.limited:
                    await meter.wait(len(piece))
                yield piece
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    def whole(self) -> memoryview | None:
        body = self._response.whole()
        return body if body is not None and self._meter.passes(len(body)) else None

    async def read(self, limit_bytes: int) -> bytes:
        body = await self._response.read(limit_bytes)
        if body:
            self._meter.count(len(body))
            await self._meter.wait(len(body))
        return body
