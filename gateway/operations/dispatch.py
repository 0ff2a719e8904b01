"""Which handler answers which operation: the table of contents of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.operations.absorbing.choosing import buffer_handler
from gateway.operations.absorbing.closed import check_without_buffer
from gateway.operations.bucket_answers import bucket_answer
from gateway.operations.copy_object import copy_object, upload_part_copy
from gateway.operations.delete_objects import delete_object, delete_objects
from gateway.operations.exchange import Exchange
from gateway.operations.frozen.choosing import frozen_handler
from gateway.operations.get_object import get_object
from gateway.operations.head_object import head_object
from gateway.operations.list_objects import list_objects
from gateway.operations.multipart_upload import complete_multipart_upload
from gateway.operations.passthrough import forward, passthrough
from gateway.operations.put_object import put_object, upload_part
from gateway.operations.reply import Answer
from gateway.s3.requests import Operation

Handler = Callable[[Exchange], Answer]

HANDLERS: Mapping[Operation, Handler] = {
    Operation.LIST_BUCKETS: forward,
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
    Operation.HEAD_OBJECT: head_object,
    Operation.GET_OBJECT: get_object,
    Operation.PUT_OBJECT: put_object,
    Operation.COPY_OBJECT: copy_object,
    Operation.DELETE_OBJECT: delete_object,
    Operation.DELETE_OBJECTS: delete_objects,
    Operation.CREATE_MULTIPART_UPLOAD: forward,
    Operation.UPLOAD_PART: upload_part,
    Operation.UPLOAD_PART_COPY: upload_part_copy,
    Operation.COMPLETE_MULTIPART_UPLOAD: complete_multipart_upload,
    Operation.ABORT_MULTIPART_UPLOAD: forward,
    Operation.FORWARD: passthrough,
}


def perform(exchange: Exchange) -> Answer:
    """Carry out the operation that the request asks for: what needs no waiting now, the rest when it is awaited."""
    handler = HANDLERS[exchange.request.operation]
    if exchange.services.slots.any_frozen:
        handler = frozen_handler(exchange, handler)
    if exchange.services.writeback is not None:
        handler = buffer_handler(exchange, exchange.services.writeback, handler)
    elif exchange.services.buffer_closed:
        check_without_buffer(exchange)
    return handler(exchange)
