"""CompleteMultipartUpload of an upload that is here (S3 API, "CompleteMultipartUpload").

One commit makes the parts an object. The origin carries out a Complete with a condition, with parts that only it has,
or with a checksum of the whole that the parts' checksums do not give, so its 200 comes after the origin's: the
reconciler does it (writeback/flushing), after the pending writes of the key. If the condition does not hold, the upload
stays open, as at S3.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gateway.core.clock import Moment
from gateway.core.errors import OriginAnswered, S3Error
from gateway.core.model import ObjectKey
from gateway.core.steps import Steps, each, in_steps
from gateway.operations.context import RequestContext, Response
from gateway.operations.payload import receive_document
from gateway.operations.visibility import changed_by, with_invalidation
from gateway.operations.writeback.parts import check_owner, no_such_upload
from gateway.operations.writeback.past_the_buffer import FlushWait, goes_through, until_next_look, with_retries
from gateway.operations.writeback.put_object import current_expected_version, goes_through_unseen
from gateway.operations.writeback.write_back_policy import (
    Reason,
    has_conditions,
    is_condition,
    is_foretold,
    refuse_unless_kept_here,
)
from gateway.s3.checksums import PREFIX, composite_checksum, full_object_checksum, upload_checksum_type
from gateway.s3.error_codes import CODES, s3_error
from gateway.s3.headers import md5s_etag, unquote
from gateway.s3.xml import COMPLETE_SIZE_BYTES_MAX, CompletedPart, parse_complete_multipart_upload
from gateway.s3.xml_writer import document, element
from gateway.writeback.journal.records import Part, UploadOutcome, Write, parts_digest
from gateway.writeback.journal.transaction import JournalTransaction

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

_XML = ("content-type", "application/xml")


async def buffer_complete(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Make the parts an object. A repeated Complete gets the first answer."""
    upload_id = context.request.parameter("uploadId") or ""
    document = await receive_document(context, COMPLETE_SIZE_BYTES_MAX)
    listed = await in_steps(parse_complete_multipart_upload(document))
    upload = buffer.look(lambda tx: tx.uploads.upload(upload_id))
    if upload is None or upload.spec.key != context.object_key:
        return await _completed_before(context, buffer, upload_id, listed)
    await check_owner(context, upload)
    stored = dict(await in_steps(each(lambda part: (part.number, part), await buffer.journal.parts(upload.id))))
    made = await in_steps(complete(upload_id, upload.spec.headers, context.request.headers, stored, listed))
    completed_of = await in_steps(parts_digest(listed))
    capabilities = buffer.look(lambda tx: tx.buckets.capabilities(context.object_key.bucket))
    made = replace(made, is_etag_local=not is_foretold(capabilities, upload.spec.headers))
    are_here = all(await in_steps(each(lambda part: part.file.is_here, made.parts)))
    reason = _why_of_the_origin(context, buffer, upload, made, are_here=are_here)
    if reason is not None:
        goes_through(context, reason)
        return await _left_to_the_origin(context, buffer, upload, made, completed_of)
    try:
        if context.slot.write != "scratch":
            upload = replace(upload, expected=await current_expected_version(context, buffer, upload.expected))
    except OriginAnswered as refusal:
        await goes_through_unseen(context, buffer, refusal)
        return await _left_to_the_origin(context, buffer, upload, made, completed_of)
    completed = await buffer.complete(_as_write(upload, made, completed_of, context.services.clock.now()))
    if completed is None and buffer.look(lambda tx: tx.uploads.upload(upload_id)) is None:
        return await _completed_before(context, buffer, upload_id, listed)
    if completed is None:
        raise s3_error("ServiceUnavailable", "A part has just been replaced: try again.")
    return Response(200, [_XML], _result(context.object_key, made), "absorbed")


def _why_of_the_origin(
    context: RequestContext, buffer: WritebackBuffer, upload: Write, made: Completion, *, are_here: bool
) -> Reason | None:
    """Return why the origin must make the object; None: it need not.

    Its ETag may differ from the foretold one since the upload began, unless the upload named its encryption.
    """
    is_scratch = context.slot.write == "scratch"
    if has_conditions(context.request.headers):
        refuse_unless_kept_here(Reason.CONDITION if is_scratch else None)
        return Reason.CONDITION
    if not are_here:  # in a scratch slot: it was begun before the slot became one
        return Reason.PART
    if not _is_verified(context.request.headers, made):
        refuse_unless_kept_here(Reason.HEADER if is_scratch else None)
        return Reason.HEADER
    if is_scratch:
        return None
    if made.is_etag_local and context.slot.etag != "local":
        return Reason.BUCKET_ETAGS
    capabilities = buffer.look(lambda tx: tx.buckets.capabilities(context.object_key.bucket))
    return Reason.KEY if capabilities is not None and capabilities.refuses(upload.key.key) else None


async def _left_to_the_origin(
    context: RequestContext, buffer: WritebackBuffer, upload: Write, made: Completion, completed_of: str
) -> Response:
    completing = _completed_at_origin(context, buffer, _as_write(upload, made, completed_of, 0.0), made)
    return await with_retries(with_invalidation(changed_by(context), completing), context.services.clock)


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
        is_etag_local=made.is_etag_local,
    )


async def _completed_before(
    context: RequestContext, buffer: WritebackBuffer, upload_id: str, listed: list[CompletedPart]
) -> Response:
    ended = buffer.look(lambda tx: tx.uploads.ended(upload_id))
    asked = await in_steps(parts_digest(listed))
    if ended is None or ended.etag is None or ended.key != context.object_key or ended.parts != asked:
        raise no_such_upload(upload_id)
    is_composite = any("-" in value for value in ended.checksums.values())
    checksum_type = ("COMPOSITE" if is_composite else "FULL_OBJECT") if ended.checksums else None
    made = Completion((), ended.etag, 0, ended.checksums, checksum_type)
    return Response(200, [_XML], _result(ended.key, made), "absorbed")


def _result(key: ObjectKey, made: Completion) -> bytes:
    fields = element("Location", f"/{key.bucket}/{key.key}") + element("Bucket", key.bucket) + element("Key", key.key)
    fields += element("ETag", made.etag)
    fields += "".join(element(f"Checksum{name.upper()}", value) for name, value in made.checksums.items())
    if made.checksum_type is not None:
        fields += element("ChecksumType", made.checksum_type)
    return document("CompleteMultipartUploadResult", fields)


# At the origin

PATIENCE_SECONDS = 1800.0
"""An origin may work on a large object for minutes, and parts may have to be sent first."""


async def complete_at_origin(context: RequestContext, buffer: WritebackBuffer, made: Write) -> UploadOutcome:
    """Return the outcome when the origin has made the object; S3Error with its code when it has not."""
    wait, key = FlushWait(context, buffer), context.object_key
    # Without a condition, the journal keeps it in order.
    await (wait.for_turn(key) if has_conditions(context.request.headers) else wait.for_keys([key]))
    headers = context.request.headers  # after the wait, which may have renamed the version in a condition
    clock, token, upload_id = context.services.clock, secrets.token_hex(8), made.upload_id or ""
    conditions = {name: headers[name] for name in headers if is_condition(name) or name.startswith(PREFIX)}
    asked = replace(made, conditions=conditions, asked_as=token, touched=Moment.of(clock))
    if not await buffer.complete_at_origin(asked):
        raise s3_error(
            "ServiceUnavailable",
            "A part has just been replaced, or the upload has ended or is being completed: try again.",
        )
    began = clock.monotonic()
    while clock.monotonic() < began + PATIENCE_SECONDS:
        ended = buffer.look(lambda tx: _outcome(tx, key, upload_id, token))
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
            raise _aborted(tx, key, upload_id)
        return ended
    if upload.asked_as != token:
        raise s3_error("ServiceUnavailable", "Another request is completing the upload in a different way: try again.")
    if upload.answer is not None:
        raise _error(upload.answer)
    return None


def _aborted(tx: JournalTransaction, key: ObjectKey, upload_id: str) -> S3Error:
    """Return the error of an upload aborted before its outcome was reported: not completed, or perhaps completed."""
    own = tx.buckets.last_own_write(key)
    return no_such_upload(upload_id) if own is None or own.known else s3_error("OutcomeUnknown")


def _error(code: str) -> S3Error:
    if code in CODES:
        return s3_error(code)
    return s3_error("ServiceUnavailable", f"The origin has not completed the upload: {code}")


# What the parts make, in S3's order of checks. Pure

PART_SIZE_BYTES_MIN = 5 * 1024**2
"""The least size of every part except the last."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The object that the parts make. `checksums`: algorithm → value, as far as the parts' own give it."""

    parts: Sequence[Part]
    etag: str
    size_bytes: int
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str | None = None
    is_etag_local: bool = False
    """The bucket's ETag cannot be foretold."""


def complete(
    upload_id: str,
    create: Mapping[str, str],
    request: Mapping[str, str],
    stored: Mapping[int, Part],
    listed: Sequence[CompletedPart],
) -> Steps[Completion]:
    """`create` and `request` are the headers of Create and of Complete; `listed` is in ascending order.

    Raises S3Error InvalidPart, EntityTooSmall, InvalidPartOrder, InvalidRequest, BadDigest.
    """
    chosen = yield from each(lambda one: _part(upload_id, stored, one), listed)
    yield from each(_check_size, chosen[:-1])
    size_bytes = sum((yield from each(lambda part: part.file.size_bytes, chosen)))
    declared = request.get("x-amz-mp-object-size")
    if declared is not None and declared != str(size_bytes):
        raise s3_error("InvalidRequest", "The provided x-amz-mp-object-size does not match the size of the object.")
    _check_type(request, create)
    checksums, checksum_type = yield from _checksums(create, chosen)
    _check_digest(request, checksums)
    etag = md5s_etag((yield from each(lambda part: part.file.md5, chosen)))
    return Completion(chosen, etag, size_bytes, checksums, checksum_type)


def _part(upload_id: str, stored: Mapping[int, Part], listed: CompletedPart) -> Part:
    part = stored.get(listed.number)
    if part is None or unquote(part.file.etag) != unquote(listed.etag) or not _checksums_fit(part, listed):
        raise s3_error("InvalidPart", UploadId=upload_id, PartNumber=str(listed.number), ETag=unquote(listed.etag))
    return part


def _checksums_fit(part: Part, listed: CompletedPart) -> bool:
    return all(part.checksums.get(name, value) == value for name, value in listed.checksums.items())


def _check_size(part: Part) -> None:
    if part.file.size_bytes < PART_SIZE_BYTES_MIN:
        raise s3_error(
            "EntityTooSmall",
            ProposedSize=str(part.file.size_bytes),
            MinSizeAllowed=str(PART_SIZE_BYTES_MIN),
            PartNumber=str(part.number),
            ETag=unquote(part.file.etag),
        )


def _checksums(create: Mapping[str, str], chosen: Sequence[Part]) -> Steps[tuple[dict[str, str], str | None]]:
    declared = create.get("x-amz-checksum-algorithm")
    if declared is None:
        return {}, None
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
        return {algorithm: (yield from composite_checksum(algorithm, known))}, checksum_type
    if len(known) < len(own):
        return {}, None  # the origin computes it from the bytes
    sized = yield from each(lambda part: (part.checksums[algorithm], part.file.size_bytes), chosen)
    return {algorithm: (yield from full_object_checksum(algorithm, sized))}, checksum_type


def _is_verified(request: Mapping[str, str], made: Completion) -> bool:
    """Tell whether the parts' checksums suffice for what Complete says of the whole; else only the bytes do."""
    said = {name.removeprefix(PREFIX): value for name, value in request.items() if name.startswith(PREFIX)}
    said.pop("algorithm", None)
    said.pop("type", None)
    return said.keys() <= made.checksums.keys()


def _check_type(request: Mapping[str, str], create: Mapping[str, str]) -> None:
    _, created = upload_checksum_type(create.get(f"{PREFIX}algorithm"), create.get(f"{PREFIX}type"))
    if request.get(f"{PREFIX}type", created).upper() != created:
        raise s3_error(
            "InvalidRequest", f"The upload was created with checksums of type {created}: Complete must say the same."
        )


def _check_digest(request: Mapping[str, str], checksums: Mapping[str, str]) -> None:
    for algorithm, value in checksums.items():
        if request.get(PREFIX + algorithm, value) != value:
            raise s3_error("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")
