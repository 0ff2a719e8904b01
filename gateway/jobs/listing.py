"""Listing at the origin, a page at a time (S3 API, "ListObjectsV2"); asking again while the origin is down or busy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from gateway.core.clock import Clock
from gateway.core.errors import ForebayError, OriginAnswered, OriginUnreachable
from gateway.jobs.job import JobDependencies
from gateway.metadata.listing.index import found_of
from gateway.metadata.listing.pages import ListRequest
from gateway.metadata.listing.ranges import bound_of
from gateway.origin.client import Origin, OriginRequest, Purpose, error_of, page_rows_of
from gateway.policy.slots import Prefix
from gateway.s3.list_result import PAGE_SIZE_BYTES_MAX, ListedEntry, ListedPage, PageChain, parse_listed_page
from gateway.s3.xml import error_code_of

T = TypeVar("T")

ATTEMPTS_MAX = 6
"""About half a minute with the pauses between them."""

_FIRST_PAUSE_SECONDS = 1.0
_RETRYABLE = frozenset({429, 500, 502, 503, 504})


async def with_retries(clock: Clock, ask: Callable[[], Awaitable[T]]) -> T:
    """Return the answer within ATTEMPTS_MAX tries; raise as the last did, at once if it is no "later"."""
    pause_seconds = _FIRST_PAUSE_SECONDS
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            return await ask()
        except (OriginUnreachable, OriginAnswered) as error:
            if isinstance(error, OriginAnswered) and error.status not in _RETRYABLE:
                raise
        await clock.sleep(pause_seconds)
        pause_seconds *= 2
    return await ask()


def failure_text(error: ForebayError) -> str:
    """With the origin's own code, where its answer has one: `the origin answered 404 NoSuchBucket`."""
    if isinstance(error, OriginAnswered):
        return f"the origin answered {error.status} {error_code_of(error.body) or ''}".rstrip()
    return str(error)


async def fetch_page(
    origin: Origin,
    prefix: Prefix,
    *,
    slot: str,
    purpose: Purpose,
    start_after: str = "",
    token: str | None = None,
    with_owner: bool = False,
) -> bytes | ListedPage:
    """Return one page, as its document or as its rows: behind a continuation token, or behind the key `start_after`.

    Raises OriginAnswered when the origin refuses, OriginUnreachable, and OriginBodyError for a page that is too long.
    """
    query = [("list-type", "2"), ("encoding-type", "url"), ("prefix", prefix.key_prefix)]
    if with_owner:
        query.append(("fetch-owner", "true"))
    if token is not None:
        query.append(("continuation-token", token))
    elif start_after:
        query.append(("start-after", start_after))
    async with await origin.send(
        OriginRequest("GET", prefix.bucket, None, query, purpose=purpose, slot=slot, takes_rows=True)
    ) as response:
        if (rows := page_rows_of(response)) is not None:
            return rows
        if response.status != 200:
            raise await error_of(response)
        return await response.read(PAGE_SIZE_BYTES_MAX)


async def list_pages(
    dependencies: JobDependencies, prefix: Prefix, *, start_after: str = "", with_owner: bool = False
) -> AsyncGenerator[list[ListedEntry], None]:
    """All objects under `prefix` in order, behind the key `start_after`; the listing index learns every page.

    Raises as `fetch_page`, and OriginBodyError for an answer that is no list, and for pages without an end.
    """
    listing, slots = dependencies.catalog.listing, dependencies.slots
    under = list(slots.under(prefix.bucket, prefix.key_prefix))
    bound = bound_of(under)
    page_of = partial(
        fetch_page,
        dependencies.origin,
        prefix,
        slot=slots.find(prefix.bucket, prefix.key_prefix).name,
        purpose=Purpose.WARM,
        start_after=start_after,
        with_owner=with_owner,
    )
    wanted, token, chain = ListRequest(prefix.key_prefix.encode(), after=start_after.encode()), None, PageChain()
    while True:
        asked = listing.asked(prefix.bucket)
        told = await with_retries(dependencies.clock, partial(page_of, token=token))
        page = parse_listed_page(told, with_owner=with_owner) if isinstance(told, bytes) else told
        dependencies.catalog.listed(prefix.bucket, page.entries, under)
        if bound is not None:
            listing.learn(prefix.bucket, wanted, found_of(page), asked, merge_seconds=bound.merge_seconds)
        yield page.entries
        token = page.next_token
        if token is None:
            return
        chain.follow([entry.key for entry in page.entries], token)
        if page.entries:
            wanted = ListRequest(wanted.prefix, after=page.entries[-1].key)
