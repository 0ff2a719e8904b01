"""Waiting until the origin has what this node has acknowledged: for requests that only the origin can answer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from gateway import cancellation
from gateway.errors import BufferUnavailable, S3Error
from gateway.metadata.listing.pages import END, key_successor, prefix_end
from gateway.objects import ObjectKey
from gateway.operations.context import RequestContext
from gateway.s3.error_codes import s3_error
from gateway.writeback.journal.records import State
from gateway.writeback.order import key_prefix_before

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

PATIENCE_SECONDS = 20.0
"""Clients give up after some 60 seconds; a 503 before that has them try again."""

_LOOK_SECONDS = 0.01
_PATIENT_LOOKS = 2
"""After so many it is asked for: there is much before it."""

_KEYS_AT_A_LOOK = 100


async def flushed(context: RequestContext, buffer: WritebackBuffer, keys: Iterable[ObjectKey]) -> None:
    """Return when nothing that was pending under these keys by now is any more.

    S3Error ServiceUnavailable (503) when that takes too long, OperationAborted (409) where a conflict is in its way.
    """
    deadline = context.services.clock.monotonic() + PATIENCE_SECONDS
    for key, sequence in [(key, pending.sequence) for key in keys if (pending := buffer.pending(key)) is not None]:
        await settled(context, buffer, key, sequence, deadline)


async def in_its_turn(context: RequestContext, buffer: WritebackBuffer) -> None:
    """Return when a write of the request's key may go past the buffer: what is pending under the key is at the origin,
    and, of a marker, all that is pending under its directory (writeback/order.py). Raises as `flushed`."""
    key, slot = context.object_key, context.slot
    prefix = key_prefix_before(key.key, slot)
    if slot.write == "back" and prefix is not None and context.request.method != "DELETE":
        await flushed_under(context, buffer, key.bucket, prefix)
    await flushed(context, buffer, [key])


async def flushed_under(context: RequestContext, buffer: WritebackBuffer, bucket: str, prefix: str = "") -> None:
    """The same of all that is pending by now in a bucket under a prefix."""
    deadline = context.services.clock.monotonic() + PATIENCE_SECONDS
    newest = buffer.look(lambda book: book.newest())
    place = prefix.encode()
    stop = prefix_end(place) if place else END
    while found := buffer.look(lambda book: book.listing(bucket, place, stop, _KEYS_AT_A_LOOK)):  # noqa: B023
        for one in found:
            await settled(context, buffer, one.key, min(one.sequence, newest), deadline)
        place = key_successor(found[-1].key.key.encode())


async def settled(
    context: RequestContext, buffer: WritebackBuffer, key: ObjectKey, sequence: int, deadline: float
) -> None:
    """Return when nothing is pending under a key that was acknowledged as `sequence` or before it; raises as `flushed`.

    `deadline` is of the monotonic clock.
    """
    clock, looks = context.services.clock, 0
    while (first := buffer.look(lambda book: book.earliest(key))) is not None and first.sequence <= sequence:
        if first.state is State.CONFLICT:
            raise conflict(key)
        if clock.monotonic() >= deadline:
            raise s3_error("ServiceUnavailable", f"{key} is not at the origin yet: try again.")
        if looks == _PATIENT_LOOKS:
            await _hurry(buffer, key)
        looks += 1
        with cancellation.turn():
            await clock.sleep(_LOOK_SECONDS)


async def _hurry(buffer: WritebackBuffer, key: ObjectKey) -> None:
    with suppress(BufferUnavailable):  # it comes in its turn, then
        await buffer.hurry(key)


def conflict(key: ObjectKey) -> S3Error:
    """409: somebody must decide first."""
    return s3_error(
        "OperationAborted",
        f"{key} was changed at the origin while a write of this node was on its way: somebody must decide which is to "
        "stay, before the origin can answer for it.",
    )
