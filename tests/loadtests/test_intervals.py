from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.harness.intervals import (
    Interval,
    difference_of,
    highest,
    lowest,
    mean_of,
    number,
    percentile,
    ratio_of,
    t_975,
)

values = st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=12)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (4, 2.776), (30, 2.042), (60, 2.000), (1000, 1.962)])
def test_the_quantile_of_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    """Student's t is right to three digits within the table and beyond it."""
    assert t_975(freedom) == pytest.approx(quantile, abs=0.0015)


def test_no_degree_of_freedom_has_no_quantile() -> None:
    """One round cannot have an interval, and asking for one is an error."""
    with pytest.raises(ValueError, match="0 degrees"):
        t_975(0)


def test_one_round_has_no_interval() -> None:
    """A single round gives a figure and says that it has no interval."""
    assert mean_of([1.0]) == Interval(1.0, None, None)
    assert str(mean_of([1.0])) == "1 (one round: no interval)"


def test_the_interval_of_known_rounds() -> None:
    """Ratios 1/2, 1, 2: mean 1, standard error ln 2 / sqrt(3), t of two degrees of freedom."""
    half = 4.303 * math.log(2) / math.sqrt(3)
    found = ratio_of([1, 2, 4], [2, 2, 2])
    assert (found.middle, found.low, found.high) == pytest.approx((1, math.exp(-half), math.exp(half)))


def test_differences_are_averaged_as_they_are() -> None:
    """Worked by hand: 1, 2 and 3 more; none, or less, is a difference like any other."""
    found = difference_of([2, 3, 4], [1, 1, 1])
    half = t_975(2) * 1 / math.sqrt(3)
    assert (found.middle, found.low, found.high) == pytest.approx((2, 2 - half, 2 + half))
    assert difference_of([1, 1], [1, 3]).middle == -1
    assert difference_of([1], [3]) == Interval(-2, None, None)


@given(values)
def test_the_mean_lies_in_its_interval(series: list[float]) -> None:
    """The interval is around the mean, whatever was measured."""
    found = mean_of(series)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.middle <= found.high


@given(values, st.randoms(use_true_random=False))
def test_the_mood_of_the_machine_cancels(series: list[float], rng: random.Random) -> None:
    """What slows both of a pair in the same round changes nothing in their ratio."""
    other = [value * 3 for value in series]
    moods = [rng.uniform(0.5, 20) for _ in series]
    slowed = ratio_of(
        [value * mood for value, mood in zip(series, moods, strict=True)],
        [value * mood for value, mood in zip(other, moods, strict=True)],
    )
    assert slowed.middle == pytest.approx(1 / 3)
    assert slowed.high == pytest.approx(1 / 3)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of 4,000 experiments of five noisy pairs, 95% have the true ratio in their interval, give or take one percent."""
    rng = random.Random(11)
    covered = 0
    for _ in range(4000):
        moods = [rng.gauss(0, 1) for _ in range(5)]
        ours = [2 * math.exp(mood + rng.gauss(0, 0.3)) for mood in moods]
        found = ratio_of(ours, [math.exp(mood + rng.gauss(0, 0.3)) for mood in moods])
        covered += found.low is not None and found.high is not None and found.low <= 2 <= found.high
    assert 0.94 <= covered / 4000 <= 0.96


def test_pairs_need_the_same_number_of_rounds() -> None:
    """A round without its pair is refused, not dropped."""
    with pytest.raises(ValueError, match="shorter"):
        ratio_of([1, 2], [1])


def test_the_best_peer_is_the_one_with_the_best_mean() -> None:
    """One lucky round makes nobody the best."""
    series = {"lucky once": [1.0, 90.0, 90.0], "steady": [10.0, 10.0, 10.0]}
    assert lowest(series) == "steady"
    assert highest(series) == "lucky once"


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(series: list[int], share: float) -> None:
    """Nearest rank: enough values are not above it, and no smaller value has that."""
    found = percentile(series, share)

    def covers(limit: float) -> bool:
        return sum(value <= limit for value in series) >= share * len(series)

    assert covers(found)
    assert not any(covers(value) for value in series if value < found)


@pytest.mark.parametrize("share", [0, 1.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    """The zeroth percentile and those above the hundredth mean nothing."""
    with pytest.raises(ValueError, match="share"):
        percentile([1], share)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00042, "0.0004"), (0.1234, "0.123"), (9.876, "9.88"), (99.96, "100"), (1234.5, "1,234")],
)
def test_numbers_are_short_and_without_exponents(value: float, text: str) -> None:
    """Tables show three digits, or all digits before the point."""
    assert number(value) == text
