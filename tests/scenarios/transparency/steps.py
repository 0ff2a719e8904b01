"""The language of the table: a case is a list of raw S3 requests, told as they stand on the wire.

`{bucket}` and captured values such as `{upload}` stand in targets, headers and bodies. Targets are percent-encoded by
hand, so that nothing stands between the table and the wire.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import xxhash
from awscrt import checksums as crt

Auth = Literal["header", "query", "query-v2", "none"]
Payload = Literal["hash", "unsigned", "signed-chunks", "signed-chunks-trailer", "unsigned-chunks-trailer"]

_ONLY_FRAMING = "content-encoding: aws-chunked"

PART_SIZE_BYTES = 5 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Step:
    """One request.

    `payload` says how the body is vouched for and framed. `trailer` is a checksum behind an aws-chunked body.
    `http_chunks` sends no Content-Length. `capture` maps a variable to the XML element that gives its value.

    `rule` is what S3 itself answers (`"400 BadDigest"`), for requests that the gateway judges before the origin sees
    them: the gateway must answer so, whatever the origin behind it would let pass. Without a rule the gateway must
    answer what the origin answers. `only_gateway`: no such request can be sent to the origin; a rule is needed.
    `host` is the Host header, the endpoint's own unless given.
    """

    method: str
    target: str
    body: bytes = b""
    headers: tuple[str, ...] = ()
    auth: Auth = "header"
    payload: Payload = "hash"
    trailer: str | None = None
    chunk_sizes: tuple[int, ...] = ()
    http_chunks: bool = False
    capture: Mapping[str, str] = field(default_factory=dict)
    rule: str | None = None
    only_gateway: bool = False
    expires_seconds: int = 600
    host: str | None = None

    def virtual_hosted(self, domain: str) -> Step:
        """The same request with its bucket in the Host header."""
        path, mark, query = self.target.partition("?")
        bucket, _, key = path.removeprefix("/").partition("/")
        return replace(self, host=f"{bucket}.{domain}", target=f"/{key}{mark}{query}")

    def plain(self) -> Step:
        """The same request in its simplest form: signed in the header, the body as it is.

        What an origin answers to this, it must answer to every other way of saying it; the origins of the tests
        understand this one.
        """
        headers = [_without_framing(header) for header in self.headers if header.lower() != _ONLY_FRAMING]
        if self.trailer is not None:
            headers.append(self.trailer.replace(":", ": ", 1))
        return replace(
            self, headers=tuple(headers), auth="header", payload="hash", trailer=None, http_chunks=False, chunk_sizes=()
        )


def _without_framing(header: str) -> str:
    return header.replace("aws-chunked,", "") if header.lower().startswith("content-encoding:") else header


@dataclass(frozen=True, slots=True)
class Case:
    """A named sequence of requests, in a bucket of its own; `given` is sent to the origins, past the gateway.

    `only` names the one kind of origin that the case is for: where moto fails (500) at what the case asks, the gateway
    does its duty and tries again for seconds; and moto, being slow, is spared some combinations.
    """

    name: str
    steps: tuple[Step, ...]
    given: tuple[Step, ...] = ()
    only: str | None = None


def get(target: str, *headers: str, **options: object) -> Step:
    return _step("GET", target, b"", headers, options)


def head(target: str, *headers: str, **options: object) -> Step:
    return _step("HEAD", target, b"", headers, options)


def put(target: str, body: bytes, *headers: str, **options: object) -> Step:
    return _step("PUT", target, body, headers, options)


def post(target: str, body: bytes, *headers: str, **options: object) -> Step:
    return _step("POST", target, body, headers, options)


def delete(target: str, *headers: str, **options: object) -> Step:
    return _step("DELETE", target, b"", headers, options)


def _step(method: str, target: str, body: bytes, headers: tuple[str, ...], options: Mapping[str, object]) -> Step:
    return Step(method, target, body, headers, **options)  # type: ignore[arg-type]


def pattern(size_bytes: int) -> bytes:
    """Bytes of which no two aligned runs are alike."""
    return hashlib.shake_128(b"transparency").digest(size_bytes)


def checksum(algorithm: str, body: bytes) -> str:
    """A body's checksum as it travels, from libraries that nothing of the gateway uses in this way."""
    digest = _checksum_digest(algorithm, body)
    return base64.b64encode(digest).decode()


def _checksum_digest(algorithm: str, body: bytes) -> bytes:
    if algorithm.startswith("xxhash"):
        name = {"xxhash64": "xxh64", "xxhash3": "xxh3_64", "xxhash128": "xxh3_128"}[algorithm]
        digest: bytes = getattr(xxhash, f"{name}_digest")(body)
        return digest
    if algorithm == "crc32":
        return zlib.crc32(body).to_bytes(4, "big")
    if algorithm in ("crc32c", "crc64nvme"):
        return int(getattr(crt, algorithm)(body)).to_bytes(4 if algorithm == "crc32c" else 8, "big")
    return hashlib.new(algorithm, body).digest()


def md5_header(body: bytes) -> str:
    return f"content-md5: {base64.b64encode(hashlib.md5(body).digest()).decode()}"


def etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def multipart_etag(*parts: bytes) -> str:
    digest = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest()
    return f'"{digest}-{len(parts)}"'


def complete_document(*parts: tuple[int, str]) -> bytes:
    entries = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{tag}</ETag></Part>" for n, tag in parts)
    return f"<CompleteMultipartUpload>{entries}</CompleteMultipartUpload>".encode()


def create_upload(target: str, *headers: str, name: str = "upload") -> Step:
    return post(f"{target}?uploads", b"", *headers, capture={name: "UploadId"})


def put_part(target: str, number: int, body: bytes, *headers: str, name: str = "upload", **options: object) -> Step:
    return put(f"{target}?partNumber={number}&uploadId={{{name}}}", body, *headers, **options)


def complete(target: str, *parts: tuple[int, str], headers: tuple[str, ...] = (), name: str = "upload") -> Step:
    return post(f"{target}?uploadId={{{name}}}", complete_document(*parts), *headers)
