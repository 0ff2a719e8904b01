from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError, S3Error
from gateway.core.model import ByteRange
from gateway.s3.headers import is_one_range, parse_content_range, parse_copy_source_range, parse_range

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


def slow_oracle(header: str, size_bytes: int) -> bytes | int | None:
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
    assert answer(header, size_bytes) == slow_oracle(header, size_bytes)


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


def test_no_header_means_the_whole_object() -> None:
    """No range, no 206."""
    assert parse_range(None, 10) is None


def test_ends_beyond_the_object_are_clamped_however_long() -> None:
    """Clients ask for whole blocks of whatever size."""
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
