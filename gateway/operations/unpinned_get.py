"""GetObject of an object of which nothing is known: version and bytes in one answer of the origin.

What HEAD would say comes with the GET's own head, and its body is the beginning of the fill. Whatever does not go
smoothly is not judged here: the usual way, a HEAD first, then finds out what to answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.blocks.filling.unpinned_get import UnpinnedGet, UnpinnedResponse
from gateway.errors import OriginAnswered, OriginBodyError
from gateway.metadata.catalog import CHECKSUM_MODE
from gateway.metadata.entries import ObjectHead, object_head_of_get
from gateway.objects import ByteRange, ObjectKey
from gateway.operations.context import Exchange
from gateway.operations.versions import vary_headers
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.s3.conditions import first_and_last
from gateway.s3.requests import S3Request

_CONDITIONS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range"})

_NO_OBJECT_BYTES = 2**60
"""No object is so long."""


class Refused(OriginAnswered):
    """The origin has answered the GET with an error, whose document was not read."""


class Seen(NamedTuple):
    """What a first look has brought: `head` None when that makes no sense by itself. The answer is to be closed."""

    head: ObjectHead | None
    answer: UnpinnedResponse


def begin(exchange: Exchange, headers: Mapping[str, str]) -> tuple[UnpinnedGet, ByteRange] | None:
    """The right to ask for the bytes that the request begins with, and which these are; None when the version is to be
    asked for first. While the look lasts, others wait for the same bytes.
    """
    asked = _asked(exchange.request)
    if asked is None:
        return None
    blocks = exchange.services.blocks
    wanted = blocks.first_fetched(*asked, exchange.slot.name)
    look = blocks.first_look(exchange.object_key, wanted.first, vary_headers(headers))
    return (look, wanted) if look is not None else None


async def ask(exchange: Exchange, headers: Mapping[str, str], look: UnpinnedGet, wanted: ByteRange) -> Seen:
    """Ask for the bytes. What the answer says of the object is remembered where it may be.

    Raises Refused, and OriginUnreachable.
    """
    catalog, key = exchange.services.catalog, exchange.object_key
    since = catalog.now(key)
    whole = brings_checksums(exchange, headers)
    request = _request(key, exchange.slot.name, headers, None if whole else wanted)
    response = await exchange.services.origin.send(request)
    answer = UnpinnedResponse(look, wanted, response)
    try:
        head = _understood(key, response, answer)
        look.known_empty = head is None
        if head is not None:
            catalog.learned(head, exchange.slot, since, headers=headers, with_checksums=whole)
        return Seen(head, answer)
    except BaseException:
        await answer.aclose()
        raise


def brings_checksums(exchange: Exchange, headers: Mapping[str, str]) -> bool:
    """Whether the answer says the checksums of the object: those of a range do not come."""
    return CHECKSUM_MODE in headers and "range" not in exchange.request.headers


def _asked(request: S3Request) -> tuple[int, int | None] | None:
    """The bytes that are asked for; None where that, or whether any are wanted, depends on the version."""
    if request.parameter("partNumber") is not None or not _CONDITIONS.isdisjoint(request.headers):
        return None
    asked = first_and_last(request.headers.get("range"))
    return asked if asked is not None and asked[0] < _NO_OBJECT_BYTES else None


def _request(key: ObjectKey, slot: str, headers: Mapping[str, str], wanted: ByteRange | None) -> OriginRequest:
    """The whole object is asked for where its checksums are, which do not come with a part of it."""
    onward = {**headers, "accept-encoding": "identity"}
    if wanted is not None:
        onward["range"] = f"bytes={wanted.first}-{wanted.last}"
    return OriginRequest("GET", key.bucket, key.key, headers=onward, purpose=Purpose.LIVE, slot=slot)


def _understood(key: ObjectKey, response: OriginResponse, answer: UnpinnedResponse) -> ObjectHead | None:
    """What the response says; the answer's range is then that of its body."""
    first = answer.range.first
    if response.status == 416:
        return None  # of an empty object, or behind the end: HEAD tells which
    if response.status not in (200, 206):
        raise Refused(response.status, list(response.headers.items()), b"")
    try:
        head, body = object_head_of_get(key, response.status, response.headers)
    except OriginBodyError:
        return None
    if body is None or not body.first <= first < body.stop:
        return None
    answer.range = body
    return head
