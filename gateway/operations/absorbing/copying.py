"""CopyObject of what is pending, into a slot with `write = "back"`: the copy shares the source's staged files.

It is flushed by itself, in the parts that the source came in, and so has the source's ETag. Whatever the origin would
have to judge, sources over 5 GiB and parts made of copies wait until the source is at the origin instead (router.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.errors import BufferUnavailable
from gateway.objects import ObjectKey
from gateway.operations.absorbing.base import base_asked, base_told
from gateway.operations.absorbing.eligible import check_stored, fixed_headers, is_foreseen
from gateway.operations.absorbing.staging import leaves_to_the_origin, unavailable
from gateway.operations.context import RequestContext, Response
from gateway.operations.payload import receive_payload
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import check_copy_source, filter_request_headers, format_iso_date
from gateway.s3.requests import parse_copy_source
from gateway.s3.xml_writer import document, element
from gateway.writeback.journal.records import Fixed, PendingObject, State

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

COPY_SIZE_BYTES_MAX = 5 * 1024**3
"""S3's limit for CopyObject."""

_OF_COPIES = frozenset({"x-amz-copy-source", "x-amz-metadata-directive"})
_CONDITIONS = "x-amz-copy-source-if-"
_KEPT_CHECKSUMS = ("x-amz-checksum-algorithm", "x-amz-checksum-type")


def copied_here(context: RequestContext, buffer: WritebackBuffer) -> PendingObject | None:
    """The pending source of a CopyObject that can be carried out here; None: there is none, or the origin is needed."""
    headers = context.request.headers
    if context.slot.write != "back" or not all(_is_foreseen(name, value) for name, value in headers.items()):
        return None
    profile = buffer.look(lambda book: book.profile(context.object_key.bucket))
    source = parse_copy_source(headers.get("x-amz-copy-source", ""))
    if profile is None or not profile.absorbs or source.version_id is not None:
        return None
    pending = buffer.pending(source.key)
    if pending is None or pending.deleted or pending.size_bytes > COPY_SIZE_BYTES_MAX:
        return None
    return None if leaves_to_the_origin(buffer, context.slot.name, takes_room=False) else pending


async def absorb_copy(context: RequestContext, buffer: WritebackBuffer, source: PendingObject) -> Response:
    """Acknowledge a copy that shares its source's files."""
    await receive_payload(context)
    headers, now = context.request.headers, context.services.clock.now()
    check_copy_source(headers, etag=source.etag, last_modified=source.acknowledged_at, now=now)
    fixed = Fixed(context.object_key, _fixed(headers, source, context.object_key), context.slot.name)
    async with base_asked(context) as asking:
        base = await base_told(context, buffer, asking, now)
    parts = tuple(replace(part, origin_etag=None) for part in source.parts)
    copy = replace(
        source,
        sequence=0,
        fixed=fixed,
        base=base,
        acknowledged_at=now,
        parts=parts,
        upload_id=None,
        origin_upload_id=None,
        state=State.WAITING,
    )
    if not await _acknowledge(buffer, copy):
        raise s3_error("ServiceUnavailable", "The source has just reached the origin: try again.")
    fields = element("ETag", copy.etag) + element("LastModified", format_iso_date(now))
    return Response(200, [("content-type", "application/xml")], document("CopyObjectResult", fields), "absorbed")


async def _acknowledge(buffer: WritebackBuffer, copy: PendingObject) -> bool:
    try:
        return await buffer.acknowledge_sharing(copy)
    except BufferUnavailable as error:
        raise unavailable(error) from error


def _fixed(headers: Mapping[str, str], source: PendingObject, target: ObjectKey) -> dict[str, str]:
    directive = headers.get("x-amz-metadata-directive", "COPY").upper()
    if directive not in ("COPY", "REPLACE"):
        raise s3_error("InvalidArgument", "Unknown metadata directive.", ArgumentName="x-amz-metadata-directive")
    own = fixed_headers(filter_request_headers(headers))
    checksums = {name: source.fixed.headers[name] for name in _KEPT_CHECKSUMS if name in source.fixed.headers}
    if directive == "REPLACE":
        check_stored(headers)
        return {**own, **checksums}
    if source.key == target and "x-amz-storage-class" not in headers:
        raise s3_error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the "
            "object's metadata, storage class, website redirect location or encryption attributes.",
        )
    kept = fixed_headers(source.fixed.headers)
    kept.pop("x-amz-storage-class", None)
    tags = {name: value for name, value in source.fixed.headers.items() if name == "x-amz-tagging"}
    storage = {name: value for name, value in own.items() if name == "x-amz-storage-class"}
    return {**kept, **tags, **storage, **checksums}


def _is_foreseen(name: str, value: str) -> bool:
    return name in _OF_COPIES or name.startswith(_CONDITIONS) or is_foreseen(name, value)
