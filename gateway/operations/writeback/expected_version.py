"""The origin's version of a key when a write begins: the flush must find it again, or it is a conflict."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.core.errors import BufferUnavailable, OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.operations.context import RequestContext
from gateway.operations.writeback.write_back_policy import Reason
from gateway.operations.writeback.write_through import goes_through
from gateway.writeback.journal.buckets import LAST_OWN_WRITE_KEPT_SECONDS
from gateway.writeback.journal.records import ExpectedVersion

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer
    from gateway.writeback.journal.transaction import JournalTransaction


ANSWER_SECONDS_MAX = 1.0
"""Seconds for which an acknowledgement waits for the origin alone; after that its version is unknown."""

_TOO_MANY_REQUESTS = 429
_REFUSALS = frozenset({400, 403})
"""Statuses of a HEAD that the origin itself answers: a customer key, and want of rights."""


class ExpectedVersionQuery:
    """The question for the origin's version of a key, asked while the body comes in, until `aclose`.

    `nothing` holds until it has answered: the version that this gateway has last seen there.
    """

    def __init__(self, context: RequestContext, key: ObjectKey | None = None) -> None:
        self._context = context
        self._clock = context.services.clock
        self._key = key or context.object_key
        known = context.services.catalog.last_known(self._key)
        self.nothing = ExpectedVersion.unknown(self._clock, known.version.etag if known is not None else None)
        self._asking = asyncio.create_task(self._ask())

    async def answer(self, deadline: float | None = None) -> ExpectedVersion:
        """Return the answer if it comes by a monotonic time, or else within a second from now; otherwise `nothing`.

        OriginAnswered if the origin refuses.
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
            is_of_s3 = bool(dict(answer.headers).get("x-amz-request-id"))  # proxies have none
            if answer.status == 404:
                return replace(nothing, etags=() if is_of_s3 else nothing.etags, absent=True, known=is_of_s3)
            is_refusal = is_of_s3 or answer.status in _REFUSALS
            if answer.status >= 500 or answer.status == _TOO_MANY_REQUESTS or not is_refusal:
                return nothing
            raise
        except (OriginUnreachable, OriginBodyError):
            return nothing
        etag = head.version.etag
        return replace(nothing, etags=(etag,), known=True) if etag else nothing


async def expected_version(
    context: RequestContext, buffer: WritebackBuffer, question: ExpectedVersionQuery
) -> ExpectedVersion:
    """Return the answer, unless this gateway has changed the key since. OriginAnswered if the origin refuses."""
    deadline = context.services.clock.monotonic() + ANSWER_SECONDS_MAX
    return await current_expected_version(context, buffer, await question.answer(deadline), deadline)


async def current_expected_version(
    context: RequestContext, buffer: WritebackBuffer, expected: ExpectedVersion, deadline: float | None = None
) -> ExpectedVersion:
    """Return `expected` if this gateway has not changed the key past the buffer since; else the version there now.

    The journal knows changes through the buffer. `deadline` is monotonic; None: a second from now. OriginAnswered if
    the origin refuses.
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
    return expected if is_old and not now.is_told else now


def absent_key(context: RequestContext) -> ObjectKey:
    """Return a key without an object. The origin answers 403 there to all without the right to list the bucket."""
    return ObjectKey(context.object_key.bucket, f"{context.slot.prefix.key_prefix}.forebay/absent")


def is_for_want_of_rights(refusal: OriginAnswered) -> bool:
    """Return whether the gateway's own key pair lacks the right."""
    return refusal.status in (401, 403)


async def goes_through_unseen(context: RequestContext, buffer: WritebackBuffer, refusal: OriginAnswered) -> None:
    """Send a write through whose present version the origin does not tell.

    If the right is missing, later writes go through too: otherwise one might be acknowledged while the origin is slow
    to refuse, and its flush be refused for ever.
    """
    goes_through(context, Reason.BUCKET_UNREADABLE)
    if not is_for_want_of_rights(refusal):
        return
    bucket, now = context.object_key.bucket, context.services.clock.now()

    def learn(tx: JournalTransaction) -> None:
        known = tx.buckets.capabilities(bucket)
        if known is not None:
            tx.buckets.learn(bucket, replace(known, may_look=False, learned_at=now))

    with suppress(BufferUnavailable):  # then the next write learns it
        await buffer.journal.change(learn)
