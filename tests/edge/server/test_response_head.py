"""Heads of responses: whatever goes into one stays in its line, and the length is told once."""

from __future__ import annotations

import pytest

from gateway.edge.server.response_head import checked_lines, response_head


@pytest.mark.parametrize("lines", [b"", b"etag: e\r\n", b"a: 1\r\nb: \xe9\r\n"])
def test_whole_lines_pass_as_they_are(lines: bytes) -> None:
    """Ready lines are sent without being taken apart."""
    assert checked_lines(lines) is lines


@pytest.mark.parametrize(
    "lines", [b"a: 1", b"\r\n", b"a: 1\r\n\r\n", b"\r\na: 1\r\n", b"a: 1\nb: 2\r\n", b"a: 1\rb: 2\r\n", b"a: \0\r\n"]
)
def test_lines_that_could_forge_a_response_are_refused(lines: bytes) -> None:
    """Unfinished and empty lines, and breaks or NUL within one, never reach the wire."""
    with pytest.raises(RuntimeError, match="line break"):
        checked_lines(lines)


def test_a_length_that_is_handed_on_is_the_content_length() -> None:
    """It needs no field of its own, and a HEAD tells it without a body."""
    head, framing = response_head(
        200, [], method="HEAD", http_version="1.1", keep_alive=True, lines=b"etag: e\r\n", length_bytes=7
    )
    assert head == b"HTTP/1.1 200 OK\r\netag: e\r\ncontent-length: 7\r\n\r\n"
    assert (framing.left_bytes, framing.bodiless, framing.chunked, framing.keep_alive) == (None, True, False, True)


def test_a_length_is_told_once() -> None:
    """Two lengths in one head would let two readers disagree on where the answer ends."""
    with pytest.raises(RuntimeError, match="Content-Length"):
        response_head(
            200, [(b"content-length", b"7")], method="GET", http_version="1.1", keep_alive=True, length_bytes=7
        )
