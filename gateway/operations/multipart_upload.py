"""CompleteMultipartUpload (S3 API): the moment at which an uploaded object becomes visible.

It makes up for two habits of origins. Ceph's RGW may answer with an empty ETag: the client gets the one that HEAD
shows. And an answer may be lost after the origin has done its work: the ETag at the origin, which follows from the
parts, then shows whether it has.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator

from gateway.core.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.core.model import BodyStream
from gateway.core.steps import in_steps
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import onward_request, streamed_reply
from gateway.operations.payload import Payload, receive_document
from gateway.operations.visibility import changed_by, with_invalidation
from gateway.origin.client import OriginResponse, StreamedBody
from gateway.s3.headers import filter_response_headers, multipart_etag, without
from gateway.s3.xml import (
    COMPLETE_SIZE_BYTES_MAX,
    RESULT_SIZE_BYTES_MAX,
    complete_multipart_upload_result,
    parse_complete_multipart_upload,
    says_nothing_yet,
)

_EMPTY_ETAG = re.compile(rb"<ETag\s*+/>|<ETag>\s*+(?:(?:&quot;&quot;|\"\")\s*+)?</ETag>")


async def complete_multipart_upload(context: RequestContext) -> Response:
    """Complete an upload at the origin, and forget the cached facts about the key."""
    return await with_invalidation(changed_by(context), _complete(context))


async def _complete(context: RequestContext) -> Response:
    document = await receive_document(context, COMPLETE_SIZE_BYTES_MAX)
    parts = await in_steps(parse_complete_multipart_upload(document))
    context.made_of = [part.etag for part in parts]
    # Sent once: a second attempt of a Complete that was carried out would be answered NoSuchUpload.
    body = StreamedBody(_once(document), len(document), hashlib.sha256(document).hexdigest())
    request = onward_request(context, Payload(body))
    try:
        response = await context.services.origin.send(request)
    except OriginUnreachable as error:
        return await _decide_by_etag(context, error)
    finally:
        await context.services.blocks.invalidate(context.object_key)
    if response.status != 200:
        return streamed_reply(response, head_only=False)
    return await _completed(context, response)


async def _completed(context: RequestContext, response: OriginResponse) -> Response:
    headers = without(filter_response_headers(response.headers), "content-length")
    if "content-length" not in response.headers:
        return Response(200, headers, _long_answer(context, response), "forwarded", response)
    async with response:
        document = await response.read(RESULT_SIZE_BYTES_MAX)
    return Response(200, headers, await _with_etag(context, document), "forwarded")


async def _long_answer(context: RequestContext, response: OriginResponse) -> BodyStream:
    """Pass on the white space that keeps the client waiting, then the document."""
    document = b""
    async for piece in response.stream():
        document += piece
        if len(document) > RESULT_SIZE_BYTES_MAX:
            raise OriginBodyError("the answer to CompleteMultipartUpload is too long")
        if says_nothing_yet(document):
            yield document
            document = b""
    yield await _with_etag(context, document)


async def _with_etag(context: RequestContext, document: bytes) -> bytes:
    if not _EMPTY_ETAG.search(document):
        return document
    etag = await _etag_at_origin(context)
    return _EMPTY_ETAG.sub(b"<ETag>" + etag.replace('"', "&quot;").encode("latin-1") + b"</ETag>", document)


async def _decide_by_etag(context: RequestContext, lost: OriginUnreachable) -> Response:
    """Answer after a lost answer: done if the object at the origin is made of exactly these parts."""
    expected = multipart_etag(context.made_of)
    found = await _etag_at_origin(context)
    if expected is None or found != expected:
        raise lost
    key = context.object_key
    return Response(
        200,
        [("content-type", "application/xml")],
        complete_multipart_upload_result(key.bucket, key.key, found),
        "forwarded",
    )


async def _etag_at_origin(context: RequestContext) -> str:
    try:
        head = await context.services.catalog.ask(context.object_key, context.slot, headers={})
    except OriginAnswered:
        return ""
    return head.version.etag


async def _once(document: bytes) -> AsyncIterator[bytes]:
    yield document
