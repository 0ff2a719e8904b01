"""Listing a prefix at the origin, a page at a time (S3 API, "ListObjectsV2"); the listing index learns every page."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gateway.errors import OriginAnswered
from gateway.metadata.catalog import Listing
from gateway.metadata.listing.pages import ListRequest
from gateway.metadata.listing.ranges import bound_of
from gateway.origin.client import Origin, OriginRequest, Purpose
from gateway.policy.prefixes import Prefix
from gateway.policy.slots import Slots
from gateway.s3.list_result import PAGE_SIZE_BYTES_MAX, ListedEntry, ListedPage, parse_listed_page

_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024


async def list_pages(
    origin: Origin, listing: Listing, slots: Slots, prefix: Prefix, *, start_after: str | None = None
) -> AsyncGenerator[list[ListedEntry], None]:
    """All objects under `prefix` in order, behind the key `start_after`.

    Raises OriginAnswered when the origin refuses, OriginUnreachable, and OriginBodyError for an answer that is no list.
    """
    bound = bound_of(slots.under(prefix.bucket, prefix.key_prefix))
    slot = slots.find(prefix.bucket, prefix.key_prefix).name
    wanted, token = ListRequest(prefix.key_prefix.encode(), after=(start_after or "").encode()), None
    while True:
        asked = listing.asked(prefix.bucket)
        page = await _page(origin, _request(prefix, wanted, token, slot))
        if bound is not None:
            listing.learn(prefix.bucket, wanted, page, asked, merge_seconds=bound.merge_seconds)
        yield page.entries
        token = page.next_token
        if token is None:
            return
        if page.entries:
            wanted = ListRequest(wanted.prefix, after=page.entries[-1].key)


def _request(prefix: Prefix, wanted: ListRequest, token: str | None, slot: str) -> OriginRequest:
    query = [("list-type", "2"), ("encoding-type", "url"), ("prefix", prefix.key_prefix)]
    if token is not None:
        query.append(("continuation-token", token))
    elif wanted.after:
        query.append(("start-after", wanted.after.decode()))
    return OriginRequest("GET", prefix.bucket, None, query, purpose=Purpose.WARM, slot=slot)


async def _page(origin: Origin, request: OriginRequest) -> ListedPage:
    async with await origin.send(request) as response:
        if response.status != 200:
            document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
            raise OriginAnswered(response.status, list(response.headers.items()), document)
        return parse_listed_page(await response.read(PAGE_SIZE_BYTES_MAX), with_owner=False)
