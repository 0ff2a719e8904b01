"""DeleteObject and DeleteObjects (S3 API): every key within the caller's rights is deleted.

Pending objects get a tombstone first, so that no late flush brings them back. It waits for what may just be reaching
the origin, deletes there, and is settled; then the answer goes out. While the origin is away, clients are told to try
again, and the object is gone here meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.core.errors import BufferUnavailable, InConflict, OriginAnswered, OriginBodyError, S3Error
from gateway.core.model import ObjectKey
from gateway.core.steps import in_steps
from gateway.operations.context import RequestContext, Response, s3_error_of
from gateway.operations.origin_rights import judge_deletions
from gateway.operations.passthrough import onward_request, streamed_reply
from gateway.operations.payload import Payload, receive_document
from gateway.operations.visibility import changed_keys, with_invalidation
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
from gateway.writeback.journal.records import ExpectedVersion, Write, WriteSpec

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


async def delete_objects(context: RequestContext) -> Response:
    """Delete up to 1,000 objects; keys outside the caller's rights come back as AccessDenied, the others go.

    What is pending on this node goes first, so that no late flush brings it back.
    """
    body = await receive_document(context, DELETE_SIZE_BYTES_MAX)
    asked = await in_steps(parse_delete(body))
    context.named_keys = [entry.key for entry in asked.objects]
    await asyncio.sleep(0)  # yield between steps that each handle a thousand keys
    refused = _refused(context, asked)
    refused_keys = {error.key for error in refused}
    kept = [entry for entry in asked.objects if entry.key not in refused_keys]
    await asyncio.sleep(0)
    refusals = await judge_deletions(context, [entry.key for entry in kept])
    if refusals:
        refused += [_as_error(entry, refusals[entry.key]) for entry in kept if entry.key in refusals]
        kept = [entry for entry in kept if entry.key not in refusals]
    buried = await _bury(context, kept)
    await asyncio.sleep(0)
    done = _Done([*refused, *buried.errors], () if asked.quiet else buried.deleted)
    left = buried.left
    if not left:
        empty = document("DeleteResult", "")
        return Response(
            200, [("content-type", "application/xml")], insert_delete_results(empty, done.errors, done.deleted)
        )
    keys = [entry.key for entry in left]
    if len(left) == len(asked.objects):
        sending = _send(context, Payload(body))
    else:
        sending = _delete_some(context, DeleteRequest(left, asked.quiet), done)
    reply = await _written_down(context, left, with_invalidation(changed_keys(context, keys), sending))
    await _forget(context, keys)
    return reply


async def _written_down(
    context: RequestContext, entries: Sequence[DeleteEntry], delete: Coroutine[Any, Any, Response]
) -> Response:
    buffer = context.services.writeback
    return await (delete if buffer is None else deleted_through(context, buffer, entries, delete))


class _Done(NamedTuple):
    """The keys that the origin is not asked about, with their answers."""

    errors: Sequence[DeleteError]
    deleted: Sequence[str]


async def _bury(context: RequestContext, entries: Sequence[DeleteEntry]) -> DeleteOutcome:
    buffer = context.services.writeback
    is_of_origin = context.signed_by is not None  # the origin judges all; it has what was pending
    return (
        DeleteOutcome(entries) if buffer is None or is_of_origin else await write_tombstones(context, buffer, entries)
    )


def _as_error(entry: DeleteEntry, refusal: OriginAnswered) -> DeleteError:
    """Return the refusal in the origin's code; its words may be about a read."""
    return DeleteError(entry.key, entry.version_id, error_code_of(refusal.body) or "AccessDenied", "Access Denied")


def _refused(context: RequestContext, asked: DeleteRequest) -> list[DeleteError]:
    bucket = context.request.bucket or ""
    refused = []
    for entry in asked.objects:
        reason = refusal_of_write(context.grant, context.services.slots, bucket, entry.key)
        if reason is not None:
            refused.append(DeleteError(entry.key, entry.version_id, "AccessDenied", f"Access Denied. {reason}"))
    return refused


async def _send(context: RequestContext, payload: Payload) -> Response:
    request = replace(onward_request(context, payload), keys=context.named_keys)
    response = await context.services.origin.send(request)
    return streamed_reply(response, head_only=False)


async def _delete_some(context: RequestContext, left: DeleteRequest, done: _Done) -> Response:
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
        merged = insert_delete_results(result, done.errors, done.deleted)
    except ValueError:
        raise OriginBodyError("the origin's answer to DeleteObjects is no DeleteResult") from None
    return Response(200, without(filter_response_headers(response.headers), "content-length"), merged, "forwarded")


async def _forget(context: RequestContext, keys: Iterable[str]) -> None:
    bucket = context.request.bucket or ""
    for number, key in enumerate(keys):
        if number % 100 == 0:
            await asyncio.sleep(0)  # yield between look-ups in the index
        await context.services.blocks.invalidate(ObjectKey(bucket, key))


async def delete_pending(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Carry out a DeleteObject of a key with a pending write."""
    await write_tombstone(context, buffer, [context.object_key])
    return Response(204, cache="absorbed")


async def write_tombstone(context: RequestContext, buffer: WritebackBuffer, keys: Sequence[ObjectKey]) -> None:
    """Delete these keys, which have pending writes, here at once, and return when the origin has, too."""
    wait = FlushWait(context, buffer)
    for key, tombstone in [(key, await _acknowledge(context, buffer, key)) for key in keys]:
        if tombstone is not None:
            await wait.for_write(key, tombstone.sequence)


class DeleteOutcome(NamedTuple):
    """The entries of a DeleteObjects that are `left` for the origin, and the results of the others."""

    left: Sequence[DeleteEntry]
    deleted: Sequence[str] = ()
    errors: Sequence[DeleteError] = ()


async def write_tombstones(
    context: RequestContext, buffer: WritebackBuffer, entries: Sequence[DeleteEntry]
) -> DeleteOutcome:
    """Delete the pending objects of a DeleteObjects: all of them here first, then one after the other at the origin.

    Versions, conditional deletions, and all of a request that names an owner, or anything else that only the origin can
    judge, are left to it, once it has the pending writes.
    """
    bucket, is_ours = context.request.bucket or "", may_be_deleted_here(context.request)
    wait = FlushWait(context, buffer)
    plain = [ObjectKey(bucket, one.key) for one in entries if is_ours and _is_plain(one)]
    tombstones = await _tombstones(context, buffer, plain)
    left, deleted, errors = list[DeleteEntry](), list[str](), list[DeleteError]()
    for entry in entries:
        key = ObjectKey(bucket, entry.key)
        is_buried = _is_plain(entry) and key in tombstones
        tombstone = tombstones.get(key) if is_buried else None
        try:
            if isinstance(tombstone, S3Error):
                raise tombstone
            if tombstone is not None:
                await wait.for_write(key, tombstone.sequence)
            if not is_buried:
                await wait.for_turn(key)
        except S3Error as error:
            errors.append(DeleteError(entry.key, entry.version_id, error.code, error.message))
        else:
            (deleted.append(entry.key) if is_buried else left.append(entry))
    return DeleteOutcome(left, deleted, errors)


def _is_plain(entry: DeleteEntry) -> bool:
    return entry == DeleteEntry(entry.key)


async def _tombstones(
    context: RequestContext, buffer: WritebackBuffer, keys: Iterable[ObjectKey]
) -> dict[ObjectKey, Write | S3Error | None]:
    pending = list(dict.fromkeys(key for key in keys if buffer.pending(key) is not None))
    buried = await asyncio.gather(*(_acknowledge(context, buffer, key) for key in pending), return_exceptions=True)
    found: dict[ObjectKey, Write | S3Error | None] = {}
    for key, tombstone in zip(pending, buried, strict=True):
        if isinstance(tombstone, BaseException) and not isinstance(tombstone, (S3Error, BufferUnavailable)):
            raise tombstone
        found[key] = s3_error_of(tombstone) if isinstance(tombstone, Exception) else tombstone
    return found


async def _acknowledge(context: RequestContext, buffer: WritebackBuffer, key: ObjectKey) -> Write | None:
    """Replace a pending write by a tombstone; return None if the origin has nothing of it.

    BufferUnavailable when the disk does not take it, S3Error OperationAborted when a person must decide first.
    """
    spec = WriteSpec(key, {}, context.services.slots.find(key.bucket, key.key).name)
    now = context.services.clock.now()
    tombstone = Write(spec, ExpectedVersion.unknown(context.services.clock), now, deleted=True, acknowledged_at=now)
    try:
        return await buffer.write_tombstone(tombstone)
    except InConflict as error:
        raise conflict(str(key)) from error
