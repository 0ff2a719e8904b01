"""Multipart uploads in a slot with `write = "back"`: their beginning, listing and end.

    Create → the request to the origin is entered → sent, with a question for the key's version → open here, with an
             upload id of our own → 200; with the origin away and its bucket known, it is begun here alone
    UploadPart, UploadPartCopy → parts.py, copies.py
    Complete → one commit makes the parts an object → 200
    Abort, ListParts → from the journal

Uploads that the journal does not know were begun at the origin before: they are its own, and go through.

The origin carries out a Complete with a condition, with parts that only it has, or with a checksum of the whole that
the parts' checksums do not give, so its 200 comes after the origin's: the reconciler does it (writeback/flushing),
after the pending writes of the key. If the condition does not hold, the upload stays open, as at S3.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from gateway.core.clock import Moment
from gateway.core.errors import BufferUnavailable, OriginAnswered, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.core.steps import Steps, each, in_steps
from gateway.operations.context import RequestContext, Response, xml_response
from gateway.operations.other_nodes import Claimed
from gateway.operations.passthrough import onward_request
from gateway.operations.payload import receive_document, receive_payload
from gateway.operations.pending_versions import type_of_checksums
from gateway.operations.visibility import changed_by, with_invalidation
from gateway.operations.writeback.key_check import check_place
from gateway.operations.writeback.parts import (
    ANSWER_SIZE_BYTES_MAX,
    check_owner,
    checksum_elements,
    leaves_to_the_origin,
    no_such_upload,
    upload_of,
)
from gateway.operations.writeback.past_the_buffer import (
    PATIENCE_SECONDS,
    FlushWait,
    goes_through,
    until_next_look,
    with_retries,
)
from gateway.operations.writeback.put_object import (
    UNCLAIMED,
    ExpectedVersionQuery,
    claimed_version,
    current_expected_version,
    goes_through_unseen,
    is_for_want_of_rights,
    note_refusal,
)
from gateway.operations.writeback.write_back_policy import (
    Reason,
    capabilities_of,
    check_stored,
    created_headers,
    has_conditions,
    is_condition,
    is_foretold,
    makes_md5_etags,
    may_begin_without_origin,
    names_encryption,
    refuse_unless_kept_here,
    tells_encryption,
    why_of_bucket,
    why_of_cluster,
    why_of_key,
)
from gateway.origin.retry import may_be_done
from gateway.s3.checksums import PREFIX, composite_checksum, full_object_checksum, upload_checksum_type
from gateway.s3.error_codes import CODES, s3_error
from gateway.s3.headers import (
    filter_request_headers,
    filter_response_headers,
    format_iso_date,
    md5s_etag,
    unquote,
    without,
)
from gateway.s3.xml import COMPLETE_SIZE_BYTES_MAX, CompletedPart, parse_complete_multipart_upload, text_of
from gateway.s3.xml_writer import document, element
from gateway.writeback.flushing.in_doubt import CreateInDoubt, in_doubt
from gateway.writeback.journal.buckets import BucketCapabilities, judged_values
from gateway.writeback.journal.records import ExpectedVersion, Part, UploadOutcome, Write, WriteSpec, parts_digest
from gateway.writeback.journal.transaction import JournalTransaction

_DOWN = frozenset({500, 502, 503, 504})
"""Statuses of an origin that is not working now (docs/semantics.md, clause 4.8). A 501 is a refusal."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The origin's answer to Create, and its version of the key. No `origin_upload_id`: it has begun nothing.

    `capabilities` are the bucket's, or this upload's alone, if it names its encryption. That its ETags are MD5s is a
    guess, as the answer shows none: a good one if it tells the encryption. An existing object does not tell whether the
    gateway may learn of missing ones (`tells_rights`).
    """

    response: Response
    origin_upload_id: str | None
    capabilities: BucketCapabilities
    tells_rights: bool
    expected: ExpectedVersion

    def learn(self, tx: JournalTransaction, context: RequestContext) -> None:
        """Record the bucket's facts. ETags seen to be no MD5s stay so: the next PutObject shows one."""
        bucket, told = context.object_key.bucket, self.capabilities
        known = tx.buckets.capabilities(bucket)
        if self.origin_upload_id is None or names_encryption(context.request.headers):
            return
        if known is None and not self.tells_rights:
            return
        if known is not None:
            may_look = told.may_look if self.tells_rights else known.may_look
            told = replace(told, multipart_etags=known.multipart_etags, may_look=may_look)
        if known is not None and not known.md5_etags:
            is_good_guess = tells_encryption(dict(self.response.headers)) and told.md5_etags
            told = replace(told, md5_etags=False, learned_at=0.0 if is_good_guess else known.learned_at)
        tx.buckets.learn(bucket, told)


async def buffer_create(context: RequestContext) -> Response:
    """Begin an upload at the origin and here. Refuse checksum headers that S3 would refuse: no part could be taken."""
    headers = context.request.headers
    check_stored(headers)
    await check_place(context)
    upload_checksum_type(headers.get("x-amz-checksum-algorithm"), headers.get("x-amz-checksum-type"))
    why_of_the_key = why_of_key(context.object_key.key)
    if context.slot.write == "scratch":
        refuse_unless_kept_here(context, why_of_the_key)
        refuse_unless_kept_here(context, None if may_begin_without_origin(context.request) else Reason.HEADER)
        await receive_payload(context)
        return await _begun_here(context)
    capabilities = capabilities_of(context)
    of_bucket = why_of_bucket(context, capabilities, of_parts=True) if capabilities is not None else None
    reason = why_of_the_key or of_bucket or why_of_cluster(context)
    if reason is not None:
        goes_through(context, reason)
    elif not leaves_to_the_origin(context, takes_room=True):
        journal, slot, clock = context.buffer.journal, context.slot.name, context.services.clock
        async with in_doubt(journal, context.object_key, slot, clock) as question:
            return await _created(context, capabilities, question)
    return await _created_through(context)


async def _created_through(context: RequestContext) -> Response:
    """Let the client have its own upload at the origin, as writes are not absorbed; learn for the next."""
    answer = await _ask(context)
    with suppress(BufferUnavailable):  # the origin has begun it: the next write learns about the bucket
        await context.buffer.journal.change(lambda tx: answer.learn(tx, context))
    return answer.response


async def _created(
    context: RequestContext, capabilities: BucketCapabilities | None, question: CreateInDoubt
) -> Response:
    why_not = why_of_bucket(context, capabilities, of_parts=True, headers=context.request.headers)
    may_go_on = why_not is None and may_begin_without_origin(context.request, capabilities)
    try:
        answer = await _ask(context)
    except OriginUnreachable:
        if not may_go_on:
            raise
        return await _begun_here(context)
    if answer.origin_upload_id is None:
        await note_refusal(context, answer.response.status)
        question.is_refused = not may_be_done(answer.response.status)
        return await _begun_here(context) if may_go_on and answer.response.status in _DOWN else answer.response
    upload = _upload(context, answer.expected, answer.origin_upload_id)
    reason = why_of_bucket(context, answer.capabilities, of_parts=True)

    def enter(tx: JournalTransaction) -> None:
        answer.learn(tx, context)
        if reason is None:
            tx.uploads.begin(upload, question.id)
        else:
            tx.uploads.forget(question.id)

    await context.buffer.journal.change(enter)
    question.is_over = True
    if reason is not None:
        goes_through(context, reason)
        return answer.response
    return Response(200, answer.response.headers, _initiated(upload), "absorbed")


async def _begun_here(context: RequestContext) -> Response:
    """Begin an upload here alone, as the origin is away. Whether it has begun one too is found out later."""
    upload = _upload(context, ExpectedVersion.unknown(context.services.clock), None)
    await context.buffer.journal.change(lambda tx: tx.uploads.begin(upload))
    return xml_response(_initiated(upload), "absorbed")


async def _ask(context: RequestContext) -> _Answer:
    async with aclosing(ExpectedVersionQuery(context)) as question:
        payload = await receive_payload(context)
        async with await context.services.origin.send(onward_request(context, payload)) as response:
            body = await response.read(ANSWER_SIZE_BYTES_MAX)
        headers = without(filter_response_headers(response.headers), "content-length")
        origin_upload_id = text_of(body, "UploadId") if response.status == 200 else None
        expected, may_look, tells_rights = ExpectedVersion(), False, False
        if origin_upload_id is not None:
            try:
                expected, may_look = await question.answer(), True
                tells_rights = expected.absent
            except OriginAnswered as refusal:
                tells_rights = is_for_want_of_rights(refusal)
    asked = context.request.headers
    md5_etags, now = makes_md5_etags({**asked, **response.headers}), context.services.clock.now()
    capabilities = BucketCapabilities(md5_etags, may_look, now, accepted=judged_values(asked))
    reply = Response(response.status, headers, body, "forwarded")
    return _Answer(reply, origin_upload_id, capabilities, tells_rights, expected)


def _upload(context: RequestContext, expected: ExpectedVersion, origin_upload_id: str | None) -> Write:
    headers = created_headers(filter_request_headers(context.request.headers))
    spec = WriteSpec(context.object_key, headers, context.slot.name)
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
    return document("InitiateMultipartUploadResult", _named(upload))


def _named(upload: Write) -> str:
    key = upload.key
    return element("Bucket", key.bucket) + element("Key", key.key) + element("UploadId", upload.upload_id or "")


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
    found = upload_of(context)
    await check_owner(context, found)
    maximum = min(_number(context, "max-parts", LISTED_PARTS_MAX), LISTED_PARTS_MAX)
    marker = _number(context, "part-number-marker", 0)
    parts = await context.buffer.journal.parts(found.id, marker, maximum + 1)
    listing = await in_steps(_listing(found, parts[:maximum], marker, maximum, len(parts) > maximum))
    return xml_response(listing, "absorbed")


def _listing(upload: Write, parts: list[Part], marker: int, maximum: int, truncated: bool) -> Steps[bytes]:
    fields = _named(upload) + element("StorageClass", upload.spec.headers.get("x-amz-storage-class", "STANDARD"))
    fields += element("PartNumberMarker", str(marker))
    fields += element("NextPartNumberMarker", str(parts[-1].number if parts else 0))
    fields += element("MaxParts", str(maximum)) + element("IsTruncated", "true" if truncated else "false")
    return document("ListPartsResult", fields + "".join((yield from each(_listed, parts))))


def _listed(part: Part) -> str:
    fields = element("PartNumber", str(part.number)) + element("LastModified", format_iso_date(part.stored_at))
    fields += element("ETag", part.file.etag) + element("Size", str(part.file.size_bytes))
    return f"<Part>{fields}{checksum_elements(part.checksums)}</Part>"


def _number(context: RequestContext, name: str, default: int) -> int:
    text = context.request.parameter(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise s3_error("InvalidArgument", f"{name} must be a number.", ArgumentName=name, ArgumentValue=text)
    return int(text)


async def buffer_complete(context: RequestContext) -> Response:
    """Make the parts an object. A repeated Complete gets the first answer."""
    upload_id = context.request.parameter("uploadId") or ""
    document = await receive_document(context, COMPLETE_SIZE_BYTES_MAX)
    listed = await in_steps(parse_complete_multipart_upload(document))
    upload = context.buffer.look(lambda tx: tx.uploads.upload(upload_id))
    if upload is None or upload.spec.key != context.object_key:
        return await _completed_before(context, upload_id, listed)
    await check_owner(context, upload)
    stored = dict(await in_steps(each(lambda part: (part.number, part), await context.buffer.journal.parts(upload.id))))
    made = await in_steps(complete(upload, context.request.headers, stored, listed))
    is_etag_local = not is_foretold(capabilities_of(context), upload.spec.headers)
    made = replace(made, completed_of=await in_steps(parts_digest(listed)), is_etag_local=is_etag_local)
    are_here = all(await in_steps(each(lambda part: part.file.is_here, made.parts)))
    reason = _why_of_the_origin(context, made, are_here=are_here)
    if reason is not None:
        goes_through(context, reason)
        return await _left_to_the_origin(context, made)
    claim, now = Claimed(), context.services.clock.now()
    try:
        if context.slot.write != "scratch":
            claim, expected = await claimed_version(context, now, current_expected_version(context, made.expected))
            made = replace(made, expected=expected)
    except UNCLAIMED as refusal:
        await goes_through_unseen(context, refusal)
        return await _left_to_the_origin(context, made)
    async with claim:
        completed = await context.buffer.complete(replace(made, acknowledged_at=now, order=claim.order))
    if completed is None:
        await claim.release()
    if completed is None and context.buffer.look(lambda tx: tx.uploads.upload(upload_id)) is None:
        return await _completed_before(context, upload_id, listed)
    if completed is None:
        raise s3_error("ServiceUnavailable", "A part has just been replaced: try again.")
    return xml_response(_result(made.key, made.etag, made.checksums), "absorbed")


def _why_of_the_origin(context: RequestContext, made: Write, *, are_here: bool) -> Reason | None:
    """Return why the origin must make the object; None: it need not.

    Its ETag may differ from the foretold one since the upload began, unless the upload named its encryption.
    """
    if has_conditions(context.request.headers):
        refuse_unless_kept_here(context, Reason.CONDITION)
        return Reason.CONDITION
    if not are_here:  # in a scratch slot: it was begun before the slot became one
        return Reason.PART
    # Only the bytes decide what Complete says of the whole beyond the parts' checksums.
    said = {name.removeprefix(PREFIX) for name in context.request.headers if name.startswith(PREFIX)}
    if not said - {"algorithm", "type"} <= made.checksums.keys():
        refuse_unless_kept_here(context, Reason.HEADER)
        return Reason.HEADER
    if context.slot.write == "scratch":
        return None
    if (reason := why_of_cluster(context)) is not None:
        return reason
    if made.is_etag_local and context.slot.etag != "local":
        return Reason.BUCKET_ETAGS
    capabilities = capabilities_of(context)
    is_refused = capabilities is not None and capabilities.refuses(made.key.key, made.spec.headers)
    return Reason.KEY if is_refused else None


async def _left_to_the_origin(context: RequestContext, made: Write) -> Response:
    async def completing() -> Response:
        ended = await complete_at_origin(context, made)
        await context.services.blocks.invalidate(made.key)
        return xml_response(_result(made.key, ended.etag or made.etag, made.checksums), "forwarded")

    return await with_retries(with_invalidation(changed_by(context), completing()), context.services.clock)


async def _completed_before(context: RequestContext, upload_id: str, listed: list[CompletedPart]) -> Response:
    ended = context.buffer.look(lambda tx: tx.uploads.ended(upload_id))
    asked = await in_steps(parts_digest(listed))
    if ended is None or ended.etag is None or ended.key != context.object_key or ended.parts != asked:
        raise no_such_upload(upload_id)
    return xml_response(_result(ended.key, ended.etag, ended.checksums), "absorbed")


def _result(key: ObjectKey, etag: str, checksums: Mapping[str, str]) -> bytes:
    fields = element("Location", f"/{key.bucket}/{key.key}") + element("Bucket", key.bucket) + element("Key", key.key)
    fields += element("ETag", etag) + checksum_elements(checksums)
    if checksums:
        fields += element("ChecksumType", type_of_checksums(checksums))
    return document("CompleteMultipartUploadResult", fields)


# At the origin

COMPLETION_SECONDS_MAX = 1800.0
"""An origin may work on a large object for minutes, and parts may have to be sent first."""


async def complete_at_origin(context: RequestContext, made: Write) -> UploadOutcome:
    """Return the outcome when the origin has made the object; S3Error with its code when it has not."""
    wait, key = FlushWait(context), context.object_key
    # Without a condition, the journal keeps it in order.
    await (wait.for_turn(key) if has_conditions(context.request.headers) else wait.for_keys([key]))
    headers = context.request.headers  # after the wait, which may have renamed the version in a condition
    clock, token, upload_id = context.services.clock, secrets.token_hex(8), made.upload_id or ""
    conditions = {name: headers[name] for name in headers if is_condition(name) or name.startswith(PREFIX)}
    asked = replace(made, conditions=conditions, asked_as=token, touched=Moment.of(clock))
    if not await context.buffer.complete_at_origin(asked):
        raise s3_error(
            "ServiceUnavailable",
            "A part has just been replaced, or the upload has ended or is being completed: try again.",
        )
    began = clock.monotonic()
    while clock.monotonic() < began + COMPLETION_SECONDS_MAX:
        ended = context.buffer.look(lambda tx: _outcome(tx, key, upload_id, token))
        if ended is not None:
            return ended
        await until_next_look(clock, began)
    raise s3_error("ServiceUnavailable", "The origin has not completed the upload in time: try again.")


def _outcome(tx: JournalTransaction, key: ObjectKey, upload_id: str, token: str) -> UploadOutcome | None:
    """Return None while there is no outcome."""
    upload = tx.uploads.upload(upload_id)
    if upload is None:
        ended = tx.uploads.ended(upload_id)
        if ended is None or ended.etag is None:
            # It was aborted before its outcome was reported: it is not completed, or perhaps it is.
            own = tx.buckets.last_own_write(key)
            raise no_such_upload(upload_id) if own is None or own.known else s3_error("OutcomeUnknown")
        return ended
    if upload.asked_as != token:
        raise s3_error("ServiceUnavailable", "Another request is completing the upload in a different way: try again.")
    if upload.answer is not None:
        is_of_s3 = upload.answer in CODES
        message = None if is_of_s3 else f"The origin has not completed the upload: {upload.answer}"
        raise s3_error(upload.answer if is_of_s3 else "ServiceUnavailable", message)
    return None


# What the parts make, in S3's order of checks. Pure

PART_SIZE_BYTES_MIN = 5 * 1024**2
"""The least size of every part except the last."""


def complete(
    upload: Write, request: Mapping[str, str], stored: Mapping[int, Part], listed: Sequence[CompletedPart]
) -> Steps[Write]:
    """Return the object that the parts make, with checksums as far as the parts' own give them.

    `request` are the headers of Complete; `listed` is in ascending order. Raises S3Error InvalidPart, EntityTooSmall,
    InvalidPartOrder, InvalidRequest, BadDigest.
    """
    create = upload.spec.headers
    chosen = yield from each(lambda one: _part(upload.upload_id or "", stored, one), listed)
    yield from each(_check_size, chosen[:-1])
    size_bytes = sum((yield from each(lambda part: part.file.size_bytes, chosen)))
    declared = request.get("x-amz-mp-object-size")
    if declared is not None and declared != str(size_bytes):
        raise s3_error("InvalidRequest", "The provided x-amz-mp-object-size does not match the size of the object.")
    _, created = upload_checksum_type(create.get(f"{PREFIX}algorithm"), create.get(f"{PREFIX}type"))
    if request.get(f"{PREFIX}type", created).upper() != created:
        raise s3_error(
            "InvalidRequest", f"The upload was created with checksums of type {created}: Complete must say the same."
        )
    checksums = yield from _checksums(create, chosen)
    for algorithm, value in checksums.items():
        if request.get(PREFIX + algorithm, value) != value:
            raise s3_error("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")
    etag = md5s_etag((yield from each(lambda part: part.file.md5, chosen)))
    return replace(upload, parts=chosen, etag=etag, size_bytes=size_bytes, checksums=checksums)


def _part(upload_id: str, stored: Mapping[int, Part], listed: CompletedPart) -> Part:
    part = stored.get(listed.number)
    said = listed.checksums.items()
    do_fit = part is not None and all(part.checksums.get(name, value) == value for name, value in said)
    if part is None or unquote(part.file.etag) != unquote(listed.etag) or not do_fit:
        raise s3_error("InvalidPart", UploadId=upload_id, PartNumber=str(listed.number), ETag=unquote(listed.etag))
    return part


def _check_size(part: Part) -> None:
    if part.file.size_bytes < PART_SIZE_BYTES_MIN:
        raise s3_error(
            "EntityTooSmall",
            ProposedSize=str(part.file.size_bytes),
            MinSizeAllowed=str(PART_SIZE_BYTES_MIN),
            PartNumber=str(part.number),
            ETag=unquote(part.file.etag),
        )


def _checksums(create: Mapping[str, str], chosen: Sequence[Part]) -> Steps[dict[str, str]]:
    declared = create.get("x-amz-checksum-algorithm")
    if declared is None:
        return {}
    algorithm, checksum_type = upload_checksum_type(declared, create.get("x-amz-checksum-type"))
    own = yield from each(lambda part: part.checksums.get(algorithm), chosen)
    known = list(filter(None, own))
    # They are in ascending order.
    if len(known) == len(own) and (chosen[0].number, chosen[-1].number) != (1, len(chosen)):
        raise s3_error("InvalidPartOrder", "With a checksum for each part, part numbers must be consecutive from 1.")
    if checksum_type == "COMPOSITE":
        if len(known) < len(own):
            raise s3_error(
                "InvalidRequest",
                f"The upload was created using a {algorithm} checksum. The complete request must include the checksum "
                "for each part.",
            )
        return {algorithm: (yield from composite_checksum(algorithm, known))}
    if len(known) < len(own):
        return {}  # the origin computes it from the bytes
    sized = yield from each(lambda part: (part.checksums[algorithm], part.file.size_bytes), chosen)
    return {algorithm: (yield from full_object_checksum(algorithm, sized))}
