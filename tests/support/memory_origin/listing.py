"""ListObjects, ListObjectsV2, ListMultipartUploads, ListBuckets at `MemoryOrigin` (S3 API pages of those names)."""

from __future__ import annotations

import base64
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.origin.client import OriginRequest
from gateway.s3.error_codes import s3_error
from gateway.s3.xml_writer import element, encode_list_key
from tests.support.memory_origin.objects import parameter, timestamp, xml_answer
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import Bucket, StoredObject, Upload

OWNER = "<Owner><ID>origin</ID><DisplayName>origin</DisplayName></Owner>"
_PAGE_MAX = 1000
_LAST = b"\xff"
"""Sorts behind every byte of UTF-8."""


@dataclass(slots=True)
class _Page:
    keys: list[bytes] = field(default_factory=list)
    prefixes: list[bytes] = field(default_factory=list)
    truncated: bool = False
    last: bytes = b""

    @property
    def entries(self) -> int:
        return len(self.keys) + len(self.prefixes)


def list_v2(request: OriginRequest, bucket: Bucket) -> MemoryResponse:
    token = parameter(request, "continuation-token")
    start_after = parameter(request, "start-after") or ""
    after = _decode_token(token) if token else start_after.encode()
    page, common = _list(request, bucket, after)
    optional = "" if token is None else element("ContinuationToken", token)
    if page.truncated:
        optional += element("NextContinuationToken", base64.urlsafe_b64encode(page.last).decode())
    if start_after:
        optional += element("StartAfter", encode_list_key(start_after, _url(request)))
    owner = OWNER if parameter(request, "fetch-owner") == "true" else ""
    contents = "".join(_contents(bucket.objects[key.decode()], request, owner) for key in page.keys)
    return xml_answer("ListBucketResult", common + element("KeyCount", str(page.entries)) + optional + contents)


def list_v1(request: OriginRequest, bucket: Bucket) -> MemoryResponse:
    marker = parameter(request, "marker") or ""
    page, common = _list(request, bucket, marker.encode())
    optional = f"<Marker>{encode_list_key(marker, _url(request))}</Marker>"
    if page.truncated and parameter(request, "delimiter"):
        optional += f"<NextMarker>{encode_list_key(page.last.decode(), _url(request))}</NextMarker>"
    contents = "".join(_contents(bucket.objects[key.decode()], request, OWNER) for key in page.keys)
    return xml_answer("ListBucketResult", common + optional + contents)


def list_uploads(request: OriginRequest, bucket: Bucket) -> MemoryResponse:
    """ListMultipartUploads, by key and then by age."""
    prefix, delimiter = parameter(request, "prefix") or "", parameter(request, "delimiter") or ""
    key_marker = parameter(request, "key-marker") or ""
    id_marker = (parameter(request, "upload-id-marker") or "") if key_marker else ""
    limit, url = _limit(parameter(request, "max-uploads"), "max-uploads"), _url(request)
    rows: list[Upload | str] = []
    for upload in sorted(bucket.uploads.values(), key=lambda upload: (upload.key.encode(), upload.order)):
        if upload.key.startswith(prefix) and _is_behind(upload, key_marker, id_marker, bucket):
            end = upload.key.find(delimiter, len(prefix)) if delimiter else -1
            row = upload if end < 0 else upload.key[: end + len(delimiter)]
            if isinstance(row, Upload) or (row.encode() > key_marker.encode() and rows[-1:] != [row]):
                rows.append(row)
    page = rows[:limit]
    fields = element("Bucket", bucket.name) + f"<KeyMarker>{encode_list_key(key_marker, url)}</KeyMarker>"
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


def _is_behind(upload: Upload, key_marker: str, id_marker: str, bucket: Bucket) -> bool:
    if upload.key != key_marker or not id_marker:
        return upload.key.encode() > key_marker.encode()
    marked = bucket.uploads.get(id_marker)
    return marked is not None and upload.order > marked.order


def _upload(row: Upload | str, *, url: bool) -> str:
    """An upload, or a common prefix."""
    if isinstance(row, str):
        return f"<CommonPrefixes><Prefix>{encode_list_key(row, url)}</Prefix></CommonPrefixes>"
    fields = f"<Key>{encode_list_key(row.key, url)}</Key>" + element("UploadId", row.upload_id) + OWNER
    fields += element("StorageClass", "STANDARD") + element("Initiated", timestamp(row.initiated))
    return f"<Upload>{fields}</Upload>"


def list_buckets(buckets: Iterable[Bucket]) -> MemoryResponse:
    entries = "".join(
        f"<Bucket>{element('Name', bucket.name)}{element('CreationDate', timestamp(bucket.created))}</Bucket>"
        for bucket in sorted(buckets, key=lambda bucket: bucket.name)
    )
    return xml_answer("ListAllMyBucketsResult", f"{OWNER}<Buckets>{entries}</Buckets>")


def _list(request: OriginRequest, bucket: Bucket, after: bytes) -> tuple[_Page, str]:
    prefix = (parameter(request, "prefix") or "").encode()
    delimiter = (parameter(request, "delimiter") or "").encode()
    limit = _limit(parameter(request, "max-keys"), "max-keys")
    page = _page(bucket.sorted_keys, prefix, delimiter, after, limit)
    url = _url(request)
    common = element("Name", bucket.name) + f"<Prefix>{encode_list_key(prefix.decode(), url)}</Prefix>"
    common += element("MaxKeys", str(limit)) + element("IsTruncated", _flag(page.truncated))
    if delimiter:
        common += f"<Delimiter>{encode_list_key(delimiter.decode(), url)}</Delimiter>"
    if url:
        common += element("EncodingType", "url")
    common += "".join(
        f"<CommonPrefixes><Prefix>{encode_list_key(found.decode(), url)}</Prefix></CommonPrefixes>"
        for found in page.prefixes
    )
    return page, common


def _page(keys: Sequence[bytes], prefix: bytes, delimiter: bytes, after: bytes, limit: int) -> _Page:
    """Keys behind `after`; a common prefix counts as one entry, and one that is not behind `after` is left out."""
    page = _Page()
    if limit == 0:
        return page
    index = max(bisect_left(keys, prefix), bisect_right(keys, after))
    while index < len(keys) and keys[index].startswith(prefix):
        key = keys[index]
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        rolled_up = key[: end + len(delimiter)] if end >= 0 else None
        following = index + 1 if rolled_up is None else bisect_left(keys, rolled_up + _LAST, index)
        if rolled_up is None or rolled_up > after:
            if page.entries == limit:
                page.truncated = True
                return page
            (page.keys if rolled_up is None else page.prefixes).append(rolled_up or key)
            page.last = rolled_up or key
        index = following
    return page


def _contents(stored: StoredObject, request: OriginRequest, owner: str) -> str:
    storage_class = stored.headers.get("x-amz-storage-class", "STANDARD")
    return (
        f"<Contents><Key>{encode_list_key(stored.key, _url(request))}</Key>"
        f"{element('LastModified', timestamp(stored.modified))}{element('ETag', stored.etag)}"
        f"{element('Size', str(stored.size_bytes))}{owner}{element('StorageClass', storage_class)}</Contents>"
    )


def _url(request: OriginRequest) -> bool:
    encoding = parameter(request, "encoding-type")
    if encoding not in (None, "", "url"):
        raise s3_error("InvalidArgument", "Invalid Encoding Method specified in Request", ArgumentName="encoding-type")
    return encoding == "url"


def _limit(value: str | None, name: str) -> int:
    if not value:
        return _PAGE_MAX
    if not value.isdecimal():
        raise s3_error("InvalidArgument", f"Provided {name} not an integer or within integer range", ArgumentName=name)
    return min(int(value), _PAGE_MAX)


def _decode_token(token: str) -> bytes:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True)
    except ValueError:
        raise s3_error("InvalidArgument", "The continuation token provided is incorrect") from None


def _flag(value: bool) -> str:
    return "true" if value else "false"
