"""Multipart uploads in a slot with `write = "back"`: their beginning, listing and end.

    Create → the request to the origin is entered → sent, with a question for the key's version → open here, with an
             upload id of our own → 200; with the origin away and its bucket known, it is begun here alone
    UploadPart, UploadPartCopy → parts.py, copies.py
    Complete → complete_upload.py
    Abort, ListParts → from the journal

Uploads that the journal does not know were begun at the origin before: they are its own, and go through.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.core.clock import Moment
from gateway.core.errors import BufferUnavailable, OriginAnswered, OriginUnreachable
from gateway.core.steps import Steps, each, in_steps
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import onward_request
from gateway.operations.payload import receive_payload
from gateway.operations.writeback.parts import check_owner, leaves_to_the_origin, no_such_upload, number_of, upload_of
from gateway.operations.writeback.past_the_buffer import PATIENCE_SECONDS, goes_through, until_next_look
from gateway.operations.writeback.put_object import ExpectedVersionQuery, is_for_want_of_rights
from gateway.operations.writeback.write_back_policy import (
    Reason,
    check_stored,
    created_headers,
    makes_md5_etags,
    may_begin_without_origin,
    names_encryption,
    refuse_unless_kept_here,
    storage_classes,
    takes_local_etag,
    tells_encryption,
    why_of_bucket,
    why_of_key,
)
from gateway.origin.retry import may_be_done
from gateway.s3.checksums import upload_checksum_type
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import filter_request_headers, filter_response_headers, format_iso_date, without
from gateway.s3.xml import text_of
from gateway.s3.xml_writer import document, element
from gateway.writeback.flushing.in_doubt import CreateInDoubt, in_doubt
from gateway.writeback.journal.buckets import BucketCapabilities
from gateway.writeback.journal.records import ExpectedVersion, Part, Write, WriteSpec

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer
    from gateway.writeback.journal.transaction import JournalTransaction

ANSWER_SIZE_BYTES_MAX = 64 * 1024

_DOWN = frozenset({500, 502, 503, 504})
"""Statuses of an origin that is not working now (docs/semantics.md, clause 4.8). A 501 is a refusal."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The origin's answer to Create, and its version of the key. No `origin_upload_id`: it has begun nothing.

    `capabilities` are the bucket's, or, if `is_of_bucket` is false, this upload's alone. That its ETags are MD5s is a
    guess, as the answer shows none: a good one if it tells the encryption (`tells_encryption`). An existing object does
    not tell whether the gateway may learn of missing ones (`tells_rights`).
    """

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    origin_upload_id: str | None
    capabilities: BucketCapabilities
    is_of_bucket: bool
    tells_encryption: bool
    tells_rights: bool
    expected: ExpectedVersion

    def learn(self, tx: JournalTransaction, bucket: str) -> None:
        """Record the bucket's facts. ETags seen to be no MD5s stay so: the next PutObject shows one."""
        known, told = tx.buckets.capabilities(bucket), self.capabilities
        if self.origin_upload_id is None or not self.is_of_bucket or (known is None and not self.tells_rights):
            return
        if known is not None:
            told = replace(told, multipart_etags=known.multipart_etags)
        if known is not None and not self.tells_rights:
            told = replace(told, may_look=known.may_look)
        if known is not None and not known.md5_etags:
            learned_at = 0.0 if self.tells_encryption and told.md5_etags else known.learned_at
            told = replace(told, md5_etags=False, learned_at=learned_at)
        tx.buckets.learn(bucket, told)

    def forwarded(self) -> Response:
        return Response(self.status, self.headers, self.body, "forwarded")


async def buffer_create(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Begin an upload at the origin and here. Refuse checksum headers that S3 would refuse: no part could be taken."""
    headers = context.request.headers
    check_stored(headers)
    upload_checksum_type(headers.get("x-amz-checksum-algorithm"), headers.get("x-amz-checksum-type"))
    if context.slot.write == "scratch":
        refuse_unless_kept_here(why_of_key(context.object_key.key))
        refuse_unless_kept_here(None if may_begin_without_origin(context.request) else Reason.HEADER)
        await receive_payload(context)
        return await _begun_here(context, buffer)
    capabilities = buffer.look(lambda tx: tx.buckets.capabilities(context.object_key.bucket))
    of_key = why_of_key(context.object_key.key)
    may_be_local, key = takes_local_etag(context), context.object_key.key
    reason = of_key or why_of_bucket(capabilities, of_parts=True, may_be_local=may_be_local, key=key)
    if reason is not None and (of_key or capabilities is not None):
        goes_through(context, reason)
        return await _created_through(context, buffer)
    if leaves_to_the_origin(context, buffer, takes_room=True):
        return await _created_through(context, buffer)
    async with in_doubt(buffer.journal, context.object_key, context.slot.name, context.services.clock) as question:
        return await _created(context, buffer, capabilities, question)


async def _created_through(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Let the client have its own upload at the origin, as writes are not absorbed; learn for the next."""
    answer = await _ask(context)
    with suppress(BufferUnavailable):  # the origin has begun it: the next write learns about the bucket
        await buffer.journal.change(lambda tx: answer.learn(tx, context.object_key.bucket))
    return answer.forwarded()


async def _created(
    context: RequestContext, buffer: WritebackBuffer, capabilities: BucketCapabilities | None, question: CreateInDoubt
) -> Response:
    headers, may_be_local = context.request.headers, takes_local_etag(context)
    why_not = why_of_bucket(capabilities, of_parts=True, headers=headers, may_be_local=may_be_local)
    may_go_on = why_not is None and may_begin_without_origin(context.request)
    try:
        answer = await _ask(context)
    except OriginUnreachable:
        if not may_go_on:
            raise
        return await _begun_here(context, buffer)
    if answer.origin_upload_id is None:
        question.is_refused = not may_be_done(answer.status)
        return await _begun_here(context, buffer) if may_go_on and answer.status in _DOWN else answer.forwarded()
    upload = _upload(context, buffer, answer.expected, answer.origin_upload_id)
    reason = why_of_bucket(answer.capabilities, of_parts=True, may_be_local=may_be_local)
    await buffer.journal.change(lambda tx: _open(tx, answer, upload, question, is_here=reason is None))
    question.is_over = True
    if reason is not None:
        goes_through(context, reason)
        return answer.forwarded()
    return Response(200, answer.headers, _initiated(upload), "absorbed")


async def _begun_here(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Begin an upload here alone, as the origin is away. Whether it has begun one too is found out later."""
    upload = _upload(context, buffer, ExpectedVersion.unknown(context.services.clock), None)
    await buffer.journal.change(lambda tx: tx.uploads.begin(upload))
    return Response(200, [("content-type", "application/xml")], _initiated(upload), "absorbed")


def _open(tx: JournalTransaction, answer: _Answer, upload: Write, question: CreateInDoubt, *, is_here: bool) -> None:
    answer.learn(tx, upload.key.bucket)
    if is_here:
        tx.uploads.begin(upload, question.id)
    else:
        tx.uploads.forget(question.id)


async def _ask(context: RequestContext) -> _Answer:
    async with aclosing(ExpectedVersionQuery(context)) as question:
        payload = await receive_payload(context)
        request = onward_request(context, payload)
        async with await context.services.origin.send(request) as response:
            body = await response.read(ANSWER_SIZE_BYTES_MAX)
        headers = without(filter_response_headers(response.headers), "content-length")
        origin_upload_id = text_of(body, "UploadId") if response.status == 200 else None
        expected, may_look = ExpectedVersion(), False
        tells_rights = False
        if origin_upload_id is not None:
            try:
                expected, may_look = await question.answer(), True
                tells_rights = expected.absent
            except OriginAnswered as refusal:
                tells_rights = is_for_want_of_rights(refusal)
    asked = context.request.headers
    md5_etags = makes_md5_etags({**asked, **response.headers})
    classes = storage_classes(asked)
    capabilities = BucketCapabilities(md5_etags, may_look, context.services.clock.now(), storage_classes=classes)
    is_of_bucket, tells = not names_encryption(asked), tells_encryption(response.headers)
    return _Answer(
        response.status, headers, body, origin_upload_id, capabilities, is_of_bucket, tells, tells_rights, expected
    )


def _upload(
    context: RequestContext, buffer: WritebackBuffer, expected: ExpectedVersion, origin_upload_id: str | None
) -> Write:
    spec = WriteSpec(
        context.object_key, created_headers(filter_request_headers(context.request.headers)), context.slot.name
    )
    now = Moment.of(context.services.clock)
    upload = Write(
        spec,
        expected,
        now.at,
        upload_id=f"{buffer.node_id}-{secrets.token_urlsafe(32)}",
        origin_upload_id=origin_upload_id,
        touched=now,
    )
    return buffer.of_checkpoint(upload)


def _initiated(upload: Write) -> bytes:
    key = upload.spec.key
    fields = element("Bucket", key.bucket) + element("Key", key.key) + element("UploadId", upload.upload_id or "")
    return document("InitiateMultipartUploadResult", fields)


# Open uploads

LISTED_PARTS_MAX = 1000

_XML = ("content-type", "application/xml")


async def buffer_abort(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Drop an upload here, and at the origin soon or once a Complete fails. S3Error ServiceUnavailable: too long."""
    found = upload_of(context, buffer)
    await check_owner(context, found)
    clock = context.services.clock
    began = clock.monotonic()
    while not await buffer.abort(found.upload_id or ""):
        while buffer.look(lambda tx: _is_being_completed(tx, found)):
            if clock.monotonic() >= began + PATIENCE_SECONDS:
                raise s3_error("ServiceUnavailable", "The upload is being completed: try again.")
            await until_next_look(clock, began)
        if buffer.look(lambda tx: tx.uploads.upload(found.upload_id or "")) is None:
            raise no_such_upload(found.upload_id or "")
    return Response(204, cache="absorbed")


def _is_being_completed(tx: JournalTransaction, upload: Write) -> bool:
    now = tx.uploads.upload(upload.upload_id or "")
    return now is not None and tx.uploads.is_being_completed(now)


async def list_buffered_parts(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """List the parts of an upload that is here."""
    found = upload_of(context, buffer)
    await check_owner(context, found)
    maximum = min(number_of(context, "max-parts", LISTED_PARTS_MAX), LISTED_PARTS_MAX)
    marker = number_of(context, "part-number-marker", 0)
    parts = await buffer.journal.parts(found.id, marker, maximum + 1)
    listing = await in_steps(_listing(found, parts[:maximum], marker, maximum, len(parts) > maximum))
    return Response(200, [_XML], listing, "absorbed")


def _listing(upload: Write, parts: list[Part], marker: int, maximum: int, truncated: bool) -> Steps[bytes]:
    key = upload.spec.key
    fields = element("Bucket", key.bucket) + element("Key", key.key) + element("UploadId", upload.upload_id or "")
    fields += element("StorageClass", upload.spec.headers.get("x-amz-storage-class", "STANDARD"))
    fields += element("PartNumberMarker", str(marker))
    fields += element("NextPartNumberMarker", str(parts[-1].number if parts else 0))
    fields += element("MaxParts", str(maximum)) + element("IsTruncated", "true" if truncated else "false")
    return document("ListPartsResult", fields + "".join((yield from each(_listed, parts))))


def _listed(part: Part) -> str:
    fields = element("PartNumber", str(part.number)) + element("LastModified", format_iso_date(part.stored_at))
    fields += element("ETag", part.file.etag) + element("Size", str(part.file.size_bytes))
    fields += "".join(element(f"Checksum{name.upper()}", value) for name, value in part.checksums.items())
    return f"<Part>{fields}</Part>"
