"""What the origin has under a key when an absorb begins: the flush must find that again, or it is a conflict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from gateway.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.operations.context import RequestContext
from gateway.writeback.journal.records import Base
from gateway.writeback.journal.rows import OWN_DOING_KEPT_SECONDS

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


async def base_told(context: RequestContext, buffer: WritebackBuffer, asking: asyncio.Task[Base], began: Base) -> Base:
    """What the origin has under the key, as far as it says so within a second from now; else what was known when it was
    asked (`Base.unknown`).
    """
    deadline = context.services.clock.monotonic() + ANSWER_SECONDS_MAX
    return await base_now(context, buffer, await _told(context, asking, began, deadline), deadline)


async def base_now(context: RequestContext, buffer: WritebackBuffer, base: Base, deadline: float | None = None) -> Base:
    """The base where this gateway has not changed the key past the buffer since; else what is there now.

    What went through the buffer the journal knows itself. `deadline` is monotonic; None: a second from now.
    """
    own = buffer.look(lambda book: book.own_doing(context.object_key))
    clock = context.services.clock
    nothing = Base.unknown(clock)
    is_old = not 0 <= nothing.asked_then.since(base.asked_then)[0] < OWN_DOING_KEPT_SECONDS / 2
    if not is_old and (own is None or own.known or own.seconds_after(base.asked_then) < 0):
        return base
    deadline = clock.monotonic() + ANSWER_SECONDS_MAX if deadline is None else deadline
    if clock.monotonic() >= deadline:
        return nothing if not is_old else base
    async with base_asked(context) as asking:
        now = await _told(context, asking, nothing, deadline)
    return base if is_old and not now.known else now


async def _told(context: RequestContext, asking: asyncio.Task[Base], nothing: Base, deadline: float) -> Base:
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
    return nothing


async def _ask(context: RequestContext) -> Base:
    services, nothing = context.services, Base.unknown(context.services.clock)
    try:
        head = await services.catalog.ask(context.object_key, context.slot, headers={})
    except OriginAnswered as answer:
        if answer.status == 404:
            return Base(absent=True, asked_at=nothing.asked_at, asked=nothing.asked)
        if answer.status >= 500:
            return nothing
        raise
    except (OriginUnreachable, OriginBodyError):
        return nothing
    return Base((head.version.etag,), asked_at=nothing.asked_at, asked=nothing.asked)
