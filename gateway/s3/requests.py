"""From a request line and headers to one parsed S3 request.

target → addressing.py (bucket, key, query) → routing.py (operation) → S3Request
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.s3.addressing import (
    CopySource,
    bucket_of_host,
    encode_key,
    encode_path,
    encode_query,
    parse_copy_source,
    parse_query,
    split_absolute,
    split_path,
)
from gateway.s3.error_codes import s3_error
from gateway.s3.routing import Operation, classify

__all__ = [
    "CopySource",
    "Operation",
    "S3Request",
    "another_service",
    "encode_key",
    "encode_path",
    "encode_query",
    "parse_copy_source",
    "parse_request",
]

_NAME_KEPT_BYTES_MAX = 64
"""Field names up to this length are kept decoded: the same few come with every request."""

_NAMES_KEPT_MAX = 1024

_NEVER_REPEATED = ("host", "authorization", "x-amz-date", "x-amz-content-sha256", "content-length")


@dataclass(slots=True)
class S3Request:
    """One parsed request. What the signature covers is kept as it was on the wire (`raw_*`, `headers`).

    `raw_path` and `raw_query` are the bytes of the request target between host, `?` and `#`; an absolute-form target
    has lost its scheme and authority. `headers` are lower-case names → latin-1 decoded values, trimmed, repeated ones
    joined by `,` in order of arrival (RFC 9110, 5.3). `host` is the Host header, or the authority of an absolute-form
    target. `query` holds decoded (name, value) pairs in order, value None where there was no `=`.

    Headers and query stay out of the repr: signatures and session tokens travel in them.
    """

    method: str
    raw_path: bytes
    raw_query: bytes = field(repr=False)
    host: str
    headers: Mapping[str, str] = field(repr=False)
    bucket: str | None
    key: str | None
    query: Sequence[tuple[str, str | None]] = field(repr=False)
    operation: Operation

    def parameter(self, name: str) -> str | None:
        """The first value of a query parameter; empty when it came without one, None when it is absent."""
        for candidate, value in self.query:
            if candidate == name:
                return value or ""
        return None


def parse_request(
    method: str,
    target_path: bytes,
    raw_query: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    base_domains: Sequence[str],
) -> S3Request:
    """The S3 request that an HTTP request means.

    `target_path` is the request target up to `?`, still percent-encoded, in origin form (`/bucket/key`) or absolute
    form (`http://host/bucket/key`). `base_domains` are the names below which buckets are host names. Raises S3Error:
    InvalidURI, InvalidBucketName, KeyTooLongError, MethodNotAllowed, InvalidArgument, InvalidRequest.
    """
    authority, raw_path = split_absolute(target_path)
    fields = _join_headers(headers)
    host = authority if authority is not None else fields.get("host", "")
    host_bucket = bucket_of_host(host, tuple(base_domains)) if base_domains else None
    bucket, key = split_path(raw_path, host_bucket)
    query = parse_query(raw_query) if raw_query else []
    operation = classify(method, bucket, key, query, fields)
    return S3Request(method, raw_path, raw_query, host, fields, bucket, key, query, operation)


class FieldNames(dict[bytes, str]):
    """Raw field names → decoded, in lower case. A dictionary finds bytes at a third of what `lru_cache` costs."""

    def __missing__(self, raw_name: bytes) -> str:
        name = raw_name.decode("latin-1").lower()
        if len(raw_name) <= _NAME_KEPT_BYTES_MAX:
            if len(self) >= _NAMES_KEPT_MAX:
                self.clear()
            self[raw_name] = name
        return name


_field_names = FieldNames()


def _join_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    fields = {_field_names[raw_name]: raw_value.decode("latin-1").strip(" \t") for raw_name, raw_value in headers}
    return fields if len(fields) == len(headers) else _join_repeated(headers)


def _join_repeated(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    values: dict[str, list[str]] = {}
    for raw_name, raw_value in headers:
        values.setdefault(_field_names[raw_name], []).append(raw_value.decode("latin-1").strip(" \t"))
    for name in _NEVER_REPEATED:
        if len(values.get(name, ())) > 1:
            raise s3_error("InvalidRequest", f"The header {name} came twice.")
    return {name: ",".join(joined) for name, joined in values.items()}


def another_service(request: S3Request) -> str | None:
    """The AWS service that a request was meant for, when that is not S3; None otherwise.

    The caller must tell the client to set `AWS_ENDPOINT_URL_S3` instead of `AWS_ENDPOINT_URL`.

    `AWS_ENDPOINT_URL` moves every AWS client of a process here, STS too. Three signs: the credential scope, the
    `x-amz-target` header of the JSON services, an unsigned `Action` form on `POST /` (only STS takes those).
    """
    service = _signed_service(request)
    if service is not None:
        return None if service in ("s3", "s3express") else service
    target = request.headers.get("x-amz-target")
    if target is not None:
        return target.partition(".")[0].partition("_")[0].lower() or None
    if request.bucket is None and _is_query_api(request):
        return "sts"
    return None


def _signed_service(request: S3Request) -> str | None:
    """The service in the credential scope `date/region/service/aws4_request`."""
    header = request.headers.get("authorization")
    if header is None:
        credential = request.parameter("X-Amz-Credential") or ""
    elif header.startswith("AWS4-HMAC-SHA256"):
        credential = header.partition("Credential=")[2].partition(",")[0]
    else:
        return None
    scope = credential.strip().rsplit("/", 2)
    return scope[1] if len(scope) == 3 and scope[2] == "aws4_request" else None


def _is_query_api(request: S3Request) -> bool:
    form = request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")
    return (request.method == "POST" and form) or request.parameter("Action") is not None
