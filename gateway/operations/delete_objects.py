"""DeleteObject and DeleteObjects (S3 API): through to the origin, every key checked against the caller's rights."""

from __future__ import annotations

from gateway.objects import ObjectKey
from gateway.operations.exchange import Exchange
from gateway.operations.passthrough import forward_write, onward_request, streamed_reply
from gateway.operations.payload import Payload, receive_document
from gateway.operations.reply import Reply
from gateway.policy.access import refusal_of_write
from gateway.s3.requests import Operation
from gateway.s3.xml import DeleteError, delete_request_document, insert_delete_errors, parse_delete

DELETE_SIZE_BYTES_MAX = 8 * 1024**2
"""1,000 keys of 1,024 bytes, each character escaped, with version ids and conditions, stay below it."""

RESULT_SIZE_BYTES_MAX = 8 * 1024**2


async def delete_object(exchange: Exchange) -> Reply:
    """Delete one object at the origin."""
    return await forward_write(exchange)


async def delete_objects(exchange: Exchange) -> Reply:
    """Delete up to 1,000 objects; keys outside the caller's rights come back as AccessDenied, the others go."""
    document = await receive_document(exchange, DELETE_SIZE_BYTES_MAX)
    asked = parse_delete(document)
    refused = _refused(exchange, [entry.key for entry in asked.objects])
    if not refused:
        return await _delete(exchange, document, [entry.key for entry in asked.objects])
    allowed = [entry for entry in asked.objects if entry.key not in refused]
    errors = [DeleteError(entry.key, entry.version_id, "AccessDenied", refused[entry.key])
              for entry in asked.objects if entry.key in refused]
    ...
