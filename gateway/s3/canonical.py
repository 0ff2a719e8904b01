"""The pieces of AWS Signature Version 4 that verifying, presigned URLs, chunks and signing have in common.

    request → canonical request → SHA-256 → string to sign → HMAC with a key of (secret, date, region) → signature

S3 encodes paths once and never normalises them. This is on the path of every request, so the common case of each step
(nothing to re-encode, no inner whitespace) is recognised by one regular expression and passed through.

What a signature says of the body stands in `x-amz-content-sha256`: hashed, unsigned, or aws-chunked in one of three
kinds (`PayloadMode`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from calendar import timegm
from functools import lru_cache
from time import gmtime, strftime
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

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


ALGORITHM = "AWS4-HMAC-SHA256"

_HMAC_BLOCK_BYTES = 64

_CANONICAL_PATH = re.compile(rb"[A-Za-z0-9\-._~/]*")
_CANONICAL_QUERY = re.compile(rb"[A-Za-z0-9\-._~]+=[A-Za-z0-9\-._~]*")
_WHITESPACE_RUN = re.compile("[ \t]+")
_TIMESTAMP_CHARACTERS = 16
_TIMESTAMP = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z", re.ASCII)


@lru_cache(maxsize=1024)
def signing_key(secret: str, date: str, region: str, service: str = "s3") -> bytes:
    """The key of one secret for one day, region and service; the cache shows its arguments to nobody."""
    key = f"AWS4{secret}".encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def string_to_sign(timestamp: str, scope: str, canonical_request: bytes) -> str:
    """What is signed: algorithm, time, scope, and the hash of the canonical request."""
    return f"{ALGORITHM}\n{timestamp}\n{scope}\n{hashlib.sha256(canonical_request).hexdigest()}"


def sign(key: bytes, text: str) -> str:
    """The hex signature of a string to sign: HMAC-SHA256 (RFC 2104), of a key that is used again and again."""
    inner, outer = _hmac_states(key)
    digest = inner.copy()
    digest.update(text.encode())
    signature = outer.copy()
    signature.update(digest.digest())
    return signature.hexdigest()


@lru_cache(maxsize=1024)
def _hmac_states(key: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """What the hashes of every text signed with a key begin with: a third of what setting up an HMAC anew costs."""
    padded = key.ljust(_HMAC_BLOCK_BYTES, b"\0")
    return hashlib.sha256(_xor(padded, 0x36)), hashlib.sha256(_xor(padded, 0x5C))


def _xor(padded: bytes, pad: int) -> bytes:
    return bytes([byte ^ pad for byte in padded])


def canonical_path(raw_path: bytes) -> str:
    """The path as it was on the wire, unquoted once and quoted again the canonical way."""
    if _CANONICAL_PATH.fullmatch(raw_path):
        return raw_path.decode("ascii")
    return quote_from_bytes(unquote_to_bytes(raw_path), safe="/-_.~")


def canonical_query(raw_query: bytes, without: bytes | None = None) -> str:
    """The query as it was on the wire, re-encoded and sorted; parameters named `without` are left out."""
    if not raw_query:
        return ""
    if without is None and _CANONICAL_QUERY.fullmatch(raw_query):
        return raw_query.decode("ascii")
    pairs = []
    for part in raw_query.split(b"&"):
        name, _, value = part.partition(b"=")
        if name != without:
            pairs.append((_requote(name), _requote(value)))
    pairs.sort()
    return "&".join([f"{name}={value}" for name, value in pairs])


def _requote(raw: bytes) -> str:
    return quote_from_bytes(unquote_to_bytes(raw), safe="-_.~")


def canonical_value(value: str) -> str:
    """A header value (latin-1 decoded) trimmed, inner runs of whitespace collapsed.

    Only blanks and tabs count: what else Python takes for white space is a byte of some UTF-8 character here.
    """
    if "  " in value or "\t" in value:
        value = _WHITESPACE_RUN.sub(" ", value)
    return value.strip(" \t")


def format_timestamp(now: float) -> str:
    """`now` as ISO 8601 basic, `20130524T000000Z`."""
    return _format_second(int(now))


@lru_cache(maxsize=8)
def _format_second(second: int) -> str:
    return strftime("%Y%m%dT%H%M%SZ", gmtime(second))


def parse_timestamp(timestamp: str) -> float | None:
    """Seconds since the epoch of an ISO 8601 basic timestamp; None when it is not one."""
    return _parse_timestamp(timestamp) if len(timestamp) == _TIMESTAMP_CHARACTERS else None


@lru_cache(maxsize=2048)
def _parse_timestamp(timestamp: str) -> float | None:
    found = _TIMESTAMP.fullmatch(timestamp)
    if found is None:
        return None
    year, month, day, hour, minute, second = map(int, found.groups())
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second <= 60 and year >= 1970):
        return None
    return timegm((year, month, day, hour, minute, second))
