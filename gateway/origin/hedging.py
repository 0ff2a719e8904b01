"""Send a stuck read again on another connection; the first bytes win.

One connection of many may hang: a lost path, a server that died, a disk that turns slowly. A reader gets nothing from
it, and a training step waits for the slowest of all. So a GET or HEAD that has been silent for longer than nearly all
answers take is sent once more: the whole request while there is no answer, else the rest of the body, of the same
version. At most 2% of all requests are sent for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.client import HedgeOutcome, OriginRequest
from gateway.origin.http1_client.client import OriginSilent
from gateway.origin.http1_client.response_stream import WHOLE_BYTES_MAX, HttpResponse, ResponseStream
from gateway.s3.headers import parse_content_range
from gateway.telemetry.logs import RateLimitedLog

SHARE_MAX = 0.02
"""Largest share of all reads that may be sent again."""

_SAVED_MAX = 10.0
"""Hedges that may follow each other at once, after a quiet time."""

_SAMPLES = 256
_SAMPLES_MIN = 32
_LATE_QUANTILE = 0.98
_LATE_FACTOR = 4.0
_AFTER_SECONDS_MIN = 0.1
_AFTER_SECONDS_MAX = 2.0
_AFTER_SECONDS_AT_FIRST = 1.0

_OF_THE_BYTES = frozenset({"versionId", "x-id"})
"""Parameters of a GET with which the answer is the object's bytes; besides those that set headers of the answer."""

log = RateLimitedLog(structlog.get_logger("forebay.origin"))

OnSilence = Callable[[ResponseStream, float], None]
Ask = Callable[[OriginRequest, OnSilence], Coroutine[Any, Any, ResponseStream]]


class _Usual:
    """Distribution of silences. A read is stuck when its silence exceeds `after_seconds`."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_SAMPLES)
        self._count = 0
        self.after_seconds = _AFTER_SECONDS_AT_FIRST

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._count += 1
        if self._count % _SAMPLES_MIN == 0:
            late = sorted(self._seconds)[int(len(self._seconds) * _LATE_QUANTILE)]
            self.after_seconds = min(_AFTER_SECONDS_MAX, max(_AFTER_SECONDS_MIN, late * _LATE_FACTOR))


class Hedging:
    """When a read counts as stuck, and how many may be sent again. One for an origin."""

    def __init__(self, on_outcome: Callable[[HedgeOutcome], None] | None = None, saved: float = 1.0) -> None:
        """Hedge nothing, ever, if `saved`, the number of hedges that may follow at once, is negative and infinite."""
        self._on_outcome = on_outcome
        self._saved = saved
        self.heads = _Usual()
        self.lists = _Usual()
        self.bodies = _Usual()

    def answered(self) -> None:
        self._saved = min(_SAVED_MAX, self._saved + SHARE_MAX)

    def take(self) -> bool:
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def ended(self, outcome: HedgeOutcome, request: OriginRequest) -> None:
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        fields = {"bucket": request.bucket, "key": request.key}
        log.warning("a read of the origin was stuck", outcome, outcome=outcome, **fields)


class HedgedRead:
    """One GET or HEAD: the request that was sent, and another one while it is stuck."""

    __slots__ = ("_ask", "_heads", "_hedge", "_hedging", "_request", "_rest_of")

    def __init__(self, hedging: Hedging, ask: Ask, request: OriginRequest) -> None:
        self._hedging = hedging
        self._ask = ask
        self._request = request
        self._heads = hedging.lists if request.key is None and request.method == "GET" else hedging.heads
        self._hedge: asyncio.Task[ResponseStream | None] | None = None
        self._rest_of: _HedgedRest | None = None

    async def begin(self) -> HttpResponse:
        """Return the answer of the one or the other. Where both fail, raises as the first did."""
        try:
            stream = await self._ask(self._request, self._on_silence)
        except OriginUnreachable as error:
            if isinstance(error, OriginSilent):  # so is the other one, then
                self._drop()
                raise
            following = await self._following()
            if following is None:
                raise
            stream = following
        except BaseException:
            self._drop()
            raise
        self._drop()
        self._hedging.answered()
        self._heads.add(stream.head_seconds)
        if stream.is_complete:
            return HttpResponse(stream)
        self._rest_of = _HedgedRest.of(self._request, stream)
        if self._rest_of is None:
            return HttpResponse(stream)
        return HttpResponse(stream, successor=self._following, on_close=self._end)

    def _on_silence(self, stream: ResponseStream, seconds: float) -> None:
        """Start the second request if the silence is long enough. Called often while the origin is silent."""
        usual = self._hedging.bodies if _comes_in_pieces(stream) else self._heads
        if self._hedge is not None or seconds < usual.after_seconds:
            return
        if stream.has_head and (self._rest_of is None or self._rest_of.stream is not stream):
            return  # its rest cannot be asked for
        if self._hedging.take():
            self._hedge = asyncio.create_task(self._send_again(stream), name="hedge a stuck read")

    async def _send_again(self, stuck: ResponseStream) -> ResponseStream | None:
        """Send the request again; return the answer that replaces `stuck`, None if it failed or is not needed."""
        received, rest = stuck.received_bytes, self._rest_of if stuck.has_head else None
        request = self._request if rest is None else rest.request(received)
        outcome = HedgeOutcome.FAILED
        stream: ResponseStream | None = None
        try:
            stream = await self._ask(request, self._on_silence)
            if rest is not None and not rest.continues(stream, received):
                return None
            has_moved = stuck.is_complete or stuck.is_landing or stuck.received_bytes != received
            if has_moved or stuck.has_head is (rest is None):
                outcome = HedgeOutcome.LOST
                return None
            outcome = HedgeOutcome.WON
            won, stream = stream, None
            if rest is not None:
                self._rest_of = rest.moved_to(won, received)
            stuck.give_up("it was overtaken by another connection")
            return won
        except OriginUnreachable:
            return None
        except asyncio.CancelledError:
            outcome = HedgeOutcome.LOST
            raise
        finally:
            if stream is not None:
                stream.close()
            self._hedging.ended(outcome, self._request)

    async def _following(self) -> ResponseStream | None:
        hedge, self._hedge = self._hedge, None
        if hedge is None:
            return None
        try:
            return await hedge
        except BaseException:
            hedge.cancel()
            raise

    def _end(self) -> None:
        self._drop()
        rest, self._rest_of = self._rest_of, None
        if rest is not None and rest.stream.is_complete and _comes_in_pieces(rest.stream):
            self._hedging.bodies.add(rest.stream.longest_gap_seconds)

    def _drop(self) -> None:
        hedge, self._hedge = self._hedge, None
        if hedge is None:
            return
        if not hedge.done():
            hedge.cancel()
        elif not hedge.cancelled() and (stream := hedge.result()) is not None:
            stream.close()


def _comes_in_pieces(stream: ResponseStream) -> bool:
    return stream.has_head and (stream.head.length_bytes or 0) > WHOLE_BYTES_MAX


class _HedgedRest:
    """The bytes of one version that a GET's answer still has to bring."""

    __slots__ = ("_etag", "_first", "_last", "_request", "_size_bytes", "stream")

    def __init__(self, request: OriginRequest, stream: ResponseStream, etag: str, bounds: tuple[int, int, int]) -> None:
        self._request = request
        self._etag = etag
        self._first, self._last, self._size_bytes = bounds
        self.stream = stream

    @classmethod
    def of(cls, request: OriginRequest, stream: ResponseStream) -> _HedgedRest | None:
        """Return None if the answer is not the bytes of one version, or a part of them cannot be requested."""
        head = stream.head
        etag = head.headers.get("etag", "")
        if request.method != "GET" or request.key is None or not head.length_bytes or not etag.startswith('"'):
            return None
        if any(name not in _OF_THE_BYTES and not name.startswith("response-") for name, _ in request.query):
            return None
        if head.status == 200:
            return cls(request, stream, etag, (0, head.length_bytes - 1, head.length_bytes))
        if head.status != 206:
            return None
        try:
            given, size_bytes = parse_content_range(head.headers.get("content-range", ""))
        except OriginBodyError:
            return None
        if given.length != head.length_bytes:
            return None
        return cls(request, stream, etag, (given.first, given.last, size_bytes))

    def request(self, received_bytes: int) -> OriginRequest:
        headers = {name: value for name, value in self._request.headers.items() if not name.startswith("if-")}
        headers["range"] = f"bytes={self._first + received_bytes}-{self._last}"
        headers["if-match"] = self._etag
        return replace(self._request, headers=headers)

    def continues(self, stream: ResponseStream, received_bytes: int) -> bool:
        head = stream.head
        wanted = f"bytes {self._first + received_bytes}-{self._last}/{self._size_bytes}"
        return (
            head.status == 206
            and head.headers.get("etag") == self._etag
            and head.headers.get("content-range") == wanted
            and head.length_bytes == self._last - self._first + 1 - received_bytes
        )

    def moved_to(self, stream: ResponseStream, received_bytes: int) -> _HedgedRest:
        bounds = (self._first + received_bytes, self._last, self._size_bytes)
        return _HedgedRest(self._request, stream, self._etag, bounds)
