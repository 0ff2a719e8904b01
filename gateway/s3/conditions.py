"""Conditional requests (RFC 9110, 13; S3 API, "GetObject"): may the current version be served, or need it not be?

Dates compare at one-second granularity. ETags compare as bytes, after quotes and a weak mark `W/` are taken off,
because clients leave the quotes out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

from gateway.errors import S3Error
from gateway.s3.error_codes import s3_error
from gateway.s3.etags import unquote
from gateway.s3.http_dates import format_http_date, parse_http_date

__all__ = [
    "check_copy_source",
    "etag_matches",
    "evaluate_read",
    "format_http_date",
    "if_range_holds",
    "parse_http_date",
]

_CONDITIONS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})
_ETAG = re.compile(r"""\s*+(?:W/)?+("[^"]*+"|[^",\s]++(?:\s++[^",\s]++)*+)?+\s*+(?:,|\Z)""")
"""One of a list, which may be empty (RFC 9110, 5.6.1). Possessive throughout: what was taken is never given back, so
that no list costs more than looking at it once."""


def evaluate_read(
    headers: Mapping[str, str], *, etag: str, last_modified: float | None, now: float | None = None
) -> Literal["serve", "not-modified"]:
    """Whether a GET or HEAD of the version (`etag`, `last_modified` in seconds) is to be answered in full.

    Without a `last_modified`, conditions on dates are ignored; so is, where `now` is given, an `If-Modified-Since` in
    the future. Raises S3Error PreconditionFailed (412).
    """
    if _CONDITIONS.isdisjoint(headers):
        return "serve"
    failed = _failed_precondition(headers, "", etag, last_modified)
    if failed is not None:
        raise _precondition_failed(failed)
    return "not-modified" if _unchanged(headers, "", etag, last_modified, now) else "serve"


def check_copy_source(
    headers: Mapping[str, str], *, etag: str, last_modified: float | None, now: float | None = None
) -> None:
    """The same tests for the source of a copy (`x-amz-copy-source-if-*`), where every failure is a 412."""
    prefix = "x-amz-copy-source-"
    failed = _failed_precondition(headers, prefix, etag, last_modified)
    failed = failed or _unchanged(headers, prefix, etag, last_modified, now)
    if failed is not None:
        raise _precondition_failed(failed)


def if_range_holds(headers: Mapping[str, str], *, etag: str, last_modified: float | None) -> bool:
    """Whether `Range` is to be honoured (RFC 9110, 13.1.5): no `If-Range`, or one that names exactly this version."""
    value = headers.get("if-range")
    if value is None:
        return True
    date = parse_http_date(value)
    if date is not None:
        return last_modified is not None and date == math.floor(last_modified)
    weak = value.startswith("W/") or etag.startswith("W/")
    return not weak and unquote(value) == unquote(etag)


def etag_matches(condition: str, etag: str) -> bool:
    """Whether an `If-Match` or `If-None-Match` value (`*`, one ETag, or a list) names `etag`.

    What follows a malformed ETag in a list is not looked at.
    """
    if condition.strip() == "*":
        return True
    wanted = unquote(etag.removeprefix("W/"))
    position = 0
    while position < len(condition) and (found := _ETAG.match(condition, position)) is not None:
        if found[1] is not None and unquote(found[1]) == wanted:
            return True
        position = found.end()
    return False


def _failed_precondition(headers: Mapping[str, str], prefix: str, etag: str, modified: float | None) -> str | None:
    """The condition that forbids the answer. `If-Match` overrides `If-Unmodified-Since`."""
    if_match = headers.get(f"{prefix}if-match")
    if if_match is not None:
        return None if etag_matches(if_match, etag) else "If-Match"
    since = _date(headers, f"{prefix}if-unmodified-since")
    if since is not None and modified is not None and math.floor(modified) > since:
        return "If-Unmodified-Since"
    return None


def _unchanged(
    headers: Mapping[str, str], prefix: str, etag: str, modified: float | None, now: float | None
) -> str | None:
    """The condition by which the client has the version already. `If-None-Match` overrides `If-Modified-Since`."""
    if_none_match = headers.get(f"{prefix}if-none-match")
    if if_none_match is not None:
        return "If-None-Match" if etag_matches(if_none_match, etag) else None
    since = _date(headers, f"{prefix}if-modified-since")
    if since is None or modified is None or (now is not None and since > now):
        return None
    return "If-Modified-Since" if math.floor(modified) <= since else None


def _date(headers: Mapping[str, str], name: str) -> float | None:
    value = headers.get(name)
    return None if value is None else parse_http_date(value)


def _precondition_failed(condition: str) -> S3Error:
    return s3_error("PreconditionFailed", Condition=condition)
