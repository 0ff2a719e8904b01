"""UploadPart for which there is no room here, of an upload that is: it goes straight to the origin's own upload.

So an upload may be larger than the whole buffer. The journal notes what the origin has; Complete is carried out there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import OriginUnreachable, S3Error
from gateway.operations.absorbing.staging import slow_down, tell_through
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import onward_request
from gateway.operations.payload import Payload, announced_bytes, receive_payload
from gateway.origin.client import OriginResponse, StreamedBody
from gateway.s3.checksums import ALGORITHMS, PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import filter_response_headers, is_md5_etag, unquote, without
from gateway.s3.xml import error_code_of
from gateway.writeback.bounds.bounds import Bound
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal.records import Part, Upload

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

ANSWER_SIZE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class PartThrough:
    """A part that is to be sent on, because of a bound."""

    upload: Upload
    number: int
    bound: Bound


@dataclass(frozen=True, slots=True)
class Sent:
    """A part that the origin has, and what is said of it in the answer."""

    part: Part
    answer_headers: list[tuple[str, str]]


async def send_part_through(context: RequestContext, buffer: WritebackBuffer, sending: PartThrough) -> Sent | Response:
    """Send it on; the origin's own answer where it refuses. S3Error SlowDown where it cannot be sent now."""
    upload = sending.upload
    if upload.origin_upload_id is None or may_be_on_its_way(buffer, upload, sending.number):
        raise _refusal(context, buffer, sending)
    size_bytes = announced_bytes(context)
    payload = await receive_payload(context)
    query = [("partNumber", str(sending.number)), ("uploadId", upload.origin_upload_id)]
    try:
        response = await context.services.origin.send(onward_request(context, payload, query=query))
    except OriginUnreachable as error:
        raise _refusal(context, buffer, sending) from error
    async with response:
        answer = await response.read(ANSWER_SIZE_BYTES_MAX)
    headers = without(filter_response_headers(response.headers), "content-length")
    if error_code_of(answer) == "NoSuchUpload":  # the origin has given it up; what is here may begin another
        raise _refusal(context, buffer, sending)
    if response.status != 200:
        return Response(response.status, headers, answer, "forwarded")
    tell_through(buffer, upload.fixed.slot, sending.bound)
    file = StagedFile("", size_bytes, _md5(response), b"")
    now = context.services.clock.now()
    return Sent(Part(sending.number, file, now, _checksums(context, payload), file.etag), headers)


def may_be_on_its_way(buffer: WritebackBuffer, upload: Upload, number: int) -> bool:
    """Whether a part of this number is here that the origin may just be getting: which came last nobody could say."""
    found = buffer.look(lambda book: book.part(upload.upload_id, number))
    return found is not None and found.file.is_here and found.origin_etag is None


def _refusal(context: RequestContext, buffer: WritebackBuffer, sending: PartThrough) -> S3Error:
    bounds = buffer.bounds.of(sending.upload.fixed.slot)
    assert bounds is not None  # noqa: S101 - there was a bound
    return slow_down(buffer, bounds, sending.bound, announced_bytes(context))


def _md5(response: OriginResponse) -> bytes:
    """What the origin has got. S3Error where its ETag is no MD5, by which alone Complete could know the part again."""
    etag = response.headers.get("etag", "")
    if not is_md5_etag(etag):
        raise s3_error("ServiceUnavailable", "The origin's ETag of the part is not an MD5: try again.")
    return bytes.fromhex(unquote(etag))


def _checksums(context: RequestContext, payload: Payload) -> dict[str, str]:
    """Those that the part came with, algorithm → value; the body has passed."""
    sums = {**context.request.headers, **payload.headers}
    body = payload.body
    if isinstance(body, StreamedBody) and body.trailer_name is not None and body.trailer_value is not None:
        sums[body.trailer_name] = body.trailer_value()
    return {name: sums[PREFIX + name] for name in ALGORITHMS if PREFIX + name in sums}
