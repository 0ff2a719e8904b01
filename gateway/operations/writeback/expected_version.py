"""What the origin has under a key when an absorb begins: the flush must find that again, or it is a conflict."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from gateway.core.errors import BufferUnavailable, OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.operations.context import RequestContext
from gateway.operations.writeback.write_back_policy import Reason
from gateway.operations.writeback.write_through import goes_through
from gateway.writeback.journal.records import LAST_OWN_WRITE_KEPT_SECONDS, ExpectedVersion

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


ANSWER_SECONDS_MAX = 1.0
"""So long an acknowledgement waits for the origin, when nothing else is left to wait for: then what is there is
unknown."""

_TOO_MANY_REQUESTS = 429


class ExpectedVersionQuery:
    """What the origin has under the request's key, or another one, asked while the body comes in, until `aclose`.

    `nothing` is what is known as long as it has not answered: which version this gateway has seen there last.
    """

    def __init__(self, context: RequestContext, key: ObjectKey | None = None) -> None:
        self._context = context
        self._clock = context.services.clock
        self._key = key or context.object_key
        known = context.services.catalog.last_known(self._key)
        self.nothing = ExpectedVersion.unknown(self._clock, known.version.etag if known is not None else None)
        self._asking = asyncio.create_task(self._ask())

    async def answer(self, deadline: float | None = None) -> ExpectedVersion:
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
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> ExpectedVersion:
        context, nothing = self._context, self.nothing
        try:
            head = await context.services.catalog.ask(self._key, context.slot, headers={})
        except OriginAnswered as answer:
            if answer.status == 404:
                return ExpectedVersion(absent=True, asked_at=nothing.asked_at, asked=nothing.asked)
            if answer.status >= 500 or answer.status == _TOO_MANY_REQUESTS:
                return nothing
            raise
        except (OriginUnreachable, OriginBodyError):
            return nothing
        return ExpectedVersion((head.version.etag,), asked_at=nothing.asked_at, asked=nothing.asked)


async def expected_version(
    context: RequestContext, buffer: WritebackBuffer, question: ExpectedVersionQuery
) -> ExpectedVersion:
    """The answer, which this gateway may have made an old one since. OriginAnswered where the origin refuses to say."""
    deadline = context.services.clock.monotonic() + ANSWER_SECONDS_MAX
    return await current_expected_version(context, buffer, await question.answer(deadline), deadline)


async def current_expected_version(
    context: RequestContext, buffer: WritebackBuffer, expected: ExpectedVersion, deadline: float | None = None
) -> ExpectedVersion:
    """The base where this gateway has not changed the key past the buffer since; else what is there now.

    What went through the buffer the journal knows itself. `deadline` is monotonic; None: a second from now.
    OriginAnswered where the origin refuses to say.
    """
    own = buffer.look(lambda tx: tx.buckets.last_own_write(context.object_key))
    clock = context.services.clock
    nothing = ExpectedVersion.unknown(clock)
    is_old = not 0 <= nothing.asked_then.since(expected.asked_then)[0] < LAST_OWN_WRITE_KEPT_SECONDS / 2
    if not is_old and (own is None or own.known or own.seconds_after(expected.asked_then) < 0):
        return expected
    if deadline is not None and clock.monotonic() >= deadline:
        return expected if is_old else nothing
    async with aclosing(ExpectedVersionQuery(context)) as question:
        now = await question.answer(deadline)
    return expected if is_old and not now.known else now


def absent_key(context: RequestContext) -> ObjectKey:
    """Where nobody has an object. Who may not list a bucket is told there what everybody without rights is: 403."""
    return ObjectKey(context.object_key.bucket, f"{context.slot.prefix.key_prefix}.forebay/absent")


def is_for_want_of_rights(refusal: OriginAnswered) -> bool:
    """Whether the gateway's own key pair may not do what it asked for."""
    return refusal.status in (401, 403)


async def goes_through_unseen(context: RequestContext, buffer: WritebackBuffer, refusal: OriginAnswered) -> None:
    """A write of which the origin does not say what it would overwrite goes through; for want of rights, so do those
    after it: each alone would be acknowledged where the origin is slow to refuse, and its flush be refused for ever.
    """
    goes_through(context, Reason.BUCKET_UNREADABLE)
    if not is_for_want_of_rights(refusal):
        return
    bucket, now = context.object_key.bucket, context.services.clock.now()
    with suppress(BufferUnavailable):  # the next write learns it, then
        await buffer.journal.change(lambda tx: tx.buckets.amend(bucket, may_look=False, learned_at=now))
