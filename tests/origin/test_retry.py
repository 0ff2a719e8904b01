"""When to try again, and when a dead origin is left alone."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.origin.client import OriginSettings
from gateway.origin.retry import CircuitBreaker, Failure, RetryBudget, RetryPolicy, is_retried, retry_after_seconds
from tests.support.manual_clock import ManualClock

LATER = Failure(answered=True)
SILENCE = Failure(answered=False)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_statuses_that_say_later_are_retried(status: int) -> None:
    """Overload and server errors are tried again, whatever their code."""
    assert is_retried(status, None)


@pytest.mark.parametrize(
    ("status", "code"), [(400, "InvalidArgument"), (403, "AccessDenied"), (404, "NoSuchKey"), (412, None)]
)
def test_refusals_are_final(status: int, code: str | None) -> None:
    """Other 4xx are never tried again."""
    assert not is_retried(status, code)


def test_a_request_timeout_is_retried_although_it_is_a_400() -> None:
    """S3 reports a stalled upload as 400 RequestTimeout."""
    assert is_retried(400, "RequestTimeout")


@given(seed=st.integers(), attempts=st.integers(2, 12))
def test_delays_grow_at_most_exponentially_and_end(seed: int, attempts: int) -> None:
    """Full jitter: each delay is between nothing and a ceiling that doubles up to the cap; attempts are limited."""
    settings = OriginSettings(max_attempts=attempts, backoff_base_seconds=0.1, backoff_cap_seconds=2.0)
    series = RetryPolicy(settings, random.Random(seed)).new_series(RetryBudget(), 0.0)
    for number in range(1, attempts):
        delay = series.delay_before_next(LATER, 0.0)
        assert delay is not None
        assert 0 <= delay <= min(2.0, 0.1 * 2**number)
    assert series.delay_before_next(LATER, 0.0) is None


def test_retry_after_is_honoured_up_to_the_cap() -> None:
    """The origin says how long to wait; where that is long, it is for the client to decide."""
    series = RetryPolicy(OriginSettings(retry_after_cap_seconds=10)).new_series(RetryBudget(), 0.0)
    assert series.delay_before_next(Failure(answered=True, retry_after_seconds=3.0), 0.0) == 3.0
    assert series.delay_before_next(Failure(answered=True, retry_after_seconds=10.5), 0.0) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 0.0),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_forms(value: str, seconds: float | None) -> None:
    """Seconds or a date; anything else is ignored."""
    assert retry_after_seconds({"retry-after": value}, 100.0) == seconds


def test_an_origin_that_gives_no_answer_is_given_up_in_seconds() -> None:
    """However many attempts are left, silence ends when its time is over."""
    settings = OriginSettings(max_attempts=100, unreachable_after_seconds=5.0)
    series = RetryPolicy(settings).new_series(RetryBudget(), 100.0)
    assert series.delay_before_next(SILENCE, 101.0) is not None
    assert series.delay_before_next(SILENCE, 105.1) is None


def test_the_budget_stops_retries_until_successes_refill_it() -> None:
    """When everything fails, retries stop; a success after a retry gives back what the retry took."""
    budget = RetryBudget(12)
    policy = RetryPolicy(OriginSettings(max_attempts=100))
    first = policy.new_series(budget, 0.0)
    assert first.delay_before_next(LATER, 0.0) is not None
    assert first.delay_before_next(LATER, 0.0) is not None
    assert first.delay_before_next(LATER, 0.0) is None
    assert budget.tokens == 2
    first.succeeded()
    assert budget.tokens == 7
    policy.new_series(budget, 0.0).succeeded()
    assert budget.tokens == 8


def test_the_budget_never_overflows() -> None:
    """Successes fill it to its capacity, not beyond."""
    budget = RetryBudget(10)
    budget.release(5)
    assert budget.tokens == 10


def broken(clock: ManualClock) -> CircuitBreaker:
    breaker = CircuitBreaker(clock, threshold=3, cooldown_seconds=1.0, cooldown_cap_seconds=3.0)
    breaker.probe_failed(clock.monotonic(), silent=False)
    return breaker


def test_attempts_without_an_answer_are_a_reason_to_ask_and_open_nothing() -> None:
    """So many in a row: an answer in between starts the count anew."""
    breaker = CircuitBreaker(ManualClock(), threshold=2)
    breaker.unanswered()
    breaker.answered()
    breaker.unanswered()
    assert not breaker.is_suspect
    breaker.unanswered()
    assert breaker.is_suspect
    assert not breaker.is_open
    assert breaker.may_be_probed()


def test_an_answer_to_anybody_closes_it() -> None:
    """Be it the probe's or that of a request that was under way."""
    clock = ManualClock()
    breaker = broken(clock)
    assert breaker.is_open
    assert not breaker.may_be_probed()
    asyncio.run(clock.advance(1.0))
    assert breaker.may_be_probed()
    breaker.answered()
    assert not breaker.is_open


def test_a_probe_that_fails_while_somebody_is_answered_proves_nothing() -> None:
    """A single connection may be lost."""
    clock = ManualClock()
    breaker = CircuitBreaker(clock)
    asyncio.run(clock.advance(1.0))
    breaker.answered()
    breaker.probe_failed(clock.monotonic() - 0.5, silent=True)
    assert not breaker.is_open


def test_failed_probes_come_ever_more_seldom_up_to_a_cap() -> None:
    """The pause doubles with every failed probe: 1, 2, 3, 3 seconds."""
    clock = ManualClock()
    breaker = broken(clock)
    for pause in (1.0, 2.0, 3.0, 3.0):
        asyncio.run(clock.advance(pause - 0.25))
        assert not breaker.may_be_probed()
        asyncio.run(clock.advance(0.25))
        assert breaker.may_be_probed()
        breaker.probe_failed(clock.monotonic(), silent=False)
