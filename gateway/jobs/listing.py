"""Listing a prefix at the origin, a page at a time (S3 API, "ListObjectsV2")."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gateway.errors import OriginAnswered
from gateway.origin.client import Origin, OriginRequest, Purpose
from gateway.policy.prefixes import Prefix
from gateway.s3.list_result import PAGE_SIZE_BYTES_MAX, ListedObject, parse_list_page

_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024


async def list_pages(
    origin: Origin, prefix: Prefix, *, slot: str, start_after: str | None = None
) -> AsyncGenerator[list[ListedObject], None]:
    """All objects under `prefix` in order, behind the key `start_after`.

    Raises OriginAnswered when the origin refuses, OriginUnreachable, and OriginBodyError for an answer that is no list.
    """
    token: str | None = None
    while True:
        query: list[tuple[str, str | None]] = [("list-type", "2"), ("encoding-type", "url")]
        query.append(("prefix", prefix.key_prefix))
        if token is not None:
            query.append(("continuation-token", token))
        elif start_after is not None:
            query.append(("start-after", start_after))
        request = OriginRequest("GET", prefix.bucket, None, query, purpose=Purpose.WARM, slot=slot)
        async with await origin.send(request) as response:
            if response.status != 200:
                document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
                raise OriginAnswered(response.status, list(response.headers.items()), document)
            page = parse_list_page(await response.read(PAGE_SIZE_BYTES_MAX))
        yield page.objects
        token = page.next_token
        if token is None:
            return
