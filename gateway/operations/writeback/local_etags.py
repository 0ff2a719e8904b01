"""Conditions that name a version by the ETag with which this node acknowledged it, if the bucket's differs.

A client that reads an object in ranges names in each the version of the first answer (`If-Match`), and the flush may
come in between. So the journal remembers both ETags of the last flushed write of a key (`LastOwnWrite`). In a request
that goes past the buffer, a condition with this node's ETag becomes one with the bucket's: the same bytes.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gateway.operations.context import Answer, RequestContext, Response
from gateway.s3.headers import NO_HEADERS, etag_matches, unquote, without
from gateway.s3.requests import parse_copy_source
from gateway.writeback.journal.buckets import LastOwnWrite

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

_OF_SOURCE = "x-amz-copy-source"
_CONDITIONS = ("if-match", "if-none-match", "if-range", f"{_OF_SOURCE}-if-match", f"{_OF_SOURCE}-if-none-match")


def name_by_bucket_etags(context: RequestContext, buffer: WritebackBuffer) -> LastOwnWrite | None:
    """Put the bucket's ETags in place of this node's in the request's conditions; return the write meant."""
    found, headers = None, context.request.headers
    if context.request.key is None:
        return None
    for name in _CONDITIONS:
        value = headers.get(name)
        if value is None or value.strip() == "*":
            continue
        key = context.object_key
        if name.startswith(_OF_SOURCE) and _OF_SOURCE in headers:
            key = parse_copy_source(headers[_OF_SOURCE]).key
        own = buffer.look(lambda tx: tx.buckets.last_own_write(key))  # noqa: B023 - called at once
        if own is None or own.answered is None or own.etag is None or not etag_matches(value, own.answered):
            continue
        found, named = own, value.replace(unquote(own.answered), unquote(own.etag))
        context.request = replace(context.request, headers={**context.request.headers, name: named})
    return found


def as_named(answer: Answer, own: LastOwnWrite) -> Answer:
    """Return the answer to a read whose condition named a write: with the client's name of the version."""
    return _as_named(answer, own) if isinstance(answer, Response) else _as_named_later(answer, own)


async def _as_named_later(answer: Coroutine[Any, Any, Response], own: LastOwnWrite) -> Response:
    return _as_named(await answer, own)


def _as_named(response: Response, own: LastOwnWrite) -> Response:
    pairs = [*response.encoded.pairs, *response.headers]
    etag = next((value for name, value in pairs if name == "etag"), None)
    if etag is None or unquote(etag) != unquote(own.etag or ""):
        return response
    return replace(response, headers=[*without(pairs, "etag"), ("etag", own.answered or "")], encoded=NO_HEADERS)
