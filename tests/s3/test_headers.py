"""Headers: which travel on, dates, ETags, ranges, conditions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from email.utils import formatdate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError, S3Error
from gateway.core.model import ByteRange
from gateway.s3.headers import (
    MD5_OF_NOTHING,
    EncodedHeaders,
    check_copy_source,
    etag_matches,
    evaluate_read,
    filter_request_headers,
    filter_response_headers,
    format_http_date,
    format_iso_date,
    if_range_holds,
    is_md5_etag,
    is_one_range,
    multipart_etag,
    parse_content_range,
    parse_copy_source_range,
    parse_http_date,
    parse_range,
    plain_etag,
    quote,
    stored_headers,
    strong_etag,
    unquote,
)


def test_headers_that_nobody_knows_go_along() -> None:
    """Only what belongs to the client's connection and signature stays behind."""
    sent = {
        "host": "gateway",
        "authorization": "AWS4-HMAC-SHA256 …",
        "x-amz-date": "20260101T000000Z",
        "x-amz-security-token": "token",
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "content-length": "3",
        "expect": "100-continue",
        "connection": "keep-alive, X-Private",
        "x-private": "hop",
        "x-amz-brand-new": "1",
        "x-unknown": "2",
        "content-type": "text/plain",
    }
    assert filter_request_headers(sent) == {"x-amz-brand-new": "1", "x-unknown": "2", "content-type": "text/plain"}


def test_the_framing_of_the_body_is_not_stored_with_the_object() -> None:
    """`aws-chunked` leaves Content-Encoding, other codings stay, an empty header goes."""
    assert filter_request_headers({"content-encoding": "aws-chunked"}) == {}
    assert filter_request_headers({"content-encoding": "gzip, aws-chunked"}) == {"content-encoding": "gzip"}
    assert filter_request_headers({"content-encoding": "aws-chunked,br"}) == {"content-encoding": "br"}
    for unframed in ("gzip", "gzip, br", "gzip,br", ""):
        assert filter_request_headers({"content-encoding": unframed}) == {"content-encoding": unframed}


def test_what_says_nothing_of_a_trace_stays_behind() -> None:
    """A `tracestate` that does not parse (W3C Trace Context, 3.3); `traceparent` goes along all the same."""
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    sent = {"traceparent": traceparent, "tracestate": "a=b, c = d"}
    assert filter_request_headers(sent) == {"traceparent": traceparent}
    sent = {"traceparent": traceparent, "tracestate": "a=b ,c=d"}
    assert filter_request_headers(sent) == {"traceparent": traceparent, "tracestate": "a=b,c=d"}


def test_the_origins_request_id_gets_a_name_of_its_own() -> None:
    """The gateway has request ids; the origin's stays findable."""
    headers = filter_response_headers({"x-amz-request-id": "R1", "date": "…", "server": "moto", "etag": '"e"'})
    assert headers == [("etag", '"e"'), ("x-forebay-origin-request-id", "R1")]


def test_connection_names_no_header_that_the_origin_goes_by() -> None:
    """`Connection` is unsigned: it must not take a condition, a range or an x-amz-* field out of a request."""
    kept = {
        "x-amz-meta-a": "1",
        "content-type": "text/plain",
        "content-md5": "…",
        "if-none-match": "*",
        "range": "bytes=0-1",
        "x-forebay-hop": "another",
    }
    assert filter_request_headers(kept | {"connection": ", ".join([*kept, "x-private"]), "x-private": "hop"}) == kept


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb", "a\0b"])
def test_encoded_headers_have_no_value_that_could_forge_an_answer(value: str) -> None:
    """They are written as they are, many times: each is one line."""
    with pytest.raises(ValueError, match="line break"):
        EncodedHeaders.of([("etag", '"e"'), ("x-amz-meta-a", value)])
    assert EncodedHeaders.of([("etag", '"e"')]).lines == b'etag: "e"\r\n'


def test_headers_that_were_encoded_come_back() -> None:
    """Names and values as they were, whatever is in a value; none of none."""
    headers = [("etag", '"e: 1"'), ("x-amz-meta-a", ""), ("x-amz-meta-b", " caf\xe9 : x "), ("vary", "a, b")]
    encoded = EncodedHeaders.of(headers)
    assert encoded.lines == b'etag: "e: 1"\r\nx-amz-meta-a: \r\nx-amz-meta-b:  caf\xe9 : x \r\nvary: a, b\r\n'
    assert encoded.pairs == headers
    assert EncodedHeaders.of([]).pairs == []


def test_metadata_and_standard_headers_come_back() -> None:
    """As they were given; what was about the request alone does not."""
    given = {
        "content-type": "application/x-tar",
        "content-encoding": "gzip",
        "expires": "Thu, 01 Dec 2026 16:00:00 GMT",
        "x-amz-meta-step": "1200",
        "x-amz-acl": "private",
        "content-md5": "abc",
        "if-none-match": "*",
        "x-amz-checksum-algorithm": "CRC32",
    }
    assert stored_headers(given) == {
        "content-type": "application/x-tar",
        "content-encoding": "gzip",
        "expires": "Thu, 01 Dec 2026 16:00:00 GMT",
        "x-amz-meta-step": "1200",
    }


def test_type_class_and_number_of_tags_are_said() -> None:
    """S3's default type always, a class where it is not STANDARD; the values of tags are nobody's business here."""
    assert stored_headers({"x-amz-storage-class": "STANDARD"}) == {"content-type": "binary/octet-stream"}
    assert stored_headers({"x-amz-storage-class": "STANDARD_IA"})["x-amz-storage-class"] == "STANDARD_IA"
    assert stored_headers({"x-amz-tagging": "a=1&b=&c=%26"})["x-amz-tagging-count"] == "3"
    assert "x-amz-tagging-count" not in stored_headers({"x-amz-tagging": ""})


MIB = 1024 * 1024


def test_quotes_are_put_on_and_taken_off_once() -> None:
    """Clients send both forms."""
    assert quote("abc") == quote('"abc"') == '"abc"'
    assert unquote('"abc"') == unquote("abc") == unquote(' "abc" ') == "abc"
    assert unquote('"') == '"'


def test_the_etag_of_parts_is_s3s() -> None:
    """Three parts of 5 MiB of A, B, C, against the published value."""
    parts = [hashlib.md5(letter * 5 * MIB).hexdigest() for letter in (b"A", b"B", b"C")]
    assert multipart_etag(parts) == '"b2add96cc9702bbf4efb0ccdfc6b7747-3"'
    assert multipart_etag([quote(part) for part in parts]) == '"b2add96cc9702bbf4efb0ccdfc6b7747-3"'


@pytest.mark.parametrize("parts", [[], ["0" * 32, "not-an-md5"], ["0" * 32 + "-2"]])
def test_etags_that_are_no_md5_foretell_nothing(parts: list[str]) -> None:
    """Encrypted parts have ETags of their own kind."""
    assert multipart_etag(parts) is None


@pytest.mark.parametrize(("etag", "is_md5"), [(f'"{MD5_OF_NOTHING}"', True), (MD5_OF_NOTHING, True),
                                              (f'"{MD5_OF_NOTHING}-1"', False), ("", False)])  # fmt: skip
def test_only_32_hex_digits_look_like_an_md5(etag: str, is_md5: bool) -> None:
    """A part count gives a multipart object away."""
    assert is_md5_etag(etag) == is_md5


@pytest.mark.parametrize("written", ["{}", '"{}"', '""{}""', 'W/"{}"', ' "{}" '])
def test_etags_compare_however_they_are_written(written: str) -> None:
    """Digits of an MD5 in capitals, too; of other ETags, capitals count."""
    for etag in (MD5_OF_NOTHING, f"{MD5_OF_NOTHING}-12"):
        assert plain_etag(written.format(etag)) == plain_etag(written.format(etag.upper())) == etag
        assert strong_etag(written.format(etag)) == f'"{etag}"'
    assert plain_etag(written.format("CIDu8ME=")) == "CIDu8ME="


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
@example("Sun, 06 Xxx 1994 08:49:37 GMT")
@example("Sun, 00 Nov 1994 08:49:37 GMT")
@example("Sun, 06 Nov 1994 25:49:37 GMT")
@example("Sun, 06 Nov 1994 08:60:37 GMT")
@example("Sun, 06 Nov 1994 08:49:37 CET")
@example("Sun, 06 Nov 1994 08:49:37")
@example("Sun, 06 Nov 0001 08:49:37 GMT")
def test_anything_else_is_no_date(text: str) -> None:
    """Nonsense is None, never an exception: conditions ignore it, as RFC 9110 wants."""
    assert parse_http_date(text) is None


def test_fractions_are_cut_off() -> None:
    """HTTP dates have seconds only; rounding up would be a date in the future."""
    assert format_http_date(1255369800.999) == "Mon, 12 Oct 2009 17:50:00 GMT"
    assert format_iso_date(1255369800.999) == "2009-10-12T17:50:00Z"
    assert format_http_date(-0.5) == "Wed, 31 Dec 1969 23:59:59 GMT"


positions = st.integers(0, 12)
well_formed = st.one_of(
    st.builds("bytes={}-{}".format, positions, positions),
    st.builds("bytes={}-".format, positions),
    st.builds("bytes=-{}".format, positions),
)


def answer(header: str | None, size_bytes: int) -> bytes | int | None:
    """The bytes of `bytes(range(size))` that are served; None for 200, 416 for InvalidRange."""
    try:
        byte_range = parse_range(header, size_bytes)
    except S3Error as error:
        return error.status
    if byte_range is None:
        return None
    return bytes(range(size_bytes))[byte_range.first : byte_range.stop]


def range_oracle(header: str, size_bytes: int) -> bytes | int | None:
    """The same by filtering every position, as the S3 documentation puts it in words."""
    first, _, last = header.removeprefix("bytes=").partition("-")
    if first and last and int(last) < int(first):
        return None
    if not first and size_bytes == 0 and int(last) > 0:
        return None
    wanted = bytes(
        at
        for at in range(size_bytes)
        if (int(first) <= at <= int(last or size_bytes) if first else at >= size_bytes - int(last))
    )
    return wanted or 416


@given(well_formed, st.integers(0, 10))
@example("bytes=-0", 0)
@example("bytes=0-", 0)
def test_ranges_select_what_a_slow_oracle_selects(header: str, size_bytes: int) -> None:
    """In every form, at every size around the borders."""
    assert answer(header, size_bytes) == range_oracle(header, size_bytes)


@given(well_formed)
def test_one_range_is_recognised(header: str) -> None:
    """What is in S3's grammar selects bytes, or nothing that exists; only what is not is ignored."""
    assert is_one_range(header) == (answer(header, 5) is not None)


@pytest.mark.parametrize(
    "header",
    ["", "bytes", "bytes=", "bytes=-", "bytes=5-1", "bytes=0-1,3-4", "bytes= 0-1", "bytes=0 -1", " bytes=0-1",
     "bytes=0-1 ", "bytes=a-b", "bytes=0x1-2", "bytes=--1", "bytes=+1-2", "bytes=-1-2", "items=0-1",
     "Bytes=0-1", "bytes:0-1",
     "bytes=\u0661-\u0662", "bytes=0-1\n", "bytes=" + "1" * 5000 + "-"],
)  # fmt: skip
def test_anything_else_is_ignored(header: str) -> None:
    """S3 serves the whole object, with status 200."""
    assert parse_range(header, 10) is None
    assert not is_one_range(header)


def test_ends_beyond_the_object_are_clamped_however_long() -> None:
    """Clients ask for whole blocks of whatever size. Without a header, it is the whole object."""
    assert parse_range(None, 10) is None
    assert parse_range("bytes=2-" + "9" * 200, 10) == ByteRange(2, 9)
    assert parse_range("bytes=-" + "9" * 200, 10) == ByteRange(0, 9)
    assert parse_range("bytes=000-0001", 10) == ByteRange(0, 1)


def test_a_refusal_carries_what_clients_need() -> None:
    """416 with the size, in the elements and in Content-Range (RFC 9110, 15.5.17)."""
    with pytest.raises(S3Error) as refusal:
        parse_range("bytes=10-", 10)
    error = refusal.value
    assert (error.code, error.status) == ("InvalidRange", 416)
    assert error.elements == {"RangeRequested": "bytes=10-", "ActualObjectSize": "10"}
    assert error.headers == {"Content-Range": "bytes */10"}


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(1, 2**63))
def test_content_ranges_are_read(first: int, more: int, behind: int) -> None:
    """What is written for clients is what is read from origins."""
    byte_range = ByteRange(first, first + more)
    size_bytes = first + more + behind
    assert parse_content_range(f"bytes {byte_range.first}-{byte_range.last}/{size_bytes}") == (byte_range, size_bytes)


@pytest.mark.parametrize(
    "value", ["", "bytes */10", "bytes 0-9/*", "bytes 5-1/10", "bytes 0-10/10", "bytes=0-1/10", "0-1/2"]
)
def test_an_origins_nonsense_is_found_out(value: str) -> None:
    """A range that cannot be is an origin's fault, not a client's."""
    with pytest.raises(OriginBodyError):
        parse_content_range(value)


def test_copy_ranges_need_both_ends_inside_the_source() -> None:
    """Unlike GET, nothing is clamped or ignored."""
    assert parse_copy_source_range("bytes=0-9") == ByteRange(0, 9)
    assert parse_copy_source_range("bytes=0-9", 10) == ByteRange(0, 9)


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        ("bytes=0-", None),
        ("bytes=-5", None),
        ("bytes=5-1", None),
        ("0-1", None),
        ("bytes=0-1,2-3", None),
        ("bytes=0-10", 10),
    ],
)
def test_bad_copy_ranges_are_refused(value: str, size_bytes: int | None) -> None:
    """InvalidArgument names the header."""
    with pytest.raises(S3Error) as refusal:
        parse_copy_source_range(value, size_bytes)
    assert refusal.value.code == "InvalidArgument"
    assert refusal.value.elements["ArgumentValue"] == value


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


def condition_oracle(etags: tuple[str | None, str | None], dates: tuple[int | None, int | None]) -> str:
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
    assert outcome(headers) == condition_oracle(etags, dates)


@given(st.tuples(etag_conditions, etag_conditions), st.tuples(date_conditions, date_conditions))
def test_a_copy_source_fails_where_a_read_would_not_be_served(
    etags: tuple[str | None, str | None], dates: tuple[int | None, int | None]
) -> None:
    """Copies know no 304: every failure is a 412."""
    headers = {f"x-amz-copy-source-{name}": value for name, value in headers_of(etags, dates).items()}
    if condition_oracle(etags, dates) == "serve":
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
