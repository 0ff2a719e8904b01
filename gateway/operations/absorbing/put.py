"""PutObject in a slot with `write = "back"`.

may its answer be foretold? is there room for it? → body verified, staged, synced, while the origin says what it has
under the key → journal → 200
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import BufferUnavailable, OriginAnswered
from gateway.operations.absorbing.barrier import flushed
from gateway.operations.absorbing.base import base_asked, base_told
from gateway.operations.absorbing.eligible import check_stored, fixed_headers, makes_md5_etags, may_be_absorbed
from gateway.operations.absorbing.staging import paced, room_for_body, stage_body, tell_through, unavailable
from gateway.operations.absorbing.through import written_through
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import forward_write
from gateway.s3.headers import filter_request_headers
from gateway.writeback.journal.records import Fixed, PendingObject, Profile

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer


LEARNED_AGAIN_SECONDS = 600.0
"""After so long a bucket whose writes are not absorbed is looked at again: rights and encryption can be changed."""


async def absorb_put(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Acknowledge an object on this node's disk, or write it through where its answer cannot be foretold."""
    profile = buffer.look(lambda book: book.profile(context.object_key.bucket))
    if not may_be_absorbed(context.request):
        return await _through(context, buffer)
    if profile is None or (not profile.absorbs and _is_old(context, profile)):
        return await _through_and_learn(context, buffer)
    if not profile.absorbs:
        return await _through(context, buffer)
    check_stored(context.request.headers)
    async with room_for_body(context, buffer, context.slot.name) as bound:
        if bound is None:
            reply = await _absorb(context, buffer)
    if bound is None:
        await paced(context, buffer, context.slot.name)
        return reply
    tell_through(buffer, context.slot.name, bound)
    return await _through(context, buffer)


def _is_old(context: RequestContext, profile: Profile) -> bool:
    return not 0 <= context.services.clock.now() - profile.learned_at < LEARNED_AGAIN_SECONDS


async def _absorb(context: RequestContext, buffer: WritebackBuffer) -> Response:
    began = context.services.clock.now()
    async with base_asked(context) as asking:
        staged = await stage_body(context, buffer, context.slot.name, 1)
        part = staged.part
        try:
            base = await base_told(context, buffer, asking, began)
        except BaseException:
            await buffer.give_up(part)
            raise
    fixed = Fixed(context.object_key, fixed_headers(filter_request_headers(context.request.headers)), context.slot.name)
    pending = PendingObject(
        0, fixed, base, part.stored_at, part.file.etag, part.file.size_bytes, (part,), checksums=part.checksums
    )
    try:
        await buffer.acknowledge(pending)
    except BufferUnavailable as error:
        raise unavailable(error) from error
    return Response(200, staged.answer_headers, b"", "absorbed")


async def _through(context: RequestContext, buffer: WritebackBuffer) -> Response:
    await flushed(context, buffer, [context.object_key])
    return await written_through(context, buffer, forward_write(context))


async def _through_and_learn(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """The first write to a bucket tells what its ETags are, and whether its objects may be looked at.

    Where the origin does not say the latter, the next write asks again.
    """
    async with base_asked(context) as asking:
        reply = await written_through(context, buffer, forward_write(context))
        try:
            may_look, is_certain = True, (await asking).known
        except OriginAnswered:
            may_look, is_certain = False, True
    if reply.status == 200 and is_certain:
        profile = Profile(makes_md5_etags(dict(reply.headers)), may_look, context.services.clock.now())
        await buffer.journal.change(lambda book: book.learn(context.object_key.bucket, profile))
    return reply
