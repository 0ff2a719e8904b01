from __future__ import annotations

import base64
import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.core.steps import at_once
from gateway.md5_lanes.streams import Md5, new_md5
from gateway.s3.checksums import (
    ALGORITHMS,
    BodyVerifier,
    Checksum,
    ExpectedChecksums,
    composite_checksum,
    full_object_checksum,
    requested_checksums,
    upload_checksum_type,
)
from gateway.s3.signature_v4 import STREAMING_UNSIGNED_TRAILER, UNSIGNED, PayloadMode, payload_mode

MIB = 1024 * 1024

algorithms = st.sampled_from(sorted(ALGORITHMS))


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def checksum_of(algorithm: str, data: bytes) -> str:
    checksum = Checksum(algorithm)
    checksum.update(data)
    return checksum.base64()


@pytest.mark.parametrize(
    ("algorithm", "data", "expected"),
    [
        ("crc32", b"123456789", "cbf43926"),
        ("crc32c", b"123456789", "e3069283"),
        ("crc64nvme", b"123456789", "ae8b14860a799888"),
        ("sha1", b"123456789", "f7c3bc1d808e04732adf679965ccc34ca7ae3441"),
        ("sha256", b"123456789", "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225"),
        ("md5", b"123456789", "25f9e794323b453885f5181f1b624d0b"),
        ("xxhash64", b"123456789", "8cb841db40e6ae83"),
        ("xxhash64", b"", "ef46db3751d8e999"),
        ("xxhash3", b"", "2d06800538d394c2"),
        ("xxhash128", b"", "99aa06d3014798d86001c324468d497f"),
    ],
)
def test_the_value_of_every_catalogue(algorithm: str, data: bytes, expected: str) -> None:
    """The published results, big-endian as S3 writes them."""
    assert checksum_of(algorithm, data) == b64(bytes.fromhex(expected))


def test_the_published_s3_vectors() -> None:
    """CRC64NVME of 1,024 times `A`; composite SHA-256 of three parts of 5 MiB."""
    assert checksum_of("crc64nvme", b"A" * 1024) == "Qeh8oXvGiSo="
    parts = [checksum_of("sha256", letter * 5 * MIB) for letter in (b"A", b"B", b"C")]
    assert at_once(composite_checksum("sha256", parts)) == "uWBwpe1dxI4Vw8Gf0X9ynOdw/SS6VBzfWm9giiv1sf4=-3"


@given(algorithms, st.lists(st.binary(max_size=200), max_size=5))
def test_checksums_do_not_depend_on_how_data_is_cut(algorithm: str, pieces: list[bytes]) -> None:
    """bytes or views, in any pieces; the digest has the length that the table says."""
    checksum = Checksum(algorithm)
    for number, piece in enumerate(pieces):
        checksum.update(memoryview(piece) if number % 2 else piece)
    assert checksum.base64() == checksum_of(algorithm, b"".join(pieces))
    assert len(checksum.digest()) == ALGORITHMS[algorithm].size_bytes


@given(algorithms, st.binary(max_size=100))
def test_a_checksum_header_is_verified_and_echoed(algorithm: str, data: bytes) -> None:
    """Right passes and comes back as the header to answer with; wrong is BadDigest."""
    name = f"x-amz-checksum-{algorithm}"
    right = checksum_of(algorithm, data)
    verifier = BodyVerifier({name: right, "x-amz-sdk-checksum-algorithm": algorithm.upper()}, UNSIGNED)
    verifier.update(data)
    assert verifier.verify() == {name: right}
    verifier.update(b"more")
    with pytest.raises(S3Error) as refusal:
        verifier.verify()
    assert (refusal.value.code, refusal.value.status) == ("BadDigest", 400)
    assert refusal.value.elements["ExpectedDigest"] == right


@given(algorithms, st.binary(max_size=100))
def test_a_checksum_trailer_is_verified(algorithm: str, data: bytes) -> None:
    """The value comes behind the body."""
    name = f"x-amz-checksum-{algorithm}"
    verifier = BodyVerifier({"x-amz-trailer": name.upper()}, STREAMING_UNSIGNED_TRAILER)
    verifier.update(data)
    right = checksum_of(algorithm, data)
    assert verifier.verify({name: right}) == {name: right}
    with pytest.raises(S3Error, match="BadDigest"):
        verifier.verify({name: checksum_of(algorithm, data + b"x")})
    with pytest.raises(S3Error, match="InvalidRequest"):
        verifier.verify({name: "nonsense"})
    with pytest.raises(S3Error, match="MalformedTrailerError"):
        verifier.verify({})


def test_content_md5_is_verified() -> None:
    """Base64 of 16 bytes, or InvalidDigest; the right 16 bytes, or BadDigest."""
    verifier = BodyVerifier({"content-md5": b64(hashlib.md5(b"data").digest())}, UNSIGNED)
    verifier.update(b"da")
    with pytest.raises(S3Error, match="BadDigest"):
        verifier.verify()
    verifier.update(b"ta")
    assert verifier.verify() == {}


@pytest.mark.parametrize("value", ["", "x", "AAAA", b64(b"x" * 15), b64(b"x" * 17), "é", hashlib.md5(b"").hexdigest()])
def test_a_content_md5_that_is_none_is_invalid(value: str) -> None:
    """Known before the body is read."""
    with pytest.raises(S3Error, match="InvalidDigest"):
        requested_checksums({"content-md5": value})


def test_the_signed_payload_hash_is_verified() -> None:
    """The signature covers the hash, the hash covers the body."""
    mode = payload_mode(hashlib.sha256(b"data").hexdigest())
    verifier = BodyVerifier({"x-amz-checksum-sha256": b64(hashlib.sha256(b"data").digest())}, mode)
    verifier.update(b"data")
    assert set(verifier.verify()) == {"x-amz-checksum-sha256"}
    verifier.update(b"!")
    with pytest.raises(S3Error) as refusal:
        verifier.verify()
    error = refusal.value
    assert (error.code, error.status) == ("XAmzContentSHA256Mismatch", 400)
    assert error.elements["S3ComputedContentSHA256"] == hashlib.sha256(b"data!").hexdigest()


def test_without_any_promise_nothing_is_computed() -> None:
    """An unsigned body costs no hash."""
    verifier = BodyVerifier({"x-amz-checksum-mode": "ENABLED", "x-amz-checksum-type": "FULL_OBJECT"}, UNSIGNED)
    verifier.update(b"data")
    assert verifier.verify() == {}
    assert verifier.expected == ExpectedChecksums()


CRC32 = b64(zlib.crc32(b"").to_bytes(4, "big"))


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-checksum-crc32": CRC32, "x-amz-checksum-crc32c": CRC32},
        {"x-amz-checksum-crc32": CRC32, "x-amz-trailer": "x-amz-checksum-crc32"},
        {"x-amz-trailer": "x-amz-checksum-crc32,x-amz-checksum-sha1"},
        {"x-amz-trailer": "x-amz-meta-a"},
        {"x-amz-trailer": "x-amz-checksum-crc16"},
        {"x-amz-checksum-crc32": "not base64"},
        {"x-amz-checksum-crc32": "AAAA"},
        {"x-amz-checksum-crc32": b64(b"12345678")},
        {"x-amz-checksum-crc32": ""},
        {"x-amz-sdk-checksum-algorithm": "CRC32"},
        {"x-amz-sdk-checksum-algorithm": "CRC16", "x-amz-checksum-crc32": CRC32},
        {"x-amz-sdk-checksum-algorithm": "SHA1", "x-amz-checksum-crc32": CRC32},
    ],
)
def test_contradictory_or_undecodable_requests_are_invalid(headers: dict[str, str]) -> None:
    """Known before the body is read (S3 API, "Checking object integrity")."""
    with pytest.raises(S3Error) as refusal:
        requested_checksums(headers)
    assert (refusal.value.code, refusal.value.status) == ("InvalidRequest", 400)


def test_a_trailer_needs_a_body_with_trailers() -> None:
    """Announced where none can come, it would never be checked."""
    with pytest.raises(S3Error, match="InvalidRequest"):
        BodyVerifier({"x-amz-trailer": "x-amz-checksum-crc32"}, PayloadMode(streaming=True, signed=True))


def test_checksums_of_the_object_are_not_those_of_the_body() -> None:
    """CompleteMultipartUpload sends the object's checksum along with a body of XML."""
    headers = {"x-amz-checksum-crc32": CRC32, "content-md5": b64(hashlib.md5(b"<xml/>").digest())}
    verifier = BodyVerifier(headers, UNSIGNED, of_body=False)
    verifier.update(b"<xml/>")
    assert verifier.verify() == {}
    verifier.update(b"!")
    with pytest.raises(S3Error, match="BadDigest"):
        verifier.verify()


@given(st.sampled_from(["crc32", "crc32c", "crc64nvme"]), st.lists(st.binary(max_size=300), max_size=5))
def test_the_crc_of_the_whole_follows_from_the_parts(algorithm: str, parts: list[bytes]) -> None:
    """FULL_OBJECT needs no second pass over the data; empty parts change nothing. Hashes cannot be combined."""
    known = [(checksum_of(algorithm, part), len(part)) for part in parts]
    assert at_once(full_object_checksum(algorithm, known)) == checksum_of(algorithm, b"".join(parts))
    with pytest.raises(S3Error, match="InvalidRequest"):
        at_once(full_object_checksum("sha256", []))


@pytest.mark.parametrize(
    ("algorithm", "given_type", "expected"),
    [
        (None, None, ("crc64nvme", "FULL_OBJECT")),
        ("CRC64NVME", None, ("crc64nvme", "FULL_OBJECT")),
        ("CRC32", None, ("crc32", "COMPOSITE")),
        ("CRC32C", "FULL_OBJECT", ("crc32c", "FULL_OBJECT")),
        ("SHA256", None, ("sha256", "COMPOSITE")),
        ("XXHASH3", "COMPOSITE", ("xxhash3", "COMPOSITE")),
    ],
)
def test_checksum_types_have_their_defaults(
    algorithm: str | None, given_type: str | None, expected: tuple[str, str]
) -> None:
    """The table of the S3 documentation."""
    assert upload_checksum_type(algorithm, given_type) == expected


@pytest.mark.parametrize(
    ("algorithm", "given_type"),
    [(None, "COMPOSITE"), ("CRC64NVME", "COMPOSITE"), ("SHA1", "FULL_OBJECT"), ("CRC32", "OTHER"), ("CRC16", None)],
)
def test_pairs_that_do_not_exist_are_invalid(algorithm: str | None, given_type: str | None) -> None:
    """Refused at Create, before any part is sent."""
    with pytest.raises(S3Error, match="InvalidRequest"):
        upload_checksum_type(algorithm, given_type)


@pytest.mark.parametrize("on_threads", [False, True])
def test_only_threads_hash_together(monkeypatch: pytest.MonkeyPatch, on_threads: bool) -> None:
    """The event loop waits for no other thread, whatever MD5 it needs; the digests are the same."""
    made: list[Md5] = []

    def new() -> Md5:
        made.append(new_md5())
        return made[-1]

    monkeypatch.setattr("gateway.s3.checksums.new_md5", new)
    content = bytes(100_000)
    promised = {"content-md5": b64(hashlib.md5(content).digest())}
    for headers, also in ((promised, ()), ({}, ("md5",)), ({}, ())):
        verifier = BodyVerifier(headers, UNSIGNED, also=also, on_threads=on_threads)
        verifier.update(content)
        verifier.verify()
    assert len(made) == (2 if on_threads else 0)
    assert all(one.digest() == hashlib.md5(content).digest() for one in made)
