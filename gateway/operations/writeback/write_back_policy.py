"""The choice of writes to acknowledge before the origin has seen them, and of their headers to keep for the flush.

Whatever only the origin can judge goes through: conditions, customer keys, owners and payers, rights, and headers that
are not known to be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from gateway.operations.context import RequestContext
from gateway.operations.read_wishes import judged_by_the_origin
from gateway.s3.checksums import ALGORITHMS, PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import etag_matches, sendable
from gateway.s3.requests import Operation, S3Request
from gateway.writeback.journal.buckets import BucketCapabilities, judged_values


class Reason(StrEnum):
    """The reason why a write is not absorbed, besides the bounds of the buffer (`Bound`)."""

    CONDITION = "condition"
    """The origin must judge its version of the key."""

    KEY = "key"
    """S3 refuses the key, and another origin may; or the bucket has refused an acknowledged one like it."""

    HEADER = "header"
    """The origin must judge a header of the request."""

    BUCKET_UNKNOWN = "bucket-unknown"
    """The bucket had no writes yet: the answer shows the kind of its ETags."""

    BUCKET_ETAGS = "bucket-etags"
    """Its ETags are no MD5s, so they cannot be foretold, and the slot does not allow this node's."""

    BUCKET_UNREADABLE = "bucket-unreadable"
    """The gateway may not look at its objects, and so could not know what a flush overwrites."""

    STORAGE_CLASS = "storage-class"
    """The bucket has taken no object of this storage class yet: not every store has every class."""

    ACL = "acl"
    """The bucket has taken no object with this canned ACL yet: many buckets refuse most of them."""

    SOURCE = "source-of-the-origin"
    """The source of the copy is not pending here."""

    UPLOAD = "upload-of-the-origin"
    """The upload was begun at the origin, and is unknown here."""

    REGISTRY = "registry"
    """Other nodes of the cluster could not find it: the registry of pending writes is away."""

    PART = "part-of-the-origin"
    """Only the origin has some of the upload's parts."""


def check_condition(context: RequestContext) -> None:
    """Raise S3Error if a pending write fails a write's condition. A passing condition is left to the origin.

    So is a request that names an owner or payer, as it may not be allowed to know that. A repeated Complete gets the
    first answer.
    """
    headers = context.request.headers
    if_match, if_none_match = headers.get("if-match"), headers.get("if-none-match")
    if (if_match is None and if_none_match is None) or judged_by_the_origin(context.request):
        return
    pending = context.buffer.pending(context.object_key)
    upload_id = context.request.parameter("uploadId") or ""
    if pending is None or (upload_id and context.buffer.look(lambda tx: tx.uploads.ended(upload_id)) is not None):
        return
    if pending.deleted:
        if if_match is not None:
            raise s3_error("NoSuchKey", Key=pending.key.key)
    elif if_match is not None and not etag_matches(if_match, pending.etag):
        raise s3_error("PreconditionFailed", Condition="If-Match")
    elif if_none_match is not None and if_none_match.strip() == "*":
        raise s3_error("PreconditionFailed", Condition="If-None-Match")


def why_of_cluster(context: RequestContext) -> Reason | None:
    writes = context.services.cluster_writes
    is_found = writes is None or writes.registry.can_claim or not writes.asks(context.slot)
    return None if is_found else Reason.REGISTRY


METADATA_SIZE_BYTES_MAX = 2048
"""S3's limit for the names and values of user metadata together."""

_METADATA = "x-amz-meta-"

_STORED = frozenset(
    {"cache-control", "content-disposition", "content-encoding", "content-language", "content-type", "expires"}
)
"""Headers with values that S3 always takes."""

STORAGE_CLASSES = frozenset({"STANDARD", "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING"})
"""Classes whose objects can be read at once."""

_STORAGE_CLASS = "x-amz-storage-class"

_ACL = "x-amz-acl"
_ACLS = frozenset(
    {
        "private",
        "public-read",
        "public-read-write",
        "authenticated-read",
        "aws-exec-read",
        "bucket-owner-read",
        "bucket-owner-full-control",
    }
)
"""S3's canned ACLs (S3 User Guide, "Access control list overview"). s3fs can send one with each write."""

_OF_THE_REQUEST = frozenset(
    {
        "x-amz-api-version",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-decoded-content-length",
        "x-amz-sdk-checksum-algorithm",
        "x-amz-security-token",
        "x-amz-te",
        "x-amz-trailer",
        "x-amz-user-agent",
        "x-amzn-trace-id",
    }
)
"""Headers about the request and its body: verified here, and no concern of the origin."""

_ENCRYPTION = "x-amz-server-side-encryption"
_ENCRYPTED_WITHOUT_MD5 = ("aws:kms", "aws:kms:dsse")

_REPLAYED = frozenset({"x-amz-checksum-algorithm", "x-amz-checksum-type"})
"""Headers of Create that are judged here."""

_REPLAYED_PAIRS = frozenset({("x-amz-server-side-encryption", "AES256"), (_ACL, "bucket-owner-full-control")})
"""Further ones, with the values that each bucket takes: most do not take other ACLs (S3 API, "Object Ownership")."""


def why_of_key(key: str) -> Reason | None:
    """Return why a key needs the origin's judgement, or None. S3 refuses keys whose `..` lead above their beginning.

    S3 User Guide, "Naming Amazon S3 objects", relative path elements.
    """
    depth = 0
    for element in key.split("/"):
        depth += -1 if element == ".." else element not in ("", ".")
        if depth < 0:
            return Reason.KEY
    return None


_WITH_RIGHTS = (Operation.PUT_OBJECT, Operation.COPY_OBJECT, Operation.CREATE_MULTIPART_UPLOAD)


def refuse_unless_kept_here(context: RequestContext, reason: Reason | None) -> None:
    """Raise S3Error NotImplemented for a write in a slot with `write = "scratch"` that only the origin could judge.

    It could not give rights, either.
    """
    if reason is None and _ACL in context.request.headers and context.request.operation in _WITH_RIGHTS:
        reason = Reason.HEADER
    if reason is not None and context.slot.write == "scratch":
        raise s3_error(
            "NotImplemented",
            'The slot has write = "scratch": Forebay sends nothing to the origin, and only the origin could judge this '
            f"({reason}).",
        )


def why_of_headers(headers: Mapping[str, str], foreseen: Callable[[str, str], bool]) -> Reason | None:
    """Return why the headers of a write need the origin's judgement, or None. `foreseen` as `is_supported_header`."""
    if all(foreseen(name, value) for name, value in headers.items()):
        return None
    return Reason.CONDITION if has_conditions(headers) else Reason.HEADER


def capabilities_of(context: RequestContext) -> BucketCapabilities | None:
    return context.buffer.look(lambda tx: tx.buckets.capabilities(context.object_key.bucket))


def why_of_bucket(
    context: RequestContext,
    capabilities: BucketCapabilities | None,
    *,
    of_parts: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Reason | None:
    """Return why a bucket's writes, of objects or, with `of_parts`, of objects of parts, are not absorbed, or None.

    `headers` are those of a write whose class or ACL the bucket may not have taken yet. If the bucket's ETag cannot be
    foretold, this node's may answer, except with a customer key: that cannot be flushed.
    """
    if capabilities is None:
        return Reason.BUCKET_UNKNOWN
    if capabilities.refuses(context.object_key.key, context.request.headers):
        return Reason.KEY
    if not capabilities.foretells(of_parts=of_parts):
        has_key = any(name.startswith(f"{_ENCRYPTION}-customer-") for name in context.request.headers)
        if context.slot.etag != "local" or has_key:
            return Reason.BUCKET_ETAGS
    if not capabilities.may_look:
        return Reason.BUCKET_UNREADABLE
    taken = capabilities.accepted | _REPLAYED_PAIRS if of_parts else capabilities.accepted
    untried = {name for name, _ in judged_values(headers or {}) - taken}
    return None if not untried else Reason.ACL if _ACL in untried else Reason.STORAGE_CLASS


def is_foretold(
    capabilities: BucketCapabilities | None, created: Mapping[str, str] | None = None, *, of_parts: bool = True
) -> bool:
    """Return whether the bucket's ETag of the object is known.

    `of_parts`: it is of parts, whose upload began with the headers `created`.
    """
    if names_encryption(created or {}):
        return makes_md5_etags(created or {})
    return capabilities is None or capabilities.foretells(of_parts=of_parts)


def may_be_deleted_here(request: S3Request) -> bool:
    """Return whether a deletion is about current versions, and the origin need not judge its headers."""
    return why_of_headers(request.headers, is_supported_header) is None and request.parameter("versionId") is None


def may_begin_without_origin(request: S3Request, capabilities: BucketCapabilities | None = None) -> bool:
    """Return whether a CreateMultipartUpload has nothing that the origin must judge before anything is acknowledged.

    Customer keys, which are never written down; KMS, whose ETags are no MD5s; owners, payers, tags, redirects, locks,
    archive classes; rights that the bucket has not taken yet.
    """
    taken = _REPLAYED_PAIRS if capabilities is None else _REPLAYED_PAIRS | capabilities.accepted
    return all(
        name in _REPLAYED or (name, value) in taken or (name != _ACL and is_supported_header(name, value))
        for name, value in request.headers.items()
    )


def tells_encryption(answer: Mapping[str, str]) -> bool:
    """Return whether the answer to a write tells how its bucket encrypts, as S3's does; others' may not."""
    return _ENCRYPTION in answer


def names_encryption(headers: Mapping[str, str]) -> bool:
    """Return whether a write names its own encryption: then its answer tells nothing about the bucket."""
    return any(name.startswith(_ENCRYPTION) for name in headers)


def has_conditions(headers: Mapping[str, str]) -> bool:
    """Return whether the origin must judge the write by its version of the key."""
    return any(is_condition(name) for name in headers)


def is_condition(name: str) -> bool:
    return name.startswith(("if-", "x-amz-if-"))


def makes_md5_etags(answer: Mapping[str, str]) -> bool:
    """Return whether the bucket of this answer to a write may make ETags that are MD5s (S3 API, "Object", ETag)."""
    if f"{_ENCRYPTION}-customer-algorithm" in answer:
        return False
    return answer.get(_ENCRYPTION, "") not in _ENCRYPTED_WITHOUT_MD5


def fixed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a write that are stored with the object, and sent with it at the flush."""
    return {name: value for name, value in headers.items() if _is_stored(name)}


def created_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a CreateMultipartUpload's headers about the object and its parts, to send if the origin is asked later.

    Nothing about its sender is kept.
    """
    return {name: value for name, value in headers.items() if name in _STORED or _is_about_the_upload(name)}


def check_stored(headers: Mapping[str, str]) -> None:
    """Find what the flush would be refused for, before anything is acknowledged.

    S3Error MetadataTooLarge as S3 gives it, and InvalidArgument for header values that cannot be sent.
    """
    sendable({name: value for name, value in headers.items() if _is_stored(name) or _is_about_the_upload(name)})
    size_bytes = sum(
        len(name) - len(_METADATA) + len(value) for name, value in headers.items() if name.startswith(_METADATA)
    )
    if size_bytes > METADATA_SIZE_BYTES_MAX:
        raise s3_error("MetadataTooLarge", Size=str(size_bytes), MaxSizeAllowed=str(METADATA_SIZE_BYTES_MAX))


def _is_stored(name: str) -> bool:
    return name in _STORED or name.startswith(_METADATA) or name in (_STORAGE_CLASS, _ACL)


def _is_about_the_upload(name: str) -> bool:
    return name.startswith("x-amz-") and name not in _OF_THE_REQUEST


def is_supported_header(name: str, value: str) -> bool:
    """Return whether a header of a write needs no judgement by the origin."""
    if not name.startswith("x-"):
        return not name.startswith("if-") and name != "origin"
    if name == _STORAGE_CLASS:
        return value in STORAGE_CLASSES
    if name == _ACL:
        return value in _ACLS
    if name.startswith(PREFIX):
        return name[len(PREFIX) :] in ALGORITHMS
    return name in _OF_THE_REQUEST or _is_stored(name) or name.startswith("x-forebay-")
