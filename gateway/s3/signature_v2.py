"""AWS Signature Version 2 in the query (`AWSAccessKeyId`, `Signature`, `Expires`): boto3 and the AWS CLI presign so.

Source: "Signing and Authenticating REST Requests" of the S3 developer guide. It knows neither regions nor payloads, and
signs only those query parameters that it lists.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Iterator
from typing import NamedTuple

from gateway.s3.error_codes import s3_error
from gateway.s3.headers import format_iso_date
from gateway.s3.requests import BUCKET_SETTINGS, Operation, S3Request, decode, strip_signature_parameters
from gateway.s3.signature_v4 import changes_the_request

_NEEDED = ("AWSAccessKeyId", "Signature", "Expires")
_SECONDS = re.compile(r"-?\d{1,11}", re.ASCII)

_SUBRESOURCES = frozenset(
    """
    accelerate acl analytics cors defaultObjectAcl delete inventory lifecycle location logging metrics notification
    object-lock partNumber policy replication requestPayment response-cache-control response-content-disposition
    response-content-encoding response-content-language response-content-type response-expires restore select
    select-type storageClass tagging torrent uploadId uploads versionId versioning versions website
    """.split()  # noqa: SIM905 -- a list of forty lines says no more
)
"""Query parameters that version 2 signs. Anyone with the URL can add any other."""


_ASKED_FOR_BY_A_PARAMETER = frozenset({Operation.FORWARD, *BUCKET_SETTINGS.values()})
"""Reads that a parameter added to another one's URL could lead to: it must be one that version 2 signs. So must it be
wherever something is changed."""

_READING = frozenset({"GET", "HEAD"})

_HARMLESS = frozenset({"x-id", "content-type", "content-md5"})
"""Boto3 repeats these two headers in the query; what counts, and is signed, is the header."""


class PresignedV2(NamedTuple):
    """The signing parameters of a version 2 query; `expires` is in seconds since the epoch."""

    access_key_id: str
    signature: str
    expires: int
    session_token: str | None

    def __repr__(self) -> str:
        return f"PresignedV2(access_key_id={self.access_key_id!r}, expires={self.expires})"


def parse_presigned_v2(request: S3Request) -> PresignedV2 | None:
    """Return the signing parameters; None when the query has none of them. Raises S3Error AccessDenied."""
    given = [(name, value or "") for name, value in request.query if name in _NEEDED]
    parameters = dict(given)
    if "AWSAccessKeyId" not in parameters and "Signature" not in parameters:
        return None
    if len(given) != len(_NEEDED) or not all(parameters.get(name) for name in _NEEDED):
        raise s3_error(
            "AccessDenied",
            "Query-string authentication requires the Signature, Expires and AWSAccessKeyId parameters, each once",
        )
    if not _SECONDS.fullmatch(parameters["Expires"]):
        raise s3_error("AccessDenied", "Invalid date (should be seconds since epoch)", Expires=parameters["Expires"])
    token = request.parameter("x-amz-security-token") or request.headers.get("x-amz-security-token")
    return PresignedV2(parameters["AWSAccessKeyId"], parameters["Signature"], int(parameters["Expires"]), token or None)


def verify_presigned_v2(request: S3Request, parsed: PresignedV2, secret: str, now: float) -> None:
    """Check a request presigned with version 2, of any method.

    Version 2 does not sign the host, nor headers but `content-type`, `content-md5` and `x-amz-*`, nor parameters that
    it does not know: with a header or a parameter that could make another request of it, it is refused. Raises
    S3Error: AccessDenied, SignatureDoesNotMatch.
    """
    if now > parsed.expires:
        expires = format_iso_date(max(0, parsed.expires))
        raise s3_error("AccessDenied", "Request has expired", Expires=expires, ServerTime=format_iso_date(now))
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
    yield from _amz_headers(request)
    yield _resource(request)


def _amz_headers(request: S3Request) -> list[bytes]:
    """Every x-amz-* header, and those that the signer moved into the query."""
    found: dict[str, list[bytes]] = {}
    for name, value in request.headers.items():
        if name.startswith("x-amz-"):
            found.setdefault(name, []).append(value.encode("latin-1"))
    for name, hoisted in request.query:
        if name.lower().startswith("x-amz-"):
            found.setdefault(name.lower(), []).append((hoisted or "").encode())
    return [name.encode() + b":" + b",".join(values) for name, values in sorted(found.items())]


def _resource(request: S3Request) -> bytes:
    path = request.raw_path
    if request.bucket is not None and _is_virtual_hosted(request):
        path = b"/" + request.bucket.encode() + path
    signed = sorted((pair for pair in request.query if pair[0] in _SUBRESOURCES), key=lambda pair: pair[0])
    if not signed:
        return path
    return path + b"?" + "&".join(n if v is None else f"{n}={v}" for n, v in signed).encode()


def _is_virtual_hosted(request: S3Request) -> bool:
    """Return whether the host names the bucket: only then the whole path is the key."""
    return decode(request.raw_path[1:]) == (request.key or "")
