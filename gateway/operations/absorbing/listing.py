"""ListObjectsV2 and ListObjects where something may be pending: it is in the page before the page is cut.

what is pending, then the page without it (index, origin, snapshots) → both merged → more of each until the page is full

Continuation tokens are ours wherever that may happen, or one would be good no more when something has become pending,
or was flushed, between two pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gateway.errors import OriginError, S3Error
from gateway.metadata.listing.index import Found
from gateway.metadata.listing.pages import END, ListRequest, prefix_end
from gateway.metadata.listing.ranges import Bound, bound_of
from gateway.operations.absorbing.barrier import flushed_under
from gateway.operations.absorbing.merging import Merging
from gateway.operations.absorbing.pending_rows import PendingRow, PendingRows, pending_rows
from gateway.operations.exchange import Exchange
from gateway.operations.frozen.listing import frozen_page
from gateway.operations.list_objects import (
    Listing,
    ListOutcome,
    list_reply,
    looked_up,
    origin_page,
    strict_page,
    told_page,
    wanted_of,
)
from gateway.operations.plain import is_plain
from gateway.operations.reply import Answer, Reply
from gateway.policy.slots import Slot
from gateway.s3.http_dates import format_iso_date
from gateway.s3.list_query import list_query
from gateway.s3.list_result import EntryForm, ListedEntry
from gateway.s3.list_token import decode_token
from gateway.s3.multipart_checksums import upload_checksum_type
from gateway.s3.requests import Operation
from gateway.s3.xml_writer import element
from gateway.writeback.journal.records import PendingObject

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer
    from gateway.writeback.journal.book import Book

Handler = Callable[[Exchange], Answer]

LISTINGS = frozenset({Operation.LIST_OBJECTS, Operation.LIST_OBJECTS_V2})

_ROWS_AT_A_LOOK = 128
"""Of the journal, which is read on the event loop: about a millisecond."""


def listing_handler(exchange: Exchange, buffer: WritebackBuffer, handler: Handler) -> Handler:
    """The handler for a LIST; `handler` itself where nothing can be pending among what is listed."""
    if not _may_concern(exchange, buffer):
        return handler
    if is_plain(exchange.request):
        return lambda exchange: _merged(exchange, buffer)
    return lambda exchange: _afterwards(exchange, buffer, handler)


def _may_concern(exchange: Exchange, buffer: WritebackBuffer) -> bool:
    """Whether anything is pending, or may become so before the next page, or was when the page before was given."""
    bucket, prefix = exchange.request.bucket or "", exchange.request.parameter("prefix") or ""
    if any(slot.write == "back" for slot in exchange.services.slots.under(bucket, prefix)):
        return True
    return buffer.look(lambda book: _is_anything(book, bucket, prefix)) or _has_our_token(exchange)


def _is_anything(book: Book, bucket: str, prefix: str) -> bool:
    start = prefix.encode()
    if book.listing(bucket, start, prefix_end(start) if start else END, 1):
        return True
    return next(iter(book.uploads(bucket, prefix)), None) is not None


def _has_our_token(exchange: Exchange) -> bool:
    token = exchange.request.parameter("continuation-token")
    if not token or exchange.request.operation is not Operation.LIST_OBJECTS_V2:
        return False
    try:
        decode_token(token)
    except S3Error:
        return False
    return True


async def _afterwards(exchange: Exchange, buffer: WritebackBuffer, handler: Handler) -> Reply:
    """What only the origin can judge it answers when it has everything."""
    await flushed_under(exchange, buffer, exchange.request.bucket or "", exchange.request.parameter("prefix") or "")
    answer = handler(exchange)
    return answer if isinstance(answer, Reply) else await answer


async def _merged(exchange: Exchange, buffer: WritebackBuffer) -> Reply:
    query = list_query(exchange.request)
    bucket = exchange.request.bucket or ""
    slots = list(exchange.services.slots.under(bucket, query.prefix))
    listing = Listing(exchange, bucket, query, wanted_of(query), bound_of(slots) or Bound(0.0, 0.0))
    sources = _Sources(listing, buffer, slots)
    merging = Merging(listing.wanted, sources.look, sources.ask, pending_entry)
    page = await merging.page()
    forms = merging.forms
    if query.with_owner and any(form.owner is None for form in forms):
        owner = next((form.owner for form in forms if form.owner), None) or await _owner(listing)
        forms = [form if form.owner is not None else form._replace(owner=owner) for form in forms]
    return list_reply(listing, Found(page, forms), sources.outcome)


@dataclass(slots=True)
class _Sources:
    """The two that a page is merged of. `_outcomes` are how the pages without what is pending came about."""

    _listing: Listing
    _buffer: WritebackBuffer
    _slots: list[Slot]
    _outcomes: set[ListOutcome] = field(default_factory=set)

    @property
    def outcome(self) -> ListOutcome:
        if "stale" in self._outcomes:
            return "stale"
        return next(iter(self._outcomes)) if len(self._outcomes) == 1 else "partial"

    async def look(self, wanted: ListRequest, count: int) -> PendingRows:
        """Rows of what is pending, by the look: other requests come in between."""
        bucket, rows = self._listing.bucket, list[PendingRow]()
        while True:
            found = self._buffer.look(lambda book: pending_rows(book, bucket, wanted, _ROWS_AT_A_LOOK))  # noqa: B023
            rows += found.rows
            end = found.end
            if end is None or len(rows) >= count:
                return PendingRows(rows, end)
            await asyncio.sleep(0)
            wanted = replace(wanted, after=end.last, skip=end.is_prefix)

    async def ask(self, wanted: ListRequest) -> Found:
        """The page without what is pending."""
        listing = replace(self._listing, wanted=wanted)
        found, outcome = await self._found(listing)
        self._outcomes.add(outcome)
        return found

    async def _found(self, listing: Listing) -> tuple[Found, ListOutcome]:
        kinds = {slot.consistency for slot in self._slots}
        if "snapshot" in kinds:
            return await frozen_page(listing.exchange, listing.query, listing.wanted)
        if "strict" in kinds:
            return await strict_page(listing), "miss"
        known = looked_up(listing)
        return (known, "hit") if isinstance(known, Found) else await told_page(listing, known)


async def _owner(listing: Listing) -> str:
    """The owner of another object of the bucket; nothing where there is none, or the origin does not say."""
    try:
        page = await origin_page(listing, ListRequest(limit=1))
    except OriginError:
        return ""
    return (page.entries[0].form.owner or "") if page.entries else ""


def pending_entry(pending: PendingObject) -> ListedEntry:
    """A pending object as the origin will list it, but for the date, which is that of the acknowledgement.

    S3 writes dates in milliseconds and means whole seconds, as HEAD does.
    """
    modified = format_iso_date(pending.acknowledged_at).removesuffix("Z") + ".000Z"
    storage_class = element("StorageClass", pending.fixed.headers.get("x-amz-storage-class", "STANDARD"))
    form = EntryForm(_checksum(pending), None, storage_class)
    return ListedEntry(pending.key.key.encode(), modified, pending.etag, pending.size_bytes, form)


def _checksum(pending: PendingObject) -> str:
    """Algorithm and type where Create or PutObject has declared one; what S3 computes by itself is not foretold."""
    declared = pending.fixed.headers.get("x-amz-checksum-algorithm") if pending.multipart else None
    if declared is not None:
        found = upload_checksum_type(declared, pending.fixed.headers.get("x-amz-checksum-type"))
    elif pending.checksums and not pending.multipart:
        found = next(iter(pending.checksums)), "FULL_OBJECT"
    else:
        return ""
    return element("ChecksumAlgorithm", found[0].upper()) + element("ChecksumType", found[1])
