"""ListBuckets (S3 API): the origin's buckets, and those that the configuration places at homes of their own.

These homes are not asked: the gateway serves no other buckets of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import forward, onward_request, streamed_reply
from gateway.operations.payload import receive_payload
from gateway.s3.headers import filter_response_headers, without
from gateway.s3.xml_writer import element

RESULT_SIZE_BYTES_MAX = 8 * 1024**2
"""Room for 10,000 buckets with long names, at 200 bytes each, four times over."""

_CREATED = "1970-01-01T00:00:00.000Z"
"""Clients insist on a date, and no origin was asked for it."""

_END = re.compile(rb"</(?:\w+:)?Buckets\s*>")
_EMPTY = re.compile(rb"<((?:\w+:)?Buckets)\s*/>")
_NAME = re.compile(rb"<(?:\w+:)?Name>\s*([^<\s]+)\s*</")
_GOES_ON = re.compile(rb"<(?:\w+:)?ContinuationToken>")


async def list_buckets(context: RequestContext) -> Response:
    """Return the origin's list, and after its last page the buckets at other homes; or its refusal."""
    wanted = _elsewhere(context)
    if not wanted:
        return await forward(context)
    response = await context.services.origin.send(onward_request(context, await receive_payload(context)))
    if response.status != 200:
        return streamed_reply(response, head_only=False)
    async with response:
        listed = await response.read(RESULT_SIZE_BYTES_MAX)
    headers = without(filter_response_headers(response.headers), "content-length")
    return Response(200, headers, with_buckets(listed, wanted), "forwarded")


def _elsewhere(context: RequestContext) -> list[str]:
    request = context.request
    if request.parameter("bucket-region") is not None:
        return []
    prefix = request.parameter("prefix") or ""
    return sorted(bucket for bucket in context.services.homes.by_bucket if bucket.startswith(prefix))


def with_buckets(listed: bytes, buckets: Sequence[str]) -> bytes:
    """Return a `<ListAllMyBucketsResult>` with these buckets added, if it is the last page and lacks them."""
    if _GOES_ON.search(listed):
        return listed
    known = {name.decode("utf-8", "replace") for name in _NAME.findall(listed)}
    told = "".join(
        f"<Bucket>{element('Name', bucket)}{element('CreationDate', _CREATED)}</Bucket>"
        for bucket in buckets
        if bucket not in known
    ).encode()
    if (end := _END.search(listed)) is not None:
        return listed[: end.start()] + told + listed[end.start() :]
    if (empty := _EMPTY.search(listed)) is not None:
        name = empty[1]
        return listed[: empty.start()] + b"<%b>%b</%b>" % (name, told, name) + listed[empty.end() :]
    return listed
