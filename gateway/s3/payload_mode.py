"""What `x-amz-content-sha256` says about the body: hashed, unsigned, or aws-chunked in one of three kinds."""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.s3.error_codes import s3_error

_HEX_DIGEST = re.compile("[0-9a-fA-F]{64}")


class PayloadMode(NamedTuple):
    """How a body comes and what vouches for it.

    `sha256_hex` is the lower-case digest of the body where the client gave one. `streaming` is aws-chunked framing;
    `signed` means that every chunk carries a signature; `trailer` that checksums follow the last chunk.
    """

    sha256_hex: str | None = None
    streaming: bool = False
    signed: bool = False
    trailer: bool = False


UNSIGNED = PayloadMode()
STREAMING_SIGNED = PayloadMode(streaming=True, signed=True)
STREAMING_SIGNED_TRAILER = PayloadMode(streaming=True, signed=True, trailer=True)
STREAMING_UNSIGNED_TRAILER = PayloadMode(streaming=True, trailer=True)

_SHA256_OF_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

_KEYWORDS = {
    _SHA256_OF_NOTHING: PayloadMode(sha256_hex=_SHA256_OF_NOTHING),  # as in nearly every GET and HEAD
    "UNSIGNED-PAYLOAD": UNSIGNED,
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD": STREAMING_SIGNED,
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER": STREAMING_SIGNED_TRAILER,
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER": STREAMING_UNSIGNED_TRAILER,
}


def payload_mode(value: str | None) -> PayloadMode:
    """The mode that a header value names; without the header (presigned, anonymous) the body is unsigned.

    Raises S3Error: NotImplemented for SigV4A streams, InvalidArgument for anything else unknown.
    """
    if value is None:
        return UNSIGNED
    mode = _KEYWORDS.get(value)
    if mode is not None:
        return mode
    if _HEX_DIGEST.fullmatch(value):
        return PayloadMode(sha256_hex=value.lower())
    if value.startswith("STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD"):
        raise s3_error("NotImplemented", "SigV4A is not supported.", Header="x-amz-content-sha256")
    raise s3_error(
        "InvalidArgument",
        "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-UNSIGNED-PAYLOAD-TRAILER, "
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD, STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER or a valid sha256 value.",
        ArgumentName="x-amz-content-sha256",
        ArgumentValue=value,
    )
