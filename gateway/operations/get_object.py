"""GetObject (S3 API, "GetObject"): the data path.

    which version is current? → may it be served? → which bytes? → blocks on disk, filled from the origin when missing

A version that changes between the two questions to the origin answers 412 to the fill; then the whole look-up is made
again. Once the first byte is out, a change can only end the connection: bytes of two versions are never mixed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.errors import OriginAnswered, OriginBodyError
from gateway.metadata.catalog import ObjectHead
from gateway.objects import ByteRange
from gateway.operations.exchange import Exchange
from gateway.operations.headers import towards_client, without
from gateway.operations.passthrough import forward
from gateway.operations.reply import Reply
from gateway.s3.conditions import evaluate_read, if_range_holds
from gateway.s3.error_codes import s3_error
from gateway.s3.ranges import content_range, is_one_range, parse_range
from gateway.s3.requests import S3Request

VERSION_RACES_MAX = 4

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

_HEADERS_OF_NOT_MODIFIED = frozenset({"etag", "last-modified", "cache-control", "expires", "vary", "x-amz-version-id"})

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

_ARCHIVED = frozenset({"GLACIER", "DEEP_ARCHIVE"})


async def get_object(exchange: Exchange) -> Reply:
    """Answer a GET from blocks; what they cannot answer is read from the origin (`x-forebay-cache: bypass`)."""
    overrides = _response_overrides(exchange)
    if _needs_the_origin(exchange.request):
        return await forward(exchange, cache="bypass")
    headers = _judged_by_the_origin(exchange.request)
    for _ in range(VERSION_RACES_MAX):
        try:
            head = await exchange.services.catalog.current(
                exchange.object_key, headers=headers, part_number=exchange.request.parameter("partNumber")
            )
        except (OriginAnswered, OriginBodyError):
            # HEAD has no error document, and one that makes no sense may still have an object behind it: whatever GET
            # answers, the client shall have as it is.
            return await forward(exchange, cache="bypass")
        if not _fit_for_blocks(exchange.request, head):
            return await forward(exchange, cache="bypass")
        try:
            return await _serve(exchange, head, headers, overrides)
        except OriginAnswered as answer:
            if answer.status != 412:
                raise
    return await forward(exchange, cache="bypass")


def _judged_by_the_origin(request: S3Request) -> dict[str, str]:
    """The headers among `_SENT_TO_THE_ORIGIN`; presigning moves them into the query."""
    found = {name: value or "" for name, value in request.query if name in _SENT_TO_THE_ORIGIN}
    found.update((name, value) for name, value in request.headers.items() if name in _SENT_TO_THE_ORIGIN)
    return found


def _needs_the_origin(request: S3Request) -> bool:
    """Whether the request asks for something that blocks of the current version cannot know."""
    if request.parameter("versionId") is not None:
        return True
    asked = request.headers.get("range")
    if asked is not None and (request.parameter("partNumber") is not None or not is_one_range(asked)):
        return True
    if "origin" in request.headers:
        return True  # the bucket's CORS rules go by origin and method, and a HEAD is another method
    return any(name.startswith("x-amz-") and name not in _UNDERSTOOD for name in request.headers)


def _fit_for_blocks(request: S3Request, head: ObjectHead) -> bool:
    if not head.version.etag or "x-amz-server-side-encryption-customer-algorithm" in head.headers:
        return False
    if head.headers.get("x-amz-storage-class") in _ARCHIVED and "x-amz-restore" not in head.headers:
        return False
    if head.version.size_bytes == 0 and "range" in request.headers:
        return False  # servers differ about ranges of nothing, and nothing is lost by asking
    return request.parameter("partNumber") is None or head.part is not None


async def _serve(
    exchange: Exchange, head: ObjectHead, headers: Mapping[str, str], overrides: Mapping[str, str]
) -> Reply:
    request, version = exchange.request, head.version
    now = exchange.services.clock.now()
    if evaluate_read(request.headers, etag=version.etag, last_modified=head.last_modified, now=now) == "not-modified":
        onward = towards_client(head.headers)
        return Reply(304, [(name, value) for name, value in onward if name in _HEADERS_OF_NOT_MODIFIED], cache="hit")
    asked = head.part or _asked_range(request, head)
    if version.size_bytes == 0:
        return Reply(200, _reply_headers(head, None, overrides), b"", cache="hit")
    byte_range = asked or ByteRange(0, version.size_bytes - 1)
    pinned = {name: value for name, value in headers.items() if name != "x-amz-checksum-mode"}
    reader = await exchange.services.blocks.open_range(version, byte_range, headers=pinned)
    headers_out = _reply_headers(head, asked, overrides)
    return Reply(206 if asked else 200, headers_out, reader.body(), reader.outcome, reader)


def _asked_range(request: S3Request, head: ObjectHead) -> ByteRange | None:
    if not if_range_holds(request.headers, etag=head.version.etag, last_modified=head.last_modified):
        return None
    return parse_range(request.headers.get("range"), head.version.size_bytes)


def _reply_headers(head: ObjectHead, asked: ByteRange | None, overrides: Mapping[str, str]) -> list[tuple[str, str]]:
    """The headers of HeadObject, with the lengths of what is sent and the overrides that the caller asked for.

    A checksum of the whole object never goes with a part of it: clients would check it against the bytes they got.
    """
    onward = without(towards_client(head.headers), "content-length", "content-range", "accept-ranges")
    if asked is not None and head.part is None:
        onward = [(name, value) for name, value in onward if not name.startswith("x-amz-checksum-")]
    onward = [(name, value) for name, value in onward if name not in overrides]
    onward.extend(overrides.items())
    onward.append(("accept-ranges", "bytes"))
    if asked is not None:
        onward.append(("content-range", content_range(asked, head.version.size_bytes)))
    onward.append(("content-length", str(asked.length if asked else head.version.size_bytes)))
    return onward


def _response_overrides(exchange: Exchange) -> dict[str, str]:
    """`response-content-type` and its five siblings (S3 API, GetObject, "Overriding response header values")."""
    query = exchange.request.query
    overrides = {_OVERRIDES[name]: _header_value(name, value or "") for name, value in query if name in _OVERRIDES}
    if overrides and exchange.anonymous:
        raise s3_error("InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests.")
    return overrides


def _header_value(parameter: str, value: str) -> str:
    """An override's value, if a header can carry it: line breaks would be the beginning of another header."""
    if _NO_HEADER_VALUE.search(value):
        raise s3_error(
            "InvalidArgument",
            "Header value cannot be represented using ISO-8859-1.",
            ArgumentName=parameter,
            ArgumentValue=value,
        )
    return value
