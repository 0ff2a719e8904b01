"""Deletes pending objects: a tombstone first, so that no late flush brings them back; then the origin.

The tombstone waits for what may just be reaching the origin, deletes there, and is settled; then the answer goes out.
While the origin is away, clients are told to try again, and the object is gone here meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gateway.core.errors import BufferUnavailable, InConflict, S3Error
from gateway.core.model import ObjectKey
from gateway.operations.context import RequestContext, Response
from gateway.operations.failures import s3_error_of
from gateway.operations.writeback.flush_wait import FlushWait, conflict
from gateway.operations.writeback.write_back_policy import may_be_deleted_here
from gateway.s3.xml import DeleteEntry, DeleteError
from gateway.writeback.journal.records import ExpectedVersion, Write, WriteSpec

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


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
