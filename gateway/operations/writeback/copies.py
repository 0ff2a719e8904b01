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
from typing import Any

from gateway.core.errors import OriginBodyError, S3Error
from gateway.core.model import BorrowedBuffer, FileSpan, ObjectKey, PinnedFileSpan
from gateway.core.steps import each, in_steps
from gateway.operations.context import NO_BODY, Answer, RequestContext, Response, Sink, awaited, xml_response
from gateway.operations.other_nodes import Claimed
from gateway.operations.payload import receive_payload
from gateway.operations.writeback.key_check import check_place
from gateway.operations.writeback.parts import (
    ANSWER_SIZE_BYTES_MAX,
    check_not_in_use,
    check_owner,
    checksum_elements,
    leaves_to_the_origin,
    may_be_on_its_way,
    md5_of,
    number_of_part,
    room_for_body,
    slow_down,
    stage_body,
    store_part,
    upload_of,
)
from gateway.operations.writeback.past_the_buffer import FlushWait, goes_through, whole_document, with_retries
from gateway.operations.writeback.put_object import (
    UNCLAIMED,
    ExpectedVersionQuery,
    claimed_version,
    expected_version,
    goes_through_unseen,
    waits_for_version,
)
from gateway.operations.writeback.write_back_policy import (
    Reason,
    capabilities_of,
    check_stored,
    fixed_headers,
    is_foretold,
    is_supported_header,
    refuse_unless_kept_here,
    why_of_bucket,
    why_of_cluster,
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

_RACES_MAX = 64
"""Attempts at a copy, each of the write that is the source's last one by then."""

COPY_SIZE_BYTES_MAX = 5 * 1024**3
"""S3's limit for CopyObject."""

_OF_COPIES = frozenset({"x-amz-copy-source", "x-amz-metadata-directive"})
_CONDITIONS = "x-amz-copy-source-if-"
_ALWAYS_KEPT = ("x-amz-checksum-algorithm", "x-amz-checksum-type", "x-amz-tagging")
"""Tags have a directive of their own (S3 API, "CopyObject"), which defaults to COPY."""


def buffer_copy(context: RequestContext, leave: Callable[[], Awaitable[Response]]) -> Answer | None:
    """Carry out a CopyObject of a pending source here; None: the origin must, and it is said why.

    `leave` lets the origin make the copy, once it has the source.
    """
    source = _source_here(context)
    return None if source is None else _copied(context, source, leave)


def _source_here(context: RequestContext) -> Write | None:
    """Return the pending source of a copy that can be made here; None: the origin must, and it is said why."""
    headers, key = context.request.headers, context.object_key
    is_scratch = context.slot.write == "scratch"
    source = parse_copy_source(headers.get("x-amz-copy-source", ""))
    pending = context.buffer.pending(source.key) if source.version_id is None else None
    of_parts = pending is not None and pending.multipart
    reason = why_of_key(key.key) or why_of_headers(headers, _is_foreseen) or why_of_cluster(context)
    if not is_scratch:
        reason = reason or why_of_bucket(context, capabilities_of(context), of_parts=of_parts, headers=headers)
    if reason is None and (pending is None or pending.deleted or pending.size_bytes > COPY_SIZE_BYTES_MAX):
        reason = Reason.SOURCE
    refuse_unless_kept_here(context, reason)
    if reason is not None:
        goes_through(context, reason)
    if reason is not None or pending is None or (not is_scratch and leaves_to_the_origin(context, takes_room=False)):
        return None
    return pending


async def _copied(context: RequestContext, source: Write, leave: Callable[[], Awaitable[Response]]) -> Response:
    """Acknowledge a copy that shares its source's files."""
    await check_place(context)
    await receive_payload(context)
    spec, now = _spec_of_copy(context, source), context.services.clock.now()
    expected, claim = ExpectedVersion.unknown(context.services.clock), Claimed()
    if context.slot.write != "scratch":
        waits = waits_for_version(context, capabilities_of(context))
        async with aclosing(ExpectedVersionQuery(context, waits=waits)) as question:
            try:
                claim, expected = await claimed_version(context, now, expected_version(context, question))
            except UNCLAIMED as refusal:
                await goes_through_unseen(context, refusal)
                return await leave()
    try:
        for _ in range(_RACES_MAX):
            copy = await _shared(context, source, spec, expected, claim, now)
            if copy is not None:
                fields = element("ETag", copy.etag) + element("LastModified", format_iso_date(now))
                return xml_response(document("CopyObjectResult", fields), "absorbed")
            found = _source_here(context)
            if found is None:
                await claim.release()
                return await leave()
            source, spec = found, _spec_of_copy(context, found)
        raise s3_error("SlowDown", "The source is overwritten faster than it can be copied.")
    except S3Error:
        await claim.release()
        raise


def _spec_of_copy(context: RequestContext, source: Write) -> WriteSpec:
    """Return the copy's properties; S3Error PreconditionFailed if the source does not meet the request's conditions."""
    headers, now = context.request.headers, context.services.clock.now()
    check_copy_source(headers, etag=source.etag, last_modified=source.acknowledged_at, now=now)
    return WriteSpec(context.object_key, _fixed(headers, source, context.object_key), context.slot.name)


async def _shared(
    context: RequestContext, source: Write, spec: WriteSpec, expected: ExpectedVersion, claim: Claimed, now: float
) -> Write | None:
    """Acknowledge a copy of the source's files; None: they are gone, as it was flushed or overwritten meanwhile."""
    parts = await context.buffer.journal.parts(source.id)
    if len(parts) != source.parts_count:
        return None
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
        is_etag_local=not is_foretold(capabilities_of(context), of_parts=source.multipart),
        order=claim.order,
    )
    async with claim:
        return copy if await context.buffer.acknowledge_sharing(copy) else None


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
    of_request = ("x-amz-storage-class", "x-amz-acl")  # S3 copies neither
    kept = {name: value for name, value in kept.items() if name not in of_request}
    return {**kept, **{name: own[name] for name in of_request if name in own}, **always}


def _is_foreseen(name: str, value: str) -> bool:
    return name in _OF_COPIES or name.startswith(_CONDITIONS) or is_supported_header(name, value)


# UploadPartCopy

_OF_PART_COPIES = _OF_COPIES | {"x-amz-copy-source-range", "x-amz-expected-bucket-owner"}

Handler = Callable[[RequestContext], Answer]


async def buffer_part_copy(context: RequestContext, read: Handler, copy: Handler) -> Response:
    """Copy here if the source is pending, or the origin has not begun the upload; else `copy` asks the origin.

    `read` answers a GET or HEAD of the source as for any client.
    """
    upload, number = upload_of(context), number_of_part(context)
    check_not_in_use(upload, number)
    headers, clock = context.request.headers, context.services.clock
    source = parse_copy_source(headers["x-amz-copy-source"])
    copying = _PartCopy(context, upload, number, source, read, copy)
    is_pending = source.version_id is None and context.buffer.pending(source.key) is not None
    reason = why_of_headers(headers, lambda name, value: name in _OF_PART_COPIES or _is_foreseen(name, value))
    if reason is None and (is_pending or copying.is_only_possible_here):
        return await with_retries(copying.staged(), clock, "absorbed")
    goes_through(context, reason or Reason.SOURCE)
    await copying.leave_to_the_origin()
    return await with_retries(copying.copied_at_origin(), clock)


@dataclass(frozen=True, slots=True)
class _PartCopy:
    context: RequestContext
    upload: Write
    number: int
    source: CopySource
    read: Handler
    copy: Handler

    @property
    def is_only_possible_here(self) -> bool:
        """Return whether the origin lacks the upload, or its ETag of a part would not give the MD5 that is needed."""
        if self.upload.origin_upload_id is None:
            return True
        capabilities = capabilities_of(self.context)
        return self.context.slot.etag == "local" and not is_foretold(capabilities, self.upload.spec.headers)

    async def staged(self) -> Response:
        context, upload, slot = self.context, self.upload, self.upload.spec.slot
        await check_owner(context, upload)
        body = await self._look()
        part = self._request(upload.spec.key, Operation.UPLOAD_PART, {})
        part.body = body
        async with room_for_body(part, slot) as bound:
            if bound is None:
                await receive_payload(context)
                staged = replace(await stage_body(part, slot, self.number), checksums=body.checksums())
                await store_part(context, upload, staged)
        if bound is not None and self.is_only_possible_here:
            raise slow_down(part, slot, bound)
        if bound is not None:
            goes_through(context, bound)
            await self.leave_to_the_origin()
            return await self.copied_at_origin()
        fields = element("ETag", staged.file.etag) + element("LastModified", format_iso_date(staged.stored_at))
        fields += checksum_elements(staged.checksums)
        return xml_response(document("CopyPartResult", fields), "absorbed", body.answer_headers)

    async def _look(self) -> _SourceBody:
        """Look at the source within the conditions and the range of the request. Raises S3Error as S3 does."""
        context, request, source = self.context, self.context.request, self.source
        query = [("versionId", source.version_id)] if source.version_id is not None else []
        head = await awaited(self.read(self._request(source.key, Operation.HEAD_OBJECT, {}, query)))
        try:
            found = dict([*head.encoded.pairs, *head.headers])
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
                reply = await awaited(self.read(self._request(source.key, Operation.GET_OBJECT, headers, query)))
            except S3Error as error:
                if error.code != "PreconditionFailed":
                    raise
                raise _refusal(error.status) from error
            if reply.status in (200, 206):
                return reply
            await reply.aclose()
            raise _refusal(reply.status)

        return _SourceBody(context, self.upload, size_bytes, get, found.get("x-amz-version-id"))

    def _request(
        self,
        key: ObjectKey,
        operation: Operation,
        headers: Mapping[str, str],
        query: Sequence[tuple[str, str | None]] = (),
    ) -> RequestContext:
        """Return a request of the gateway's own, for the same caller, whose rights were checked; it has no body."""
        methods = {Operation.HEAD_OBJECT: "HEAD", Operation.GET_OBJECT: "GET"}
        request = replace(
            self.context.request,
            method=methods.get(operation, "PUT"),
            headers=headers,
            bucket=key.bucket,
            key=key.key,
            query=query,
            operation=operation,
        )
        slot = self.context.services.slots.find(key.bucket, key.key)
        return replace(self.context, request=request, body=NO_BODY, seed=None, slot=slot)

    async def leave_to_the_origin(self) -> None:
        """Return when the origin has the pending source, and can copy it. S3Error if it cannot."""
        if self.upload.origin_upload_id is None:
            raise s3_error(
                "ServiceUnavailable",
                "This upload was begun while the origin was away. Only the origin can make this copy, and it does not "
                "have the upload yet: begin another.",
            )
        await FlushWait(self.context).for_keys([self.source.key])
        if may_be_on_its_way(self.context, self.upload, self.number):
            raise s3_error("SlowDown", "A part with this number is on its way to the origin: try again.")

    async def copied_at_origin(self) -> Response:
        """Copy at the origin, with its upload's id in the place of ours."""
        context, upload = self.context, self.upload
        ids = {"uploadId": upload.origin_upload_id}
        query = [(name, ids.get(name, value)) for name, value in context.request.query]
        context.request = replace(context.request, query=query)
        reply = await awaited(self.copy(context))
        document = await whole_document(reply)
        answered = Response(reply.status, without(reply.headers, "content-length"), document, "forwarded")
        etag = text_of(document, "ETag")
        if reply.status != 200 or error_code_of(document) is not None or etag is None:
            return answered
        md5 = md5_of(etag)
        file = StagedFile("", await self._size_bytes(etag), md5)
        sums = {name: text_of(document, f"Checksum{name.upper()}") for name in ALGORITHMS}
        known = {name: value for name, value in sums.items() if value}
        await store_part(context, upload, Part(self.number, file, context.services.clock.now(), known, file.etag))
        return answered

    async def _size_bytes(self, etag: str) -> int:
        """Return the part's size by the origin's ListParts; S3Error if it has another part by now."""
        query = [
            ("uploadId", self.upload.origin_upload_id),
            ("part-number-marker", str(self.number - 1)),
            ("max-parts", "1"),
        ]
        request = OriginRequest(
            "GET", *self.upload.spec.key, query, purpose=Purpose.FORWARD, slot=self.context.slot.name
        )
        async with await self.context.services.origin.send(request) as response:
            listed = await response.read(ANSWER_SIZE_BYTES_MAX)
        size = text_of(listed, "Size") or ""
        if response.status != 200 or unquote(text_of(listed, "ETag") or "") != unquote(etag) or not size.isdecimal():
            raise s3_error("ServiceUnavailable", "The origin does not list the part that it has just made: try again.")
        return int(size)


def _refusal(status: int) -> S3Error:
    if status == 412:
        return s3_error("ServiceUnavailable", "The source has just been changed: try again.")
    return s3_error({400: "InvalidRequest", 403: "AccessDenied", 404: "NoSuchKey"}.get(status, "ServiceUnavailable"))


class _SourceBody:
    """The bytes of one version of a source, from `get`, as the body of a part."""

    def __init__(
        self,
        context: RequestContext,
        upload: Write,
        size_bytes: int,
        get: Callable[[], Coroutine[Any, Any, Response]],
        version_id: str | None,
    ) -> None:
        declared = upload.spec.headers.get("x-amz-checksum-algorithm")
        self.length_bytes = size_bytes
        self.answer_headers = [("x-amz-copy-source-version-id", version_id)] if version_id is not None else []
        self._checksum = Checksum(upload_checksum_type(declared, None)[0]) if declared is not None else None
        self._threads = context.buffer.threads
        self._pieces = _pieces(get)

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


async def _pieces(get: Callable[[], Coroutine[Any, Any, Response]]) -> AsyncGenerator[bytes | memoryview, None]:
    reply = await get()
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
