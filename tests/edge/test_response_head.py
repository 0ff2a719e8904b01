"""Heads of responses: whatever goes into one stays in its line, and the length is told once."""

from __future__ import annotations

import pytest

from gateway.edge.response import response_head


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
