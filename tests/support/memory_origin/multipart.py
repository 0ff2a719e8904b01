"""Multipart uploads at `MemoryOrigin` (S3 API: CreateMultipartUpload and its kin)."""

from __future__ import annotations

import base64
import hashlib
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element

from gateway.origin.client import OriginRequest
from gateway.s3.error_codes import s3_error
from gateway.s3.xml_writer import element
from tests.support.memory_origin.conditions import check_write
from tests.support.memory_origin.content import BytesContent, Content, JoinedContent, SlicedContent
from tests.support.memory_origin.digests import ALGORITHMS, Digest, ReceivedBody, encoded
from tests.support.memory_origin.objects import parameter, parse_xml, timestamp, xml_answer
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import Bucket, StoredObject, StoredPart, Upload, kept_headers

PART_SIZE_BYTES_MIN = 5 * 1024 * 1024

_COPY_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


def create(request: OriginRequest, bucket: Bucket, order: int, now: float) -> MemoryResponse:
    key = request.key or ""
    headers = kept_headers(request.headers)
    algorithm = request.headers.get("x-amz-checksum-algorithm", "").lower()
    answer: dict[str, str] = {}
    if algorithm:
        if algorithm not in ALGORITHMS:
            raise s3_error("InvalidRequest", "Checksum algorithm provided is unsupported.")
        default = "FULL_OBJECT" if algorithm == "crc64nvme" else "COMPOSITE"
        answer = {
            "x-amz-checksum-algorithm": algorithm.upper(),
            "x-amz-checksum-type": request.headers.get("x-amz-checksum-type", default).upper(),
        }
    upload = Upload(uuid.uuid4().hex, key, order, now, {**headers, **answer})
    bucket.uploads[upload.upload_id] = upload
    fields = element("Bucket", bucket.name) + element("Key", key) + element("UploadId", upload.upload_id)
    return xml_answer("InitiateMultipartUploadResult", fields, answer)


def find(request: OriginRequest, bucket: Bucket) -> tuple[Upload, int]:
    """The upload and the part number that a part's request names."""
    number = parameter(request, "partNumber") or ""
    if not number.isdecimal() or not 1 <= int(number) <= 10_000:
        raise s3_error("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
    return bucket.upload(parameter(request, "uploadId") or "", request.key or ""), int(number)


def upload_part(request: OriginRequest, bucket: Bucket, body: ReceivedBody, now: float) -> MemoryResponse:
    upload, number = find(request, bucket)
    etag = bucket.etag(body.md5.hex())
    upload.parts[number] = StoredPart(number, body.content, etag, now, body.checksums)
    return MemoryResponse(200, {"etag": etag, **body.checksums})


def copied_range(request: OriginRequest, source: StoredObject) -> Content:
    """The bytes that UploadPartCopy takes."""
    asked = request.headers.get("x-amz-copy-source-range")
    if asked is None:
        return source.content
    found = _COPY_RANGE.fullmatch(asked)
    if found is None or int(found[2]) < int(found[1]):
        raise s3_error("InvalidArgument", "The x-amz-copy-source-range value must be of the form bytes=first-last")
    first, last = int(found[1]), int(found[2])
    if last >= source.size_bytes:
        raise s3_error(
            "InvalidArgument", f"Range specified is not valid for source object of size: {source.size_bytes}"
        )
    return SlicedContent(source.content, first, last - first + 1)


def store_copied_part(request: OriginRequest, bucket: Bucket, content: Content, md5: str, now: float) -> MemoryResponse:
    upload, number = find(request, bucket)
    etag = bucket.etag(md5)
    upload.parts[number] = StoredPart(number, content, etag, now, {})
    return xml_answer("CopyPartResult", element("LastModified", timestamp(now)) + element("ETag", etag))


def complete(request: OriginRequest, bucket: Bucket, data: bytes) -> MemoryResponse:
    """Checks in S3's order; repeating a Complete that succeeded gives the same answer again."""
    upload_id = parameter(request, "uploadId") or ""
    listed = _listed_parts(data)
    numbers = tuple(number for number, _ in listed)
    if upload_id in bucket.completed and upload_id not in bucket.uploads:
        done_numbers, answer = bucket.completed[upload_id]
        if done_numbers == numbers:
            return MemoryResponse(200, {"content-type": "application/xml"}, BytesContent(answer))
    upload = bucket.upload(upload_id, request.key or "")
    parts = _chosen(upload, listed)
    stored = _assemble(request, upload, parts)
    current = bucket.objects.get(upload.key)
    check_write(request.headers, current.etag if current else None)
    bucket.put(stored)
    del bucket.uploads[upload_id]
    response = _completed(request, bucket, stored)
    bucket.completed[upload_id] = (numbers, response.content.read(0, response.content.size_bytes))
    return response


def _completed(request: OriginRequest, bucket: Bucket, stored: StoredObject) -> MemoryResponse:
    fields = element("Location", f"/{bucket.name}/{stored.key}") + element("Bucket", bucket.name)
    fields += element("Key", stored.key) + element("ETag", stored.etag)
    for name, value in stored.checksums.items():
        tag = name.removeprefix("x-amz-checksum-")
        fields += element("ChecksumType" if tag == "type" else f"Checksum{tag.upper()}", value)
    return xml_answer("CompleteMultipartUploadResult", fields)


def _listed_parts(data: bytes) -> list[tuple[int, Element]]:
    root = parse_xml(data)
    listed = [(node.findtext("PartNumber") or "", node) for node in root.findall("Part")]
    if root.tag != "CompleteMultipartUpload" or not listed or not all(text.strip().isdecimal() for text, _ in listed):
        raise s3_error("MalformedXML")
    numbered = [(int(text), node) for text, node in listed]
    if any(first >= second for (first, _), (second, _) in pairwise(numbered)):
        raise s3_error("InvalidPartOrder")
    return numbered


def _chosen(upload: Upload, listed: Sequence[tuple[int, Element]]) -> list[StoredPart]:
    parts = []
    for number, node in listed:
        etag = (node.findtext("ETag") or "").strip().strip('"')
        part = upload.parts.get(number)
        if part is None or part.etag.strip('"') != etag or not _checksums_fit(part, node):
            raise s3_error("InvalidPart", UploadId=upload.upload_id, PartNumber=str(number), ETag=etag)
        parts.append(part)
    for part in parts[:-1]:
        if part.content.size_bytes < PART_SIZE_BYTES_MIN:
            raise s3_error(
                "EntityTooSmall",
                ProposedSize=str(part.content.size_bytes),
                MinSizeAllowed=str(PART_SIZE_BYTES_MIN),
                PartNumber=str(part.number),
                ETag=part.etag,
            )
    return parts


def _checksums_fit(part: StoredPart, node: Element) -> bool:
    declared = {child.tag.lower(): (child.text or "").strip() for child in node if child.tag.startswith("Checksum")}
    stored = {name.removeprefix("x-amz-").replace("-", ""): value for name, value in part.checksums.items()}
    return all(stored.get(name, value) == value for name, value in declared.items())


def _assemble(request: OriginRequest, upload: Upload, parts: Sequence[StoredPart]) -> StoredObject:
    sizes = tuple(part.content.size_bytes for part in parts)
    declared = request.headers.get("x-amz-mp-object-size")
    if declared is not None and declared != str(sum(sizes)):
        raise s3_error("InvalidRequest", "The provided x-amz-mp-object-size does not match the size of the object.")
    content = JoinedContent([part.content for part in parts])
    digest = hashlib.md5(b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts), usedforsecurity=False)
    etag = f'"{digest.hexdigest()}-{len(parts)}"'
    headers = {name: value for name, value in upload.headers.items() if not name.startswith("x-amz-checksum-")}
    checksums = _object_checksums(upload.headers, parts, content)
    said_type = request.headers.get("x-amz-checksum-type", "").upper()
    if said_type not in ("", checksums.get("x-amz-checksum-type", "FULL_OBJECT")):
        raise s3_error("InvalidRequest", "The upload was created with another type of checksum.")
    for name, algorithm in ALGORITHMS.items():
        said = request.headers.get(f"x-amz-checksum-{name}")
        if said is not None and said != checksums.get(f"x-amz-checksum-{name}", _of_whole(algorithm(), content)):
            raise s3_error("BadDigest")
    # S3 dates it by the beginning of its upload.
    return StoredObject(upload.key, content, etag, upload.initiated, headers, checksums, sizes)


def _object_checksums(headers: Mapping[str, str], parts: Sequence[StoredPart], content: Content) -> dict[str, str]:
    algorithm = headers.get("x-amz-checksum-algorithm", "").lower()
    if not algorithm:
        return {}
    name, kind = f"x-amz-checksum-{algorithm}", headers["x-amz-checksum-type"]
    digest = ALGORITHMS[algorithm]()
    if kind == "FULL_OBJECT":
        return {name: _of_whole(digest, content), "x-amz-checksum-type": kind}
    for part in parts:
        if name not in part.checksums:
            raise s3_error("InvalidRequest", "The upload was created with a checksum; each part must have one.")
        digest.update(base64.b64decode(part.checksums[name]))
    return {name: f"{encoded(digest.digest())}-{len(parts)}", "x-amz-checksum-type": kind}


def _of_whole(digest: Digest, content: Content) -> str:
    for piece in pieces_of(content):
        digest.update(piece)
    return encoded(digest.digest())


def pieces_of(content: Content) -> Iterator[bytes]:
    """All of a content, by the mebibyte."""
    mebibyte = 1024 * 1024
    return (content.read(offset, mebibyte) for offset in range(0, content.size_bytes, mebibyte))


def abort(request: OriginRequest, bucket: Bucket) -> MemoryResponse:
    upload = bucket.upload(parameter(request, "uploadId") or "", request.key or "")
    del bucket.uploads[upload.upload_id]
    return MemoryResponse(204)


def list_parts(request: OriginRequest, bucket: Bucket) -> MemoryResponse:
    upload = bucket.upload(parameter(request, "uploadId") or "", request.key or "")
    marker = int(parameter(request, "part-number-marker") or 0)
    limit = min(int(parameter(request, "max-parts") or 1000), 1000)
    behind = [upload.parts[number] for number in sorted(upload.parts) if number > marker]
    page = behind[:limit]
    fields = element("Bucket", bucket.name) + element("Key", upload.key) + element("UploadId", upload.upload_id)
    fields += element("PartNumberMarker", str(marker))
    fields += element("NextPartNumberMarker", str(page[-1].number if page else 0)) + element("MaxParts", str(limit))
    fields += element("IsTruncated", "true" if len(behind) > len(page) else "false")
    return xml_answer("ListPartsResult", fields + "".join(_part(part) for part in page))


def _part(part: StoredPart) -> str:
    fields = element("PartNumber", str(part.number)) + element("LastModified", timestamp(part.modified))
    return f"<Part>{fields}{element('ETag', part.etag)}{element('Size', str(part.content.size_bytes))}</Part>"
