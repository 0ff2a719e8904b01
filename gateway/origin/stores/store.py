"""The operations that a store of objects needs so that `StoreOrigin` can show it as an S3.

Each method raises the client's answer as S3Error (NoSuchBucket, NoSuchKey, NoSuchUpload, AccessDenied, …),
OriginUnreachable when the store does not answer, and OutcomeUnknown when it may have carried a write out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple, Protocol

from gateway.core.errors import S3Error
from gateway.core.model import ByteRange, ObjectKey, immutable
from gateway.core.steps import at_once
from gateway.origin.client import OriginRequest
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.s3.checksums import PREFIX, composite_checksum, full_object_checksum
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import unquote
from gateway.s3.list_result import EntryTemplate, ListedEntry
from gateway.s3.xml import CompletedPart
from gateway.s3.xml_writer import element

Headers = Mapping[str, str]

Condition = Callable[[str | None], None]
"""Gets the ETag that a key has now, or None; raises S3Error unless the write may follow. The store calls it at the last
moment before the write, and lets no other write of its own come between."""


@immutable
class Found:
    """The version of a key. `headers` and `checksums` were set with it; `part_sizes` is empty if it came in one piece.

    `settles_at`: until then its bytes may change, and its ETag stay; None: no longer.
    """

    key: str
    size_bytes: int
    etag: str
    modified: float
    headers: Headers = field(default_factory=dict)
    checksums: Headers = field(default_factory=dict)
    part_sizes: Sequence[int] = ()
    settles_at: float | None = None


@immutable
class FoundPart:
    number: int
    size_bytes: int
    etag: str
    modified: float
    checksums: Headers = field(default_factory=dict)


class FoundUpload(NamedTuple):
    key: str
    upload_id: str
    initiated: float


class Page(NamedTuple):
    """Objects (`listed_entry`), and common prefixes as bytes, in S3's order. `is_truncated`: more follow."""

    entries: Sequence[ListedEntry | bytes]
    is_truncated: bool


OWNER = "<Owner><ID>origin</ID><DisplayName>origin</DisplayName></Owner>"
STANDARD = EntryTemplate("", OWNER, element("StorageClass", "STANDARD"))


def listed_entry(found: Found) -> ListedEntry:
    """Return what a listing says of an object, its owner always."""
    template = STANDARD
    if found.headers and (storage_class := found.headers.get("x-amz-storage-class")) is not None:
        template = STANDARD._replace(after_size=element("StorageClass", storage_class))
    return ListedEntry(found.key.encode(), timestamp(int(found.modified)), found.etag, found.size_bytes, template)


@lru_cache(4096)
def timestamp(moment: int) -> str:
    """Write as listings do: ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


class Reading(Protocol):
    """A version that is held open: what happens to its key changes nothing in its bytes, or ends them."""

    @property
    def found(self) -> Found: ...

    def pieces(self, wanted: ByteRange, buffer: ReceiveBuffer) -> AsyncIterator[bytes | memoryview]:
        """Yield these bytes, as many at once as `buffer` has room for; each piece is good until the next.

        OriginBodyError if they are no longer the version's.
        """

    def whole(self, wanted: ByteRange) -> memoryview | None:
        """Return these bytes if they came with the opening."""

    async def aclose(self) -> None: ...


class Digests(Protocol):
    """Sees a body pass, on any thread, and judges at its end what the client has vouched for."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def md5(self) -> bytes: ...

    def verified(self) -> dict[str, str]:
        """Return the checksums to keep with the object; S3Error if the body is not what was declared."""


@dataclass(slots=True)
class Incoming:
    """The bytes of a write: the store gives all `chunks` to `digests`, and keeps nothing before they are `verified`.

    `copied`: they are these bytes of another version.
    """

    chunks: AsyncIterator[bytes | memoryview]
    digests: Digests
    length_bytes: int | None
    copied: tuple[Reading, ByteRange | None] | None = None


class Store(Protocol):
    async def buckets(self) -> Sequence[tuple[str, float]]:
        """Return all names, each with the time of its making."""

    async def check_bucket(self, bucket: str) -> None: ...

    def refusal(self, key: ObjectKey) -> S3Error | None:
        """Return why the store can never have an object of this key; None: it may. No I/O."""

    async def check_place(self, key: ObjectKey) -> None:
        """Raise S3Error if no object of the key can be there now."""

    async def head(self, key: ObjectKey) -> Found: ...

    async def open(self, key: ObjectKey, wanted: tuple[int, int | None]) -> Reading:
        """`wanted`: first and last byte that will probably be read."""

    async def list(self, bucket: str, prefix: bytes, after: bytes, delimiter: bytes, limit: int) -> Page:
        """Return what follows `after`; a common prefix follows it as a whole or not at all."""

    async def put(self, key: ObjectKey, body: Incoming, headers: Headers, condition: Condition) -> Found:
        """`headers` are the request's: the store keeps those that belong to an object (`kept_headers`)."""

    async def delete(self, key: ObjectKey, condition: Condition) -> None:
        """No error if there is none and the condition does not mind."""

    async def begin(self, key: ObjectKey, headers: Headers) -> str:
        """Begin an upload; return its id."""

    async def began(self, key: ObjectKey, upload_id: str) -> Headers:
        """Return the headers with which an upload began."""

    async def put_part(self, key: ObjectKey, upload_id: str, number: int, body: Incoming) -> FoundPart: ...

    async def parts(self, key: ObjectKey, upload_id: str) -> Sequence[FoundPart]:
        """Return all, by number."""

    async def complete(
        self,
        key: ObjectKey,
        upload_id: str,
        listed: Sequence[CompletedPart],
        headers: Headers,
        condition: Condition,
    ) -> Found:
        """Make an object of the parts that are `chosen`. Repeated, it returns the same."""

    async def abort(self, key: ObjectKey, upload_id: str) -> None: ...

    async def uploads(self, bucket: str, prefix: str) -> Sequence[FoundUpload]:
        """Return all that are open, by key, those of a key by age."""

    async def aclose(self) -> None: ...


class Judge(Protocol):
    """Conditions, ranges and digests as S3 reads them."""

    def may_read(self, headers: Headers, found: Found) -> bool:
        """Return whether to send the object; False is 304. S3Error PreconditionFailed."""

    def check_copy_source(self, headers: Headers, found: Found) -> None: ...

    def check_write(self, headers: Headers, etag: str | None) -> None: ...

    def asked_range(self, headers: Headers, found: Found) -> ByteRange | None: ...

    def digests(self, request: OriginRequest, *, of_body: bool) -> Digests: ...


PART_SIZE_BYTES_MIN = 5 * 1024 * 1024

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


def kept_headers(headers: Headers) -> dict[str, str]:
    """Return the request headers that become part of an object: the standard ones and the user's metadata."""
    kept = {name: value for name, value in headers.items() if name in _KEPT or name.startswith("x-amz-meta-")}
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class != "STANDARD":
        kept["x-amz-storage-class"] = storage_class
    return kept


def chosen(upload_id: str, parts: Mapping[int, FoundPart], listed: Sequence[CompletedPart]) -> list[FoundPart]:
    """Return the parts that a Complete lists; S3Error InvalidPart, EntityTooSmall."""
    found = []
    for one in listed:
        part = parts.get(one.number)
        if part is None or unquote(part.etag) != unquote(one.etag) or not _fits(part, one):
            raise s3_error("InvalidPart", UploadId=upload_id, PartNumber=str(one.number), ETag=unquote(one.etag))
        found.append(part)
    for part in found[:-1]:
        if part.size_bytes < PART_SIZE_BYTES_MIN:
            raise s3_error(
                "EntityTooSmall",
                ProposedSize=str(part.size_bytes),
                MinSizeAllowed=str(PART_SIZE_BYTES_MIN),
                PartNumber=str(part.number),
                ETag=part.etag,
            )
    return found


def _fits(part: FoundPart, listed: CompletedPart) -> bool:
    named = {name.removeprefix("x-amz-checksum-"): value for name, value in part.checksums.items()}
    return all(named.get(name, value) == value for name, value in listed.checksums.items())


def checked(began: Headers, parts: Sequence[FoundPart], headers: Headers) -> dict[str, str]:
    """Return the checksums of an object of these parts; `began` are the headers of its Create.

    S3Error if a Complete with these `headers` says something else of the object than its parts do.
    """
    declared = headers.get("x-amz-mp-object-size")
    if declared is not None and declared != str(sum(part.size_bytes for part in parts)):
        raise s3_error("InvalidRequest", "The provided x-amz-mp-object-size does not match the size of the object.")
    checksums = _checksums(began, parts)
    for name, value in checksums.items():
        if headers.get(name, value).upper() != value.upper():
            raise s3_error("BadDigest")
    return checksums


def _checksums(began: Headers, parts: Sequence[FoundPart]) -> dict[str, str]:
    algorithm = began.get(f"{PREFIX}algorithm", "").lower()
    if not algorithm:
        return {}
    name, kind = PREFIX + algorithm, began[f"{PREFIX}type"]
    if any(name not in part.checksums for part in parts):
        raise s3_error("InvalidRequest", "The upload was created with a checksum; each part must have one.")
    if kind == "COMPOSITE":
        value = at_once(composite_checksum(algorithm, [part.checksums[name] for part in parts]))
    else:
        value = at_once(full_object_checksum(algorithm, [(part.checksums[name], part.size_bytes) for part in parts]))
    return {name: value, f"{PREFIX}type": kind}
