"""What `MemoryOrigin` holds: buckets, objects, uploads; no behaviour but looking things up."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from gateway.s3.error_codes import s3_error
from gateway.s3.headers import format_http_date
from tests.support.memory_origin.content import Content

_KEPT = frozenset(
    {
        "content-type",
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "expires",
        "x-amz-website-redirect-location",
    }
)


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
    def last_modified(self) -> str:
        return format_http_date(self.modified)


@dataclass(frozen=True, slots=True)
class StoredPart:
    number: int
    content: Content
    etag: str
    modified: float
    checksums: Mapping[str, str]


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
    completed: dict[str, tuple[tuple[int, ...], bytes]] = field(default_factory=dict)
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

    def upload(self, upload_id: str, key: str) -> Upload:
        """The upload; S3Error NoSuchUpload."""
        found = self.uploads.get(upload_id)
        if found is None or found.key != key:
            raise s3_error("NoSuchUpload", UploadId=upload_id)
        return found


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The request headers that become part of an object: the standard ones and the user's metadata."""
    kept = {name: value for name, value in headers.items() if name in _KEPT or name.startswith("x-amz-meta-")}
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class != "STANDARD":
        kept["x-amz-storage-class"] = storage_class
    return kept
