"""PutObject in a slot with `write = "back"`, and which writes may be acknowledged before the origin has seen them.

may its answer be foretold? is there room for it? → body verified, staged, synced, while the origin says what it has
under the key → journal → 200

Whatever only the origin can judge goes through: conditions, customer keys, owners and payers, rights, and headers that
are not known to be accepted. A body whose digest the client announced is verified here either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from gateway.errors import BufferUnavailable, OriginAnswered
from gateway.operations.absorbing.barrier import FlushWait
from gateway.operations.absorbing.base import BaseQuestion, base_told
from gateway.operations.absorbing.bodies import paced, room_for_body, stage_body
from gateway.operations.absorbing.through import Reason, goes_through, written_through
from gateway.operations.context import RequestContext, Response
from gateway.operations.passthrough import forward_write
from gateway.operations.payload import receive_payload
from gateway.operations.read_object import judged_by_the_origin
from gateway.s3.checksums import ALGORITHMS, PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import etag_matches, filter_request_headers, sendable, unquote
from gateway.s3.requests import S3Request
from gateway.writeback.bounds.bounds import Bound
from gateway.writeback.journal.records import Fixed, Profile, Write

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

LEARNED_AGAIN_SECONDS = 600.0
"""After so long a bucket whose writes are not absorbed is looked at again: rights and encryption can be changed."""


async def absorb_put(context: RequestContext, buffer: WritebackBuffer) -> Response:
    """Acknowledge an object on this node's disk, or write it through where its answer cannot be foretold."""
    profile = buffer.look(lambda book: book.profile(context.object_key.bucket))
    reason = why_of_headers(context.request.headers, is_foreseen)
    if reason is not None:
        return await _through(context, buffer, reason)
    reason = why_of_bucket(profile)
    if reason is not None:
        learns = profile is None or _is_old(context, profile)
        return await (_through_and_learn if learns else _through)(context, buffer, reason)
    check_stored(context.request.headers)
    async with room_for_body(context, buffer, context.slot.name) as bound:
        if bound is None:
            reply = await _absorb(context, buffer)
    if bound is None:
        await paced(context, buffer, context.slot.name)
        return reply
    return await _through(context, buffer, bound)


def _is_old(context: RequestContext, profile: Profile) -> bool:
    return not 0 <= context.services.clock.now() - profile.learned_at < LEARNED_AGAIN_SECONDS


async def _absorb(context: RequestContext, buffer: WritebackBuffer) -> Response:
    async with aclosing(BaseQuestion(context)) as question:
        staged = await stage_body(context, buffer, context.slot.name, 1)
        part = staged.part
        try:
            base = await base_told(context, buffer, question)
        except BaseException:
            await buffer.give_up(part)
            raise
    fixed = Fixed(context.object_key, fixed_headers(filter_request_headers(context.request.headers)), context.slot.name)
    pending = Write(
        fixed,
        base,
        question.nothing.asked_at,
        etag=part.file.etag,
        size_bytes=part.file.size_bytes,
        parts=(part,),
        checksums=part.checksums,
        acknowledged_at=part.stored_at,
    )
    await buffer.acknowledge(pending)
    return Response(200, staged.answer_headers, b"", "absorbed")


async def _through(context: RequestContext, buffer: WritebackBuffer, reason: Reason | Bound) -> Response:
    goes_through(context, reason)
    await FlushWait(context, buffer).for_turn()
    return await written_through(context, buffer, forward_write(context))


async def _through_and_learn(context: RequestContext, buffer: WritebackBuffer, reason: Reason) -> Response:
    """The first write to a bucket tells what its ETags are, and whether its objects may be looked at.

    Where the origin does not say the latter, the next write asks again.
    """
    async with aclosing(BaseQuestion(context)) as question:
        goes_through(context, reason)
        await FlushWait(context, buffer).for_turn()
        payload = await receive_payload(context, with_md5=True)
        reply = await written_through(context, buffer, forward_write(context, payload))
        try:
            may_look, is_certain = True, (await question.answer()).known
        except OriginAnswered:
            may_look, is_certain = False, True
    if reply.status == 200 and is_certain:
        headers = dict(reply.headers)
        is_md5 = payload.md5 is not None and unquote(headers.get("etag", "")) == payload.md5().hex()
        profile = Profile(is_md5 and makes_md5_etags(headers), may_look, context.services.clock.now())
        with suppress(BufferUnavailable):  # the origin has the object: then the next write tells of the bucket
            await buffer.journal.change(lambda book: book.learn(context.object_key.bucket, profile))
    return reply


# What may be absorbed


def check_condition(context: RequestContext, buffer: WritebackBuffer) -> None:
    """S3Error where what is pending under the key fails a write's condition. One that it would pass is the origin's.

    So is a request that names an owner or payer: whether it may know that much. A Complete that is repeated is answered
    as the first time.
    """
    headers = context.request.headers
    if_match, if_none_match = headers.get("if-match"), headers.get("if-none-match")
    if (if_match is None and if_none_match is None) or judged_by_the_origin(context.request):
        return
    pending = buffer.pending(context.object_key)
    upload_id = context.request.parameter("uploadId") or ""
    if pending is None or (upload_id and buffer.look(lambda book: book.ended(upload_id)) is not None):
        return
    if pending.deleted:
        if if_match is not None:
            raise s3_error("NoSuchKey", Key=pending.key.key)
    elif if_match is not None and not etag_matches(if_match, pending.etag):
        raise s3_error("PreconditionFailed", Condition="If-Match")
    elif if_none_match is not None and if_none_match.strip() == "*":
        raise s3_error("PreconditionFailed", Condition="If-None-Match")


METADATA_SIZE_BYTES_MAX = 2048
"""S3's limit for the names and values of user metadata together."""

_METADATA = "x-amz-meta-"

_STORED = frozenset(
    {
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    }
)
"""Headers whose every value S3 takes."""

STORAGE_CLASSES = frozenset({"STANDARD", "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING"})
"""Those whose objects can be read at once."""

_OF_THE_REQUEST = frozenset(
    {
        "x-amz-api-version",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-decoded-content-length",
        "x-amz-sdk-checksum-algorithm",
        "x-amz-security-token",
        "x-amz-trailer",
        "x-amz-user-agent",
        "x-amzn-trace-id",
    }
)
"""Headers about the request and its body: verified here, and not the origin's business any more."""

_ENCRYPTION = "x-amz-server-side-encryption"
_ENCRYPTED_WITHOUT_MD5 = ("aws:kms", "aws:kms:dsse")

_REPLAYED = frozenset(
    {
        "x-amz-acl",
        "x-amz-checksum-algorithm",
        "x-amz-checksum-type",
        "x-amz-tagging",
        "x-amz-website-redirect-location",
    }
)
"""Headers of Create that change no ETag: what the origin thinks of them comes with the flush."""


def why_of_headers(headers: Mapping[str, str], foreseen: Callable[[str, str], bool]) -> Reason | None:
    """Why the headers of a write have the origin judge it; None: they do not. `foreseen` as `is_foreseen`."""
    if all(foreseen(name, value) for name, value in headers.items()):
        return None
    return Reason.CONDITION if has_conditions(headers) else Reason.HEADER


def why_of_bucket(profile: Profile | None) -> Reason | None:
    """Why writes to a bucket of which this is known are not absorbed; None: they are."""
    if profile is None:
        return Reason.BUCKET_UNKNOWN
    if profile.absorbs:
        return None
    return Reason.BUCKET_UNREADABLE if profile.md5_etags else Reason.BUCKET_ETAGS


def may_be_deleted_here(request: S3Request) -> bool:
    """Whether a DeleteObject or DeleteObjects is about current versions, and the origin need not judge its headers."""
    return why_of_headers(request.headers, is_foreseen) is None and request.parameter("versionId") is None


def may_begin_without_origin(request: S3Request) -> bool:
    """Whether a CreateMultipartUpload says nothing that the origin must have judged before anything is acknowledged.

    Customer keys, which are never written down; KMS, whose ETags are no MD5s; owners, payers, locks, archive classes.
    """
    return all(_may_be_replayed(name, value) for name, value in request.headers.items())


def tells_encryption(answer: Mapping[str, str]) -> bool:
    """Whether the answer to a write says how its bucket encrypts, as S3's does; those of others' may not."""
    return _ENCRYPTION in answer


def names_encryption(headers: Mapping[str, str]) -> bool:
    """Whether a write says itself how it is to be encrypted: then its answer tells nothing of the bucket."""
    return any(name.startswith(_ENCRYPTION) for name in headers)


def has_conditions(headers: Mapping[str, str]) -> bool:
    """Whether the origin must judge the write by what it has under the key."""
    return any(is_condition(name) for name in headers)


def is_condition(name: str) -> bool:
    """Whether a header makes a write depend on what is there."""
    return name.startswith(("if-", "x-amz-if-"))


def makes_md5_etags(answer: Mapping[str, str]) -> bool:
    """Whether the bucket whose answer to a write this is may make ETags that are MD5s (S3 API, "Object", ETag)."""
    if f"{_ENCRYPTION}-customer-algorithm" in answer:
        return False
    return answer.get(_ENCRYPTION, "") not in _ENCRYPTED_WITHOUT_MD5


def fixed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """What of a write's headers is stored with the object, and sent with it at the flush."""
    return {name: value for name, value in headers.items() if _is_stored(name)}


def created_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """What a CreateMultipartUpload says of the object and of its parts: sent with it where the origin is asked later.

    Nothing of what it says of its sender is kept.
    """
    return {name: value for name, value in headers.items() if name in _STORED or _is_about_the_upload(name)}


def check_stored(headers: Mapping[str, str]) -> None:
    """What the flush would meet with is found out before anything is acknowledged.

    S3Error MetadataTooLarge as S3 says it, and InvalidArgument for header values that cannot be sent.
    """
    sendable({name: value for name, value in headers.items() if _is_stored(name) or _is_about_the_upload(name)})
    size_bytes = sum(
        len(name) - len(_METADATA) + len(value) for name, value in headers.items() if name.startswith(_METADATA)
    )
    if size_bytes > METADATA_SIZE_BYTES_MAX:
        raise s3_error("MetadataTooLarge", Size=str(size_bytes), MaxSizeAllowed=str(METADATA_SIZE_BYTES_MAX))


def _is_stored(name: str) -> bool:
    return name in _STORED or name.startswith(_METADATA) or name == "x-amz-storage-class"


def _is_about_the_upload(name: str) -> bool:
    return name.startswith("x-amz-") and name not in _OF_THE_REQUEST


def _may_be_replayed(name: str, value: str) -> bool:
    if name in _REPLAYED or name.startswith("x-amz-grant-") or (name, value) == (_ENCRYPTION, "AES256"):
        return True
    return is_foreseen(name, value)


def is_foreseen(name: str, value: str) -> bool:
    """Whether a header of a write needs no judgement of the origin's."""
    if name == "x-amz-storage-class":
        return value in STORAGE_CLASSES
    if name.startswith(PREFIX):
        return name[len(PREFIX) :] in ALGORITHMS
    if name.startswith("if-") or name == "origin":
        return False
    return not name.startswith("x-") or name in _OF_THE_REQUEST or _is_stored(name) or name.startswith("x-forebay-")
