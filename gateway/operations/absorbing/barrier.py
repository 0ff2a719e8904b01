"""Waiting until the origin has what this node has acknowledged: for requests that only the origin can answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gateway.errors import S3Error
from gateway.objects import ObjectKey
from gateway.operations.exchange import Exchange
from gateway.s3.error_codes import s3_error
from gateway.writeback.records import State

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

PATIENCE_SECONDS = 20.0
"""Clients give up after some 60 seconds; a 503 before that has them try again."""

_LOOK_SECONDS = 0.01


async def flushed(exchange: Exchange, buffer: WritebackBuffer, keys: Iterable[ObjectKey]) -> None:
    """Return when nothing that was pending under these keys by now is any more.

    S3Error ServiceUnavailable (503) when that takes too long, OperationAborted (409) where a conflict is in its way.
    """
    clock = exchange.services.clock
    deadline = clock.monotonic() + PATIENCE_SECONDS
    for key, sequence in [(key, pending.sequence) for key in keys if (pending := buffer.pending(key)) is not None]:
        while (first := buffer.look(lambda book: book.earliest(key))) is not None and first.sequence <= sequence:  # noqa: B023
            if first.state is State.CONFLICT:
                raise _conflict(key)
            if clock.monotonic() >= deadline:
                raise s3_error("ServiceUnavailable", f"{key} is not at the origin yet: try again.")
            await clock.sleep(_LOOK_SECONDS)


def _conflict(key: ObjectKey) -> S3Error:
    return s3_error(
        "OperationAborted",
        f"{key} was changed at the origin while a write of this node was on its way: somebody must decide which is to "
        "stay, before the origin can answer for it.",
    )
