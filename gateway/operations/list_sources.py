"""The sources of a listing's entries: pending writes, snapshots, the listing index, the origin.

A source gives rows from a place on: keys, and common prefixes if the request has a delimiter, in order, and the place
up to which it knows them; merged_page.py merges the sources and cuts the page.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Literal, NamedTuple, TypeAlias

from gateway.core.errors import OriginAnswered, OriginBodyError, OriginUnreachable, SnapshotUnusable, StoreUnavailable
from gateway.core.model import MissReason
from gateway.metadata.catalog import is_down
from gateway.metadata.listing.index import AuthoritativeEntry, FoundPage, ListingIndex, NeedsLookup, found_of
from gateway.metadata.listing.pages import ListRequest, Page, key_successor, prefix_end, take
from gateway.metadata.listing.ranges import KeyBound
from gateway.metadata.listing.records import pack, template_of, templates_of
from gateway.metadata.snapshots.registry import OpenSnapshot, unusable
from gateway.operations.context import RequestContext
from gateway.operations.merged_page import Kind, PageRow, Rows
from gateway.operations.read_wishes import wants_revalidation
from gateway.origin.client import OriginRequest, OriginResponse, error_of, page_rows_of
from gateway.policy.slots import Slot, Slots
from gateway.s3.checksums import upload_checksum_type
from gateway.s3.headers import format_iso_date
from gateway.s3.list_result import (
    PAGE_SIZE_BYTES_MAX,
    EntryTemplate,
    ListedEntry,
    ListedPage,
    PageChain,
    parse_listed_page,
)
from gateway.s3.listings import ListQuery
from gateway.s3.xml_writer import element
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.transaction import JournalTransaction

ListOutcome: TypeAlias = Literal["hit", "partial", "miss", "stale"]
"""The origin of a page, as metrics count it."""

TRUTHS_MAX = 16
"""Keys just written that are asked about one by one; with more on a page, the whole page is asked for."""

_KEY_BYTES_MAX = 1024
_OF_ANY_AGE = KeyBound(math.inf, math.inf)
_GREATEST = "\U0010ffff".encode()
"""The greatest character: next to nothing that begins with a prefix sorts after the prefix and this."""

_ROWS_AT_A_LOOK = 128
"""Rows per read of the journal, on the event loop: about a millisecond."""

_PENDING_ROWS_MIN = 128
"""Pending rows that are read for a page, however small: they may be tombstones."""

_TOMBSTONES_PASSED_MAX = 128
"""Tombstones passed under a common prefix in search of an object; with more, the merge decides."""


@dataclass(slots=True)
class Listing:
    """One LIST on its way to an answer. `outcomes` are those of its sources.

    The snapshots that it reads are `held`, so that all of it comes from the same ones.
    """

    context: RequestContext
    bucket: str
    query: ListQuery
    slots: Sequence[Slot]
    bound: KeyBound
    outcomes: set[ListOutcome] = field(default_factory=set)
    reason: MissReason | None = None
    """Why the origin was asked, if it was."""
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def index(self) -> ListingIndex:
        return self.context.services.catalog.listing

    @property
    def outcome(self) -> ListOutcome:
        if "stale" in self.outcomes:
            return "stale"
        return next(iter(self.outcomes)) if len(self.outcomes) == 1 else "partial"


class SourceEntry(NamedTuple):
    """A listing's entry for an object: its record, and the template that the record would name."""

    record: bytes
    template: EntryTemplate


ObjectRow: TypeAlias = PageRow[SourceEntry]
ObjectRows: TypeAlias = Rows[SourceEntry]


def rows_of(page: Page, templates: Sequence[EntryTemplate]) -> ObjectRows:
    rows: list[ObjectRow] = [
        PageRow(key, Kind.ENTRY, content=SourceEntry(record, templates[template_of(record)]))
        for key, record in page.keys
    ]
    rows += [PageRow(prefix, Kind.PREFIX) for prefix in page.prefixes]
    rows.sort(key=lambda row: row.name)
    if not page.is_truncated:
        return Rows(rows)
    end = prefix_end(page.last) if page.last_is_prefix else key_successor(page.last)
    return Rows(rows, end, has_more=True)


# The bucket: what the index knows, else the origin


class BucketSource:
    """A bucket's content, within the bound of the slots; `strict`: as the origin has it now, learning nothing."""

    def __init__(self, listing: Listing, *, strict: bool) -> None:
        self._listing = listing
        self._strict = strict

    async def seek(self, wanted: ListRequest) -> ObjectRows:
        inside = wanted.rolled_up(wanted.start)
        if inside is not None and inside < wanted.start and wanted.is_behind(inside):
            # The origin leaves out a common prefix that it is asked to begin within.
            return Rows([PageRow(inside, Kind.DOUBTFUL_PREFIX)], min(prefix_end(inside), wanted.stop))
        limit = min(max(wanted.limit, 1), 1000)
        found = await self.page(replace(wanted, limit=limit))
        return _until(rows_of(found.page, found.templates), wanted.stop)

    def known(self, wanted: ListRequest) -> FoundPage | NeedsLookup | None:
        if self._strict or wants_revalidation(self._listing.context):
            return None
        found = self._find(wanted)
        if isinstance(found, FoundPage):
            self._listing.outcomes.add("hit")
        return found

    async def page(self, wanted: ListRequest) -> FoundPage:
        """Return the page, from the origin if the index does not know it."""
        known = self.known(wanted)
        return known if isinstance(known, FoundPage) else await self.fetch_page(wanted, known)

    async def fetch_page(self, wanted: ListRequest, known: NeedsLookup | None) -> FoundPage:
        """Ask the origin for a page; return an older one of the index if it does not answer and the slots allow it."""
        listing, outcomes = self._listing, self._listing.outcomes
        if self._strict:
            question = "page", listing.bucket, wanted, listing.query.with_owner
            joined = listing.context.services.catalog.joined_calls
            listing.reason = "not-kept"
            found = found_of(await joined.ask(question, lambda: self._page_with_keys(wanted)))
            outcomes.add("miss")
            return found
        if known is not None:
            looked_up = await self._looked_up(wanted, known.keys)
            if looked_up is not None:
                listing.reason = "changed"
                outcomes.add("partial")
                return looked_up
        is_known = self._find(replace(wanted, limit=1), stale=True, bound=_OF_ANY_AGE) is not None
        listing.reason = "expired" if is_known else "first-read"
        try:
            found = await self._shared_page(wanted)
        except (OriginUnreachable, OriginAnswered) as error:
            may_be_older = is_down(error) and not wants_revalidation(listing.context)
            stale = self._find(wanted, stale=True) if may_be_older else None
            if not isinstance(stale, FoundPage):
                raise
            outcomes.add("stale")
            return stale
        outcomes.add("miss")
        return found

    def _find(
        self,
        wanted: ListRequest,
        *,
        stale: bool = False,
        truths: Mapping[bytes, AuthoritativeEntry] | None = None,
        bound: KeyBound | None = None,
    ) -> FoundPage | NeedsLookup | None:
        listing = self._listing
        with_owner, bound = listing.query.with_owner, bound or listing.bound
        return listing.index.find(listing.bucket, wanted, bound, with_owner=with_owner, stale=stale, truths=truths)

    async def _looked_up(self, wanted: ListRequest, keys: Sequence[bytes]) -> FoundPage | None:
        """Return the index's page after looking up these keys; None if they are too many, or the origin refuses."""
        truths: dict[bytes, AuthoritativeEntry] = {}
        while len(truths) + len(keys) <= TRUTHS_MAX:
            try:
                told = await asyncio.gather(*(self._lookup(key) for key in keys))
            except OriginAnswered:
                return None
            truths |= dict(zip(keys, told, strict=True))
            found = self._find(wanted, truths=truths)
            if not isinstance(found, NeedsLookup):
                return found
            keys = found.keys
        return None

    async def _lookup(self, key: bytes) -> AuthoritativeEntry:
        """Return the origin's LIST entry of one key, to the letter: a HEAD has less, and other fields."""
        bucket, index = self._listing.bucket, self._listing.index
        asked = index.asked(bucket)
        page = await origin_page(self._listing, ListRequest(key, limit=1))
        entry = page.entries[0] if page.entries and page.entries[0].key == key else None
        truth = AuthoritativeEntry(entry)
        index.learn_truth(bucket, key, truth, asked)
        return truth

    async def _shared_page(self, wanted: ListRequest) -> FoundPage:
        listing, index = self._listing, self._listing.index
        asked = index.asked(listing.bucket)

        merge_seconds = listing.bound.merge_seconds
        if wants_revalidation(listing.context):
            found = found_of(await self._page_with_keys(wanted))
            await index.learn_now(listing.bucket, wanted, found, asked, merge_seconds=merge_seconds)
            return found

        async def send() -> FoundPage:
            found = found_of(await self._page_with_keys(wanted))
            index.learn(listing.bucket, wanted, found, asked, merge_seconds=merge_seconds)
            return found

        question = listing.bucket, wanted, listing.query.with_owner
        return await index.questions.ask(question, asked, listing.bound, send)

    async def _page_with_keys(self, wanted: ListRequest) -> ListedPage:
        """Return one page; skip pages without a key, as of origins that skip deleted versions."""
        origin_token, chain = None, PageChain()
        while True:
            page = await origin_page(self._listing, wanted, origin_token)
            origin_token = page.next_token
            if page.entries or page.prefixes or origin_token is None:
                return page
            chain.follow((), origin_token)


def _until(rows: ObjectRows, stop: bytes) -> ObjectRows:
    """Return the rows before `stop`; common prefixes that reach past it may hold nothing before it."""
    if not rows.rows or prefix_end(rows.rows[-1].name) <= stop:
        return rows
    kept = [
        row._replace(kind=Kind.DOUBTFUL_PREFIX) if row.kind is Kind.PREFIX and prefix_end(row.name) > stop else row
        for row in rows.rows
        if row.name < stop
    ]
    if len(kept) == len(rows.rows) and (rows.end is None or rows.end < stop):
        return rows._replace(rows=kept)
    return Rows(kept)


async def origin_page(listing: Listing, wanted: ListRequest, origin_token: str | None = None) -> ListedPage:
    """Return the part of the origin's page from the wanted place on. Raises OriginAnswered for every error."""
    query: list[tuple[str, str | None]] = [("list-type", "2"), ("encoding-type", "url")]
    query += [("prefix", wanted.prefix.decode()), ("max-keys", str(wanted.limit))]
    if wanted.delimiter:
        query.append(("delimiter", wanted.delimiter.decode()))
    if listing.query.with_owner:
        query.append(("fetch-owner", "true"))
    if origin_token is not None:
        query.append(("continuation-token", origin_token))
    elif wanted.start > wanted.prefix:
        query.append(("start-after", before(wanted.start)))
    context = listing.context
    request = OriginRequest("GET", listing.bucket, None, query, slot=context.slot.name, takes_rows=True)
    async with await context.services.origin.send(request) as response:
        page = page_rows_of(response)
        if page is None:
            document = await _document(context, response, PAGE_SIZE_BYTES_MAX)
            page = parse_listed_page(document, with_owner=listing.query.with_owner)
    context.services.catalog.listed(listing.bucket, page.entries, listing.slots)
    entries = [entry for entry in page.entries if entry.key >= wanted.start]
    return ListedPage(entries, [prefix for prefix in page.prefixes if prefix >= wanted.start], page.next_token)


async def listing_document(
    context: RequestContext, bucket: str, query: Sequence[tuple[str, str | None]], size_bytes_max: int
) -> bytes:
    """Return the origin's answer to a question about what a bucket holds. Raises OriginAnswered for every error."""
    request = OriginRequest("GET", bucket, None, query, slot=context.slot.name)
    async with await context.services.origin.send(request) as response:
        return await _document(context, response, size_bytes_max)


async def _document(context: RequestContext, response: OriginResponse, size_bytes_max: int) -> bytes:
    if response.status != 200:
        raise await error_of(response)
    with context.services.buffers.holding() as grow:
        body = bytearray()
        async for piece in response.stream():
            grow(len(piece))
            body += piece
            if len(body) > size_bytes_max:
                raise OriginBodyError("the origin's answer to a listing is too long")
        return bytes(body)


def before(place: bytes) -> str:
    """Return a `start-after` with which the origin lists `place` and all behind; it may list a little more."""
    if place.endswith(b"\0"):
        return place[:-1].decode("utf-8", "ignore")
    for text in (place[:-1] + bytes([place[-1] - 1]) + _GREATEST if place else b"", place[:-1]):
        with suppress(UnicodeDecodeError):
            if len(text) <= _KEY_BYTES_MAX:
                return text.decode()
    return place[:-1].decode("utf-8", "ignore")


# Snapshots


class SnapshotSource:
    """The content of the bucket by a snapshot alone."""

    def __init__(self, listing: Listing, opened: OpenSnapshot) -> None:
        self._listing = listing
        self._opened = opened

    async def seek(self, wanted: ListRequest) -> ObjectRows:
        """Raise S3Error if the snapshot cannot be used."""
        found = self.page(replace(wanted, limit=max(wanted.limit, 1)))
        return rows_of(found.page, found.templates)

    def page(self, wanted: ListRequest) -> FoundPage:
        """Return the page. Raises as `seek`."""
        data = self._opened.snapshot.data
        try:
            with data.keys() as keys:
                page = take(keys, wanted, wanted.stop)
            if page is None:
                raise SnapshotUnusable("a page of it cannot be read")
            if max(templates_of(page.keys), default=-1) >= len(data.templates):
                raise SnapshotUnusable("a record names a template that is not there")
        except (StoreUnavailable, SnapshotUnusable) as error:
            raise unusable(self._opened.manifest.name, error) from error
        self._listing.outcomes.add("hit")
        return FoundPage(page, data.templates)


class SourcePart(NamedTuple):
    """The places [start, stop) of a bucket; `slot` is the one that freezes them, or None."""

    start: bytes
    stop: bytes
    slot: Slot | None


class PartitionedSource:
    """A bucket whose frozen parts come from their snapshots, the rest from the origin."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._snapshots: dict[str, SnapshotSource] = {}

    async def seek(self, wanted: ListRequest) -> ObjectRows:
        """Return rows of the first part: the next begin at its end. S3Error if a snapshot is missing."""
        slots, stop = self._listing.context.services.slots, max(wanted.start, wanted.stop)
        part = next(iter(parts(slots, self._listing.bucket, wanted.start, stop)), None)
        if part is None:
            return Rows(())
        source = BucketSource(self._listing, strict=True) if part.slot is None else await self._snapshot(part.slot)
        rows = await source.seek(replace(wanted, until=part.stop))
        return rows._replace(end=part.stop) if rows.end is None and part.stop < stop else rows

    async def _snapshot(self, slot: Slot) -> SnapshotSource:
        source = self._snapshots.get(slot.name)
        if source is None:
            registry = self._listing.context.services.snapshots
            opened = self._listing.held.enter_context(registry.holding(await registry.opened(slot)))
            source = self._snapshots[slot.name] = SnapshotSource(self._listing, opened)
        return source


def parts(slots: Slots, bucket: str, start: bytes, stop: bytes) -> list[SourcePart]:
    """Return [start, stop) of a bucket in order; adjacent ranges that nothing freezes are one part."""
    found: list[SourcePart] = []
    prefixes = [(slot.prefix.key_prefix.encode(), slot) for slot in slots.of_bucket(bucket)]
    edges = {edge for prefix, _ in prefixes for edge in (prefix, prefix_end(prefix))}
    inner = sorted({start, stop, *(edge for edge in edges if start < edge < stop)})
    for first, last in pairwise(inner):
        slot = next((slot for prefix, slot in prefixes if prefix <= first < prefix_end(prefix)), None)
        if slot is not None and slot.consistency == "snapshot":
            found.append(SourcePart(first, last, slot))
        elif found and found[-1].slot is None:
            found[-1] = found[-1]._replace(stop=last)
        else:
            found.append(SourcePart(first, last, None))
    return found


# What is pending


async def seek_pending(listing: Listing, wanted: ListRequest) -> ObjectRows:
    """Return rows of the pending writes of this node, which take precedence over the bucket.

    They are read before the bucket: an object that the flush moves in between is in both, and none is missed. Entries
    of pending objects have the owner None until they get another. Other requests run between the looks.
    """
    rows: list[ObjectRow] = []
    while True:
        looking = partial(pending_rows, bucket=listing.bucket, wanted=wanted, count=_ROWS_AT_A_LOOK)
        found = listing.context.buffer.look(looking)
        rows += found.rows
        if found.end is None or len(rows) >= max(wanted.limit, _PENDING_ROWS_MIN):
            return Rows(rows, found.end)
        await asyncio.sleep(0)
        wanted = replace(wanted, begin=found.end)


def pending_rows(tx: JournalTransaction, bucket: str, wanted: ListRequest, count: int) -> ObjectRows:
    """Return the first rows, `count` or a few more; `wanted.limit` does not matter.

    Nothing under a common prefix is scanned: the search goes on at the prefix's end.
    """
    rows: list[ObjectRow] = []
    place, at_once = wanted.start, 1
    while len(rows) < count:
        found = tx.writes.listing(bucket, place, wanted.stop, at_once) if place < wanted.stop else ()
        plain = list(takewhile(lambda one: wanted.rolled_up(_name(one)) is None, found))
        rows += map(_pending_row, plain)
        if len(plain) < len(found):
            common = wanted.rolled_up(_name(found[len(plain)])) or b""
            if wanted.is_behind(common):
                rows.append(PageRow(common, _kind_of_prefix(tx, bucket, common, place)))
            place, at_once = prefix_end(common), 1
        elif len(found) < at_once:
            return Rows(rows)
        else:
            place, at_once = key_successor(_name(found[-1])), min(4 * at_once, _ROWS_AT_A_LOOK)
    return Rows(rows, place)


def _pending_row(pending: Write) -> ObjectRow:
    if pending.deleted:
        return PageRow(_name(pending), Kind.TOMBSTONE)
    entry = pending_entry(pending)
    return PageRow(entry.key, Kind.ENTRY, content=SourceEntry(pack(entry, 0), entry.template))


def _kind_of_prefix(tx: JournalTransaction, bucket: str, common: bytes, place: bytes) -> Kind:
    for count in (1, _TOMBSTONES_PASSED_MAX):
        if any(not one.deleted for one in tx.writes.listing(bucket, max(common, place), prefix_end(common), count)):
            return Kind.PREFIX
    return Kind.DOUBTFUL_PREFIX


def _name(pending: Write) -> bytes:
    return pending.key.key.encode()


def pending_entry(pending: Write) -> ListedEntry:
    """Return a pending object's entry as the origin will list it, but with the date of the acknowledgement.

    S3 writes dates in milliseconds and means whole seconds, as HEAD does.
    """
    modified = format_iso_date(pending.acknowledged_at).removesuffix("Z") + ".000Z"
    storage_class = element("StorageClass", pending.spec.headers.get("x-amz-storage-class", "STANDARD"))
    template = EntryTemplate(_checksum(pending), None, storage_class)
    return ListedEntry(pending.key.key.encode(), modified, pending.etag, pending.size_bytes, template)


def _checksum(pending: Write) -> str:
    """Return algorithm and type if Create or PutObject has declared one; S3's own default is not foretold."""
    declared = pending.spec.headers.get("x-amz-checksum-algorithm") if pending.multipart else None
    if declared is not None:
        found = upload_checksum_type(declared, pending.spec.headers.get("x-amz-checksum-type"))
    elif pending.checksums and not pending.multipart:
        found = next(iter(pending.checksums)), "FULL_OBJECT"
    else:
        return ""
    return element("ChecksumAlgorithm", found[0].upper()) + element("ChecksumType", found[1])


def is_frozen_under(slots: Iterable[Slot]) -> bool:
    return any(slot.consistency == "snapshot" for slot in slots)
