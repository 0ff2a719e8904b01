"""Whether a request is about something that a snapshot freezes, and who answers it then."""

from __future__ import annotations

from collections.abc import Callable

from gateway.operations.exchange import Exchange
from gateway.operations.frozen.get import get_frozen
from gateway.operations.frozen.head import head_frozen
from gateway.operations.frozen.listing import list_frozen
from gateway.operations.frozen.others import pin_source, refuse, source_slot
from gateway.operations.passthrough import READ_METHODS
from gateway.operations.reply import Answer, Reply
from gateway.s3.requests import Operation

Handler = Callable[[Exchange], Answer]

_OF_OBJECTS = {Operation.GET_OBJECT: get_frozen, Operation.HEAD_OBJECT: head_frozen, Operation.FORWARD: refuse}
_LISTINGS = {Operation.LIST_OBJECTS: list_frozen, Operation.LIST_OBJECTS_V2: list_frozen}
_COPIES = frozenset({Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY})


def frozen_handler(exchange: Exchange, handler: Handler) -> Handler:
    """The handler for a request of which something is frozen; else `handler`. Writes were refused before."""
    request = exchange.request
    if request.key is not None:
        if request.operation in _COPIES:
            return _copying(exchange, handler)
        if exchange.slot.consistency != "snapshot" or request.method == "OPTIONS":
            return handler
        return _OF_OBJECTS.get(request.operation, handler)
    if request.bucket is None or request.method not in READ_METHODS or not _is_frozen_under(exchange):
        return handler
    if request.operation is Operation.FORWARD and request.parameter("versions") is not None:
        return refuse
    return _LISTINGS.get(request.operation, handler)


def _is_frozen_under(exchange: Exchange) -> bool:
    bucket, prefix = exchange.request.bucket or "", exchange.request.parameter("prefix") or ""
    return any(slot.consistency == "snapshot" for slot in exchange.services.slots.under(bucket, prefix))


def _copying(exchange: Exchange, handler: Handler) -> Handler:
    slot = source_slot(exchange)
    if slot is None:
        return handler

    async def copy(exchange: Exchange) -> Reply:
        await pin_source(exchange, slot)
        answer = handler(exchange)
        return answer if isinstance(answer, Reply) else await answer

    return copy
