"""GetObject in a slot that is frozen by a snapshot.

    in the snapshot? → its head known, and its bytes warm? → at once; else that version from the origin, or from blocks

No answer ever holds a byte of another version: what the origin is asked for is pinned to the frozen ETag. What the
origin does not have any more is served as long as all of it is cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass

from gateway.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead, is_down, is_plainly_asked
from gateway.metadata.snapshots.registry import OpenSnapshot, SnapshotObject
from gateway.objects import BodyStream, ByteRange, HeldSpan
from gateway.operations import first_look
from gateway.operations.exchange import Exchange
from gateway.operations.first_look import Refused
from gateway.operations.frozen.objects import (
    CHANGED,
    Changed,
    ask,
    explained,
    forward_frozen,
    found,
    is_frozen,
    known_head,
    learn,
    listed_head,
    pinned,
    with_snapshot,
)
from gateway.operations.get_object import (
    arrived_reply,
    asked_range,
    at_once,
    fit_for_blocks,
    response_overrides,
    serve,
)
from gateway.operations.reading import judged_by_the_origin, needs_the_origin
from gateway.operations.reply import Answer, Reply


@dataclass(frozen=True, slots=True)
class _Get:
    """One GET on its way to an answer."""

    exchange: Exchange
    shelved: OpenSnapshot
    headers: dict[str, str]
    overrides: Mapping[str, str]


def get_frozen(exchange: Exchange) -> Answer:
    """The frozen version; 404 for what was not there when the snapshot was made, 412 for what is lost."""
    return with_snapshot(exchange, _get)


def _get(exchange: Exchange, shelved: OpenSnapshot) -> Answer:
    overrides = response_overrides(exchange)
    if needs_the_origin(exchange.request):
        return forward_frozen(exchange, shelved)
    headers = judged_by_the_origin(exchange.request)
    head = known_head(exchange, shelved, headers)
    if head is not None and fit_for_blocks(exchange.request, head):
        reply = at_once(exchange, head, overrides)
        if reply is not None:
            return reply
    return _fetched(_Get(exchange, shelved, headers, overrides), head)


async def _fetched(get: _Get, head: ObjectHead | None) -> Reply:
    frozen = found(get.exchange, get.shelved)
    try:
        if head is None:
            reply = await _at_first_look(get, frozen)
            if reply is not None:
                return reply
            head = await ask(get.exchange, get.shelved, frozen, get.headers)
    except (Changed, OriginUnreachable) as error:
        return await _from_blocks_alone(get, frozen, error)
    except OriginAnswered as error:
        if is_down(error):
            return await _from_blocks_alone(get, frozen, error)
        return await forward_frozen(get.exchange, get.shelved)  # HEAD has no error document
    except OriginBodyError:
        return await forward_frozen(get.exchange, get.shelved)
    if not fit_for_blocks(get.exchange.request, head):
        return await forward_frozen(get.exchange, get.shelved)
    if get.exchange.object_key.key in get.shelved.lost:
        return await _of_lost(get, frozen, head)
    return await _served(get, frozen, head)


async def _at_first_look(get: _Get, frozen: SnapshotObject) -> Reply | None:
    """The answer where the origin gives head and bytes at once; None: the head is to be asked for."""
    exchange, headers = get.exchange, get.headers
    begun = first_look.begin(exchange, headers)
    if begun is None:
        return None
    look, wanted = begun
    with look:
        async with look.turns:
            try:
                head, answer = await first_look.ask(exchange, pinned(headers, frozen), look, wanted)
            except Refused:
                return None
            try:
                if head is None or not is_frozen(head, frozen):
                    return None
                if is_plainly_asked(headers):
                    whole = CHECKSUM_MODE in headers and "range" not in exchange.request.headers
                    learn(exchange, get.shelved, head, with_checksums=whole)
                if not fit_for_blocks(exchange.request, head):
                    return None
                reply = arrived_reply(exchange, head, headers, get.overrides, answer)
                if reply is not None:
                    return reply
                return _noting(get, await serve(exchange, head, headers, get.overrides, answer))
            finally:
                await answer.aclose()


async def _served(get: _Get, frozen: SnapshotObject, head: ObjectHead) -> Reply:
    """From blocks, and what is missing of them from the origin; the first bytes tell whether it still has them."""
    try:
        return _noting(get, await serve(get.exchange, head, get.headers, get.overrides))
    except OriginAnswered as error:
        if error.status not in CHANGED:
            raise
        raise await explained(get.exchange, get.shelved, frozen, error) from None
    except OriginBodyError as error:
        raise await explained(get.exchange, get.shelved, frozen, error) from None


async def _of_lost(get: _Get, frozen: SnapshotObject, head: ObjectHead) -> Reply:
    """Of an object that the origin did not have any more: no body is begun that cannot be sent to its end."""
    byte_range = head.part or asked_range(get.exchange.request, head)
    if not _is_cached(get, head, byte_range):
        try:
            await ask(get.exchange, get.shelved, frozen, get.headers)
        except Changed as error:
            raise await explained(get.exchange, get.shelved, frozen, error) from None
    return await _served(get, frozen, head)


async def _from_blocks_alone(get: _Get, frozen: SnapshotObject, error: Exception) -> Reply:
    """The origin says nothing of the frozen version: it is served where all that is asked for of it is cached.

    With what was learned of its head, were it without checksums, else with what the listing has said.
    """
    exchange = get.exchange
    head = exchange.services.catalog.of_version(frozen.version, with_checksums=False) or listed_head(frozen)
    if exchange.request.parameter("partNumber") is None and fit_for_blocks(exchange.request, head):
        reply = at_once(exchange, head, get.overrides)
        if reply is not None:
            return reply
        if _is_cached(get, head, asked_range(exchange.request, head)):
            return await _served(get, frozen, head)
    if isinstance(error, Changed):
        raise await explained(exchange, get.shelved, frozen, error) from None
    raise error


def _is_cached(get: _Get, head: ObjectHead, byte_range: ByteRange | None) -> bool:
    size_bytes = head.version.size_bytes
    if size_bytes == 0:
        return True
    blocks, slot = get.exchange.services.blocks, get.exchange.slot
    return blocks.holds(head.version, byte_range or ByteRange(0, size_bytes - 1), slot=slot.name)


def _noting(get: _Get, reply: Reply) -> Reply:
    """The reply; where the origin turns out not to have the version any more in the midst of it, that is noted."""
    if not isinstance(reply.body, (bytes, memoryview, HeldSpan)):
        reply.body = _noted(get, reply.body)
    return reply


async def _noted(get: _Get, body: BodyStream) -> BodyStream:
    async with aclosing(body):
        try:
            async for piece in body:
                yield piece
        except (OriginAnswered, OriginBodyError):
            get.shelved.lose(get.exchange.object_key.key)
            raise
