"""ListObjects, ListObjectsV2, ListMultipartUploads, ListParts and ListBuckets of a store (S3 API, those pages)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache

from gateway.core.model import ObjectKey
from gateway.origin.client import OriginRequest
from gateway.origin.stores.response import StoreResponse, xml_answer
from gateway.origin.stores.store import Found, FoundPart, FoundUpload, Page, Store
from gateway.s3.error_codes import s3_error
from gateway.s3.xml_writer import element, encode_list_key, escape

OWNER = "<Owner><ID>origin</ID><DisplayName>origin</DisplayName></Owner>"
_PAGE_MAX = 1000


def parameter(request: OriginRequest, name: str) -> str | None:
    """Return the first value of a query parameter, empty when it has none; None when it is absent."""
    return next((value or "" for candidate, value in request.query if candidate == name), None)


def timestamp(moment: float) -> str:
    """Write as listings do: ISO 8601 with milliseconds."""
    return _timestamp(int(moment))


@lru_cache(4096)
def _timestamp(moment: int) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


async def list_v2(request: OriginRequest, bucket: str, store: Store) -> StoreResponse:
    token = parameter(request, "continuation-token")
    start_after = parameter(request, "start-after") or ""
    page, common = await _list(request, bucket, store, _decode_token(token) if token else start_after.encode())
    optional = "" if token is None else element("ContinuationToken", token)
    if page.is_truncated:
        optional += element("NextContinuationToken", base64.urlsafe_b64encode(_last(page)).decode())
    if start_after:
        optional += element("StartAfter", encode_list_key(start_after, _url(request)))
    owner = OWNER if parameter(request, "fetch-owner") == "true" else ""
    count = element("KeyCount", str(len(page.entries)))
    return xml_answer("ListBucketResult", common + count + optional + _contents(page, owner, url=_url(request)))


async def list_v1(request: OriginRequest, bucket: str, store: Store) -> StoreResponse:
    marker = parameter(request, "marker") or ""
    page, common = await _list(request, bucket, store, marker.encode())
    optional = f"<Marker>{encode_list_key(marker, _url(request))}</Marker>"
    if page.is_truncated and parameter(request, "delimiter"):
        optional += f"<NextMarker>{encode_list_key(_last(page).decode(), _url(request))}</NextMarker>"
    return xml_answer("ListBucketResult", common + optional + _contents(page, OWNER, url=_url(request)))


async def _list(request: OriginRequest, bucket: str, store: Store, after: bytes) -> tuple[Page, str]:
    prefix, delimiter = parameter(request, "prefix") or "", parameter(request, "delimiter") or ""
    limit, url = _limit(parameter(request, "max-keys"), "max-keys"), _url(request)
    page = Page((), is_truncated=False)
    if limit:
        page = await store.list(bucket, prefix.encode(), after, delimiter.encode(), limit)
    else:
        await store.check_bucket(bucket)
    common = element("Name", bucket) + f"<Prefix>{encode_list_key(prefix, url)}</Prefix>"
    common += element("MaxKeys", str(limit)) + element("IsTruncated", _flag(page.is_truncated))
    if delimiter:
        common += f"<Delimiter>{encode_list_key(delimiter, url)}</Delimiter>"
    if url:
        common += element("EncodingType", "url")
    prefixes = (entry.decode() for entry in page.entries if isinstance(entry, bytes))
    common += "".join(
        f"<CommonPrefixes><Prefix>{encode_list_key(one, url)}</Prefix></CommonPrefixes>" for one in prefixes
    )
    return page, common


def _last(page: Page) -> bytes:
    last = page.entries[-1]
    return last if isinstance(last, bytes) else last.key.encode()


def _contents(page: Page, owner: str, *, url: bool) -> str:
    return "".join(
        f"<Contents><Key>{encode_list_key(one.key, url)}</Key>"
        f"<LastModified>{_timestamp(int(one.modified))}</LastModified><ETag>{_etag(one.etag)}</ETag>"
        f"<Size>{one.size_bytes}</Size>{owner}"
        f"<StorageClass>{_storage_class(one)}</StorageClass></Contents>"
        for one in page.entries
        if isinstance(one, Found)
    )


def _storage_class(one: Found) -> str:
    return escape(one.headers.get("x-amz-storage-class", "STANDARD")) if one.headers else "STANDARD"


def _etag(etag: str) -> str:
    """Escape an ETag, whose quotes are as a rule all that needs it."""
    return f"&quot;{escape(etag[1:-1])}&quot;" if etag[:1] == '"' == etag[-1:] and len(etag) > 1 else escape(etag)


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
    fields += element("StorageClass", "STANDARD") + element("Initiated", timestamp(row.initiated))
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
    fields = element("PartNumber", str(part.number)) + element("LastModified", timestamp(part.modified))
    return f"<Part>{fields}{element('ETag', part.etag)}{element('Size', str(part.size_bytes))}</Part>"


async def list_buckets(store: Store) -> StoreResponse:
    entries = "".join(
        f"<Bucket>{element('Name', name)}{element('CreationDate', timestamp(created))}</Bucket>"
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
