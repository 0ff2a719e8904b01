"""Carries out the instructions of state.py as requests to the origin, and returns its answers as events.

Bytes are verified on their way out: a damaged chunk raises BufferDamaged, and leaves the origin with an unfinished
request, never with a wrong object. Every body has a `Content-MD5`, so that the origin checks the rest of the way.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.core.clock import Clock, Moment
from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.core.steps import Steps, each, in_steps
from gateway.origin.client import Origin, OriginRequest, OriginResponse, Purpose, StreamedBody
from gateway.origin.retry import asks_for_retry
from gateway.s3.headers import parse_http_date, quote, unquote
from gateway.s3.upload_list import UPLOADS_SIZE_BYTES_MAX, UploadsPage, parse_uploads_page
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document, error_code_of, etag_of_result, text_of
from gateway.writeback.flushing.failures import is_for_good, kind_of_answer, kind_of_error
from gateway.writeback.flushing.state import (
    Aborted,
    Compared,
    Delete,
    Event,
    Finish,
    Finished,
    FoundObject,
    Headed,
    Lost,
    PartFailed,
    PartSent,
    SendPart,
    WriteRefused,
)
from gateway.writeback.journal.records import Part, State, Write
from gateway.writeback.pending_reader import staged_body
from gateway.writeback.staged_file import BufferThreads, StagedFile, Staging

ANSWER_SIZE_BYTES_MAX = 64 * 1024

_NOT_IMPLEMENTED = "NotImplemented"

WORDS_MAX = 300
"""Characters of an origin's message about a refusal."""


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An open upload at the origin. `age_seconds` counts from its beginning."""

    upload_id: str
    age_seconds: float


@dataclass(frozen=True, slots=True)
class OpenUploads:
    """The open uploads of one key, with ages of some time between the question and the answer.

    `are_ages_told`: they are by the origin's own clock, else by ours.
    """

    uploads: Sequence[OpenUpload]
    are_ages_told: bool
    asked: Moment
    answered: Moment


class Requests:
    """Carries out instructions at the origin."""

    def __init__(self, origin: Origin, staging: Staging, threads: BufferThreads, clock: Clock) -> None:
        self._origin = origin
        self._staging = staging
        self._threads = threads
        self._clock = clock

    @property
    def origin(self) -> Origin:
        return self._origin

    @property
    def threads(self) -> BufferThreads:
        return self._threads

    async def content(self, write: Write, size_bytes_max: int) -> bytes | None:
        """Return all bytes of an object; None if it is longer, or only the origin has some of them. BufferDamaged."""
        if write.size_bytes > size_bytes_max or not all(part.file.is_here for part in write.parts):
            return None
        content = bytearray()
        for part in write.parts:
            body = await self._body(part.file)
            if isinstance(body, bytes):
                content += body
                continue
            async for piece in body.chunks:
                content += piece
        return bytes(content)

    async def head(self, write: Write) -> Event:
        return await _event(self._head(write))

    async def begin(self, write: Write) -> str | WriteRefused | Lost:
        """Open an upload with all that Create fixed; return its id."""
        try:
            return await self._begin(write)
        except (OriginUnreachable, OriginBodyError, OSError) as error:
            return Lost(str(error), kind_of_error(error))

    async def send_part(self, write: Write, send: SendPart) -> Event:
        event = await _event(self._send_part(write, send))
        if isinstance(event, Lost):
            return PartFailed(send.origin_upload_id, send.part.number, event.reason, kind=event.kind)
        if isinstance(event, WriteRefused):
            return PartFailed(send.origin_upload_id, send.part.number, event.code, event.code, event.kind, event)
        return event

    async def finish(self, write: Write, finish: Finish) -> Event:
        """Make the object visible, if the key is as expected."""
        conditions: dict[str, str] = {}
        if finish.is_conditional:
            conditions = {"if-none-match": "*"} if finish.expected is None else {"if-match": quote(finish.expected)}
        return await _event((self._complete if write.multipart else self._put)(write, conditions))

    async def complete(self, write: Write) -> Event:
        """Complete an upload under its client's own conditions (`if-match`, `if-none-match`)."""
        return await _event(self._complete(write, write.conditions))

    async def delete(self, write: Write, delete: Delete) -> Event:
        """Delete the key, if it is as expected."""
        conditions = {"if-match": quote(delete.expected)} if delete.is_conditional and delete.expected else {}
        return await _event(self._delete(write, conditions))

    async def compare(self, write: Write, etag: str) -> Event:
        """Read the origin's version back, and compare it with our bytes, part by part, by their MD5s."""
        return await _event(self._compare(write, etag))

    async def find(self, write: Write) -> Event:
        return await _event(self._find(write))

    async def abort(self, write: Write) -> Event:
        return await _event(self._abort(write))

    async def first_key(self, bucket: str, prefix: str) -> str | None:
        """Return the first key with this prefix in S3's order; None also if the origin does not say."""
        query = [("list-type", "2"), ("prefix", prefix), ("max-keys", "1")]
        try:
            request = OriginRequest("GET", bucket, None, query, purpose=Purpose.FLUSH)
            async with await self._origin.send(request) as response:
                return text_of(await response.read(ANSWER_SIZE_BYTES_MAX), "Key") if response.status == 200 else None
        except (OriginUnreachable, OriginBodyError, OSError):
            return None

    async def open_uploads(self, key: ObjectKey) -> OpenUploads | WriteRefused | Lost:
        try:
            return await self._open_uploads(key)
        except (OriginUnreachable, OriginBodyError) as error:
            return Lost(str(error), kind_of_error(error))

    async def _open_uploads(self, key: ObjectKey) -> OpenUploads | WriteRefused | Lost:
        found, asked = list[OpenUpload](), Moment.of(self._clock)
        told: float | None = None
        following: tuple[str, str] | None = ("", "")
        while following is not None:
            answered = await self._page_of_uploads(key, following)
            if isinstance(answered, WriteRefused | Lost):
                return answered
            page, told = answered
            now = asked.at if told is None else told
            found += [OpenUpload(one.upload_id, now - one.initiated) for one in page.uploads if one.key == key.key]
            if page.following == following:
                raise OriginBodyError("the origin's pages of uploads do not lead on")
            # In the order of keys: longer keys that begin with this one come behind it.
            following = None if any(one.key != key.key for one in page.uploads) else page.following
        return OpenUploads(found, told is not None, asked, Moment.of(self._clock))

    async def _page_of_uploads(
        self, key: ObjectKey, following: tuple[str, str]
    ) -> tuple[UploadsPage, float | None] | WriteRefused | Lost:
        """Return a page, and the time by the origin's clock."""
        markers = zip(("key-marker", "upload-id-marker"), following, strict=True)
        query = [("uploads", ""), ("prefix", key.key), ("encoding-type", "url"), *(one for one in markers if one[1])]
        request = OriginRequest("GET", key.bucket, None, query, purpose=Purpose.FLUSH)
        async with await self._origin.send(request) as response:
            told = parse_http_date(response.headers.get("date", ""))
            if response.status == 200:
                return parse_uploads_page(await response.read(UPLOADS_SIZE_BYTES_MAX)), told
            failure = await failure_of(response)
        if failure == WriteRefused("NoSuchBucket") and await self._is_bucket_gone(key.bucket):
            return UploadsPage([], [], None), told
        return failure

    async def _head(self, write: Write) -> Event:
        asked = Moment.of(self._clock)
        found = await head_of(self._origin, _request("HEAD", write), believes_404=_is_absence_expected(write))
        if found is None:
            return Headed(None, moment=asked)
        return found if isinstance(found, WriteRefused | Lost) else _headed(found, asked, Moment.of(self._clock))

    async def _is_bucket_gone(self, bucket: str) -> bool:
        """Ask for the bucket itself: a HEAD of a key has no document to tell a missing bucket from a missing object."""
        request = OriginRequest("HEAD", bucket, None, purpose=Purpose.FLUSH)
        async with await self._origin.send(request) as response:
            return response.status == 404

    async def _begin(self, write: Write) -> str | WriteRefused | Lost:
        request = _request("POST", write, [("uploads", None)], write.spec.headers)
        async with await self._origin.send(request) as response:
            if response.status != 200:
                return await failure_of(response)
            origin_upload_id = text_of(await response.read(ANSWER_SIZE_BYTES_MAX), "UploadId")
        return origin_upload_id or _untold(200, "an upload id")

    async def _send_part(self, write: Write, send: SendPart) -> Event:
        query = [("partNumber", str(send.part.number)), ("uploadId", send.origin_upload_id)]
        headers = _of_body(send.part.file, _declared_checksums(write, send.part))
        request = _request("PUT", write, query, headers, await self._body(send.part.file))
        async with await self._origin.send(request) as response:
            if response.status != 200:
                return await failure_of(response)
            etag = response.headers.get("etag")
        return PartSent(send.origin_upload_id, send.part.number, etag) if etag else _untold(200, "an ETag")

    async def _put(self, write: Write, conditions: Mapping[str, str]) -> Event:
        part = write.parts[0]
        headers = {**write.spec.headers, **_of_body(part.file, part.checksums), **conditions}
        request = _request("PUT", write, (), headers, await self._body(part.file))
        async with await self._origin.send(replace(request, sent_once=True)) as response:  # the caller looks first
            if response.status != 200:
                return await failure_of(response)
            return Finished(response.headers.get("etag") or None)

    async def _complete(self, write: Write, conditions: Mapping[str, str]) -> Event:
        document = await in_steps(_completion(write))
        headers = {**conditions, "content-type": "application/xml"}
        query = [("uploadId", write.origin_upload_id or "")]
        body = StreamedBody(_once(document), len(document))  # once: a second Complete is answered NoSuchUpload
        async with await self._origin.send(_request("POST", write, query, headers, body)) as response:
            if response.status != 200:
                return await failure_of(response)
            answer = await response.read(ANSWER_SIZE_BYTES_MAX)
        code = error_code_of(answer)
        if code:
            return _refusal(200, code, answer)
        return _untold(200, "an ETag") if text_of(answer, "ETag") is None else Finished(etag_of_result(answer))

    async def _delete(self, write: Write, conditions: Mapping[str, str]) -> Event:
        request = replace(_request("DELETE", write, (), conditions), sent_once=True)
        async with await self._origin.send(request) as response:
            if response.status == 204:
                return Finished(None)
            found: Mapping[str, str] | WriteRefused | Lost | None = await _seen(response)
        if response.status == 200:  # S3 answers 204
            found = await head_of(self._origin, _request("HEAD", write), believes_404=False)
        if found is None:
            return Finished(None)
        return (
            found if isinstance(found, WriteRefused | Lost) else Lost("the origin has not deleted it", "origin-error")
        )

    async def _compare(self, write: Write, etag: str) -> Event:
        async with await self._origin.send(_request("GET", write, (), {"if-match": quote(etag)})) as response:
            found = await _seen(response)
            if found is None or found == WriteRefused("PreconditionFailed"):
                return Compared(None)
            if isinstance(found, WriteRefused | Lost):
                return found
            is_it = unquote(found["etag"]) == unquote(etag)
            return Compared(await _has_parts(response, write.parts) if is_it else None)

    async def _find(self, write: Write) -> Event:
        query = [("uploadId", write.origin_upload_id or ""), ("max-parts", "1")]
        async with await self._origin.send(_request("GET", write, query)) as response:
            if response.status == 200:
                answer = await response.read(ANSWER_SIZE_BYTES_MAX)
                has_parts = text_of(answer, "PartNumber") is not None
                is_list = text_of(answer, "UploadId") is not None
                return FoundObject(True, has_parts) if is_list else _untold(200, "a list of parts")
            failure = await failure_of(response)
        return FoundObject(False) if failure == WriteRefused("NoSuchUpload") else failure

    async def _abort(self, write: Write) -> Event:
        query = [("uploadId", write.origin_upload_id or "")]
        async with await self._origin.send(_request("DELETE", write, query)) as response:
            if response.status == 204:
                return Aborted()
            failure = await failure_of(response)
        if response.status == 200 and await self._find(write) == FoundObject(False):  # S3 answers 204
            return Aborted()
        is_bucket_gone = failure == WriteRefused("NoSuchBucket") and await self._is_bucket_gone(write.key.bucket)
        if failure == WriteRefused("NoSuchUpload") or is_bucket_gone:
            return Aborted()
        return failure

    async def _body(self, file: StagedFile) -> bytes | StreamedBody:
        return await staged_body(self._staging, self._threads, file)


def _request(
    method: str,
    write: Write,
    query: Sequence[tuple[str, str | None]] = (),
    headers: Mapping[str, str] | None = None,
    body: bytes | StreamedBody = b"",
) -> OriginRequest:
    key = write.key
    return OriginRequest(
        method, key.bucket, key.key, query, headers or {}, body, purpose=Purpose.FLUSH, slot=write.spec.slot
    )


async def head_of(
    origin: Origin, request: OriginRequest, *, believes_404: bool
) -> Mapping[str, str] | WriteRefused | Lost | None:
    """Return the headers of the object that a HEAD asks for, None if there is none.

    An answer to HEAD has no document by which S3 could be told from a proxy: unless a 404 is believed, ask by GET too.
    """
    async with await origin.send(request) as response:
        if response.status == 404 and believes_404:
            return None
        if response.status == 200 or asks_for_retry(response.status):
            return await _seen(response)
    async with await origin.send(replace(request, method="GET")) as response:
        return await _seen(response)


async def _seen(response: OriginResponse) -> Mapping[str, str] | WriteRefused | Lost | None:
    if response.status == 200:
        return response.headers if response.headers.get("etag") else _untold(200, "an ETag")
    failure = await failure_of(response)
    return None if failure == WriteRefused("NoSuchKey") else failure


def _headed(headers: Mapping[str, str], asked: Moment, answered: Moment) -> Headed:
    """Take ages by the origin's own clock, if its answer has the time (RFC 9110, 6.6.1).

    The origin read that clock while question and answer were on their way, which may take seconds.
    """
    written = parse_http_date(headers.get("last-modified", ""))
    told = parse_http_date(headers.get("date", ""))
    age_seconds = -math.inf if written is None else (asked.at if told is None else told) - written
    length = headers.get("content-length", "")
    size_bytes = int(length) if length.isdecimal() else -1
    moment = asked if told is None else answered
    return Headed(headers["etag"], age_seconds, told is not None, size_bytes, moment)


async def _has_parts(response: OriginResponse, parts: Sequence[Part]) -> bool:
    left = list(reversed(parts))
    md5, missing_bytes = hashlib.md5(usedforsecurity=False), left[-1].file.size_bytes if left else 0
    async for piece in response.stream():
        rest = memoryview(piece)
        while rest:
            if missing_bytes == 0:
                if not left or md5.digest() != left.pop().file.md5 or not left:
                    return False
                md5, missing_bytes = hashlib.md5(usedforsecurity=False), left[-1].file.size_bytes
                continue
            taken = rest[:missing_bytes]
            md5.update(taken)
            missing_bytes -= len(taken)
            rest = rest[len(taken) :]
    while left and missing_bytes == 0:
        if md5.digest() != left.pop().file.md5:
            return False
        md5, missing_bytes = hashlib.md5(usedforsecurity=False), left[-1].file.size_bytes if left else 0
    return not left


def _is_absence_expected(write: Write) -> bool:
    """Return whether it does not matter why nothing lies under the key: the next request is refused, or not."""
    expected = write.expected
    return write.state is State.COMMITTED and not write.deleted and (expected.absent or not expected.known)


def _completion(write: Write) -> Steps[bytes]:
    """Build the document that names the object's parts."""

    def completed(part: Part) -> CompletedPart:
        return CompletedPart(part.number, part.origin_etag or part.file.etag, _declared_checksums(write, part))

    return (yield from complete_multipart_upload_document((yield from each(completed, write.parts))))


def _declared_checksums(write: Write, part: Part) -> Mapping[str, str]:
    """Return the checksums to send with a part. Our MD5 goes with it in any case.

    S3 refuses one that Create has not announced ("Checksum Type mismatch occurred, expected checksum Type: null").
    """
    algorithm = write.spec.headers.get("x-amz-checksum-algorithm", "").lower()
    return {name: value for name, value in part.checksums.items() if name == algorithm}


def _of_body(file: StagedFile, checksums: Mapping[str, str]) -> dict[str, str]:
    return {"content-md5": base64.b64encode(file.md5).decode(), **_checksum_headers(checksums)}


def _checksum_headers(checksums: Mapping[str, str]) -> dict[str, str]:
    return {f"x-amz-checksum-{algorithm}": value for algorithm, value in checksums.items()}


async def _event(asking: Awaitable[Event]) -> Event:
    try:
        return await asking
    except (OriginUnreachable, OriginBodyError, OSError) as error:
        return Lost(str(error), kind_of_error(error))


async def failure_of(response: OriginResponse) -> WriteRefused | Lost:
    """Return what an answer that is no success says.

    Only an S3 error document decides anything: all else comes from a proxy or load balancer, and the bucket is away.
    """
    body = await response.read(ANSWER_SIZE_BYTES_MAX)
    code = error_code_of(body)
    return _refusal(response.status, code, body) if code else _untold(response.status, "an S3 error document")


def _untold(status: int, missing: str) -> Lost:
    return Lost(f"HTTP {status} without {missing}", "slow-down" if status == 429 else "origin-error")


def _refusal(status: int, code: str, document: bytes = b"") -> WriteRefused | Lost:
    """Return an error's meaning: a 5xx, or one behind a 200, leaves the outcome open; NotImplemented does not."""
    kind = kind_of_answer(status, code, document)
    words = (text_of(document, "Message") or "")[:WORDS_MAX]
    if code == _NOT_IMPLEMENTED:
        return WriteRefused(code, kind, words, is_final=True)
    if status >= 500 or code in ("InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout"):
        return Lost(code, kind)
    return WriteRefused(code, kind, words, is_final=is_for_good(status, code))


async def _once(document: bytes) -> AsyncIterator[bytes]:
    yield document
