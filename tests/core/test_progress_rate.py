"""How fast work goes and how long the rest takes: nothing before it is known, and nothing of long ago."""

from __future__ import annotations

import pytest

from gateway.core.progress_rate import KNOWN_SECONDS, SAMPLE_SECONDS, ProgressRate

WINDOW = 30.0


def test_nothing_is_said_before_there_are_two_looks() -> None:
    """One look tells no rate, and two at once neither."""
    rate = ProgressRate(WINDOW)
    assert (rate.bytes_per_second, rate.seconds_left(1)) == (None, None)
    rate.note(5.0, 100)
    rate.note(5.0, 200)
    assert rate.bytes_per_second is None


def test_one_jump_is_no_rate() -> None:
    """A large part has come; when the next one comes, nobody knows."""
    rate = ProgressRate(WINDOW)
    for second in range(20):
        rate.note(float(second), 0 if second < 8 else 1600)
        assert rate.seconds_left(1600) is None
    rate.note(20.0, 4000)
    assert rate.seconds_left(1600) == pytest.approx(8.0)


def test_nothing_is_said_of_the_rest_at_once() -> None:
    """The first moments are not like the rest: a bucket of tokens is full, or nothing has come yet."""
    rate = ProgressRate(WINDOW)
    rate.note(0.0, 0)
    for tenth in range(1, 100):
        rate.note(tenth / 10, tenth * 10)
        assert (rate.seconds_left(100) is None) is (tenth / 10 < KNOWN_SECONDS)
        assert rate.bytes_per_second == pytest.approx(100)


def test_what_was_seen_long_ago_does_not_count_and_is_not_kept() -> None:
    """Slow for an hour, looked at all the time, and fast now."""
    rate = ProgressRate(WINDOW)
    for tenth in range(36_000):
        rate.note(tenth / 10, tenth)
    for tenth in range(36_000, 36_000 + int(WINDOW) * 10 + 20):
        rate.note(tenth / 10, 36_000 + 10 * (tenth - 36_000))
    assert rate.seconds_left(1000) == pytest.approx(10.0, rel=0.01)
    assert len(rate._seen) <= 2 * WINDOW / SAMPLE_SECONDS + 2


def test_what_falls_back_has_begun_anew() -> None:
    """Another save of the checkpoint."""
    rate = ProgressRate(WINDOW)
    for second in range(10):
        rate.note(float(second), 1000 * second)
    rate.note(10.0, 5)
    assert (rate.bytes_per_second, rate.seconds_left(10)) == (None, None)
