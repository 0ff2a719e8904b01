"""AWS Signature Version 4, header form, both ways: verifying clients and signing towards the origin.

    request → canonical request → SHA-256 → string to sign → HMAC with a key of (secret, date, region) → signature

Presigned URLs (presigned.py) and chunks (aws_chunked.py) have these steps in common with it. S3 encodes paths once and
never normalises them. This is on the path of every request, so the common case of each step (nothing to re-encode, no
inner whitespace) is recognised by one regular expression and passed through.

What a signature says of the body stands in `x-amz-content-sha256`: hashed, unsigned, or aws-chunked in one of three
kinds (`PayloadMode`).

Source: "Authenticating Requests (AWS Signature Version 4)" of the S3 API.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from calendar import timegm
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import gmtime, strftime
from typing import NamedTuple
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

from gateway.core.errors import S3Error
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import format_iso_date, name_set, parse_http_date
from gateway.s3.requests import S3Request

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
STREAMING_SIGNED_TRAILER = PayloadMode(streaming=True, signed=True, trailer=True)
STREAMING_UNSIGNED_TRAILER = PayloadMode(streaming=True, trailer=True)

_SHA256_OF_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

_KEYWORDS = {
    _SHA256_OF_NOTHING: PayloadMode(sha256_hex=_SHA256_OF_NOTHING),  # as in nearly every GET and HEAD
    "UNSIGNED-PAYLOAD": UNSIGNED,
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD": PayloadMode(streaming=True, signed=True),
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER": STREAMING_SIGNED_TRAILER,
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER": STREAMING_UNSIGNED_TRAILER,
}


def payload_mode(value: str | None) -> PayloadMode:
    """Return the mode that a header value names; without the header (presigned, anonymous) the body is unsigned.

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


class Family:
    """The names in which signatures differ that are made in the same way."""

    def __init__(self, name: str, service: str, headers: str) -> None:
        self.name, self.service, self.headers = name, service, headers
        self.algorithm, self.terminator = f"{name}-HMAC-SHA256", f"{name.lower()}_request"
        self.date, self.content_sha256 = f"{headers}date", f"{headers}content-sha256"


AWS4 = Family("AWS4", "s3", "x-amz-")
GOOG4 = Family("GOOG4", "storage", "x-goog-")
"""Google Cloud Storage (cloud.google.com/storage/docs/authentication/signatures). It accepts any region in the scope.
"""


@lru_cache(maxsize=1024)
def signing_key(secret: str, date: str, region: str, family: Family = AWS4) -> bytes:
    """Return the signing key of a secret for a day and region. Nothing can read the secrets in the cache."""
    key = f"{family.name}{secret}".encode()
    for part in (date, region, family.service, family.terminator):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def string_to_sign(timestamp: str, scope: str, canonical_request_hash: str, family: Family = AWS4) -> str:
    """Return the string to sign: algorithm, time, scope, and the canonical request's hash in hex."""
    return f"{family.algorithm}\n{timestamp}\n{scope}\n{canonical_request_hash}"


def sign(key: bytes, text: str) -> str:
    """Return the hex signature of a string to sign: HMAC-SHA256 (RFC 2104), of a key that is used again and again."""
    inner, outer = hmac_states(key)
    digest = inner.copy()
    digest.update(text.encode())
    signature = outer.copy()
    signature.update(digest.digest())
    return signature.hexdigest()


@lru_cache(maxsize=1024)
def hmac_states(key: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """Return the inner and outer hash states of a key, with which each of its HMACs begins."""
    padded = key.ljust(_HMAC_BLOCK_BYTES, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in padded) for pad in (0x36, 0x5C))
    return hashlib.sha256(inner), hashlib.sha256(outer)


def canonical_path(raw_path: bytes) -> str:
    """Return the path as it was on the wire, unquoted once and quoted again the canonical way."""
    if _CANONICAL_PATH.fullmatch(raw_path):
        return raw_path.decode("ascii")
    return quote_from_bytes(unquote_to_bytes(raw_path), safe="/-_.~")


def canonical_query(raw_query: bytes, without: bytes | None = None) -> str:
    """Re-encode and sort the query as it was on the wire; parameters named `without` are left out."""
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
    """Trim a header value (latin-1 decoded), and collapse inner runs of whitespace.

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


CLOCK_SKEW_SECONDS_MAX = 15 * 60

_MAY_BE_UNSIGNED = name_set(
    "accept accept-encoding amz-sdk-invocation-id amz-sdk-request authorization connection content-length content-type "
    "range user-agent"
)
"""Headers of most requests, none of them `x-amz-*`. They are set aside together: few need a closer look."""

_MAY_NEED_TRIMMING = re.compile("\t|  |: | \n| $")
"""White space where canonical_value would take some away; between header lines."""

_REGION_CHARACTERS_MAX = 64
"""Signing keys are kept by it, before the caller has proved anything."""

_SIGNED_WHEN_PRESENT = frozenset({"host", "content-type", "content-md5", "range"})


@dataclass(slots=True)
class Authorization:
    """The parts of an `Authorization: AWS4-HMAC-SHA256 …` header."""

    access_key_id: str
    date: str
    region: str
    service: str
    signed_headers: tuple[str, ...]
    signature: str
    accounted_for: frozenset[str] = field(init=False, repr=False, compare=False)
    """The header names that need no look: those that are signed, and those that need not be."""
    unproved: str = field(default="", init=False, repr=False, compare=False)
    """A header of a new kind, without its signature."""

    def __post_init__(self) -> None:
        names = frozenset(self.signed_headers)
        if len(names) != len(self.signed_headers):
            # What is signed is put together from their values: one long value named often would fill memory.
            raise s3_error("AuthorizationHeaderMalformed", "SignedHeaders must name each header once.")
        self.accounted_for = _MAY_BE_UNSIGNED | names

    def with_signature(self, signature: str) -> Authorization:
        """Another one of the same kind. Field by field: each request of SDKs needs one."""
        other = object.__new__(Authorization)
        other.access_key_id, other.date, other.region, other.service = (
            self.access_key_id,
            self.date,
            self.region,
            self.service,
        )
        other.signed_headers, other.accounted_for = self.signed_headers, self.accounted_for
        other.signature, other.unproved = signature, ""
        return other

    @property
    def scope(self) -> str:
        """The credential scope, as it stands in the string to sign."""
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


@dataclass(slots=True)
class SeedSignature:
    """A verified signature and what the signatures of its body's chunks are made with."""

    signing_key: bytes = field(repr=False)
    timestamp: str
    scope: str
    signature: str = field(repr=False)


# --- verifying ------------------------------------------------------------------------------------------------------


def parse_authorization(header: str) -> Authorization:
    """Return the parts of an `Authorization` header.

    Raises S3Error: InvalidRequest for Signature Version 2, NotImplemented for SigV4A, InvalidArgument for other
    schemes, AuthorizationHeaderMalformed for a header that lacks a part.
    """
    common, _, signature = header.rpartition(_SIGNATURE_LAST)
    known = _proved.get(common)
    if known is not None and signature and "," not in signature:
        return known.with_signature(signature)
    authorization = _parse_authorization(header)
    authorization.unproved = common
    return authorization


_SIGNATURE_LAST = ", Signature="
_PROVED_MAX = 1024
_PROVED_CHARACTERS_MAX = 1024

_proved: dict[str, Authorization] = {}
"""All of a header but the signature, as SDKs write it last: the same for a client's requests of one day and kind.

Only of clients that have proved to have the secret: a stranger can neither fill memory with it nor push others out.
"""


def remember_proved(authorization: Authorization) -> None:
    """Record a verified signature: headers of its kind need not be parsed."""
    common, authorization.unproved = authorization.unproved, ""
    if 0 < len(common) <= _PROVED_CHARACTERS_MAX:
        if len(_proved) >= _PROVED_MAX:
            _proved.clear()
        _proved[common] = authorization


def _parse_authorization(header: str) -> Authorization:
    scheme, _, rest = header.partition(" ")
    if scheme == "AWS":
        raise s3_error(
            "InvalidRequest",
            "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256.",
        )
    if scheme.startswith("AWS4-ECDSA-P256-SHA256"):
        raise s3_error("NotImplemented", "SigV4A is not supported.", Header="Authorization")
    if scheme != ALGORITHM:
        raise s3_error("InvalidArgument", "Unsupported Authorization Type", ArgumentName="Authorization")
    parts = {}
    for part in rest.split(","):
        name, _, value = part.strip().partition("=")
        parts[name] = value
    if len(parts) != 3 or not (parts.get("Credential") and parts.get("SignedHeaders") and parts.get("Signature")):
        raise _malformed("It must hold exactly Credential, SignedHeaders and Signature.")
    try:
        credential = parse_credential(parts["Credential"])
    except ValueError as error:
        raise _malformed(str(error)) from None
    return Authorization(*credential, tuple(parts["SignedHeaders"].split(";")), parts["Signature"])


def parse_credential(credential: str) -> tuple[str, str, str, str]:
    """Access key id, date, region and service of `AK/YYYYMMDD/REGION/s3/aws4_request`.

    An access key id may hold slashes. Raises ValueError with what is wrong, in words for the client.
    """
    parts = credential.rsplit("/", 4)
    if len(parts) != 5 or not parts[0] or parts[4] != "aws4_request":
        raise ValueError("The credential must be ACCESS_KEY_ID/YYYYMMDD/REGION/s3/aws4_request.")
    access_key_id, date, region, service, _ = parts
    if service != "s3":
        raise ValueError(f"The credential is scoped to the service {service!r}; this endpoint expects 's3'.")
    if len(date) != 8 or not (date.isascii() and date.isdecimal()) or not 0 < len(region) <= _REGION_CHARACTERS_MAX:
        raise ValueError("The credential needs a date YYYYMMDD and a region.")
    return access_key_id, date, region, service


def verify_header(request: S3Request, authorization: Authorization, secret: str, now: float) -> SeedSignature:
    """Check a request signed in its header; `now` is the wall clock in seconds.

    Raises S3Error: AccessDenied (host or an x-amz-* header unsigned, no usable date), AuthorizationHeaderMalformed,
    RequestTimeTooSkewed, InvalidRequest and InvalidArgument (x-amz-content-sha256), SignatureDoesNotMatch.
    """
    headers = request.headers
    timestamp, signed_at = _request_timestamp(headers)
    if abs(now - signed_at) > CLOCK_SKEW_SECONDS_MAX:
        raise s3_error(
            "RequestTimeTooSkewed",
            RequestTime=timestamp,
            ServerTime=format_iso_date(now),
            MaxAllowedSkewMilliseconds=str(CLOCK_SKEW_SECONDS_MAX * 1000),
        )
    if authorization.date != timestamp[:8]:
        raise _malformed(f"The credential's date {authorization.date} is not the request's, {timestamp[:8]}.")
    check_signed_headers(headers, authorization)
    payload_hash = headers.get("x-amz-content-sha256")
    if payload_hash is None:
        raise s3_error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    payload_mode(payload_hash)
    canonical = canonical_request(
        request, canonical_query(request.raw_query), authorization.signed_headers, payload_hash
    )
    return check_signature(authorization, secret, timestamp, canonical)


def canonical_request(request: S3Request, query: str, signed_headers: Sequence[str], payload_hash: str) -> bytes:
    """Return the canonical request of what arrived: bytes as received, `host` as the client addressed us."""
    host, headers = request.host, request.headers
    lines = [f"{name}:{host if name == 'host' else headers.get(name, '')}" for name in signed_headers]
    fields = "\n".join(lines)
    if "  " in fields or "\t" in fields:  # the values are trimmed already
        fields = "\n".join([canonical_value(line) for line in lines])
    path, names = canonical_path(request.raw_path), ";".join(signed_headers)
    return f"{request.method}\n{path}\n{query}\n{fields}\n\n{names}\n{payload_hash}".encode("latin-1")


def check_signed_headers(headers: Mapping[str, str], authorization: Authorization) -> None:
    """Raise AccessDenied unless `host` and every header that may change the request are signed."""
    if "host" not in authorization.accounted_for:
        raise s3_error("AccessDenied", "The host header must be signed.", HeadersNotSigned="host")
    if authorization.accounted_for.issuperset(headers):
        return
    unsigned = [name for name in headers if name not in authorization.accounted_for and changes_the_request(name)]
    if unsigned:
        raise s3_error(
            "AccessDenied",
            "There were headers present in the request which were not signed",
            HeadersNotSigned=", ".join(unsigned),
        )


_ADDED_ON_THE_WAY = re.compile(
    "x-(?:amzn-|arr-|azure-ref|b3-|cache|cdn|client-|cloud-trace|cluster-client-ip|correlation-id|datadog-|dynatrace|envoy-"
    "|forebay-|forwarded|instana-|newrelic-|original-forwarded-for|originating-ip|ot-|proxy|real-ip|remote-|request|scheme"
    "|ssl-|trace|varnish|via)"
)
"""Headers that proxies and tracing add to a signed request."""

_WORDS = re.compile(
    "copy|rename|-move|-source|-acl|grant|tagging|encrypt|-meta|-sse-|directive|storage-class|retention|legal-hold"
    "|object-lock|redirect|version-?id"
)
"""Parts of names by which S3's dialects ask for more than the request line does (IBM's have no `x-`)."""


def changes_the_request(name: str) -> bool:
    """Return whether some server may understand a different request when this header is present.

    This is assumed of every `x-` header that proxies and tracing are not known to add: S3 has more dialects than a list
    can name.
    """
    if _WORDS.search(name) is not None:
        return True
    return name.startswith("x-") and _ADDED_ON_THE_WAY.match(name) is None


def check_signature(authorization: Authorization, secret: str, timestamp: str, canonical: bytes) -> SeedSignature:
    """Compare, in constant time; raises S3Error SignatureDoesNotMatch with all that a client needs to find out why."""
    key = signing_key(secret, authorization.date, authorization.region)
    scope = authorization.scope
    text = string_to_sign(timestamp, scope, hashlib.sha256(canonical).hexdigest())
    expected = sign(key, text)
    if not hmac.compare_digest(expected.encode(), authorization.signature.encode()):
        raise s3_error(
            "SignatureDoesNotMatch",
            AWSAccessKeyId=authorization.access_key_id,
            StringToSign=text,
            SignatureProvided=authorization.signature,
            CanonicalRequest=canonical.decode("latin-1"),
        )
    return SeedSignature(key, timestamp, scope, expected)


def _request_timestamp(headers: Mapping[str, str]) -> tuple[str, float]:
    """When the request was signed, as it says and in seconds."""
    timestamp = headers.get("x-amz-date")
    if timestamp is None:
        date = parse_http_date(headers.get("date", ""))
        timestamp = "" if date is None else format_timestamp(date)
    seconds = parse_timestamp(timestamp)
    if seconds is None:
        raise s3_error("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
    return timestamp, seconds


def _malformed(reason: str) -> S3Error:
    return s3_error("AuthorizationHeaderMalformed", f"The authorization header is malformed. {reason}")


# --- signing --------------------------------------------------------------------------------------------------------


def sign_headers(
    method: str,
    path_encoded: str,
    query: Iterable[tuple[str, str | None]],
    headers: Mapping[str, str],
    *,
    payload_hash: str,
    access_key_id: str,
    secret: str,
    session_token: str | None,
    region: str,
    now: float,
    family: Family = AWS4,
) -> tuple[dict[str, str], PathSignatures]:
    """Return the headers that sign an outgoing request, `authorization` last, and signatures for other paths.

    `path_encoded` is canonical already (`encode_path`, or `"/" + encode_key` in virtual-hosted style). `headers` are
    lower-case, latin-1, and must hold `host` exactly as it will be sent. Signed are host, content-type, content-md5,
    range and what may change the request, every x-amz-* above all.
    """
    timestamp = format_timestamp(now)
    added = {family.date: timestamp, family.content_sha256: payload_hash}
    if session_token is not None:
        added[f"{family.headers}security-token"] = session_token
    values = {**headers, **added}
    names, joined_names = _signed_names(tuple(values))
    fields = "\n".join([f"{name}:{values[name]}" for name in names])
    if _MAY_NEED_TRIMMING.search(fields):
        fields = "\n".join([f"{name}:{canonical_value(values[name])}" for name in names])
    behind_path = f"\n{_outgoing_query(query)}\n{fields}\n\n{joined_names}\n{payload_hash}".encode("latin-1")
    scope = f"{timestamp[:8]}/{region}/{family.service}/{family.terminator}"
    states = hmac_states(signing_key(secret, timestamp[:8], region, family))
    begin = string_to_sign(timestamp, scope, "", family).encode()
    signatures = PathSignatures(f"{method}\n".encode(), behind_path, begin, *states)
    signature = signatures.of(path_encoded.encode("latin-1"))
    added["authorization"] = (
        f"{family.algorithm} Credential={access_key_id}/{scope}, SignedHeaders={joined_names}, Signature={signature}"
    )
    return added, signatures


class PathSignatures(NamedTuple):
    """Signatures of requests that differ by their paths alone."""

    before_path: bytes
    behind_path: bytes
    begin: bytes
    """The string to sign, up to the hash of the canonical request."""

    inner: hashlib._Hash
    outer: hashlib._Hash

    def of(self, path_encoded: bytes) -> str:
        """Return the signature of the request with this path, canonical already."""
        inner, outer = self.inner.copy(), self.outer.copy()
        canonical_hash = hashlib.sha256(self.before_path + path_encoded + self.behind_path).hexdigest()
        inner.update(self.begin + canonical_hash.encode())
        outer.update(inner.digest())
        return outer.hexdigest()


_HOP = "x-forebay-hop"
UNSIGNED_BETWEEN_NODES = name_set(
    "accept accept-encoding authorization connection content-length expect traceparent tracestate user-agent"
) | {_HOP}
"""Headers that change neither the question nor the answer. Nodes sign all others, whatever a client has sent."""


@lru_cache(maxsize=1024)
def _signed_names(names: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the names of the signed headers in order, and the same joined. Cached: clients send few sets of names."""
    signed = sorted(name for name in names if name in _SIGNED_WHEN_PRESENT or changes_the_request(name))
    if any(name.startswith("x-forebay-") and name != _HOP for name in names):
        signed = sorted({*names} - UNSIGNED_BETWEEN_NODES)
    return tuple(signed), ";".join(signed)


def _outgoing_query(query: Iterable[tuple[str, str | None]]) -> str:
    if not query:
        return ""
    pairs = sorted([(quote(name, safe="-_.~"), quote(value or "", safe="-_.~")) for name, value in query])
    return "&".join([f"{name}={value}" for name, value in pairs])
