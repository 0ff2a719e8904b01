"""Multipart uploads in a slot with `write = "back"`.

    Create → creating.py
    UploadPart, UploadPartCopy → parts.py, copies.py
    Complete → the parts are an object from the moment of one commit; or at the origin, where only it has some of them
    Abort, ListParts → from the journal

Uploads that the journal does not know were begun at the origin before: they are its own, and go through.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.objects import ObjectKey
from gateway.operations.absorbing.base import base_now
from gateway.operations.absorbing.completion import Completion, complete
from gateway.operations.absorbing.conditional import complete_at_origin
from gateway.operations.absorbing.objects import has_conditions
from gateway.operations.absorbing.parts import check_owner, no_such_upload, number_of, upload_of
from gateway.operations.absorbing.through import Reason, goes_through, with_retries
from gateway.operations.context import RequestContext, Response
from gateway.operations.payload import receive_document
from gateway.operations.visibility import changed_by, with_invalidation
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import format_iso_date
from gateway.s3.xml import COMPLETE_SIZE_BYTES_MAX, CompletedPart, parse_complete_multipart_upload
from gateway.s3.xml_writer import document, element
from gateway.steps import Steps, each, in_steps
from gateway.writeback.journal.codec import parts_digest
from gateway.writeback.journal.records import Part, Write

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

LISTED_PARTS_MAX = 1000

_XML = ("content-type", "application/xml")


async def absorb_complete(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Make the parts an object. Asked for once more, it is answered as the first time."""
    upload_id = context.request.parameter("uploadId") or ""
    document = await receive_document(context, COMPLETE_SIZE_BYTES_MAX)
    listed = await in_steps(parse_complete_multipart_upload(document))
    upload = buffer.look(lambda book: book.upload(upload_id))
    if upload is None or upload.fixed.key != context.object_key:
        return await _completed_before(context, buffer, upload_id, listed)
    await check_owner(context, upload)
    stored = dict(await in_steps(each(lambda part: (part.number, part), await buffer.journal.parts(upload.id))))
    made = await in_steps(complete(upload_id, upload.fixed.headers, context.request.headers, stored, listed))
    completed_of = await in_steps(parts_digest(listed))
    are_here = all(await in_steps(each(lambda part: part.file.is_here, made.parts)))
    if has_conditions(context.request.headers) or not are_here:
        goes_through(context, Reason.CONDITION if has_conditions(context.request.headers) else Reason.PART)
        completing = _completed_at_origin(context, buffer, _as_write(upload, made, completed_of, 0.0), made)
        return await with_retries(with_invalidation(changed_by(context), completing), context.services.clock)
    upload = replace(upload, base=await base_now(context, buffer, upload.base))
    completed = await buffer.complete(_as_write(upload, made, completed_of, context.services.clock.now()))
    if completed is None and buffer.look(lambda book: book.upload(upload_id)) is None:
        return await _completed_before(context, buffer, upload_id, listed)
    if completed is None:
        raise s3_error("ServiceUnavailable", "A part has just been replaced: try again.")
    return Response(200, [_XML], _result(context.object_key, made), "absorbed")


async def _completed_at_origin(
    context: RequestContext, buffer: WritebackBuffer, upload: Write, made: Completion
) -> Response:
    ended = await complete_at_origin(context, buffer, upload)
    await context.services.blocks.invalidate(context.object_key)
    made = replace(made, etag=ended.etag or made.etag)
    return Response(200, [_XML], _result(context.object_key, made), "forwarded")


def _as_write(upload: Write, made: Completion, completed_of: str, acknowledged_at: float) -> Write:
    return replace(
        upload,
        etag=made.etag,
        size_bytes=made.size_bytes,
        parts=made.parts,
        checksums=made.checksums,
        acknowledged_at=acknowledged_at,
        completed_of=completed_of,
    )


async def _completed_before(
    context: RequestContext, buffer: WritebackBuffer, upload_id: str, listed: list[CompletedPart]
) -> Response:
    ended = buffer.look(lambda book: book.ended(upload_id))
    asked = await in_steps(parts_digest(listed))
    if ended is None or ended.etag is None or ended.key != context.object_key or ended.parts != asked:
        raise no_such_upload(upload_id)
    is_composite = any("-" in value for value in ended.checksums.values())
    checksum_type = ("COMPOSITE" if is_composite else "FULL_OBJECT") if ended.checksums else None
    made = Completion((), ended.etag, 0, ended.checksums, checksum_type)
    return Response(200, [_XML], _result(ended.key, made), "absorbed")


async def absorb_abort(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Throw an upload away, here at once and at the origin soon."""
    found = upload_of(context, buffer)
    await check_owner(context, found)
    if not await buffer.abort(found.upload_id or ""):
        raise no_such_upload(found.upload_id or "")
    return Response(204, cache="absorbed")


async def absorbed_parts(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """ListParts of an upload that is here."""
    found = upload_of(context, buffer)
    await check_owner(context, found)
    maximum = min(number_of(context, "max-parts", LISTED_PARTS_MAX), LISTED_PARTS_MAX)
    marker = number_of(context, "part-number-marker", 0)
    parts = await buffer.journal.parts(found.id, marker, maximum + 1)
    listing = await in_steps(_listing(found, parts[:maximum], marker, maximum, len(parts) > maximum))
    return Response(200, [_XML], listing, "absorbed")


def is_known(context: RequestContext, buffer: WritebackBuffer) -> bool:
    """Whether the request's upload is open here, or has ended here."""
    upload_id = context.request.parameter("uploadId") or ""
    return buffer.look(lambda book: book.upload(upload_id) is not None or book.ended(upload_id) is not None)


def _result(key: ObjectKey, made: Completion) -> bytes:
    fields = element("Location", f"/{key.bucket}/{key.key}") + element("Bucket", key.bucket) + element("Key", key.key)
    fields += element("ETag", made.etag)
    fields += "".join(element(f"Checksum{name.upper()}", value) for name, value in made.checksums.items())
    if made.checksum_type is not None:
        fields += element("ChecksumType", made.checksum_type)
    return document("CompleteMultipartUploadResult", fields)


def _listing(upload: Write, parts: list[Part], marker: int, maximum: int, truncated: bool) -> Steps[bytes]:
    key = upload.fixed.key
    fields = element("Bucket", key.bucket) + element("Key", key.key) + element("UploadId", upload.upload_id or "")
    fields += element("StorageClass", upload.fixed.headers.get("x-amz-storage-class", "STANDARD"))
    fields += element("PartNumberMarker", str(marker))
    fields += element("NextPartNumberMarker", str(parts[-1].number if parts else 0))
    fields += element("MaxParts", str(maximum)) + element("IsTruncated", "true" if truncated else "false")
    return document("ListPartsResult", fields + "".join((yield from each(_listed, parts))))


def _listed(part: Part) -> str:
    fields = element("PartNumber", str(part.number)) + element("LastModified", format_iso_date(part.stored_at))
    fields += element("ETag", part.file.etag) + element("Size", str(part.file.size_bytes))
    fields += "".join(element(f"Checksum{name.upper()}", value) for name, value in part.checksums.items())
    return f"<Part>{fields}</Part>"
