"""AWS Signature Version 4, header form, both ways: verifying clients and signing towards the origin.

Source: "Authenticating Requests (AWS Signature Version 4)" of the S3 API; canonical.py has the steps.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote

from gateway.errors import S3Error
from gateway.s3.canonical import (
    ALGORITHM,
    canonical_path,
    canonical_query,
    canonical_value,
    format_timestamp,
    parse_timestamp,
    payload_mode,
    sign,
    signing_key,
    string_to_sign,
)
from gateway.s3.conditions import format_iso_date, parse_http_date
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import S3Request

CLOCK_SKEW_SECONDS_MAX = 15 * 60

_MAY_BE_UNSIGNED = frozenset(
    {
        "accept",
        "accept-encoding",
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "range",
        "user-agent",
    }
)
"""What most requests have, none of it `x-amz-*`: set aside at once, so that few names are looked at one by one."""

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
    """Of a header of a new kind: all of it but the signature."""

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
        other.signed_headers, other.accounted_for, other.signature = self.signed_headers, self.accounted_for, signature
        other.unproved = ""
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
    """The parts of an `Authorization` header.

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
    """The signature has been verified: headers of its kind need not be parsed."""
    common, authorization.unproved = authorization.unproved, ""
    if 0 < len(common) <= _PROVED_CHARACTERS_MAX:
        if len(_proved) >= _PROVED_MAX:
            _proved.clear()
        _proved[common] = authorization


def _parse_authorization(header: str) -> Authorization:
    scheme, _, rest = header.partition(" ")
    if scheme != ALGORITHM:
        raise _wrong_scheme(scheme)
    parts = {}
    for part in rest.split(","):
        name, _, value = part.strip().partition("=")
        parts[name] = value
    if len(parts) != 3 or not (parts.get("Credential") and parts.get("SignedHeaders") and parts.get("Signature")):
        raise _malformed("It must hold exactly Credential, SignedHeaders and Signature.")
    try:
        access_key_id, date, region, service = parse_credential(parts["Credential"])
    except ValueError as error:
        raise _malformed(str(error)) from None
    return Authorization(
        access_key_id, date, region, service, tuple(parts["SignedHeaders"].split(";")), parts["Signature"]
    )


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
    if len(date) != 8 or not date.isdecimal() or not 0 < len(region) <= _REGION_CHARACTERS_MAX:
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
        raise _skewed(timestamp, now)
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
    """The canonical request of what arrived: bytes as received, `host` as the client addressed us."""
    host, headers = request.host, request.headers
    lines = [f"{name}:{host if name == 'host' else headers.get(name, '')}" for name in signed_headers]
    fields = "\n".join(lines)
    if "  " in fields or "\t" in fields:  # the values are trimmed already
        fields = "\n".join([canonical_value(line) for line in lines])
    path, names = canonical_path(request.raw_path), ";".join(signed_headers)
    return f"{request.method}\n{path}\n{query}\n{fields}\n\n{names}\n{payload_hash}".encode("latin-1")


def check_signed_headers(headers: Mapping[str, str], authorization: Authorization) -> None:
    """Raise AccessDenied unless `host`, every `x-amz-*` header present and its likes in other dialects are signed."""
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


_DIALECTS = ("x-amz-", "x-goog-", "x-oss-", "x-cos-", "x-obs-", "x-bce-", "x-tos-", "x-ms-", "x-rgw-", "x-minio-")
_WORDS = re.compile(
    "copy|rename|-move|-source|-acl|grant|tagging|encrypt|-meta|directive|storage-class|retention|legal-hold|object-lock"
    "|redirect|version-?id"
)


def changes_the_request(name: str) -> bool:
    """Whether some server makes another request of one that has this header: all of S3's dialects, and their words.

    What proxies and tracing add (`x-forwarded-for`, `x-request-id`, …) is not among them.
    """
    return name.startswith("x-") and (name.startswith(_DIALECTS) or _WORDS.search(name) is not None)


def check_signature(authorization: Authorization, secret: str, timestamp: str, canonical: bytes) -> SeedSignature:
    """Compare, in constant time; raises S3Error SignatureDoesNotMatch with all that a client needs to find out why."""
    key = signing_key(secret, authorization.date, authorization.region, authorization.service)
    scope = authorization.scope
    text = string_to_sign(timestamp, scope, canonical)
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


def _skewed(timestamp: str, now: float) -> S3Error:
    return s3_error(
        "RequestTimeTooSkewed",
        RequestTime=timestamp,
        ServerTime=format_iso_date(now),
        MaxAllowedSkewMilliseconds=str(CLOCK_SKEW_SECONDS_MAX * 1000),
    )


def _wrong_scheme(scheme: str) -> S3Error:
    if scheme == "AWS":
        return s3_error(
            "InvalidRequest",
            "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256.",
        )
    if scheme.startswith("AWS4-ECDSA-P256-SHA256"):
        return s3_error("NotImplemented", "SigV4A is not supported.", Header="Authorization")
    return s3_error("InvalidArgument", "Unsupported Authorization Type", ArgumentName="Authorization")


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
) -> dict[str, str]:
    """The headers to add to an outgoing request so that it is signed: authorization and its x-amz-* companions.

    `path_encoded` is canonical already (`encode_path`, or `"/" + encode_key` in virtual-hosted style). `headers` are
    lower-case, latin-1, and must hold `host` exactly as it will be sent. Signed are host, every x-amz-*, content-type,
    content-md5 and range.
    """
    timestamp = format_timestamp(now)
    added = {"x-amz-date": timestamp, "x-amz-content-sha256": payload_hash}
    if session_token is not None:
        added["x-amz-security-token"] = session_token
    values = {**headers, **added}
    names, joined_names = _signed_names(tuple(values))
    fields = "\n".join([f"{name}:{values[name]}" for name in names])
    if _MAY_NEED_TRIMMING.search(fields):
        fields = "\n".join([f"{name}:{canonical_value(values[name])}" for name in names])
    canonical = f"{method}\n{path_encoded}\n{_outgoing_query(query)}\n{fields}\n\n{joined_names}\n{payload_hash}"
    scope = f"{timestamp[:8]}/{region}/s3/aws4_request"
    text = string_to_sign(timestamp, scope, canonical.encode("latin-1"))
    signature = sign(signing_key(secret, timestamp[:8], region), text)
    added["authorization"] = (
        f"{ALGORITHM} Credential={access_key_id}/{scope}, SignedHeaders={joined_names}, Signature={signature}"
    )
    return added


@lru_cache(maxsize=1024)
def _signed_names(names: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Those of a request's headers that are signed, in order, and the same joined: few kinds of requests are sent."""
    signed = sorted(name for name in names if name in _SIGNED_WHEN_PRESENT or name.startswith("x-amz-"))
    return tuple(signed), ";".join(signed)


def _outgoing_query(query: Iterable[tuple[str, str | None]]) -> str:
    if not query:
        return ""
    pairs = sorted([(quote(name, safe="-_.~"), quote(value or "", safe="-_.~")) for name, value in query])
    return "&".join([f"{name}={value}" for name, value in pairs])
