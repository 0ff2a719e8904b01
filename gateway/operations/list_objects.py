"""ListObjectsV2 and ListObjects (S3 API): from the listing index where the slots let it answer, else the origin's page.

    known, and fresh enough? → that, and the truth of keys just written asked for; else one page of the origin, learned

Continuation tokens are ours wherever the index may answer: a place in the key space, so that a listing goes on from
index or origin, on any worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.errors import OriginAnswered, OriginBodyError, OriginUnreachable
from gateway.metadata.catalog import is_down
from gateway.metadata.listing.index import AuthoritativeEntry, Found, NeedsLookup
from gateway.metadata.listing.pages import ListRequest, Page
from gateway.metadata.listing.ranges import Bound, bound_of
from gateway.metadata.listing.records import contents_xml, encoded, numbered
from gateway.operations.exchange import Exchange
from gateway.operations.joined import forward_joined
from gateway.operations.plain import is_plain
from gateway.operations.reading import insists
from gateway.operations.reply import Answer, Reply
from gateway.origin.client import OriginRequest, OriginResponse
from gateway.s3.list_document import list_document
from gateway.s3.list_query import ListQuery, list_query
from gateway.s3.list_result import PAGE_SIZE_BYTES_MAX, ListedPage, PageChain, parse_listed_page
from gateway.s3.list_token import ListPlace

ListOutcome: TypeAlias = Literal["hit", "partial", "miss", "stale"]
"""How a page came about, as the catalog's observer is told."""

TRUTHS_MAX = 16
"""Keys just written that are asked about one by one; with more in a page, the page is asked for."""

"""Pages without a key, in a row, after which an origin is not asked for more."""

_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024
_KEY_BYTES_MAX = 1024
_GREATEST = "\U0010ffff".encode()
"""The greatest character: behind a prefix and it lies nearly nothing that begins with the prefix."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One LIST on its way to an answer."""

    exchange: Exchange
    bucket: str
    query: ListQuery
    wanted: ListRequest
    bound: Bound


def list_objects(exchange: Exchange) -> Answer:
    """Answer from the index, or ask and learn; where a slot among those listed is strict, the origin answers."""
    request, services = exchange.request, exchange.services
    bucket, prefix = request.bucket or "", request.parameter("prefix") or ""
    bound = bound_of(services.slots.under(bucket, prefix))
    if bound is None or not is_plain(request):
        return forward_joined(exchange)
    query = list_query(request)
    listing = Listing(exchange, bucket, query, wanted_of(query), bound)
    found = looked_up(listing)
    return list_reply(listing, found, "hit") if isinstance(found, Found) else _answered(listing, found)


async def _answered(listing: Listing, known: NeedsLookup | None) -> Reply:
    found, outcome = await told_page(listing, known)
    return list_reply(listing, found, outcome)


def looked_up(listing: Listing) -> Found | NeedsLookup | None:
    """What the index knows of the page at once."""
    return None if insists(listing.exchange) else _find(listing)


async def told_page(listing: Listing, known: NeedsLookup | None) -> tuple[Found, ListOutcome]:
    """The page for which the origin must be asked, and how it came about: a `listed` outcome of the observer."""
    return await _ask(listing) if known is None else await _ask_about(listing, known.keys)


async def strict_page(listing: Listing) -> Found:
    """The origin's page, of which nothing is learned."""
    question = "page", listing.bucket, listing.wanted, listing.query.with_owner
    joined = listing.exchange.services.catalog.joined_calls
    return _found(await joined.ask(question, lambda: _page_with_keys(listing)))


def wanted_of(query: ListQuery) -> ListRequest:
    place = query.place or ListPlace(query.start_after.encode())
    return ListRequest(query.prefix.encode(), query.delimiter.encode(), query.limit, place.last, place.is_prefix)


def _find(
    listing: Listing, *, stale: bool = False, truths: dict[bytes, AuthoritativeEntry] | None = None
) -> Found | NeedsLookup | None:
    index = listing.exchange.services.catalog.listing
    return index.find(
        listing.bucket,
        listing.wanted,
        listing.bound,
        with_owner=listing.query.with_owner,
        stale=stale,
        truths=truths,
    )


async def _ask_about(listing: Listing, keys: Sequence[bytes]) -> tuple[Found, ListOutcome]:
    """The page that the index knows but for these keys; the origin's page when there are too many."""
    truths: dict[bytes, AuthoritativeEntry] = {}
    while len(truths) + len(keys) <= TRUTHS_MAX:
        try:
            told = await asyncio.gather(*(_truth(listing, key) for key in keys))
        except OriginAnswered:
            break
        truths |= dict(zip(keys, told, strict=True))
        found = _find(listing, truths=truths)
        if isinstance(found, Found):
            return found, "partial"
        if found is None:
            break
        keys = found.keys
    return await _ask(listing)


async def _truth(listing: Listing, key: bytes) -> AuthoritativeEntry:
    """What a LIST of the origin says of one key, to the letter: a HEAD says less, and other things."""
    index = listing.exchange.services.catalog.listing
    asked = index.asked(listing.bucket)
    page = await origin_page(listing, ListRequest(key, limit=1))
    entry = page.entries[0] if page.entries and page.entries[0].key == key else None
    truth = AuthoritativeEntry(entry)
    index.learn_truth(listing.bucket, key, truth, asked)
    return truth


async def _ask(listing: Listing) -> tuple[Found, ListOutcome]:
    """The origin's page; an older one of the index where the origin does not answer and the slots allow it."""
    try:
        page = await _told(listing)
    except (OriginUnreachable, OriginAnswered) as error:
        stale = _find(listing, stale=True) if is_down(error) else None
        if not isinstance(stale, Found):
            raise
        return stale, "stale"
    return _found(page), "miss"


async def _told(listing: Listing) -> ListedPage:
    """The origin's page: asked for now, or just before by another who asks for the same."""
    index = listing.exchange.services.catalog.listing
    asked = index.asked(listing.bucket)

    async def send() -> ListedPage:
        page = await _page_with_keys(listing)
        index.learn(listing.bucket, listing.wanted, page, asked, merge_seconds=listing.bound.merge_seconds)
        return page

    if insists(listing.exchange):
        return await send()
    question = listing.bucket, listing.wanted, listing.query.with_owner
    return await index.questions.ask(question, asked, listing.bound, send)


async def _page_with_keys(listing: Listing) -> ListedPage:
    """One page; pages without a key, as of origins that skip deleted versions, are followed by the next."""
    origin_token, chain = None, PageChain()
    while True:
        page = await origin_page(listing, listing.wanted, origin_token)
        origin_token = page.next_token
        if page.entries or page.prefixes or origin_token is None:
            return page
        chain.follow((), origin_token)


async def _send(listing: Listing, wanted: ListRequest, origin_token: str | None) -> OriginResponse:
    query = [("list-type", "2"), ("encoding-type", "url"), ("prefix", wanted.prefix.decode())]
    query.append(("max-keys", str(wanted.limit)))
    if wanted.delimiter:
        query.append(("delimiter", wanted.delimiter.decode()))
    if listing.query.with_owner:
        query.append(("fetch-owner", "true"))
    if origin_token is not None:
        query.append(("continuation-token", origin_token))
    elif wanted.after:
        query.append(("start-after", _start_after(wanted)))
    request = OriginRequest("GET", listing.bucket, None, query, slot=listing.exchange.slot.name)
    return await listing.exchange.services.origin.send(request)


def _start_after(wanted: ListRequest) -> str:
    """The last key that the origin shall not list. Of what it lists nevertheless, `origin_page` takes nothing twice."""
    if wanted.skip and len(wanted.after) + len(_GREATEST) <= _KEY_BYTES_MAX:
        return (wanted.after + _GREATEST).decode()
    return wanted.after.decode()


async def origin_page(listing: Listing, wanted: ListRequest, origin_token: str | None = None) -> ListedPage:
    """What of the origin's page lies behind the place that was asked for; raises OriginAnswered for every error."""
    async with await _send(listing, wanted, origin_token) as response:
        if response.status != 200:
            document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
            raise OriginAnswered(response.status, list(response.headers.items()), document)
        page = parse_listed_page(await _document(listing, response), with_owner=listing.query.with_owner)
    entries = [entry for entry in page.entries if entry.key >= wanted.start]
    return ListedPage(entries, [prefix for prefix in page.prefixes if prefix >= wanted.start], page.next_token)


async def _document(listing: Listing, response: OriginResponse) -> bytes:
    with listing.exchange.services.buffers.holding() as held:
        body = bytearray()
        async for piece in response.stream():
            held.grow(len(piece))
            body += piece
            if len(body) > PAGE_SIZE_BYTES_MAX:
                raise OriginBodyError("the origin's answer to ListObjectsV2 is too long")
        return bytes(body)


def _found(page: ListedPage) -> Found:
    listed, forms = numbered(page.entries)
    last_key = listed[-1][0] if listed else b""
    last_prefix = page.prefixes[-1] if page.prefixes else b""
    last, is_truncated = max(last_key, last_prefix), page.next_token is not None
    return Found(Page(listed, page.prefixes, is_truncated, last, last == last_prefix != b""), forms)


def list_reply(listing: Listing, found: Found, outcome: ListOutcome) -> Reply:
    query, page = listing.query, found.page
    url = query.is_url_encoded
    body = list_document(
        listing.bucket,
        query,
        contents_xml(page.keys, found.templates, url=url, owner=query.with_owner),
        [encoded(prefix, url=url) for prefix in page.prefixes],
        count=len(page.keys) + len(page.prefixes),
        following=ListPlace(page.last, page.last_is_prefix) if page.is_truncated else None,
    )
    listing.exchange.services.catalog.observer.listed(listing.exchange.slot.name, outcome)
    return Reply(200, [("content-type", "application/xml")], body, "hit" if outcome == "stale" else outcome)
