"""Stores objects in Azure Blob.

A PUT is one Put Blob, which carries the condition. Azure lists names in the order of UTF-16. S3's order differs for
characters beyond U+FFFF only: pages with such names are refused. Accounts with a hierarchical namespace list `a/`
before `a-`: they are refused as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from gateway.core.clock import Clock
from gateway.core.errors import OriginBodyError, S3Error
from gateway.core.model import ByteRange, ObjectKey
from gateway.origin.client import Origin, OriginRequest, OriginResponse
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.origin.stores.azure.blobs import OWN, Blob, blob_of, entry_of, properties, refusal
from gateway.origin.stores.azure.rest import ASKED, Wire, kept_checksums, outgoing, whole_checksums
from gateway.origin.stores.azure.uploads import Uploads
from gateway.origin.stores.face import StoreOrigin
from gateway.origin.stores.response import StoreResponse
from gateway.origin.stores.store import (
    Condition,
    Found,
    FoundPart,
    FoundUpload,
    Headers,
    Incoming,
    Page,
    kept_headers,
    listed_entry,
)
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import parse_content_range, parse_http_date
from gateway.s3.list_result import ListedEntry
from gateway.s3.xml import CompletedPart, child_text, local_name

_PUT_BYTES_MAX = 5000 * 1024 * 1024
_PAGE_MAX = 5000
_MARKERS_MAX = 1000
_STARTING_VERSION = {"x-ms-version": "2026-02-06"}
"""The version of the service that knows `startFrom`."""

_Place = tuple[str, bytes, bytes, bytes]
"""Bucket, prefix, delimiter, and the key behind which a page begins."""


class AzureOrigin(StoreOrigin):
    """`http` sends requests, signs them with `SharedKeySigner`, and reports each attempt."""

    def __init__(self, http: Origin, clock: Clock, *, name: str) -> None:
        self.azure = AzureStore(http)
        super().__init__(self.azure, clock, name=name)

    async def send(self, request: OriginRequest) -> StoreResponse:
        """As `Origin.send`."""
        reset = ASKED.set(request)
        try:
            return await super().send(request)
        finally:
            ASKED.reset(reset)


class AzureStore:
    """As `Store`."""

    def __init__(self, http: Origin) -> None:
        self.wire = Wire(http)
        self._uploads = Uploads(self.wire)
        self._is_flat = False
        self._starts_anywhere = True
        self._markers: OrderedDict[_Place, str] = OrderedDict()
        """Azure's own markers of the places where listings go on. Only Azure can read them."""

    async def buckets(self) -> Sequence[tuple[str, float]]:
        found, marker = list[tuple[str, float]](), ""
        while True:
            root = await self.wire.document(None, None, [("comp", "list"), *_given(marker=marker)])
            for node in root.iter("Container"):
                modified = next((one.text or "" for one in node.iter("Last-Modified")), "")
                found.append((child_text(node, "Name") or "", parse_http_date(modified) or 0.0))
            marker = child_text(root, "NextMarker") or ""
            if not marker:
                return found

    async def check_bucket(self, bucket: str) -> None:
        await self._check_account(bucket)
        await self.wire.told("HEAD", bucket, None, [("restype", "container")])

    def refusal(self, key: ObjectKey) -> S3Error | None:
        return refusal(key.key)

    async def check_place(self, key: ObjectKey) -> None:
        if (refused := refusal(key.key)) is not None:
            raise refused

    async def head(self, key: ObjectKey) -> Found:
        self._check_readable(key)
        blob = await self.wire.head(key)
        if blob is None:
            raise s3_error("NoSuchKey", Key=key.key)
        return blob.found

    async def open(self, key: ObjectKey, wanted: tuple[int, int | None]) -> BlobReading:
        self._check_readable(key)
        first, last = wanted
        asked = {"range": f"bytes={first}-{'' if last is None else last}"}
        response = await self.wire.ask("GET", key.bucket, key.key, headers=asked, expected=(206, 416))
        if response.status == 206 and response.headers.get("content-length") != "0":  # Azurite sends no byte so
            return BlobReading(self.wire, key, blob_of(key.key, response.headers), response)
        await response.aclose()  # there are no such bytes: what there is decides about the answer
        blob = await self.wire.head(key)
        if blob is None:
            raise s3_error("NoSuchKey", Key=key.key)
        return BlobReading(self.wire, key, blob, None)

    async def list(self, bucket: str, prefix: bytes, after: bytes, delimiter: bytes, limit: int) -> Page:
        await self._check_account(bucket)
        entries, place = list[ListedEntry | bytes](), (bucket, prefix, delimiter, after)
        marker, start = self._markers.pop(place, ""), b""
        if not marker and after > prefix and self._starts_anywhere:
            start = _start(prefix, after, delimiter)
        while len(entries) < limit:
            found, marker = await self._page(bucket, prefix, delimiter, marker, start, limit - len(entries))
            start = b""
            entries += [one for one in found if _name(one) > after]
            if not marker:
                return Page(entries, is_truncated=False)
        self._markers[bucket, prefix, delimiter, _name(entries[-1])] = marker
        if len(self._markers) > _MARKERS_MAX:
            self._markers.popitem(last=False)
        return Page(entries, is_truncated=True)

    async def _page(
        self, bucket: str, prefix: bytes, delimiter: bytes, marker: str, start: bytes, limit: int
    ) -> tuple[Sequence[ListedEntry | bytes], str]:
        """Return a page, without Forebay's own blobs, and where the next one begins: empty behind the last."""
        query = [("restype", "container"), ("comp", "list"), ("include", "metadata")]
        query += _given(prefix=prefix.decode(), delimiter=delimiter.decode(), marker=marker, startFrom=start.decode())
        query.append(("maxresults", str(min(limit, _PAGE_MAX))))
        try:
            root = await self.wire.document(bucket, None, query, _STARTING_VERSION if start else None)
        except S3Error as error:
            if not start or error.code != "InvalidRequest":
                raise
            self._starts_anywhere = False  # an older service: its pages are counted off from the first
            return await self._page(bucket, prefix, delimiter, "", b"", limit)
        blobs = next((node for node in root if local_name(node) == "Blobs"), ())
        read = [entry_of(node) for node in blobs if local_name(node) in ("Blob", "BlobPrefix")]
        entries = [one.encode() if isinstance(one, str) else listed_entry(one.found) for one in read]
        if any(max(_name(one), default=0) >= 0xF0 for one in entries):  # of UTF-8, the first byte of such a character
            raise s3_error(
                "ServiceUnavailable",
                "Azure lists names with characters beyond U+FFFF in another order than S3: this page has some.",
            )
        entries = [one for one in entries if not _name(one).startswith(OWN.encode())]
        return sorted(entries, key=_name), child_text(root, "NextMarker") or ""

    async def put(self, key: ObjectKey, body: Incoming, headers: Headers, condition: Condition) -> Found:
        await self._check_account(key.bucket)
        sent = await self.wire.native(key, condition)
        content = await outgoing(body, _PUT_BYTES_MAX)
        kept, checksums = kept_headers(headers), kept_checksums(body, content, headers)
        sent |= {"x-ms-blob-type": "BlockBlob", **properties(kept, checksums, "md5")}
        if body.copied is None and "content-md5" in headers:
            sent["content-md5"] = headers["content-md5"]
        told = await self.wire.told("PUT", key.bucket, key.key, headers=sent, body=content)
        modified = parse_http_date(told.get("last-modified", "")) or 0.0
        checksums = whole_checksums(body.digests.verified()) or checksums
        etag = f'"{body.digests.md5().hex()}"'
        return Found(key.key, body.length_bytes or 0, etag, modified, kept, checksums)

    async def delete(self, key: ObjectKey, condition: Condition) -> None:
        sent = await self.wire.native(key, condition)
        try:
            await self.wire.told("DELETE", key.bucket, key.key, headers=sent)
        except S3Error as error:
            if error.code != "NoSuchKey" or "if-match" in sent:
                raise

    async def begin(self, key: ObjectKey, headers: Headers) -> str:
        await self._check_account(key.bucket)
        return await self._uploads.begin(key, headers)

    async def began(self, key: ObjectKey, upload_id: str) -> Headers:
        return await self._uploads.began(key, upload_id)

    async def put_part(self, key: ObjectKey, upload_id: str, number: int, body: Incoming) -> FoundPart:
        return await self._uploads.put_part(key, upload_id, number, body)

    async def parts(self, key: ObjectKey, upload_id: str) -> Sequence[FoundPart]:
        return await self._uploads.parts(key, upload_id)

    async def complete(
        self, key: ObjectKey, upload_id: str, listed: Sequence[CompletedPart], headers: Headers, condition: Condition
    ) -> Found:
        return await self._uploads.complete(key, upload_id, listed, headers, condition)

    async def abort(self, key: ObjectKey, upload_id: str) -> None:
        await self._uploads.abort(key, upload_id)

    async def uploads(self, bucket: str, prefix: str) -> Sequence[FoundUpload]:
        return await self._uploads.open(bucket, prefix)

    async def aclose(self) -> None:
        await self.wire.http.aclose()

    def _check_readable(self, key: ObjectKey) -> None:
        if refusal(key.key) is not None:
            raise s3_error("NoSuchKey", Key=key.key)

    async def _check_account(self, bucket: str) -> None:
        """S3Error if it has a hierarchical namespace. Asked once, before the first listing or write."""
        if self._is_flat:
            return
        told = await self.wire.told("HEAD", bucket, None, [("restype", "account"), ("comp", "properties")])
        if told.get("x-ms-is-hns-enabled", "false").lower() == "true":
            raise s3_error(
                "NotImplemented",
                "The storage account has a hierarchical namespace, which lists in another order than S3: Forebay needs "
                "an account without.",
            )
        self._is_flat = True


def _given(**parameters: str) -> list[tuple[str, str]]:
    return [(name, value) for name, value in parameters.items() if value]


def _name(entry: ListedEntry | bytes) -> bytes:
    return entry if isinstance(entry, bytes) else entry.key


def _start(prefix: bytes, after: bytes, delimiter: bytes) -> bytes:
    """Return the name from which Azure shall list so that all behind `after` is there; on the level that it lists."""
    end = after.find(delimiter, len(prefix)) if delimiter and after.startswith(prefix) else -1
    return after if end < 0 else after[: end + len(delimiter)]


class BlobReading:
    """As `Reading`: what has begun to come, or a part of it, is read on; for other bytes Azure is asked again."""

    def __init__(self, wire: Wire, key: ObjectKey, blob: Blob, response: OriginResponse | None) -> None:
        self._wire = wire
        self._key = key
        self._blob = blob
        self._response = response
        self._coming = parse_content_range(response.headers["content-range"])[0] if response is not None else None

    @property
    def found(self) -> Found:
        return self._blob.found

    def whole(self, wanted: ByteRange) -> memoryview | None:
        return self._response.whole() if self._response is not None and self._coming == wanted else None

    async def pieces(self, wanted: ByteRange, buffer: ReceiveBuffer) -> AsyncIterator[bytes | memoryview]:
        coming, left = self._coming, wanted.length
        if coming is None or coming.first != wanted.first or coming.last < wanted.last:
            await self._ask(wanted)
        response, self._coming = self._response, None
        if response is None:
            raise OriginBodyError("the reading has ended")
        async with aclosing(response.stream()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                for start in range(0, min(len(piece), left), buffer.size_bytes):
                    yield piece[start : min(start + buffer.size_bytes, left)]
                left -= len(piece)
                if left <= 0:
                    return
        raise OriginBodyError("Azure has sent less than it said")

    async def _ask(self, wanted: ByteRange) -> None:
        await self.aclose()
        asked = {"range": f"bytes={wanted.first}-{wanted.last}", "if-match": self._blob.etag}
        try:
            self._response = await self._wire.ask("GET", self._key.bucket, self._key.key, headers=asked)
        except S3Error as error:
            raise OriginBodyError(f"the blob is no longer the one that was opened: {error}") from error

    async def aclose(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()
