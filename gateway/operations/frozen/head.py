"""HeadObject in a slot that is frozen by a snapshot: what the origin has once said of the frozen version."""

from __future__ import annotations

from gateway.errors import OriginAnswered, OriginBodyError
from gateway.metadata.catalog import ObjectHead
from gateway.metadata.snapshots.registry import OpenSnapshot
from gateway.operations.exchange import Exchange
from gateway.operations.frozen.objects import (
    Changed,
    ask,
    explained,
    forward_frozen,
    found,
    known_head,
    with_snapshot,
)
from gateway.operations.head_object import head_reply, is_special
from gateway.operations.passthrough import no_body
from gateway.operations.reading import judged_by_the_origin
from gateway.operations.reply import Answer, Reply
from gateway.s3.forwarding import towards_client


def head_frozen(exchange: Exchange) -> Answer:
    """404 for what was not there when the snapshot was made; 412 where nothing was learned before it was lost."""
    return with_snapshot(exchange, _head)


def _head(exchange: Exchange, shelved: OpenSnapshot) -> Answer:
    if is_special(exchange.request):
        return forward_frozen(exchange, shelved, cache="forwarded")
    headers = judged_by_the_origin(exchange.request)
    head = known_head(exchange, shelved, headers)
    return _known(exchange, head) if head is not None else _asked(exchange, shelved, headers)


async def _asked(exchange: Exchange, shelved: OpenSnapshot, headers: dict[str, str]) -> Reply:
    frozen = found(exchange, shelved)
    try:
        return head_reply(exchange, await ask(exchange, shelved, frozen, headers))
    except Changed as error:
        known = exchange.services.catalog.of_version(frozen.version, with_checksums=False)
        if known is not None:
            return _known(exchange, known)  # learned from who did not ask for checksums
        raise await explained(exchange, shelved, frozen, error) from None
    except OriginAnswered as answer:
        return Reply(answer.status, towards_client(dict(answer.headers)), no_body())
    except OriginBodyError:
        return await forward_frozen(exchange, shelved, cache="forwarded")


def _known(exchange: Exchange, head: ObjectHead) -> Reply:
    reply = head_reply(exchange, head)
    reply.cache = "hit"
    return reply
