"""PutObject in a slot with `write = "back"`, and the origin's version of a key when a write begins.

    can its answer be foretold? is there room for it? → body verified, staged, synced, while the origin is asked
    for its version of the key, unless memory knows one → journal → 200

The flush must find that version again, or one older than the write; anything else is a conflict. A body whose digest
the client announced is verified here either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from typing import Any

from gateway.core.errors import BufferUnavailable, OriginAnswered, OriginBodyError, OriginUnreachable, RegistryAway
from gateway.core.model import ObjectKey
from gateway.operations.context import RequestContext, Response
from gateway.operations.other_nodes import Claimed, claimed
from gateway.operations.passthrough import forward_write
from gateway.operations.payload import BUFFERED_SIZE_BYTES_MAX, Payload, receive_payload
from gateway.operations.writeback.key_check import check_place
from gateway.operations.writeback.parts import acknowledged, room_for_body, stage_body
from gateway.operations.writeback.past_the_buffer import (
    CONTENT_BYTES_MAX,
    FlushWait,
    goes_through,
    names_files,
    written_through,
)
from gateway.operations.writeback.write_back_policy import (
    Reason,
    capabilities_of,
    check_stored,
    fixed_headers,
    is_foretold,
    is_supported_header,
    makes_md5_etags,
    refuse_unless_kept_here,
    why_of_bucket,
    why_of_cluster,
    why_of_headers,
    why_of_key,
)
from gateway.origin.client import is_of_s3
from gateway.s3.checksums import PREFIX
from gateway.s3.headers import filter_request_headers, unquote
from gateway.writeback.bounds import Bound
from gateway.writeback.journal.buckets import LAST_OWN_WRITE_KEPT_SECONDS, BucketCapabilities, Honoured, judged_values
from gateway.writeback.journal.records import ExpectedVersion, Part, Write, WriteSpec
from gateway.writeback.journal.transaction import JournalTransaction

LEARNED_AGAIN_SECONDS = 600.0
"""Seconds after which a bucket whose writes are not absorbed is looked at again: rights and encryption may change."""

UNREADABLE_AGAIN_SECONDS = 15.0
"""The seconds if the gateway may not look at its objects: a refused HEAD does not tell missing rights from a revoked
key, and checkpoints must be absorbed soon after the key is renewed."""


async def buffer_put(context: RequestContext) -> Response:
    """Acknowledge an object on this node's disk, or write it through if its answer cannot be foretold."""
    headers = context.request.headers
    await check_place(context)
    reason = why_of_key(context.object_key.key) or why_of_headers(headers, is_supported_header)
    reason = reason or why_of_cluster(context)
    refuse_unless_kept_here(context, reason)
    capabilities = None
    if context.slot.write != "scratch":
        capabilities = capabilities_of(context)
        if reason is not None:
            return await _through(context, reason)
        reason = why_of_bucket(context, capabilities, headers=headers)
        if reason is not None:
            is_untried = reason in (Reason.STORAGE_CLASS, Reason.ACL)
            learns = capabilities is None or is_untried or _is_old(context, capabilities)
            return await (_through_and_learn if learns else _through)(context, reason)
    check_stored(headers)
    async with room_for_body(context, context.slot.name) as bound:
        if bound is None:
            reply = await _absorb(context, capabilities)
    return reply if bound is None else await _through(context, bound)


def _is_old(context: RequestContext, capabilities: BucketCapabilities) -> bool:
    again_seconds = LEARNED_AGAIN_SECONDS if capabilities.may_look else UNREADABLE_AGAIN_SECONDS
    return not 0 <= context.services.clock.now() - capabilities.learned_at < again_seconds


async def _absorb(context: RequestContext, capabilities: BucketCapabilities | None) -> Response:
    if context.slot.write == "scratch":  # the object stays here, and the origin is not asked
        nothing = ExpectedVersion.unknown(context.services.clock)
        part = await stage_body(context, context.slot.name, 1)
        await context.buffer.acknowledge(_write(context, part, nothing, nothing.asked_at))
        return acknowledged(part)
    async with aclosing(ExpectedVersionQuery(context, waits=waits_for_version(context, capabilities))) as question:
        part = await stage_body(context, context.slot.name, 1)
        try:
            claim, expected = await claimed_version(context, part.stored_at, expected_version(context, question))
        except UNCLAIMED as refusal:
            try:
                await goes_through_unseen(context, refusal)
                checksums = {PREFIX + name: value for name, value in part.checksums.items()}
                reply, _ = await _sent(context, Payload(await context.buffer.body(part), checksums))
                return reply
            finally:
                await context.buffer.give_up(part)
        except BaseException:
            await context.buffer.give_up(part)
            raise
    is_etag_local = not is_foretold(capabilities, of_parts=False)
    write = _write(context, part, expected, question.nothing.asked_at, is_etag_local=is_etag_local)
    async with claim:
        await context.buffer.acknowledge(replace(write, order=claim.order))
    return acknowledged(part)


def _write(
    context: RequestContext, part: Part, expected: ExpectedVersion, began_at: float, *, is_etag_local: bool = False
) -> Write:
    headers = fixed_headers(filter_request_headers(context.request.headers))
    return Write(
        WriteSpec(context.object_key, headers, context.slot.name),
        expected,
        began_at,
        etag=part.file.etag,
        size_bytes=part.file.size_bytes,
        parts=(part,),
        checksums=part.checksums,
        acknowledged_at=part.stored_at,
        is_etag_local=is_etag_local,
    )


async def _through(context: RequestContext, reason: Reason | Bound) -> Response:
    goes_through(context, reason)
    reply, _ = await _sent(context)
    return reply


async def _sent(
    context: RequestContext, staged: Payload | None = None, *, with_md5: bool = False
) -> tuple[Response, Payload]:
    """Write the request's body, or a staged one, through to the origin; return the answer and the body."""
    wait, is_manifest = FlushWait(context), names_files(context)
    await wait.for_turn(context.object_key)
    size_bytes_max = CONTENT_BYTES_MAX if is_manifest else BUFFERED_SIZE_BYTES_MAX
    payload = staged or await receive_payload(context, with_md5=with_md5, buffered_bytes_max=size_bytes_max)
    if is_manifest:
        await wait.for_files(payload.body if isinstance(payload.body, bytes) else None)
    reply = await written_through(context, forward_write(context, payload))
    await note_refusal(context, reply.status)
    return reply, payload


async def note_refusal(context: RequestContext, status: int) -> None:
    """Forget that the bucket takes the ACL and the class of a write that it has just refused: the next one asks."""
    headers, capabilities = context.request.headers, capabilities_of(context)
    if status in (400, 403, 501) and capabilities is not None and judged_values(headers) & capabilities.accepted:
        with suppress(BufferUnavailable):  # then its flush is refused, and tells
            bucket = context.object_key.bucket
            await context.buffer.journal.change(lambda tx: tx.buckets.forget_accepted(bucket, headers))


async def _through_and_learn(context: RequestContext, reason: Reason) -> Response:
    """Write through, and learn from a bucket's first write its kind of ETags and whether we may look at its keys.

    If the origin does not say the latter, the next write asks again. The question is about a missing key: an origin may
    show an object to a caller that must not learn what is missing, to whom it answers 403 there.
    """
    absent = ObjectKey(context.object_key.bucket, f"{context.slot.prefix.key_prefix}.forebay/absent")
    async with aclosing(ExpectedVersionQuery(context, absent)) as question:
        goes_through(context, reason)
        reply, payload = await _sent(context, with_md5=True)
        try:
            may_look, is_certain = True, (await question.answer()).is_told
        except OriginAnswered:
            may_look, is_certain = False, True
    if reply.status == 200 and is_certain:
        headers = dict(reply.headers)
        is_md5 = payload.md5 is not None and unquote(headers.get("etag", "")) == payload.md5().hex()
        told = BucketCapabilities(
            is_md5 and makes_md5_etags(headers),
            may_look,
            context.services.clock.now(),
            accepted=judged_values(context.request.headers),
        )

        def learn(tx: JournalTransaction) -> None:
            known = tx.buckets.capabilities(context.object_key.bucket) or told
            tx.buckets.learn(context.object_key.bucket, replace(told, multipart_etags=known.multipart_etags))

        with suppress(BufferUnavailable):  # the origin has the object: the next write learns about the bucket
            await context.buffer.journal.change(learn)
    return reply


ANSWER_SECONDS_MAX = 1.0
"""Seconds for which an acknowledgement waits for the origin alone; after that its version is unknown."""

UNANSWERED_MAX = 64
"""The most late questions of a worker (`AppContext.unanswered`). With more, new writes do not ask."""

_TOO_MANY_REQUESTS = 429
_REFUSALS = frozenset({400, 403})
"""Statuses of a HEAD that the origin itself answers: a customer key, and want of rights."""


def waits_for_version(context: RequestContext, capabilities: BucketCapabilities | None) -> bool:
    """Return whether an acknowledgement waits for the origin's version of the key.

    It need not in a slot that may be behind the origin if the bucket honours conditions: then the flush itself finds
    out what it would overwrite, at the moment when it would. A version that another node of the cluster has left there
    lately must be known: the flush would take it for a stranger's.
    """
    if context.stamps.get(context.object_key, 0) != 0:
        return True
    honours = capabilities is not None and capabilities.conditions.put is Honoured.YES
    return not (honours and context.slot.consistency in ("ttl", "immutable"))


class ExpectedVersionQuery:
    """One question to the origin about its version of a key, while the body comes in. Close it.

    Until it has answered, `nothing` holds: the version that this gateway has last seen there. Without `waits`, the
    origin is not asked if that is within the slot's bound, and its answer is used only if it has come. A late one may
    show a later write of others: Forebay learns nothing from it but whether it may look.
    """

    def __init__(self, context: RequestContext, key: ObjectKey | None = None, *, waits: bool = True) -> None:
        self._context = context
        self._clock = context.services.clock
        self._key = key or context.object_key
        self._waits = waits
        self._is_left = False
        catalog, unanswered = context.services.catalog, context.services.unanswered
        seen = catalog.last_seen(self._key, context.slot)
        self.nothing = ExpectedVersion.unknown(self._clock, seen.etag)
        is_known = not waits and seen.is_current
        if is_known and seen.etag is None:
            self.nothing = replace(self.nothing, absent=True)
        is_asked = waits or not (is_known or len(unanswered) >= UNANSWERED_MAX)
        self._asking = asyncio.create_task(self._ask()) if is_asked else None

    async def answer(self, deadline: float | None = None) -> ExpectedVersion:
        """Return the answer if it comes by a monotonic time, or else within a second from now; otherwise `nothing`.

        OriginAnswered if the origin refuses.
        """
        if self._asking is None:
            return self.nothing
        seconds = ANSWER_SECONDS_MAX if deadline is None else max(0.0, deadline - self._clock.monotonic())
        if self._waits and not self._asking.done():
            waiting = asyncio.ensure_future(self._clock.sleep(seconds))
            try:
                await asyncio.wait({self._asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        return self._asking.result() if self._asking.done() else self.nothing

    async def aclose(self) -> None:
        """End the question. A late one ends by itself: cancelling it would close a connection."""
        if self._asking is None:
            return
        if self._waits or self._asking.done():
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
            return
        self._is_left = True
        unanswered = self._context.services.unanswered
        unanswered.add(self._asking)
        self._asking.add_done_callback(unanswered.discard)

    async def _ask(self) -> ExpectedVersion:
        context, nothing = self._context, self.nothing
        try:
            head = await context.services.catalog.ask(self._key, context.slot, headers={})
        except OriginAnswered as answer:
            is_told = is_of_s3(dict(answer.headers))
            if answer.status == 404:
                return replace(nothing, etags=() if is_told else nothing.etags, absent=True, known=is_told)
            is_refusal = is_told or answer.status in _REFUSALS
            if answer.status >= 500 or answer.status == _TOO_MANY_REQUESTS or not is_refusal:
                return nothing
            if self._is_left:
                await learn_unreadable(context, answer)
                return nothing
            raise
        except (OriginUnreachable, OriginBodyError):
            return nothing
        etag = head.version.etag
        return replace(nothing, etags=(etag,), known=True) if etag else nothing


async def expected_version(context: RequestContext, question: ExpectedVersionQuery) -> ExpectedVersion:
    """Return the answer, unless this gateway has changed the key since. OriginAnswered if the origin refuses."""
    deadline = context.services.clock.monotonic() + ANSWER_SECONDS_MAX
    return await current_expected_version(context, await question.answer(deadline), deadline)


async def current_expected_version(
    context: RequestContext, expected: ExpectedVersion, deadline: float | None = None
) -> ExpectedVersion:
    """Return `expected` if this gateway has not changed the key past the buffer since; else the version there now.

    The journal knows changes through the buffer. `deadline` is monotonic; None: a second from now. OriginAnswered if
    the origin refuses.
    """
    own = context.buffer.look(lambda tx: tx.buckets.last_own_write(context.object_key))
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


async def claimed_version(
    context: RequestContext, acknowledged_at: float, unchanged: Coroutine[Any, Any, ExpectedVersion]
) -> tuple[Claimed, ExpectedVersion]:
    """Claim the request's key for this node; return the version to expect: `unchanged`, or what other nodes made of it.

    Raises as `claimed`, and OriginAnswered if the origin refuses.
    """
    with closing(unchanged):
        claim = await claimed(context, acknowledged_at)
        try:
            if not claim.is_changed:
                return claim, await unchanged
            async with aclosing(ExpectedVersionQuery(context)) as question:
                return claim, await question.answer()
        except BaseException:
            await claim.release()
            raise


def is_for_want_of_rights(refusal: OriginAnswered) -> bool:
    return refusal.status in (401, 403)


UNCLAIMED = (OriginAnswered, RegistryAway)
"""Why a write is not claimed, or its version not known, and so goes through."""


async def goes_through_unseen(context: RequestContext, refusal: OriginAnswered | RegistryAway) -> None:
    """Send a write through that the registry does not take, or whose present version the origin does not tell.

    If the right is missing, later writes go through too: otherwise one might be acknowledged while the origin is slow
    to refuse, and its flush be refused for ever.
    """
    if isinstance(refusal, RegistryAway):
        goes_through(context, Reason.REGISTRY)
    else:
        goes_through(context, Reason.BUCKET_UNREADABLE)
        await learn_unreadable(context, refusal)


async def learn_unreadable(context: RequestContext, refusal: OriginAnswered) -> None:
    if not is_for_want_of_rights(refusal):
        return
    bucket, now = context.object_key.bucket, context.services.clock.now()

    def learn(tx: JournalTransaction) -> None:
        known = tx.buckets.capabilities(bucket)
        if known is not None:
            tx.buckets.learn(bucket, replace(known, may_look=False, learned_at=now))

    with suppress(BufferUnavailable):  # then the next write learns it
        await context.buffer.journal.change(learn)
