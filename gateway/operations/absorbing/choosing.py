"""Which writes the write-back buffer takes, and who does it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from gateway.operations.absorbing.put import absorb_put
from gateway.operations.absorbing.uploads import (
    absorb_abort,
    absorb_complete,
    absorb_create,
    absorb_part,
    absorbed_parts,
    is_known,
)
from gateway.operations.exchange import Exchange
from gateway.operations.reply import Answer, Reply
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


def absorbing_handler(exchange: Exchange, buffer: WritebackBuffer, handler: Handler) -> Handler:
    """The handler for a write that is acknowledged on this node's disk; else `handler`."""
    operation = exchange.request.operation
    absorb = _OF_UPLOADS.get(operation)
    if absorb is not None and not is_known(exchange, buffer):
        return handler
    if absorb is None and exchange.slot.write == "back":
        absorb = _BEGINNINGS.get(operation)
    if absorb is None:
        return handler
    chosen = absorb
    return lambda exchange: chosen(exchange, buffer)
