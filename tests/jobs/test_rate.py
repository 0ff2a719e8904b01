"""How fast a job goes: of late, not since it began."""

from __future__ import annotations

import pytest

from gateway.jobs.runner import RATE_SECONDS, Rate


def test_nothing_is_said_before_there_are_two_looks() -> None:
    """One look tells no rate, and two at once neither."""
    rate = Rate()
    assert (rate.bytes_per_second, rate.seconds_left(1)) == (None, None)
    rate.note(5.0, 100)
    rate.note(5.0, 200)
    assert rate.bytes_per_second is None


def test_the_rate_is_that_of_the_last_while() -> None:
    """A job that was fast an hour ago and stands now has no end in sight."""
    rate = Rate()
    for second in range(100):
        rate.note(float(second), second * 1000)
    assert rate.bytes_per_second == pytest.approx(1000)
    assert rate.seconds_left(5000) == pytest.approx(5)
    for second in range(100, 100 + int(RATE_SECONDS) + 1):
        rate.note(float(second), 99_000)
    assert (rate.bytes_per_second, rate.seconds_left(5000)) == (0, None)


def test_counts_that_fall_back_are_no_negative_rate() -> None:
    """After a restart, what was done behind the place is counted again."""
    rate = Rate()
    rate.note(0.0, 500)
    rate.note(1.0, 100)
    assert rate.bytes_per_second == 0
