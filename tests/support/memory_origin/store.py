"""What `MemoryOrigin` holds: buckets, objects, uploads; a `Store` that keeps them in memory."""

from __future__ import annotations

import base64
import hashlib
import uuid
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import parse_qsl

from gateway.core.clock import Clock
from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey
from gateway.origin.stores.store import (
    Condition,
    Found,
    FoundPart,
    FoundUpload,
    Incoming,
    Page,
    chosen,
    kept_headers,
    listed_entry,
)
from gateway.s3.error_codes import s3_error
from gateway.s3.list_result import ListedEntry
from gateway.s3.xml import CompletedPart
from gateway.s3.xml_writer import document, element
from tests.support.memory_origin.content import BytesContent, Content, DiscardedContent, JoinedContent, SlicedContent
from tests.support.memory_origin.digests import ALGORITHMS, Digest, encoded
from tests.support.memory_origin.response import MemoryReading

_LAST = b"\xff"
"""Sorts behind every byte of UTF-8."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One version of an object. `headers` are what was set with it; `part_sizes` is empty unless it came in parts."""

    key: str
    content: Content
    etag: str
    modified: float
    headers: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    part_sizes: tuple[int, ...] = ()
    tagging: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return self.content.size_bytes

    @property
    def found(self) -> Found:
        tags = {"x-amz-tagging-count": str(self.tagging.count(b"<Tag>"))} if self.tagging is not None else {}
        headers = {**self.headers, **tags}
        return Found(self.key, self.size_bytes, self.etag, self.modified, headers, self.checksums, self.part_sizes)


@dataclass(frozen=True, slots=True)
class StoredPart:
    number: int
    content: Content
    etag: str
    modified: float
    checksums: Mapping[str, str]

    @property
    def found(self) -> FoundPart:
        return FoundPart(self.number, self.content.size_bytes, self.etag, self.modified, self.checksums)


@dataclass(slots=True)
class Upload:
    """A multipart upload in progress; `order` tells which of two uploads of a key began first."""

    upload_id: str
    key: str
    order: int
    initiated: float
    headers: Mapping[str, str]
    parts: dict[int, StoredPart] = field(default_factory=dict)


@dataclass(slots=True)
class Bucket:
    """Objects by key, the keys also in the order of their UTF-8 bytes. `completed` remembers finished uploads,
    `settings` the document of each sub-resource.
    """

    name: str
    created: float
    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    completed: dict[str, tuple[tuple[int, ...], Found]] = field(default_factory=dict)
    sorted_keys: list[bytes] = field(default_factory=list)
    settings: dict[str, bytes] = field(default_factory=dict)
    is_kms: bool = False
    """It encrypts with SSE-KMS: ETags are no MD5s, and each is another."""
    _numbers: count[int] = field(default_factory=count)

    def etag(self, md5: str) -> str:
        """That of bytes with this MD5, of an object in one piece or of a part."""
        return f'"{next(self._numbers):032x}"' if self.is_kms else f'"{md5}"'

    def put(self, stored: StoredObject) -> None:
        if stored.key not in self.objects:
            insort(self.sorted_keys, stored.key.encode())
        self.objects[stored.key] = stored

    def remove(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            raw = key.encode()
            del self.sorted_keys[bisect_left(self.sorted_keys, raw)]

    def object(self, key: str) -> StoredObject:
        """The object; S3Error NoSuchKey."""
        found = self.objects.get(key)
        if found is None:
            raise s3_error("NoSuchKey", Key=key)
        return found

    def etag_of(self, key: str) -> str | None:
        return self.objects[key].etag if key in self.objects else None

    def upload(self, upload_id: str, key: str) -> Upload:
        """The upload; S3Error NoSuchUpload."""
        found = self.uploads.get(upload_id)
        if found is None or found.key != key:
            raise s3_error("NoSuchUpload", UploadId=upload_id)
        return found


class MemoryStore:
    """`Store` in memory. `keep_bodies` False hashes what is uploaded and throws it away: size and ETag stay."""

    def __init__(self, clock: Clock, *, keep_bodies: bool) -> None:
        self.keep_bodies = keep_bodies
        self.by_name: dict[str, Bucket] = {}
        self._clock = clock
        self._upload_orders = count(1)

    async def buckets(self) -> Sequence[tuple[str, float]]:
        return [(bucket.name, bucket.created) for bucket in self.by_name.values()]

    async def check_bucket(self, bucket: str) -> None:
        self.bucket(bucket)

    def bucket(self, name: str) -> Bucket:
        """The bucket; S3Error NoSuchBucket."""
        found = self.by_name.get(name)
        if found is None:
            raise s3_error("NoSuchBucket", BucketName=name)
        return found

    def refusal(self, key: ObjectKey) -> S3Error | None:
        """Memory takes any key."""

    async def check_place(self, key: ObjectKey) -> None:
        return

    async def head(self, key: ObjectKey) -> Found:
        return self.bucket(key.bucket).object(key.key).found

    async def open(self, key: ObjectKey, wanted: tuple[int, int | None]) -> MemoryReading:
        stored = self.bucket(key.bucket).object(key.key)
        return MemoryReading(stored.found, stored.content, stored.tagging)

    async def list(self, bucket: str, prefix: bytes, after: bytes, delimiter: bytes, limit: int) -> Page:
        of = self.bucket(bucket)
        keys, entries = of.sorted_keys, list[ListedEntry | bytes]()
        index = max(bisect_left(keys, prefix), bisect_right(keys, after))
        while index < len(keys) and keys[index].startswith(prefix):
            key = keys[index]
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            rolled_up = key[: end + len(delimiter)] if end >= 0 else None
            if rolled_up is None or rolled_up > after:
                if len(entries) == limit:
                    return Page(entries, is_truncated=True)
                entries.append(listed_entry(of.objects[key.decode()].found) if rolled_up is None else rolled_up)
            index = index + 1 if rolled_up is None else bisect_left(keys, rolled_up + _LAST, index)
        return Page(entries, is_truncated=False)

    async def put(self, key: ObjectKey, body: Incoming, headers: Mapping[str, str], condition: Condition) -> Found:
        """Conditions are judged when the body is complete, so the last writer loses where two began alike."""
        bucket = self.bucket(key.bucket)
        content = await self._taken(body)
        checksums, tagging = body.digests.verified(), _tagging(headers.get("x-amz-tagging"))
        if body.copied is not None:
            source = body.copied[0]
            checksums, tagging = dict(source.found.checksums), getattr(source, "tagging", None)
        elif checksums:
            checksums["x-amz-checksum-type"] = "FULL_OBJECT"
        condition(bucket.etag_of(key.key))
        etag, kept = bucket.etag(body.digests.md5().hex()), kept_headers(headers)
        stored = StoredObject(key.key, content, etag, self._clock.now(), kept, checksums, tagging=tagging)
        bucket.put(stored)
        return stored.found

    async def _taken(self, body: Incoming) -> Content:
        pieces, size = list[bytes](), 0
        async for chunk in body.chunks:
            body.digests.update(chunk)
            size += len(chunk)
            if self.keep_bodies and body.copied is None:
                pieces.append(bytes(chunk))
        if body.copied is None:
            return BytesContent(b"".join(pieces)) if self.keep_bodies else DiscardedContent(size)
        source, wanted = body.copied
        assert isinstance(source, MemoryReading)
        return source.content if wanted is None else SlicedContent(source.content, wanted.first, wanted.length)

    async def delete(self, key: ObjectKey, condition: Condition) -> None:
        bucket = self.bucket(key.bucket)
        condition(bucket.etag_of(key.key))
        bucket.remove(key.key)

    async def begin(self, key: ObjectKey, headers: Mapping[str, str]) -> str:
        upload = Upload(uuid.uuid4().hex, key.key, next(self._upload_orders), self._clock.now(), headers)
        self.bucket(key.bucket).uploads[upload.upload_id] = upload
        return upload.upload_id

    async def began(self, key: ObjectKey, upload_id: str) -> Mapping[str, str]:
        return self.bucket(key.bucket).upload(upload_id, key.key).headers

    async def put_part(self, key: ObjectKey, upload_id: str, number: int, body: Incoming) -> FoundPart:
        bucket = self.bucket(key.bucket)
        content = await self._taken(body)
        checksums, etag = body.digests.verified(), bucket.etag(body.digests.md5().hex())
        upload = bucket.upload(upload_id, key.key)
        part = upload.parts[number] = StoredPart(number, content, etag, self._clock.now(), checksums)
        return part.found

    async def parts(self, key: ObjectKey, upload_id: str) -> Sequence[FoundPart]:
        parts = self.bucket(key.bucket).upload(upload_id, key.key).parts
        return [parts[number].found for number in sorted(parts)]

    async def complete(
        self,
        key: ObjectKey,
        upload_id: str,
        listed: Sequence[CompletedPart],
        headers: Mapping[str, str],
        condition: Condition,
    ) -> Found:
        """Checks in S3's order; repeating a Complete that succeeded gives the same answer again."""
        bucket, numbers = self.bucket(key.bucket), tuple(part.number for part in listed)
        if upload_id in bucket.completed and upload_id not in bucket.uploads:
            done_numbers, found = bucket.completed[upload_id]
            if done_numbers == numbers:
                return found
        upload = bucket.upload(upload_id, key.key)
        parts = chosen(upload_id, {number: part.found for number, part in upload.parts.items()}, listed)
        stored = _assembled(headers, upload, [upload.parts[part.number] for part in parts])
        condition(bucket.etag_of(key.key))
        bucket.put(stored)
        del bucket.uploads[upload_id]
        bucket.completed[upload_id] = (numbers, stored.found)
        return stored.found

    async def abort(self, key: ObjectKey, upload_id: str) -> None:
        bucket = self.bucket(key.bucket)
        del bucket.uploads[bucket.upload(upload_id, key.key).upload_id]

    async def uploads(self, bucket: str, prefix: str) -> Sequence[FoundUpload]:
        open_uploads = sorted(self.bucket(bucket).uploads.values(), key=lambda one: (one.key.encode(), one.order))
        return [
            FoundUpload(one.key, one.upload_id, one.initiated) for one in open_uploads if one.key.startswith(prefix)
        ]

    async def aclose(self) -> None:
        return


def _tagging(value: str | None) -> bytes | None:
    if value is None:
        return None
    pairs = parse_qsl(value, keep_blank_values=True)
    tags = "".join(f"<Tag>{element('Key', name)}{element('Value', text)}</Tag>" for name, text in pairs)
    return document("Tagging", f"<TagSet>{tags}</TagSet>")


def _assembled(headers: Mapping[str, str], upload: Upload, parts: Sequence[StoredPart]) -> StoredObject:
    sizes = tuple(part.content.size_bytes for part in parts)
    declared = headers.get("x-amz-mp-object-size")
    if declared is not None and declared != str(sum(sizes)):
        raise s3_error("InvalidRequest", "The provided x-amz-mp-object-size does not match the size of the object.")
    content = JoinedContent([part.content for part in parts])
    digest = hashlib.md5(b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts), usedforsecurity=False)
    etag = f'"{digest.hexdigest()}-{len(parts)}"'
    kept = {name: value for name, value in upload.headers.items() if not name.startswith("x-amz-checksum-")}
    checksums = _object_checksums(upload.headers, parts, content)
    said_type = headers.get("x-amz-checksum-type", "").upper()
    if said_type not in ("", checksums.get("x-amz-checksum-type", "FULL_OBJECT")):
        raise s3_error("InvalidRequest", "The upload was created with another type of checksum.")
    for name, algorithm in ALGORITHMS.items():
        said = headers.get(f"x-amz-checksum-{name}")
        if said is not None and said != checksums.get(f"x-amz-checksum-{name}", _of_whole(algorithm(), content)):
            raise s3_error("BadDigest")
    # S3 dates it by the beginning of its upload.
    return StoredObject(upload.key, content, etag, upload.initiated, kept, checksums, sizes)


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
    for piece in _pieces_of(content):
        digest.update(piece)
    return encoded(digest.digest())


def _pieces_of(content: Content) -> Iterator[bytes]:
    """All of a content, by the mebibyte."""
    mebibyte = 1024 * 1024
    return (content.read(offset, mebibyte) for offset in range(0, content.size_bytes, mebibyte))
