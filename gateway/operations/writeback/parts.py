"""Bodies on their way into the buffer, and UploadPart of an upload that is here.

    is there room for it? → body verified, staged, synced → journal → 200

Room is reserved before any of the body is read, and before a client is told to go on. A body without room waits a
little for the flush to make some. Then it goes through, or is answered SlowDown, by the slot's setting; one larger than
the buffer, or one that comes while too much is on this node only, goes through either way. A part goes through into the
origin's own upload: so an upload may be larger than the whole buffer. The journal notes the parts that the origin has;
Complete is carried out there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from gateway.core.errors import BufferUnavailable, OriginUnreachable, PartInUse, S3Error
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import onward_request
from gateway.operations.payload import (
    Payload,
    announced_bytes,
    check_rate,
    is_checksum,
    receive_payload,
    receive_verified,
)
from gateway.operations.writeback.past_the_buffer import goes_through
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.s3.checksums import ALGORITHMS, PREFIX, upload_checksum_type
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import filter_response_headers, is_md5_etag, unquote, without
from gateway.s3.requests import part_number
from gateway.s3.xml import error_code_of
from gateway.s3.xml_writer import element
from gateway.telemetry import metrics
from gateway.writeback.bounds import Bound
from gateway.writeback.journal.records import Part, Write
from gateway.writeback.staged_file import StagedFile


async def stage_body(context: RequestContext, slot: str, number: int) -> Part:
    """Receive the request's body into a durable staged file, as a future part; after an S3Error nothing is left.

    It has room on the account of `slot`, and loses it if it comes slowly while others wait for room.
    """
    writer, bounds, clock = context.buffer.stage(), context.buffer.bounds.of(slot), context.services.clock
    received_bytes, own_seconds, started = 0, 0.0, clock.monotonic()

    def write(data: memoryview) -> None:
        nonlocal received_bytes, own_seconds
        now = clock.monotonic()
        received_bytes += len(data)
        if bounds is not None and bounds.is_awaited:
            check_rate(received_bytes, now - started - own_seconds)
        try:
            writer.write(data)
        except OSError as error:  # the disk's: those of the client's connection come from elsewhere
            raise BufferUnavailable(f"a staged file cannot be written: {error}") from error
        own_seconds += clock.monotonic() - now

    try:
        received = await receive_verified(context, write)
    except BaseException as error:
        await context.buffer.discard(writer)
        if isinstance(error, BufferUnavailable):
            context.buffer.bounds.trouble(error)
        raise
    file = await context.buffer.seal(writer, received.md5)
    checksums = {name.removeprefix(PREFIX): value for name, value in received.checksums.items()}
    return Part(number, file, clock.now(), checksums)


def acknowledged(part: Part) -> Response:
    """Return the answer to a PutObject or UploadPart that has become this part."""
    checksums = [(PREFIX + name, value) for name, value in part.checksums.items()]
    return Response(200, [("etag", part.file.etag), *checksums], b"", "absorbed")


PATIENCE_SECONDS = 20.0
"""Clients give up after some 60 seconds; a 503 before that makes them try again."""

PATIENCE_BEFORE_THROUGH_SECONDS = 1.0
"""The origin takes the body as fast as the flush would make room for it: waiting gains nothing."""


@asynccontextmanager
async def room_for_body(context: RequestContext, slot: str) -> AsyncIterator[Bound | None]:
    """Hold room for the request's body on a slot's account; yield why it must go through if there is none.

    Leave it when the write is in the journal; while the buffer fills faster than it drains, that takes a while.
    S3Error SlowDown if the slot wants that; with `write = "scratch"` nothing goes through, and a body larger than the
    buffer is EntityTooLarge.
    """
    bounds = context.buffer.bounds.of(slot)
    if bounds is None:
        yield None
        return
    size_bytes = announced_bytes(context)
    is_scratch = bounds.slot.write == "scratch"
    slows_down = bounds.slot.when_buffer_full == "slow-down" or is_scratch
    patience_seconds = PATIENCE_SECONDS if slows_down else PATIENCE_BEFORE_THROUGH_SECONDS
    bound = await bounds.take(context.credential, size_bytes, patience_seconds)
    if bound is None:
        try:
            yield None
        finally:
            bounds.give_back(context.credential, size_bytes)
        seconds = bounds.delay_seconds(size_bytes)
        if seconds > 0:
            metrics.WRITEBACK_PACED_SECONDS.add(seconds, slot)
            await context.services.clock.sleep(seconds)
        return
    if bound is Bound.SIZE and is_scratch:
        raise s3_error("EntityTooLarge", ProposedSize=str(size_bytes), MaxSizeAllowed=str(bounds.slot.buffer_bytes))
    if is_scratch or (bound.passes and slows_down):
        raise slow_down(context, slot, bound)
    yield bound


def leaves_to_the_origin(context: RequestContext, *, takes_room: bool) -> bool:
    """Return whether an upload that begins now, or a copy, which takes no room, is left to the origin."""
    bounds = context.buffer.bounds.of(context.slot.name)
    bound = bounds.now(int(takes_room)) if bounds is not None else None
    if bounds is None or bound is None:
        return False
    bounds.look_at_uploads()
    if bound.passes and (not takes_room or bounds.slot.when_buffer_full == "slow-down"):
        return False
    goes_through(context, bound)
    return True


def slow_down(context: RequestContext, name: str, bound: Bound) -> S3Error:
    """Return the 503 for a body without room that does not go through, with the time that the flush needs for it."""
    bounds = context.buffer.bounds.of(name)
    assert bounds is not None  # noqa: S101 - there was a bound
    slot = bounds.slot
    metrics.WRITEBACK_SLOWED_DOWN.add(1, slot.name)
    why = {
        Bound.FULL: f"it holds what it may, {slot.buffer_bytes} bytes",
        Bound.SHARE: "the bodies of this access key that are still arriving take its share of the room",
        Bound.DISK: "the disk under it has no room, or has just failed",
        Bound.SIZE: f"the body is larger than all of it, {slot.buffer_bytes} bytes",
        Bound.EXPOSURE_BYTES: f"more than {slot.unflushed_bytes_max} bytes are on this node only",
        Bound.EXPOSURE_AGE: f"a write of more than {slot.unflushed_age_seconds_max} seconds ago is on this node only",
    }[bound]
    return s3_error(
        "SlowDown",
        f"The write-back buffer of slot {slot.name} does not take this write now: {why}. Please reduce your request "
        "rate, and try again.",
        headers={"retry-after": str(bounds.retry_after_seconds(announced_bytes(context)))},
    )


ANSWER_SIZE_BYTES_MAX = 64 * 1024


async def buffer_part(context: RequestContext) -> Response:
    """Keep a part on this node's disk; without room for it, only its entry in the journal."""
    found = upload_of(context)
    number = number_of_part(context)
    _check_algorithm(context, found)
    await check_owner(context, found)
    check_not_in_use(found, number)
    slot = found.spec.slot
    async with room_for_body(context, slot) as bound:
        if bound is None:
            part = await stage_body(context, slot, number)
            await store_part(context, found, part)
    return acknowledged(part) if bound is None else await _send_through(context, found, number, bound)


async def store_part(context: RequestContext, upload: Write, part: Part) -> None:
    """Enter a part; S3Error NoSuchUpload, and its file is gone, if the upload does not exist any more.

    ServiceUnavailable, likewise, if the origin may just be completing it with the present part.
    """
    try:
        is_stored = await context.buffer.put_part(upload.upload_id or "", part)
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


async def _send_through(context: RequestContext, upload: Write, number: int, bound: Bound) -> Response:
    """Send a part on, and note it; return the origin's refusal, if any. S3Error SlowDown if it must wait."""
    slowed_down = partial(slow_down, context, upload.spec.slot, bound)
    if upload.origin_upload_id is None or may_be_on_its_way(context, upload, number):
        raise slowed_down()
    size_bytes = announced_bytes(context)
    payload = await receive_payload(context, with_md5=context.slot.etag == "local")
    query = [("partNumber", str(number)), ("uploadId", upload.origin_upload_id)]
    onward = onward_request(context, payload, query=query)
    if "x-amz-checksum-algorithm" not in upload.spec.headers:
        onward = _without_checksums(onward)
    try:
        response = await context.services.origin.send(onward)
    except OriginUnreachable as error:
        raise slowed_down() from error
    async with response:
        answer = await response.read(ANSWER_SIZE_BYTES_MAX)
    headers = without(filter_response_headers(response.headers), "content-length")
    if error_code_of(answer) == "NoSuchUpload":  # the origin has given it up; the local part may begin another
        raise slowed_down()
    goes_through(context, bound)
    if response.status != 200:
        return Response(response.status, headers, answer, "forwarded")
    etag = response.headers.get("etag", "")
    file = StagedFile("", size_bytes, payload.md5() if payload.md5 is not None else md5_of(etag))
    now, checksums = context.services.clock.now(), _checksums(context, payload)
    await store_part(context, upload, Part(number, file, now, checksums, etag or file.etag))
    return Response(200, [*without(headers, "etag"), ("etag", file.etag)], b"", "forwarded")


def _without_checksums(request: OriginRequest) -> OriginRequest:
    """Drop checksums that Create has not announced: S3 refuses them ("expected checksum Type: null")."""
    said = ("x-amz-sdk-checksum-algorithm", "x-amz-trailer")
    headers = {name: request.headers[name] for name in request.headers if not name.startswith((PREFIX, *said))}
    body = request.body
    if isinstance(body, StreamedBody):
        body = replace(body, trailer_name=None, trailer_value=None)
    return replace(request, headers=headers, body=body)


def may_be_on_its_way(context: RequestContext, upload: Write, number: int) -> bool:
    """Return whether the origin may just be getting a local part of this number: its order would be unknown."""
    found = context.buffer.look(lambda tx: tx.parts.part(upload.id, number))
    return found is not None and found.file.is_here and found.origin_etag is None


def md5_of(etag: str) -> bytes:
    """Return the MD5 in the origin's ETag of a part. S3Error if it has none, by which Complete would know the part."""
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


def upload_of(context: RequestContext) -> Write:
    """Return the upload; NoSuchUpload for one that has ended, or is of another key."""
    upload_id = context.request.parameter("uploadId") or ""
    upload = context.buffer.look(lambda tx: tx.uploads.upload(upload_id))
    if upload is None or upload.spec.key != context.object_key:
        raise no_such_upload(upload_id)
    return upload


def is_known(context: RequestContext) -> bool:
    """Return whether the request's upload is open here, or has ended here."""
    upload_id = context.request.parameter("uploadId") or ""
    return context.buffer.look(
        lambda tx: tx.uploads.upload(upload_id) is not None or tx.uploads.ended(upload_id) is not None
    )


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


def _check_algorithm(context: RequestContext, upload: Write) -> None:
    """Raise unless the part has the checksum that Create has announced, or none."""
    declared = upload.spec.headers.get("x-amz-checksum-algorithm")
    if declared is None:
        return
    algorithm, _ = upload_checksum_type(declared, upload.spec.headers.get("x-amz-checksum-type"))
    headers = context.request.headers
    brought = {name.strip() for name in (*headers, *headers.get("x-amz-trailer", "").split(","))}
    sums = {name for name in brought if is_checksum(name)} - {f"{PREFIX}algorithm", f"{PREFIX}type"}
    if sums - {PREFIX + algorithm}:
        raise s3_error("InvalidRequest", f"Checksum Type mismatch occurred, expected checksum Type: {algorithm}.")


def checksum_elements(checksums: Mapping[str, str]) -> str:
    return "".join(element(f"Checksum{name.upper()}", value) for name, value in checksums.items())


def no_such_upload(upload_id: str) -> S3Error:
    """Return the 404, as for an upload that never was."""
    return s3_error("NoSuchUpload", UploadId=upload_id)
