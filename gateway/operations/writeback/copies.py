"""Copies with `write = "back"`: CopyObject of a pending object, and UploadPartCopy into an upload that is here.

CopyObject shares the source's staged files. The copy is flushed by itself, in the parts of the source, and so has the
source's ETag. Copies that the origin must judge, of sources over 5 GiB, and of parts made of copies, wait until the
source is at the origin instead (router.py).

UploadPartCopy of a pending object makes a part of its bytes, like an uploaded one; so does one into an upload that the
origin has not begun. The origin copies other parts into its own upload, and the journal notes them: none of their bytes
pass through this node, and Complete is carried out at the origin, as for every part that only it has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gateway.core.errors import OriginAnswered, OriginBodyError, S3Error
from gateway.core.model import BorrowedBuffer, FileSpan, ObjectKey, PinnedFileSpan
from gateway.core.steps import each, in_steps
from gateway.operations.context import NO_BODY, Answer, RequestContext, Response, Sink
from gateway.operations.payload import receive_payload
from gateway.operations.writeback.parts import (
    apply_backpressure,
    check_not_in_use,
    check_owner,
    leaves_to_the_origin,
    may_be_on_its_way,
    number_of_part,
    room_for_body,
    slow_down,
    stage_body,
    store_part,
    upload_of,
)
from gateway.operations.writeback.past_the_buffer import FlushWait, goes_through, whole_document, with_retries
from gateway.operations.writeback.put_object import ExpectedVersionQuery, expected_version, goes_through_unseen
from gateway.operations.writeback.write_back_policy import (
    Reason,
    check_stored,
    fixed_headers,
    is_foretold,
    is_supported_header,
    refuse_unless_kept_here,
    takes_local_etag,
    why_of_bucket,
    why_of_headers,
    why_of_key,
)
from gateway.origin.client import OriginRequest, Purpose
from gateway.s3.checksums import ALGORITHMS, Checksum, upload_checksum_type
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import (
    check_copy_source,
    filter_request_headers,
    format_iso_date,
    is_md5_etag,
    parse_copy_source_range,
    parse_http_date,
    unquote,
    without,
)
from gateway.s3.requests import CopySource, Operation, parse_copy_source
from gateway.s3.xml import error_code_of, text_of
from gateway.s3.xml_writer import document, element
from gateway.writeback.journal.records import ExpectedVersion, Part, Write, WriteSpec
from gateway.writeback.staged_file import StagedFile

if TYPE_CHECKING:
    from gateway.writeback.buffer import WritebackBuffer

COPY_SIZE_BYTES_MAX = 5 * 1024**3
"""S3's limit for CopyObject."""

_OF_COPIES = frozenset({"x-amz-copy-source", "x-amz-metadata-directive"})
_CONDITIONS = "x-amz-copy-source-if-"
_ALWAYS_KEPT = ("x-amz-checksum-algorithm", "x-amz-checksum-type", "x-amz-tagging")
"""Tags have a directive of their own (S3 API, "CopyObject"), which defaults to COPY."""


def copied_here(context: RequestContext, buffer: WritebackBuffer) -> Write | None:
    """Return the pending source of a CopyObject that can be carried out here, or None."""
    headers = context.request.headers
    if not context.slot.is_buffered:
        return None
    is_scratch = context.slot.write == "scratch"
    capabilities = buffer.look(lambda tx: tx.buckets.capabilities(context.object_key.bucket))
    source = parse_copy_source(headers.get("x-amz-copy-source", ""))
    pending = buffer.pending(source.key) if source.version_id is None else None
    of_parts = pending is not None and pending.multipart
    reason = why_of_key(context.object_key.key) or why_of_headers(headers, _is_foreseen)
    if not is_scratch:
        may_be_local = takes_local_etag(context)
        key = context.object_key.key
        reason = reason or why_of_bucket(
            capabilities, of_parts=of_parts, headers=headers, may_be_local=may_be_local, key=key
        )
    if reason is None and (pending is None or pending.deleted or pending.size_bytes > COPY_SIZE_BYTES_MAX):
        reason = Reason.SOURCE
    if is_scratch:
        refuse_unless_kept_here(reason)
        return pending
    if reason is not None:
        goes_through(context, reason)
        return None
    return None if leaves_to_the_origin(context, buffer, takes_room=False) else pending


async def buffer_copy(
    context: RequestContext, buffer: WritebackBuffer, source: Write, leave: Callable[[], Awaitable[Response]]
) -> Response:
    """Acknowledge a copy that shares its source's files; `leave` lets the origin make it, once it has the source."""
    await receive_payload(context)
    headers, now = context.request.headers, context.services.clock.now()
    check_copy_source(headers, etag=source.etag, last_modified=source.acknowledged_at, now=now)
    spec = WriteSpec(context.object_key, _fixed(headers, source, context.object_key), context.slot.name)
    is_scratch, expected = context.slot.write == "scratch", ExpectedVersion.unknown(context.services.clock)
    if not is_scratch:
        async with aclosing(ExpectedVersionQuery(context)) as question:
            try:
                expected = await expected_version(context, buffer, question)
            except OriginAnswered as refusal:
                await goes_through_unseen(context, buffer, refusal)
                return await leave()
    parts = await buffer.journal.parts(source.id)
    if len(parts) != source.parts_count:  # the source has just reached the origin
        refuse_unless_kept_here(Reason.SOURCE if is_scratch else None)
        goes_through(context, Reason.SOURCE)
        return await leave()
    capabilities = buffer.look(lambda tx: tx.buckets.capabilities(context.object_key.bucket))
    copy = Write(
        spec,
        expected,
        now,
        etag=source.etag,
        size_bytes=source.size_bytes,
        parts=await in_steps(each(lambda part: replace(part, origin_etag=None), parts)),
        multipart=source.multipart,
        checksums=source.checksums,
        acknowledged_at=now,
        is_etag_local=capabilities is not None and not capabilities.foretells(of_parts=source.multipart),
    )
    if not await buffer.acknowledge_sharing(copy):
        refuse_unless_kept_here(Reason.SOURCE if is_scratch else None)
        goes_through(context, Reason.SOURCE)
        return await leave()
    fields = element("ETag", copy.etag) + element("LastModified", format_iso_date(now))
    return Response(200, [("content-type", "application/xml")], document("CopyObjectResult", fields), "absorbed")


def _fixed(headers: Mapping[str, str], source: Write, target: ObjectKey) -> dict[str, str]:
    directive = headers.get("x-amz-metadata-directive", "COPY").upper()
    if directive not in ("COPY", "REPLACE"):
        raise s3_error("InvalidArgument", "Unknown metadata directive.", ArgumentName="x-amz-metadata-directive")
    own = fixed_headers(filter_request_headers(headers))
    always = {name: source.spec.headers[name] for name in _ALWAYS_KEPT if name in source.spec.headers}
    if directive == "REPLACE":
        check_stored(headers)
        return {**own, **always}
    if source.key == target and "x-amz-storage-class" not in headers:
        raise s3_error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the "
            "object's metadata, storage class, website redirect location or encryption attributes.",
        )
    kept = fixed_headers(source.spec.headers)
    kept.pop("x-amz-storage-class", None)
    storage = {name: value for name, value in own.items() if name == "x-amz-storage-class"}
    return {**kept, **storage, **always}


def _is_foreseen(name: str, value: str) -> bool:
    return name in _OF_COPIES or name.startswith(_CONDITIONS) or is_supported_header(name, value)


def _is_foreseen_of_part(name: str, value: str) -> bool:
    return name in _OF_PART_COPIES or _is_foreseen(name, value)


# UploadPartCopy

ANSWER_SIZE_BYTES_MAX = 64 * 1024

_OF_PART_COPIES = _OF_COPIES | {"x-amz-copy-source-range", "x-amz-expected-bucket-owner"}

Handler = Callable[[RequestContext], Answer]


@dataclass(frozen=True, slots=True)
class _PartCopy:
    """A part to copy. `read` answers a GET or HEAD of its source as for any client."""

    upload: Write
    number: int
    source: CopySource
    read: Handler


async def buffer_part_copy(context: RequestContext, buffer: WritebackBuffer, read: Handler, copy: Handler) -> Response:
    """Copy here if the source is pending, or the origin has not begun the upload; else `copy` asks the origin."""
    upload, number = upload_of(context, buffer), number_of_part(context)
    check_not_in_use(upload, number)
    headers, clock = context.request.headers, context.services.clock
    copying = _PartCopy(upload, number, parse_copy_source(headers["x-amz-copy-source"]), read)
    is_pending = copying.source.version_id is None and buffer.pending(copying.source.key) is not None
    reason = why_of_headers(headers, _is_foreseen_of_part)
    if reason is None and (is_pending or upload.origin_upload_id is None or _knows_no_etag(context, buffer, upload)):
        return await with_retries(_staged(context, buffer, copying, copy), clock, "absorbed")
    goes_through(context, reason or Reason.SOURCE)
    await _leave_to_the_origin(context, buffer, copying)
    return await with_retries(_copied_at_origin(context, buffer, copying, copy), clock)


def _knows_no_etag(context: RequestContext, buffer: WritebackBuffer, upload: Write) -> bool:
    """Return whether the origin's ETag of a part would not give its MD5, which the object's ETag needs."""
    capabilities = buffer.look(lambda tx: tx.buckets.capabilities(upload.key.bucket))
    return context.slot.etag == "local" and not is_foretold(capabilities, upload.spec.headers)


async def _staged(context: RequestContext, buffer: WritebackBuffer, copying: _PartCopy, copy: Handler) -> Response:
    upload, slot = copying.upload, copying.upload.spec.slot
    await check_owner(context, upload)
    source = await _look(context, copying)
    body = _SourceBody(source, upload, buffer)
    part = _request_of(context, copying.upload.spec.key, Operation.UPLOAD_PART, {})
    part.body = body
    async with room_for_body(part, buffer, slot) as bound:
        if bound is None:
            await receive_payload(context)
            staged = (await stage_body(part, buffer, slot, copying.number)).part
            staged = replace(staged, checksums=body.checksums())
            await store_part(buffer, upload, staged)
    if bound is not None and (upload.origin_upload_id is None or _knows_no_etag(context, buffer, upload)):
        raise slow_down(part, buffer, slot, bound)
    if bound is not None:
        goes_through(context, bound)
        await _leave_to_the_origin(context, buffer, copying)
        return await _copied_at_origin(context, buffer, copying, copy)
    await apply_backpressure(part, buffer, slot)
    fields = element("ETag", staged.file.etag) + element("LastModified", format_iso_date(staged.stored_at))
    fields += "".join(element(f"Checksum{name.upper()}", value) for name, value in staged.checksums.items())
    headers = [("content-type", "application/xml"), *source.answer_headers]
    return Response(200, headers, document("CopyPartResult", fields), "absorbed")


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of a copy: `size_bytes` of one version, from `get`."""

    size_bytes: int
    get: Callable[[], Coroutine[Any, Any, Response]]
    answer_headers: list[tuple[str, str]]


async def _look(context: RequestContext, copying: _PartCopy) -> _Source:
    """Look at the source within the conditions and the range of the request. Raises S3Error as S3 does."""
    request, source = context.request, copying.source
    query = [("versionId", source.version_id)] if source.version_id is not None else []
    head = await _awaited(copying.read(_request_of(context, source.key, Operation.HEAD_OBJECT, {}, query)))
    try:
        found = dict(head.encoded.pairs)
        found.update(head.headers)
    finally:
        await head.aclose()
    if head.status != 200:
        raise _refusal(head.status)
    length = str(head.length_bytes) if head.length_bytes is not None else found.get("content-length", "")
    etag, modified = found.get("etag"), parse_http_date(found.get("last-modified", ""))
    if etag is None or not length.isdecimal():
        raise OriginBodyError("the origin's answer to HeadObject has no ETag, or no length")
    size_bytes = int(length)
    check_copy_source(request.headers, etag=etag, last_modified=modified, now=context.services.clock.now())
    headers, asked = {"if-match": etag}, request.headers.get("x-amz-copy-source-range")
    if asked is not None:
        byte_range = parse_copy_source_range(asked, size_bytes)
        headers["range"], size_bytes = f"bytes={byte_range.first}-{byte_range.last}", byte_range.length
    if size_bytes > COPY_SIZE_BYTES_MAX:
        raise s3_error(
            "InvalidRequest",
            f"The specified copy source is larger than the maximum allowable size for a copy source: "
            f"{COPY_SIZE_BYTES_MAX}",
        )

    async def get() -> Response:
        try:
            reply = await _awaited(copying.read(_request_of(context, source.key, Operation.GET_OBJECT, headers, query)))
        except S3Error as error:
            if error.code != "PreconditionFailed":
                raise
            raise _refusal(error.status) from error
        if reply.status in (200, 206):
            return reply
        await reply.aclose()
        raise _refusal(reply.status)

    version = found.get("x-amz-version-id")
    return _Source(size_bytes, get, [("x-amz-copy-source-version-id", version)] if version is not None else [])


def _refusal(status: int) -> S3Error:
    if status == 412:
        return s3_error("ServiceUnavailable", "The source has just been changed: try again.")
    return s3_error({400: "InvalidRequest", 403: "AccessDenied", 404: "NoSuchKey"}.get(status, "ServiceUnavailable"))


def _request_of(
    context: RequestContext,
    key: ObjectKey,
    operation: Operation,
    headers: Mapping[str, str],
    query: Sequence[tuple[str, str | None]] = (),
) -> RequestContext:
    """Return a request of the gateway's own, for the same caller, whose rights were checked; it has no body."""
    methods = {Operation.HEAD_OBJECT: "HEAD", Operation.GET_OBJECT: "GET"}
    request = replace(
        context.request,
        method=methods.get(operation, "PUT"),
        headers=headers,
        bucket=key.bucket,
        key=key.key,
        query=query,
        operation=operation,
    )
    slot = context.services.slots.find(key.bucket, key.key)
    return replace(context, request=request, body=NO_BODY, seed=None, slot=slot)


class _SourceBody:
    """The bytes of a source as the body of a part."""

    def __init__(self, source: _Source, upload: Write, buffer: WritebackBuffer) -> None:
        declared = upload.spec.headers.get("x-amz-checksum-algorithm")
        self.length_bytes = source.size_bytes
        self._checksum = Checksum(upload_checksum_type(declared, None)[0]) if declared is not None else None
        self._threads = buffer.threads
        self._pieces = _pieces(source)

    def checksums(self) -> dict[str, str]:
        """Return the checksum that Create has announced, which S3 adds to the answer about a copied part."""
        return {self._checksum.algorithm: self._checksum.base64()} if self._checksum is not None else {}

    async def read(self) -> bytes:
        async for piece in self._pieces:
            if piece:
                return bytes(piece)
        return b""

    async def receive(self, sink: Sink) -> None:
        def take(data: memoryview) -> None:
            if self._checksum is not None:
                self._checksum.update(data)
            sink(data)

        async with aclosing(self._pieces):
            while piece := await self.read():
                await self._threads.finish(take, memoryview(piece))


async def _pieces(source: _Source) -> AsyncGenerator[bytes | memoryview, None]:
    reply = await source.get()
    try:
        body = reply.body
        if isinstance(body, (bytes, memoryview)):
            yield body
            return
        if isinstance(body, PinnedFileSpan):
            async with aclosing(body.span.read()) as read:
                async for data in read:
                    yield data
            return
        async for piece in body:
            if isinstance(piece, FileSpan):
                async with aclosing(piece.read()) as read:
                    async for data in read:
                        yield data
            else:
                yield piece.content if isinstance(piece, BorrowedBuffer) else piece
    finally:
        await reply.aclose()


async def _leave_to_the_origin(context: RequestContext, buffer: WritebackBuffer, copying: _PartCopy) -> None:
    """Return when the origin has the pending source, and can copy it. S3Error if it cannot."""
    upload = copying.upload
    if upload.origin_upload_id is None:
        raise s3_error(
            "ServiceUnavailable",
            "This upload was begun while the origin was away. Only the origin can make this copy, and it does not have "
            "the upload yet: begin another.",
        )
    await FlushWait(context, buffer).for_keys([copying.source.key])
    if may_be_on_its_way(buffer, upload, copying.number):
        raise s3_error("SlowDown", "A part with this number is on its way to the origin: try again.")


async def _copied_at_origin(
    context: RequestContext, buffer: WritebackBuffer, copying: _PartCopy, copy: Handler
) -> Response:
    """Copy at the origin, with its upload's id in the place of ours."""
    upload, number = copying.upload, copying.number
    ids = {"uploadId": upload.origin_upload_id}
    query = [(name, ids.get(name, value)) for name, value in context.request.query]
    context.request = replace(context.request, query=query)
    reply = await _awaited(copy(context))
    document = await whole_document(reply)
    answered = Response(reply.status, without(reply.headers, "content-length"), document, "forwarded")
    etag = text_of(document, "ETag")
    if reply.status != 200 or error_code_of(document) is not None or etag is None:
        return answered
    if not is_md5_etag(etag):
        raise s3_error("ServiceUnavailable", "The origin's ETag of the part is not an MD5: try again.")
    size_bytes = await _size_bytes(context, upload, number, etag)
    file = StagedFile("", size_bytes, bytes.fromhex(unquote(etag)))
    sums = {name: text_of(document, f"Checksum{name.upper()}") for name in ALGORITHMS}
    known = {name: value for name, value in sums.items() if value}
    await store_part(buffer, upload, Part(number, file, context.services.clock.now(), known, file.etag))
    return answered


async def _awaited(answer: Answer) -> Response:
    return answer if isinstance(answer, Response) else await answer


async def _size_bytes(context: RequestContext, upload: Write, number: int, etag: str) -> int:
    """Return the part's size by the origin's ListParts; S3Error if it has another part by now."""
    key = upload.spec.key
    query = [
        ("uploadId", upload.origin_upload_id),
        ("part-number-marker", str(number - 1)),
        ("max-parts", "1"),
    ]
    request = OriginRequest("GET", key.bucket, key.key, query, {}, b"", Purpose.FORWARD, context.slot.name)
    async with await context.services.origin.send(request) as response:
        listed = await response.read(ANSWER_SIZE_BYTES_MAX)
    size = text_of(listed, "Size") or ""
    if response.status != 200 or unquote(text_of(listed, "ETag") or "") != unquote(etag) or not size.isdecimal():
        raise s3_error("ServiceUnavailable", "The origin does not list the part that it has just made: try again.")
    return int(size)
