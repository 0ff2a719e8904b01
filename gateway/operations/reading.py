"""What GetObject and HeadObject have in common: which requests the catalog may answer, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead
from gateway.operations.exchange import Exchange
from gateway.s3.ranges import is_one_range
from gateway.s3.requests import S3Request

_SENT_TO_THE_ORIGIN = frozenset({"x-amz-checksum-mode", "x-amz-expected-bucket-owner", "x-amz-request-payer"})
"""Headers that the origin must judge; they go along with every request made for this one."""

_UNDERSTOOD = _SENT_TO_THE_ORIGIN | {
    "x-amz-api-version",  # the AWS SDK for C++ says it with every request, and so pyarrow does
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-security-token",
    "x-amz-user-agent",
    "x-amzn-trace-id",
}

_COMMON = _UNDERSTOOD | {
    "accept",
    "accept-encoding",
    "amz-sdk-invocation-id",
    "amz-sdk-request",
    "authorization",
    "connection",
    "host",
    "range",
    "user-agent",
}
"""What most requests have: set aside at once, so that few names are left to be looked at one by one."""

HEADERS_OF_NOT_MODIFIED = frozenset({"etag", "last-modified", "cache-control", "expires", "vary", "x-amz-version-id"})


def judged_by_the_origin(request: S3Request) -> dict[str, str]:
    """The headers among `_SENT_TO_THE_ORIGIN`; presigning moves them into the query."""
    if not request.query and _SENT_TO_THE_ORIGIN.isdisjoint(request.headers):
        return {}
    found = {name: value or "" for name, value in request.query if name in _SENT_TO_THE_ORIGIN}
    found.update((name, value) for name, value in request.headers.items() if name in _SENT_TO_THE_ORIGIN)
    return found


def towards_blocks(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that fills go by: readers whose bytes may be refused to one another do not share one."""
    return {name: value for name, value in headers.items() if name != CHECKSUM_MODE}


def remembered_head(exchange: Exchange, headers: Mapping[str, str]) -> ObjectHead | None:
    """The current version where the catalog may say so by itself; raises as `Catalog.current` for an absence."""
    if exchange.request.parameter("partNumber") is not None or insists(exchange):
        return None
    return exchange.services.catalog.remembered(exchange.object_key, exchange.slot, headers=headers)


def needs_the_origin(request: S3Request) -> bool:
    """Whether the request asks for something that the catalog and blocks of the current version cannot know."""
    asked = request.headers.get("range")
    if asked is not None and (request.parameter("partNumber") is not None or not is_one_range(asked)):
        return True
    return asks_for_more(request)


def asks_for_more(request: S3Request) -> bool:
    """Whether it asks for anything but bytes and metadata of the current version."""
    if request.parameter("versionId") is not None:
        return True
    if "origin" in request.headers:
        return True  # the bucket's CORS rules go by origin and method, and a HEAD is another method
    if _COMMON.issuperset(request.headers):
        return False
    return any(name.startswith("x-amz-") for name in request.headers.keys() - _COMMON)


def insists(exchange: Exchange) -> bool:
    """Whether the caller wants the origin to be asked, whatever is remembered: `Cache-Control: no-cache`, signed."""
    asked = exchange.request.headers.get("cache-control")
    if asked is None or exchange.anonymous:
        return False
    return "no-cache" in (directive.strip() for directive in asked.lower().split(","))


async def current_head(exchange: Exchange, headers: dict[str, str], *, look: bool = False) -> ObjectHead:
    """The current version of the request's object, within its slot's bound; raises as `Catalog.current`."""
    catalog, key = exchange.services.catalog, exchange.object_key
    part_number = exchange.request.parameter("partNumber")
    if part_number is not None:
        return await catalog.ask(key, exchange.slot, headers=headers, part_number=part_number)
    return await catalog.current(key, exchange.slot, headers=headers, look=look or insists(exchange))
