"""Carries out the instructions of state.py as requests to the origin, and returns its answers as events.

Only an S3 error document decides anything: all else comes from a proxy or load balancer, and the bucket is away.

Bytes are verified on their way out: a damaged chunk raises BufferDamaged, and leaves the origin with an unfinished
request, never with a wrong object. Every body has a `Content-MD5`, so that the origin checks the rest of the way.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import ParamSpec, TypeVar

from gateway.core.clock import Clock, Moment
from gateway.core.errors import CredentialsUnavailable, OriginBodyError, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.core.steps import Steps, each, in_steps
from gateway.origin.client import (
    OWN_CLOCK_REFUSED,
    OWN_KEY_REFUSED,
    Origin,
    OriginRequest,
    OriginResponse,
    Purpose,
    StreamedBody,
)
from gateway.origin.retry import asks_for_retry
from gateway.s3.headers import parse_http_date, quote, unquote
from gateway.s3.listings import UPLOADS_SIZE_BYTES_MAX, UploadsPage, parse_uploads_page
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document, error_code_of, etag_of_result, text_of
from gateway.telemetry.metrics import FailureKind
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

P = ParamSpec("P")
R = TypeVar("R")

ANSWER_SIZE_BYTES_MAX = 64 * 1024

WORDS_MAX = 300
"""Characters of an origin's message about a refusal."""

_OF_CODES: dict[str, FailureKind] = {
    "NoSuchBucket": "no-bucket",
    "SlowDown": "slow-down",
    "ServiceUnavailable": "slow-down",
    "PreconditionFailed": "changed",
    "ConditionalRequestConflict": "changed",
    "OperationAborted": "changed",
    "InternalError": "origin-error",
    "RequestTimeout": "origin-error",
}

_FINAL_STATUSES = frozenset({400, 405, 409, 413, 414, 501})

_MAY_PASS = frozenset(
    [
        "AuthorizationHeaderMalformed",
        "BadDigest",
        "ConditionalRequestConflict",
        "ExpiredToken",
        "IllegalLocationConstraintException",
        "IncompleteBody",
        "InvalidToken",
        "OperationAborted",
        "RequestTimeout",
        "TokenRefreshRequired",
        "XAmzContentSHA256Mismatch",
    ]
)
"""Codes that S3 gives such a status, but that are not about the write: the next attempt may succeed."""


# The meaning of answers


def answered(ask: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R | Lost]]:
    """Return Lost if the origin does not answer, or the disk does not give the bytes to send."""

    @wraps(ask)
    async def asked(*arguments: P.args, **keywords: P.kwargs) -> R | Lost:
        try:
            return await ask(*arguments, **keywords)
        except (OriginUnreachable, OriginBodyError, OSError) as error:
            return Lost(str(error), kind_of_error(error))

    return asked


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
            return await found_in(response)
    async with await origin.send(replace(request, method="GET")) as response:
        return await found_in(response)


async def found_in(response: OriginResponse) -> Mapping[str, str] | WriteRefused | Lost | None:
    """Return the headers of the object that an answer to HEAD or GET shows, None if there is none."""
    if response.status == 200:
        return response.headers if response.headers.get("etag") else untold(200, "an ETag")
    failure = await failure_of(response)
    return None if failure == WriteRefused("NoSuchKey") else failure


@answered
async def first_key(
    origin: Origin, bucket: str, prefix: str, slot: str = "default", purpose: Purpose = Purpose.FLUSH
) -> str | WriteRefused | Lost | None:
    """Return the first key with this prefix in S3's order, None if there is none."""
    query = [("list-type", "2"), ("prefix", prefix), ("max-keys", "1")]
    async with await origin.send(OriginRequest("GET", bucket, None, query, purpose=purpose, slot=slot)) as response:
        if response.status != 200:
            return await failure_of(response)
        return text_of(await response.read(ANSWER_SIZE_BYTES_MAX), "Key")


async def failure_of(response: OriginResponse) -> WriteRefused | Lost:
    """Return what an answer that is no success says."""
    body = await response.read(ANSWER_SIZE_BYTES_MAX)
    code = error_code_of(body)
    return refusal_of(response.status, code, body) if code else untold(response.status, "an S3 error document")


def untold(status: int, missing: str) -> Lost:
    return Lost(f"HTTP {status} without {missing}", "slow-down" if status == 429 else "origin-error")


def refusal_of(status: int, code: str, document: bytes = b"") -> WriteRefused | Lost:
    """Return an error's meaning: a 5xx, or one behind a 200, leaves the outcome open; NotImplemented does not.

    A refusal is final if a person must change something. One without a code (`HTTP 400`) may come from a proxy.
    """
    kind = _kind_of_answer(status, code, document)
    words = (text_of(document, "Message") or "")[:WORDS_MAX]
    if code == "NotImplemented":
        return WriteRefused(code, kind, words, is_final=True)
    if status >= 500 or code in ("InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout"):
        return Lost(code, kind)
    is_lasting = status in _FINAL_STATUSES and code not in _MAY_PASS and not code.startswith("KMS.")
    return WriteRefused(code, kind, words, is_final=is_lasting or code == "NoSuchBucket")


def kind_of_error(error: Exception) -> FailureKind:
    """Name the error that kept the origin from answering; an OSError is of this node's own disk."""
    match error:
        case CredentialsUnavailable():
            return "credentials"
        case OriginUnreachable() | OriginBodyError():
            return "unreachable"
        case OSError():
            return "disk"
    return "other"


def _kind_of_answer(status: int, code: str, document: bytes) -> FailureKind:
    """Name an answer that is no success. A HEAD has no document, so any 403 to it counts as a refused key."""
    if status in (401, 403):
        if OWN_CLOCK_REFUSED.encode() in document:
            return "clock"
        return "credentials" if OWN_KEY_REFUSED.encode() in document else "refused"
    if code in _OF_CODES:
        return _OF_CODES[code]
    if status == 429:
        return "slow-down"
    return "origin-error" if status >= 500 else "other"


# Requests


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

    @answered
    async def open_uploads(self, key: ObjectKey) -> OpenUploads | WriteRefused | Lost:
        found, asked = list[OpenUpload](), Moment.of(self._clock)
        told: float | None = None
        following: tuple[str, str] | None = ("", "")
        while following is not None:
            found_page = await self._page_of_uploads(key, following)
            if isinstance(found_page, WriteRefused | Lost):
                return found_page
            page, told = found_page
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

    @answered
    async def head(self, write: Write) -> Event:
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

    @answered
    async def begin(self, write: Write) -> str | WriteRefused | Lost:
        """Open an upload with all that Create fixed; return its id."""
        request = _request("POST", write, [("uploads", None)], write.spec.headers)
        async with await self._origin.send(request) as response:
            if response.status != 200:
                return await failure_of(response)
            origin_upload_id = text_of(await response.read(ANSWER_SIZE_BYTES_MAX), "UploadId")
        return origin_upload_id or untold(200, "an upload id")

    async def send_part(self, write: Write, send: SendPart) -> PartSent | PartFailed:
        event = await self._send_part(write, send)
        return event if isinstance(event, PartSent) else PartFailed(send.origin_upload_id, send.part.number, event)

    @answered
    async def _send_part(self, write: Write, send: SendPart) -> PartSent | WriteRefused | Lost:
        query = [("partNumber", str(send.part.number)), ("uploadId", send.origin_upload_id)]
        headers = _of_body(send.part.file, _declared_checksums(write, send.part))
        request = _request("PUT", write, query, headers, await self._body(send.part.file))
        async with await self._origin.send(request) as response:
            if response.status != 200:
                return await failure_of(response)
            etag = response.headers.get("etag")
        return PartSent(send.origin_upload_id, send.part.number, etag) if etag else untold(200, "an ETag")

    @answered
    async def finish(self, write: Write, finish: Finish) -> Event:
        """Make the object visible, if the key is as expected."""
        conditions: dict[str, str] = {}
        if finish.is_conditional:
            conditions = {"if-none-match": "*"} if finish.expected is None else {"if-match": quote(finish.expected)}
        return await (self._complete if write.multipart else self._put)(write, conditions)

    async def _put(self, write: Write, conditions: Mapping[str, str]) -> Event:
        part = write.parts[0]
        headers = {**write.spec.headers, **_of_body(part.file, part.checksums), **conditions}
        request = _request("PUT", write, (), headers, await self._body(part.file))
        async with await self._origin.send(replace(request, sent_once=True)) as response:  # the caller looks first
            if response.status != 200:
                return await failure_of(response)
            return Finished(response.headers.get("etag") or None)

    @answered
    async def complete(self, write: Write) -> Event:
        """Complete an upload under its client's own conditions (`if-match`, `if-none-match`)."""
        return await self._complete(write, write.conditions)

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
            return refusal_of(200, code, answer)
        return untold(200, "an ETag") if text_of(answer, "ETag") is None else Finished(etag_of_result(answer))

    @answered
    async def delete(self, write: Write, delete: Delete) -> Event:
        """Delete the key, if it is as expected."""
        conditions = {"if-match": quote(delete.expected)} if delete.is_conditional and delete.expected else {}
        request = replace(_request("DELETE", write, (), conditions), sent_once=True)
        async with await self._origin.send(request) as response:
            if response.status == 204:
                return Finished(None)
            found: Mapping[str, str] | WriteRefused | Lost | None = await found_in(response)
        if response.status == 200:  # S3 answers 204
            found = await head_of(self._origin, _request("HEAD", write), believes_404=False)
        if found is None:
            return Finished(None)
        return (
            found if isinstance(found, WriteRefused | Lost) else Lost("the origin has not deleted it", "origin-error")
        )

    @answered
    async def compare(self, write: Write, etag: str) -> Event:
        """Read the origin's version back, and compare it with our bytes, part by part, by their MD5s."""
        async with await self._origin.send(_request("GET", write, (), {"if-match": quote(etag)})) as response:
            found = await found_in(response)
            if found is None or found == WriteRefused("PreconditionFailed"):
                return Compared(None)
            if isinstance(found, WriteRefused | Lost):
                return found
            is_it = unquote(found["etag"]) == unquote(etag)
            return Compared(await _has_parts(response, write.parts) if is_it else None)

    @answered
    async def find(self, write: Write) -> Event:
        query = [("uploadId", write.origin_upload_id or ""), ("max-parts", "1")]
        async with await self._origin.send(_request("GET", write, query)) as response:
            if response.status == 200:
                answer = await response.read(ANSWER_SIZE_BYTES_MAX)
                has_parts = text_of(answer, "PartNumber") is not None
                is_list = text_of(answer, "UploadId") is not None
                return FoundObject(True, has_parts) if is_list else untold(200, "a list of parts")
            failure = await failure_of(response)
        return FoundObject(False) if failure == WriteRefused("NoSuchUpload") else failure

    @answered
    async def abort(self, write: Write) -> Event:
        query = [("uploadId", write.origin_upload_id or "")]
        async with await self._origin.send(_request("DELETE", write, query)) as response:
            if response.status == 204:
                return Aborted()
            failure = await failure_of(response)
        if response.status == 200 and await self.find(write) == FoundObject(False):  # S3 answers 204
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
    md5, at, done_bytes = hashlib.md5(usedforsecurity=False), 0, 0
    async for piece in response.stream():
        rest = memoryview(piece)
        while rest:
            if at == len(parts):
                return False
            file = parts[at].file
            taken = rest[: file.size_bytes - done_bytes]
            md5.update(taken)
            done_bytes += len(taken)
            rest = rest[len(taken) :]
            if done_bytes == file.size_bytes:
                if md5.digest() != file.md5:
                    return False
                md5, at, done_bytes = hashlib.md5(usedforsecurity=False), at + 1, 0
    return done_bytes == 0 and not any(part.file.size_bytes for part in parts[at:])


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
    sums = {f"x-amz-checksum-{algorithm}": value for algorithm, value in checksums.items()}
    return {"content-md5": base64.b64encode(file.md5).decode(), **sums}


async def _once(document: bytes) -> AsyncIterator[bytes]:
    yield document
