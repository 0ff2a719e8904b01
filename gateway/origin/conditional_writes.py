"""Requests of S3 as a store's dialect has them: conditions on writes, and what the store does not know.

    If-None-Match: *  →  x-goog-if-generation-match: 0, x-oss-forbid-overwrite: true, …; 409 is S3's 412
    If-Match: ETAG    →  HEAD, then x-goog-if-generation-match: its generation

The store judges the condition either way: a write of others between HEAD and write has another generation. A condition
that a store is known to take no notice of is refused with 501, as S3 refuses one that it does not have.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace

from gateway.core.errors import S3Error
from gateway.origin.client import OriginRequest, OriginResponse, Purpose, StreamedBody, error_of
from gateway.origin.dialects import GENERATION, IF_MATCH, IF_NONE_MATCH, Dialect, HeaderField
from gateway.origin.stores.response import StoreResponse
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import etag_matches
from gateway.s3.requests import Operation, classify
from gateway.s3.xml import error_code_of

_CONDITIONS = (IF_NONE_MATCH, IF_MATCH)
_CHECKSUMS = re.compile(rb"<Checksum[A-Z0-9]+>[^<]*</Checksum[A-Z0-9]+>")
_KNOWN_TO_GOOGLE = re.compile(
    r"(?!x-amz-)|x-amz-(?:acl|storage-class|meta-|copy-source|metadata-directive|checksum-|sdk-checksum-)"
)
"""Headers that mean the same as `x-goog-*`. Others, such as encryption's, might be overlooked under that name."""

_EXISTS = frozenset({"FileAlreadyExists", "ObjectAlreadyExists"})

Send = Callable[[OriginRequest], Awaitable[OriginResponse]]


async def send_in(dialect: Dialect, request: OriginRequest, send: Send) -> OriginResponse:
    """Send a request of S3 to a store of this dialect; return the store's answer, or ours in its stead."""
    if request.method in ("GET", "HEAD"):
        if not dialect.lists_uploads and request.purpose is Purpose.FLUSH and _lists_uploads(request):
            return _refused(s3_error("NotImplemented", "The origin does not list its uploads."), request)
        if dialect.unsent:
            request = replace(request, query=[one for one in request.query if one[0] not in dialect.unsent])
        return await send(request)
    if not dialect.has_checksums and any(name == "uploadId" for name, _ in request.query):
        request = await _without_checksums_of_parts(request)
    named = [name for name in _CONDITIONS if name in request.headers]
    known = dialect.conditions.get(_operation(request)) if named else None
    if known is None:
        return await send(request)
    try:
        if len(named) > 1 or request.headers.get(IF_NONE_MATCH, "*").strip() != "*":
            raise s3_error("NotImplemented", Header="If-None-Match")
        name = named[0]
        unknown = [other for other in request.headers if dialect.is_google and not _KNOWN_TO_GOOGLE.match(other)]
        if unknown:
            raise s3_error("NotImplemented", "The origin does not take this with a condition.", Header=unknown[0])
        stated = await _stated(name, known.get(name), request, send)
    except S3Error as error:
        return _refused(error, request)
    headers = {other: value for other, value in request.headers.items() if other != name} | dict([stated])
    response = await send(replace(request, headers=headers))
    if response.status != 409:
        return response
    async with response:
        document = (await error_of(response)).body
    if error_code_of(document) not in _EXISTS:
        return _answer(409, response.headers, document)
    return _refused(s3_error("PreconditionFailed", Condition="If-None-Match"), request, response.headers)


async def _stated(name: str, known: HeaderField | None, request: OriginRequest, send: Send) -> HeaderField:
    """Return the header by which the store is told the condition. S3Error: it has none, or the condition fails."""
    if known is None:
        raise s3_error("NotImplemented", "The origin takes no notice of this condition.", Header=name)
    if known is not GENERATION:
        return known[0], known[1] or request.headers[name]
    head = replace(request, method="HEAD", query=(), headers={}, body=b"", sent_once=False)
    async with await send(head) as found:
        generation, etag = found.headers.get("x-goog-generation"), found.headers.get("etag", "")
    if found.status == 404:
        raise s3_error("NoSuchKey")
    if found.status in (401, 403):
        raise s3_error("AccessDenied")
    if found.status != 200 or generation is None:
        raise s3_error("ServiceUnavailable", f"The origin does not say what it has: HTTP {found.status}.")
    if not etag_matches(request.headers[name], etag):
        raise s3_error("PreconditionFailed", Condition="If-Match")
    return GENERATION[0], generation


async def _without_checksums_of_parts(request: OriginRequest) -> OriginRequest:
    """Take the checksums out of the document of a CompleteMultipartUpload: nothing is known of them at the origin."""
    body = request.body
    if request.method != "POST" or not isinstance(body, StreamedBody):
        return request
    document = _CHECKSUMS.sub(b"", b"".join([bytes(chunk) async for chunk in body.chunks]))
    sent = StreamedBody(_once(document), len(document), hashlib.sha256(document).hexdigest())
    return replace(request, body=sent)


async def _once(document: bytes) -> AsyncIterator[bytes]:
    yield document


def _operation(request: OriginRequest) -> Operation:
    try:
        return classify(request.method, request.bucket, request.key, request.query, request.headers)
    except S3Error:  # the store says so itself
        return Operation.FORWARD


def _lists_uploads(request: OriginRequest) -> bool:
    return request.key is None and any(name == "uploads" for name, _ in request.query)


def _refused(error: S3Error, request: OriginRequest, told: Mapping[str, str] | None = None) -> OriginResponse:
    body = error_document(error, resource=f"/{request.bucket}/{request.key or ''}", request_id="", host_id="forebay")
    return _answer(error.status, told or {}, body)


def _answer(status: int, told: Mapping[str, str], document: bytes) -> OriginResponse:
    headers = {name: value for name, value in told.items() if not name.startswith("content-")}
    headers |= {"content-type": "application/xml", "content-length": str(len(document))}
    return StoreResponse(status, headers, document)
