"""UploadPartCopy into an upload that is here: the origin copies into its own upload, and the journal notes the part.

So no byte passes through this node; Complete is carried out at the origin, as for every part that only it has. What is
pending of the source is flushed before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.errors import OriginBodyError
from gateway.objects import PinnedFileSpan
from gateway.operations.absorbing.barrier import flushed
from gateway.operations.absorbing.part_through import may_be_on_its_way
from gateway.operations.absorbing.patient import with_retries
from gateway.operations.absorbing.staging import store_part
from gateway.operations.absorbing.upload_requests import number_of_part, upload_of
from gateway.operations.context import Answer, RequestContext, Response
from gateway.origin.client import OriginRequest, Purpose
from gateway.s3.checksums import ALGORITHMS
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import is_md5_etag, unquote, without
from gateway.s3.requests import parse_copy_source
from gateway.s3.xml import error_code_of, text_of
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal.records import Part, Upload

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

ANSWER_SIZE_BYTES_MAX = 64 * 1024

Handler = Callable[[RequestContext], Answer]


async def absorb_part_copy(context: RequestContext, buffer: WritebackBuffer, copy: Handler) -> Response:
    """Have `copy` ask the origin, with its upload's id in the place of ours."""
    upload, number = upload_of(context, buffer), number_of_part(context)
    await flushed(context, buffer, [parse_copy_source(context.request.headers["x-amz-copy-source"]).key])
    if upload.origin_upload_id is None:
        raise s3_error(
            "ServiceUnavailable",
            "This upload was begun while the origin was away, and the origin, which is to copy, has none of it yet: "
            "begin another.",
        )
    if may_be_on_its_way(buffer, upload, number):
        raise s3_error("SlowDown", "A part of this number is just on its way to the origin: try again.")
    return await with_retries(_copied(context, buffer, upload, number, copy), context.services.clock)


async def _copied(
    context: RequestContext, buffer: WritebackBuffer, upload: Upload, number: int, copy: Handler
) -> Response:
    ids = {"uploadId": upload.origin_upload_id}
    query = [(name, ids.get(name, value)) for name, value in context.request.query]
    context.request = replace(context.request, query=query)
    answer = copy(context)
    reply = answer if isinstance(answer, Response) else await answer
    try:
        document = await _whole(reply)
    finally:
        await reply.aclose()
    answered = Response(reply.status, without(reply.headers, "content-length"), document, "forwarded")
    etag = text_of(document, "ETag")
    if reply.status != 200 or error_code_of(document) is not None or etag is None:
        return answered
    if not is_md5_etag(etag):
        raise s3_error("ServiceUnavailable", "The origin's ETag of the part is not an MD5: try again.")
    size_bytes = await _size_bytes(context, upload, number, etag)
    file = StagedFile("", size_bytes, bytes.fromhex(unquote(etag)), b"")
    sums = {name: text_of(document, f"Checksum{name.upper()}") for name in ALGORITHMS}
    known = {name: value for name, value in sums.items() if value}
    await store_part(buffer, upload, Part(number, file, context.services.clock.now(), known, file.etag))
    return answered


async def _whole(reply: Response) -> bytes:
    """The body of an answer of the origin: a small document, and the white space before it."""
    if isinstance(reply.body, (bytes, memoryview, PinnedFileSpan)):
        raise OriginBodyError("the answer to UploadPartCopy did not come from the origin")
    document = b""
    async for piece in reply.body:
        assert isinstance(piece, (bytes, memoryview))  # noqa: S101 - the origin's bytes, and no file's
        document = (document + bytes(piece)).lstrip()
        if len(document) > ANSWER_SIZE_BYTES_MAX:
            raise OriginBodyError("the answer to UploadPartCopy is too long")
    return document


async def _size_bytes(context: RequestContext, upload: Upload, number: int, etag: str) -> int:
    """How long the part is by the origin's ListParts; S3Error where it has another one by now."""
    key = upload.fixed.key
    query = [
        ("uploadId", upload.origin_upload_id),
        ("part-number-marker", str(number - 1)),
        ("max-parts", "1"),
    ]
    request = OriginRequest("GET", key.bucket, key.key, query, {}, b"", Purpose.FORWARD, context.slot.name)
    async with await context.services.origin.send(request) as response:
        listed = await response.read(ANSWER_SIZE_BYTES_MAX)
    size = text_of(listed, "Size") or ""
    if response.status != 200 or unquote(text_of(listed, "ETag") or "") != unquote(etag) or not size.isdecimal():
        raise s3_error("ServiceUnavailable", "The origin does not list the part that it has just made: try again.")
    return int(size)
