"""Presigned requests, whose signature travels in the query: AWS Signature Version 4, and Version 2.

Version 4: "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)" of the S3 API.

Version 2 (`AWSAccessKeyId`, `Signature`, `Expires`) is what boto3 and the AWS CLI presign with unless told otherwise:
"Signing and Authenticating REST Requests" of the S3 developer guide. It knows neither regions nor payloads, and signs
only those query parameters that it lists.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.core.errors import S3Error
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import format_iso_date, name_set
from gateway.s3.requests import BUCKET_SETTINGS, Operation, S3Request, decode, strip_signature_parameters
from gateway.s3.signature_v4 import (
    ALGORITHM,
    CLOCK_SKEW_SECONDS_MAX,
    Authorization,
    SeedSignature,
    canonical_query,
    canonical_request,
    changes_the_request,
    check_signature,
    check_signed_headers,
    parse_credential,
    parse_timestamp,
    payload_mode,
)

EXPIRES_SECONDS_MAX = 7 * 24 * 3600

_V4_MARKS = ("X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature")
_V4_NEEDED = (*_V4_MARKS, "X-Amz-Date", "X-Amz-SignedHeaders", "X-Amz-Expires")
_SECONDS = re.compile(r"-?\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PresignedV4:
    """The signing parameters of a version 4 query."""

    authorization: Authorization = field(repr=False)
    timestamp: str
    expires_seconds: int
    session_token: str | None = field(repr=False)

    @property
    def access_key_id(self) -> str:
        return self.authorization.access_key_id


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
    algorithm, timestamp = parameters["X-Amz-Algorithm"], parameters["X-Amz-Date"]
    if algorithm.startswith("AWS4-ECDSA-P256-SHA256"):
        raise s3_error("NotImplemented", "SigV4A is not supported.", Header="X-Amz-Algorithm")
    if algorithm != ALGORITHM:
        raise _bad_parameters(f"X-Amz-Algorithm only supports {ALGORITHM}")
    if parse_timestamp(timestamp) is None:
        raise _bad_parameters("X-Amz-Date must be in the ISO8601 Long Format yyyyMMdd'T'HHmmss'Z'")
    try:
        credential = parse_credential(parameters["X-Amz-Credential"])
    except ValueError as error:
        raise _bad_parameters(f"Error parsing the X-Amz-Credential parameter. {error}") from None
    signed_headers = parameters["X-Amz-SignedHeaders"]
    if not signed_headers.isascii():
        raise _bad_parameters("X-Amz-SignedHeaders names headers that cannot be.")
    return PresignedV4(
        Authorization(*credential, tuple(signed_headers.split(";")), parameters["X-Amz-Signature"]),
        timestamp,
        _expires_seconds(parameters["X-Amz-Expires"]),
        parameters.get("X-Amz-Security-Token"),
    )


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
    signed_at = parse_timestamp(parsed.timestamp) or 0.0
    if now < signed_at - CLOCK_SKEW_SECONDS_MAX:
        raise s3_error("AccessDenied", "Request is not valid yet", ServerTime=format_iso_date(now))
    _check_expiry(signed_at + parsed.expires_seconds, now)
    check_signed_headers(request.headers, authorization)
    payload_hash = (
        request.parameter("X-Amz-Content-Sha256") or request.headers.get("x-amz-content-sha256") or "UNSIGNED-PAYLOAD"
    )
    payload_mode(payload_hash)
    query = canonical_query(request.raw_query, without=b"X-Amz-Signature")
    canonical = canonical_request(request, query, authorization.signed_headers, payload_hash)
    return check_signature(authorization, secret, parsed.timestamp, canonical)


def _bad_parameters(message: str) -> S3Error:
    return s3_error("AuthorizationQueryParametersError", message)


def _check_expiry(expires: float, now: float) -> None:
    if now > expires:
        raise s3_error(
            "AccessDenied", "Request has expired", Expires=format_iso_date(expires), ServerTime=format_iso_date(now)
        )


# --- version 2 ------------------------------------------------------------------------------------------------------


_V2_NEEDED = ("AWSAccessKeyId", "Signature", "Expires")
_EPOCH_SECONDS = re.compile(r"-?\d{1,11}", re.ASCII)

_SUBRESOURCES = name_set(
    """
    accelerate acl analytics cors defaultObjectAcl delete inventory lifecycle location logging metrics notification
    object-lock partNumber policy replication requestPayment response-cache-control response-content-disposition
    response-content-encoding response-content-language response-content-type response-expires restore select
    select-type storageClass tagging torrent uploadId uploads versionId versioning versions website
    """
)
"""Query parameters that version 2 signs. Anyone with the URL can add any other."""


_ASKED_FOR_BY_A_PARAMETER = frozenset({Operation.FORWARD, *BUCKET_SETTINGS.values()})
"""Reads that a parameter added to another one's URL could lead to: it must be one that version 2 signs. So must it be
wherever something is changed."""

_READING = frozenset({"GET", "HEAD"})

_HARMLESS = frozenset({"x-id", "content-type", "content-md5"})
"""Boto3 repeats these two headers in the query; what counts, and is signed, is the header."""


@dataclass(frozen=True, slots=True)
class PresignedV2:
    """The signing parameters of a version 2 query; `expires` is in seconds since the epoch."""

    access_key_id: str
    signature: str = field(repr=False)
    expires: int
    session_token: str | None = field(repr=False)


def parse_presigned_v2(request: S3Request) -> PresignedV2 | None:
    """Return the signing parameters; None when the query has none of them. Raises S3Error AccessDenied."""
    given = [(name, value or "") for name, value in request.query if name in _V2_NEEDED]
    parameters = dict(given)
    if "AWSAccessKeyId" not in parameters and "Signature" not in parameters:
        return None
    if len(given) != len(_V2_NEEDED) or not all(parameters.get(name) for name in _V2_NEEDED):
        raise s3_error(
            "AccessDenied",
            "Query-string authentication requires the Signature, Expires and AWSAccessKeyId parameters, each once",
        )
    if not _EPOCH_SECONDS.fullmatch(parameters["Expires"]):
        raise s3_error("AccessDenied", "Invalid date (should be seconds since epoch)", Expires=parameters["Expires"])
    token = request.parameter("x-amz-security-token") or request.headers.get("x-amz-security-token")
    return PresignedV2(parameters["AWSAccessKeyId"], parameters["Signature"], int(parameters["Expires"]), token or None)


def verify_presigned_v2(request: S3Request, parsed: PresignedV2, secret: str, now: float) -> None:
    """Check a request presigned with version 2, of any method.

    Version 2 does not sign the host, nor headers but `content-type`, `content-md5` and `x-amz-*`, nor parameters that
    it does not know: with a header or a parameter that could make another request of it, it is refused. Raises
    S3Error: AccessDenied, SignatureDoesNotMatch.
    """
    _check_expiry(max(0, parsed.expires), now)
    _check_what_is_unsigned(request)
    text = b"\n".join(_lines(request, parsed.expires))
    expected = base64.b64encode(hmac.digest(secret.encode(), text, "sha1"))
    if not hmac.compare_digest(expected, parsed.signature.encode()):
        raise s3_error(
            "SignatureDoesNotMatch",
            AWSAccessKeyId=parsed.access_key_id,
            StringToSign=text.decode("utf-8", "replace"),
            SignatureProvided=parsed.signature,
        )


def _check_what_is_unsigned(request: S3Request) -> None:
    if any("\n" in name or "\n" in (value or "") for name, value in request.query):
        # Version 2 signs decoded values, line by line: a line break could move the border between two of them.
        raise s3_error("AccessDenied", "Signature version 2 cannot cover a parameter with a line break.")
    unsigned = [name for name in request.headers if not name.startswith("x-amz-") and changes_the_request(name)]
    if unsigned:
        raise s3_error("AccessDenied", f"Signature version 2 does not cover the header {unsigned[0]}.")
    if request.method in _READING and request.operation not in _ASKED_FOR_BY_A_PARAMETER:
        return
    for name, _ in strip_signature_parameters(request.query):
        if name not in _SUBRESOURCES and not name.lower().startswith("x-amz-") and name not in _HARMLESS:
            raise s3_error("AccessDenied", f"Signature version 2 does not cover the query parameter {name}.")


def _lines(request: S3Request, expires: int) -> Iterator[bytes]:
    """Yield the lines of the string to sign: in a query, `Expires` stands where the date would."""
    yield request.method.encode()
    yield request.headers.get("content-md5", "").encode("latin-1")
    yield request.headers.get("content-type", "").encode("latin-1")
    yield str(expires).encode()
    amz: dict[str, list[bytes]] = {}
    for name, value in request.headers.items():
        if name.startswith("x-amz-"):
            amz.setdefault(name, []).append(value.encode("latin-1"))
    for name, hoisted in request.query:  # the signer has moved these into the query
        if name.lower().startswith("x-amz-"):
            amz.setdefault(name.lower(), []).append((hoisted or "").encode())
    for name, values in sorted(amz.items()):
        yield name.encode() + b":" + b",".join(values)
    path = request.raw_path
    # Only where the host names the bucket, the whole path is the key.
    if request.bucket is not None and decode(path[1:]) == (request.key or ""):
        path = b"/" + request.bucket.encode() + path
    signed = sorted((pair for pair in request.query if pair[0] in _SUBRESOURCES), key=lambda pair: pair[0])
    resource = "&".join(n if v is None else f"{n}={v}" for n, v in signed)
    yield path + b"?" + resource.encode() if signed else path
