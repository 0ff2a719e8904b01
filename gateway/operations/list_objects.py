"""ListObjectsV2 and ListObjects (S3 API): one page out of the sources that know the bucket (list_sources.py).

    one source knows the page → that; else the rows of all, the first source that names a key decides → the page is cut

Continuation tokens are ours wherever anything but the origin may answer: a place in the key space, so that a listing
goes on from any source, on any worker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gateway.core.errors import OriginBodyError, OriginError, S3Error
from gateway.metadata.catalog import is_remembered
from gateway.metadata.listing.index import FoundPage, NeedsLookup, found_of
from gateway.metadata.listing.pages import ListRequest, Page, prefix_end
from gateway.metadata.listing.ranges import KeyBound, bound_of
from gateway.metadata.listing.records import contents_xml, encoded, with_template
from gateway.operations.context import Answer, RequestContext, Response, xml_response
from gateway.operations.list_sources import (
    BucketSource,
    Listing,
    PartitionedSource,
    SnapshotSource,
    SourceEntry,
    is_frozen_under,
    origin_page,
    parts,
    seek_pending,
)
from gateway.operations.merged_page import ListSource, MergedPage
from gateway.operations.other_nodes import seek_elsewhere
from gateway.operations.passthrough import forward, forward_joined, is_plain
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import quote
from gateway.s3.list_result import EntryTemplate, listed_objects
from gateway.s3.listings import ListPlace, ListQuery, decode_token, list_document, list_query
from gateway.s3.requests import BUCKET_SUBRESOURCES, Operation
from gateway.telemetry import metrics
from gateway.writeback.journal.transaction import JournalTransaction

_COSTS_NOTHING = frozenset({"x-amz-request-payer"})


def list_objects(context: RequestContext) -> Answer:
    """Answer from memory, or ask and learn; requests that only the origin can judge go there."""
    request = context.request
    slots = list(context.services.slots.under(request.bucket or "", request.parameter("prefix") or ""))
    is_frozen, bound = is_frozen_under(slots), bound_of(slots)
    if not is_plain(request, besides=_COSTS_NOTHING if is_frozen else frozenset()):
        if is_frozen:
            raise s3_error(
                "NotImplemented",
                "A snapshot freezes a part of this listing, and cannot answer a request with this header.",
            )
        return _forwarded(context, slots)
    is_merged = may_be_merged(context)
    if bound is None and not is_frozen and not is_merged:
        return _forwarded(context, slots)
    query = list_query(request)
    listing = Listing(context, request.bucket or "", query, slots, bound or KeyBound(0.0, 0.0))
    if _wanted(query).start >= _wanted(query).stop:  # no answer shows what the index knows of others' keys
        listing.outcomes.add("hit" if is_frozen else "miss")
        return _response(listing, FoundPage(Page(), [])) if is_frozen else _nothing(listing)
    if is_merged:
        return _merged(listing)
    return _frozen(listing) if is_frozen else _of_bucket(listing)


_ETAG = re.compile(rb"<ETag>([^<]*)</ETag>")
_VERSION = re.compile(r"<ETag>([^<]*)</ETag>(?:\s*<Checksum\w+>[^<]*</Checksum\w+>)*\s*<Size>([0-9]{1,15})</Size>")


async def _forwarded(context: RequestContext, slots: Sequence[Slot]) -> Response:
    """Return the origin's own answer; the catalog learns from it as from a page of ours."""
    reply = await forward_joined(context)
    if reply.status != 200 or not isinstance(reply.body, bytes):
        return reply
    bucket, catalog = context.request.bucket or "", context.services.catalog
    if any(is_remembered(slot, {}) for slot in slots):
        with suppress(OriginBodyError):  # the client gets it as it is
            catalog.listed(bucket, listed_objects(reply.body), slots)
    else:
        versions = _VERSION.findall(reply.body.decode("utf-8", "replace"))
        catalog.listed_sizes(bucket, [(etag.replace("&quot;", '"'), int(size)) for etag, size in versions])
    return reply


async def forwarded_read(context: RequestContext) -> Response:
    """Return the origin's own answer to a read that is no operation of ours. The catalog sees its objects."""
    request, services = context.request, context.services
    names = {name for name, _ in request.query}
    if request.method == "GET" and request.bucket and request.key is None and names.isdisjoint(BUCKET_SUBRESOURCES):
        return await _forwarded(context, list(services.slots.under(request.bucket, "")))
    if "attributes" not in names or request.key is None or "versionId" in names:
        return await forward(context)
    reply = await forward_joined(context)
    found = _ETAG.search(reply.body) if isinstance(reply.body, bytes) else None
    if found is not None:
        services.catalog.shown(context.object_key, quote(found[1].decode().replace("&quot;", "")))
    return reply


async def _nothing(listing: Listing) -> Response:
    """Return an empty page if the origin has the bucket."""
    found = found_of(await origin_page(listing, replace(_wanted(listing.query), limit=1)))
    listing.reason = "not-kept"
    return _response(listing, found)


def _of_bucket(listing: Listing) -> Answer:
    source, wanted = BucketSource(listing, strict=False), _wanted(listing.query)
    known = source.known(wanted)
    return _response(listing, known) if isinstance(known, FoundPage) else _fetched(listing, source, wanted, known)


async def _fetched(listing: Listing, source: BucketSource, wanted: ListRequest, known: NeedsLookup | None) -> Response:
    return _response(listing, await source.fetch_page(wanted, known))


def _frozen(listing: Listing) -> Answer:
    wanted = _wanted(listing.query)
    found = parts(listing.context.services.slots, listing.bucket, wanted.start, max(wanted.start, wanted.stop))
    if len(found) == 1 and found[0].slot is not None:
        opened = listing.context.services.snapshots.of(found[0].slot)
        if opened is not None:
            return _response(listing, SnapshotSource(listing, opened).page(wanted))
    return _merged(listing)


# Pages of several sources


def may_be_merged(context: RequestContext) -> bool:
    """Return whether anything is pending in the listing, may become so before its next page, or was before."""
    services, request = context.services, context.request
    bucket, prefix = request.bucket or "", request.parameter("prefix") or ""
    writes, slots = context.cluster_writes, list(services.slots.under(bucket, prefix))
    if writes is not None and any(map(writes.asks, slots)):
        return True
    if services.writeback is None:
        return False
    if any(slot.is_buffered for slot in slots):
        return True
    return context.buffer.look(lambda tx: _is_anything_pending(tx, bucket, prefix)) or _has_our_token(context)


def _is_anything_pending(tx: JournalTransaction, bucket: str, prefix: str) -> bool:
    start = prefix.encode()
    if tx.writes.listing(bucket, start, prefix_end(start), 1):
        return True
    return next(iter(tx.uploads.under(bucket, prefix)), None) is not None


def _has_our_token(context: RequestContext) -> bool:
    token = context.request.parameter("continuation-token")
    if not token or context.request.operation is not Operation.LIST_OBJECTS_V2:
        return False
    try:
        decode_token(token)
    except S3Error:
        return False
    return True


async def _merged(listing: Listing) -> Response:
    merged = MergedPage(_wanted(listing.query), _sources(listing))
    with listing.held:
        await merged.fill()
    page, templates = page_of(merged)
    if listing.query.with_owner and any(template.owner is None for template in templates):
        owner = next((template.owner for template in templates if template.owner), None)
        if owner is None:
            with suppress(OriginError):  # of another object; nothing without one, or if the origin does not say
                others = (await origin_page(listing, ListRequest(limit=1))).entries
                owner = others[0].template.owner if others else None
        templates = [one if one.owner is not None else one._replace(owner=owner or "") for one in templates]
    return _response(listing, FoundPage(page, templates))


def page_of(merged: MergedPage[SourceEntry]) -> tuple[Page, list[EntryTemplate]]:
    """Return the page, and the templates that its records number."""
    page, numbers = Page(is_truncated=merged.is_truncated), dict[EntryTemplate, int]()
    for row in merged.rows:
        if row.content is None:
            page.prefixes.append(row.name)
        else:
            number = numbers.setdefault(row.content.template, len(numbers))
            page.keys.append((row.name, with_template(row.content.record, number)))
    if merged.rows:
        page.last, page.last_is_prefix = merged.rows[-1].name, merged.rows[-1].content is None
    return page, list(numbers)


def _sources(listing: Listing) -> list[ListSource[SourceEntry]]:
    kinds = {slot.consistency for slot in listing.slots}
    if "snapshot" in kinds:
        source: ListSource[SourceEntry] = PartitionedSource(listing).seek
    else:
        source = BucketSource(listing, strict="strict" in kinds).seek
    sources, writes = [source], listing.context.cluster_writes
    if writes is not None:
        sources.insert(0, partial(seek_elsewhere, writes, listing))
    if listing.context.services.writeback is not None:
        sources.insert(0, partial(seek_pending, listing))
    return sources


def _wanted(query: ListQuery) -> ListRequest:
    place = query.place or ListPlace(query.start_after.encode())
    return ListRequest(query.prefix.encode(), query.delimiter.encode(), query.limit, place.last, place.is_prefix)


def _response(listing: Listing, found: FoundPage) -> Response:
    query, page, outcome = listing.query, found.page, listing.outcome
    url = query.is_url_encoded
    body = list_document(
        listing.bucket,
        query,
        contents_xml(page.keys, found.templates, url=url, owner=query.with_owner),
        [encoded(prefix, url=url) for prefix in page.prefixes],
        count=len(page.keys) + len(page.prefixes),
        following=ListPlace(page.last, page.last_is_prefix) if page.is_truncated else None,
    )
    metrics.LISTING_PAGES.add(1, listing.context.slot.name, outcome)
    reply = xml_response(body, "hit" if outcome == "stale" else outcome)
    if reply.cache != "hit":
        reply.reason = listing.reason
    return reply
