"""ListObjects, ListObjectsV2, ListMultipartUploads, ListParts and ListBuckets of a store (S3 API, those pages)."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from gateway.core.model import ObjectKey
from gateway.origin.client import OriginRequest
from gateway.origin.stores.response import StoreResponse, xml_answer
from gateway.origin.stores.store import OWNER, FoundPart, FoundUpload, Page, Store, timestamp
from gateway.s3.error_codes import s3_error
from gateway.s3.list_result import ListedEntry, ListedPage
from gateway.s3.xml_writer import element, encode_list_key, escape_etag

_PAGE_MAX = 1000


def parameter(request: OriginRequest, name: str) -> str | None:
    """Return the first value of a query parameter, empty when it has none; None when it is absent."""
    return next((value or "" for candidate, value in request.query if candidate == name), None)


async def list_v2(request: OriginRequest, bucket: str, store: Store) -> StoreResponse:
    token = parameter(request, "continuation-token")
    start_after = parameter(request, "start-after") or ""
    page = await _page(request, bucket, store, _decode_token(token) if token else start_after.encode())
    following = base64.urlsafe_b64encode(_last(page)).decode() if page.is_truncated else None
    if request.takes_rows:
        return StoreResponse(200, rows=ListedPage(_objects(page), _prefixes(page), following))
    optional = element("KeyCount", str(len(page.entries)))
    optional += "" if token is None else element("ContinuationToken", token)
    optional += "" if following is None else element("NextContinuationToken", following)
    if start_after:
        optional += element("StartAfter", encode_list_key(start_after, _url(request)))
    with_owner = parameter(request, "fetch-owner") == "true"
    return _document(request, bucket, page, optional, with_owner=with_owner)


async def list_v1(request: OriginRequest, bucket: str, store: Store) -> StoreResponse:
    marker = parameter(request, "marker") or ""
    page = await _page(request, bucket, store, marker.encode())
    optional = f"<Marker>{encode_list_key(marker, _url(request))}</Marker>"
    if page.is_truncated and parameter(request, "delimiter"):
        optional += f"<NextMarker>{encode_list_key(_last(page).decode(), _url(request))}</NextMarker>"
    return _document(request, bucket, page, optional, with_owner=True)


async def _page(request: OriginRequest, bucket: str, store: Store, after: bytes) -> Page:
    prefix, delimiter = parameter(request, "prefix") or "", parameter(request, "delimiter") or ""
    if limit := _limit(parameter(request, "max-keys"), "max-keys"):
        return await store.list(bucket, prefix.encode(), after, delimiter.encode(), limit)
    await store.check_bucket(bucket)
    return Page((), is_truncated=False)


def _document(request: OriginRequest, bucket: str, page: Page, optional: str, *, with_owner: bool) -> StoreResponse:
    prefix, delimiter = parameter(request, "prefix") or "", parameter(request, "delimiter") or ""
    limit, url = _limit(parameter(request, "max-keys"), "max-keys"), _url(request)
    common = element("Name", bucket) + f"<Prefix>{encode_list_key(prefix, url)}</Prefix>"
    common += element("MaxKeys", str(limit)) + element("IsTruncated", _flag(page.is_truncated))
    if delimiter:
        common += f"<Delimiter>{encode_list_key(delimiter, url)}</Delimiter>"
    if url:
        common += element("EncodingType", "url")
    common += "".join(
        f"<CommonPrefixes><Prefix>{encode_list_key(one.decode(), url)}</Prefix></CommonPrefixes>"
        for one in _prefixes(page)
    )
    return xml_answer("ListBucketResult", common + optional + _contents(page, url=url, with_owner=with_owner))


def _objects(page: Page) -> list[ListedEntry]:
    return [entry for entry in page.entries if not isinstance(entry, bytes)]


def _prefixes(page: Page) -> list[bytes]:
    return [entry for entry in page.entries if isinstance(entry, bytes)]


def _last(page: Page) -> bytes:
    last = page.entries[-1]
    return last if isinstance(last, bytes) else last.key


def _contents(page: Page, *, url: bool, with_owner: bool) -> str:
    return "".join(
        f"<Contents><Key>{encode_list_key(one.key.decode(), url)}</Key>"
        f"<LastModified>{one.modified}</LastModified><ETag>{escape_etag(one.etag)}</ETag>"
        f"<Size>{one.size_bytes}</Size>{OWNER if with_owner else ''}{one.template.after_size}</Contents>"
        for one in _objects(page)
    )


async def list_uploads(request: OriginRequest, bucket: str, store: Store) -> StoreResponse:
    prefix, delimiter = parameter(request, "prefix") or "", parameter(request, "delimiter") or ""
    key_marker = parameter(request, "key-marker") or ""
    id_marker = (parameter(request, "upload-id-marker") or "") if key_marker else ""
    limit, url = _limit(parameter(request, "max-uploads"), "max-uploads"), _url(request)
    rows = list[FoundUpload | str]()
    for upload in _behind(await store.uploads(bucket, prefix), key_marker, id_marker):
        end = upload.key.find(delimiter, len(prefix)) if delimiter else -1
        row = upload if end < 0 else upload.key[: end + len(delimiter)]
        if isinstance(row, FoundUpload) or (row.encode() > key_marker.encode() and rows[-1:] != [row]):
            rows.append(row)
    page = rows[:limit]
    fields = element("Bucket", bucket) + f"<KeyMarker>{encode_list_key(key_marker, url)}</KeyMarker>"
    fields += element("UploadIdMarker", id_marker)
    if len(rows) > len(page) and page:
        last = page[-1]
        key, upload_id = (last, "") if isinstance(last, str) else (last.key, last.upload_id)
        fields += f"<NextKeyMarker>{encode_list_key(key, url)}</NextKeyMarker>"
        fields += element("NextUploadIdMarker", upload_id)
    fields += f"<Prefix>{encode_list_key(prefix, url)}</Prefix>" + element("MaxUploads", str(limit))
    fields += element("EncodingType", "url") if url else ""
    fields += element("IsTruncated", _flag(len(rows) > len(page) > 0))
    return xml_answer("ListMultipartUploadsResult", fields + "".join(_upload(row, url=url) for row in page))


def _behind(uploads: Sequence[FoundUpload], key_marker: str, id_marker: str) -> list[FoundUpload]:
    """Return the uploads behind the markers; of the marked key those that are younger than the marked one."""
    marked = next((at for at, one in enumerate(uploads) if one.upload_id == id_marker), None)
    return [
        one
        for at, one in enumerate(uploads)
        if one.key.encode() > key_marker.encode() or (one.key == key_marker and marked is not None and at > marked)
    ]


def _upload(row: FoundUpload | str, *, url: bool) -> str:
    """Write an upload, or a common prefix."""
    if isinstance(row, str):
        return f"<CommonPrefixes><Prefix>{encode_list_key(row, url)}</Prefix></CommonPrefixes>"
    fields = f"<Key>{encode_list_key(row.key, url)}</Key>" + element("UploadId", row.upload_id) + OWNER
    fields += element("StorageClass", "STANDARD") + element("Initiated", timestamp(int(row.initiated)))
    return f"<Upload>{fields}</Upload>"


async def list_parts(request: OriginRequest, key: ObjectKey, store: Store) -> StoreResponse:
    upload_id = parameter(request, "uploadId") or ""
    marker = _number(parameter(request, "part-number-marker"), "part-number-marker", 0)
    limit = _limit(parameter(request, "max-parts"), "max-parts")
    behind = [part for part in await store.parts(key, upload_id) if part.number > marker]
    page = behind[:limit]
    fields = element("Bucket", key.bucket) + element("Key", key.key) + element("UploadId", upload_id)
    fields += element("PartNumberMarker", str(marker))
    fields += element("NextPartNumberMarker", str(page[-1].number if page else 0)) + element("MaxParts", str(limit))
    fields += element("IsTruncated", _flag(len(behind) > len(page)))
    return xml_answer("ListPartsResult", fields + "".join(map(_part, page)))


def _part(part: FoundPart) -> str:
    fields = element("PartNumber", str(part.number)) + element("LastModified", timestamp(int(part.modified)))
    return f"<Part>{fields}{element('ETag', part.etag)}{element('Size', str(part.size_bytes))}</Part>"


async def list_buckets(store: Store) -> StoreResponse:
    entries = "".join(
        f"<Bucket>{element('Name', name)}{element('CreationDate', timestamp(int(created)))}</Bucket>"
        for name, created in sorted(await store.buckets())
    )
    return xml_answer("ListAllMyBucketsResult", f"{OWNER}<Buckets>{entries}</Buckets>")


def _url(request: OriginRequest) -> bool:
    encoding = parameter(request, "encoding-type")
    if encoding not in (None, "", "url"):
        raise s3_error("InvalidArgument", "Invalid Encoding Method specified in Request", ArgumentName="encoding-type")
    return encoding == "url"


def _limit(value: str | None, name: str) -> int:
    return min(_number(value, name, _PAGE_MAX), _PAGE_MAX)


def _number(value: str | None, name: str, default: int) -> int:
    if not value:
        return default
    if not (value.isascii() and value.isdecimal() and len(value) <= 10):
        raise s3_error("InvalidArgument", f"Provided {name} not an integer or within integer range", ArgumentName=name)
    return int(value)


def _decode_token(token: str) -> bytes:
    try:
        place = base64.b64decode(token, altchars=b"-_", validate=True)
        place.decode()
    except ValueError:
        raise s3_error("InvalidArgument", "The continuation token provided is incorrect") from None
    return place


def _flag(value: bool) -> str:
    return "true" if value else "false"
