"""The catalog's entries, their validity in time, and the epochs that void them sooner.

`ObjectHead` is HeadObject's answer (S3 API, "HeadObject"). docs/on-disk-format.md describes its packed form,
and docs/semantics.md, clause 3, how long it is valid.

A listing gives ETag, size and date, and not the headers that HEAD gives. Clients write those with the object, except a
few that S3 changes by itself: a listing does not confirm an object that has one of them (docs/decisions/0018).

Invalidation epochs: an observation of a key is void once the key's epoch has changed, on every worker at once.

An own write stores new numbers in memory that all workers share: nothing is searched for or deleted, and what lands
later is void as it lands. A number is never stored twice, so that a change is never missed: its upper 24 bits are the
opening of the file that it comes from, its lower 40 bits grow within that. So a store overwrites a number: there
is no addition, no lock over processes and no wait, whichever of them is stopped or killed.

A number's lower bits are the time of the change in milliseconds, or a later time. Another node may have asked the
origin before the change, and answer after it: an answer counts only if it was asked for after the key's last change
(`changed_at`). `note` makes older answers of others count no more, and voids nothing: it stores in one of the key's
cells.

    cell 0                  how often the file was opened
    4,096 cells             buckets, by hash
    2 rows of 2,097,152     keys, by two hashes: a write stores in one cell of each row
    512 times 256           writes under way, by process
    524,288                 when an object was last shown under a key, by hash: milliseconds, and the boot

A key's epoch has changed when its bucket's cell has, or *both* of its own. So a write voids another key only together
with a second write that shares the other cell.

A process that is killed during a write cannot void its key when the origin carries the write out. So a process records
each write before it sends it, and its successor voids the recorded keys (`left_behind`).

An answer that says that there is no object is void once an object was shown under the key after the origin was asked:
then a client has seen it. So an answer that comes late takes nothing back. Two keys that share a cell cost a request.

If the origin has not answered, it may carry a write out later, and the state learned meanwhile may precede it. So a
write in doubt ends later than others: the gateway then forgets its keys once more, and until then LIST asks the origin
about them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import mmap
import os
import re
import struct
import threading
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

import lmdb
import structlog
from awscrt.checksums import crc64nvme

from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import OriginBodyError, RegistryAway, StoreUnavailable
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion, immutable
from gateway.metadata.listing.records import date_text
from gateway.origin.client import StillSo
from gateway.policy.slots import Slot
from gateway.s3.headers import (
    EncodedHeaders,
    filter_response_headers,
    format_http_date,
    is_same_version,
    parse_content_range,
    parse_http_date,
    plain_etag,
)
from gateway.s3.list_result import EntryTemplate, ListedEntry
from gateway.shared.heartbeats import PROCESSES_MAX

_OF_THE_ANSWER = frozenset({"content-length", "content-range", "accept-ranges"})


@immutable
class ObjectHead:
    """An object's metadata as HeadObject answers it.

    `headers` are the origin's, lower case. `part` is the part's place in the object where a part number was asked for.
    `last_modified` is in seconds since 1970, None when the origin sent none that can be read. `remembered` says that
    the catalog answered, and not the origin just now. `of_peer` says that another node
    answered, and `age_seconds` how long ago that one had asked the origin. `still` tells whether the origin would
    answer so again, if that takes no wait.
    """

    version: ObjectVersion
    headers: Mapping[str, str]
    last_modified: float | None
    part: ByteRange | None = None
    remembered: bool = False
    of_peer: bool = False
    age_seconds: float = 0.0
    still: StillSo | None = field(default=None, repr=False, compare=False)
    _of_whole: EncodedHeaders | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def of_whole(self) -> EncodedHeaders:
        """Header fields of an answer with all of the bytes, encoded once for all such answers."""
        if self._of_whole is None:
            onward = [pair for pair in filter_response_headers(self.headers) if pair[0] not in _OF_THE_ANSWER]
            onward.append(("accept-ranges", "bytes"))
            self._of_whole = EncodedHeaders.of(onward)  # type: ignore[misc]  # the first use sets it
        return self._of_whole


def of_part(of_whole: EncodedHeaders) -> EncodedHeaders:
    """Header fields of an answer with some of the bytes: clients would check a whole's checksum against those."""
    if b"x-amz-checksum-" not in of_whole.lines:
        return of_whole
    return EncodedHeaders.of(pair for pair in of_whole.pairs if not pair[0].startswith("x-amz-checksum-"))


def object_head_of_get(key: ObjectKey, status: int, headers: Mapping[str, str]) -> tuple[ObjectHead, ByteRange | None]:
    """Return the head from a GetObject answer, 200 or 206, and the range that its body holds, None if empty.

    Raises OriginBodyError when lengths do not fit together.
    """
    content_range = headers.get("content-range")
    if (content_range is None) is (status == 206):
        raise OriginBodyError("the origin's answer lacks a Content-Range, or has one where none belongs")
    if content_range is None:
        head = object_head(key, headers)
        size_bytes = head.version.size_bytes
        return head, ByteRange(0, size_bytes - 1) if size_bytes else None
    body, size_bytes = parse_content_range(content_range)
    if headers.get("content-length") != str(body.length):
        raise OriginBodyError("the origin's Content-Length is not that of its Content-Range")
    whole = dict(headers)
    del whole["content-range"]
    whole["content-length"] = str(size_bytes)
    return object_head(key, whole), body


def object_head(key: ObjectKey, headers: Mapping[str, str], *, is_part: bool = False) -> ObjectHead:
    """Return the answer's meaning; OriginBodyError when it gives no length."""
    length = headers.get("content-length", "")
    if not length.isdecimal():
        raise OriginBodyError(f"the origin's HEAD of {key} has no usable Content-Length")
    size_bytes, part = int(length), None
    if is_part and "content-range" in headers:
        part, size_bytes = parse_content_range(headers["content-range"])
    version = ObjectVersion(key, headers.get("etag", ""), size_bytes)
    return ObjectHead(version, headers, parse_http_date(headers.get("last-modified", "")), part)


CATALOG_KEY_BYTES_MAX = 511
"""LMDB's limit."""

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
    """Return a version's key: a digest, as versions are never read in order."""
    key = version.key
    whole = f'{key.bucket}\0{len(key.key)}\0{key.key}"{plain_etag(version.etag)}"'.encode("utf-8", "surrogatepass")
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


@immutable
class ObservedAt:
    """When something was learned. `seconds` and `boot` are those of the question, not of the answer.

    `epoch` and `cells` are the bucket's and the key's invalidation epochs when the origin was asked;
    of a bucket itself, or of a listing, the first alone.
    """

    epoch: int
    seconds: float
    boot: int
    cells: tuple[int, int] = (0, 0)

    def before(self, seconds: float) -> ObservedAt:
        """Return the same, so many seconds earlier."""
        return replace(self, seconds=self.seconds - seconds) if seconds else self


@immutable
class CatalogEntry:
    """The catalog's record of a key.

    `head` None: there is no such object; then `named` says that the origin's error was NoSuchKey, and not that of a
    missing bucket, which a HEAD cannot tell apart. `with_checksums`: asked with `x-amz-checksum-mode: ENABLED`.
    `settled`: a listing can confirm it (`is_confirmed`).
    """

    observed_at: ObservedAt
    head: ObjectHead | None = None
    named: bool = False
    with_checksums: bool = False
    settled: bool = False


def pack(key: bytes, entry: CatalogEntry) -> tuple[bytes, bytes]:
    """Return the record, and the extra record, empty where the object has nothing out of the ordinary.

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
    return len(record) >= _FIXED.size and bool(record[_CHECKSUM_BYTES] & _EXTRA)  # the flags' low byte comes first


def is_listed_so(record: bytes, etag: str, size_bytes: int) -> bool:
    """Return True if a record has this ETag, as listings write it, and size. The record's checksum is not verified."""
    flags, has = int.from_bytes(record[_CHECKSUM_BYTES : _CHECKSUM_BYTES + 2], "little"), record[_FIXED.size :]
    if flags & _ABSENT or _FIXED.unpack_from(record)[7] != size_bytes:
        return False
    known = has.hex() if flags & _MD5 else plain_etag(has.decode("latin-1"))
    return not etag or known == plain_etag(etag)


def unpack(record_key: bytes, key: ObjectKey, record: bytes, extra: bytes) -> CatalogEntry | None:
    """Return the entry of `key`; None when these bytes were not packed for `record_key`, its catalog key."""
    if len(record) < _FIXED.size:
        return None
    checksum, flags, boot, epoch, first, second, seconds, size_bytes, modified = _FIXED.unpack_from(record)
    if checksum != _checksum(record_key, record[_CHECKSUM_BYTES:], extra):
        return None
    observed = ObservedAt(epoch, seconds, boot, (first, second))
    if flags & _ABSENT:
        return CatalogEntry(observed, named=bool(flags & _NAMED))
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
    return CatalogEntry(observed, head, with_checksums=bool(flags & _CHECKSUMS), settled=bool(flags & _SETTLED))


def without_checksums(head: ObjectHead) -> ObjectHead:
    """As the origin answers who did not ask with `x-amz-checksum-mode`."""
    left = {name: value for name, value in head.headers.items() if not name.startswith("x-amz-checksum-")}
    return replace(head, headers=left)


def _checksum(key: bytes, record: bytes, extra: bytes) -> int:
    return zlib.crc32(extra, zlib.crc32(record, zlib.crc32(key)))


class Freshness(Enum):
    """FRESH answers by itself. STALE answers only when the origin does not."""

    FRESH = "fresh"
    STALE = "stale"
    USELESS = "useless"


def freshness(entry: CatalogEntry, slot: Slot, *, now_seconds: float, boot: int) -> Freshness:
    """How far `entry` may be trusted in `slot`. `now_seconds` is monotonic, of the boot whose number is `boot`.

    Ages are differences of the machine's own monotonic clock, so that no step of the wall clock makes anything live
    longer. Entries of another boot, or from the future, are of unknown age: only `immutable` can use it.
    """
    if slot.consistency in ("strict", "snapshot"):
        return Freshness.USELESS  # only the snapshot itself tells its content
    observed = entry.observed_at
    age_seconds = now_seconds - observed.seconds if observed.boot == boot else -1.0
    if entry.head is None:
        return Freshness.FRESH if 0 <= age_seconds < slot.negative_ttl_seconds else Freshness.USELESS
    if slot.consistency == "immutable":
        return Freshness.FRESH
    if age_seconds < 0:
        return Freshness.USELESS
    if age_seconds < slot.metadata_ttl_seconds:
        return Freshness.FRESH
    limit_seconds = slot.metadata_ttl_seconds + slot.stale_if_unreachable_seconds
    return Freshness.STALE if age_seconds < limit_seconds else Freshness.USELESS


def answer_freshness(observed: ObservedAt, now: ObservedAt, slot: Slot, *, ttl_seconds: float) -> Freshness:
    """How far what was said of a bucket may be trusted; `now` is of that bucket, `slot` the one that all of it is in.

    What runs out is stale as long as the slot goes on without its origin: `immutable` and `snapshot` do for good.
    """
    if (observed.boot, observed.epoch) != (now.boot, now.epoch):
        return Freshness.USELESS
    age_seconds = now.seconds - observed.seconds
    if age_seconds < 0:
        return Freshness.USELESS
    if age_seconds < ttl_seconds:
        return Freshness.FRESH
    if slot.consistency in ("immutable", "snapshot"):
        return Freshness.STALE
    more_seconds = slot.stale_if_unreachable_seconds if slot.consistency == "ttl" else 0.0
    return Freshness.STALE if age_seconds < ttl_seconds + more_seconds else Freshness.USELESS


SETTLED_SECONDS = 60.0
"""Dates are told to the second, by clocks of many machines: what was looked at so long after its date keeps it only as
long as it is not written again.
"""

_WRITTEN_WITH_THE_OBJECT = (
    "x-amz-checksum-",
    "x-amz-id-2",
    "x-amz-meta-",
    "x-amz-missing-meta",
    "x-amz-mp-parts-count",
    "x-amz-request-id",
    "x-amz-server-side-encryption",
    "x-amz-storage-class",
    "x-amz-version-id",
    "x-amz-website-redirect-location",
)
"""Beginnings of the names of S3's headers that another write would have to change. Not among them: the count of tags,
retention and legal hold, expiration, restoring, replication, and whatever is unknown.
"""

_MAY_BE_RESTORED = frozenset({"GLACIER", "DEEP_ARCHIVE", "INTELLIGENT_TIERING"})
_STORAGE_CLASS = re.compile("<StorageClass>([^<]*)</StorageClass>")


def is_settled(head: ObjectHead) -> bool:
    """Return True if the answer came so long after the object's date that another version must have another date."""
    answered = parse_http_date(head.headers.get("date", ""))
    if answered is None or head.last_modified is None:
        return False
    return answered - head.last_modified >= SETTLED_SECONDS


def is_confirmed(head: ObjectHead, listed: ListedEntry) -> bool:
    """Return True if the listed object is certainly the one that `head`, which was settled, describes."""
    if not is_version(head, listed.modified, listed.etag, listed.size_bytes):
        return False
    storage_class = head.headers.get("x-amz-storage-class", "STANDARD")
    if storage_class != _storage_class(listed.template) or storage_class in _MAY_BE_RESTORED:
        return False
    return all(name.startswith(_WRITTEN_WITH_THE_OBJECT) for name in head.headers if name.startswith("x-amz-"))


def is_version(head: ObjectHead, modified: str, etag: str, size_bytes: int) -> bool:
    """Return True if `head` has this ETag, size and date, the date as listings write it."""
    is_dated = head.last_modified is not None and modified[:19] == date_text(int(head.last_modified))
    listed = ObjectVersion(head.version.key, etag, size_bytes)
    return is_dated and modified.endswith("Z") and is_same_version(head.version, listed)


@lru_cache(maxsize=1024)
def _storage_class(template: EntryTemplate) -> str:
    found = _STORAGE_CLASS.search(template.after_size)
    return found[1] if found is not None else "STANDARD"


_BUCKETS = 4096
_ROW_BITS = 21
_ROW_MASK = 2**_ROW_BITS - 1
_FIRST_KEY = 1 + _BUCKETS
_SECOND_KEY = _FIRST_KEY + 2**_ROW_BITS
_FIRST_WRITE = _SECOND_KEY + 2**_ROW_BITS
_WRITES_MAX = 256
"""Writes of one process that are recorded one by one. With more at once, a kill voids everything."""

_KEYS_MAX = 8
"""Keys of one write that are recorded. With more, a kill voids the whole bucket."""

_OF_KEY: Final = 1 << 60
_OF_BUCKET: Final = 2 << 60
_OF_EVERYTHING: Final = 3 << 60
_DIGEST_MASK: Final = 2 ** (2 * _ROW_BITS) - 1
_CELL_BYTES = 8
_COUNT_BITS = 40
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_OPENINGS_MAX = 2**24 - 1
_FIRST_SHOWN = _FIRST_WRITE + PROCESSES_MAX * _WRITES_MAX
_SHOWN_BITS = 19
_SHOWN_MASK = 2**_SHOWN_BITS - 1
_MILLISECONDS_BITS = 40
_MILLISECONDS_MASK = 2**_MILLISECONDS_BITS - 1
_BOOT_MASK = 2**24 - 1
FILE_BYTES = (_FIRST_SHOWN + 2**_SHOWN_BITS) * _CELL_BYTES


def create(path: Path) -> None:
    """Write a file of zeros, whole on disk: a page that could not be backed would kill the process that touches it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
    finally:
        os.close(descriptor)


Watch: TypeAlias = tuple[int, int, int, int, int, int]
"""Cell and epoch of a bucket, and both cells of a key and what is in them. Plain, as many of these are kept: the
collector of cycles lets tuples of numbers be."""


class InvalidationEpochs:
    """The cells, as one process sees them. All but `sync` may run on the event loop.

    `path` is a file made by `create`, and no other process opens it at this moment; None: the cells are this process's
    alone. `process` is the number that no other living process has. FileNotFoundError when it is not such a file, or
    was opened 16 million times.
    """

    def __init__(self, path: Path | None, process: int = 0, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._map = mmap.mmap(-1, FILE_BYTES) if path is None else _mapped(path)
        self._cells = memoryview(self._map).cast("Q")
        opening = self._cells[0] + 1
        if opening > _OPENINGS_MAX:
            self.close()
            raise FileNotFoundError(f"{path} has no more numbers to give")
        self._cells[0] = opening
        self._opening = opening << _COUNT_BITS
        self._last = 0
        self._numbering = threading.Lock()
        own = _FIRST_WRITE + process * _WRITES_MAX
        self._beyond, self._count_beyond = own, 0
        """The cell that records writes without a place of their own, and the number of those under way."""
        self._places = [place for place in range(own + 1, own + _WRITES_MAX) if not self._cells[place]]
        self.left_behind = [place for place in range(own, own + _WRITES_MAX) if self._cells[place]]
        """Records of writes during which the previous process was killed: for `void`, and then for `end_write`."""
        if self._beyond in self.left_behind:
            self._count_beyond = 1

    def of_bucket(self, bucket: str) -> int:
        """Return the epoch of the bucket itself: of its metadata and listings."""
        return self._cells[_bucket_cell(bucket)]

    def of_key(self, record_key: bytes) -> tuple[int, int]:
        """Return the key's own two numbers; `record_key` is its catalog key."""
        digest = crc64nvme(record_key)
        cells = self._cells
        return cells[_FIRST_KEY + (digest & _ROW_MASK)], cells[_SECOND_KEY + (digest >> _ROW_BITS & _ROW_MASK)]

    def is_current(self, observed: ObservedAt, bucket: str, record_key: bytes) -> bool:
        """Return True if no write since the moment `observed` could have changed the key."""
        cells, (first, second) = self._cells, observed.cells
        if observed.epoch != cells[_bucket_cell(bucket)]:
            return False
        digest: int = crc64nvme(record_key)
        if cells[_FIRST_KEY + (digest & _ROW_MASK)] == first:
            return True
        return bool(cells[_SECOND_KEY + (digest >> _ROW_BITS & _ROW_MASK)] == second)

    def watch(self, observed: ObservedAt, bucket: str, record_key: bytes) -> Watch:
        """Return the argument for repeated calls of `is_as_watched`, in place of `is_current`."""
        digest = crc64nvme(record_key)
        one, other = _FIRST_KEY + (digest & _ROW_MASK), _SECOND_KEY + (digest >> _ROW_BITS & _ROW_MASK)
        return _bucket_cell(bucket), observed.epoch, one, observed.cells[0], other, observed.cells[1]

    def is_as_watched(self, watch: Watch) -> bool:
        bucket_cell, epoch, one, first, other, second = watch
        cells = self._cells
        return bool(cells[bucket_cell] == epoch and (cells[one] == first or cells[other] == second))

    def changed_at(self, bucket: str, record_key: bytes) -> float:
        """Return a time since which the key has not changed, in seconds of the monotonic clock.

        It may be later than the last change, even in the future: two keys share a cell, or the machine has booted.
        """
        last = max(number & _COUNT_MASK for number in (self.of_bucket(bucket), *self.of_key(record_key)))
        return last / 1000 if last else -math.inf

    def note(self, key: ObjectKey) -> None:
        """Have `changed_at` be now. Nothing is void."""
        self._cells[_FIRST_KEY + (crc64nvme(catalog_key(key)) & _ROW_MASK)] = self._next()

    def _next(self) -> int:
        with self._numbering:
            self._last = max(self._last, int(self._clock.monotonic() * 1000)) + 1
            return self._opening | self._last & _COUNT_MASK

    def change_key(self, key: ObjectKey) -> None:
        self._change(crc64nvme(catalog_key(key)))

    def _change(self, digest: int) -> None:
        number = self._next()
        self._cells[_FIRST_KEY + (digest & _ROW_MASK)] = number
        self._cells[_SECOND_KEY + (digest >> _ROW_BITS & _ROW_MASK)] = number

    def change_bucket(self, bucket: str) -> None:
        """Any key of the bucket may be written."""
        self._cells[_bucket_cell(bucket)] = self._next()

    def change_everything(self) -> None:
        """Any key of any bucket may be written."""
        number = self._next()
        for cell in range(1, 1 + _BUCKETS):
            self._cells[cell] = number

    def show(self, key: ObjectKey, seconds: float, boot: int) -> None:
        """Note that an answer of the origin shows an object at `seconds` of the boot of that number."""
        milliseconds = int(seconds * 1000) + 1
        shown = (boot & _BOOT_MASK) << _MILLISECONDS_BITS | milliseconds & _MILLISECONDS_MASK
        self._cells[_FIRST_SHOWN + (crc64nvme(catalog_key(key)) & _SHOWN_MASK)] = shown

    def is_shown_since(self, observed: ObservedAt, key: ObjectKey) -> bool:
        """Return True if an object, perhaps of another key, was shown after the origin was asked at `observed`."""
        shown = self._cells[_FIRST_SHOWN + (crc64nvme(catalog_key(key)) & _SHOWN_MASK)]
        if shown >> _MILLISECONDS_BITS != observed.boot & _BOOT_MASK:
            return False
        return bool(observed.seconds * 1000 < shown & _MILLISECONDS_MASK)

    def begin_write(self, bucket: str | None, keys: Sequence[ObjectKey] | None) -> list[int]:
        """Note a write about to be sent, of these keys or, with None, all keys or all buckets.

        Return the places where it is written down, for `void` and `end_write`.
        """
        if keys is not None and len(keys) <= _KEYS_MAX:
            written = [_OF_KEY | crc64nvme(catalog_key(key)) & _DIGEST_MASK for key in keys]
        else:
            written = [_OF_EVERYTHING if bucket is None else _OF_BUCKET | _bucket_cell(bucket)]
        if len(written) > len(self._places):
            self._count_beyond += 1
            self._cells[self._beyond] = _OF_EVERYTHING
            return [self._beyond]
        places = [self._places.pop() for _ in written]
        for place, one in zip(places, written, strict=True):
            self._cells[place] = one
        return places

    def void(self, places: Sequence[int]) -> None:
        for place in places:
            kind, digest = self._cells[place] & ~_DIGEST_MASK, self._cells[place] & _DIGEST_MASK
            if kind == _OF_KEY:
                self._change(digest)
            elif kind == _OF_BUCKET:
                self._cells[digest] = self._next()
            else:
                self.change_everything()

    def end_write(self, places: Sequence[int]) -> None:
        """End writes that were answered or never will be: what they change is void."""
        for place in places:
            if place == self._beyond:
                self._count_beyond -= 1
                if self._count_beyond:
                    continue
            else:
                self._places.append(place)
            self._cells[place] = 0

    def sync(self) -> None:
        """Make the cells durable. Blocks."""
        self._map.flush()

    def close(self) -> None:
        self._cells.release()
        self._map.close()


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != FILE_BYTES:
            raise FileNotFoundError(f"{path} is no file of invalidation epochs")
        return mmap.mmap(descriptor, FILE_BYTES)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=1024)
def _bucket_cell(bucket: str) -> int:
    return 1 + zlib.crc32(bucket.encode("utf-8", "surrogatepass")) % _BUCKETS


IN_DOUBT_SECONDS = 60.0
"""Seconds after which the origin no longer carries out a request that it has not answered."""

IN_DOUBT_MAX = 10_000
"""With more, the oldest is ended sooner: an origin that is away must not fill the memory."""

_log = structlog.get_logger("forebay.catalog")


class InDoubtWrites:
    """Writes in doubt of this process, each with the call that ends it. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], Awaitable[None]]]] = deque()
        self._ending: asyncio.Task[None] | None = None

    def add(self, end: Callable[[], Awaitable[None]]) -> None:
        """Call this when the time of doubt is over; not when the gateway stops before."""
        self._waiting.append((self._clock.monotonic() + IN_DOUBT_SECONDS, end))
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_all(), name="writes in doubt")

    async def close(self) -> None:
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_all(self) -> None:
        while self._waiting:
            due, _ = self._waiting[0]
            left = due - self._clock.monotonic()
            if left > 0 and len(self._waiting) <= IN_DOUBT_MAX:
                await self._clock.sleep(min(left, 1.0))
                continue
            _, end = self._waiting.popleft()
            try:
                await end()
            except (OSError, lmdb.Error, RegistryAway, StoreUnavailable):  # the others must end all the same
                _log.exception("a write in doubt could not be ended")
        self._ending = None
