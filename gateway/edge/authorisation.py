"""May the caller touch this bucket and prefix: asked before any operation begins, for hits and misses alike."""

from __future__ import annotations

import re

from gateway.policy.slots import (
    Grant,
    Slots,
    refusal_of_any_write,
    refusal_of_bucket_operation,
    refusal_of_listing,
    refusal_of_read,
    refusal_of_unknown_writes,
    refusal_of_write,
)
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation, S3Request, parse_copy_source

_LISTINGS = frozenset({Operation.LIST_OBJECTS, Operation.LIST_OBJECTS_V2, Operation.LIST_MULTIPART_UPLOADS})

_METHOD_OVERRIDES = frozenset({"x-http-method-override", "x-http-method", "x-method-override"})
"""By these, some servers carry out another method than the one that is authorised here."""

_FOREIGN_SOURCE = re.compile(r"x-(?!amz-).*(copy|rename|move)-(source|from)|x-(copy|rename|move)-(source|from)")
"""Second objects in other dialects of S3 (x-goog-copy-source, x-oss-copy-source, x-copy-from, …)."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_FORM = "multipart/form-data"

_SELECT = frozenset({"select", "select-type", "x-id"})


def authorise(request: S3Request, grant: Grant, slots: Slots) -> None:
    """Raise AccessDenied (403) unless the caller may do what the request asks (docs/semantics.md, clause 7).

    InvalidRequest (400) when the origin might do something else than what is judged here.
    """
    _refuse_method_overrides(request)
    reason = _refusal(request, grant, slots) or _refusal_of_sources(request, grant)
    if reason is None and _names_keys_elsewhere(request):
        reason = refusal_of_unknown_writes(grant, slots, request.bucket or "")
    if reason is not None:
        raise s3_error("AccessDenied", f"Access Denied. {reason}")


def _refusal(request: S3Request, grant: Grant, slots: Slots) -> str | None:
    bucket, key = request.bucket, request.key
    if bucket is not None and key is not None:
        if is_read(request):
            return refusal_of_read(grant, bucket, key)
        return refusal_of_write(grant, slots, bucket, key)
    if bucket is not None and request.operation in _LISTINGS:
        return refusal_of_listing(grant, bucket, request.parameter("prefix") or "")
    if request.operation is Operation.DELETE_OBJECTS:
        return refusal_of_any_write(grant, slots, bucket or "")  # each key is checked once the body has named it
    return refusal_of_bucket_operation(grant, slots, bucket, is_read=is_read(request))


def _refusal_of_sources(request: S3Request, grant: Grant) -> str | None:
    """Rights to what a copy reads, and to what a rename takes away."""
    if grant.covers_everything:
        return None
    copied = request.headers.get("x-amz-copy-source")
    if copied is not None:
        # Servers disagree on whether `+` stands for a space here: both readings must be allowed.
        sources = [parse_copy_source(text).key for text in {copied, copied.replace("+", "%2B")}]
        if not all(grant.covers(source.bucket, source.key) for source in sources):
            return "The credential does not cover the copy source."
    if any(_FOREIGN_SOURCE.fullmatch(name) for name in request.headers):
        return "A copy source in a header other than x-amz-copy-source needs a credential that covers everything."
    return None


def _names_keys_elsewhere(request: S3Request) -> bool:
    """Whether a write names keys where they are not looked at: RenameObject takes one away, a form holds its own."""
    return "x-amz-rename-source" in request.headers or _is_form(request)


def _is_form(request: S3Request) -> bool:
    """Whatever else is in its target: some servers look at the content type alone."""
    return request.method == "POST" and request.headers.get("content-type", "").strip().lower().startswith(_FORM)


def _refuse_method_overrides(request: S3Request) -> None:
    if _METHOD_OVERRIDES.isdisjoint(request.headers):
        return
    for name in sorted(_METHOD_OVERRIDES):
        if name in request.headers:
            raise s3_error("InvalidRequest", f"The header {name} is not accepted: send the method itself.")


def is_read(request: S3Request) -> bool:
    """Whether the request changes nothing, and gives nobody the means to.

    SelectObjectContent reads, though it is a POST. CreateSession hands out the origin's own keys, though it is a GET.
    """
    if request.method in _READING and not request.query:
        return True
    if request.method not in _READING and (request.method != "POST" or _is_form(request)):
        return False
    names = {name for name, _ in request.query}
    if request.method in _READING:
        return "session" not in names
    return request.method == "POST" and "select" in names and names <= _SELECT
