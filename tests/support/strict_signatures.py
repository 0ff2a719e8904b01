"""Verifies SigV4 with botocore's signer over what arrived: an implementation that the gateway shares nothing with."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import quote_from_bytes, unquote_to_bytes

from botocore.auth import EMPTY_SHA256_HASH, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.compat import HTTPHeaders
from botocore.credentials import Credentials

from gateway.s3.error_codes import s3_error

RawHeaders = Sequence[tuple[bytes, bytes]]

_SKEW_MAX_SECONDS = 900
_PREFIXES = {"AWS4": "x-amz-", "GOOG4": "x-goog-"}
_SCOPES = {"AWS4": ["s3", "aws4_request"], "GOOG4": ["storage", "goog4_request"]}
_NEED_NO_SIGNATURE = frozenset({"x-amzn-trace-id"})


def verify(
    method: str,
    raw_path: bytes,
    raw_query: bytes,
    headers: RawHeaders,
    *,
    secrets: Mapping[str, Credentials],
    region: str,
    now: float,
    families: Sequence[str] = ("AWS4",),
) -> str:
    """The access key id of a signature that is right; raises the S3Error that S3 would answer with."""
    values = _joined(headers)
    family, key_id, scope_region, signed_names, signature = _authorization(values.get("authorization"), families)
    amz = _PREFIXES[family]
    credentials = secrets.get(key_id)
    if credentials is None:
        raise s3_error("InvalidAccessKeyId", AWSAccessKeyId=key_id)
    if values.get(f"{amz}security-token") != credentials.token:
        raise s3_error("InvalidToken")
    if scope_region != region:
        raise s3_error("AuthorizationHeaderMalformed", f"the region '{scope_region}' is wrong", Region=region)
    _check_time(values.get(f"{amz}date", ""), now)
    _check_coverage(values, signed_names)
    expected = _signature(method, raw_path, raw_query, values, signed_names, credentials, region, family)
    if not hmac.compare_digest(expected, signature):
        raise s3_error("SignatureDoesNotMatch", AWSAccessKeyId=key_id, SignatureProvided=signature)
    return key_id


def empty_payload_hash() -> str:
    return str(EMPTY_SHA256_HASH)


def _joined(headers: RawHeaders) -> dict[str, str]:
    """Values are UTF-8, as S3 takes them; other bytes are refused."""
    values: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = raw_name.decode("ascii").lower()
        try:
            value = raw_value.decode("utf-8")
        except UnicodeDecodeError:
            raise s3_error("InvalidArgument", "Header values must be UTF-8.", ArgumentName=name) from None
        values[name] = f"{values[name]},{value}" if name in values else value
    return values


def _authorization(value: str | None, families: Sequence[str]) -> tuple[str, str, str, list[str], str]:
    if value is None:
        raise s3_error("AccessDenied")
    algorithm, _, rest = value.partition(" ")
    fields = {name: value for name, _, value in (part.strip().partition("=") for part in rest.split(","))}
    family = algorithm.removesuffix("-HMAC-SHA256")
    if family not in families or fields.keys() != {"Credential", "SignedHeaders", "Signature"}:
        raise s3_error("AuthorizationHeaderMalformed")
    scope = fields["Credential"].split("/")
    names = fields["SignedHeaders"].split(";")
    if len(scope) != 5 or scope[3:] != _SCOPES[family] or names != sorted(names):
        raise s3_error("AuthorizationHeaderMalformed")
    return family, scope[0], scope[2], names, fields["Signature"]


def _check_time(timestamp: str, now: float) -> None:
    try:
        moment = datetime.strptime(timestamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise s3_error("AccessDenied", "AWS authentication requires a valid x-amz-date header") from None
    if abs(moment - now) > _SKEW_MAX_SECONDS:
        raise s3_error("RequestTimeTooSkewed")


def _check_coverage(values: Mapping[str, str], signed: Sequence[str]) -> None:
    needed = {name for name in values if name.startswith(("x-amz-", "x-goog-")) and name not in _NEED_NO_SIGNATURE}
    needed.add("host")
    missing = needed - set(signed)
    if missing or not set(signed) <= values.keys():
        unsigned = ", ".join(sorted(missing))
        raise s3_error("AccessDenied", f"There were headers present in the request which were not signed: {unsigned}")


def _signature(
    method: str,
    raw_path: bytes,
    raw_query: bytes,
    values: Mapping[str, str],
    signed_names: Sequence[str],
    credentials: Credentials,
    region: str,
    family: str,
) -> str:
    auth = S3SigV4Auth(credentials, "s3", region)
    request = AWSRequest(method, f"http://host/?{_requoted_query(raw_query)}")
    timestamp = request.context["timestamp"] = values[f"{_PREFIXES[family]}date"]
    covered = HTTPHeaders()
    for name in signed_names:
        covered[name] = values[name]
    canonical = "\n".join(
        [
            method,
            quote_from_bytes(unquote_to_bytes(raw_path), safe="/-_.~"),
            auth.canonical_query_string(request),
            auth.canonical_headers(covered) + "\n",
            auth.signed_headers(covered),
            values[f"{_PREFIXES[family]}content-sha256"],
        ]
    )
    if family == "GOOG4":
        return _google_signature(canonical, timestamp, credentials.secret_key, region)
    return str(auth.signature(auth.string_to_sign(request, canonical), request))


def _google_signature(canonical: str, timestamp: str, secret: str, region: str) -> str:
    """cloud.google.com/storage/docs/authentication/signatures, which botocore does not know."""
    scope = [timestamp[:8], region, *_SCOPES["GOOG4"]]
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"GOOG4{secret}".encode()
    for part in scope:
        key = hmac.new(key, part.encode(), "sha256").digest()
    text = "\n".join(["GOOG4-HMAC-SHA256", timestamp, "/".join(scope), hashed])
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _requoted_query(raw_query: bytes) -> str:
    pairs = (part.partition(b"=") for part in raw_query.split(b"&") if part)
    return "&".join(f"{_requoted(name)}={_requoted(value)}" for name, _, value in pairs)


def _requoted(raw: bytes) -> str:
    return quote_from_bytes(unquote_to_bytes(raw), safe="-_.~")
