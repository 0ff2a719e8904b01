"""Multipart uploads in a slot with `write = "back"`.

    Create → creating.py
    UploadPart → verified, staged, synced, journaled
    Complete → the parts are an object from the moment of one commit
    Abort, ListParts → from the journal

Uploads that the journal does not know were begun at the origin before: they are its own, and go through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.errors import BufferUnavailable, S3Error
from gateway.objects import ObjectKey
from gateway.operations.absorbing.base import base_now
from gateway.operations.absorbing.completion import Completion, complete
from gateway.operations.absorbing.conditional import complete_at_origin
from gateway.operations.absorbing.eligible import has_conditions
from gateway.operations.absorbing.staging import stage_body, unavailable
from gateway.operations.exchange import Exchange
from gateway.operations.payload import receive_document
from gateway.operations.reply import Reply
from gateway.operations.visibility import changed_by, visible
from gateway.s3.error_codes import s3_error
from gateway.s3.etags import unquote
from gateway.s3.http_dates import format_iso_date
from gateway.s3.multipart_checksums import upload_checksum_type
from gateway.s3.xml import (
    COMPLETE_SIZE_BYTES_MAX,
    PARTS_COUNT_MAX,
    CompletedPart,
    document,
    element,
    parse_complete_multipart_upload,
)
from gateway.writeback.records import Ended, Part, PendingObject, Upload

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

LISTED_PARTS_MAX = 1000

_XML = ("content-type", "application/xml")


async def absorb_part(exchange: Exchange, buffer: WritebackBuffer) -> Reply:
    """Keep a part on this node's disk."""
    found = _find(exchange, buffer)
    number = _part_number(exchange)
    _check_algorithm(exchange, found)
    staged = await stage_body(exchange, buffer, number)
    try:
        stored = await buffer.put_part(found.upload_id, staged.part)
    except BufferUnavailable as error:
        raise unavailable(error) from error
    if not stored:
        raise _no_such_upload(found.upload_id)
    return Reply(200, staged.answer_headers, b"", "absorbed")


async def absorb_complete(exchange: Exchange, buffer: WritebackBuffer) -> Reply:
    """Make the parts an object. Asked for once more, it is answered as the first time."""
    upload_id = exchange.request.parameter("uploadId") or ""
    listed = parse_complete_multipart_upload(await receive_document(exchange, COMPLETE_SIZE_BYTES_MAX))
    upload = buffer.look(lambda book: book.upload(upload_id))
    if upload is None or upload.fixed.key != exchange.object_key:
        return _completed_before(exchange, buffer, upload_id, listed)
    stored = buffer.look(lambda book: {part.number: part for part in book.parts(upload_id)})
    made = complete(upload_id, upload.fixed.headers, exchange.request.headers, stored, listed)
    now = exchange.services.clock.now()
    ended = Ended(upload_id, exchange.object_key, now, made.etag, [(one.number, unquote(one.etag)) for one in listed])
    if has_conditions(exchange.request.headers):
        return await visible(changed_by(exchange), _completed_at_origin(exchange, buffer, upload, made, ended))
    upload = replace(upload, base=await base_now(exchange, buffer, upload.base))
    try:
        await buffer.complete(_pending(upload, made, now), ended)
    except BufferUnavailable as error:
        raise unavailable(error) from error
    return Reply(200, [_XML], _result(exchange.object_key, made), "absorbed")


async def _completed_at_origin(
    exchange: Exchange, buffer: WritebackBuffer, upload: Upload, made: Completion, ended: Ended
) -> Reply:
    await complete_at_origin(exchange, buffer, upload, made, ended)
    await exchange.services.blocks.invalidate(exchange.object_key)
    return Reply(200, [_XML], _result(exchange.object_key, made), "forwarded")


def _pending(upload: Upload, made: Completion, now: float) -> PendingObject:
    return PendingObject(
        0,
        upload.fixed,
        upload.base,
        now,
        made.etag,
        made.size_bytes,
        made.parts,
        multipart=True,
        upload_id=upload.upload_id,
        origin_upload_id=upload.origin_upload_id,
        checksums=made.checksums,
    )


def _completed_before(
    exchange: Exchange, buffer: WritebackBuffer, upload_id: str, listed: list[CompletedPart]
) -> Reply:
    ended = buffer.look(lambda book: book.ended(upload_id))
    asked = [(one.number, unquote(one.etag)) for one in listed]
    if ended is None or ended.etag is None or ended.key != exchange.object_key or list(ended.parts) != asked:
        raise _no_such_upload(upload_id)
    return Reply(200, [_XML], _result(ended.key, Completion((), ended.etag, 0)), "absorbed")


async def absorb_abort(exchange: Exchange, buffer: WritebackBuffer) -> Reply:
    """Throw an upload away, here at once and at the origin soon."""
    found = _find(exchange, buffer)
    try:
        await buffer.abort(Ended(found.upload_id, exchange.object_key, exchange.services.clock.now(), None))
    except BufferUnavailable as error:
        raise unavailable(error) from error
    return Reply(204, cache="absorbed")


async def absorbed_parts(exchange: Exchange, buffer: WritebackBuffer) -> Reply:
    """ListParts of an upload that is here."""
    found = _find(exchange, buffer)
    maximum = min(_number(exchange, "max-parts", LISTED_PARTS_MAX), LISTED_PARTS_MAX)
    marker = _number(exchange, "part-number-marker", 0)
    parts = buffer.look(lambda book: list(book.parts(found.upload_id, marker)))
    return Reply(200, [_XML], _listing(found, parts[:maximum], marker, maximum, len(parts) > maximum), "absorbed")


def is_known(exchange: Exchange, buffer: WritebackBuffer) -> bool:
    """Whether the request's upload is open here, or has ended here."""
    upload_id = exchange.request.parameter("uploadId") or ""
    return buffer.look(lambda book: book.upload(upload_id) is not None or book.ended(upload_id) is not None)


def _find(exchange: Exchange, buffer: WritebackBuffer) -> Upload:
    """The upload; NoSuchUpload for one that has ended, or is of another key."""
    upload_id = exchange.request.parameter("uploadId") or ""
    upload = buffer.look(lambda book: book.upload(upload_id))
    if upload is None or upload.fixed.key != exchange.object_key:
        raise _no_such_upload(upload_id)
    return upload


def _part_number(exchange: Exchange) -> int:
    text = exchange.request.parameter("partNumber") or ""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= PARTS_COUNT_MAX):
        raise s3_error(
            "InvalidArgument",
            "Part number must be an integer between 1 and 10000, inclusive",
            ArgumentName="partNumber",
            ArgumentValue=text,
        )
    return int(text)


def _number(exchange: Exchange, name: str, default: int) -> int:
    text = exchange.request.parameter(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise s3_error("InvalidArgument", f"{name} must be a number.", ArgumentName=name, ArgumentValue=text)
    return int(text)


def _check_algorithm(exchange: Exchange, upload: Upload) -> None:
    """A part brings the checksum that Create has announced, or none."""
    declared = upload.fixed.headers.get("x-amz-checksum-algorithm")
    if declared is None:
        return
    algorithm, _ = upload_checksum_type(declared, upload.fixed.headers.get("x-amz-checksum-type"))
    headers = exchange.request.headers
    brought = {name for name in (*headers, *headers.get("x-amz-trailer", "").split(",")) if _is_checksum(name.strip())}
    if any(name.strip() != f"x-amz-checksum-{algorithm}" for name in brought):
        raise s3_error("InvalidRequest", f"Checksum Type mismatch occurred, expected checksum Type: {algorithm}.")


def _is_checksum(name: str) -> bool:
    return name.startswith("x-amz-checksum-") and name not in ("x-amz-checksum-algorithm", "x-amz-checksum-type")


def _no_such_upload(upload_id: str) -> S3Error:
    return s3_error("NoSuchUpload", UploadId=upload_id)


def _result(key: ObjectKey, made: Completion) -> bytes:
    fields = element("Location", f"/{key.bucket}/{key.key}") + element("Bucket", key.bucket) + element("Key", key.key)
    fields += element("ETag", made.etag)
    fields += "".join(element(f"Checksum{name.upper()}", value) for name, value in made.checksums.items())
    if made.checksum_type is not None:
        fields += element("ChecksumType", made.checksum_type)
    return document("CompleteMultipartUploadResult", fields)


def _listing(upload: Upload, parts: list[Part], marker: int, maximum: int, truncated: bool) -> bytes:
    key = upload.fixed.key
    fields = element("Bucket", key.bucket) + element("Key", key.key) + element("UploadId", upload.upload_id)
    fields += element("StorageClass", upload.fixed.headers.get("x-amz-storage-class", "STANDARD"))
    fields += element("PartNumberMarker", str(marker))
    fields += element("NextPartNumberMarker", str(parts[-1].number if parts else 0))
    fields += element("MaxParts", str(maximum)) + element("IsTruncated", "true" if truncated else "false")
    return document("ListPartsResult", fields + "".join(_listed(parts)))


def _listed(parts: list[Part]) -> Iterator[str]:
    for part in parts:
        fields = element("PartNumber", str(part.number)) + element("LastModified", format_iso_date(part.stored_at))
        fields += element("ETag", part.file.etag) + element("Size", str(part.file.size_bytes))
        fields += "".join(element(f"Checksum{name.upper()}", value) for name, value in part.checksums.items())
        yield f"<Part>{fields}</Part>"
