"""Token buckets that processes share: never more than they promise, never less than they could."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.token_bucket import BURST_SECONDS, ROWS_OF_BUCKET, TokenBucket
from gateway.shared.arena import SharedCells, make_shared_memory

RATES = st.floats(min_value=1.0, max_value=1e10)
PROCESSES = 3
STEPS = st.lists(
    st.tuples(st.floats(min_value=0.0, max_value=5.0), st.integers(0, PROCESSES - 1), st.integers(1, 2**20)),
    min_size=1,
    max_size=60,
)


@contextmanager
def shared(rate: float, started: float = 0.0, processes: int = PROCESSES) -> Iterator[list[TokenBucket]]:
    """One bucket as each of some processes sees it."""
    descriptor = make_shared_memory(ROWS_OF_BUCKET, processes, started)
    try:
        cells = [SharedCells.attach(descriptor, ROWS_OF_BUCKET, processes, own) for own in range(processes)]
        yield [TokenBucket(one, 0, rate) for one in cells]
    finally:
        os.close(descriptor)


def one(rate: float) -> TokenBucket:
    return TokenBucket(SharedCells.of_one_process(ROWS_OF_BUCKET, 0.0), 0, rate)


@given(RATES, STEPS, st.booleans())
def test_no_span_of_time_sees_more_than_its_rate_a_burst_and_a_piece(
    rate: float, steps: list[tuple[float, int, int]], reserving: bool
) -> None:
    """Whichever processes take, however long they have not looked; reserving: a piece passes when its debt is paid."""
    now, passed = 1000.0, []
    with shared(rate, now) as buckets:
        for pause, process, count in steps:
            now += pause
            delay = buckets[process].delay_seconds(now)
            if reserving or delay <= 0:
                buckets[process].take(count)
                passed.append((now + delay, count))
    for i, (start, _) in enumerate(passed):
        for j in range(i, len(passed)):
            before_last = sum(count for _, count in passed[i:j])
            assert before_last <= (rate * (passed[j][0] - start + BURST_SECONDS)) * (1 + 1e-6) + 1


@given(RATES, st.lists(st.tuples(st.integers(0, PROCESSES - 1), st.integers(1, 2**20)), min_size=1, max_size=60))
def test_who_waits_as_told_gets_the_whole_rate(rate: float, pieces: list[tuple[int, int]]) -> None:
    """No time is lost between pieces, and none of the rate: whether one process takes them or each in turn."""
    now = 0.0
    with shared(rate) as buckets:
        for process, count in pieces:
            now += buckets[process].delay_seconds(now)
            buckets[process].take(count)
    due = max(0.0, sum(count for _, count in pieces[:-1]) / rate - BURST_SECONDS)
    assert abs(now - due) <= 1e-5 * (1 + due)


def test_what_others_do_not_use_is_there_for_one() -> None:
    """However long the others have been away, it passes at the whole rate, and saves up no more than a burst."""
    with shared(1000.0) as buckets:
        for look in range(1, 50):
            assert buckets[0].delay_seconds(look * 100.0) == 0
            buckets[0].take(100)
            assert buckets[0].delay_seconds(look * 100.0) == 0
            buckets[0].take(1000)
            assert buckets[0].delay_seconds(look * 100.0) == 1
        assert buckets[2].delay_seconds(5001.0) == 0
        buckets[2].take(2100)
        assert buckets[1].delay_seconds(5001.0) == 2


def test_what_was_given_back_may_pass_again() -> None:
    """A piece that did not pass costs nothing; nobody gains by giving back."""
    bucket = one(1000.0)
    bucket.take(600)
    assert bucket.delay_seconds(0.0) == 0.5
    bucket.release(600)
    assert bucket.delay_seconds(0.0) == 0.0
    bucket.take(600)
    bucket.delay_seconds(10.0)
    bucket.release(600)
    assert bucket.delay_seconds(10.0) == 0.0
    bucket.take(1100)
    assert bucket.delay_seconds(10.0) == 1.0


def test_a_bucket_goes_on_exactly_after_ten_years_at_a_hundred_gigabytes_a_second() -> None:
    """To a few kilobytes: neither counter nor clock comes to its end."""
    rate, ten_years = 100e9, 10 * 365 * 86400.0
    bucket = one(rate)
    bucket.take(int(rate * ten_years) // 4)  # one process's counter holds nine exabytes
    assert bucket.delay_seconds(ten_years) == 0
    bucket.take(int(rate * BURST_SECONDS) + 10**9)
    assert bucket.delay_seconds(ten_years) == pytest.approx(0.01, abs=1e-6)


CHANGES = st.lists(
    st.tuples(st.floats(0.001, 5.0), st.integers(0, PROCESSES - 1), st.integers(1, 2**20), st.none() | RATES),
    min_size=1,
    max_size=60,
)


@given(RATES, CHANGES)
def test_no_span_sees_more_than_the_rates_that_were_in_force(
    rate: float, steps: list[tuple[float, int, int, float | None]]
) -> None:
    """Whichever process changes the rate, and whichever takes: what has flowed at each rate, a burst and a piece."""
    now, flowed, greatest, passed = 1000.0, 0.0, rate, list[tuple[float, int]]()
    with shared(rate, now) as buckets:
        for pause, process, count, new_rate in steps:
            now += pause
            flowed += rate * pause
            if new_rate is not None:
                buckets[process].change_rate(new_rate, now)
                rate, greatest = new_rate, max(greatest, new_rate)
            bucket = buckets[(process + 1) % PROCESSES]
            if bucket.delay_seconds(now) <= 0:
                bucket.take(count)
                passed.append((flowed, count))
            assert bucket.rate == rate
    for i, (start, _) in enumerate(passed):
        for j in range(i, len(passed)):
            before_last = sum(count for _, count in passed[i:j])
            assert before_last <= (passed[j][0] - start + greatest * BURST_SECONDS) * (1 + 1e-6) + 1


@given(RATES, RATES, st.integers(1, 50))
def test_who_waits_gets_the_new_rate_from_the_change_on(before: float, after: float, pieces: int) -> None:
    """Neither less, nor what the old rate would have been."""
    with shared(before) as buckets:
        buckets[0].take(int(before * BURST_SECONDS) + 1)
        buckets[1].change_rate(after, 100.0)
        buckets[2].take(buckets[2].taken_bytes())
        now, first = 100.0, buckets[0].delay_seconds(100.0) + 100.0
        for number in range(pieces):
            now += buckets[number % PROCESSES].delay_seconds(now)
            buckets[number % PROCESSES].take(2**20)
        assert abs(now - first - (pieces - 1) * 2**20 / after) <= 1e-5 * now + 2 * BURST_SECONDS


def test_a_process_that_was_stopped_while_it_changed_the_rate_changes_nothing_later() -> None:
    """What it had decided then is older than what others have decided since."""
    with shared(1000.0) as buckets:
        buckets[0].change_rate(500.0, 2.0)
        buckets[1].change_rate(100.0, 3.0)
        buckets[0].change_rate(900.0, 2.5)
        assert [one.delay_seconds(4.0) for one in buckets] == [0.0] * PROCESSES
        assert {one.rate for one in buckets} == {100.0}


def test_a_record_half_written_is_not_believed() -> None:
    """A process killed while it writes: the rate before holds on, for all."""
    with shared(1000.0) as buckets:
        buckets[0].change_rate(500.0, 2.0)
        buckets[0]._changed_at[0] = 3.0  # as if the time came before the record
        assert buckets[1].delay_seconds(4.0) == 0.0
        assert buckets[1].rate == 1000.0
        buckets[2].change_rate(100.0, 5.0)
        assert (buckets[1].delay_seconds(6.0), buckets[1].rate) == (0.0, 100.0)
