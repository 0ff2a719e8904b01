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

from gateway.core.clock import Moment
from gateway.core.errors import BufferUnavailable, OriginAnswered, OriginUnreachable
from gateway.core.steps import Steps, each, in_steps
from gateway.operations.context import RequestContext, Response, xml_response
from gateway.operations.passthrough import onward_request
from gateway.operations.payload import receive_payload
from gateway.operations.writeback.parts import check_owner, leaves_to_the_origin, no_such_upload, upload_of
from gateway.operations.writeback.past_the_buffer import PATIENCE_SECONDS, goes_through, until_next_look
from gateway.operations.writeback.put_object import ExpectedVersionQuery, is_for_want_of_rights
from gateway.operations.writeback.write_back_policy import (
    Reason,
    capabilities_of,
    check_stored,
    created_headers,
    makes_md5_etags,
    may_begin_without_origin,
    names_encryption,
    refuse_unless_kept_here,
    storage_classes,
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
from gateway.writeback.journal.records import BucketCapabilities, ExpectedVersion, Part, Write, WriteSpec
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


async def buffer_create(context: RequestContext) -> Response:
    """Begin an upload at the origin and here. Refuse checksum headers that S3 would refuse: no part could be taken."""
    headers = context.request.headers
    check_stored(headers)
    upload_checksum_type(headers.get("x-amz-checksum-algorithm"), headers.get("x-amz-checksum-type"))
    why_of_the_key = why_of_key(context.object_key.key)
    if context.slot.write == "scratch":
        refuse_unless_kept_here(context, why_of_the_key)
        refuse_unless_kept_here(context, None if may_begin_without_origin(context.request) else Reason.HEADER)
        await receive_payload(context)
        return await _begun_here(context)
    capabilities = capabilities_of(context)
    reason = why_of_the_key or why_of_bucket(context, capabilities, of_parts=True)
    if reason is not None and (why_of_the_key or capabilities is not None):
        goes_through(context, reason)
        return await _created_through(context)
    if leaves_to_the_origin(context, takes_room=True):
        return await _created_through(context)
    async with in_doubt(
        context.buffer.journal, context.object_key, context.slot.name, context.services.clock
    ) as question:
        return await _created(context, capabilities, question)


async def _created_through(context: RequestContext) -> Response:
    """Let the client have its own upload at the origin, as writes are not absorbed; learn for the next."""
    answer = await _ask(context)
    with suppress(BufferUnavailable):  # the origin has begun it: the next write learns about the bucket
        await context.buffer.journal.change(lambda tx: answer.learn(tx, context.object_key.bucket))
    return answer.forwarded()


async def _created(
    context: RequestContext, capabilities: BucketCapabilities | None, question: CreateInDoubt
) -> Response:
    why_not = why_of_bucket(context, capabilities, of_parts=True, headers=context.request.headers)
    may_go_on = why_not is None and may_begin_without_origin(context.request)
    try:
        answer = await _ask(context)
    except OriginUnreachable:
        if not may_go_on:
            raise
        return await _begun_here(context)
    if answer.origin_upload_id is None:
        question.is_refused = not may_be_done(answer.status)
        return await _begun_here(context) if may_go_on and answer.status in _DOWN else answer.forwarded()
    upload = _upload(context, answer.expected, answer.origin_upload_id)
    reason = why_of_bucket(context, answer.capabilities, of_parts=True)

    def enter(tx: JournalTransaction) -> None:
        answer.learn(tx, upload.key.bucket)
        if reason is None:
            tx.uploads.begin(upload, question.id)
        else:
            tx.uploads.forget(question.id)

    await context.buffer.journal.change(enter)
    question.is_over = True
    if reason is not None:
        goes_through(context, reason)
        return answer.forwarded()
    return Response(200, answer.headers, _initiated(upload), "absorbed")


async def _begun_here(context: RequestContext) -> Response:
    """Begin an upload here alone, as the origin is away. Whether it has begun one too is found out later."""
    upload = _upload(context, ExpectedVersion.unknown(context.services.clock), None)
    await context.buffer.journal.change(lambda tx: tx.uploads.begin(upload))
    return xml_response(_initiated(upload), "absorbed")


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


def _upload(context: RequestContext, expected: ExpectedVersion, origin_upload_id: str | None) -> Write:
    spec = WriteSpec(
        context.object_key, created_headers(filter_request_headers(context.request.headers)), context.slot.name
    )
    now = Moment.of(context.services.clock)
    upload = Write(
        spec,
        expected,
        now.at,
        upload_id=f"{context.buffer.node_id}-{secrets.token_urlsafe(32)}",
        origin_upload_id=origin_upload_id,
        touched=now,
    )
    return context.buffer.of_checkpoint(upload)


def _initiated(upload: Write) -> bytes:
    key = upload.spec.key
    fields = element("Bucket", key.bucket) + element("Key", key.key) + element("UploadId", upload.upload_id or "")
    return document("InitiateMultipartUploadResult", fields)


# Open uploads

LISTED_PARTS_MAX = 1000


async def buffer_abort(context: RequestContext) -> Response:
    """Drop an upload here, and at the origin soon or once a Complete fails. S3Error ServiceUnavailable: too long."""
    found = upload_of(context)
    await check_owner(context, found)
    clock = context.services.clock
    began = clock.monotonic()

    def is_being_completed(tx: JournalTransaction) -> bool:
        now = tx.uploads.upload(found.upload_id or "")
        return now is not None and tx.uploads.is_being_completed(now)

    while not await context.buffer.abort(found.upload_id or ""):
        while context.buffer.look(is_being_completed):
            if clock.monotonic() >= began + PATIENCE_SECONDS:
                raise s3_error("ServiceUnavailable", "The upload is being completed: try again.")
            await until_next_look(clock, began)
        if context.buffer.look(lambda tx: tx.uploads.upload(found.upload_id or "")) is None:
            raise no_such_upload(found.upload_id or "")
    return Response(204, cache="absorbed")


async def list_buffered_parts(context: RequestContext) -> Response:
    """List the parts of an upload that is here."""
    found = upload_of(context)
    await check_owner(context, found)
    maximum = min(_number(context, "max-parts", LISTED_PARTS_MAX), LISTED_PARTS_MAX)
    marker = _number(context, "part-number-marker", 0)
    parts = await context.buffer.journal.parts(found.id, marker, maximum + 1)
    listing = await in_steps(_listing(found, parts[:maximum], marker, maximum, len(parts) > maximum))
    return xml_response(listing, "absorbed")


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


def _number(context: RequestContext, name: str, default: int) -> int:
    """Return a numeric parameter; `default` if it is missing."""
    text = context.request.parameter(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise s3_error("InvalidArgument", f"{name} must be a number.", ArgumentName=name, ArgumentValue=text)
    return int(text)
