from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.s3.headers import check_copy_source, etag_matches, evaluate_read, format_http_date, if_range_holds

ETAG = '"abc"'
MODIFIED = 1_700_000_000.75
"""Between two whole seconds: conditions see the earlier one."""

SECOND = 1_700_000_000

etag_conditions = st.sampled_from([None, ETAG, "abc", 'W/"abc"', "*", '"other"', '"x", "abc"', "x, y", '"abc'])
date_conditions = st.sampled_from([None, -1, 0, 1])

NAMES = ("if-match", "if-unmodified-since", "if-none-match", "if-modified-since")


def headers_of(etags: tuple[str | None, str | None], dates: tuple[int | None, int | None]) -> dict[str, str]:
    values = (etags[0], as_date(dates[0]), etags[1], as_date(dates[1]))
    return {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}


def as_date(offset: int | None) -> str | None:
    return None if offset is None else format_http_date(SECOND + offset)


def slow_oracle(etags: tuple[str | None, str | None], dates: tuple[int | None, int | None]) -> str:
    """The table of the S3 documentation, row by row."""
    matching = {ETAG, "abc", 'W/"abc"', "*", '"x", "abc"'}
    if etags[0] is not None:
        if etags[0] not in matching:
            return "If-Match"
    elif dates[0] is not None and dates[0] < 0:
        return "If-Unmodified-Since"
    if etags[1] is not None:
        return "not-modified" if etags[1] in matching else "serve"
    return "not-modified" if dates[1] is not None and dates[1] >= 0 else "serve"


def outcome(headers: Mapping[str, str]) -> str:
    try:
        return evaluate_read(headers, etag=ETAG, last_modified=MODIFIED)
    except S3Error as error:
        return error.elements["Condition"] if error.status == 412 else error.code


@given(st.tuples(etag_conditions, etag_conditions), st.tuples(date_conditions, date_conditions))
def test_conditions_are_evaluated_in_s3s_order(
    etags: tuple[str | None, str | None], dates: tuple[int | None, int | None]
) -> None:
    """ETags override dates, preconditions come before 304, seconds are compared whole."""
    headers = headers_of(etags, dates)
    assert outcome(headers) == slow_oracle(etags, dates)


@given(st.tuples(etag_conditions, etag_conditions), st.tuples(date_conditions, date_conditions))
def test_a_copy_source_fails_where_a_read_would_not_be_served(
    etags: tuple[str | None, str | None], dates: tuple[int | None, int | None]
) -> None:
    """Copies know no 304: every failure is a 412."""
    headers = {f"x-amz-copy-source-{name}": value for name, value in headers_of(etags, dates).items()}
    if slow_oracle(etags, dates) == "serve":
        check_copy_source(headers, etag=ETAG, last_modified=MODIFIED)
        return
    with pytest.raises(S3Error, match="PreconditionFailed"):
        check_copy_source(headers, etag=ETAG, last_modified=MODIFIED)


@pytest.mark.parametrize("value", ["", "yesterday", "0", "Mon, 99 Foo 2020"])
def test_dates_that_are_none_are_ignored(value: str) -> None:
    """RFC 9110, 13.1.3 and 13.1.4."""
    headers = {"if-modified-since": value, "if-unmodified-since": value}
    assert evaluate_read(headers, etag=ETAG, last_modified=MODIFIED) == "serve"


def test_a_modification_date_in_the_future_is_ignored() -> None:
    """It says nothing about what the client has."""
    headers = {"if-modified-since": format_http_date(SECOND + 100)}
    assert evaluate_read(headers, etag=ETAG, last_modified=MODIFIED, now=SECOND + 50) == "serve"
    assert evaluate_read(headers, etag=ETAG, last_modified=MODIFIED, now=SECOND + 100) == "not-modified"


def test_without_a_date_of_our_own_only_etags_count() -> None:
    """An origin without Last-Modified makes date conditions void."""
    headers = {"if-modified-since": format_http_date(SECOND), "if-unmodified-since": format_http_date(0)}
    assert evaluate_read(headers, etag=ETAG, last_modified=None) == "serve"


def test_an_empty_if_match_matches_nothing() -> None:
    """Some clients send `If-Match: ""` for keys that must not exist."""
    assert not etag_matches('""', ETAG)
    assert not etag_matches("", ETAG)
    assert etag_matches('"a,b"', '"a,b"')
    assert etag_matches(' , ,\t"x" ,, abc', ETAG)


@pytest.mark.parametrize(
    "repeated", ['"x",{}"y"z', '{}"', '{}"z', 'x{}y"z', '"x"{}"'], ids=["list", "quote", "rest", "words", "quoted"]
)
@pytest.mark.parametrize("part", [" ", "\t ", "a ", "W/", '"', ",", '"x",', "W/ ", ", "])
def test_a_list_of_any_make_costs_what_its_length_does(repeated: str, part: str) -> None:
    """64 KiB are looked at once; what gave back what it had taken would not be done in a day."""
    etag_matches(repeated.format(part * (64 * 1024 // len(part))), ETAG)


@pytest.mark.parametrize(
    ("value", "holds"),
    [(None, True), (ETAG, True), ("abc", True), ('W/"abc"', False), ('"other"', False), ("*", False),
     (format_http_date(SECOND), True), (format_http_date(SECOND - 1), False), (format_http_date(SECOND + 1), False)],
)  # fmt: skip
def test_if_range_holds_for_exactly_this_version(value: str | None, holds: bool) -> None:
    """Strong comparison of ETags, equality of dates (RFC 9110, 13.1.5)."""
    headers = {} if value is None else {"if-range": value}
    assert if_range_holds(headers, etag=ETAG, last_modified=MODIFIED) is holds
