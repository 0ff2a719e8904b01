"""Heads of answers: what they say of the body, and what is no HTTP."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.origin.http1_client.response_stream import MalformedResponse, ResponseHead, ResponseParser


def head(*lines: str, status: str = "HTTP/1.1 200 OK", bodiless: bool = False) -> ResponseHead:
    text = "\r\n".join([status, *lines, "", ""])
    return ResponseParser().head(text.encode("latin-1"), bodiless=bodiless)


def test_headers_are_those_from_end_to_end() -> None:
    """Lower case, latin-1, repeated ones joined; nothing that concerns this connection only."""
    found = head(
        "ETag: \"a\"", "X-Amz-Meta-A: caf\xe9 ", "x-amz-meta-b: 1", "X-AMZ-META-B: 2", "Content-Length: 3",
        "Connection: keep-alive, X-Private", "X-Private: 1", "Keep-Alive: timeout=5",
    )  # fmt: skip
    assert found.headers == {
        "etag": '"a"', "x-amz-meta-a": "caf\xe9", "x-amz-meta-b": "1, 2", "content-length": "3"
    }  # fmt: skip
    assert (found.status, found.length_bytes, found.keep_alive) == (200, 3, True)


def test_a_date_that_a_proxy_has_added_another_to_is_the_first() -> None:
    """Joined they would be none, and how old things are at the origin would not be told."""
    one, other = "Mon, 23 Nov 2026 10:00:00 GMT", "Mon, 23 Nov 2026 10:00:07 GMT"
    found = head(
        f"Date: {one}", f"Date: {other}", f"Last-Modified: {one}", "Last-Modified: nonsense", 'ETag: "a"', "ETag: b"
    )
    assert found.headers == {"date": one, "last-modified": one, "etag": '"a"'}


@pytest.mark.parametrize(
    ("lines", "status", "bodiless", "length"),
    [
        (["Content-Length: 7"], "HTTP/1.1 200 OK", True, 0),
        (["Content-Length: 7"], "HTTP/1.1 304 Not Modified", False, 0),
        ([], "HTTP/1.1 204 No Content", False, 0),
        (["Content-Length: 0"], "HTTP/1.1 200 OK", False, 0),
        (["Transfer-Encoding: chunked"], "HTTP/1.1 404 Not Found", False, None),
        ([], "HTTP/1.1 200 OK", False, None),
    ],
)
def test_the_length_of_the_body_is_what_rfc_9112_says(
    lines: list[str], status: str, bodiless: bool, length: int | None
) -> None:
    """RFC 9112, 6.3: by method and status first, then by the fields."""
    assert head(*lines, status=status, bodiless=bodiless).length_bytes == length


@pytest.mark.parametrize(
    ("lines", "status", "kept"),
    [
        (["Content-Length: 1"], "HTTP/1.1 200 OK", True),
        (["Content-Length: 0"], "HTTP/1.1 200 OK", True),
        (["Content-Length: 1", "Connection: close"], "HTTP/1.1 200 OK", False),
        (["Content-Length: 1"], "HTTP/1.0 200 OK", False),
        ([], "HTTP/1.1 200 OK", False),
    ],
)
def test_a_connection_is_kept_where_both_sides_may(lines: list[str], status: str, kept: bool) -> None:
    """Not by HTTP/1.0, nor where it is told to be over, nor where its end is the end of the body."""
    assert head(*lines, status=status).keep_alive is kept


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: 5", "Content-Length: 6"],
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Content-Length: +5"],
        ["Content-Length: 99999999999999999999999999"],
        ["A: b", " folded", "Content-Length: 1"],
        ["No colon here"],
        ["A\x00B: 1"],
    ],
)
def test_what_may_mean_two_things_means_nothing(lines: list[str]) -> None:
    """A body whose end is in doubt must not be taken for the object, nor what follows it for another answer."""
    with pytest.raises(MalformedResponse):
        head(*lines)


@pytest.mark.parametrize("status", ["HTTP/1.1 abc", "SSH-2.0-x", "HTTP/1.1 101 Switching Protocols", "200 OK"])
def test_other_protocols_are_refused(status: str) -> None:
    """Whoever answers on the origin's port must speak HTTP."""
    with pytest.raises(MalformedResponse):
        head("Upgrade: x", "Connection: upgrade", status=status)


@given(body=st.binary(max_size=500), cuts=st.lists(st.integers(0, 600), max_size=8), sizes=st.integers(1, 100))
def test_chunks_give_the_same_bytes_however_they_are_cut(body: bytes, cuts: list[int], sizes: int) -> None:
    """And the end is seen at the last byte, not before."""
    parser = ResponseParser()
    parser.head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", bodiless=False)
    chunks = [body[start : start + sizes] for start in range(0, len(body), sizes)]
    wire = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nx-trailer: 1\r\n\r\n"
    places = [0, *sorted(cut for cut in cuts if cut < len(wire)), len(wire)]
    found = b""
    for start, stop in pairwise(places):
        assert not parser.complete
        found += b"".join(parser.body(wire[start:stop]))
    assert (found, parser.complete) == (body, True)
