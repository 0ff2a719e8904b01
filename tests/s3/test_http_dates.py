from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.s3.headers import format_http_date, format_iso_date, parse_http_date


@given(st.integers(0, 253402300799))
def test_dates_agree_with_the_standard_library(seconds: int) -> None:
    """From 1970 to 9999, both ways."""
    text = format_http_date(seconds)
    assert text == formatdate(seconds, usegmt=True)
    assert parse_http_date(text) == seconds


@pytest.mark.parametrize(
    "text", ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
)
def test_all_three_forms_are_read(text: str) -> None:
    """RFC 9110 obliges recipients to (5.6.7)."""
    assert parse_http_date(text) == 784111777


@given(st.text(max_size=40))
def test_anything_else_is_no_date(text: str) -> None:
    """Nonsense is None, never an exception."""
    assert parse_http_date(text) is None


@pytest.mark.parametrize(
    "text",
    ["", "0", "Sun, 06 Xxx 1994 08:49:37 GMT", "Sun, 00 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 25:49:37 GMT",
     "Sun, 06 Nov 1994 08:49:37 CET", "Sun, 06 Nov 1994 08:49:37", "Sun, 06 Nov 0001 08:49:37 GMT",
     "Sun, 06 Nov 1994 08:60:37 GMT"],
)  # fmt: skip
def test_impossible_dates_are_no_dates(text: str) -> None:
    """Ignored by conditions, as RFC 9110 wants."""
    assert parse_http_date(text) is None


def test_fractions_are_cut_off() -> None:
    """HTTP dates have seconds only; rounding up would be a date in the future."""
    assert format_http_date(1255369800.999) == "Mon, 12 Oct 2009 17:50:00 GMT"
    assert format_iso_date(1255369800.999) == "2009-10-12T17:50:00Z"
    assert format_http_date(-0.5) == "Wed, 31 Dec 1969 23:59:59 GMT"
