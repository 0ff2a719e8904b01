"""Framing of uploads with a checksum behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.origin.client import StreamedBody
from gateway.origin.request_body import CHUNK_BYTES, TrailerChunks, encoded_length
from tests.support.strict_chunks import UnsignedChunks

NAME = "x-amz-checksum-crc32c"


async def chunks_of(pieces: Sequence[bytes]) -> AsyncIterator[bytes | memoryview]:
    for piece in pieces:
        yield memoryview(piece)


def body(pieces: Sequence[bytes], length: int | None) -> StreamedBody:
    return StreamedBody(chunks_of(pieces), length, trailer_name=NAME, trailer_value=lambda: "AAAAAA==")


async def framed(source: StreamedBody) -> list[bytes]:
    return [bytes(piece) async for piece in TrailerChunks(source)]


sizes = st.lists(st.sampled_from([0, 1, 7, 65536, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]), max_size=5)


@given(sizes=sizes, known=st.booleans())
def test_a_strict_decoder_gets_the_payload_back(sizes: list[int], known: bool) -> None:
    """However the payload is cut into pieces, what is framed decodes to it, and the length was foretold."""
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    total = sum(sizes)

    async def round_trip() -> None:
        wire = b"".join(await framed(body(pieces, total if known else None)))
        if known:
            assert len(wire) == encoded_length(body([], total))
        decoder = UnsignedChunks(aiter_of(wire), total)
        assert b"".join([piece async for piece in decoder.pieces()]) == b"".join(pieces)
        assert decoder.trailers == {NAME: "AAAAAA=="}

    asyncio.run(round_trip())


async def aiter_of(data: bytes) -> AsyncIterator[bytes]:
    for offset in range(0, len(data), 100_000):
        yield data[offset : offset + 100_000]


@pytest.mark.parametrize("length", [2, 4])
def test_a_payload_of_the_wrong_length_never_ends_well(length: int) -> None:
    """Too short or too long: the terminator is never sent."""
    with pytest.raises(S3Error, match="IncompleteBody"):
        asyncio.run(framed(body([b"abc"], length)))


def test_an_unknown_checksum_has_no_length() -> None:
    """Its value cannot be foretold, so the body goes out in HTTP chunks."""
    source = StreamedBody(chunks_of([]), 3, trailer_name="x-amz-checksum-new", trailer_value=lambda: "?")
    assert encoded_length(source) is None
