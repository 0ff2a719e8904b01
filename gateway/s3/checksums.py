"""Checksums and lengths that clients declare for a body, and their verification (S3 API, "Checking object integrity").

Checksums travel as base64 of the big-endian digest, in `x-amz-checksum-NAME` headers or aws-chunked trailers. Of an
object made of parts, COMPOSITE is the checksum of the parts' raw checksums, followed by `-N`; FULL_OBJECT is the CRC of
the whole, which can be computed from the parts' CRCs and lengths alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import xxhash
from awscrt import checksums as crt

from gateway.core.errors import S3Error
from gateway.core.steps import ENTRIES, Steps, each
from gateway.md5_lanes.streams import new_md5
from gateway.s3.error_codes import s3_error
from gateway.s3.signature_v4 import PayloadMode

Buffer = bytes | memoryview

PREFIX = "x-amz-checksum-"


class _Digest(Protocol):
    def update(self, data: Buffer, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc:
    """A CRC with the interface of hashlib."""

    def __init__(self, step: Callable[[Buffer, int], int], size_bytes: int) -> None:
        self._step = step
        self._size_bytes = size_bytes
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = self._step(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size_bytes, "big")


class Algorithm(NamedTuple):
    """One checksum algorithm. `combine` makes the CRC of a whole from two CRCs and the second's length in bytes."""

    new: Callable[[], _Digest]
    size_bytes: int
    combine: Callable[[int, int, int], int] | None = None
    composite: bool = True


ALGORITHMS: Mapping[str, Algorithm] = {
    "crc32": Algorithm(lambda: _Crc(zlib.crc32, 4), 4, crt.combine_crc32),
    "crc32c": Algorithm(lambda: _Crc(crt.crc32c, 4), 4, crt.combine_crc32c),
    "crc64nvme": Algorithm(lambda: _Crc(crt.crc64nvme, 8), 8, crt.combine_crc64nvme, composite=False),
    "sha1": Algorithm(lambda: hashlib.sha1(usedforsecurity=False), 20),
    "sha256": Algorithm(hashlib.sha256, 32),
    "sha512": Algorithm(hashlib.sha512, 64),
    "md5": Algorithm(lambda: hashlib.md5(usedforsecurity=False), 16),
    "xxhash64": Algorithm(xxhash.xxh64, 8),
    "xxhash3": Algorithm(xxhash.xxh3_64, 8),
    "xxhash128": Algorithm(xxhash.xxh3_128, 16),
}
"""Lower-case name, as in `x-amz-checksum-NAME` → algorithm."""


class Checksum:
    """A running checksum; `algorithm` is a name in ALGORITHMS. `digest` computes it otherwise than that says."""

    __slots__ = ("_digest", "algorithm", "update")

    def __init__(self, algorithm: str, digest: _Digest | None = None) -> None:
        self.algorithm = algorithm
        self._digest = digest or ALGORITHMS[algorithm].new()
        self.update: Callable[[Buffer], None] = self._digest.update

    def digest(self) -> bytes:
        return self._digest.digest()

    def base64(self) -> str:
        """Return the digest as S3 writes it."""
        return base64.b64encode(self.digest()).decode()


class ExpectedChecksums(NamedTuple):
    """The checksums that the headers declare. `value` is None when the checksum comes in the trailer `trailer_name`."""

    content_md5: bytes | None = None
    algorithm: str | None = None
    value: bytes | None = None
    trailer_name: str | None = None


def requested_checksums(headers: Mapping[str, str], *, of_body: bool = True) -> ExpectedChecksums:
    """Return the checksums that a request's headers (lower-case names) ask to be verified.

    With `of_body` False only Content-MD5 counts: the checksum headers of CompleteMultipartUpload describe the object.
    Raises S3Error: InvalidDigest (Content-MD5), InvalidRequest (two checksums, undecodable, unknown, announced but
    absent).
    """
    content_md5 = None
    if "content-md5" in headers and (content_md5 := _digest(headers["content-md5"], 16)) is None:
        raise s3_error("InvalidDigest")
    if not of_body:
        return ExpectedChecksums(content_md5)
    given = [name for name in headers if name.startswith(PREFIX) and name[len(PREFIX) :] in ALGORITHMS]
    trailers = trailer_names(headers)
    if len(given) + len(trailers) > 1:
        raise s3_error(
            "InvalidRequest", "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed."
        )
    algorithm = next((name[len(PREFIX) :] for name in (*given, *trailers)), None)
    _check_announced(headers.get("x-amz-sdk-checksum-algorithm"), algorithm)
    if algorithm is None:
        return ExpectedChecksums(content_md5)
    if trailers:
        return ExpectedChecksums(content_md5, algorithm, trailer_name=PREFIX + algorithm)
    return ExpectedChecksums(content_md5, algorithm, decode_checksum(algorithm, headers[given[0]]))


def trailer_names(headers: Mapping[str, str]) -> frozenset[str]:
    """Return the lower-case names in `x-amz-trailer`; S3Error InvalidRequest for one that is no known checksum."""
    names = frozenset(name.strip().lower() for name in headers.get("x-amz-trailer", "").split(",")) - {""}
    for name in names:
        if not name.startswith(PREFIX) or name[len(PREFIX) :] not in ALGORITHMS:
            raise s3_error("InvalidRequest", "The value specified in the x-amz-trailer header is not supported")
    return names


def decode_checksum(algorithm: str, value: str) -> bytes:
    """Decode a base64 digest; S3Error InvalidRequest when it is not one of `algorithm`."""
    digest = _digest(value, ALGORITHMS[algorithm].size_bytes)
    if digest is None:
        raise s3_error("InvalidRequest", f"Value for {PREFIX}{algorithm} header is invalid.")
    return digest


def _digest(value: str, size_bytes: int) -> bytes | None:
    try:
        digest = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest if len(digest) == size_bytes else None


def _check_announced(announced: str | None, algorithm: str | None) -> None:
    if announced is None:
        return
    if algorithm is None and announced.lower() in ALGORITHMS:
        raise s3_error(
            "InvalidRequest",
            "x-amz-sdk-checksum-algorithm specified, but no corresponding x-amz-checksum-* or x-amz-trailer headers "
            "were found.",
        )
    if announced.lower() != algorithm:
        raise s3_error("InvalidRequest", "Value for x-amz-sdk-checksum-algorithm header is invalid.")


class BodyVerifier:
    """Sees a decoded body pass and says at its end whether every promise of the client held.

    One pass per algorithm, whatever asks for it: the payload hash of the signature, Content-MD5, checksum header or
    trailer, and the caller's `also`. `of_body` as in `requested_checksums`. With `on_threads`, only threads
    call `update`, never the event loop: MD5s that several of them compute at the same moment are computed together, for
    which they wait for each other.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        mode: PayloadMode,
        *,
        of_body: bool = True,
        also: Collection[str] = (),
        on_threads: bool = False,
    ) -> None:
        self.expected = requested_checksums(headers, of_body=of_body)
        if self.expected.trailer_name is not None and not mode.trailer:
            raise s3_error("InvalidRequest", "x-amz-trailer needs a payload with trailers, which this is not.")
        self._sha256_hex = mode.sha256_hex
        names = {*also}
        if self.expected.algorithm is not None:
            names.add(self.expected.algorithm)
        if self._sha256_hex is not None:
            names.add("sha256")
        if self.expected.content_md5 is not None:
            names.add("md5")
        self._running = {name: Checksum(name) for name in sorted(names)}
        if on_threads and "md5" in names:
            self._running["md5"] = Checksum("md5", new_md5())

    def update(self, data: Buffer) -> None:
        """Take the next bytes of the decoded body."""
        for checksum in self._running.values():
            checksum.update(data)

    def digest(self, algorithm: str) -> bytes:
        """Return the digest so far, by an algorithm that was asked for."""
        return self._running[algorithm].digest()

    def verify(self, trailers: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the verified checksum as a header to answer with (none when the client sent none).

        `trailers` is the result of the decoder's `finish`. Raises S3Error: XAmzContentSHA256Mismatch, BadDigest,
        MalformedTrailerError, InvalidRequest (undecodable trailer).
        """
        if self._sha256_hex is not None:
            computed = self._running["sha256"].digest().hex()
            if not hmac.compare_digest(computed, self._sha256_hex):
                raise s3_error(
                    "XAmzContentSHA256Mismatch",
                    ClientComputedContentSHA256=self._sha256_hex,
                    S3ComputedContentSHA256=computed,
                )
        if self.expected.content_md5 is not None:
            message = "The Content-MD5 you specified did not match what we received."
            _check_digest(message, self.expected.content_md5, self._running["md5"])
        algorithm = self.expected.algorithm
        if algorithm is None:
            return {}
        name, expected = PREFIX + algorithm, self.expected.value
        if expected is None:
            value = (trailers or {}).get(name)
            if value is None:
                raise s3_error("MalformedTrailerError", f"The trailer {name} was announced and did not come.")
            expected = decode_checksum(algorithm, value)
        checksum = self._running[algorithm]
        message = f"The {algorithm.upper()} you specified did not match the calculated checksum."
        _check_digest(message, expected, checksum)
        return {name: checksum.base64()}


def _check_digest(message: str, expected: bytes, computed: Checksum) -> None:
    if not hmac.compare_digest(expected, computed.digest()):
        given = base64.b64encode(expected).decode()
        raise s3_error("BadDigest", message, ExpectedDigest=given, CalculatedDigest=computed.base64())


ChecksumType = Literal["COMPOSITE", "FULL_OBJECT"]


def upload_checksum_type(algorithm: str | None, checksum_type: str | None) -> tuple[str, ChecksumType]:
    """Algorithm (lower-case) and type of an upload, from the headers of CreateMultipartUpload.

    Without any, S3 computes CRC64NVME of the whole. Raises S3Error InvalidRequest for a pair that does not exist.
    """
    if algorithm is None:
        if checksum_type is not None:
            raise s3_error(
                "InvalidRequest",
                "The x-amz-checksum-type header can only be used with the x-amz-checksum-algorithm header.",
            )
        return "crc64nvme", "FULL_OBJECT"
    name = algorithm.lower()
    if name not in ALGORITHMS:
        raise s3_error("InvalidRequest", "Checksum algorithm provided is unsupported.")
    known = ALGORITHMS[name]
    wanted = checksum_type.upper() if checksum_type else "COMPOSITE" if known.composite else "FULL_OBJECT"
    if wanted == "COMPOSITE" and known.composite:
        return name, "COMPOSITE"
    if wanted == "FULL_OBJECT" and known.combine is not None:
        return name, "FULL_OBJECT"
    if wanted not in ("COMPOSITE", "FULL_OBJECT"):
        raise s3_error("InvalidRequest", "Value for x-amz-checksum-type header is invalid.")
    raise _no_such_pair(wanted, name)


def _no_such_pair(checksum_type: str, name: str) -> S3Error:
    return s3_error(
        "InvalidRequest",
        f"The {checksum_type} checksum type cannot be used with the {name} checksum algorithm.",
    )


def composite_checksum(algorithm: str, part_checksums: Sequence[str]) -> Steps[str]:
    """Return the COMPOSITE checksum of parts whose own are given in base64: `uWBwpe1d…=-3`."""
    whole = Checksum(algorithm)
    yield from each(lambda value: whole.update(decode_checksum(algorithm, value)), part_checksums)
    return f"{whole.base64()}-{len(part_checksums)}"


def full_object_checksum(algorithm: str, parts: Sequence[tuple[str, int]]) -> Steps[str]:
    """Combine (base64 checksum, bytes) parts, in order, to FULL_OBJECT. S3Error InvalidRequest: not combinable."""
    known = ALGORITHMS[algorithm]
    if known.combine is None:
        raise _no_such_pair("FULL_OBJECT", algorithm)
    value = 0
    for number, (checksum, size_bytes) in enumerate(parts, 1):
        part = int.from_bytes(decode_checksum(algorithm, checksum), "big")
        value = known.combine(value, part, size_bytes)
        if number % ENTRIES == 0:
            yield
    return base64.b64encode(value.to_bytes(known.size_bytes, "big")).decode()
