"""What else reads something that is frozen: copies take the frozen version, and what nobody pins is refused."""

from __future__ import annotations

from gateway.errors import OriginAnswered
from gateway.metadata.snapshots.registry import SnapshotObject
from gateway.operations.exchange import Exchange
from gateway.operations.frozen.objects import CHANGED, is_frozen, pinned, strong
from gateway.operations.reply import Reply
from gateway.policy.slots import Slot
from gateway.s3.conditions import etag_matches
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import parse_copy_source

_IF_MATCH = "x-amz-copy-source-if-match"


def source_slot(exchange: Exchange) -> Slot | None:
    """The slot that freezes what a request copies; None: none does."""
    text = exchange.request.headers.get("x-amz-copy-source")
    if text is None:
        return None
    source = parse_copy_source(text).key
    slot = exchange.services.slots.find(source.bucket, source.key)
    return slot if slot.consistency == "snapshot" else None


async def pin_source(exchange: Exchange, slot: Slot) -> None:
    """Have a copy take the frozen version of its source, or nothing: 412 where the origin does not have it any more.

    Some servers ignore conditions on a copy's source: the origin is asked which version it has, just before.
    """
    shelf, request = exchange.services.snapshots, exchange.request
    shelved = shelf.of(slot) or await shelf.opened(slot)
    key = parse_copy_source(request.headers["x-amz-copy-source"]).key.key
    frozen = shelved.find(key)
    if frozen is None:
        raise s3_error("NoSuchKey", Key=key)
    etag = strong(frozen.version.etag)
    if not etag_matches(request.headers.get(_IF_MATCH, "*"), etag):
        raise s3_error("PreconditionFailed", Condition=_IF_MATCH)
    if not await _is_there(exchange, slot, frozen):
        raise s3_error(
            "PreconditionFailed",
            f"{frozen.version.key} is frozen by the snapshot {shelved.manifest.name!r} with ETag {etag}, and the "
            "origin does not have that version any more.",
            Condition=_IF_MATCH,
        )
    request.headers = {**request.headers, _IF_MATCH: etag}


async def _is_there(exchange: Exchange, slot: Slot, frozen: SnapshotObject) -> bool:
    try:
        head = await exchange.services.catalog.ask(frozen.version.key, slot, headers=pinned({}, frozen))
    except OriginAnswered as answer:
        if answer.status not in CHANGED:
            raise
        return False
    return is_frozen(head, frozen)


def refuse(exchange: Exchange) -> Reply:
    """What would tell of the present state of something that is frozen."""
    raise s3_error("NotImplemented", "This is frozen by a snapshot, and what is asked for is not a part of it.")
