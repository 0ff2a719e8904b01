"""What the origin has under a key when an absorb begins: the flush must find that again, or it is a conflict."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from gateway.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.operations.context import RequestContext
from gateway.writeback.journal.records import Base
from gateway.writeback.journal.rows import OWN_DOING_KEPT_SECONDS

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


ANSWER_SECONDS_MAX = 1.0
"""So long an acknowledgement waits for the origin, when nothing else is left to wait for: then what is there is
unknown."""


class BaseQuestion:
    """What the origin has under the request's key, asked while the body comes in, until `aclose`.

    `nothing` is what is known as long as it has not answered: which version this gateway has seen there last.
    """

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._clock = context.services.clock
        known = context.services.catalog.last_known(context.object_key)
        self.nothing = Base.unknown(self._clock, known.version.etag if known is not None else None)
        self._asking = asyncio.create_task(self._ask())

    async def answer(self, deadline: float | None = None) -> Base:
        """As far as it has said so by a time of the monotonic clock, or else within a second from now; else `nothing`.

        OriginAnswered where it refuses to say.
        """
        seconds = ANSWER_SECONDS_MAX if deadline is None else max(0.0, deadline - self._clock.monotonic())
        if not self._asking.done():
            waiting = asyncio.ensure_future(self._clock.sleep(seconds))
            try:
                await asyncio.wait({self._asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        return self._asking.result() if self._asking.done() else self.nothing

    async def aclose(self) -> None:
        """Nobody wants to know any more."""
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> Base:
        context, nothing = self._context, self.nothing
        try:
            head = await context.services.catalog.ask(context.object_key, context.slot, headers={})
        except OriginAnswered as answer:
            if answer.status == 404:
                return Base(absent=True, asked_at=nothing.asked_at, asked=nothing.asked)
            if answer.status >= 500:
                return nothing
            raise
        except (OriginUnreachable, OriginBodyError):
            return nothing
        return Base((head.version.etag,), asked_at=nothing.asked_at, asked=nothing.asked)


async def base_told(context: RequestContext, buffer: WritebackBuffer, question: BaseQuestion) -> Base:
    """The answer, which this gateway may have made an old one since."""
    deadline = context.services.clock.monotonic() + ANSWER_SECONDS_MAX
    return await base_now(context, buffer, await _told(question, deadline), deadline)


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
    if deadline is not None and clock.monotonic() >= deadline:
        return base if is_old else nothing
    async with aclosing(BaseQuestion(context)) as question:
        now = await _told(question, deadline)
    return base if is_old and not now.known else now


async def _told(question: BaseQuestion, deadline: float | None) -> Base:
    """Nothing is known of the base where the origin refuses to say."""
    with suppress(OriginAnswered):
        return await question.answer(deadline)
    return question.nothing
