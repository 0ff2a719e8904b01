"""What the catalog knows of a key, packed and unpacked, and where that lies. Pure; docs/on-disk-format.md says more."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.metadata.head import ObjectHead
from gateway.objects import ObjectKey, ObjectVersion
from gateway.s3.http_dates import format_http_date, parse_http_date

CATALOG_KEY_BYTES_MAX = 511
"""What LMDB takes."""

_DIGEST_BYTES = 32


def catalog_key(key: ObjectKey) -> bytes:
    """Bucket, a zero byte, key. A longer one is cut and ends in a digest of all of it.

    Cut keys have the greatest length there is, others are shorter: the two are never mistaken for each other.
    """
    whole = f"{key.bucket}\0{key.key}".encode("utf-8", "surrogatepass")
    if len(whole) < CATALOG_KEY_BYTES_MAX:
        return whole
    digest = hashlib.blake2b(whole, digest_size=_DIGEST_BYTES, person=b"forebay catalog1").digest()
    return whole[: CATALOG_KEY_BYTES_MAX - _DIGEST_BYTES] + digest


def version_key(version: ObjectVersion) -> bytes:
    """One version's place: a digest, as nobody asks for versions in order."""
    key = version.key
    whole = f"{key.bucket}\0{len(key.key)}\0{key.key}{version.etag}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(whole, digest_size=_DIGEST_BYTES, person=b"forebay version1").digest()


EXTRA_BYTES_MAX = 8 * 1024
"""Objects with more in their headers are not remembered: S3 itself allows 2 KiB of user metadata."""

_FIXED = struct.Struct("<IHIQQQdQq")
_CHECKSUM_BYTES = 4

_ABSENT = 1
_NAMED = 2
_CHECKSUMS = 4
_EXTRA = 8
_MD5 = 16
_DATED = 32
_COMMON = {
    64: ("accept-ranges", "bytes"),
    128: ("content-type", "binary/octet-stream"),
    256: ("x-amz-server-side-encryption", "AES256"),
}
"""Headers that most objects have, a bit each."""

_SETTLED = 512

_NOT_OF_THE_OBJECT = frozenset({"date", "server", "x-amz-request-id", "x-amz-id-2", "connection", "keep-alive"})
"""They belong to one answer of the origin, and are gone with it."""

_MD5_ETAG = re.compile('"[0-9a-f]{32}"')


@dataclass(frozen=True, slots=True)
class ObservedAt:
    """When something was learned. `seconds` and `boot` are those of the question, not of the answer.

    `epoch` and `cells` are the bucket's and the key's invalidation epochs when the origin was asked (epochs.py);
    of a bucket itself, or of a listing, the first alone.
    """

    epoch: int
    seconds: float
    boot: int
    cells: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the catalog knows of a key.

    `head` None: there is no such object; then `named` says that the origin's error was NoSuchKey, and not that of a
    missing bucket, which a HEAD cannot tell apart. `with_checksums`: asked with `x-amz-checksum-mode: ENABLED`.
    `settled`: a listing can confirm it (confirmation.py).
    """

    observed_at: ObservedAt
    head: ObjectHead | None = None
    named: bool = False
    with_checksums: bool = False
    settled: bool = False


def pack(key: bytes, entry: Entry) -> tuple[bytes, bytes]:
    """The record, and the extra record, empty where the object has nothing out of the ordinary.

    The checksum covers the key and both: a record that is damaged, or lies under another key, is none.
    """
    if entry.head is None:
        flags, size_bytes, modified, etag, extra = _ABSENT | (_NAMED if entry.named else 0), 0, 0, b"", b""
    else:
        flags, size_bytes, modified, etag, extra = _pack_head(entry.head)
        flags |= (_CHECKSUMS if entry.with_checksums else 0) | (_SETTLED if entry.settled else 0)
    observed = entry.observed_at
    epoch = observed.epoch, *observed.cells
    fixed = _FIXED.pack(0, flags, observed.boot, *epoch, observed.seconds, size_bytes, modified)
    record = fixed[_CHECKSUM_BYTES:] + etag
    return _checksum(key, record, extra).to_bytes(_CHECKSUM_BYTES, "little") + record, extra


def _pack_head(head: ObjectHead) -> tuple[int, int, int, bytes, bytes]:
    flags, modified = 0, 0
    left = {name: value for name, value in head.headers.items() if name not in _NOT_OF_THE_OBJECT}
    left.pop("content-length", None)
    etag = left.pop("etag", "")
    if head.last_modified is not None and format_http_date(head.last_modified) == left["last-modified"]:
        flags, modified = _DATED, int(head.last_modified)
        del left["last-modified"]
    for bit, (name, value) in _COMMON.items():
        if left.get(name) == value:
            flags |= bit
            del left[name]
    packed = etag.encode("latin-1")
    if _MD5_ETAG.fullmatch(etag):
        flags, packed = flags | _MD5, bytes.fromhex(etag[1:-1])
    extra = "\n".join(f"{name}:{value}" for name, value in left.items()).encode("latin-1")
    return flags | (_EXTRA if extra else 0), head.version.size_bytes, modified, packed, extra


def has_extra(record: bytes) -> bool:
    """Whether an extra record belongs to it."""
    return len(record) >= _FIXED.size and bool(record[_CHECKSUM_BYTES] & _EXTRA)  # the flags' low byte comes first


def unpack(record_key: bytes, key: ObjectKey, record: bytes, extra: bytes) -> Entry | None:
    """The entry of `key`, whose catalog key is `record_key`; None when these bytes are not what was packed for it."""
    if len(record) < _FIXED.size:
        return None
    checksum, flags, boot, epoch, first, second, seconds, size_bytes, modified = _FIXED.unpack_from(record)
    if checksum != _checksum(record_key, record[_CHECKSUM_BYTES:], extra):
        return None
    observed = ObservedAt(epoch, seconds, boot, (first, second))
    if flags & _ABSENT:
        return Entry(observed, named=bool(flags & _NAMED))
    etag = f'"{record[_FIXED.size :].hex()}"' if flags & _MD5 else record[_FIXED.size :].decode("latin-1")
    headers = {"etag": etag} if etag else {}
    headers["content-length"] = str(size_bytes)
    if flags & _DATED:
        headers["last-modified"] = format_http_date(modified)
    headers |= {name: value for bit, (name, value) in _COMMON.items() if flags & bit}
    if extra:
        headers |= dict(line.split(":", 1) for line in extra.decode("latin-1").split("\n"))
    last_modified = float(modified) if flags & _DATED else parse_http_date(headers.get("last-modified", ""))
    head = ObjectHead(ObjectVersion(key, etag, size_bytes), headers, last_modified, remembered=True)
    return Entry(observed, head, with_checksums=bool(flags & _CHECKSUMS), settled=bool(flags & _SETTLED))


def without_checksums(head: ObjectHead) -> ObjectHead:
    """As the origin answers who did not ask with `x-amz-checksum-mode`."""
    return replace(head, headers=_without_checksums(head.headers))


def _without_checksums(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if not name.startswith("x-amz-checksum-")}


def _checksum(key: bytes, record: bytes, extra: bytes) -> int:
    return zlib.crc32(extra, zlib.crc32(record, zlib.crc32(key)))
