"""Deleting what is pending: a tombstone first, so that no late flush brings it back; then the origin.

The tombstone waits behind what may just be reaching the origin, deletes there, and is settled; then the answer goes
out. With the origin away that takes until it is back: the client is told to try again, and the object is gone here
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.errors import BufferUnavailable
from gateway.objects import ObjectKey
from gateway.operations.absorbing.barrier import flushed
from gateway.operations.absorbing.staging import unavailable
from gateway.operations.exchange import Exchange
from gateway.operations.reply import Reply
from gateway.writeback.records import Base, Fixed, PendingObject

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


async def delete_pending(exchange: Exchange, buffer: WritebackBuffer) -> Reply:
    """DeleteObject of a key under which something is pending."""
    await bury(exchange, buffer, [exchange.object_key])
    return Reply(204, cache="absorbed")


async def bury(exchange: Exchange, buffer: WritebackBuffer, keys: Sequence[ObjectKey]) -> None:
    """Have these keys, under which something is pending, deleted here at once, and at the origin when this returns."""
    for key in keys:
        fixed = Fixed(key, {}, exchange.services.slots.find(key.bucket, key.key).name)
        now = exchange.services.clock.now()
        tombstone = PendingObject(0, fixed, Base(known=False, asked_at=now), now, "", 0, deleted=True)
        try:
            await buffer.acknowledge(tombstone)
        except BufferUnavailable as error:
            raise unavailable(error) from error
    await flushed(exchange, buffer, keys)
