"""Conditions, ranges and digests, judged as this gateway judges those of its own clients."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.clock import Clock
from gateway.core.errors import S3Error
from gateway.core.model import ByteRange
from gateway.origin.client import UNSIGNED_PAYLOAD, OriginRequest, StreamedBody
from gateway.origin.stores.store import Digests, Found, Headers
from gateway.s3.checksums import PREFIX, BodyVerifier, Checksum
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import check_copy_source, etag_matches, evaluate_read, if_range_holds, parse_range
from gateway.s3.signature_v4 import PayloadMode


class S3Judge:
    """As `Judge`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def may_read(self, headers: Headers, found: Found) -> bool:
        judged = evaluate_read(headers, etag=found.etag, last_modified=found.modified, now=self._clock.now())
        return judged == "serve"

    def check_copy_source(self, headers: Headers, found: Found) -> None:
        check_copy_source(headers, etag=found.etag, last_modified=found.modified, now=self._clock.now())

    def check_write(self, headers: Headers, etag: str | None) -> None:
        if_match, if_none_match = headers.get("if-match"), headers.get("if-none-match")
        if if_none_match is not None and (if_match is not None or if_none_match.strip() != "*"):
            raise s3_error("NotImplemented", Header="If-None-Match")
        if if_none_match is not None and etag is not None:
            raise s3_error("PreconditionFailed", Condition="If-None-Match")
        if if_match is not None and etag is None:
            raise s3_error("NoSuchKey")
        if if_match is not None and etag is not None and not etag_matches(if_match, etag):
            raise s3_error("PreconditionFailed", Condition="If-Match")

    def asked_range(self, headers: Headers, found: Found) -> ByteRange | None:
        if not if_range_holds(headers, etag=found.etag, last_modified=found.modified):
            return None
        return parse_range(headers.get("range"), found.size_bytes)

    def digests(self, request: OriginRequest, *, of_body: bool) -> Digests:
        return _BodyDigests(request, of_body=of_body)


class _BodyDigests:
    """As `Digests`."""

    def __init__(self, request: OriginRequest, *, of_body: bool) -> None:
        body = request.body if isinstance(request.body, StreamedBody) else None
        sha256_hex = body.payload_hash if body is not None and body.payload_hash != UNSIGNED_PAYLOAD else None
        self._trailer = body if body is not None and body.trailer_name is not None else None
        self._length_bytes = body.length_bytes if body is not None else None
        self._taken_bytes = 0
        headers: Mapping[str, str] = request.headers
        if self._trailer is not None:
            headers = {**headers, "x-amz-trailer": self._trailer.trailer_name or ""}
        mode = PayloadMode(sha256_hex, trailer=self._trailer is not None)
        self._verifier = BodyVerifier(headers, mode, of_body=of_body, also=("md5",))

    def update(self, data: bytes | memoryview, /) -> None:
        self._taken_bytes += len(data)
        self._verifier.update(data)

    def md5(self) -> bytes:
        return self._verifier.digest("md5")

    def verified(self) -> dict[str, str]:
        if self._length_bytes is not None and self._taken_bytes != self._length_bytes:
            message = f"You did not provide the number of bytes specified: {self._length_bytes} expected."
            raise S3Error("IncompleteBody", message, 400)
        trailer = self._trailer
        told = {trailer.trailer_name or "": trailer.trailer_value()} if trailer and trailer.trailer_value else None
        return self._verifier.verify(told)


class WithChecksum:
    """As `Digests`: tells a checksum besides, for which nobody has vouched."""

    def __init__(self, digests: Digests, algorithm: str) -> None:
        self._digests = digests
        self._name, self._checksum = PREFIX + algorithm, Checksum(algorithm)
        self.md5 = digests.md5

    def update(self, data: bytes | memoryview, /) -> None:
        self._digests.update(data)
        self._checksum.update(data)

    def verified(self) -> dict[str, str]:
        return {**self._digests.verified(), self._name: self._checksum.base64()}
