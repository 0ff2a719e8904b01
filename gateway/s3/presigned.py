"""Presigned requests: the signature travels in the query, in version 4 (here) or in version 2 (signature_v2.py).

Source: "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)" of the S3 API.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.core.errors import S3Error
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import format_iso_date
from gateway.s3.requests import S3Request, strip_signature_parameters
from gateway.s3.signature_v2 import PresignedV2, parse_presigned_v2, verify_presigned_v2
from gateway.s3.signature_v4 import (
    ALGORITHM,
    CLOCK_SKEW_SECONDS_MAX,
    Authorization,
    SeedSignature,
    canonical_query,
    canonical_request,
    check_signature,
    check_signed_headers,
    parse_credential,
    parse_timestamp,
    payload_mode,
)

__all__ = [
    "PresignedV2",
    "PresignedV4",
    "parse_presigned_v2",
    "parse_presigned_v4",
    "strip_signature_parameters",
    "verify_presigned_v2",
    "verify_presigned_v4",
]

EXPIRES_SECONDS_MAX = 7 * 24 * 3600

_V4_MARKS = frozenset({"X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature"})
_V4_NEEDED = (
    "X-Amz-Algorithm",
    "X-Amz-Credential",
    "X-Amz-Signature",
    "X-Amz-Date",
    "X-Amz-SignedHeaders",
    "X-Amz-Expires",
)
_SECONDS = re.compile(r"-?\d{1,18}", re.ASCII)


class PresignedV4(NamedTuple):
    """The signing parameters of a version 4 query."""

    authorization: Authorization
    timestamp: str
    expires_seconds: int
    session_token: str | None

    @property
    def access_key_id(self) -> str:
        return self.authorization.access_key_id

    def __repr__(self) -> str:
        return f"PresignedV4(access_key_id={self.access_key_id!r}, timestamp={self.timestamp!r})"


def parse_presigned_v4(request: S3Request) -> PresignedV4 | None:
    """Return the signing parameters; None when the query has none of them.

    Raises S3Error: AuthorizationQueryParametersError when one is missing, double or bad, NotImplemented for SigV4A.
    """
    if not any(name in _V4_MARKS for name, _ in request.query):
        return None
    given = [(name, value or "") for name, value in request.query if name.startswith("X-Amz-")]
    parameters = dict(given)
    if len(parameters) != len(given) or not all(parameters.get(name) for name in _V4_NEEDED):
        raise _bad_parameters(f"Query-string authentication version 4 requires each once: {', '.join(_V4_NEEDED)}.")
    _check_algorithm(parameters["X-Amz-Algorithm"])
    if parse_timestamp(parameters["X-Amz-Date"]) is None:
        raise _bad_parameters("X-Amz-Date must be in the ISO8601 Long Format yyyyMMdd'T'HHmmss'Z'")
    return PresignedV4(
        _authorization(
            parameters["X-Amz-Credential"], parameters["X-Amz-SignedHeaders"], parameters["X-Amz-Signature"]
        ),
        parameters["X-Amz-Date"],
        _expires_seconds(parameters["X-Amz-Expires"]),
        parameters.get("X-Amz-Security-Token"),
    )


def _check_algorithm(algorithm: str) -> None:
    if algorithm.startswith("AWS4-ECDSA-P256-SHA256"):
        raise s3_error("NotImplemented", "SigV4A is not supported.", Header="X-Amz-Algorithm")
    if algorithm != ALGORITHM:
        raise _bad_parameters(f"X-Amz-Algorithm only supports {ALGORITHM}")


def _authorization(credential: str, signed_headers: str, signature: str) -> Authorization:
    try:
        access_key_id, date, region, service = parse_credential(credential)
    except ValueError as error:
        raise _bad_parameters(f"Error parsing the X-Amz-Credential parameter. {error}") from None
    if not signed_headers.isascii():
        raise _bad_parameters("X-Amz-SignedHeaders names headers that cannot be.")
    return Authorization(access_key_id, date, region, service, tuple(signed_headers.split(";")), signature)


def _expires_seconds(text: str) -> int:
    if not _SECONDS.fullmatch(text):
        raise _bad_parameters("X-Amz-Expires should be a number")
    seconds = int(text)
    if seconds < 0:
        raise _bad_parameters("X-Amz-Expires must be non-negative")
    if seconds > EXPIRES_SECONDS_MAX:
        raise _bad_parameters(
            "X-Amz-Expires must be less than a week (in seconds); that is, the given X-Amz-Expires must be less than "
            f"{EXPIRES_SECONDS_MAX} seconds"
        )
    return seconds


def verify_presigned_v4(request: S3Request, parsed: PresignedV4, secret: str, now: float) -> SeedSignature:
    """Check a request presigned with version 4; `now` is the wall clock in seconds.

    Raises S3Error: AuthorizationQueryParametersError, AccessDenied (expired, not valid yet, headers not signed),
    SignatureDoesNotMatch.
    """
    authorization = parsed.authorization
    if authorization.date != parsed.timestamp[:8]:
        raise _bad_parameters(
            f"Invalid credential date {authorization.date}. This date is not the same as X-Amz-Date: "
            f"{parsed.timestamp[:8]}."
        )
    _check_lifetime(parse_timestamp(parsed.timestamp) or 0.0, parsed.expires_seconds, now)
    check_signed_headers(request.headers, authorization)
    payload_hash = (
        request.parameter("X-Amz-Content-Sha256") or request.headers.get("x-amz-content-sha256") or "UNSIGNED-PAYLOAD"
    )
    payload_mode(payload_hash)
    query = canonical_query(request.raw_query, without=b"X-Amz-Signature")
    canonical = canonical_request(request, query, authorization.signed_headers, payload_hash)
    return check_signature(authorization, secret, parsed.timestamp, canonical)


def _check_lifetime(signed_at: float, expires_seconds: int, now: float) -> None:
    if now < signed_at - CLOCK_SKEW_SECONDS_MAX:
        raise s3_error("AccessDenied", "Request is not valid yet", ServerTime=format_iso_date(now))
    if now > signed_at + expires_seconds:
        expires = format_iso_date(signed_at + expires_seconds)
        raise s3_error("AccessDenied", "Request has expired", Expires=expires, ServerTime=format_iso_date(now))


def _bad_parameters(message: str) -> S3Error:
    return s3_error("AuthorizationQueryParametersError", message)
