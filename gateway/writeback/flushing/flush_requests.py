"""The flush's instructions as requests to the origin, and its answers as events (upload_state.py).

Bytes are verified on their way out: a chunk that is not what was acknowledged is BufferDamaged, and leaves the origin
with an unfinished request, never with a wrong object. `Content-MD5` goes with every body, so that the origin checks the
rest of the way.
"""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence

from gateway.errors import BufferDamaged, OriginBodyError, OriginUnreachable
from gateway.objects import ObjectKey
from gateway.origin.client import Origin, OriginRequest, OriginResponse, Purpose, StreamedBody
from gateway.s3.headers import parse_http_date, quote
from gateway.s3.results import etag_of_result
from gateway.s3.upload_list import UPLOADS_SIZE_BYTES_MAX, ListedUpload, UploadsPage, parse_uploads_page
from gateway.s3.xml import complete_multipart_upload_document, error_code_of, text_of
from gateway.writeback.files.staged_file import StagedFile, Staging, read_verified
from gateway.writeback.flushing.upload_state import (
    Begun,
    Event,
    Finish,
    Finished,
    Headed,
    Lost,
    PartFailed,
    PartSent,
    Refused,
    SendPart,
)
from gateway.writeback.journal.records import Part, PendingObject, State
from gateway.writeback.threads import BufferThreads

ANSWER_SIZE_BYTES_MAX = 64 * 1024

PIECE_BYTES = 1024 * 1024
"""Read, verified and sent at once."""

IN_MEMORY_BYTES_MAX = 256 * 1024
"""Bodies up to this length are sent from memory, and so again by the origin's own retries."""

_NOT_IMPLEMENTED = "NotImplemented"


class FlushRequests:
    """Carries out instructions at the origin."""

    def __init__(self, origin: Origin, staging: Staging, threads: BufferThreads) -> None:
        self._origin = origin
        self._staging = staging
        self._threads = threads
        self._without_conditions = False

    async def head(self, pending: PendingObject) -> Event:
        """What lies under the key."""
        return await _event(self._head(pending))

    async def begin(self, pending: PendingObject) -> Event:
        """Open an upload with all that Create fixed."""
        return await _event(self._begin(pending))

    async def send_part(self, pending: PendingObject, send: SendPart) -> Event:
        """Send one part."""
        event = await _event(self._send_part(pending, send))
        if isinstance(event, Lost):
            return PartFailed(send.origin_upload_id, send.part.number, event.reason)
        if isinstance(event, Refused):
            return PartFailed(send.origin_upload_id, send.part.number, event.code, event.code)
        return event

    async def finish(self, pending: PendingObject, finish: Finish) -> Event:
        """Make it visible, if the key is as expected.

        An origin that knows no conditions says so; then what was seen under the key a moment ago has to do.
        """
        send = self._complete if pending.multipart else self._put
        event = await _event(send(pending, self._conditions(finish)))
        if isinstance(event, Refused) and event.code == _NOT_IMPLEMENTED and not self._without_conditions:
            event = await _event(send(pending, {}))
            self._without_conditions = isinstance(event, Finished)  # else something else of this write is unknown there
        return event

    async def complete(self, pending: PendingObject, conditions: Mapping[str, str]) -> Event:
        """CompleteMultipartUpload under the client's own conditions (`if-match`, `if-none-match`)."""
        return await _event(self._complete(pending, conditions))

    async def delete(self, pending: PendingObject) -> Event:
        """Delete the key, whatever lies there."""
        return await _event(self._delete(pending))

    async def open_uploads(self, key: ObjectKey) -> Sequence[ListedUpload] | None:
        """What the origin has of open uploads under a key; None when it does not say."""
        try:
            return await self._open_uploads(key)
        except (OriginUnreachable, OriginBodyError):
            return None

    async def has_upload(self, pending: PendingObject) -> bool | None:
        """Whether the origin's upload for it is open there; None when the origin does not say."""
        query = [("uploadId", pending.origin_upload_id or ""), ("max-parts", "1")]
        try:
            async with await self._origin.send(_request("GET", pending, query)) as response:
                answer = await response.read(ANSWER_SIZE_BYTES_MAX)
        except (OriginUnreachable, OriginBodyError):
            return None
        if response.status == 404 and error_code_of(answer) == "NoSuchUpload":
            return False
        return True if response.status == 200 else None

    async def abort(self, key: ObjectKey, origin_upload_id: str) -> bool:
        """Have the origin forget an upload; whether it has."""
        request = OriginRequest("DELETE", key.bucket, key.key, [("uploadId", origin_upload_id)], purpose=Purpose.FLUSH)
        try:
            async with await self._origin.send(request) as response:
                return response.status in (200, 204, 404)
        except OriginUnreachable:
            return False

    async def _open_uploads(self, key: ObjectKey) -> Sequence[ListedUpload] | None:
        found: list[ListedUpload] = []
        following: tuple[str, str] | None = ("", "")
        while following is not None:
            page = await self._page_of_uploads(key, following)
            if page is None:
                return None
            found += [one for one in page.uploads if one.key == key.key]
            # In the order of keys: those that the key is only the beginning of come behind it.
            following = None if any(one.key != key.key for one in page.uploads) else page.following
        return found

    async def _page_of_uploads(self, key: ObjectKey, following: tuple[str, str]) -> UploadsPage | None:
        markers = zip(("key-marker", "upload-id-marker"), following, strict=True)
        query = [("uploads", ""), ("prefix", key.key), ("encoding-type", "url"), *(one for one in markers if one[1])]
        request = OriginRequest("GET", key.bucket, None, query, purpose=Purpose.FLUSH)
        async with await self._origin.send(request) as response:
            if response.status == 404:
                return UploadsPage([], [], None)
            return parse_uploads_page(await response.read(UPLOADS_SIZE_BYTES_MAX)) if response.status == 200 else None

    def _conditions(self, finish: Finish) -> Mapping[str, str]:
        if self._without_conditions:
            return {}
        return {"if-none-match": "*"} if finish.expected is None else {"if-match": quote(finish.expected)}

    async def _head(self, pending: PendingObject) -> Event:
        async with await self._origin.send(_request("HEAD", pending)) as response:
            if response.status == 200:
                written = parse_http_date(response.headers.get("last-modified", ""))
                return Headed(response.headers.get("etag", ""), math.inf if written is None else written)
            if response.status != 404:
                return await _failure(response)
        if not _is_absence_expected(pending) and await self._is_bucket_gone(pending):
            return Refused("NoSuchBucket")
        return Headed(None)

    async def _is_bucket_gone(self, pending: PendingObject) -> bool:
        """A HEAD of a key does not tell that from an object that somebody has deleted: it has no document."""
        request = OriginRequest("HEAD", pending.key.bucket, None, purpose=Purpose.FLUSH, slot=pending.fixed.slot)
        async with await self._origin.send(request) as response:
            return response.status == 404

    async def _begin(self, pending: PendingObject) -> Event:
        request = _request("POST", pending, [("uploads", None)], pending.fixed.headers)
        async with await self._origin.send(request) as response:
            if response.status != 200:
                return await _failure(response)
            origin_upload_id = text_of(await response.read(ANSWER_SIZE_BYTES_MAX), "UploadId")
        return Begun(origin_upload_id) if origin_upload_id else Lost("the origin gave no upload id")

    async def _send_part(self, pending: PendingObject, send: SendPart) -> Event:
        query = [("partNumber", str(send.part.number)), ("uploadId", send.origin_upload_id)]
        headers = _of_body(send.part.file, _declared_checksums(pending, send.part))
        request = _request("PUT", pending, query, headers, await self._body(send.part.file))
        async with await self._origin.send(request) as response:
            if response.status != 200:
                return await _failure(response)
            return PartSent(send.origin_upload_id, send.part.number, response.headers.get("etag", ""))

    async def _put(self, pending: PendingObject, conditions: Mapping[str, str]) -> Event:
        part = pending.parts[0]
        headers = {**pending.fixed.headers, **_of_body(part.file, part.checksums), **conditions}
        async with await self._origin.send(
            _request("PUT", pending, (), headers, await self._body(part.file))
        ) as response:
            if response.status != 200:
                return await _failure(response)
            return Finished(response.headers.get("etag") or None)

    async def _complete(self, pending: PendingObject, conditions: Mapping[str, str]) -> Event:
        document = complete_multipart_upload_document(
            [
                (part.number, part.origin_etag or part.file.etag, _declared_checksums(pending, part))
                for part in pending.parts
            ]
        )
        headers = {**conditions, "content-type": "application/xml"}
        query = [("uploadId", pending.origin_upload_id or "")]
        body = StreamedBody(_once(document), len(document))  # once: a repeated Complete is answered NoSuchUpload
        async with await self._origin.send(_request("POST", pending, query, headers, body)) as response:
            if response.status != 200:
                return await _failure(response)
            answer = await response.read(ANSWER_SIZE_BYTES_MAX)
        code = error_code_of(answer)
        if code is not None:
            return _refusal(200, code)
        if text_of(answer, "ETag") is None:
            return Lost("the origin's answer to Complete says nothing")
        return Finished(etag_of_result(answer))

    async def _delete(self, pending: PendingObject) -> Event:
        async with await self._origin.send(_request("DELETE", pending)) as response:
            if response.status in (200, 204):
                return Finished(None)
            failure = await _failure(response)
        return Finished(None) if failure == Refused("NoSuchKey") else failure

    async def _body(self, file: StagedFile) -> bytes | StreamedBody:
        if file.size_bytes > IN_MEMORY_BYTES_MAX:
            return StreamedBody(self._pieces(file), file.size_bytes)
        return b"".join([bytes(piece) async for piece in self._pieces(file)])

    async def _pieces(self, file: StagedFile) -> AsyncIterator[bytes | memoryview]:
        try:
            opened = await self._threads.open(self._staging.open, file)
        except FileNotFoundError as error:
            raise BufferDamaged(f"staged file {file.name} is gone") from error
        with opened:
            for position in range(0, file.size_bytes, PIECE_BYTES):
                count = min(PIECE_BYTES, file.size_bytes - position)
                yield await self._threads.run_holding(opened, read_verified, file, position, count)


def _request(
    method: str,
    pending: PendingObject,
    query: Sequence[tuple[str, str | None]] = (),
    headers: Mapping[str, str] | None = None,
    body: bytes | StreamedBody = b"",
) -> OriginRequest:
    key = pending.key
    return OriginRequest(
        method, key.bucket, key.key, query, headers or {}, body, purpose=Purpose.FLUSH, slot=pending.fixed.slot
    )


def _is_absence_expected(pending: PendingObject) -> bool:
    """Whether it makes no difference why nothing lies under the key: then what is sent next is refused, or not."""
    base = pending.base
    return pending.state is State.WAITING and (base.absent or not base.known)


def _declared_checksums(pending: PendingObject, part: Part) -> Mapping[str, str]:
    """What the origin is told of a part: S3 refuses a checksum that Create has not announced ("Checksum Type mismatch
    occurred, expected checksum Type: null"). Our MD5 goes with it in any case.
    """
    algorithm = pending.fixed.headers.get("x-amz-checksum-algorithm", "").lower()
    return {name: value for name, value in part.checksums.items() if name == algorithm}


def _of_body(file: StagedFile, checksums: Mapping[str, str]) -> dict[str, str]:
    """What is said of a body's bytes: our MD5, and what the client has promised."""
    return {"content-md5": base64.b64encode(file.md5).decode(), **_checksum_headers(checksums)}


def _checksum_headers(checksums: Mapping[str, str]) -> dict[str, str]:
    return {f"x-amz-checksum-{algorithm}": value for algorithm, value in checksums.items()}


async def _event(asking: Awaitable[Event]) -> Event:
    try:
        return await asking
    except (OriginUnreachable, OriginBodyError, OSError) as error:
        return Lost(str(error))


async def _failure(response: OriginResponse) -> Event:
    body = await response.read(ANSWER_SIZE_BYTES_MAX)
    return _refusal(response.status, error_code_of(body) or f"HTTP {response.status}")


def _refusal(status: int, code: str) -> Event:
    """A 5xx leaves open what has been done, and so does an error that comes behind a 200; what an origin has not
    implemented it has not done.
    """
    if code == _NOT_IMPLEMENTED:
        return Refused(code)
    if status >= 500 or code in ("InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout"):
        return Lost(code)
    return Refused(code)


async def _once(document: bytes) -> AsyncIterator[bytes]:
    yield document
