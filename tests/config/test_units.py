"""Sizes, bandwidths and durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.units import (
    SIZE_UNITS,
    TooLarge,
    format_duration,
    format_size,
    parse_bandwidth_bytes_per_second,
    parse_duration_seconds,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8MiB", 8 * 2**20), ("1TiB", 2**40), ("1.5GiB", 3 * 2**29), ("500GB", 500 * 10**9), (" 7 B ", 7), ("42", 42)],
)
def test_sizes_are_read_in_the_unit_they_name(text: str, size_bytes: int) -> None:
    """KiB to PiB are powers of 1024, KB to PB of 1000, and no unit means bytes."""
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "bad", ["", "MiB", "8Mib", "-1", "1e3", "8 M", "0x10", "1..5GiB", "8MiB/s", True, None, -5, [1]]
)
def test_what_is_no_size_is_refused(bad: object) -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="a size such as"):
        parse_size_bytes(bad)


@given(st.integers(0, 2**60))
def test_a_written_size_reads_back_exactly(size_bytes: int) -> None:
    """Formatting loses nothing, at any magnitude."""
    assert parse_size_bytes(format_size(size_bytes)) == size_bytes


@given(st.integers(1, 1024), st.sampled_from(sorted(SIZE_UNITS)))
def test_a_bandwidth_is_a_size_per_second(number: int, unit: str) -> None:
    """The same units, with /s behind."""
    assert parse_bandwidth_bytes_per_second(f"{number}{unit}/s") == number * SIZE_UNITS[unit]


@pytest.mark.parametrize("size", [2**60 + 1, "1025PiB", 1e300, "99999999999999999999PiB"])
def test_what_no_64_bits_hold_is_refused(size: object) -> None:
    """Sums of several stay far from that."""
    with pytest.raises(TooLarge, match="at most 1024PiB"):
        parse_size_bytes(size)


def test_a_bandwidth_without_its_second_is_refused() -> None:
    """`10GiB` may mean anything."""
    with pytest.raises(ValueError, match="a bandwidth such as"):
        parse_bandwidth_bytes_per_second("10GiB")


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("60s", 60.0), ("5m", 300.0), ("1.5h", 5400.0), ("2d", 172800.0), ("3", 3.0)]
)
def test_durations_are_read_in_the_unit_they_name(text: str, seconds: float) -> None:
    """ms, s, m, h, d; no unit means seconds."""
    assert parse_duration_seconds(text) == seconds


@given(st.integers(0, 10**7))
def test_a_written_duration_reads_back(seconds: int) -> None:
    """Whole seconds survive formatting."""
    assert parse_duration_seconds(format_duration(seconds)) == seconds


@pytest.mark.parametrize("bad", ["soon", "-1s", "1 week", float("nan"), float("inf"), False])
def test_what_is_no_duration_is_refused(bad: object) -> None:
    """Infinite and negative times among them."""
    with pytest.raises(ValueError, match="a duration such as"):
        parse_duration_seconds(bad)


@pytest.mark.parametrize("digits", ["9" * 400, "9" * 400 + "d"])
def test_a_number_that_no_float_holds_is_refused(digits: str) -> None:
    """As a number and as text, of a size and of a duration."""
    for value in (digits, int(digits.rstrip("d"))):
        for parse in (parse_size_bytes, parse_duration_seconds):
            with pytest.raises(ValueError, match=r"such as|at most|unit"):
                parse(value)
