"""ListMultipartUploads (S3 API): the uploads open on this node, by the clients' ids, and the origin's own.

The origin's uploads behind ours are left out: clients know them by our ids, have completed them, or have aborted them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from gateway.core.errors import OriginBodyError
from gateway.core.model import ObjectKey
from gateway.metadata.listing.pages import ListRequest, key_successor, prefix_end
from gateway.operations.context import RequestContext, Response, xml_response
from gateway.operations.list_sources import before, listing_document
from gateway.operations.merged_page import Kind, MergedPage, PageRow, Rows
from gateway.policy.registry import Stores
from gateway.s3.headers import format_iso_date
from gateway.s3.listings import (
    UPLOADS_MAX,
    UPLOADS_SIZE_BYTES_MAX,
    ListedUpload,
    UploadPlace,
    UploadsPage,
    UploadsQuery,
    encode_place,
    is_place,
    parse_uploads_page,
    uploads_document,
    uploads_query,
)
from gateway.s3.xml_writer import element
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.transaction import JournalTransaction

_PAGES_MAX = 100
_T = TypeVar("_T")


class _Listed(NamedTuple):
    """An upload, and whether its id is ours."""

    upload: ListedUpload
    is_ours: bool


_Row = PageRow[_Listed]
_Rows = Rows[_Listed]


async def list_uploads(context: RequestContext) -> Response:
    query = uploads_query(context.request)
    stores = context.cluster_writes.stores if context.cluster_writes is not None else None
    place = _in_journal(context, lambda tx: _place_in(tx, query), query.place)
    if place is not None and stores is not None and place.origin_upload_id == query.id_marker:
        place = await _place_elsewhere(stores, context.request.bucket or "", query)
    listing = _Listing(context, query, place, stores)
    wanted = ListRequest(query.prefix.encode(), query.delimiter.encode(), query.limit)
    page = MergedPage(wanted, [listing.own, listing.of_others, listing.of_origin])
    await page.fill()
    uploads = [row.content.upload for row in page.rows if row.content is not None]
    prefixes = [row.name.decode() for row in page.rows if row.content is None]
    following = _following(query, page.rows) if page.is_truncated else None
    body = uploads_document(listing.bucket, query, uploads, prefixes, following)
    return replace(xml_response(body, "partial"), reason="not-kept")


def may_concern_uploads(context: RequestContext) -> bool:
    """Return whether uploads may be open here, or were when the previous page was given."""
    bucket, prefix = context.request.bucket or "", context.request.parameter("prefix") or ""
    if any(slot.is_buffered for slot in context.services.slots.under(bucket, prefix)):
        return True
    is_marked = is_place(context.request.parameter("upload-id-marker") or "")
    return is_marked or _in_journal(context, lambda tx: _is_busy(tx, bucket), False)


def _in_journal(context: RequestContext, look: Callable[[JournalTransaction], _T], without: _T) -> _T:
    """Look into the journal. `without`: what counts while its disk cannot be used; other nodes may have uploads."""
    buffer = context.services.writeback
    return buffer.look(look) if buffer is not None else without


def _is_busy(tx: JournalTransaction, bucket: str) -> bool:
    if tx.writes.newest() or tx.uploads.are_any_aborting():
        return True
    return next(iter(tx.uploads.under(bucket)), None) is not None


def _place_in(tx: JournalTransaction, query: UploadsQuery) -> UploadPlace | None:
    """Return the marker's place: a client may also give the id of an upload that it has seen listed."""
    marked = tx.uploads.upload(query.id_marker) if query.place is not None else None
    return query.place if marked is None else UploadPlace(ours=(marked.began_at, marked.upload_id or ""))


async def _place_elsewhere(stores: Stores, bucket: str, query: UploadsQuery) -> UploadPlace | None:
    """Return the marker's place, which may be the id of an upload of another node."""
    if not stores.is_known(query.id_marker.partition("-")[0]):
        return query.place
    found, _ = await stores.uploads(bucket, query.key_marker, query.key_marker)
    marked = [one for one in found if (one.key, one.upload_id) == (query.key_marker, query.id_marker)]
    return UploadPlace(ours=(marked[0].initiated, query.id_marker)) if marked else UploadPlace()


def _following(query: UploadsQuery, rows: Sequence[_Row]) -> tuple[str, str]:
    last = rows[-1]
    if last.content is None:
        return last.name.decode(), ""
    place = (query.place or UploadPlace()) if last.name == query.key_marker.encode() else UploadPlace()
    for row in rows:
        if row.name == last.name and row.content is not None:
            upload = row.content.upload
            if row.content.is_ours:
                place = place._replace(ours=(upload.initiated, upload.upload_id))
            else:
                place = place._replace(origin_upload_id=upload.upload_id)
    return last.name.decode(), encode_place(place)


@dataclass(frozen=True, slots=True)
class _Listing:
    """One request. `place` is where it begins among the uploads of its key marker; None: behind all of them.

    `stores` are the other nodes' buffers; None: there are none.
    """

    context: RequestContext
    query: UploadsQuery
    place: UploadPlace | None
    stores: Stores | None

    @property
    def bucket(self) -> str:
        return self.context.request.bucket or ""

    def row(self, wanted: ListRequest, upload: ListedUpload, *, is_ours: bool) -> _Row | None:
        name, marker = upload.key.encode(), self.query.key_marker.encode()
        common = wanted.rolled_up(name)
        if common is not None:
            return PageRow(common, Kind.PREFIX) if common > marker and prefix_end(common) > wanted.begin else None
        if name < wanted.begin or name < marker or (name == marker and not self._is_behind_place(upload, is_ours)):
            return None
        rank = (int(upload.initiated), not is_ours, upload.initiated, upload.upload_id)  # origins give whole seconds
        return PageRow(name, Kind.ENTRY, rank, _Listed(upload, is_ours))

    def _is_behind_place(self, upload: ListedUpload, is_ours: bool) -> bool:
        if self.place is None or not is_ours:
            return self.place is not None  # the origin was asked from this place on
        return self.place.ours is None or (upload.initiated, upload.upload_id) > self.place.ours

    async def own(self, wanted: ListRequest) -> _Rows:
        """Return the uploads that are open on this node."""
        none: _Rows = Rows([])
        return _in_journal(self.context, lambda tx: self._own(tx, wanted), none)

    def _own(self, tx: JournalTransaction, wanted: ListRequest) -> _Rows:
        """Return all uploads of a key or none: the journal orders them by id."""
        rows = list[_Row]()
        after = before(wanted.begin) if wanted.begin else self.query.key_marker
        while True:
            for upload in tx.uploads.under(self.bucket, wanted.prefix.decode(), (after, "")):
                row = self.row(wanted, listed_upload(upload), is_ours=True)
                if row is None:
                    continue
                if len(rows) > wanted.limit and rows[-1].name != row.name:
                    return Rows(_in_order(rows), row.name)
                rows.append(row)
                if row.kind is Kind.PREFIX:
                    after = before(prefix_end(row.name))
                    break
            else:
                return Rows(_in_order(rows))

    async def of_others(self, wanted: ListRequest) -> _Rows:
        """Return the uploads that are open on other nodes."""
        if self.stores is None:
            return Rows([])
        start = before(wanted.begin) if wanted.begin else self.query.key_marker
        found, end = await self.stores.uploads(self.bucket, wanted.prefix.decode(), start)
        listed = [ListedUpload(one.key, one.upload_id, one.initiated, one.rest) for one in found]
        rows = [self.row(wanted, one, is_ours=True) for one in listed]
        return Rows(_in_order([row for row in rows if row is not None]), end.encode() if end is not None else None)

    async def of_origin(self, wanted: ListRequest) -> _Rows:
        """Return the origin's own uploads, without those behind ours."""
        rows: list[_Row] = []
        markers = (before(wanted.begin), "") if wanted.begin else self._first_markers()
        for _ in range(_PAGES_MAX):
            is_busy = self.stores is not None or _in_journal(self.context, lambda tx: _is_busy(tx, self.bucket), False)
            page = await (self._foreign_uploads(wanted, markers) if is_busy else self._ask(wanted, markers))
            rows += self._rows_of(wanted, page, is_busy=is_busy)
            if page.following is None:
                return Rows(rows)
            markers = page.following
            is_whole = rows[-1:] != [] and rows[-1].name != markers[0].encode()
            if len(rows) > wanted.limit or (len(rows) == wanted.limit and is_whole):
                last = rows[-1]
                return Rows(rows, key_successor(last.name) if last.content is not None else prefix_end(last.name))
        raise OriginBodyError(f"the origin has given {_PAGES_MAX} pages with no upload of its own")

    def _first_markers(self) -> tuple[str, str]:
        """Return the request's markers. Without an id of the origin's own, list the marked key from its beginning."""
        marker, place = self.query.key_marker, self.place
        if place is None or place.origin_upload_id:
            return marker, "" if place is None else place.origin_upload_id
        return before(marker.encode()), ""

    def _rows_of(self, wanted: ListRequest, page: UploadsPage, *, is_busy: bool) -> list[_Row]:
        """Return a page's rows. If ours may be among the origin's, a common prefix may cover only them."""
        marker, kind = self.query.key_marker.encode(), Kind.DOUBTFUL_PREFIX if is_busy else Kind.PREFIX
        names = [prefix.encode() for prefix in page.prefixes]
        rows: list[_Row] = [PageRow(one, kind) for one in names if one > marker and prefix_end(one) > wanted.begin]
        for upload in page.uploads:
            row = self.row(wanted, upload, is_ours=False)
            if row is not None:
                rows.append(row)
        return sorted(rows, key=lambda row: row.name)

    async def _foreign_uploads(self, wanted: ListRequest, markers: tuple[str, str]) -> UploadsPage:
        """Return a page of the origin without the uploads that are only behind ours.

        One of ours may have ended while the page was on its way: apparently foreign ones are asked for once more.
        """
        page = await self._ask(wanted, markers)
        foreign = _in_journal(self.context, lambda tx: self._foreign_in(tx, page.uploads), list(page.uploads))
        if foreign and self.stores is not None:
            theirs = await self.stores.at_origin(self.bucket, list(dict.fromkeys(one.key for one in foreign)))
            foreign = [one for one in foreign if one.upload_id not in theirs]
        if foreign:
            again = {one.upload_id for one in (await self._ask(wanted, markers)).uploads}
            foreign = [one for one in foreign if one.upload_id in again]
        return page._replace(uploads=foreign)

    def _foreign_in(self, tx: JournalTransaction, listed: Sequence[ListedUpload]) -> list[ListedUpload]:
        ours = {key: tx.uploads.origin_upload_ids(ObjectKey(self.bucket, key)) for key in {one.key for one in listed}}
        return [one for one in listed if one.upload_id not in ours[one.key]]

    async def _ask(self, wanted: ListRequest, markers: tuple[str, str]) -> UploadsPage:
        said = [
            ("prefix", wanted.prefix.decode()),
            ("delimiter", wanted.delimiter.decode()),
            ("key-marker", markers[0]),
        ]
        said += [("upload-id-marker", markers[1])] if markers[0] else []
        query: list[tuple[str, str | None]] = [("uploads", ""), ("encoding-type", "url")]
        query += [("max-uploads", str(UPLOADS_MAX)), *((name, value) for name, value in said if value)]
        return parse_uploads_page(await listing_document(self.context, self.bucket, query, UPLOADS_SIZE_BYTES_MAX))


def _in_order(rows: list[_Row]) -> list[_Row]:
    return sorted(rows, key=lambda row: (row.name, row.rank))


def listed_upload(upload: Write) -> ListedUpload:
    storage_class = upload.spec.headers.get("x-amz-storage-class", "STANDARD")
    initiated = format_iso_date(upload.began_at).removesuffix("Z") + ".000Z"
    rest = element("StorageClass", storage_class) + element("Initiated", initiated)
    algorithm = upload.spec.headers.get("x-amz-checksum-algorithm")
    rest += "" if algorithm is None else element("ChecksumAlgorithm", algorithm.upper())
    return ListedUpload(upload.spec.key.key, upload.upload_id or "", upload.began_at, rest)
