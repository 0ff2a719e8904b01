"""Which requests concern the write-back buffer, and who answers them.

Writes in its slots are absorbed, what is pending is read from here and deleted by a tombstone, and whatever else names
a key under which something is pending waits until the origin has it: the origin alone can answer.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from gateway.objects import ObjectKey
from gateway.operations.absorbing.barrier import flushed, flushed_under
from gateway.operations.absorbing.copying import absorb_copy, copied_here
from gateway.operations.absorbing.creating import absorb_create
from gateway.operations.absorbing.deleting import delete_pending
from gateway.operations.absorbing.eligible import may_be_deleted_here
from gateway.operations.absorbing.listing import LISTINGS, listing_handler
from gateway.operations.absorbing.part_copy import absorb_part_copy
from gateway.operations.absorbing.put import absorb_put
from gateway.operations.absorbing.reads import get_pending, head_pending, is_known_here
from gateway.operations.absorbing.through import CHANGES_NO_OBJECT, written_through
from gateway.operations.absorbing.upload_listing import list_uploads, may_concern_uploads
from gateway.operations.absorbing.uploads import (
    absorb_abort,
    absorb_complete,
    absorb_part,
    absorbed_parts,
    is_known,
)
from gateway.operations.exchange import Exchange
from gateway.operations.passthrough import READ_METHODS
from gateway.operations.plain import is_plain
from gateway.operations.reply import Answer, Reply
from gateway.s3.addressing import parse_copy_source
from gateway.s3.error_codes import s3_error
from gateway.s3.presigned import strip_signature_parameters
from gateway.s3.requests import Operation

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

Handler = Callable[[Exchange], Answer]
_Absorb = Callable[[Exchange, "WritebackBuffer"], Coroutine[Any, Any, Reply]]

_BEGINNINGS: Mapping[Operation, _Absorb] = {
    Operation.PUT_OBJECT: absorb_put,
    Operation.CREATE_MULTIPART_UPLOAD: absorb_create,
}

_OF_UPLOADS: Mapping[Operation, _Absorb] = {
    Operation.UPLOAD_PART: absorb_part,
    Operation.COMPLETE_MULTIPART_UPLOAD: absorb_complete,
    Operation.ABORT_MULTIPART_UPLOAD: absorb_abort,
    Operation.LIST_PARTS: absorbed_parts,
}
"""What is about an upload goes where its Create went, whatever the slot says by now."""


_READS = {Operation.GET_OBJECT: get_pending, Operation.HEAD_OBJECT: head_pending}


def buffer_handler(exchange: Exchange, buffer: WritebackBuffer, handler: Handler) -> Handler:
    """The handler for a request that concerns the buffer; else `handler`."""
    if exchange.request.key is None:
        return _of_bucket(exchange, buffer, handler)
    if "x-amz-rename-source" in exchange.request.headers:  # names a key in a way that origins read differently
        return lambda exchange: _when_empty(exchange, buffer, handler)
    if _is_strange_about_an_upload(exchange, buffer):
        raise s3_error("NotImplemented", "A parameter of this request is not known for an upload that is open here.")
    absorb = _absorbing(exchange, buffer)
    if absorb is not None:
        return lambda exchange: absorb(exchange, buffer)
    if exchange.request.operation is Operation.UPLOAD_PART_COPY and is_known(exchange, buffer):
        return lambda exchange: absorb_part_copy(exchange, buffer, handler)
    if exchange.request.operation is Operation.COPY_OBJECT:
        source = copied_here(exchange, buffer)
        if source is not None:
            return lambda exchange: absorb_copy(exchange, buffer, source)
    read = _READS.get(exchange.request.operation)
    if read is not None:
        pending = buffer.pending(exchange.object_key)
        if pending is None:
            return handler
        if is_known_here(exchange.request):
            return lambda exchange: read(exchange, buffer, pending)
    waited_for = _pending_keys(exchange, buffer)
    if waited_for or _is_write_past_the_buffer(exchange):
        return lambda exchange: _afterwards(exchange, buffer, waited_for, handler)
    return handler


def _is_strange_about_an_upload(exchange: Exchange, buffer: WritebackBuffer) -> bool:
    """Whether the origin would have to answer about an upload that it knows by another id: it would deny that there is
    one, for a presigned query with a checksum in it, for instance.
    """
    request = exchange.request
    is_about_an_upload = request.operation is Operation.FORWARD and request.parameter("uploadId")
    return bool(is_about_an_upload) and is_known(exchange, buffer)


def _is_write_past_the_buffer(exchange: Exchange) -> bool:
    request = exchange.request
    if request.key is None or request.method in READ_METHODS or request.operation in CHANGES_NO_OBJECT:
        return False
    return exchange.slot.write == "back"


def _of_bucket(exchange: Exchange, buffer: WritebackBuffer, handler: Handler) -> Handler:
    """The handler for a request that names no key: it may be about everything in its bucket."""
    if exchange.request.operation in LISTINGS:
        return listing_handler(exchange, buffer, handler)
    if exchange.request.operation is Operation.LIST_MULTIPART_UPLOADS:
        is_ours = is_plain(exchange.request) and may_concern_uploads(exchange, buffer)
        return (lambda exchange: list_uploads(exchange, buffer)) if is_ours else handler
    if exchange.request.bucket is not None and _is_about_all_objects(exchange):
        return lambda exchange: _when_empty(exchange, buffer, handler)
    return handler


def _is_about_all_objects(exchange: Exchange) -> bool:
    """ListObjectVersions, DeleteBucket, and POST Object, which names its key in its body."""
    request = exchange.request
    if request.operation is not Operation.FORWARD:
        return False
    said = {name for name, _ in strip_signature_parameters(request.query)} - {"x-id"}
    return "versions" in said or (request.method not in READ_METHODS and not said)


async def _when_empty(exchange: Exchange, buffer: WritebackBuffer, handler: Handler) -> Reply:
    await flushed_under(exchange, buffer, exchange.request.bucket or "", exchange.request.parameter("prefix") or "")
    return await _afterwards(exchange, buffer, [], handler)


def _absorbing(exchange: Exchange, buffer: WritebackBuffer) -> _Absorb | None:
    operation = exchange.request.operation
    if operation in _OF_UPLOADS:
        return _OF_UPLOADS[operation] if is_known(exchange, buffer) else None
    if operation is Operation.DELETE_OBJECT and may_be_deleted_here(exchange.request):
        return delete_pending if _pending_keys(exchange, buffer) else None
    return _BEGINNINGS.get(operation) if exchange.slot.write == "back" else None


def _pending_keys(exchange: Exchange, buffer: WritebackBuffer) -> list[ObjectKey]:
    """The keys that the request names under which something is pending: its own, and the source of a copy."""
    request = exchange.request
    keys = [ObjectKey(request.bucket, request.key)] if request.bucket is not None and request.key is not None else []
    source = request.headers.get("x-amz-copy-source")
    if source is not None:
        keys.append(parse_copy_source(source).key)
    return [key for key in keys if buffer.pending(key) is not None]


async def _afterwards(exchange: Exchange, buffer: WritebackBuffer, keys: list[ObjectKey], handler: Handler) -> Reply:
    await flushed(exchange, buffer, keys)
    if _is_write_past_the_buffer(exchange):
        return await written_through(exchange, buffer, _answered(exchange, handler))
    return await _answered(exchange, handler)


async def _answered(exchange: Exchange, handler: Handler) -> Reply:
    answer = handler(exchange)
    return answer if isinstance(answer, Reply) else await answer
