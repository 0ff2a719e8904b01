"""An S3 service as the origin: signs, sends, tries again where that can help, and reports a dead origin fast.

Where the origin refuses the gateway's own key, clients are told that it is not theirs, and operators are told too
(`OwnKeyOrigin`).
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.core.errors import CredentialsUnavailable, OriginBodyError, OriginBusy, OriginUnreachable, OutcomeUnknown
from gateway.origin.client import (
    ACCOUNT,
    OWN_CLOCK_REFUSED,
    OWN_KEY_REFUSED,
    BegunRead,
    ClosedAtExit,
    CredentialSource,
    Direction,
    HedgeOutcome,
    OnEnd,
    Origin,
    OriginRequest,
    OriginResponse,
    OriginSettings,
    StreamedBody,
    begin_read_of,
)
from gateway.origin.conditional_writes import send_in
from gateway.origin.hedging import HedgedRead, Hedging, OnSilence
from gateway.origin.http1_client.client import Claim, Http1Client, OriginSilent
from gateway.origin.http1_client.connection import Connection, Supervision
from gateway.origin.http1_client.response_stream import HttpResponse, ResponseStream, error_code, wanted_region
from gateway.origin.http1_client.short_answer import ShortAnswer
from gateway.origin.request_body import NO_BODY, RequestBody, request_body, with_first_piece
from gateway.origin.retry import (
    CircuitBreaker,
    Failure,
    OriginHealth,
    Repetition,
    RetryBudget,
    RetryPolicy,
    RetrySeries,
    is_retried,
    is_slow,
    is_throttled,
    may_be_done,
    repetition,
    retry_after_seconds,
)
from gateway.origin.signing import Addressing, CredentialsOf, RequestSigner, Target
from gateway.origin.traffic_meter import AnswerKind, Attempt, RequestRateLimits, Traffic, answer_kind
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import parse_http_date
from gateway.telemetry.logs import RateLimitedLog
from gateway.telemetry.tracing import TRACE

_BREAKERS_MAX = 1024

BEGUN_MAX = 128
"""Short answers that may be under way at a time, each with a buffer."""

_QUIET_SHARE = 0.6
"""Share of the time allowed for detecting a silent origin after which it gets a probe."""

_PROBE_SHARE = 0.35
"""Share of that time which the probe gets, from its connection on."""

_PROBE_WAIT_SECONDS = 0.05
"""Seconds for which a request waits for a probe of an origin that was dead."""

_PROGRESS_BYTES_MIN = 1024
"""Bytes that a body must bring within the stall timeout while it is read."""

_LISTED_BYTES = 512 * 1024
"""Bytes of a LIST that are awaited before the answer is passed on, so that one that breaks off can be retried: most are
shorter, and a connection may hold as much anyway."""

Headers = Mapping[str, str]


@dataclass(slots=True)
class _Sending:
    """One call of `send`: what it has tried so far."""

    request: OriginRequest
    target: Target
    breaker: CircuitBreaker
    started: float
    repetition: Repetition
    claim: Claim
    series: RetrySeries | None = None
    attempts: int = 0
    sent_at: float = 0.0

    begun: _BegunRead | None = None
    """The first attempt, where it was sent already."""

    held_seconds: float = 0.0
    """Seconds for which the request waited for its turn, before all attempts."""

    is_charged: bool = False
    """The next request that is sent has passed the request rate, or has been counted there. A second one for the same
    attempt has not."""

    region_corrected: bool = False
    time_corrected: bool = False

    @property
    def is_read(self) -> bool:
        return self.request.method in ("GET", "HEAD")


class S3Origin:
    """`Origin` over HTTP. Must be made where an event loop runs."""

    def __init__(
        self,
        settings: OriginSettings,
        credentials: CredentialSource,
        clock: Clock,
        *,
        instance_id: str,
        credentials_of: CredentialsOf | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
        on_hedge: Callable[[HedgeOutcome], None] | None = None,
        silence: OriginHealth | None = None,
        rates: RequestRateLimits | None = None,
        rng: random.Random | None = None,
        hedges: bool = True,
        signer: type[RequestSigner] = RequestSigner,
    ) -> None:
        """`credentials` sign every request; where `credentials_of` is given, it says whose key signs which.

        `hedges` False: no request is sent on a second connection. `signer` says how requests are signed.
        """
        self._settings = settings
        self._clock = clock
        self._addressing = Addressing(settings)
        signs = credentials_of if credentials_of is not None else (lambda _: credentials)
        self._dialect = self._addressing.dialect
        self._signer = signer(signs, settings.region, clock, instance_id, self._dialect)
        self._policy = RetryPolicy(settings, rng)
        self._budget = RetryBudget()
        self._breakers: OrderedDict[str, CircuitBreaker] = OrderedDict()
        self._silence = silence or OriginHealth()
        self._failures = self._silence.failures(self._addressing.host)
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._on_attempt = on_attempt
        self._rates = rates
        self._hedging = Hedging(on_hedge, saved=1.0 if hedges else -math.inf)
        self._limits = _Limits(settings)
        self._limits_of_short = self._limits.of_read(self._hand_over_if_late, slow=False)
        self._begun_count = 0
        """Short answers that are under way."""

        connecting = min(settings.connect_timeout_seconds, self._limits.quiet_seconds)
        self._client = Http1Client(replace(settings, connect_timeout_seconds=connecting))

    async def send(self, request: OriginRequest) -> OriginResponse:
        """As `Origin.send`. A redirect is an answer like any other: it is never followed, to no host."""
        if self._dialect.is_plain:
            return await self._send(request)
        return await send_in(self._dialect, request, self._send)

    async def _send(self, request: OriginRequest) -> OriginResponse:
        target = self._addressing.target(request.bucket, request.key, request.query)
        source = None
        if isinstance(request.body, StreamedBody):
            request, source = with_first_piece(request, request.body)
        claim = Claim(ACCOUNT.get(), is_lasting=source is not None)
        breaker, started = self._breaker(target.host), self._clock.monotonic()
        sending = _Sending(request, target, breaker, started, repetition(request), claim)
        sending.held_seconds = request.waited_seconds
        if isinstance(request.begun, _BegunRead) and request.begun.goes_on():
            sending.begun, sending.started = request.begun, request.begun.started
        if source is not None and not breaker.hears_from_others():
            with cancellation.turn():
                await source.wait()
        while True:
            if sending.begun is None:
                if self._rates is not None and not self._rates.passes(request) and not breaker.is_open:
                    await self._hold(sending, self._rates)
                sending.is_charged = True
            has_checksums = self._dialect.has_checksums
            body = NO_BODY if sending.is_read and not request.body else request_body(request, checksums=has_checksums)
            try:
                response = await self._attempt(sending, body)
            except OriginBusy:
                raise
            except OriginUnreachable as error:
                delay = self._delay(sending, body, Failure(answered=False, may_be_done=error.may_be_done))
                if delay is None:
                    raise
            else:
                try:
                    delay = await self._delay_after(sending, body, response)
                except BaseException:
                    await response.aclose()
                    raise
                if delay is None:
                    return response
                await response.aclose()
            if delay:
                with cancellation.turn():
                    await self._clock.sleep(delay)

    async def _hold(self, sending: _Sending, rates: RequestRateLimits) -> None:
        began = self._clock.monotonic()
        with cancellation.turn():
            await rates.wait(sending.request, sending.held_seconds)
        held_seconds = self._clock.monotonic() - began
        sending.held_seconds += held_seconds
        sending.started += held_seconds

    def begin_read(self, request: OriginRequest, on_end: OnEnd) -> BegunRead | None:
        """As `BeginRead`: nothing has to be waited for, not the key, the rate, a connection, or an origin that is dead.

        An answer that is late by the measure of hedging is handed over, and `send` hedges it.
        """
        target = self._addressing.target(request.bucket, request.key, ())
        breaker = self._breaker(target.host)
        is_told = request.method == "GET" or self._dialect.length == "content-length"
        if self._begun_count >= BEGUN_MAX or breaker.hears_from_others() or not is_told:
            return None
        head = self._signer.head_now(request, target, self._client.head)
        connection = self._client.connection_now(target, Claim(ACCOUNT.get())) if head is not None else None
        if head is None or connection is None:
            return None
        if self._rates is not None and not self._rates.passes(request):
            connection.answered(keep_alive=True)
            return None
        self._begun_count += 1
        return _BegunRead(self, request, breaker, connection, head, on_end)

    def _hand_over_if_late(self, answer: ShortAnswer | ResponseStream, seconds: float) -> None:
        """Hand a short answer over when it would be hedged, which happens with the next check."""
        late_seconds = min(self._hedging.heads.after_seconds, self._limits.quiet_seconds / 2)
        if isinstance(answer, ShortAnswer) and seconds >= late_seconds:
            answer.hand_over()

    def traffic(self) -> Mapping[Direction, Traffic]:
        """Return this process's traffic over the link, as the ends of its connections see it."""
        return self._client.traffic()

    def limit_windows(self, size_bytes: int) -> None:
        """Let no more than this be on its way to any connection: what is received anyway, and not read, does not count.

        To be said again every now and then, for connections that are new, or that the kernel gives more.
        """
        self._client.limit_windows(size_bytes)

    def answers(self) -> bool:
        """Return False while it is silent; whether it is back is found out in the background."""
        target = self._addressing.target(None, None, ())
        breaker = self._breaker(target.host)
        if not breaker.hears_from_others():
            return True
        self._probe(target, breaker)
        return False

    async def aclose(self) -> None:
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await self._client.aclose()

    async def _attempt(self, sending: _Sending, body: RequestBody) -> HttpResponse:
        breaker, request = sending.breaker, sending.request
        headers: Headers | None = None
        if sending.begun is None:
            try:
                headers = await self._signer.headers(request, sending.target, body)
            except CredentialsUnavailable:  # nothing is learned of the origin
                self._failures.tell(self._clock.monotonic())
                raise
            if breaker.hears_from_others():
                await self._is_back(sending)
        sending.attempts += 1
        started = sending.sent_at = sending.begun.started if sending.begun is not None else self._clock.monotonic()
        try:
            if sending.is_read:
                response = await HedgedRead(self._hedging, partial(self._read, sending, body, headers), request).begin()
            else:
                response = await self._write(sending, body, headers or {})
        except OriginBusy:
            raise
        except OriginUnreachable as error:
            breaker.unanswered()
            is_silent = isinstance(error, OriginSilent) and not breaker.was_heard_since(started)
            if is_silent or breaker.is_suspect:
                await self._probed(sending, None)
            raise
        breaker.answered()
        dialect, told = self._dialect, response.headers
        if "x-amz-request-id" not in told and dialect.request_id in told:
            response.headers = told = {**told, "x-amz-request-id": told[dialect.request_id]}
        if "content-length" not in told and dialect.length in told and request.method == "HEAD":
            response.headers = {**told, "content-length": told[dialect.length]}
        return response

    async def _is_back(self, sending: _Sending) -> None:
        """OriginUnreachable while the origin is dead. Its return is found out by no client's request."""
        await self._probed(sending, _PROBE_WAIT_SECONDS)
        if sending.breaker.is_open:
            raise OriginUnreachable("the origin has not answered lately; trying again in a moment", may_be_done=False)

    async def _probed(self, sending: _Sending, seconds_max: float | None) -> None:
        self._probe(sending.target, sending.breaker)
        if (probe := self._probes.get(sending.target.host)) is not None:
            await asyncio.wait([probe], timeout=seconds_max)

    def _read(
        self,
        sending: _Sending,
        body: RequestBody,
        headers: Headers | None,
        request: OriginRequest,
        on_silence: OnSilence,
    ) -> Coroutine[Any, Any, ResponseStream]:
        """Send the request as it was signed, or another one for the rest of what it asks for."""

        def watch(stream: ResponseStream, seconds: float) -> None:
            if not self._given_up(sending, stream, seconds):
                on_silence(stream, seconds)

        limits = self._limits.of_read(watch, slow=is_slow(request))
        return self._ask(sending, request, body, limits, headers if request is sending.request else None)

    async def _write(self, sending: _Sending, body: RequestBody, headers: Headers) -> HttpResponse:
        slow = is_slow(sending.request)

        def watch(stream: ResponseStream, seconds: float) -> None:
            self._given_up(sending, stream, seconds)

        supervision = self._limits.of_write(watch, slow=slow)
        stream = await self._ask(sending, sending.request, body, supervision, headers)
        if not slow or stream.head.status >= 300:  # only what takes long sends a head before it knows the rest
            supervision.progress_seconds = self._limits.stall_seconds
        return HttpResponse(stream)

    async def _ask(
        self,
        sending: _Sending,
        request: OriginRequest,
        body: RequestBody,
        supervision: Supervision,
        headers: Headers | None,
    ) -> ResponseStream:
        """Send a request, signed already or not, or go on with one that was sent, and report what came of it."""
        begun, sending.begun = sending.begun, None
        if begun is None and headers is None:
            headers = await self._signer.headers(request, sending.target, body)
        if begun is not None or sending.is_charged:
            sending.is_charged = False
        elif self._rates is not None:
            self._rates.charge(request)
        started = begun.started if begun is not None else self._clock.monotonic()
        trace, span = TRACE.get(), None
        if trace is not None:
            of_request = request.bucket, request.key, request.slot, request.purpose.value
            span = trace.ask_origin(request.method, sending.target.host, *of_request, sending.attempts)
        if span is not None and headers is not None:
            headers = span.told(headers)
        # A connection that the origin is about to close would leave open what became of the request.
        unused, kind = sending.repetition is Repetition.WRONG_ANSWER, answer_kind(request)
        target, claim = sending.target, sending.claim
        try:
            if begun is not None:
                stream = await self._client.continued(begun.answer, supervision)
            else:
                stream = await self._client.exchange(
                    request.method, target, headers or {}, body.content, supervision, claim, unused=unused, kind=kind
                )
        except BaseException as error:
            if span is not None:
                span.failed(error)
            if isinstance(error, OriginUnreachable):
                self._report(request, sending.attempts, None, started)
            raise
        if span is not None:
            span.answered(stream.head.status)
        if begun is None or not begun.is_reported:
            self._report(request, sending.attempts, stream.head.status, started, kind, stream.head_seconds)
        return stream

    def _given_up(self, sending: _Sending, stream: ResponseStream, seconds: float) -> bool:
        """Probe an origin that has kept a request waiting and may be dead; give up if it answers no request.

        Return True if the request was given up.
        """
        breaker = sending.breaker
        is_late = seconds >= self._limits.quiet_seconds
        if stream.has_head or not (is_late or breaker.is_open):
            return False
        if breaker.answers_nobody or (is_late and breaker.is_open):
            stream.give_up("the origin answers nobody", silent=True)
            return True
        if is_late and not breaker.was_heard_since(self._clock.monotonic() - self._limits.quiet_seconds):
            self._probe(sending.target, breaker)
        return False

    def _probe(self, target: Target, breaker: CircuitBreaker) -> None:
        """Ask the origin whether it lives, unless that is being done or was done just now."""
        if target.host in self._probes or not breaker.may_be_probed():
            return
        task = asyncio.create_task(self._ask_for_life(target, breaker), name="probe an origin")
        self._probes[target.host] = task
        task.add_done_callback(lambda _: self._probes.pop(target.host, None))

    async def _ask_for_life(self, target: Target, breaker: CircuitBreaker) -> None:
        """Any answer to an unsigned HEAD will do: 403 is as good as another."""
        root = Target(target.scheme, target.host, "/", "")
        started = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._limits.probe_seconds):  # name, connection, handshake and answer
                stream = await self._client.exchange(
                    "HEAD", root, {"host": target.host}, b"", self._limits.of_probe, None, unused=True
                )
        except (OriginUnreachable, TimeoutError) as error:
            breaker.probe_failed(started, silent=isinstance(error, OriginSilent | TimeoutError))
            if breaker.is_open:
                self._client.stop_connecting(target)
        else:
            stream.close()
            breaker.answered()

    async def _delay_after(self, sending: _Sending, body: RequestBody, response: HttpResponse) -> float | None:
        """Seconds until the next attempt; None: this answer is the one to return."""
        status = response.status
        if status < 300 or status in (304, 404, 412):
            if sending.request.key is None and sending.request.method == "GET":
                try:
                    await response.begin(_LISTED_BYTES)
                except OriginBodyError:
                    return self._delay(sending, body, Failure(answered=True))
            self._succeeded(sending)
            return None
        try:
            document = await response.error_document()
        except OriginBodyError:
            return self._delay(sending, body, Failure(answered=False, may_be_done=may_be_done(status)))
        if body.can_be_sent_again and self._correct(sending, response, document):
            return 0.0
        code = error_code(document)
        request = sending.request
        if code in _CODES:
            self._failures.tell(self._clock.monotonic())
        if self._rates is not None and is_throttled(request.method, status, code, response.headers):
            self._rates.refused(request, sending.sent_at)
        # A 503 that is not S3's is a proxy's, which may have lost the answer.
        is_open = may_be_done(status) or (status == 503 and code is None)
        wait = retry_after_seconds(response.headers, self._clock.now())
        delay = self._delay(sending, body, Failure(answered=True, retry_after_seconds=wait, may_be_done=is_open))
        return delay if is_retried(status, code) else None

    def _delay(self, sending: _Sending, body: RequestBody, failure: Failure) -> float | None:
        """Do as `_delay_after`. OutcomeUnknown: the outcome is open, and a retry could answer a wrong no."""
        if failure.may_be_done and sending.repetition is Repetition.WRONG_ANSWER:
            raise OutcomeUnknown("the origin may have carried out a write, and has not said so")
        if not body.can_be_sent_again or sending.request.sent_once or sending.breaker.is_open:
            return None
        if failure.may_be_done and sending.repetition is not Repetition.HARMLESS:
            return None
        return self._series(sending).delay_before_next(failure, self._clock.monotonic())

    def _succeeded(self, sending: _Sending) -> None:
        if sending.series is None:
            self._budget.release(1)  # as a series without a retry does
        else:
            sending.series.succeeded()

    def _series(self, sending: _Sending) -> RetrySeries:
        if sending.series is None:
            sending.series = self._policy.new_series(self._budget, sending.started)
        return sending.series

    def _correct(self, sending: _Sending, response: HttpResponse, document: str) -> bool:
        """Learn from a refusal what was wrong with the signature; True: send again, at most once for each cause."""
        code = error_code(document)
        if response.status == 400 and code in ("AuthorizationHeaderMalformed", None) and not sending.region_corrected:
            sending.region_corrected = True
            return self._signer.learn_region(sending.request.bucket, wanted_region(document, response))
        if response.status == 403 and code in _CLOCK_CODES and not sending.time_corrected:
            sending.time_corrected = True
            if self._signer.learn_time(parse_http_date(response.headers.get("date", ""))):
                self._failures.tell(self._clock.monotonic())  # a clock that is wrong is told soon
                return True
        return False

    def _breaker(self, host: str) -> CircuitBreaker:
        breaker = self._breakers.get(host)
        if breaker is None:
            if len(self._breakers) >= _BREAKERS_MAX:
                self._breakers.popitem(last=False)
            breaker = self._breakers[host] = CircuitBreaker(self._clock, self._silence.cell(host))
        return breaker

    def _report(
        self,
        request: OriginRequest,
        attempts: int,
        status: int | None,
        started: float,
        kind: AnswerKind | None = None,
        answer_seconds: float = 0.0,
    ) -> None:
        if status is None or status >= 500:
            self._failures.tell(self._clock.monotonic())
        if self._on_attempt is None:
            return
        seconds = self._clock.monotonic() - started
        again = len(request.body) if attempts > 1 and isinstance(request.body, bytes) else 0
        comparable = kind if status is not None and status < 400 else None
        self._on_attempt(
            Attempt(
                request.slot,
                request.purpose,
                request.method,
                status,
                seconds,
                again,
                comparable,
                answer_seconds,
                self._addressing.host,
                request.bucket,
                request.key,
            )
        )


class _BegunRead:
    """As `BegunRead`."""

    __slots__ = (
        "_breaker",
        "_context",
        "_is_used",
        "_kind",
        "_on_end",
        "_origin",
        "_request",
        "answer",
        "is_reported",
        "passes",
        "started",
    )

    def __init__(
        self,
        origin: S3Origin,
        request: OriginRequest,
        breaker: CircuitBreaker,
        connection: Connection,
        head: bytes,
        on_end: OnEnd,
    ) -> None:
        self._origin = origin
        self._request = request
        self._breaker = breaker
        self._on_end: OnEnd | None = on_end
        self._context = copy_context()
        self._is_used = self.is_reported = False
        self.passes: Callable[[int], bool] = bool
        self.started = origin._clock.monotonic()
        self._kind = kind = answer_kind(request)
        limits, is_head = origin._limits_of_short, request.method == "HEAD"
        self.answer = origin._client.begin(connection, head, self._ended, limits, kind, bodiless=is_head)

    @property
    def is_whole(self) -> bool:
        return self.answer.stream is None

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self.answer.headers

    def whole(self) -> memoryview | None:
        answer, origin = self.answer, self._origin
        length_bytes = answer.length_bytes
        if length_bytes and not self.passes(length_bytes):
            return None
        self._breaker.answered()
        origin._hedging.answered()
        origin._hedging.heads.add(answer.head_seconds)
        origin._budget.release(1)
        origin._report(self._request, 1, answer.status, self.started, self._kind, answer.head_seconds)
        self.is_reported = True  # it may still be handed over: its bytes may be wrong
        return answer.whole()

    def goes_on(self) -> bool:
        """Return True once: another attempt is another request."""
        is_new, self._is_used = not self._is_used, True
        return is_new

    def onward(self) -> OriginRequest:
        self.answer.hand_over()
        return replace(self._request, begun=self)

    def close(self) -> None:
        if self.answer.close():
            self._origin._begun_count -= 1
            self._on_end = None

    def _ended(self) -> None:
        self._origin._begun_count -= 1
        on_end, self._on_end = self._on_end, None  # which refers to this: no cycle may keep the buffer
        if on_end is not None:
            self._context.run(on_end, self)


class _Limits:
    """Limits of the origin's time, by the kind of request."""

    def __init__(self, settings: OriginSettings) -> None:
        self._first_byte = min(settings.first_byte_timeout_seconds, settings.read_timeout_seconds)
        self.stall_seconds = min(settings.stall_timeout_seconds, settings.read_timeout_seconds)
        self._read = settings.read_timeout_seconds
        self._slow = max(self._read, settings.slow_timeout_seconds)
        self.quiet_seconds = min(self._first_byte * _QUIET_SHARE, settings.quiet_seconds_max)
        self.probe_seconds = min(self._first_byte * _PROBE_SHARE, settings.quiet_seconds_max)
        self.of_probe = Supervision(self._first_byte, self.stall_seconds)

    def of_read(self, on_silence: OnSilence, *, slow: bool) -> Supervision:
        """Return the limits of a GET, HEAD or, with `slow`, a LIST, which a living origin may take long to begin."""
        seconds = self._slow if slow else self._first_byte
        return Supervision(seconds, self.stall_seconds, _PROGRESS_BYTES_MIN, on_silence)

    def of_write(self, on_silence: OnSilence, *, slow: bool) -> Supervision:
        """Everything else: an origin that lives may take its time. White space is enough of a sign."""
        seconds = self._slow if slow else self._read
        return Supervision(seconds, seconds, 1, on_silence)


CLOCK_CODE = "RequestTimeTooSkewed"

_CLOCK_CODES = (CLOCK_CODE, "AuthenticationFailed", None)
"""Codes that may mean a wrong clock: Azure has one for all that is wrong with a signature, and HEAD has none."""

_KEY_REFUSED = "the origin refuses the gateway's own key"

_CODES = frozenset(
    {
        CLOCK_CODE,
        "AccountProblem",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidSecurity",
        "InvalidToken",
        "NotSignedUp",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
    }
)
"""They are about the key that a request is signed with."""

_ENDED_CODES = frozenset({"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"})
"""Codes that mean: the origin does not know the key, or no longer. Another key may work."""

_CODE = re.compile(rb"<Code>\s*+([A-Za-z]{1,64})\s*+</Code>")
_DOCUMENT_BYTES_MAX = 64 * 1024

_log = RateLimitedLog(structlog.get_logger("forebay.origin"))


def refusal_of_own_key(status: int, document: bytes) -> str | None:
    """Return the code by which the origin refuses the key that the request was signed with; None for other answers."""
    if status not in (400, 401, 403):
        return None
    found = _CODE.search(document)
    code = found[1].decode() if found is not None else ""
    return code if code in _CODES else None


class OwnKeyOrigin:
    """An origin whose refusals of the gateway's key are told as such.

    A client that reads `InvalidAccessKeyId: check your key` looks for the mistake where it is not. HEAD has no error
    document: there only the status is told.
    """

    def __init__(self, origin: Origin, on_refused: Callable[[OriginRequest], None] | None = None) -> None:
        """`on_refused` gets each request whose key the origin does not know, or no longer."""
        self._origin = origin
        self.begin_read = begin_read_of(origin)
        """As `BeginRead`: no refusal is a whole answer."""
        self._on_refused = on_refused

    async def send(self, request: OriginRequest) -> OriginResponse:
        """As `Origin.send`."""
        response = await self._origin.send(request)
        if request.signed_by is not None or response.status not in (400, 401, 403) or request.method == "HEAD":
            return response
        async with response:
            try:
                document = await response.read(_DOCUMENT_BYTES_MAX)
            except OriginBodyError:
                document = b""
        code = refusal_of_own_key(response.status, document)
        if code is None:
            headers = {**response.headers, "content-length": str(len(document))}
            return _WholeResponse(response.status, headers, document)
        if code in _ENDED_CODES and self._on_refused is not None:
            self._on_refused(request)
        is_of_clock = code == CLOCK_CODE
        why = "the origin has another time, and refuses what the gateway signs" if is_of_clock else _KEY_REFUSED
        _log.error(why, code, code=code, status=response.status, bucket=request.bucket)
        told = s3_error(
            "AccessDenied",
            f"{OWN_CLOCK_REFUSED if is_of_clock else OWN_KEY_REFUSED} ({code}). "
            "Your own key and signature are good: tell whoever runs the gateway.",
        )
        body = error_document(told, resource="", request_id="", host_id="forebay")
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        headers |= {"content-type": "application/xml", "content-length": str(len(body))}
        return _WholeResponse(403, headers, body)

    async def aclose(self) -> None:
        await self._origin.aclose()


class _WholeResponse(ClosedAtExit):
    """An `OriginResponse` whose body is here."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[bytes | memoryview]:
        body, self._body = self._body, b""
        if body:
            yield body

    def whole(self) -> memoryview | None:
        return None

    async def read(self, limit_bytes: int) -> bytes:
        body, self._body = self._body, b""
        if len(body) > limit_bytes:
            raise OriginBodyError(f"the origin's answer is longer than {limit_bytes} bytes")
        return body

    async def aclose(self) -> None:
        return
