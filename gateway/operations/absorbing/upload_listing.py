"""ListMultipartUploads: those that are open on this node, by the ids that clients have, and the origin's other ones.

The origin's uploads behind ours are left out: clients know them by our ids, have completed them, or have aborted them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import TYPE_CHECKING, NamedTuple

from gateway.errors import OriginAnswered, OriginBodyError
from gateway.objects import ObjectKey
from gateway.operations.exchange import Exchange
from gateway.operations.list_sources import before
from gateway.operations.reply import Reply
from gateway.origin.client import OriginRequest
from gateway.s3.http_dates import format_iso_date
from gateway.s3.upload_list import (
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

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer
    from gateway.writeback.journal.book import Book
    from gateway.writeback.journal.records import Upload

_ERROR_DOCUMENT_BYTES_MAX = 64 * 1024
_GREATEST = "\U0010ffff"
"""The greatest character: behind a common prefix and it lies nearly nothing that begins with it."""

_PAGES_MAX = 100


class _Row(NamedTuple):
    """An upload, or a common prefix; in the order in which they are listed."""

    name: bytes
    initiated: float
    upload: ListedUpload | None
    is_ours: bool


async def list_uploads(exchange: Exchange, buffer: WritebackBuffer) -> Reply:
    """The page; the origin's error where it gives one."""
    query = uploads_query(exchange.request)
    listing = _UploadListing(exchange, buffer, query)
    rows = await listing.rows()
    page = _Page(query)
    for row in rows:
        page.add(row)
    following = page.following() if len(rows) > len(page.names) > 0 else None
    body = uploads_document(exchange.request.bucket or "", query, page.uploads, page.prefixes, following)
    return Reply(200, [("content-type", "application/xml")], body, "partial")


@dataclass(slots=True)
class _Page:
    query: UploadsQuery
    uploads: list[ListedUpload] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    _places: dict[bytes, UploadPlace] = field(default_factory=dict)

    def add(self, row: _Row) -> None:
        if len(self.names) == self.query.limit:
            return
        self.names.append(row.name)
        if row.upload is None:
            self.prefixes.append(row.name.decode())
            return
        self.uploads.append(row.upload)
        before = self._places.get(row.name, self._first_place(row.name))
        mine = (row.initiated, row.upload.upload_id)
        self._places[row.name] = (
            before._replace(ours=mine) if row.is_ours else before._replace(origin_upload_id=mine[1])
        )

    def following(self) -> tuple[str, str]:
        place = self._places.get(self.names[-1])
        return self.names[-1].decode(), "" if place is None else encode_place(place)

    def _first_place(self, name: bytes) -> UploadPlace:
        return (self.query.place or UploadPlace()) if name == self.query.key_marker.encode() else UploadPlace()


def may_concern_uploads(exchange: Exchange, buffer: WritebackBuffer) -> bool:
    """Whether uploads may be open here, or were when the page before was given."""
    bucket, prefix = exchange.request.bucket or "", exchange.request.parameter("prefix") or ""
    if any(slot.write == "back" for slot in exchange.services.slots.under(bucket, prefix)):
        return True
    return is_place(exchange.request.parameter("upload-id-marker") or "") or buffer.look(
        lambda book: _is_busy(book, bucket)
    )


def _is_busy(book: Book, bucket: str) -> bool:
    """Whether the origin may have uploads that are behind ours."""
    if book.newest() or book.orphan_ids(1):
        return True
    return next(iter(book.uploads(bucket)), None) is not None


class _UploadListing:
    """What is open of a bucket, here and at the origin."""

    def __init__(self, exchange: Exchange, buffer: WritebackBuffer, query: UploadsQuery) -> None:
        self._exchange = exchange
        self._buffer = buffer
        self._query = query
        self._bucket = exchange.request.bucket or ""
        self._place = buffer.look(self._place_in)

    async def rows(self) -> list[_Row]:
        """What is listed behind the markers, at least one more than the page takes, in order."""
        ours = sorted(self._buffer.look(self._ours), key=lambda row: (row.name, row.initiated))
        theirs = await self._theirs()
        rows: list[_Row] = []
        for row in merge(ours, theirs, key=lambda row: (row.name, int(row.initiated))):
            if row.upload is not None or not rows or rows[-1].name != row.name:
                rows.append(row)
        return rows

    def _place_in(self, book: Book) -> UploadPlace | None:
        """Where the marker is: clients may also come back with the id of an upload that they have seen listed."""
        marked = book.upload(self._query.id_marker) if self._query.place is not None else None
        if marked is None:
            return self._query.place
        return UploadPlace(ours=(marked.initiated_at, marked.upload_id))

    def _ours(self, book: Book) -> list[_Row]:
        """All of one key or none: they are in the order of their ids."""
        rows: list[_Row] = []
        after = (self._query.key_marker, "")
        while True:
            for upload in book.uploads(self._bucket, self._query.prefix, after):
                row = self._our_row(upload)
                if len(rows) > self._query.limit and rows[-1].name != row.name:
                    return rows
                if self._is_listed(row):
                    rows.append(row)
                if row.upload is None:
                    after = (row.name.decode() + _GREATEST, "")
                    break
            else:
                return rows

    def _our_row(self, upload: Upload) -> _Row:
        key = upload.fixed.key.key
        common = self._rolled_up(key)
        if common is not None:
            return _Row(common, 0.0, None, is_ours=True)
        storage_class = upload.fixed.headers.get("x-amz-storage-class", "STANDARD")
        initiated = format_iso_date(upload.initiated_at).removesuffix("Z") + ".000Z"
        rest = element("StorageClass", storage_class) + element("Initiated", initiated)
        algorithm = upload.fixed.headers.get("x-amz-checksum-algorithm")
        rest += "" if algorithm is None else element("ChecksumAlgorithm", algorithm.upper())
        listed = ListedUpload(key, upload.upload_id, upload.initiated_at, rest)
        return _Row(key.encode(), upload.initiated_at, listed, is_ours=True)

    def _is_listed(self, row: _Row) -> bool:
        marker = self._query.key_marker.encode()
        if row.upload is None or row.name != marker or not row.is_ours:
            return row.name > marker or (row.upload is not None and row.name == marker and self._place is not None)
        if self._place is None:
            return False
        return self._place.ours is None or (row.initiated, row.upload.upload_id) > self._place.ours

    async def _theirs(self) -> list[_Row]:
        rows: list[_Row] = []
        following = self._first()
        for _ in range(_PAGES_MAX):
            page = await self._strangers(self._query.prefix, self._query.delimiter, following)
            rows += [row for row in self._rows_of(page) if self._is_listed(row)]
            if page.following is None or len(rows) > self._query.limit:
                return rows
            following = page.following
        raise OriginBodyError(f"the origin has given {_PAGES_MAX} pages with no upload of its own")

    def _first(self) -> tuple[str, str]:
        """The markers for the origin. Without one of its own, the marked key is listed from its beginning."""
        marker = self._query.key_marker
        if self._place is None or self._place.origin_upload_id:
            return marker, "" if self._place is None else self._place.origin_upload_id
        return before(marker.encode()), ""

    def _rows_of(self, page: UploadsPage) -> list[_Row]:
        rows = [_Row(prefix.encode(), 0.0, None, is_ours=False) for prefix in page.prefixes]
        for upload in page.uploads:
            common = self._rolled_up(upload.key)
            is_plain = common is None
            name = upload.key.encode() if common is None else common
            initiated = upload.initiated if is_plain else 0.0
            rows.append(_Row(name, initiated, upload if is_plain else None, is_ours=False))
        return sorted(rows, key=lambda row: row.name)

    async def _strangers(self, prefix: str, delimiter: str, following: tuple[str, str]) -> UploadsPage:
        """A page of the origin without the uploads, and the common prefixes, that are only behind ours.

        One of ours may have ended while the page was on its way: what seems to be a stranger is asked for once more.
        """
        is_busy = self._buffer.look(lambda book: _is_busy(book, self._bucket))
        page = await self._asked(prefix, delimiter, following)
        if not is_busy:
            return page
        strangers = self._buffer.look(lambda book: self._strangers_in(book, page.uploads))
        if strangers:
            again = {one.upload_id for one in (await self._asked(prefix, delimiter, following)).uploads}
            strangers = [one for one in strangers if one.upload_id in again]
        prefixes = [one for one in page.prefixes if await self._is_anything_below(one)]
        return UploadsPage(strangers, prefixes, page.following)

    async def _is_anything_below(self, common: str) -> bool:
        following = ("", "")
        for _ in range(_PAGES_MAX):
            page = await self._strangers(common, "", following)
            if page.uploads or page.following is None:
                return bool(page.uploads)
            following = page.following
        return True

    def _strangers_in(self, book: Book, listed: Sequence[ListedUpload]) -> list[ListedUpload]:
        ours = {key: book.origin_upload_ids(ObjectKey(self._bucket, key)) for key in {one.key for one in listed}}
        return [one for one in listed if one.upload_id not in ours[one.key] and not book.is_orphan(one.upload_id)]

    async def _asked(self, prefix: str, delimiter: str, following: tuple[str, str]) -> UploadsPage:
        said = [("prefix", prefix), ("delimiter", delimiter), ("key-marker", following[0])]
        said += [("upload-id-marker", following[1])] if following[0] else []
        query: list[tuple[str, str | None]] = [("uploads", ""), ("encoding-type", "url")]
        query += [("max-uploads", str(UPLOADS_MAX)), *((name, value) for name, value in said if value)]
        request = OriginRequest("GET", self._bucket, None, query, slot=self._exchange.slot.name)
        async with await self._exchange.services.origin.send(request) as response:
            if response.status != 200:
                document = await response.read(_ERROR_DOCUMENT_BYTES_MAX)
                raise OriginAnswered(response.status, list(response.headers.items()), document)
            return parse_uploads_page(await response.read(UPLOADS_SIZE_BYTES_MAX))

    def _rolled_up(self, key: str) -> bytes | None:
        delimiter = self._query.delimiter
        end = key.find(delimiter, len(self._query.prefix)) if delimiter else -1
        return None if end < 0 else key[: end + len(delimiter)].encode()
