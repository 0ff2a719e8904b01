"""Requests to Azure Blob, over an origin that signs them, sends them, and tries again (`S3Origin`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from xml.etree.ElementTree import Element

from gateway.core.errors import OriginBodyError, OriginUnreachable, S3Error
from gateway.core.model import ObjectKey
from gateway.core.steps import in_steps
from gateway.origin.client import ERROR_DOCUMENT_BYTES_MAX, Origin, OriginRequest, OriginResponse, StreamedBody
from gateway.origin.stores.azure.blobs import Blob, blob_of, error_of
from gateway.origin.stores.store import Condition, Headers, Incoming
from gateway.s3.checksums import PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.xml import parse_in_steps

_NOTHING = OriginRequest("GET")
ASKED: ContextVar[OriginRequest] = ContextVar("azure_asked", default=_NOTHING)
"""The S3 request that is being answered: its slot and purpose are those of requests to Azure."""

DOCUMENT_BYTES_MAX = 32 * 1024 * 1024
_GATHERED_BYTES = 256 * 1024
"""Bodies up to this length are sent from memory: such a request can be repeated."""

_ON_THREAD_BYTES = 64 * 1024
_KIND = f"{PREFIX}type"

Query = Sequence[tuple[str, str | None]]


class Wire:
    def __init__(self, http: Origin) -> None:
        self.http = http

    async def ask(
        self,
        method: str,
        bucket: str | None,
        key: str | None = None,
        query: Query = (),
        headers: Headers | None = None,
        body: bytes | StreamedBody = b"",
        expected: Sequence[int] = (200, 201, 202, 206),
    ) -> OriginResponse:
        """Return the answer, which the caller must close; S3Error for any status that is not `expected`."""
        asked = ASKED.get()
        request = replace(
            OriginRequest(method, bucket, key, query, headers or {}, body),
            purpose=asked.purpose,
            slot=asked.slot,
            sent_once=asked.sent_once,
            waited_seconds=asked.waited_seconds,
        )
        response = await self.http.send(request)
        if response.status in expected:
            return response
        async with response:
            try:
                document = await response.read(ERROR_DOCUMENT_BYTES_MAX)
            except OriginBodyError:
                document = b""
        of_key = ObjectKey(bucket, key) if bucket is not None and key is not None else None
        raise error_of(response.status, response.headers, document.decode("utf-8", "replace"), of_key)

    async def told(
        self,
        method: str,
        bucket: str | None,
        key: str | None = None,
        query: Query = (),
        headers: Headers | None = None,
        body: bytes | StreamedBody = b"",
    ) -> Headers:
        """Return the headers of a good answer; as `ask`."""
        async with await self.ask(method, bucket, key, query, headers, body) as response:
            return response.headers

    async def read(self, bucket: str | None, key: str | None, query: Query, headers: Headers | None = None) -> bytes:
        async with await self.ask("GET", bucket, key, query, headers) as response:
            try:
                return await response.read(DOCUMENT_BYTES_MAX)
            except OriginBodyError as error:
                raise OriginUnreachable(f"an answer of Azure broke off: {error}") from error

    async def document(
        self, bucket: str | None, key: str | None, query: Query, headers: Headers | None = None
    ) -> Element:
        data = await self.read(bucket, key, query, headers)
        root = await in_steps(parse_in_steps(data, len(data) // 8, frozenset({"Encoded"})))
        if root is None:
            raise OriginUnreachable("Azure has sent a document that is no XML")
        return root

    async def head(self, key: ObjectKey) -> Blob | None:
        try:
            return blob_of(key.key, await self.told("HEAD", key.bucket, key.key))
        except S3Error as error:
            if error.code == "NoSuchKey":
                return None
            raise

    async def native(self, key: ObjectKey, condition: Condition) -> dict[str, str]:
        """Return the header by which Azure judges a condition when it writes; S3Error if it fails now.

        An ETag may be one that Azure does not know: the blob that has it is named by Azure's own.
        """
        if _accepts(condition, None):
            return {} if _accepts(condition, '"any"') else {"if-none-match": "*"}
        blob = await self.head(key)
        condition(blob.found.etag if blob is not None else None)
        if blob is None:
            raise s3_error("NoSuchKey")
        return {"if-match": blob.etag}


def _accepts(condition: Condition, etag: str | None) -> bool:
    try:
        condition(etag)
    except S3Error:
        return False
    return True


async def outgoing(body: Incoming, size_bytes_max: int) -> bytes | StreamedBody:
    """Return the body of a request: what is wrong with it is known before its last byte has left."""
    size_bytes = body.length_bytes
    if size_bytes is None:
        raise s3_error("MissingContentLength")
    if size_bytes > size_bytes_max:
        raise s3_error("EntityTooLarge", MaxSizeAllowed=str(size_bytes_max))
    if size_bytes > _GATHERED_BYTES:
        return StreamedBody(_verified(body), size_bytes)
    return b"".join([bytes(piece) async for piece in _verified(body)])


async def _verified(body: Incoming) -> AsyncIterator[bytes | memoryview]:
    async for chunk in body.chunks:
        if len(chunk) >= _ON_THREAD_BYTES:
            await asyncio.to_thread(body.digests.update, chunk)
        else:
            body.digests.update(chunk)
        yield chunk
    body.digests.verified()


def kept_checksums(body: Incoming, content: bytes | StreamedBody, headers: Headers) -> dict[str, str]:
    """Return the checksums to keep with a blob: those that are known before its bytes are sent."""
    if body.copied is not None:
        kept = dict(body.copied[0].found.checksums)
        return kept if kept.get(_KIND, "FULL_OBJECT") == "FULL_OBJECT" else {}
    if isinstance(content, bytes):
        return whole_checksums(body.digests.verified())
    named = {name: value for name, value in headers.items() if name.startswith(PREFIX)}
    return whole_checksums({name: value for name, value in named.items() if name not in (_KIND, f"{PREFIX}algorithm")})


def whole_checksums(checksums: Headers) -> dict[str, str]:
    """Return them as those of a whole object."""
    return {**checksums, _KIND: "FULL_OBJECT"} if checksums else {}
