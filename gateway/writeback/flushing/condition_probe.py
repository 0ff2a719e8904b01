"""Finds out which conditions a bucket honours, with an object of our own, which it removes afterwards.

    PUT, Complete and DELETE under a condition that fails: 412 honoured, done ignored, 501 refused
    where it is honoured, under one that holds: done honoured, 412 refused

S3 and its like differ in each of the three. Some take a condition and ignore it, and radosgw's PUT compares If-Match
with the ETag without its quotes, so that none ever holds. The key is the same each time, so that a kill leaves at most
one small object, and the next probe removes it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.core.steps import at_once
from gateway.origin.client import Origin, OriginRequest, Purpose
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document, error_code_of, text_of
from gateway.writeback.journal.buckets import Conditions, Honoured

ANSWER_SIZE_BYTES_MAX = 64 * 1024

LEARNED_AGAIN_SECONDS = 7 * 24 * 3600.0
"""Seconds after which a bucket is probed again: origins are upgraded."""

UNKNOWN_AGAIN_SECONDS = 3600.0
"""Seconds to the next probe if the last found out nothing: the gateway may lack the right to write, for instance."""

_NO_ETAG = '"00000000000000000000000000000000"'
_FAILING: Sequence[Mapping[str, str]] = ({"if-none-match": "*"}, {"if-match": _NO_ETAG})
"""Conditions that an existing object does not meet."""

_DONE = (200, 204)

_PART = b"-"

A = TypeVar("A")
B = TypeVar("B")


def probe_key(bucket: str, key_prefix: str, node: str) -> ObjectKey:
    """Return a key under a slot's own prefix, where the gateway may write."""
    return ObjectKey(bucket, f"{key_prefix}.forebay/conditions-{node}")


def is_probe_key(key: ObjectKey, node: str) -> bool:
    return key.key.endswith(f".forebay/conditions-{node}")


def is_due(known: Conditions, now: float) -> bool:
    is_unknown = Honoured.UNKNOWN in (known.put, known.complete, known.delete)
    again_seconds = UNKNOWN_AGAIN_SECONDS if is_unknown else LEARNED_AGAIN_SECONDS
    return not 0 <= now - known.learned_at < again_seconds


class _Away(OriginUnreachable):
    """The origin does not do its work, or something else answers in its stead."""


class Probe:
    """A probe of one bucket."""

    def __init__(self, origin: Origin, key: ObjectKey, slot: str) -> None:
        self._origin = origin
        self._key = key
        self._slot = slot
        self._asked = 0
        """The number of requests, without those that certainly did not reach the origin."""

        self._etag = _NO_ETAG
        """The ETag of the last object made."""

        self._upload_id: str | None = None
        self._has_part = False
        self.has_left = False
        """Its upload is still open: the origin refuses to abort it now."""

        self._version_ids: list[str] = []
        """Versions and deletion markers that it has left in a versioned bucket."""

    @property
    def has_asked(self) -> bool:
        return self._asked > 0

    async def run(self, now: float) -> Conditions | None:
        """Return the findings; None if the origin is not working: then something may be left of the probe."""
        try:
            try:
                return await self._probe(now)
            finally:
                await self.clear()
        except (OriginUnreachable, OriginBodyError):
            return None

    async def clear(self) -> None:
        """Remove the object, its versions and the upload. OriginUnreachable when the object cannot be removed."""
        (status, _), _ = await _both(self._ask("DELETE"), self._abort())
        if status not in (200, 204, 404):
            raise OriginUnreachable(f"an object of the gateway's own cannot be removed: HTTP {status}")
        while self._version_ids:
            await self._ask("DELETE", [("versionId", self._version_ids[-1])])  # a right that the gateway may lack
            self._version_ids.pop()

    async def _probe(self, now: float) -> Conditions:
        # Side by side: what concerns the upload alone changes nothing under the key.
        put, _ = await _both(self._put(), self._begin())
        if put is None:
            return Conditions(learned_at=now)
        complete = await self._complete()
        delete = await self._found("DELETE", [{"if-match": _NO_ETAG}, None])
        if put is Honoured.YES:
            if delete is not Honoured.YES:  # else the object is gone
                await self._ask("DELETE")
            put = _meaning_of_holding(*(await self._ask("PUT", headers={"if-none-match": "*"})))
        return Conditions(put, complete, delete, now)

    async def _put(self) -> Honoured | None:
        """None: the object cannot be made."""
        status, _ = await self._ask("PUT")
        return await self._found("PUT", [*_FAILING, None]) if status == 200 else None

    async def _found(
        self,
        method: str,
        conditions: Sequence[Mapping[str, str] | None],
        query: Sequence[tuple[str, str | None]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Honoured:
        """Return how the origin treats a request under each of these conditions; None: If-Match with the present ETag.

        Stop at the first that is not honoured: a kind of request honours all, or counts as if none.
        """
        for one in conditions:
            condition = {"if-match": self._etag} if one is None else one
            answer = await self._ask(method, query, {**(headers or {}), **condition}, body)
            found = _meaning_of_holding(*answer) if one is None else _meaning_of_failing(*answer)
            if found is not Honoured.YES:
                return found
        return Honoured.YES

    async def _begin(self) -> None:
        status, answer = await self._ask("POST", [("uploads", None)])
        self._upload_id = text_of(answer, "UploadId") if status == 200 else None
        if self._upload_id is not None:
            status, _ = await self._ask("PUT", [("partNumber", "1"), ("uploadId", self._upload_id)], body=_PART)
            self._has_part = status == 200

    async def _complete(self) -> Honoured:
        if self._upload_id is None or not self._has_part:
            return Honoured.UNKNOWN
        etag = f'"{hashlib.md5(_PART, usedforsecurity=False).hexdigest()}"'
        document = at_once(complete_multipart_upload_document([CompletedPart(1, etag, {})]))
        xml = {"content-type": "application/xml"}
        return await self._found("POST", [*_FAILING, None], [("uploadId", self._upload_id)], xml, document)

    async def _abort(self) -> None:
        if self._upload_id is not None:
            status, _ = await self._ask("DELETE", [("uploadId", self._upload_id)])
            self.has_left = status not in (200, 204, 404)  # 404: a Complete was carried out

    async def _ask(
        self,
        method: str,
        query: Sequence[tuple[str, str | None]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> tuple[int, bytes]:
        sums = {}
        if method == "PUT":
            md5 = hashlib.md5(body, usedforsecurity=False)
            sums = {"content-md5": base64.b64encode(md5.digest()).decode()}
        key = self._key
        sent = {**sums, **(headers or {})}
        request = OriginRequest(method, key.bucket, key.key, query, sent, body, Purpose.FLUSH, self._slot)
        self._asked += 1
        try:
            response = await self._origin.send(request)
        except OriginUnreachable as error:
            self._asked -= not error.may_be_done
            raise
        async with response:
            answer = await response.read(ANSWER_SIZE_BYTES_MAX)
        status, code = response.status, error_code_of(answer)
        made = response.headers.get("etag") if method == "PUT" else text_of(answer, "ETag")
        is_deleted = status == 204 or (status == 200 and method == "DELETE" and not answer)
        is_made = made or (made is not None and method == "POST")  # radosgw leaves the ETag of a Complete empty
        is_told = code or is_made or is_deleted or status in (412, 501) or text_of(answer, "UploadId")
        if not is_told or (status >= 500 and status != 501):
            raise _Away(f"HTTP {status}")
        version_id = response.headers.get("x-amz-version-id", "null")
        if version_id != "null" and not any(name == "versionId" for name, _ in query):
            self._version_ids.append(version_id)
        if status == 200 and code is None and not (method == "PUT" and query):  # that would be a part's
            self._etag = made or self._etag
        return status, answer


async def _both(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Run both side by side. If one fails, wait for the other before raising, so that what it made can be removed."""
    one, other = asyncio.ensure_future(first), asyncio.ensure_future(second)
    await asyncio.gather(one, other, return_exceptions=True)
    if one.exception() is not None:
        other.exception()  # retrieved, or asyncio would report it
    return one.result(), other.result()


def _meaning_of_failing(status: int, answer: bytes) -> Honoured:
    """Return the treatment of a condition that does not hold. An error may follow a 200."""
    code = error_code_of(answer)
    if status == 412 or code == "PreconditionFailed":
        return Honoured.YES
    if status == 501 or code == "NotImplemented":
        return Honoured.REFUSED
    return Honoured.IGNORED if status in _DONE and code is None else Honoured.UNKNOWN


def _meaning_of_holding(status: int, answer: bytes) -> Honoured:
    code = error_code_of(answer)
    if status in _DONE and code is None:
        return Honoured.YES
    refused = status in (412, 501) or code in ("PreconditionFailed", "NotImplemented")
    return Honoured.REFUSED if refused else Honoured.UNKNOWN
