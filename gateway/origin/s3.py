"""An S3 service as the origin: signs, sends, tries again where that can help, and reports a dead origin fast."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway import cancellation
from gateway.clock import Clock
from gateway.errors import OriginBodyError, OriginUnreachable, OutcomeUnknown
from gateway.origin.addressing import Addressing, Target
from gateway.origin.answers import error_code, error_document, wanted_region
from gateway.origin.breaker import CircuitBreaker
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.origin.credentials import CredentialSource
from gateway.origin.outgoing import OutgoingBody, outgoing_body
from gateway.origin.repetition import Repetition, repetition
from gateway.origin.response import HttpResponse
from gateway.origin.retry import (
    Failure,
    RetryBudget,
    RetryPolicy,
    RetrySeries,
    is_retried,
    may_be_done,
    retry_after_seconds,
)
from gateway.origin.settings import OriginSettings
from gateway.origin.signing import RequestSigner
from gateway.origin.transport import HttpTransport
from gateway.s3.http_dates import parse_http_date

_BREAKERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that is over, for metrics: `status` None is no answer. The body of the answer is not in `seconds`.

    `sent_again_bytes` is the size of a body in memory in every attempt but the first.
    """

    slot: str
    purpose: Purpose
    method: str
    status: int | None
    seconds: float
    sent_again_bytes: int = 0


@dataclass(slots=True)
class _Sending:
    """One call of `send`: what it has tried so far."""

    request: OriginRequest
    target: Target
    breaker: CircuitBreaker
    started: float
    repetition: Repetition
    series: RetrySeries | None = None
    attempts: int = 0
    region_corrected: bool = False
    time_corrected: bool = False


class S3Origin:
    """`Origin` over HTTP. Must be made where an event loop runs."""

    def __init__(
        self,
        settings: OriginSettings,
        credentials: CredentialSource,
        clock: Clock,
        *,
        instance_id: str,
        on_attempt: Callable[[Attempt], None] | None = None,
        dice: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._addressing = Addressing(settings)
        self._signer = RequestSigner(credentials, settings.region, clock, instance_id)
        self._policy = RetryPolicy(settings, dice)
        self._budget = RetryBudget()
        self._breakers: OrderedDict[str, CircuitBreaker] = OrderedDict()
        self._on_attempt = on_attempt
        self._transport = HttpTransport(settings)

    async def send(self, request: OriginRequest) -> OriginResponse:
        """As `Origin.send`. A redirect is an answer like any other: it is never followed, to no host."""
        target = self._addressing.target(request.bucket, request.key, request.query)
        sending = _Sending(request, target, self._breaker(target.host), self._clock.monotonic(), repetition(request))
        while True:
            body = outgoing_body(request, self._settings.read_timeout_seconds)
            try:
                response = await self._attempt(sending, body)
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

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _attempt(self, sending: _Sending, body: OutgoingBody) -> HttpResponse:
        request, target, breaker = sending.request, sending.target, sending.breaker
        headers = await self._signer.headers(request, target, body)
        admission = breaker.admit()
        if admission is None:
            raise OriginUnreachable("the origin has not answered lately; trying again in a moment", may_be_done=False)
        sending.attempts += 1
        started = self._clock.monotonic()
        try:
            response = await self._transport.exchange(request.method, target, headers, body.upload)
        except OriginUnreachable:
            breaker.unanswered(admission)
            self._report(sending, None, started)
            raise
        except BaseException:
            breaker.abandoned(admission)
            raise
        breaker.answered(admission)
        self._report(sending, response.status, started)
        return response

    async def _delay_after(self, sending: _Sending, body: OutgoingBody, response: HttpResponse) -> float | None:
        """Seconds until the next attempt; None: this answer is the one to return."""
        status = response.status
        if status < 300 or status in (304, 404, 412):
            self._succeeded(sending)
            return None
        try:
            document = await error_document(response)
        except OriginBodyError:
            return self._delay(sending, body, Failure(answered=False, may_be_done=may_be_done(status)))
        if body.can_be_sent_again and self._correct(sending, response, document):
            return 0.0
        code = error_code(document)
        # A 503 that is not S3's is a proxy's, which may have lost the answer.
        is_open = may_be_done(status) or (status == 503 and code is None)
        wait = retry_after_seconds(response.headers, self._clock.now())
        delay = self._delay(sending, body, Failure(answered=True, retry_after_seconds=wait, may_be_done=is_open))
        return delay if is_retried(status, code) else None

    def _delay(self, sending: _Sending, body: OutgoingBody, failure: Failure) -> float | None:
        """As `_delay_after`. OutcomeUnknown: nobody can say yes or no, and to ask again would give a wrong no."""
        if failure.may_be_done and sending.repetition is Repetition.WRONG_ANSWER:
            raise OutcomeUnknown("the origin may have carried out a write, and has not said so")
        if not body.can_be_sent_again or sending.breaker.is_open:
            return None
        if failure.may_be_done and sending.repetition is not Repetition.HARMLESS:
            return None
        return self._series(sending).delay_before_next(failure, self._clock.monotonic())

    def _succeeded(self, sending: _Sending) -> None:
        if sending.series is None:
            self._budget.give_back(1)  # as a series without a retry does
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
        if response.status == 403 and code in ("RequestTimeTooSkewed", None) and not sending.time_corrected:
            sending.time_corrected = True
            return self._signer.learn_time(parse_http_date(response.headers.get("date", "")))
        return False

    def _breaker(self, host: str) -> CircuitBreaker:
        breaker = self._breakers.get(host)
        if breaker is None:
            if len(self._breakers) >= _BREAKERS_MAX:
                self._breakers.popitem(last=False)
            breaker = self._breakers[host] = CircuitBreaker(self._clock)
        return breaker

    def _report(self, sending: _Sending, status: int | None, started: float) -> None:
        if self._on_attempt is None:
            return
        request, seconds = sending.request, self._clock.monotonic() - started
        again = len(request.body) if sending.attempts > 1 and isinstance(request.body, bytes) else 0
        self._on_attempt(Attempt(request.slot, request.purpose, request.method, status, seconds, again))
