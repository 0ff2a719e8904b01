"""Which conditions does a bucket honour? Found out with an object of our own, which is gone afterwards.

    PUT under a condition that fails, Complete under one, DELETE under one: 412 honoured, done ignored, 501 refused

S3 and its like differ in each of the three, and some take a condition and ignore it. The key is the same each time, so
that a kill leaves one small object at most, and the next probe removes it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence

from gateway.errors import OriginBodyError, OriginUnreachable
from gateway.objects import ObjectKey
from gateway.origin.client import Origin, OriginRequest, Purpose
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document, error_code_of, text_of
from gateway.steps import at_once
from gateway.writeback.journal.records import Conditions, Honoured

ANSWER_SIZE_BYTES_MAX = 64 * 1024

LEARNED_AGAIN_SECONDS = 7 * 24 * 3600.0
"""After so long a bucket is probed again: origins are upgraded."""

UNKNOWN_AGAIN_SECONDS = 3600.0
"""The same where the probe told nothing: without the right to write there, for instance."""

_NO_ETAG = '"00000000000000000000000000000000"'
_FAILING: Sequence[Mapping[str, str]] = ({"if-none-match": "*"}, {"if-match": _NO_ETAG})
"""Conditions that an object that is there does not meet."""


def probe_key(bucket: str, key_prefix: str, node: str) -> ObjectKey:
    """Under a slot's own prefix, where the gateway may write."""
    return ObjectKey(bucket, f"{key_prefix}.forebay/conditions-{node}")


def is_probe_key(key: ObjectKey, node: str) -> bool:
    """Whether a key is one of `probe_key`'s."""
    return key.key.endswith(f".forebay/conditions-{node}")


def is_due(known: Conditions, now: float) -> bool:
    """Whether a bucket is to be asked (again)."""
    is_unknown = Honoured.UNKNOWN in (known.put, known.complete, known.delete)
    again_seconds = UNKNOWN_AGAIN_SECONDS if is_unknown else LEARNED_AGAIN_SECONDS
    return not 0 <= now - known.learned_at < again_seconds


class _Away(Exception):
    """The origin does not do its work."""


class Probe:
    """Of one bucket."""

    def __init__(self, origin: Origin, key: ObjectKey, slot: str) -> None:
        self._origin = origin
        self._key = key
        self._slot = slot
        self.has_asked = False
        """The origin may have carried out something."""
        self._version_ids: list[str] = []
        """What it has left in a bucket with versions, deletions among them."""

    async def run(self, now: float) -> Conditions | None:
        """What was found out; None where the origin does not do its work: then something may be left of the probe."""
        try:
            try:
                return await self._probe(now)
            finally:
                await self.clear()
        except (OriginUnreachable, OriginBodyError, _Away):
            return None

    async def clear(self) -> None:
        """Remove the object, and its versions. OriginUnreachable where the object cannot be removed."""
        status, _ = await self._ask("DELETE")
        if status not in (200, 204, 404):
            raise OriginUnreachable(f"an object of the gateway's own cannot be removed: HTTP {status}")
        while self._version_ids:
            await self._ask("DELETE", [("versionId", self._version_ids[-1])])  # a right that the gateway may lack
            self._version_ids.pop()

    async def _probe(self, now: float) -> Conditions:
        status, _ = await self._ask("PUT")
        if status != 200:
            return Conditions(learned_at=now)
        put = await self._all("PUT")
        complete = await self._complete()
        delete = Honoured.UNKNOWN
        if (await self._ask("PUT"))[0] == 200:
            delete = _meaning(*(await self._ask("DELETE", headers={"if-match": _NO_ETAG})), done=(200, 204))
        return Conditions(put, complete, delete, now)

    async def _all(self, method: str) -> Honoured:
        return _worst([_meaning(*(await self._ask(method, headers=one)), done=(200,)) for one in _FAILING])

    async def _complete(self) -> Honoured:
        found = []
        for one in _FAILING:
            status, answer = await self._ask("POST", [("uploads", None)])
            upload_id = text_of(answer, "UploadId") if status == 200 else None
            if upload_id is None:
                return Honoured.UNKNOWN
            try:
                found.append(await self._complete_under(upload_id, one))
            finally:
                await self._ask("DELETE", [("uploadId", upload_id)])
        return _worst(found)

    async def _complete_under(self, upload_id: str, condition: Mapping[str, str]) -> Honoured:
        part = b"-"
        status, _ = await self._ask("PUT", [("partNumber", "1"), ("uploadId", upload_id)], body=part)
        if status != 200:
            return Honoured.UNKNOWN
        etag = f'"{hashlib.md5(part, usedforsecurity=False).hexdigest()}"'
        document = at_once(complete_multipart_upload_document([CompletedPart(1, etag, {})]))
        headers = {**condition, "content-type": "application/xml"}
        return _meaning(*(await self._ask("POST", [("uploadId", upload_id)], headers, document)), done=(200,))

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
        had_asked, self.has_asked = self.has_asked, True
        try:
            response = await self._origin.send(request)
        except OriginUnreachable as error:
            self.has_asked = had_asked or error.may_be_done
            raise
        async with response:
            answer = await response.read(ANSWER_SIZE_BYTES_MAX)
        if response.status >= 500 and response.status != 501:
            raise _Away(f"HTTP {response.status}")
        version_id = response.headers.get("x-amz-version-id", "null")
        if version_id != "null" and not any(name == "versionId" for name, _ in query):
            self._version_ids.append(version_id)
        return response.status, answer


def _meaning(status: int, answer: bytes, *, done: Sequence[int]) -> Honoured:
    """What an origin makes of a condition that does not hold. An error may come behind a 200."""
    code = error_code_of(answer)
    if status == 412 or code == "PreconditionFailed":
        return Honoured.YES
    if status == 501 or code == "NotImplemented":
        return Honoured.REFUSED
    return Honoured.IGNORED if status in done and code is None else Honoured.UNKNOWN


def _worst(found: Sequence[Honoured]) -> Honoured:
    """What holds of a kind of request only where it holds of each condition."""
    for one in (Honoured.REFUSED, Honoured.IGNORED, Honoured.UNKNOWN):
        if one in found:
            return one
    return Honoured.YES
