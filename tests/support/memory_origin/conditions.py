"""Preconditions and ranges at `MemoryOrigin` (S3 API: GetObject, PutObject; RFC 9110, 13 and 14).

Written apart from the gateway's own on purpose: a mistake in one is found by the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from gateway.core.model import ByteRange
from gateway.origin.stores.store import Found
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import format_http_date

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def check_read(headers: Mapping[str, str], etag: str, modified: float) -> bool:
    """Whether to send the object; False is 304. Raises S3Error PreconditionFailed."""
    if "if-match" in headers:
        if not _matches(headers["if-match"], etag):
            raise s3_error("PreconditionFailed", Condition="If-Match")
    elif _later(headers.get("if-unmodified-since"), modified) is True:
        raise s3_error("PreconditionFailed", Condition="If-Unmodified-Since")
    if "if-none-match" in headers:
        return not _matches(headers["if-none-match"], etag)
    return _later(headers.get("if-modified-since"), modified) is not False


def check_copy_source(headers: Mapping[str, str], etag: str, modified: float) -> None:
    """The same for a copy source, where every failure is PreconditionFailed."""
    prefix = "x-amz-copy-source-"
    conditions = {name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)}
    if not check_read(conditions, etag, modified):
        raise s3_error("PreconditionFailed")


def check_write(headers: Mapping[str, str], etag: str | None) -> None:
    """Whether a write may replace the object with this ETag, None where there is none. Raises S3Error."""
    if "if-match" in headers and "if-none-match" in headers:
        raise s3_error("NotImplemented")
    if "if-none-match" in headers:
        if headers["if-none-match"].strip() != "*":
            raise s3_error("NotImplemented", Header="If-None-Match")
        if etag is not None:
            raise s3_error("PreconditionFailed", Condition="If-None-Match")
    if "if-match" in headers:
        if etag is None:
            raise s3_error("NoSuchKey")
        if not _matches(headers["if-match"], etag):
            raise s3_error("PreconditionFailed", Condition="If-Match")


def asked_range(headers: Mapping[str, str], stored: Found) -> ByteRange | None:
    """The bytes asked for; None is all of them, also for what S3 ignores. Raises S3Error InvalidRange."""
    condition = headers.get("if-range")
    if condition is not None and condition not in (stored.etag, format_http_date(stored.modified)):
        return None
    return _asked_range(headers.get("range"), stored.size_bytes)


def _asked_range(header: str | None, size_bytes: int) -> ByteRange | None:
    found = _RANGE.fullmatch(header.strip()) if header else None
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        return _suffix(int(found[2]), size_bytes, found[0])
    first = int(found[1])
    last = int(found[2]) if found[2] else size_bytes - 1
    if found[2] and last < first:
        return None
    if first >= size_bytes:
        raise _unsatisfiable(found[0], size_bytes)
    return ByteRange(first, min(last, size_bytes - 1))


def _suffix(length: int, size_bytes: int, text: str) -> ByteRange | None:
    if length == 0:
        raise _unsatisfiable(text, size_bytes)
    return ByteRange(max(0, size_bytes - length), size_bytes - 1) if size_bytes else None


def _unsatisfiable(text: str, size_bytes: int) -> Exception:
    headers = {"content-range": f"bytes */{size_bytes}"}
    return s3_error("InvalidRange", headers=headers, RangeRequested=text, ActualObjectSize=str(size_bytes))


def _matches(condition: str, etag: str) -> bool:
    candidates = [candidate.strip() for candidate in condition.split(",")]
    return any(candidate == "*" or candidate.strip('"') == etag.strip('"') for candidate in candidates)


def _later(date: str | None, modified: float) -> bool | None:
    """Whether the object was modified after `date`; None when there is no readable date."""
    if date is None:
        return None
    try:
        return int(modified) > parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
