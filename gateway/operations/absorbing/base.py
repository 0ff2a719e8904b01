"""What the origin has under a key when an absorb begins: the flush must find that again, or it is a conflict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gateway.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.operations.context import RequestContext
from gateway.writeback.journal.records import Base

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


@asynccontextmanager
async def base_asked(context: RequestContext) -> AsyncIterator[asyncio.Task[Base]]:
    """Asks while the body comes in. The task raises OriginAnswered where the origin refuses to say."""
    asking = asyncio.create_task(_ask(context))
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def base_now(context: RequestContext, buffer: WritebackBuffer, base: Base) -> Base:
    """The base where this gateway has not changed the key past the buffer since; else what is there now.

    What went through the buffer the journal knows itself.
    """
    own = buffer.look(lambda book: book.own_doing(context.object_key))
    if own is None or own.known or own.at < base.asked_at:
        return base
    try:
        return await _ask(context)
    except OriginAnswered:
        return Base(known=False, asked_at=context.services.clock.now())


async def _ask(context: RequestContext) -> Base:
    services, asked_at = context.services, context.services.clock.now()
    try:
        head = await services.catalog.ask(context.object_key, context.slot, headers={})
    except OriginAnswered as answer:
        if answer.status == 404:
            return Base(absent=True, asked_at=asked_at)
        if answer.status >= 500:
            return Base(known=False, asked_at=asked_at)
        raise
    except (OriginUnreachable, OriginBodyError):
        return Base(known=False, asked_at=asked_at)
    return Base((head.version.etag,), asked_at=asked_at)
