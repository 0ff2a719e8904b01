"""Chooses the handler that answers a request: the table of contents of this package.

    may the caller have an answer, if the origin judges that (origin_rights.py)?
    the write-back buffer, if the request concerns it → a snapshot, if one freezes its object → the origin

In each of the last three the rules are asked in order, and the first that holds answers. In the first of them, requests
that only the origin can answer wait until the origin has all that this node has acknowledged for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey
from gateway.operations.buckets import bucket_answer, create_bucket, list_buckets
from gateway.operations.context import Answer, RequestContext, Response
from gateway.operations.delete_objects import delete_objects, delete_pending
from gateway.operations.list_objects import forwarded_read, list_objects, may_be_merged
from gateway.operations.list_uploads import list_uploads, may_concern_uploads
from gateway.operations.origin_rights import authorized_by_origin, judge_wait, judge_wait_for_all
from gateway.operations.passthrough import (
    READ_METHODS,
    complete_multipart_upload,
    forward,
    forward_preflight,
    forward_write,
    is_plain,
)
from gateway.operations.pending_versions import PendingVersions, is_answered_here, tells_durability, with_durability
from gateway.operations.read_object import CurrentVersions, VersionSource, get_object
from gateway.operations.snapshot_versions import SnapshotVersions, frozen_source, pin_source
from gateway.operations.warm_up import head_object_and_warm
from gateway.operations.writeback.complete_upload import buffer_complete
from gateway.operations.writeback.copies import buffer_copy, buffer_part_copy, copied_here
from gateway.operations.writeback.parts import buffer_part, is_known
from gateway.operations.writeback.past_the_buffer import (
    CHANGES_NO_OBJECT,
    FlushWait,
    as_named,
    goes_through,
    name_by_bucket_etags,
    named_by_copy,
    written_through,
)
from gateway.operations.writeback.put_object import buffer_put
from gateway.operations.writeback.uploads import buffer_abort, buffer_create, list_buffered_parts
from gateway.operations.writeback.write_back_policy import (
    Reason,
    check_condition,
    may_be_deleted_here,
    refuse_unless_kept_here,
)
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import (
    BUCKET_SUBRESOURCES,
    Operation,
    is_form,
    is_preflight,
    may_store_object,
    names_foreign_source,
    parse_copy_source,
    with_hoisted_headers,
)
from gateway.writeback.bounds import Bound
from gateway.writeback.journal.records import State

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

_READS: Mapping[Operation, Callable[[VersionSource], Answer]] = {
    Operation.GET_OBJECT: get_object,
    Operation.HEAD_OBJECT: head_object_and_warm,
}

_LISTINGS = frozenset({Operation.LIST_OBJECTS, Operation.LIST_OBJECTS_V2})


def perform(context: RequestContext) -> Answer:
    """Carry out the operation of the request: now if nothing must be waited for, the rest when awaited."""
    if is_preflight(context.request):
        return forward_preflight(context)
    return authorized_by_origin(context, _allowed) if context.services.slots.any_by_origin else _allowed(context)


def _allowed(context: RequestContext) -> Answer:
    """Answer a request whose caller may have an answer."""
    services = context.services
    if services.homes.by_bucket and context.request.method not in READ_METHODS:
        _check_homes(context)
    if services.writeback is not None:
        answer = _buffered_answer(context, services.writeback)
        if answer is not None:
            return answer
    elif services.buffer_closed:
        _check_without_buffer(context)
    return _origin_answer(context)


def _check_homes(context: RequestContext) -> None:
    """Refuse a copy between different homes (S3Error NotImplemented): the target's may have another source bucket."""
    headers, homes = context.request.headers, context.services.homes
    copied = headers.get("x-amz-copy-source")
    if copied is not None:
        # Origins read a plus sign in two ways.
        buckets = {parse_copy_source(text).key.bucket for text in {copied, copied.replace("+", "%2B")}}
        if all(homes.are_one(context.request.bucket or "", bucket) for bucket in buckets):
            return
    elif not names_foreign_source(headers):
        return
    raise s3_error(
        "NotImplemented",
        "The source and the target of this copy are at different origins, and neither of them can carry it out. "
        "Read the source and write the target instead."
        if copied is not None
        else "Buckets of this gateway are at different origins: a copy must name its source in x-amz-copy-source.",
    )


# The origin


def _origin_answer(context: RequestContext) -> Answer:
    """Answer when nothing pending matters any more."""
    if context.services.slots.any_frozen:
        answer = _by_snapshot(context)
        if answer is not None:
            return answer
    return _by_origin(context)


def _by_origin(context: RequestContext) -> Answer:
    read = _READS.get(context.request.operation)
    return read(CurrentVersions(context)) if read is not None else _HANDLERS[context.request.operation](context)


async def _passthrough(context: RequestContext) -> Response:
    """Forward an operation that Forebay does not handle itself."""
    return await (forwarded_read(context) if context.request.method in READ_METHODS else forward_write(context))


_HANDLERS: Mapping[Operation, Callable[[RequestContext], Answer]] = {
    Operation.LIST_BUCKETS: list_buckets,
    Operation.CREATE_BUCKET: create_bucket,
    Operation.HEAD_BUCKET: bucket_answer,
    Operation.GET_BUCKET_LOCATION: bucket_answer,
    Operation.GET_BUCKET_VERSIONING: bucket_answer,
    Operation.GET_BUCKET_ENCRYPTION: bucket_answer,
    Operation.GET_BUCKET_TAGGING: bucket_answer,
    Operation.GET_OBJECT_LOCK_CONFIGURATION: bucket_answer,
    Operation.LIST_OBJECTS: list_objects,
    Operation.LIST_OBJECTS_V2: list_objects,
    Operation.LIST_MULTIPART_UPLOADS: forward,
    Operation.LIST_PARTS: forward,
    Operation.PUT_OBJECT: forward_write,
    Operation.COPY_OBJECT: forward_write,
    Operation.DELETE_OBJECT: forward_write,
    Operation.DELETE_OBJECTS: delete_objects,
    Operation.CREATE_MULTIPART_UPLOAD: forward,
    Operation.UPLOAD_PART: forward,
    Operation.UPLOAD_PART_COPY: forward,
    Operation.COMPLETE_MULTIPART_UPLOAD: complete_multipart_upload,
    Operation.ABORT_MULTIPART_UPLOAD: forward,
    Operation.FORWARD: _passthrough,
}


# Snapshots: writes into frozen slots were refused before


def _by_snapshot(context: RequestContext) -> Answer | None:
    """Answer a request about something that a snapshot freezes; None: nothing is frozen."""
    request = context.request
    if request.operation in (Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY):
        slot = frozen_source(context)
        return _copied_from_snapshot(context, slot) if slot is not None else None
    if request.key is not None:
        if context.slot.consistency != "snapshot" or request.method == "OPTIONS":
            return None
        if request.operation in _READS:
            snapshot = context.services.snapshots.of(context.slot)
            if snapshot is None:
                return _read_when_opened(context)
            return _READS[request.operation](SnapshotVersions(context, snapshot))
        is_of_present_state = request.operation is Operation.FORWARD
    else:
        is_of_present_state = request.operation is Operation.FORWARD and request.parameter("versions") is not None
        is_of_present_state = is_of_present_state and request.method in READ_METHODS and _is_frozen_under(context)
    if is_of_present_state:
        raise s3_error("NotImplemented", "A snapshot freezes this slot, and cannot answer this request.")
    return None


def _is_frozen_under(context: RequestContext) -> bool:
    bucket, prefix = context.request.bucket or "", context.request.parameter("prefix") or ""
    return any(slot.consistency == "snapshot" for slot in context.services.slots.under(bucket, prefix))


async def _read_when_opened(context: RequestContext) -> Response:
    snapshot = await context.services.snapshots.opened(context.slot)
    return await _awaited(_READS[context.request.operation](SnapshotVersions(context, snapshot)))


async def _copied_from_snapshot(context: RequestContext, slot: Slot) -> Response:
    await pin_source(context, slot)
    return await _awaited(_by_origin(context))


# The write-back buffer

_Buffered = Callable[[RequestContext, "WritebackBuffer"], Coroutine[Any, Any, Response]]

_OF_OPEN_UPLOADS: Mapping[Operation, _Buffered] = {
    Operation.UPLOAD_PART: buffer_part,
    Operation.COMPLETE_MULTIPART_UPLOAD: buffer_complete,
    Operation.ABORT_MULTIPART_UPLOAD: buffer_abort,
    Operation.LIST_PARTS: list_buffered_parts,
}
"""Requests about an upload go where its Create went, whatever the slot says now."""

_BUFFERED: Mapping[Operation, _Buffered] = {
    Operation.PUT_OBJECT: buffer_put,
    Operation.CREATE_MULTIPART_UPLOAD: buffer_create,
}


_JUDGED = frozenset({Operation.PUT_OBJECT, Operation.COPY_OBJECT, Operation.COMPLETE_MULTIPART_UPLOAD})
"""Operations with conditions that a pending write may fail."""

_OF_UPLOADS = frozenset({Operation.UPLOAD_PART, Operation.UPLOAD_PART_COPY, Operation.COMPLETE_MULTIPART_UPLOAD})


def _buffered_answer(context: RequestContext, buffer: WritebackBuffer) -> Answer | None:
    """Answer a request that concerns pending writes, or makes one; None: it does not."""
    request, operation = context.request, context.request.operation
    if request.key is None:
        return _of_bucket(context, buffer)
    if operation is Operation.FORWARD:
        request = context.request = with_hoisted_headers(request)
        operation = request.operation
    if operation is Operation.FORWARD and context.slot.is_buffered and may_store_object(request):
        refuse_unless_kept_here(Reason.HEADER if context.slot.write == "scratch" else None)
        goes_through(context, Reason.HEADER)
    if operation in _READS:
        key = context.object_key
        pending = buffer.pending(key) if buffer.may_be_pending(key) else None
        is_local = pending is not None and pending.state is State.LOCAL  # whatever its slot says now
        tells = is_local or (context.slot.write != "through" and tells_durability(context))
        if pending is None:
            return _read_past_the_buffer(context, buffer, tells=tells)
        if is_answered_here(request) and (context.signed_by is None or context.may_read):
            read = _READS[operation](PendingVersions(context, buffer, pending))
            return with_durability(read, is_durable=False) if tells else read
        flushed = _when_flushed(context, buffer, [context.object_key])
        return with_durability(flushed, is_durable=True) if tells else flushed
    if operation in _JUDGED and context.signed_by is None:
        check_condition(context, buffer)
    if "x-amz-rename-source" in request.headers or is_form(request):  # names a key in a way not read here
        return _when_all_flushed(context, buffer)
    if context.signed_by is not None:
        return _in_the_callers_name(context, buffer)
    if request.parameter("uploadId") and is_known(context, buffer):
        answer = _of_upload(context, buffer)
        if answer is not None:
            return answer
    elif operation is Operation.DELETE_OBJECT and may_be_deleted_here(request):
        if buffer.pending(context.object_key) is not None:
            return delete_pending(context, buffer)
    elif operation in _BUFFERED and context.slot.is_buffered:
        return _BUFFERED[operation](context, buffer)
    elif operation in _OF_UPLOADS and context.slot.is_buffered:
        goes_through(context, Reason.UPLOAD)
    elif operation is Operation.COPY_OBJECT:
        source = copied_here(context, buffer)
        if source is not None:

            def leave() -> Awaitable[Response]:
                return _when_flushed(context, buffer, _pending_keys(context, buffer))

            return buffer_copy(context, buffer, source, leave)
    pending_keys = _pending_keys(context, buffer)
    if pending_keys or _is_write_past_the_buffer(context):
        return _when_flushed(context, buffer, pending_keys)
    name_by_bucket_etags(context, buffer)
    return None


def _read_past_the_buffer(context: RequestContext, buffer: WritebackBuffer, *, tells: bool) -> Answer | None:
    """Answer a GET or HEAD of an object that is not pending; None: the buffer has nothing to add."""
    named = name_by_bucket_etags(context, buffer) if context.slot.is_buffered else None
    if named is None and not tells:
        return None
    answer = _origin_answer(context)
    if named is not None:
        answer = as_named(answer, named)
    if tells:
        key = context.object_key
        answer = with_durability(answer, is_durable=not buffer.look(lambda tx: tx.checkpoints.is_rest_pending(key)))
    return answer


def _in_the_callers_name(context: RequestContext, buffer: WritebackBuffer) -> Answer | None:
    """Answer, as `_buffered_answer`, a request other than a read that the origin judges: nothing is done here for it.

    Pending writes were acknowledged when the slot had another `authorization`, or belong to a copy's target.
    """
    if context.request.parameter("uploadId") and is_known(context, buffer):
        raise s3_error(
            "AccessDenied",
            'This upload was begun before its slot got authorization = "origin". Begin another.',
        )
    if context.slot.is_buffered:
        goes_through(context, Reason.SOURCE)
    pending_keys = _pending_keys(context, buffer)
    if pending_keys or _is_write_past_the_buffer(context):
        return _when_flushed(context, buffer, pending_keys)
    return None


def _of_upload(context: RequestContext, buffer: WritebackBuffer) -> Answer | None:
    """Answer a request about an upload that is open here, or has ended here."""
    operation = context.request.operation
    if operation is Operation.FORWARD:
        # The origin knows the upload by another id: it would deny that there is one.
        raise s3_error(
            "NotImplemented",
            "This request has a parameter that Forebay does not know, and the upload is open on this node only.",
        )
    if operation is Operation.UPLOAD_PART_COPY:
        return buffer_part_copy(context, buffer, perform, _origin_answer)
    return _OF_OPEN_UPLOADS[operation](context, buffer) if operation in _OF_OPEN_UPLOADS else None


def _of_bucket(context: RequestContext, buffer: WritebackBuffer) -> Answer | None:
    """Answer a request without a key: it may be about everything in its bucket."""
    request = context.request
    if request.operation in _LISTINGS:
        if is_plain(request) or not may_be_merged(context):
            return None  # list_objects merges pending entries
        return _when_all_flushed(context, buffer)
    if request.operation is Operation.LIST_MULTIPART_UPLOADS:
        is_ours = is_plain(request) and may_concern_uploads(context, buffer)
        return list_uploads(context, buffer) if is_ours else None
    if request.bucket is not None and _is_about_all_objects(context):
        return _when_all_flushed(context, buffer)
    return None


def _is_about_all_objects(context: RequestContext) -> bool:
    """Tell whether the answer depends on objects, or changes them.

    So do ListObjectVersions, all that changes more than a setting of the bucket, such as DeleteBucket, and POST Object,
    which names its key in its body.
    """
    request = context.request
    if request.operation is not Operation.FORWARD:
        return False
    said = {name for name, _ in request.query}
    if request.method in READ_METHODS:
        return "versions" in said
    return is_form(request) or BUCKET_SUBRESOURCES.isdisjoint(said)


def _pending_keys(context: RequestContext, buffer: WritebackBuffer) -> list[ObjectKey]:
    """Return the keys of the request with pending writes: its own, and the source of a copy."""
    keys = [] if context.request.operation in CHANGES_NO_OBJECT else [context.object_key]
    source = context.request.headers.get("x-amz-copy-source")
    if source is not None:
        keys.append(parse_copy_source(source).key)
    return [key for key in keys if buffer.pending(key) is not None]


def _is_write_past_the_buffer(context: RequestContext) -> bool:
    request = context.request
    if request.key is None or request.method in READ_METHODS or request.operation in CHANGES_NO_OBJECT:
        return False
    return context.slot.is_buffered


async def _when_all_flushed(context: RequestContext, buffer: WritebackBuffer) -> Response:
    wait, bucket, prefix = FlushWait(context, buffer), context.request.bucket or "", context.request.parameter("prefix")
    try:
        if context.request.method in READ_METHODS and wait.is_needed(bucket, prefix or ""):
            await judge_wait_for_all(context)
        await wait.for_prefix(bucket, prefix or "", past_local=context.request.method not in ("DELETE", "POST"))
    except S3Error:
        await judge_wait_for_all(context)  # its refusal comes first
        raise
    return await _past_the_buffer_in_turn(context, buffer, wait)


async def _when_flushed(context: RequestContext, buffer: WritebackBuffer, keys: Sequence[ObjectKey]) -> Response:
    await judge_wait(context, keys)
    wait = FlushWait(context, buffer)
    await wait.for_keys(keys)
    return await _past_the_buffer_in_turn(context, buffer, wait)


async def _past_the_buffer_in_turn(context: RequestContext, buffer: WritebackBuffer, wait: FlushWait) -> Response:
    if not _is_write_past_the_buffer(context):
        return await _awaited(_origin_answer(context))
    await wait.for_turn(context.object_key)
    if context.request.operation is Operation.COPY_OBJECT:
        await wait.for_files(await named_by_copy(context, buffer))
    return await written_through(context, buffer, _awaited(_origin_answer(context)))


async def _awaited(answer: Answer) -> Response:
    return answer if isinstance(answer, Response) else await answer


def _check_without_buffer(context: RequestContext) -> None:
    """Raise S3Error ServiceUnavailable if a request may delete pending writes while the buffer's disk cannot be used.

    The origin takes writes meanwhile; it then has another object than a pending write expects, which becomes a conflict
    when the disk is back. Only a deletion leaves no trace: an object acknowledged before, and deleted at the origin
    alone, would come back with its flush.
    """
    operation = context.request.operation
    is_write = operation in _BUFFERED or operation in _JUDGED or operation in _OF_UPLOADS
    is_write = is_write or (operation is Operation.FORWARD and may_store_object(context.request))
    if is_write and context.slot.write == "scratch":
        raise s3_error(
            "ServiceUnavailable",
            "The disk of the write-back buffer cannot be used, and only it has what was written here.",
        )
    if is_write and context.slot.is_buffered:
        goes_through(context, Bound.DISK)
    if operation is Operation.DELETE_OBJECT:
        slots = [context.slot]
    elif operation is Operation.DELETE_OBJECTS:
        slots = list(context.services.slots.under(context.request.bucket or "", ""))
    else:
        return
    if any(slot.is_buffered for slot in slots):
        raise s3_error(
            "ServiceUnavailable",
            "The disk of the write-back buffer cannot be used: an object that it has acknowledged could come back "
            "after this deletion. Repair the disk and start the gateway again.",
        )
