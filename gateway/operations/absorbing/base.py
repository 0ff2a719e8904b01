"""What the origin has under a key when an absorb begins: the flush must find that again, or it is a conflict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from gateway.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.operations.context import RequestContext
from gateway.writeback.journal.records import Base

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


ANSWER_SECONDS_MAX = 1.0
"""So long an acknowledgement waits for the origin, once the body is on the disk: then what is there is unknown."""


@asynccontextmanager
async def base_asked(context: RequestContext) -> AsyncIterator[asyncio.Task[Base]]:
    """Asks while the body comes in. The task raises OriginAnswered where the origin refuses to say."""
    asking = asyncio.create_task(_ask(context))
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def base_told(context: RequestContext, buffer: WritebackBuffer, asking: asyncio.Task[Base], began: float) -> Base:
    """What the origin has under the key, as far as it says so within a second from now. `began`: when it was asked."""
    deadline = context.services.clock.monotonic() + ANSWER_SECONDS_MAX
    return await base_now(context, buffer, await _told(context, asking, began, deadline), deadline)


async def base_now(context: RequestContext, buffer: WritebackBuffer, base: Base, deadline: float | None = None) -> Base:
    """The base where this gateway has not changed the key past the buffer since; else what is there now.

    What went through the buffer the journal knows itself. `deadline` is monotonic; None: a second from now.
    """
    own = buffer.look(lambda book: book.own_doing(context.object_key))
    if own is None or own.known or own.at < base.asked_at:
        return base
    clock = context.services.clock
    now, deadline = clock.now(), clock.monotonic() + ANSWER_SECONDS_MAX if deadline is None else deadline
    if clock.monotonic() >= deadline:
        return Base(known=False, asked_at=now)
    async with base_asked(context) as asking:
        return await _told(context, asking, now, deadline)


async def _told(context: RequestContext, asking: asyncio.Task[Base], began: float, deadline: float) -> Base:
    """Nothing is known of the base where the origin refuses to say, or takes longer."""
    clock = context.services.clock
    if not asking.done():
        waiting = asyncio.ensure_future(clock.sleep(max(0.0, deadline - clock.monotonic())))
        try:
            await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
    if asking.done():
        with suppress(OriginAnswered):
            return asking.result()
    return Base(known=False, asked_at=began)


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
