"""PutObject in a slot with `write = "back"`, and the choice of writes to acknowledge before the origin has them.

    can its answer be foretold? is there room for it? → body verified, staged, synced, while the origin is asked
    for its version of the key → journal → 200

Whatever only the origin can judge goes through: conditions, customer keys, owners and payers, rights, and headers that
are not known to be accepted. A body whose digest the client announced is verified here either way.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.core.errors import BufferUnavailable, OriginAnswered
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import forward_write
from gateway.operations.payload import Payload, receive_payload
from gateway.operations.writeback.bodies import apply_backpressure, room_for_body, stage_body
from gateway.operations.writeback.expected_version import (
    ExpectedVersionQuery,
    absent_key,
    expected_version,
    goes_through_unseen,
)
from gateway.operations.writeback.flush_wait import FlushWait
from gateway.operations.writeback.named_files import named_by_bytes, names_files, receive_manifest
from gateway.operations.writeback.write_back_policy import (
    Reason,
    check_stored,
    fixed_headers,
    is_supported_header,
    makes_md5_etags,
    refuse_unless_kept_here,
    storage_classes,
    takes_local_etag,
    why_of_bucket,
    why_of_headers,
    why_of_key,
)
from gateway.operations.writeback.write_through import goes_through, written_through
from gateway.s3.checksums import PREFIX
from gateway.s3.headers import filter_request_headers, unquote
from gateway.writeback.bounds import Bound
from gateway.writeback.journal.records import BucketCapabilities, ExpectedVersion, Part, Write, WriteSpec

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer
    from gateway.writeback.journal.transaction import JournalTransaction

LEARNED_AGAIN_SECONDS = 600.0
"""Seconds after which a bucket whose writes are not absorbed is looked at again: rights and encryption may change."""

UNREADABLE_AGAIN_SECONDS = 15.0
"""The seconds if the gateway may not look at its objects: a refused HEAD does not tell missing rights from a revoked
key, and checkpoints must be absorbed soon after the key is renewed."""


async def buffer_put(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Acknowledge an object on this node's disk, or write it through if its answer cannot be foretold."""
    reason = why_of_key(context.object_key.key) or why_of_headers(context.request.headers, is_supported_header)
    if context.slot.write == "scratch":
        refuse_unless_kept_here(reason)
        return await _keep(context, buffer)
    capabilities = buffer.look(lambda tx: tx.buckets.capabilities(context.object_key.bucket))
    if reason is not None:
        return await _through(context, buffer, reason)
    headers, key = context.request.headers, context.object_key.key
    reason = why_of_bucket(capabilities, headers=headers, may_be_local=takes_local_etag(context), key=key)
    if reason is not None:
        learns = capabilities is None or reason is Reason.STORAGE_CLASS or _is_old(context, capabilities)
        return await (_through_and_learn if learns else _through)(context, buffer, reason)
    check_stored(context.request.headers)
    async with room_for_body(context, buffer, context.slot.name) as bound:
        if bound is None:
            is_local = capabilities is not None and not capabilities.foretells(of_parts=False)
            reply = await _absorb(context, buffer, is_etag_local=is_local)
    if bound is None:
        await apply_backpressure(context, buffer, context.slot.name)
        return reply
    return await _through(context, buffer, bound)


def _is_old(context: RequestContext, capabilities: BucketCapabilities) -> bool:
    again_seconds = LEARNED_AGAIN_SECONDS if capabilities.may_look else UNREADABLE_AGAIN_SECONDS
    return not 0 <= context.services.clock.now() - capabilities.learned_at < again_seconds


async def _keep(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Acknowledge an object that stays here, without asking the origin."""
    check_stored(context.request.headers)
    async with room_for_body(context, buffer, context.slot.name):
        nothing = ExpectedVersion.unknown(context.services.clock)
        staged = await stage_body(context, buffer, context.slot.name, 1)
        await buffer.acknowledge(_write(context, staged.part, nothing, nothing.asked_at))
    await apply_backpressure(context, buffer, context.slot.name)
    return Response(200, staged.answer_headers, b"", "absorbed")


async def _absorb(context: RequestContext, buffer: WritebackBuffer, *, is_etag_local: bool) -> Response:
    async with aclosing(ExpectedVersionQuery(context)) as question:
        staged = await stage_body(context, buffer, context.slot.name, 1)
        part = staged.part
        try:
            expected = await expected_version(context, buffer, question)
        except OriginAnswered as refusal:
            try:
                await goes_through_unseen(context, buffer, refusal)
                return await _send_staged(context, buffer, part)
            finally:
                await buffer.give_up(part)
        except BaseException:
            await buffer.give_up(part)
            raise
    write = _write(context, part, expected, question.nothing.asked_at)
    await buffer.acknowledge(replace(write, is_etag_local=is_etag_local))
    return Response(200, staged.answer_headers, b"", "absorbed")


def _write(context: RequestContext, part: Part, expected: ExpectedVersion, began_at: float) -> Write:
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
    )


async def _send_staged(context: RequestContext, buffer: WritebackBuffer, part: Part) -> Response:
    checksums = {PREFIX + name: value for name, value in part.checksums.items()}
    payload, wait = Payload(await buffer.body(part), checksums), FlushWait(context, buffer)
    await wait.for_turn(context.object_key)
    if names_files(context) and isinstance(payload.body, bytes):
        await wait.for_files(await named_by_bytes(context, buffer, payload.body))
    return await written_through(context, buffer, forward_write(context, payload))


async def _through(context: RequestContext, buffer: WritebackBuffer, reason: Reason | Bound) -> Response:
    goes_through(context, reason)
    wait = FlushWait(context, buffer)
    await wait.for_turn(context.object_key)
    if not names_files(context):
        return await written_through(context, buffer, forward_write(context))
    payload, named = await receive_manifest(context, buffer)
    await wait.for_files(named)
    return await written_through(context, buffer, forward_write(context, payload))


async def _through_and_learn(context: RequestContext, buffer: WritebackBuffer, reason: Reason) -> Response:
    """Write through, and learn from a bucket's first write its kind of ETags and whether we may look at its keys.

    If the origin does not say the latter, the next write asks again. The question is about a missing key: an origin may
    show an object to a caller that must not learn what is missing.
    """
    async with aclosing(ExpectedVersionQuery(context, absent_key(context))) as question:
        goes_through(context, reason)
        wait = FlushWait(context, buffer)
        await wait.for_turn(context.object_key)
        payload = await receive_payload(context, with_md5=True)
        if names_files(context) and isinstance(payload.body, bytes):
            await wait.for_files(await named_by_bytes(context, buffer, payload.body))
        reply = await written_through(context, buffer, forward_write(context, payload))
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
            storage_classes=storage_classes(context.request.headers),
        )

        def learn(tx: JournalTransaction) -> None:
            known = tx.buckets.capabilities(context.object_key.bucket) or told
            tx.buckets.learn(context.object_key.bucket, replace(told, multipart_etags=known.multipart_etags))

        with suppress(BufferUnavailable):  # the origin has the object: the next write learns about the bucket
            await buffer.journal.change(learn)
    return reply
