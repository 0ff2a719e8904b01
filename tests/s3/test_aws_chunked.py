from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.s3.aws_chunked import (
    SMALL_CHUNKS_MAX,
    AwsChunkedDecoder,
    AwsChunkedEncoder,
    encode_chunk,
    encoded_length,
    final_chunk,
)
from gateway.s3.signature_v4 import PayloadMode, SeedSignature
from tests.s3.chunks import (
    CRC32C,
    SIGNED,
    SIGNED_TRAILER,
    UNSIGNED_TRAILER,
    seed_of,
    signed_body,
    unsigned_body,
)


def decode(
    body: bytes,
    mode: PayloadMode,
    length: int,
    *,
    names: frozenset[str] = frozenset(),
    seed: SeedSignature | None = None,
    cuts: list[int] | None = None,
) -> tuple[bytes, dict[str, str]]:
    decoder = AwsChunkedDecoder(mode, length, names, seed)
    borders = [0, *sorted(cuts or []), len(body)]
    decoded = b""
    for begin, end in pairwise(borders):
        decoded += b"".join(decoder.feed(body[begin:end]))
    return decoded, decoder.finish()


Encoded = tuple[bytes, PayloadMode, int, frozenset[str], SeedSignature | None, bytes]

sizes = st.lists(st.integers(8192, 9000), max_size=3).flatmap(
    lambda large: st.builds(lambda last: [*large, *last], st.lists(st.integers(1, 9000), max_size=1))
)
"""Chunk sizes as S3 allows them: all but the last at least 8 KiB."""


@st.composite
def bodies(draw: st.DrawFn) -> Encoded:
    """An encoded body of any mode with what it decodes to."""
    chunks = [bytes([number % 256]) * size for number, size in enumerate(draw(sizes))]
    mode = draw(st.sampled_from([SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER]))
    data, seed = b"".join(chunks), seed_of()
    if mode is UNSIGNED_TRAILER:
        return unsigned_body(chunks), mode, len(data), frozenset({CRC32C}), None, data
    trailers = [(CRC32C, "AAAAAA==")] if mode.trailer else None
    names = frozenset({CRC32C}) if mode.trailer else frozenset()
    return signed_body(chunks, seed, trailers), mode, len(data), names, seed, data


@given(bodies(), st.data())
def test_bodies_decode_from_a_buffer_that_is_used_again(encoded: Encoded, data: st.DataObject) -> None:
    """However they are cut. None of the views is kept: the buffer may be overwritten after each call."""
    body, mode, length, names, seed, expected = encoded
    decoder, decoded, buffer = AwsChunkedDecoder(mode, length, names, seed), b"", bytearray(len(body))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    for begin, end in pairwise([0, *cuts, len(body)]):
        buffer[: end - begin] = body[begin:end]
        decoded += b"".join(decoder.feed(memoryview(buffer)[: end - begin].toreadonly()))
        buffer[:] = b"?" * len(buffer)
    assert decoded == expected
    assert decoder.finish() == ({CRC32C: "AAAAAA=="} if names else {})


def test_a_body_decodes_byte_by_byte() -> None:
    """The narrowest cut of all."""
    body = signed_body([b"a" * 8192, b"b"], seed_of(), [(CRC32C, "AAAAAA==")])
    cuts = list(range(1, len(body)))
    decoded, _ = decode(body, SIGNED_TRAILER, 8193, names=frozenset({CRC32C}), seed=seed_of(), cuts=cuts)
    assert decoded == b"a" * 8192 + b"b"


@given(bodies(), st.data())
def test_truncation_is_always_found_out(encoded: Encoded, data: st.DataObject) -> None:
    """Whatever is missing at the end, the body does not pass for complete."""
    body, mode, length, names, seed, _ = encoded
    kept = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(S3Error, match="IncompleteBody"):
        decode(body[:kept], mode, length, names=names, seed=seed)


@given(bodies(), st.binary(min_size=1, max_size=4))
def test_bytes_behind_the_end_are_found_out(encoded: Encoded, surplus: bytes) -> None:
    """A body that goes on is not the one that was signed."""
    body, mode, length, names, seed, _ = encoded
    with pytest.raises(S3Error, match="IncompleteBody"):
        decode(body + surplus, mode, length, names=names, seed=seed)


@given(st.data())
def test_corruption_of_a_signed_body_is_always_found_out(data: st.DataObject) -> None:
    """One changed byte anywhere, in data, framing, signatures or trailers, raises before the body is complete."""
    trailers = data.draw(st.sampled_from([None, [(CRC32C, "sOO8/Q==")]]))
    mode = SIGNED if trailers is None else SIGNED_TRAILER
    names = frozenset() if trailers is None else frozenset({CRC32C})
    body = bytearray(signed_body([b"a" * 8192, b"b" * 100], seed_of(), trailers))
    header = len(f"{8192:x};chunk-signature=") + 64 + 2
    at = data.draw(st.integers(0, header) | st.integers(header + 8190, len(body) - 1))
    flipped = body[at] ^ data.draw(st.integers(1, 255))
    harmless_case = chr(body[at]).isalpha() and flipped == body[at] ^ 0x20  # hex sizes and trailer names know no case
    body[at] = flipped
    if harmless_case:
        return
    with pytest.raises(S3Error):
        decode(bytes(body), mode, 8292, names=names, seed=seed_of())


def documented(*signatures: str) -> bytes:
    """Return the examples' chunks: 65,536 and 1,024 times `a`, and the last one without its line end."""
    chunks = zip((b"a" * 65536, b"a" * 1024, b""), signatures, strict=True)
    return b"\r\n".join(f"{len(chunk):x};chunk-signature={one}\r\n".encode() + chunk for chunk, one in chunks)


def test_the_documented_chunk_signatures() -> None:
    """The example of the S3 documentation."""
    body = documented(
        "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    )
    seed = seed_of("4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9")
    assert decode(body + b"\r\n", SIGNED, 66560, seed=seed) == (b"a" * 66560, {})


@pytest.mark.parametrize("line_end", ["\r\n", "\n\r\n"])
def test_the_documented_trailer_signature(line_end: str) -> None:
    """The trailer example of the S3 documentation; some clients put a stray line feed behind the trailer."""
    body = documented(
        "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
        "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
        "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
    )
    body += f"{CRC32C}:sOO8/Q=={line_end}x-amz-trailer-signature:".encode()
    body += b"d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n\r\n"
    seed = seed_of("106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e")
    decoded = decode(body, SIGNED_TRAILER, 66560, names=frozenset({CRC32C}), seed=seed)
    assert decoded == (b"a" * 66560, {CRC32C: "sOO8/Q=="})


def test_small_signed_chunks_are_refused_unless_last() -> None:
    """S3's minimum of 8 KiB; the error names the size."""
    body = signed_body([b"a" * 8191, b"b"], seed_of())
    with pytest.raises(S3Error) as refusal:
        decode(body, SIGNED, 8192, seed=seed_of())
    assert refusal.value.code == "InvalidChunkSizeError"
    assert refusal.value.elements == {"BadChunkSize": "8191"}


@pytest.mark.parametrize("before", [[], [b"l" * 2**20]], ids=["first", "behind a large one"])
def test_many_small_unsigned_chunks_are_refused(before: list[bytes]) -> None:
    """As many as a MiB makes up for, wherever they are; S3 takes none but the last."""
    names = frozenset({CRC32C})
    for count in (SMALL_CHUNKS_MAX, SMALL_CHUNKS_MAX + 2):
        chunks = [*before, *[b"x"] * count]
        body, length = unsigned_body(chunks), sum(map(len, chunks))
        if count == SMALL_CHUNKS_MAX:
            assert len(decode(body, UNSIGNED_TRAILER, length, names=names)[0]) == length
            continue
        with pytest.raises(S3Error) as refusal:
            decode(body, UNSIGNED_TRAILER, length, names=names)
        assert refusal.value.code == "InvalidChunkSizeError"
        assert refusal.value.elements == {"BadChunkSize": "1"}


def test_unsigned_chunks_may_have_any_size() -> None:
    """Tiny ones, and one as large as the object."""
    decoded, _ = decode(
        unsigned_body([b"a", b"b", b"c" * 100_000]), UNSIGNED_TRAILER, 100_002, names=frozenset({CRC32C})
    )
    assert decoded == b"ab" + b"c" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"\r\n",
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5;chunk-signature=" + b"0" * 64 + b"\r\nhello",
        b"5\r\nhello!\r\n",
        b"5\r\nhellooo\r\n0\r\n",
        b"6\r\nhello!\r\n",
        b"4\r\nhell\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"00000000000000005\r\nhello",
        b"5" * 1025,
        b"5\nhello\n",
    ],
)
def test_bad_framing_is_refused(body: bytes) -> None:
    """Sizes that are none, data that is longer or shorter than declared, endless lines."""
    with pytest.raises(S3Error, match="IncompleteBody"):
        decode(body, UNSIGNED_TRAILER, 5)


@pytest.mark.parametrize("length", [8291, 8293, 0])
def test_the_declared_length_must_be_met(length: int) -> None:
    """x-amz-decoded-content-length is a promise."""
    with pytest.raises(S3Error, match="IncompleteBody"):
        decode(signed_body([b"a" * 8192, b"b" * 100], seed_of()), SIGNED, length, seed=seed_of())


@pytest.mark.parametrize(
    "trailer",
    ["x-other:1", f"{CRC32C}:a\r\n{CRC32C}:b", "no-colon", f"{CRC32C}:a\r\nx-amz-trailer-signature:b", ":v"],
)
def test_bad_trailers_are_refused(trailer: str) -> None:
    """Only what was announced, each once; no signature where nothing is signed."""
    with pytest.raises(S3Error, match="MalformedTrailerError"):
        decode(unsigned_body([b"hello"], trailer), UNSIGNED_TRAILER, 5, names=frozenset({CRC32C}))


def test_announced_trailers_must_come() -> None:
    """A missing checksum is not a checksum that held."""
    with pytest.raises(S3Error, match="MalformedTrailerError"):
        decode(b"5\r\nhello\r\n0\r\n\r\n", UNSIGNED_TRAILER, 5, names=frozenset({CRC32C}))
    body = signed_body([b"hello"], seed_of()).removesuffix(b"\r\n") + f"{CRC32C}:AAAAAA==\r\n\r\n".encode()
    with pytest.raises(S3Error, match="MalformedTrailerError"):
        decode(body, SIGNED_TRAILER, 5, names=frozenset({CRC32C}), seed=seed_of())


def test_signed_chunks_need_a_signed_request() -> None:
    """Without a seed there is nothing that their signatures could build on."""
    with pytest.raises(S3Error, match="InvalidRequest"):
        AwsChunkedDecoder(SIGNED, 5, frozenset(), None)


def test_a_failed_decoder_stays_failed() -> None:
    """What comes behind an error cannot repair it."""
    decoder = AwsChunkedDecoder(UNSIGNED_TRAILER, 5, frozenset(), None)
    with pytest.raises(S3Error):
        decoder.feed(b"zz\r\n")
    with pytest.raises(S3Error):
        decoder.feed(b"5\r\nhello\r\n0\r\n\r\n")
    with pytest.raises(S3Error):
        decoder.finish()


def test_data_passes_without_being_copied_or_held() -> None:
    """Inside a chunk a piece is what arrived: memory does not grow with the chunk."""
    decoder = AwsChunkedDecoder(UNSIGNED_TRAILER, 2**40, frozenset(), None)
    decoder.feed(b"10000000000\r\n")
    arrived = b"x" * 65536
    pieces = decoder.feed(arrived)
    assert len(pieces) == 1
    assert pieces[0] is arrived


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 40))
def test_what_is_encoded_decodes_and_has_the_length_foretold(pieces: list[bytes], chunk_size: int) -> None:
    """Towards the origin: Content-Length is known before the first byte, pieces of any size are framed."""
    data = b"".join(pieces)
    encoder = AwsChunkedEncoder(len(data), chunk_size)
    body = b"".join(b"".join(encoder.encode(piece)) for piece in pieces) + encoder.finish(CRC32C, "AAAAAA==")
    assert len(body) == encoded_length(len(data), CRC32C, len("AAAAAA=="), chunk_size)
    assert decode(body, UNSIGNED_TRAILER, len(data), names=frozenset({CRC32C})) == (data, {CRC32C: "AAAAAA=="})


@given(st.binary(min_size=1, max_size=100), st.integers(1, 40))
def test_single_chunks_add_up_to_the_same(data: bytes, chunk_size: int) -> None:
    """`encode_chunk` and `final_chunk` make the same body from pieces cut by the caller."""
    chunks = [data[at : at + chunk_size] for at in range(0, len(data), chunk_size)]
    body = b"".join(map(encode_chunk, chunks)) + final_chunk(CRC32C, "AAAAAA==")
    encoder = AwsChunkedEncoder(len(data), chunk_size)
    assert body == b"".join(encoder.encode(data)) + encoder.finish(CRC32C, "AAAAAA==")


def test_the_encoder_refuses_what_was_not_declared() -> None:
    """Too much or too little data would be a broken request at the origin."""
    with pytest.raises(ValueError, match="more data"):
        list(AwsChunkedEncoder(1, 8).encode(b"ab"))
    with pytest.raises(ValueError, match="missing"):
        AwsChunkedEncoder(1, 8).finish(CRC32C, "")
    with pytest.raises(ValueError, match="final_chunk"):
        encode_chunk(b"")
