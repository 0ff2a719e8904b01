"""HTTP's chunked coding, taken apart wherever the network cuts it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.edge.request_parsing import SMALL_CHUNKS_MAX, BodyQueue, ChunkedDecoder

PIECES = st.lists(st.binary(min_size=1, max_size=300), max_size=12)
EXTENSIONS = st.sampled_from([b"", b";a", b";a=b", b';a="x y"'])
TRAILERS = st.sampled_from([b"", b"X: y\r\n", b"x-amz-checksum-crc32: AAAA==\r\nY:\r\n"])
CUTS = st.lists(st.integers(min_value=0, max_value=4000), max_size=20)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[first:stop] for first, stop in itertools.pairwise(bounds)]


def encoded(pieces: list[bytes], extension: bytes, trailer: bytes) -> bytes:
    chunks = [b"%X%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces]
    return b"".join(chunks) + b"0" + extension + b"\r\n" + trailer + b"\r\n"


@given(PIECES, EXTENSIONS, TRAILERS, CUTS, st.binary(max_size=20))
def test_the_payload_comes_out_whatever_the_cuts(
    pieces: list[bytes], extension: bytes, trailer: bytes, places: list[int], behind: bytes
) -> None:
    """Exactly the payload, and exactly what lies behind the body, byte for byte."""
    decoder, payload, rest = ChunkedDecoder(), bytearray(), b""
    for part in cut(encoded(pieces, extension, trailer) + behind, places):
        rest += part if decoder.complete else decoder.feed(part, payload.extend)
    assert decoder.complete
    assert bytes(payload) == b"".join(pieces)
    assert rest == behind


@given(st.binary(max_size=200), CUTS)
def test_noise_is_refused_or_waits_and_the_cuts_do_not_matter(noise: bytes, places: list[int]) -> None:
    """Two ways of cutting the same bytes never lead to two readings of them."""

    def read(parts: list[bytes]) -> tuple[bytes, object]:
        decoder, payload = ChunkedDecoder(), bytearray()
        try:
            for part in parts:
                if not decoder.complete:
                    decoder.feed(part, payload.extend)
        except S3Error as error:
            return bytes(payload), error.code
        return bytes(payload), decoder.complete

    assert read([noise]) == read(cut(noise, places))


@given(PIECES, CUTS, st.binary(max_size=20))
def test_a_counted_body_ends_where_its_length_says(pieces: list[bytes], places: list[int], behind: bytes) -> None:
    """And what is taken is what was fed, in order."""
    body = b"".join(pieces)
    queue, rest, taken = BodyQueue(len(body)), b"", b""
    for part in cut(body + behind, places):
        rest += queue.feed(part)
        if len(part) % 2 and queue:
            taken += queue.take()
    while queue:
        taken += queue.take()
    assert queue.complete
    assert (taken, rest) == (body, behind)
    assert queue.queued_bytes == 0


def test_large_pieces_are_not_copied() -> None:
    """What the socket gave is what the application gets; only small pieces are joined."""
    large, queue = bytes(256 * 1024), BodyQueue(1024 * 1024)
    queue.feed(large)
    queue.feed(large)
    assert queue.take() is large
    assert queue.take() is large
    for _ in range(3):
        queue.feed(b"ab")
    assert queue.take() == b"ababab"
    assert not queue


@pytest.mark.parametrize("before", [b"", b"100000\r\n%b\r\n" % bytes(2**20)], ids=["first", "behind a large one"])
def test_many_small_chunks_are_refused(before: bytes) -> None:
    """As many as 256 KiB make up for, wherever they are."""
    decoder = ChunkedDecoder()
    decoder.feed(before + b"1\r\nx\r\n" * SMALL_CHUNKS_MAX, lambda _: None)
    with pytest.raises(S3Error, match="BadRequest"):
        decoder.feed(b"1\r\nx\r\n" * 5, lambda _: None)


def test_a_failed_body_says_so_again() -> None:
    """The failure is kept for whoever reads later."""
    queue = BodyQueue(None)
    with pytest.raises(S3Error):
        queue.feed(b"nonsense\r\n")
    assert queue.failure is not None
    assert not queue.complete
