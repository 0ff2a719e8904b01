"""Chooses the handler that answers a request: the table of contents of this package.

    may the caller have an answer, if the origin judges that (origin_rights.py)?
    have other nodes of the cluster written what it is about (other_nodes.py)?
    the write-back buffer, if the request concerns it → a snapshot, if one freezes its object → the origin

In each of the last three the rules are asked in order, and the first that holds answers. Requests about something
pending that only the origin can answer wait until it has all that this node has acknowledged for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from gateway.core.errors import RegistryAway, S3Error
from gateway.core.model import ObjectKey
from gateway.operations.buckets import bucket_answer, create_bucket, list_buckets
from gateway.operations.cluster_writes import ClusterWrites
from gateway.operations.context import Answer, RequestContext, Response, awaited
from gateway.operations.current_versions import CurrentVersions
from gateway.operations.delete_objects import delete_objects, delete_pending
from gateway.operations.list_objects import forwarded_read, list_objects, may_be_merged
from gateway.operations.list_uploads import list_uploads, may_concern_uploads
from gateway.operations.origin_rights import authorized_by_origin, judge_wait, judge_wait_for_all
from gateway.operations.other_nodes import of_other_nodes
from gateway.operations.passthrough import (
    complete_multipart_upload,
    forward,
    forward_preflight,
    forward_write,
    is_plain,
)
from gateway.operations.pending_versions import PendingVersions, is_answered_here, tells_durability, with_durability
from gateway.operations.read_object import VersionSource, get_object
from gateway.operations.snapshot_versions import SnapshotVersions, frozen_source, pin_source
from gateway.operations.warm_up import head_object_and_warm
from gateway.operations.writeback.copies import buffer_copy, buffer_part_copy
from gateway.operations.writeback.parts import buffer_part, is_known
from gateway.operations.writeback.past_the_buffer import (
    FlushWait,
    as_named,
    for_other_nodes,
    goes_through,
    name_by_bucket_etags,
    names_files,
    written_through,
)
from gateway.operations.writeback.put_object import buffer_put
from gateway.operations.writeback.uploads import buffer_abort, buffer_complete, buffer_create, list_buffered_parts
from gateway.operations.writeback.write_back_policy import (
    Reason,
    check_condition,
    may_be_deleted_here,
    refuse_unless_kept_here,
)
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import (
    CHANGES_NO_OBJECT,
    READ_METHODS,
    Operation,
    is_about_objects,
    is_form,
    is_preflight,
    may_store_object,
    names_foreign_source,
    parse_copy_source,
    with_hoisted_headers,
)
from gateway.writeback.bounds import Bound
from gateway.writeback.checkpoints.layouts import member_of, rules_of
from gateway.writeback.journal.buckets import LastOwnWrite
from gateway.writeback.journal.records import State
from gateway.writeback.pending_reader import FileGone

_READS: Mapping[Operation, Callable[[VersionSource], Answer]] = {
    Operation.GET_OBJECT: get_object,
    Operation.HEAD_OBJECT: head_object_and_warm,
}
_LISTINGS = frozenset({Operation.LIST_OBJECTS, Operation.LIST_OBJECTS_V2})
_WITH_CONDITIONS = frozenset({Operation.PUT_OBJECT, Operation.COPY_OBJECT, Operation.COMPLETE_MULTIPART_UPLOAD})
"""Operations with conditions that a pending write may fail."""


def perform(context: RequestContext) -> Answer:
    """Carry out the operation of the request: now if nothing must be waited for, the rest when awaited."""
    if is_preflight(context.request):
        return forward_preflight(context)
    return authorized_by_origin(context, _allowed) if context.services.slots.any_by_origin else _allowed(context)


def _allowed(context: RequestContext) -> Answer:
    """Answer a request whose caller may have an answer."""
    if context.services.cluster_writes is not None:
        answer = of_other_nodes(context, _answer)
        if answer is not None:
            return answer
    return _answer(context)


def _answer(context: RequestContext) -> Answer:
    """Answer by what this node and the origin have."""
    services = context.services
    if services.homes.by_bucket and context.request.method not in READ_METHODS:
        _check_homes(context)
    if services.writeback is not None:
        answer = _buffered_answer(context)
        if answer is not None:
            return answer
    elif services.buffer_closed:
        _check_without_buffer(context)
        if services.cluster_writes is not None:
            return _answer_beside_other_nodes(context)
    return _origin_answer(context)


def _answer_beside_other_nodes(context: RequestContext) -> Answer:
    """Answer while this node's buffer cannot be used, by what other nodes and the origin have."""
    request = context.request
    if request.operation is Operation.LIST_MULTIPART_UPLOADS:
        return _uploads(context) or _origin_answer(context)
    is_forwarded = request.operation is Operation.FORWARD and may_store_object(request)
    if request.key is not None and (request.operation in _WITH_CONDITIONS or is_forwarded):
        return _behind_other_nodes(context)
    return _origin_answer(context)


async def _behind_other_nodes(context: RequestContext) -> Response:
    """Store an object at the origin, behind what other nodes have pending if it is to come last."""
    await for_other_nodes(context, context.object_key)
    return await awaited(_origin_answer(context))


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


def _origin_answer(context: RequestContext) -> Answer:
    """Answer when nothing pending matters any more."""
    if context.services.slots.any_frozen:
        answer = _by_snapshot(context)
        if answer is not None:
            return answer
    return _by_origin(context)


class _AskedVersions(CurrentVersions):
    """The version that a question names which the origin was asked for this request already.

    Others may have learned it meanwhile. But the request's own question keeps every reader of these bytes waiting until
    it is read: a reader that did without it would wait for itself.
    """

    def known(self) -> None:
        return None


def _by_origin(context: RequestContext) -> Answer:
    operation = context.request.operation
    read = _READS.get(operation)
    if read is None:
        return _HANDLERS[operation].at_origin(context)
    is_asked = context.told is not None and context.told.question is not None
    return read(_AskedVersions(context) if is_asked else CurrentVersions(context))


async def _passthrough(context: RequestContext) -> Response:
    """Forward an operation that Forebay does not handle itself."""
    return await (forwarded_read(context) if context.request.method in READ_METHODS else forward_write(context))


# Snapshots: writes into frozen slots were refused before


def _by_snapshot(context: RequestContext) -> Answer | None:
    """Answer a request about something that a snapshot freezes; None: nothing is frozen."""
    request, slot, slots = context.request, context.slot, context.services.slots
    if request.operation in (Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY):
        return _copied_from_snapshot(context) if frozen_source(context) is not None else None
    if request.key is not None:
        is_frozen = slot.consistency == "snapshot" and request.method != "OPTIONS"
        if is_frozen and request.operation in _READS:
            opened = context.services.snapshots.of(slot)
            if opened is None:
                return _read_when_opened(context)
            return _READS[request.operation](SnapshotVersions(context, opened))
    else:
        under = slots.under(request.bucket or "", request.parameter("prefix") or "")
        is_frozen = request.method in READ_METHODS and request.parameter("versions") is not None
        is_frozen = is_frozen and any(one.consistency == "snapshot" for one in under)
    if is_frozen and request.operation is Operation.FORWARD:
        raise s3_error("NotImplemented", "A snapshot freezes this slot, and cannot answer this request.")
    return None


async def _read_when_opened(context: RequestContext) -> Response:
    opened = await context.services.snapshots.opened(context.slot)
    return await awaited(_READS[context.request.operation](SnapshotVersions(context, opened)))


async def _copied_from_snapshot(context: RequestContext) -> Response:
    await pin_source(context)
    return await awaited(_by_origin(context))


# The write-back buffer


def _buffered_answer(context: RequestContext) -> Answer | None:
    """Answer a request that concerns pending writes, or makes one; None: it does not."""
    request, is_buffered = context.request, context.slot.is_buffered
    if request.key is None:
        return _of_bucket(context)
    if request.operation is Operation.FORWARD:
        request = context.request = with_hoisted_headers(request)
    operation, is_ours = request.operation, context.signed_by is None
    if operation is Operation.FORWARD and is_buffered and may_store_object(request):
        refuse_unless_kept_here(context, Reason.HEADER)
        goes_through(context, Reason.HEADER)
    if operation in _READS:
        return _read(context)
    if is_ours and operation in _WITH_CONDITIONS:
        check_condition(context)
    if "x-amz-rename-source" in request.headers or is_form(request):  # names a key in a way not read here
        return _when_all_flushed(context)
    handlers, answer = _HANDLERS[operation], None
    if request.parameter("uploadId") and is_known(context):
        _check_upload(context)
        answer = handlers.of_upload_here(context) if handlers.of_upload_here is not None else None
    elif not is_ours:
        # The origin judges it: nothing is done here for it. Pending writes were acknowledged when the slot had another
        # `authorization`, or belong to a copy's target.
        if is_buffered:
            goes_through(context, Reason.SOURCE)
    elif operation is Operation.DELETE_OBJECT and may_be_deleted_here(request):
        answer = delete_pending(context) if context.buffer.pending(context.object_key) is not None else None
    elif is_buffered and handlers.absorbed is not None:
        answer = handlers.absorbed(context)
    if answer is not None:
        return answer
    pending_keys = _pending_keys(context)
    if pending_keys or _is_write_past_the_buffer(context):
        return _when_flushed(context, pending_keys)
    name_by_bucket_etags(context)
    return None


_READ_RACES_MAX = 64
"""Attempts at a read of a pending object, each with the write that is the last one by then."""


def _read(context: RequestContext, attempts_left: int = _READ_RACES_MAX) -> Answer | None:
    """Answer a GET or HEAD of an object; None: the buffer has nothing to add."""
    key, buffer, read = context.object_key, context.buffer, _READS[context.request.operation]
    pending = buffer.pending(key) if buffer.may_be_pending(key) else None
    is_local = pending is not None and pending.state is State.LOCAL  # whatever its slot says now
    tells = is_local or (context.slot.write != "through" and tells_durability(context))
    if pending is not None:
        is_here = is_answered_here(context.request) and (context.signed_by is None or context.may_read)
        answer = read(PendingVersions(context, pending)) if is_here else _when_flushed(context, [key])
        answer = with_durability(answer, is_durable=not is_here) if tells else answer
        return answer if isinstance(answer, Response) else _read_while_here(context, answer, attempts_left - 1)
    named = name_by_bucket_etags(context) if context.slot.is_buffered else None
    if named is None and not tells:
        return None
    if not tells:
        return _read_at_origin(context, named)
    is_durable, writes = not buffer.look(lambda tx: tx.checkpoints.is_rest_pending(key)), context.cluster_writes
    if is_durable and writes is not None and writes.asks(context.slot):
        return _read_told_over_nodes(context, writes, named)
    return with_durability(_read_at_origin(context, named), is_durable=is_durable)


def _read_at_origin(context: RequestContext, named: LastOwnWrite | None) -> Answer:
    answer = _origin_answer(context)
    return answer if named is None else as_named(answer, named)


async def _read_told_over_nodes(context: RequestContext, writes: ClusterWrites, named: LastOwnWrite | None) -> Response:
    """Answer for a marker that the origin has. It is durable if no node has more of its checkpoint than the origin."""
    key, is_durable = context.object_key, True
    if (member := member_of(key, rules_of(context.slot.checkpoints))) is not None:
        prefix = member.checkpoint.prefix
        is_durable = not context.buffer.look(lambda tx: tx.checkpoints.is_left(key.bucket, prefix))
        try:
            is_durable = is_durable and not await writes.is_checkpoint_left(key.bucket, prefix)
        except RegistryAway:  # nobody can say that it is
            is_durable = False
    return await awaited(with_durability(_read_at_origin(context, named), is_durable=is_durable))


async def _read_while_here(context: RequestContext, answer: Awaitable[Response], attempts_left: int) -> Response:
    """Return the answer of a read; if what was pending has gone before its first byte, look again who answers."""
    try:
        return await answer
    except FileGone:
        if not attempts_left:
            raise s3_error("SlowDown", "The object is overwritten faster than it can be read.") from None
    return await awaited(_read(context, attempts_left) or _origin_answer(context))


def _check_upload(context: RequestContext) -> None:
    """Refuse a request about an upload that is open here, or has ended here, if it cannot be about that."""
    if context.signed_by is not None:
        raise s3_error(
            "AccessDenied",
            'This upload was begun before its slot got authorization = "origin". Begin another.',
        )
    if context.request.operation is Operation.FORWARD:
        # The origin knows the upload by another id: it would deny that there is one.
        raise s3_error(
            "NotImplemented",
            "This request has a parameter that Forebay does not know, and the upload is open on this node only.",
        )


def _of_bucket(context: RequestContext) -> Answer | None:
    """Answer a request without a key: it may be about everything in its bucket."""
    request = context.request
    if request.operation in _LISTINGS:
        if is_plain(request) or not may_be_merged(context):
            return None  # list_objects merges pending entries
        return _when_all_flushed(context)
    if request.operation is Operation.LIST_MULTIPART_UPLOADS:
        return _uploads(context)
    return _when_all_flushed(context) if is_about_objects(request) else None


def _uploads(context: RequestContext) -> Answer | None:
    """Answer ListMultipartUploads; None: no node may have uploads there."""
    return list_uploads(context) if is_plain(context.request) and may_concern_uploads(context) else None


def _pending_keys(context: RequestContext) -> list[ObjectKey]:
    """Return the keys of the request with pending writes: its own, and the source of a copy."""
    keys = [] if context.request.operation in CHANGES_NO_OBJECT else [context.object_key]
    source = context.request.headers.get("x-amz-copy-source")
    if source is not None:
        keys.append(parse_copy_source(source).key)
    return [key for key in keys if context.buffer.pending(key) is not None]


def _is_write_past_the_buffer(context: RequestContext) -> bool:
    request = context.request
    if request.key is None or request.method in READ_METHODS or request.operation in CHANGES_NO_OBJECT:
        return False
    return context.slot.is_buffered


async def _when_all_flushed(context: RequestContext) -> Response:
    wait, bucket, prefix = FlushWait(context), context.request.bucket or "", context.request.parameter("prefix") or ""
    try:
        if context.request.method in READ_METHODS and wait.is_needed(bucket, prefix):
            await judge_wait_for_all(context)
        await wait.for_prefix(bucket, prefix, past_local=context.request.method not in ("DELETE", "POST"))
    except S3Error:
        await judge_wait_for_all(context)  # its refusal comes first
        raise
    return await _past_the_buffer_in_turn(context, wait)


async def _when_flushed(context: RequestContext, keys: Sequence[ObjectKey]) -> Response:
    await judge_wait(context, keys)
    wait = FlushWait(context)
    await wait.for_keys(keys)
    return await _past_the_buffer_in_turn(context, wait)


async def _past_the_buffer_in_turn(context: RequestContext, wait: FlushWait) -> Response:
    if not _is_write_past_the_buffer(context):
        return await awaited(_origin_answer(context))
    await wait.for_turn(context.object_key)
    if context.request.operation is Operation.COPY_OBJECT and names_files(context):
        await wait.for_files_of_source()
    return await written_through(context, awaited(_origin_answer(context)))


def _copy(context: RequestContext) -> Answer | None:
    return buffer_copy(context, lambda: _when_flushed(context, _pending_keys(context)))


def _part_copy(context: RequestContext) -> Answer:
    return buffer_part_copy(context, perform, _origin_answer)


def _not_begun_here(context: RequestContext) -> None:
    goes_through(context, Reason.UPLOAD)


def _check_without_buffer(context: RequestContext) -> None:
    """Raise S3Error ServiceUnavailable if a request may delete pending writes while the buffer's disk cannot be used.

    The origin takes writes meanwhile; it then has another object than a pending write expects, which becomes a conflict
    when the disk is back. Only a deletion leaves no trace: an object acknowledged before, and deleted at the origin
    alone, would come back with its flush.
    """
    operation, slots = context.request.operation, [context.slot]
    is_write = operation not in _READS and _HANDLERS[operation].absorbed is not None
    is_write = is_write or (operation is Operation.FORWARD and may_store_object(context.request))
    if is_write and context.slot.write == "scratch":
        raise s3_error(
            "ServiceUnavailable",
            "The disk of the write-back buffer cannot be used, and only it has what was written here.",
        )
    if is_write and context.slot.is_buffered:
        goes_through(context, Bound.DISK)
    if operation is Operation.DELETE_OBJECTS:
        slots = list(context.services.slots.under(context.request.bucket or "", ""))
    elif operation is not Operation.DELETE_OBJECT:
        return
    if any(slot.is_buffered for slot in slots):
        raise s3_error(
            "ServiceUnavailable",
            "The disk of the write-back buffer cannot be used: an object that it has acknowledged could come back "
            "after this deletion. Repair the disk and start the gateway again.",
        )


class _Handlers(NamedTuple):
    """The functions that answer an operation other than a read; None: the buffer has no part in it."""

    at_origin: Callable[[RequestContext], Answer]
    absorbed: Callable[[RequestContext], Answer | None] | None = None
    """For a slot that writes back. It may return None, too."""
    of_upload_here: Callable[[RequestContext], Answer] | None = None
    """For an upload that the journal knows: such requests go where its Create went, whatever the slot says now."""


_HANDLERS: Mapping[Operation, _Handlers] = {
    Operation.LIST_BUCKETS: _Handlers(list_buckets),
    Operation.CREATE_BUCKET: _Handlers(create_bucket),
    Operation.HEAD_BUCKET: _Handlers(bucket_answer),
    Operation.GET_BUCKET_LOCATION: _Handlers(bucket_answer),
    Operation.GET_BUCKET_VERSIONING: _Handlers(bucket_answer),
    Operation.GET_BUCKET_ENCRYPTION: _Handlers(bucket_answer),
    Operation.GET_BUCKET_TAGGING: _Handlers(bucket_answer),
    Operation.GET_OBJECT_LOCK_CONFIGURATION: _Handlers(bucket_answer),
    Operation.LIST_OBJECTS: _Handlers(list_objects),
    Operation.LIST_OBJECTS_V2: _Handlers(list_objects),
    Operation.LIST_MULTIPART_UPLOADS: _Handlers(forward),
    Operation.PUT_OBJECT: _Handlers(forward_write, buffer_put),
    Operation.COPY_OBJECT: _Handlers(forward_write, _copy),
    Operation.DELETE_OBJECT: _Handlers(forward_write),
    Operation.DELETE_OBJECTS: _Handlers(delete_objects),
    Operation.CREATE_MULTIPART_UPLOAD: _Handlers(forward, buffer_create),
    Operation.UPLOAD_PART: _Handlers(forward, _not_begun_here, buffer_part),
    Operation.UPLOAD_PART_COPY: _Handlers(forward, _not_begun_here, _part_copy),
    Operation.LIST_PARTS: _Handlers(forward, None, list_buffered_parts),
    Operation.COMPLETE_MULTIPART_UPLOAD: _Handlers(complete_multipart_upload, _not_begun_here, buffer_complete),
    Operation.ABORT_MULTIPART_UPLOAD: _Handlers(forward, None, buffer_abort),
    Operation.FORWARD: _Handlers(_passthrough),
}
