"""UploadPart of an upload that is here, and its requests' parameters.

    is there room for it? → body verified, staged, synced → journal → 200

Without room a part goes straight to the origin's own upload: so an upload may be larger than the whole buffer. The
journal notes the parts that the origin has; Complete is carried out there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.core.errors import OriginUnreachable, PartInUse, S3Error
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import onward_request
from gateway.operations.payload import Payload, announced_bytes, receive_payload
from gateway.operations.writeback.bodies import apply_backpressure, room_for_body, slow_down, stage_body
from gateway.operations.writeback.write_through import goes_through
from gateway.origin.client import OriginRequest, OriginResponse, StreamedBody
from gateway.s3.checksums import ALGORITHMS, PREFIX, upload_checksum_type
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import filter_response_headers, is_md5_etag, unquote, without
from gateway.s3.requests import part_number
from gateway.s3.xml import error_code_of
from gateway.writeback.bounds import Bound
from gateway.writeback.journal.records import Part, Write
from gateway.writeback.staged_file import StagedFile

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

ANSWER_SIZE_BYTES_MAX = 64 * 1024


async def buffer_part(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Keep a part on this node's disk; without room for it, only its entry in the journal."""
    found = upload_of(context, buffer)
    number = number_of_part(context)
    check_algorithm(context, found)
    await check_owner(context, found)
    check_not_in_use(found, number)
    slot = found.spec.slot
    async with room_for_body(context, buffer, slot) as bound:
        if bound is None:
            staged = await stage_body(context, buffer, slot, number)
            await store_part(buffer, found, staged.part)
    if bound is not None:
        return await _send_through(context, buffer, _Through(found, number, bound))
    await apply_backpressure(context, buffer, slot)
    return Response(200, staged.answer_headers, b"", "absorbed")


async def store_part(buffer: WritebackBuffer, upload: Write, part: Part) -> None:
    """Enter a part; S3Error NoSuchUpload, and its file is gone, if the upload does not exist any more.

    ServiceUnavailable, likewise, if the origin may just be completing it with the present part.
    """
    try:
        is_stored = await buffer.put_part(upload.upload_id or "", part)
    except PartInUse as error:
        raise _in_use() from error
    if not is_stored:
        raise no_such_upload(upload.upload_id or "")


def check_not_in_use(upload: Write, number: int) -> None:
    """Raise S3Error ServiceUnavailable if the origin may just be completing an upload with its part of this number."""
    if upload.is_completed_of(number):
        raise _in_use()


def _in_use() -> S3Error:
    return s3_error("ServiceUnavailable", "The upload is being completed with this part: try again.")


# Past the buffer


@dataclass(frozen=True, slots=True)
class _Through:
    """A part to send on, because of a bound."""

    upload: Write
    number: int
    bound: Bound


async def _send_through(context: RequestContext, buffer: WritebackBuffer, sending: _Through) -> Response:
    """Send the part on, and note it; return the origin's refusal, if any. S3Error SlowDown if it must wait."""
    upload = sending.upload
    if upload.origin_upload_id is None or may_be_on_its_way(buffer, upload, sending.number):
        raise slow_down(context, buffer, upload.spec.slot, sending.bound)
    size_bytes = announced_bytes(context)
    payload = await receive_payload(context, with_md5=context.slot.etag == "local")
    query = [("partNumber", str(sending.number)), ("uploadId", upload.origin_upload_id)]
    onward = onward_request(context, payload, query=query)
    if "x-amz-checksum-algorithm" not in upload.spec.headers:
        onward = _without_checksums(onward)
    try:
        response = await context.services.origin.send(onward)
    except OriginUnreachable as error:
        raise slow_down(context, buffer, upload.spec.slot, sending.bound) from error
    async with response:
        answer = await response.read(ANSWER_SIZE_BYTES_MAX)
    headers = without(filter_response_headers(response.headers), "content-length")
    if error_code_of(answer) == "NoSuchUpload":  # the origin has given it up; the local part may begin another
        raise slow_down(context, buffer, upload.spec.slot, sending.bound)
    goes_through(context, sending.bound)
    if response.status != 200:
        return Response(response.status, headers, answer, "forwarded")
    file = StagedFile("", size_bytes, payload.md5() if payload.md5 is not None else _md5(response))
    now, etag = context.services.clock.now(), response.headers.get("etag") or file.etag
    await store_part(buffer, upload, Part(sending.number, file, now, _checksums(context, payload), etag))
    return Response(200, [*without(headers, "etag"), ("etag", file.etag)], b"", "forwarded")


def _without_checksums(request: OriginRequest) -> OriginRequest:
    """Drop checksums that Create has not announced: S3 refuses them ("expected checksum Type: null")."""
    said = ("x-amz-sdk-checksum-algorithm", "x-amz-trailer")
    headers = {name: request.headers[name] for name in request.headers if not name.startswith((PREFIX, *said))}
    body = request.body
    if isinstance(body, StreamedBody):
        body = replace(body, trailer_name=None, trailer_value=None)
    return replace(request, headers=headers, body=body)


def may_be_on_its_way(buffer: WritebackBuffer, upload: Write, number: int) -> bool:
    """Return whether the origin may just be getting a local part of this number: its order would be unknown."""
    found = buffer.look(lambda tx: tx.parts.part(upload.id, number))
    return found is not None and found.file.is_here and found.origin_etag is None


def _md5(response: OriginResponse) -> bytes:
    """Return the MD5 at the origin. S3Error if its ETag is none, by which Complete would know the part."""
    etag = response.headers.get("etag", "")
    if not is_md5_etag(etag):
        raise s3_error("ServiceUnavailable", "The origin's ETag of the part is not an MD5: try again.")
    return bytes.fromhex(unquote(etag))


def _checksums(context: RequestContext, payload: Payload) -> dict[str, str]:
    sums = {**context.request.headers, **payload.headers}
    body = payload.body
    if isinstance(body, StreamedBody) and body.trailer_name is not None and body.trailer_value is not None:
        sums[body.trailer_name] = body.trailer_value()
    return {name: sums[PREFIX + name] for name in ALGORITHMS if PREFIX + name in sums}


# Parameters about the upload: S3Error as S3 gives it

_OWNER = "x-amz-expected-bucket-owner"


def upload_of(context: RequestContext, buffer: WritebackBuffer) -> Write:
    """Return the upload; NoSuchUpload for one that has ended, or is of another key."""
    upload_id = context.request.parameter("uploadId") or ""
    upload = buffer.look(lambda tx: tx.uploads.upload(upload_id))
    if upload is None or upload.spec.key != context.object_key:
        raise no_such_upload(upload_id)
    return upload


def is_known(context: RequestContext, buffer: WritebackBuffer) -> bool:
    """Return whether the request's upload is open here, or has ended here."""
    upload_id = context.request.parameter("uploadId") or ""
    return buffer.look(lambda tx: tx.uploads.upload(upload_id) is not None or tx.uploads.ended(upload_id) is not None)


async def check_owner(context: RequestContext, upload: Write) -> None:
    """Raise S3Error AccessDenied if the request names a wrong owner of the bucket.

    The origin is asked, unless it has begun the upload for the same owner. OriginUnreachable.
    """
    owner = context.request.headers.get(_OWNER)
    if owner is None or owner == upload.spec.headers.get(_OWNER):
        return
    bucket = upload.spec.key.bucket
    request = OriginRequest("HEAD", bucket, None, headers={_OWNER: owner}, slot=context.slot.name)
    async with await context.services.origin.send(request) as response:
        if response.status != 200:
            raise s3_error("AccessDenied" if response.status == 403 else "ServiceUnavailable")


def number_of_part(context: RequestContext) -> int:
    return part_number("partNumber", context.request.parameter("partNumber") or "")


def number_of(context: RequestContext, name: str, default: int) -> int:
    """Return a numeric parameter; `default` if it is missing."""
    text = context.request.parameter(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise s3_error("InvalidArgument", f"{name} must be a number.", ArgumentName=name, ArgumentValue=text)
    return int(text)


def check_algorithm(context: RequestContext, upload: Write) -> None:
    """Raise unless the part has the checksum that Create has announced, or none."""
    declared = upload.spec.headers.get("x-amz-checksum-algorithm")
    if declared is None:
        return
    algorithm, _ = upload_checksum_type(declared, upload.spec.headers.get("x-amz-checksum-type"))
    headers = context.request.headers
    brought = {name for name in (*headers, *headers.get("x-amz-trailer", "").split(",")) if _is_checksum(name.strip())}
    if any(name.strip() != f"x-amz-checksum-{algorithm}" for name in brought):
        raise s3_error("InvalidRequest", f"Checksum Type mismatch occurred, expected checksum Type: {algorithm}.")


def _is_checksum(name: str) -> bool:
    return name.startswith("x-amz-checksum-") and name not in ("x-amz-checksum-algorithm", "x-amz-checksum-type")


def no_such_upload(upload_id: str) -> S3Error:
    """Return the 404, as for an upload that never was."""
    return s3_error("NoSuchUpload", UploadId=upload_id)
