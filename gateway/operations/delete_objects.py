"""DeleteObject and DeleteObjects (S3 API): every key within the caller's rights is deleted.

Pending objects get a tombstone first, so that no late flush brings them back. It waits for what may just be reaching
the origin, deletes there, and is settled; then the answer goes out. While the origin is away, clients are told to try
again, and the object is gone here meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gateway.core.errors import BufferUnavailable, InConflict, OriginBodyError, RegistryAway, S3Error
from gateway.core.model import ObjectKey
from gateway.core.steps import in_steps
from gateway.operations.context import RequestContext, Response, s3_error_of, xml_response
from gateway.operations.origin_rights import judge_deletions
from gateway.operations.other_nodes import Claimed, claimed
from gateway.operations.passthrough import onward_request, streamed_reply
from gateway.operations.payload import Payload, receive_document
from gateway.operations.visibility import changed_by, changed_keys, with_invalidation
from gateway.operations.writeback.past_the_buffer import FlushWait, conflict, deleted_through
from gateway.operations.writeback.write_back_policy import may_be_deleted_here
from gateway.policy.slots import refusal_of_write
from gateway.s3.headers import filter_request_headers, filter_response_headers, without
from gateway.s3.xml import (
    DELETE_RESULT_BYTES_MAX,
    DELETE_SIZE_BYTES_MAX,
    DeleteEntry,
    DeleteError,
    DeleteRequest,
    delete_request_document,
    error_code_of,
    insert_delete_results,
    parse_delete,
)
from gateway.s3.xml_writer import document
from gateway.writeback.journal.records import ExpectedVersion, State, Write, WriteSpec


async def delete_objects(context: RequestContext) -> Response:
    """Delete up to 1,000 objects; keys outside the caller's rights come back as AccessDenied, the others go.

    What is pending on this node goes first, so that no late flush brings it back.
    """
    body = await receive_document(context, DELETE_SIZE_BYTES_MAX)
    asked = await in_steps(parse_delete(body))
    context.named_keys = [entry.key for entry in asked.objects]
    await asyncio.sleep(0)  # yield between steps that each handle a thousand keys
    bucket, slots, errors = context.request.bucket or "", context.services.slots, list[DeleteError]()
    kept = list[DeleteEntry]()
    for entry in asked.objects:
        reason = refusal_of_write(context.grant, slots, bucket, entry.key)
        if reason is None:
            kept.append(entry)
        else:
            errors.append(DeleteError(entry.key, entry.version_id, "AccessDenied", f"Access Denied. {reason}"))
    await asyncio.sleep(0)
    refusals = await judge_deletions(context, [entry.key for entry in kept])
    for entry in kept if refusals else ():
        if (refusal := refusals.get(entry.key)) is not None:  # in the origin's code; its words may be about a read
            code = error_code_of(refusal.body) or "AccessDenied"
            errors.append(DeleteError(entry.key, entry.version_id, code, "Access Denied"))
    left: Sequence[DeleteEntry] = [entry for entry in kept if entry.key not in refusals]
    deleted: Sequence[str] = ()
    if context.services.writeback is not None and context.signed_by is None:  # else the origin has what was pending
        left, deleted = await _write_tombstones(context, left, errors)
    await asyncio.sleep(0)
    deleted = () if asked.quiet else deleted
    if not left:
        return xml_response(insert_delete_results(document("DeleteResult", ""), errors, deleted))
    keys = [entry.key for entry in left]
    if len(left) == len(asked.objects):
        sending = _send(context, Payload(body))
    else:
        sending = _delete_some(context, DeleteRequest(left, asked.quiet), errors, deleted)
    deleting = with_invalidation(changed_keys(context, keys), sending)
    reply = await (deleting if context.services.writeback is None else deleted_through(context, left, deleting))
    for number, key in enumerate(keys):
        if number % 100 == 0:
            await asyncio.sleep(0)  # yield between look-ups in the index
        await context.services.blocks.invalidate(ObjectKey(bucket, key))
    return reply


async def _send(context: RequestContext, payload: Payload) -> Response:
    request = replace(onward_request(context, payload), keys=context.named_keys)
    response = await context.services.origin.send(request)
    return streamed_reply(response, head_only=False)


async def _delete_some(
    context: RequestContext, left: DeleteRequest, errors: Sequence[DeleteError], deleted: Sequence[str]
) -> Response:
    """Send a part of the request, and answer for the rest. It has new digests."""
    headers = {
        name: value
        for name, value in filter_request_headers(context.request.headers).items()
        if name != "content-md5" and not name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum-"))
    }
    body = delete_request_document(left)
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    headers["content-md5"] = base64.b64encode(digest).decode()
    request = onward_request(context, Payload(body), headers=headers)
    response = await context.services.origin.send(replace(request, keys=[entry.key for entry in left.objects]))
    if response.status != 200:
        return streamed_reply(response, head_only=False)
    async with response:
        result = await response.read(DELETE_RESULT_BYTES_MAX)
    try:
        merged = insert_delete_results(result, errors, deleted)
    except ValueError:
        raise OriginBodyError("the origin's answer to DeleteObjects is no DeleteResult") from None
    return Response(200, without(filter_response_headers(response.headers), "content-length"), merged, "forwarded")


async def delete_pending(context: RequestContext) -> Response:
    """Carry out a DeleteObject of a key with a pending write: here at once, and return when the origin has, too.

    If the key is written again first, the deletion is over: a client told to repeat it would delete that write.
    """
    tombstone = await _acknowledge(context, context.object_key)
    if tombstone is not None:
        await FlushWait(context).for_write(context.object_key, tombstone.sequence, past=tuple(State))
    await changed_by(context).forget_everywhere()
    return Response(204, cache="absorbed")


async def _write_tombstones(
    context: RequestContext, entries: Sequence[DeleteEntry], errors: list[DeleteError]
) -> tuple[Sequence[DeleteEntry], Sequence[str]]:
    """Delete the pending objects of a DeleteObjects: all of them here first, then one after the other at the origin.

    Return the entries left for the origin, and the deleted keys; add to `errors`. Versions, conditional deletions, and
    all of a request that names an owner, or anything else that only the origin can judge, are left to it, once it has
    the pending writes.
    """
    bucket, is_ours = context.request.bucket or "", may_be_deleted_here(context.request)
    wait = FlushWait(context)
    tombstones = await _tombstones(
        context, [ObjectKey(bucket, one.key) for one in entries if is_ours and _is_plain(one)]
    )
    left, deleted = list[DeleteEntry](), list[str]()
    for entry in entries:
        key = ObjectKey(bucket, entry.key)
        is_buried = _is_plain(entry) and key in tombstones
        tombstone = tombstones.get(key) if is_buried else None
        try:
            if isinstance(tombstone, S3Error):
                raise tombstone
            if tombstone is not None:
                await wait.for_write(key, tombstone.sequence, past=tuple(State))
            if not is_buried:
                await wait.for_turn(key)
        except S3Error as error:
            errors.append(DeleteError(entry.key, entry.version_id, error.code, error.message))
        else:
            (deleted.append(entry.key) if is_buried else left.append(entry))
    await changed_keys(context, deleted).forget_everywhere()
    return left, deleted


def _is_plain(entry: DeleteEntry) -> bool:
    return entry == DeleteEntry(entry.key)


async def _tombstones(context: RequestContext, keys: Iterable[ObjectKey]) -> dict[ObjectKey, Write | S3Error | None]:
    pending = list(dict.fromkeys(key for key in keys if context.buffer.pending(key) is not None))
    buried = await asyncio.gather(*(_acknowledge(context, key) for key in pending), return_exceptions=True)
    found: dict[ObjectKey, Write | S3Error | None] = {}
    for key, tombstone in zip(pending, buried, strict=True):
        if isinstance(tombstone, BaseException) and not isinstance(tombstone, (S3Error, BufferUnavailable)):
            raise tombstone
        found[key] = s3_error_of(tombstone) if isinstance(tombstone, Exception) else tombstone
    return found


async def _acknowledge(context: RequestContext, key: ObjectKey) -> Write | None:
    """Replace a pending write by a tombstone; return None if the origin has nothing of it.

    BufferUnavailable when the disk does not take it, S3Error OperationAborted when a person must decide first.
    """
    spec = WriteSpec(key, {}, context.services.slots.find(key.bucket, key.key).name)
    now = context.services.clock.now()
    tombstone = Write(spec, ExpectedVersion.unknown(context.services.clock), now, deleted=True, acknowledged_at=now)
    try:
        try:
            claim = await claimed(context, now, key)
        except RegistryAway:
            claim = Claimed()  # the write that it replaces has one
        async with claim:
            written = await context.buffer.write_tombstone(replace(tombstone, order=claim.order))
        if written is None:
            await claim.release()
        return written
    except InConflict as error:
        raise conflict(str(key)) from error
