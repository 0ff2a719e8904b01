"""From an `OriginRequest`'s body to what goes over the wire: framing headers, payload hash, upload."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.origin.client import OriginRequest, StreamedBody
from gateway.origin.trailer import TrailerChunks, encoded_length
from gateway.origin.transport import EXPECT_CONTINUE_MIN_BYTES
from gateway.origin.upload import BytesUpload, StreamedUpload

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_WITH_BODY = frozenset({"PUT", "POST"})


@dataclass(frozen=True, slots=True)
class OutgoingBody:
    """One attempt's body. `signed_headers` belong under the signature, `framing_headers` are the connection's own."""

    payload_hash: str
    signed_headers: Mapping[str, str]
    framing_headers: Mapping[str, str]
    upload: BytesUpload | StreamedUpload | None

    @property
    def can_be_sent_again(self) -> bool:
        """Whether nothing of a stream is lost with this attempt."""
        return not (isinstance(self.upload, StreamedUpload) and self.upload.touched)


def outgoing_body(request: OriginRequest, stall_timeout_seconds: float) -> OutgoingBody:
    """The body of `request` for one attempt."""
    if isinstance(request.body, StreamedBody):
        if request.body.trailer_name is not None:
            return _with_trailer(request, request.body, request.body.trailer_name, stall_timeout_seconds)
        return _streamed(request.body, stall_timeout_seconds)
    return _in_memory(request.method, request.body)


_NONE = OutgoingBody(EMPTY_SHA256, {}, {}, None)


def _in_memory(method: str, body: bytes) -> OutgoingBody:
    if not body and method not in _WITH_BODY:
        return _NONE
    payload_hash = hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256
    framing = {"content-length": str(len(body))} if body or method in _WITH_BODY else {}
    return OutgoingBody(payload_hash, {}, framing, BytesUpload(body) if body else None)


def _streamed(body: StreamedBody, stall_timeout_seconds: float) -> OutgoingBody:
    upload = StreamedUpload(body.chunks, body.length_bytes, stall_timeout_seconds)
    return OutgoingBody(body.payload_hash, {}, _framing(body.length_bytes), upload)


def _with_trailer(request: OriginRequest, body: StreamedBody, name: str, stall_timeout_seconds: float) -> OutgoingBody:
    signed = {"x-amz-trailer": name, "content-encoding": _aws_chunked(request.headers.get("content-encoding"))}
    if body.length_bytes is not None:
        signed["x-amz-decoded-content-length"] = str(body.length_bytes)
    length_bytes = encoded_length(body)
    upload = StreamedUpload(TrailerChunks(body), length_bytes, stall_timeout_seconds)
    return OutgoingBody(_UNSIGNED_TRAILER, signed, _framing(length_bytes), upload)


def _aws_chunked(codings: str | None) -> str:
    """`aws-chunked` in front of the codings of the object itself."""
    kept = [coding.strip() for coding in (codings or "").split(",") if coding.strip() not in ("", "aws-chunked")]
    return ",".join(["aws-chunked", *kept])


def _framing(length_bytes: int | None) -> dict[str, str]:
    framing = {} if length_bytes is None else {"content-length": str(length_bytes)}
    if length_bytes is None or length_bytes >= EXPECT_CONTINUE_MIN_BYTES:
        framing["expect"] = "100-continue"
    return framing
