"""Requests while the disk under the write-back buffer cannot be used.

The origin serves, and takes writes; what it has then differs from what a pending write expects, so that write becomes a
conflict when the disk is back. Only a deletion leaves nothing to be recognised by: an object that was acknowledged
before, and is deleted at the origin alone, would come back with its flush. So nothing is deleted meanwhile.
"""

from __future__ import annotations

from gateway.operations.exchange import Exchange
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation


def check_without_buffer(exchange: Exchange) -> None:
    """S3Error ServiceUnavailable where the request deletes what may be pending."""
    operation = exchange.request.operation
    if operation is Operation.DELETE_OBJECT:
        slots = [exchange.slot]
    elif operation is Operation.DELETE_OBJECTS:
        slots = list(exchange.services.slots.under(exchange.request.bucket or "", ""))
    else:
        return
    if any(slot.write == "back" for slot in slots):
        raise s3_error(
            "ServiceUnavailable",
            "The disk of the write-back buffer cannot be used: what it has acknowledged could come back after this "
            "deletion. Put the disk right and start the gateway again.",
        )
