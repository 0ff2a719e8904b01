"""GetObject, HeadObject, PutObject, CopyObject, RenameObject, DeleteObject(s) and tags at `MemoryOrigin`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import parse_qsl, unquote
from xml.etree.ElementTree import Element, ParseError

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import fromstring

from gateway.core.errors import S3Error
from gateway.core.model import ByteRange
from gateway.origin.client import OriginRequest
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import parse_copy_source
from gateway.s3.xml_writer import document, element
from tests.support.memory_origin.conditions import asked_range, check_copy_source, check_read, check_write
from tests.support.memory_origin.content import BytesContent, SlicedContent
from tests.support.memory_origin.digests import ReceivedBody
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import Bucket, StoredObject, kept_headers

_OVERRIDES = (
    "content-type",
    "content-language",
    "expires",
    "cache-control",
    "content-disposition",
    "content-encoding",
)


def parameter(request: OriginRequest, name: str) -> str | None:
    """The first value of a query parameter, empty when it has none; None when it is absent."""
    return next((value or "" for candidate, value in request.query if candidate == name), None)


def xml_answer(root: str, children: str, headers: dict[str, str] | None = None) -> MemoryResponse:
    return MemoryResponse(
        200, {"content-type": "application/xml", **(headers or {})}, BytesContent(document(root, children))
    )


def parse_xml(data: bytes) -> Element:
    """The root element, its namespace and its children's taken off; S3Error MalformedXML."""
    try:
        root: Element = fromstring(data, forbid_dtd=True)
    except (ParseError, DefusedXmlException):
        raise s3_error("MalformedXML") from None
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root


def timestamp(moment: float) -> str:
    """As in listings: ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def read_object(request: OriginRequest, bucket: Bucket) -> MemoryResponse:
    """GetObject and HeadObject."""
    stored = bucket.object(request.key or "")
    if parameter(request, "versionId") not in (None, "null"):
        raise s3_error("NoSuchVersion")
    if not check_read(request.headers, stored.etag, stored.modified):
        return MemoryResponse(304, {"etag": stored.etag, "last-modified": stored.last_modified})
    number = parameter(request, "partNumber")
    asked = _asked_part(request, stored, number) if number is not None else _asked_bytes(request, stored)
    headers = _object_headers(request, stored, whole=asked is None)
    if number is not None and stored.part_sizes:
        headers["x-amz-mp-parts-count"] = str(len(stored.part_sizes))
    if asked is None:
        return MemoryResponse(206 if number is not None else 200, headers, stored.content)
    headers["content-range"] = f"bytes {asked.first}-{asked.last}/{stored.size_bytes}"
    headers["content-length"] = str(asked.length)
    return MemoryResponse(206, headers, SlicedContent(stored.content, asked.first, asked.length))


def _asked_bytes(request: OriginRequest, stored: StoredObject) -> ByteRange | None:
    condition = request.headers.get("if-range")
    if condition is not None and condition not in (stored.etag, stored.last_modified):
        return None
    return asked_range(request.headers.get("range"), stored.size_bytes)


def _asked_part(request: OriginRequest, stored: StoredObject, text: str) -> ByteRange | None:
    if "range" in request.headers:
        raise s3_error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise s3_error("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
    sizes = stored.part_sizes or (stored.size_bytes,)
    number = int(text)
    if number > len(sizes):
        raise s3_error("InvalidPartNumber")
    first = sum(sizes[: number - 1])
    return ByteRange(first, first + sizes[number - 1] - 1) if sizes[number - 1] else None


def _object_headers(request: OriginRequest, stored: StoredObject, *, whole: bool) -> dict[str, str]:
    headers = {"content-type": "binary/octet-stream", **stored.headers}
    headers |= {"etag": stored.etag, "last-modified": stored.last_modified, "accept-ranges": "bytes"}
    headers["content-length"] = str(stored.size_bytes)
    if whole and request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
        headers |= stored.checksums
    if stored.tagging is not None:
        headers["x-amz-tagging-count"] = str(stored.tagging.count(b"<Tag>"))
    for name in _OVERRIDES:
        override = parameter(request, f"response-{name}")
        if override is not None:
            headers[name] = override
    return headers


def put_object(request: OriginRequest, bucket: Bucket, body: ReceivedBody, now: float) -> MemoryResponse:
    key = request.key or ""
    current = bucket.objects.get(key)
    check_write(request.headers, current.etag if current else None)
    etag = bucket.etag(body.md5.hex())
    checksums = {**body.checksums, "x-amz-checksum-type": "FULL_OBJECT"} if body.checksums else {}
    tagging = _tagging_of_header(request.headers.get("x-amz-tagging"))
    bucket.put(StoredObject(key, body.content, etag, now, kept_headers(request.headers), checksums, tagging=tagging))
    return MemoryResponse(200, {"etag": etag, **checksums})


def _tagging_of_header(value: str | None) -> bytes | None:
    if value is None:
        return None
    pairs = parse_qsl(value, keep_blank_values=True)
    tags = "".join(f"<Tag>{element('Key', name)}{element('Value', text)}</Tag>" for name, text in pairs)
    return document("Tagging", f"<TagSet>{tags}</TagSet>")


def copy_source(request: OriginRequest, buckets: dict[str, Bucket]) -> StoredObject:
    """The object that `x-amz-copy-source` names, its conditions checked."""
    source = parse_copy_source(request.headers["x-amz-copy-source"])
    if source.key.bucket not in buckets:
        raise s3_error("NoSuchBucket", BucketName=source.key.bucket)
    stored = buckets[source.key.bucket].object(source.key.key)
    if source.version_id not in (None, "null"):
        raise s3_error("NoSuchVersion")
    check_copy_source(request.headers, stored.etag, stored.modified)
    return stored


def copy_object(
    request: OriginRequest, buckets: dict[str, Bucket], bucket: Bucket, md5: str, now: float
) -> MemoryResponse:
    """`md5` is the hash of the source's bytes: a copy is always one part."""
    source = copy_source(request, buckets)
    key = request.key or ""
    current = bucket.objects.get(key)
    check_write(request.headers, current.etag if current else None)
    replaced = request.headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
    if source is current and not replaced and "x-amz-storage-class" not in request.headers:
        raise s3_error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing anything.",
        )
    headers = kept_headers(request.headers) if replaced else source.headers
    stored = replace(source, key=key, etag=bucket.etag(md5), modified=now, headers=headers, part_sizes=())
    bucket.put(stored)
    return xml_answer("CopyObjectResult", element("LastModified", timestamp(now)) + element("ETag", stored.etag))


def rename_object(request: OriginRequest, bucket: Bucket) -> MemoryResponse:
    """RenameObject: nothing but the key changes. Sources are named `/bucket/key` or by the key alone."""
    named = unquote(request.headers["x-amz-rename-source"])
    source = bucket.object(named.removeprefix(f"/{bucket.name}/"))
    prefix = "x-amz-rename-source-"
    check_write(
        {name.removeprefix(prefix): value for name, value in request.headers.items() if name.startswith(prefix)},
        source.etag,
    )
    key = request.key or ""
    current = bucket.objects.get(key)
    check_write(request.headers, current.etag if current else None)
    bucket.remove(source.key)
    bucket.put(replace(source, key=key))
    return MemoryResponse(200)


def delete_object(request: OriginRequest, bucket: Bucket) -> MemoryResponse:
    key = request.key or ""
    _check_delete(request.headers.get("if-match"), bucket, key)
    bucket.remove(key)
    return MemoryResponse(204)


def delete_objects(request: OriginRequest, bucket: Bucket, body: ReceivedBody, data: bytes) -> MemoryResponse:
    if "content-md5" not in request.headers and not body.checksums:
        raise s3_error("InvalidRequest", "Missing required header for this request: Content-MD5")
    root = parse_xml(data)
    entries = root.findall("Object")
    if root.tag != "Delete" or not 1 <= len(entries) <= 1000:
        raise s3_error("MalformedXML")
    quiet = root.findtext("Quiet") == "true"
    return xml_answer("DeleteResult", "".join(_delete_one(entry, bucket, quiet) for entry in entries))


def _delete_one(entry: Element, bucket: Bucket, quiet: bool) -> str:
    key = entry.findtext("Key") or ""
    try:
        _check_delete(entry.findtext("ETag"), bucket, key)
    except S3Error as error:
        fields = element("Key", key) + element("Code", error.code) + element("Message", error.message)
        return f"<Error>{fields}</Error>"
    bucket.remove(key)
    return "" if quiet else f"<Deleted>{element('Key', key)}</Deleted>"


def _check_delete(condition: str | None, bucket: Bucket, key: str) -> None:
    if condition is not None:
        current = bucket.objects.get(key)
        check_write({"if-match": condition}, current.etag if current else None)


def tagging(request: OriginRequest, bucket: Bucket, data: bytes) -> MemoryResponse:
    """GetObjectTagging, PutObjectTagging, DeleteObjectTagging."""
    stored = bucket.object(request.key or "")
    if request.method == "GET":
        empty = document("Tagging", "<TagSet></TagSet>")
        return MemoryResponse(200, {"content-type": "application/xml"}, BytesContent(stored.tagging or empty))
    if request.method == "PUT":
        parse_xml(data)
    bucket.put(replace(stored, tagging=data if request.method == "PUT" else None))
    return MemoryResponse(200 if request.method == "PUT" else 204)
