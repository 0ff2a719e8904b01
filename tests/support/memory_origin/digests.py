"""Digests of request bodies at `MemoryOrigin`: all that a client vouched for is checked before anything is stored.

Written apart from the gateway's own checks on purpose: a mistake in one is found by the other.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

import xxhash
from awscrt import checksums as crt

from gateway.origin.client import UNSIGNED_PAYLOAD, OriginRequest, StreamedBody
from gateway.s3.error_codes import s3_error

_PREFIX = "x-amz-checksum-"


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


class _Crc:
    """A CRC as S3 writes it: big-endian."""

    def __init__(self, step: Callable[[bytes, int], int], size_bytes: int) -> None:
        self._step = step
        self._size = size_bytes
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = self._step(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")


ALGORITHMS: Mapping[str, Callable[[], Digest]] = {
    "crc32": lambda: _Crc(zlib.crc32, 4),
    "crc32c": lambda: _Crc(crt.crc32c, 4),
    "crc64nvme": lambda: _Crc(crt.crc64nvme, 8),
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "xxhash64": xxhash.xxh64,
    "xxhash3": xxhash.xxh3_64,
    "xxhash128": xxhash.xxh3_128,
}
"""Name in `x-amz-checksum-NAME` → a new digest."""


class BodyDigests:
    """Sees a body pass, and checks it at its end."""

    def __init__(self, request: OriginRequest, *, of_body: bool) -> None:
        self._body, self._headers = request.body, request.headers
        if not of_body:
            self._headers = {name: value for name, value in self._headers.items() if not name.startswith(_PREFIX)}
        self._algorithm = _algorithm(self._headers, self._body)
        self._md5, self._sha256 = ALGORITHMS["md5"](), _sha256_if_promised(self._body)
        self._checksum = ALGORITHMS[self._algorithm]() if self._algorithm else None
        self._size = 0

    def update(self, data: bytes | memoryview, /) -> None:
        piece = bytes(data)
        self._size += len(piece)
        for digest in (self._md5, self._sha256, self._checksum):
            if digest is not None:
                digest.update(piece)

    def md5(self) -> bytes:
        return self._md5.digest()

    def verified(self) -> dict[str, str]:
        """The body's `x-amz-checksum-*` headers; S3Error."""
        _check_length(self._body, self._size)
        _check_payload_hash(self._body, self._sha256)
        _check_md5(self._headers, self.md5())
        return _check_checksum(self._headers, self._body, self._algorithm, self._checksum)


def _sha256_if_promised(body: bytes | StreamedBody) -> Digest | None:
    return hashlib.sha256() if isinstance(body, StreamedBody) and body.payload_hash != UNSIGNED_PAYLOAD else None


def _algorithm(headers: Mapping[str, str], body: bytes | StreamedBody) -> str | None:
    names = [name for name in headers if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) in ALGORITHMS]
    if isinstance(body, StreamedBody) and body.trailer_name is not None:
        names.append(body.trailer_name)
    if len(names) > 1:
        raise s3_error("InvalidRequest", "Expecting a single x-amz-checksum- header.")
    return names[0].removeprefix(_PREFIX) if names else None


def _check_length(body: bytes | StreamedBody, size: int) -> None:
    if isinstance(body, StreamedBody) and body.length_bytes not in (None, size):
        raise s3_error("IncompleteBody")


def _check_payload_hash(body: bytes | StreamedBody, sha256: Digest | None) -> None:
    if isinstance(body, StreamedBody) and sha256 is not None and sha256.digest().hex() != body.payload_hash:
        raise s3_error("XAmzContentSHA256Mismatch")


def _check_md5(headers: Mapping[str, str], md5: bytes) -> None:
    declared = headers.get("content-md5")
    if declared is not None and _decoded(declared, 16, "InvalidDigest") != md5:
        raise s3_error("BadDigest")


def _check_checksum(
    headers: Mapping[str, str], body: bytes | StreamedBody, algorithm: str | None, checksum: Digest | None
) -> dict[str, str]:
    if algorithm is None or checksum is None:
        return {}
    name = f"{_PREFIX}{algorithm}"
    declared = headers.get(name)
    if declared is None and isinstance(body, StreamedBody) and body.trailer_value is not None:
        declared = body.trailer_value()
    computed = checksum.digest()
    if declared is None or _decoded(declared, len(computed), "InvalidRequest") != computed:
        raise s3_error("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")
    return {name: encoded(computed)}


def encoded(digest: bytes) -> str:
    """A digest as S3 writes it."""
    return base64.b64encode(digest).decode("ascii")


def _decoded(value: str, size: int, code: str) -> bytes:
    try:
        digest = base64.b64decode(value, validate=True)
    except ValueError:
        raise s3_error(code) from None
    if len(digest) != size:
        raise s3_error(code)
    return digest
