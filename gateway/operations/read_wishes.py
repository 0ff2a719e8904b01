"""The wishes of a GET or HEAD of an object, from its head alone: which bytes, with what, and who must judge them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.metadata.catalog import CHECKSUM_MODE
from gateway.operations.context import RequestContext
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import READ_CONDITIONS, first_and_last, is_one_range
from gateway.s3.requests import S3Request

_SENT_TO_THE_ORIGIN = frozenset({CHECKSUM_MODE, "x-amz-expected-bucket-owner", "x-amz-request-payer"})
"""Headers that the origin must judge; they go along with every request made for this one."""

_COMMON = _SENT_TO_THE_ORIGIN | {
    "accept",
    "accept-encoding",
    "amz-sdk-invocation-id",
    "amz-sdk-request",
    "authorization",
    "connection",
    "host",
    "range",
    "traceparent",
    "tracestate",
    "user-agent",
    "x-amz-api-version",  # the AWS SDK for C++ says it with every request, and so pyarrow does
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-security-token",
    "x-amz-te",  # the AWS SDK for Java 2 takes an MD5 behind the body, and does without
    "x-amz-user-agent",
    "x-amzn-trace-id",
}
"""Headers of most requests: set aside at once, so that few names need a closer look."""

_PLAIN = _COMMON - {"x-amz-expected-bucket-owner", "x-amz-request-payer"} | {
    "content-type",  # the AWS SDK for C++ sends it without a body
    "if-match",
    "if-none-match",
}
"""Headers of a request that depends only on the object, its ETag, the range and the wish for checksums."""

WARM_UP_RANGE = "bytes=0-0"
"""The range of a HEAD that asks for a warm-up (warm_up.py)."""

_CONDITIONS = READ_CONDITIONS | {"if-range"}

_NO_OBJECT_BYTES = 2**60
"""No object is this long."""

_OVERRIDES = {
    f"response-{name}": name
    for name in (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
}

_NO_HEADER_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]|[^\x00-\xff]")


def judged_by_the_origin(request: S3Request) -> dict[str, str]:
    """Return the headers among `_SENT_TO_THE_ORIGIN`; presigning moves them into the query."""
    if not request.query and _SENT_TO_THE_ORIGIN.isdisjoint(request.headers):
        return {}
    found = {name: value or "" for name, value in request.query if name in _SENT_TO_THE_ORIGIN}
    found.update((name, value) for name, value in request.headers.items() if name in _SENT_TO_THE_ORIGIN)
    return found


def vary_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that separate fetches: readers whose bytes may be refused to one another share none."""
    if not headers:
        return {}
    return {name: value for name, value in headers.items() if name != CHECKSUM_MODE}


def get_must_bypass(request: S3Request) -> bool:
    """Return whether a GET asks for something that the catalog and blocks of the current version cannot know."""
    asked = request.headers.get("range")
    if asked is not None and (request.parameter("partNumber") is not None or not is_one_range(asked)):
        return True
    return must_bypass(request)


def head_must_bypass(request: S3Request) -> bool:
    """Return whether a HEAD asks for more than metadata: of a part, a range, a version, with other headers."""
    if request.headers.get("range", WARM_UP_RANGE) != WARM_UP_RANGE or must_bypass(request):
        return True
    return any(name == "partNumber" or name.startswith("response-") for name, _ in request.query)


def must_bypass(request: S3Request) -> bool:
    """Return whether a request asks for anything but bytes and metadata of the current version."""
    if request.query and request.parameter("versionId") is not None:
        return True
    if "origin" in request.headers:
        return True  # CORS rules of the bucket depend on origin and method, and a HEAD is another method
    if _COMMON.issuperset(request.headers):
        return False
    return any(name.startswith("x-amz-") for name in request.headers.keys() - _COMMON)


def is_plain(request: S3Request) -> bool:
    """Return whether a request asks for bytes or metadata of an object's current version, and nothing else."""
    if request.method not in ("GET", "HEAD") or not _PLAIN.issuperset(request.headers):
        return False
    return request.headers.get(CHECKSUM_MODE, "ENABLED").upper() == "ENABLED"


def wants_revalidation(context: RequestContext) -> bool:
    """Return whether the origin is asked, whatever is remembered: the caller says `Cache-Control: no-cache`, signed."""
    if context.past_memory:
        return True
    asked = context.request.headers.get("cache-control")
    if asked is None or context.anonymous:
        return False
    return "no-cache" in (directive.strip() for directive in asked.lower().split(","))


def first_bytes_asked(request: S3Request) -> tuple[int, int | None] | None:
    """Return the requested bytes; None if these, or whether any are wanted, depend on the version."""
    if request.parameter("partNumber") is not None or not _CONDITIONS.isdisjoint(request.headers):
        return None
    asked = first_and_last(request.headers.get("range"))
    return asked if asked is not None and asked[0] < _NO_OBJECT_BYTES else None


def response_overrides(context: RequestContext) -> dict[str, str]:
    """Return `response-content-type` and its five siblings (S3 API, GetObject, "Overriding response header values")."""
    query = context.request.query
    if not query:
        return {}
    overrides = {_OVERRIDES[name]: _header_value(name, value or "") for name, value in query if name in _OVERRIDES}
    if overrides and context.anonymous:
        raise s3_error("InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests.")
    return overrides


def _header_value(parameter: str, value: str) -> str:
    """Return an override's value, if a header can carry it: line breaks would begin another header."""
    if _NO_HEADER_VALUE.search(value):
        raise s3_error(
            "InvalidArgument",
            "Header value cannot be represented using ISO-8859-1.",
            ArgumentName=parameter,
            ArgumentValue=value,
        )
    return value
