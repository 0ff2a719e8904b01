"""Token buckets: never more than they promise, never less than they could."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.token_bucket import BURST_SECONDS, TokenBucket

RATES = st.floats(min_value=1.0, max_value=1e10)
STEPS = st.lists(st.tuples(st.floats(min_value=0.0, max_value=5.0), st.integers(1, 2**20)), min_size=1, max_size=60)


@given(RATES, STEPS)
def test_no_span_of_time_sees_more_than_its_rate_a_burst_and_a_piece(
    rate: float, steps: list[tuple[float, int]]
) -> None:
    """Whenever pieces come, and however large they are."""
    bucket, now, passed = TokenBucket(rate, 0.0), 0.0, []
    for pause, count in steps:
        now += pause
        if bucket.delay_seconds(now) <= 0:
            bucket.take(count)
            passed.append((now, count))
    for i, (start, _) in enumerate(passed):
        for j in range(i, len(passed)):
            before_last = sum(count for _, count in passed[i:j])
            assert before_last <= (rate * (passed[j][0] - start + BURST_SECONDS)) * (1 + 1e-9) + 1e-3


@given(RATES, st.lists(st.integers(1, 2**20), min_size=1, max_size=60))
def test_who_waits_as_told_gets_the_whole_rate(rate: float, counts: list[int]) -> None:
    """No time is lost between pieces: all but the last have passed when the rate says so, less what was saved."""
    bucket, now = TokenBucket(rate, 0.0), 0.0
    for count in counts:
        now += bucket.delay_seconds(now)
        bucket.take(count)
    due = max(0.0, sum(counts[:-1]) / rate - BURST_SECONDS)
    assert abs(now - due) <= 1e-6 * (1 + due)


def test_what_was_given_back_may_pass_again() -> None:
    """A piece that did not pass costs nothing; nobody gains by giving back."""
    bucket = TokenBucket(1000.0, 0.0)
    bucket.take(600)
    assert bucket.delay_seconds(0.0) == 0.5
    bucket.give_back(600)
    assert bucket.delay_seconds(0.0) == 0.0
    bucket.give_back(10**6)
    bucket.take(1100)
    assert bucket.delay_seconds(0.0) == 1.0


def test_a_new_rate_holds_from_now_on() -> None:
    """What was earned before was earned at the old rate; savings shrink with the rate, debts stay."""
    bucket = TokenBucket(1000.0, 0.0)
    bucket.take(1100)
    bucket.set_rate(100.0, 0.5)
    assert bucket.delay_seconds(0.5) == 5.0
    saving = TokenBucket(1000.0, 0.0)
    saving.set_rate(10.0, 0.0)
    saving.take(11)
    assert saving.delay_seconds(0.0) == 1.0


def test_without_a_rate_nothing_passes_that_was_not_saved() -> None:
    """Until there is a rate again."""
    bucket = TokenBucket(0.0, 0.0)
    bucket.take(1)
    assert bucket.delay_seconds(1e9) == float("inf")
    bucket.set_rate(2.0, 1e9)
    assert bucket.delay_seconds(1e9) == 0.5
