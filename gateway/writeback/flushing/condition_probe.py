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
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferUnavailable, OriginBodyError, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.core.steps import at_once
from gateway.origin.client import Origin, OriginRequest, Purpose
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document, error_code_of, text_of
from gateway.writeback.flushing.requests import ANSWER_SIZE_BYTES_MAX, Requests, answered, refusal_of
from gateway.writeback.flushing.state import Aborted, Event, Lost, WriteRefused
from gateway.writeback.journal.buckets import BucketCapabilities, Conditions, Honoured
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import CreateAttempt, Write

LEARNED_AGAIN_SECONDS = 7 * 24 * 3600.0
"""Seconds after which a bucket is probed again: origins are upgraded."""

UNKNOWN_AGAIN_SECONDS = 3600.0
"""Seconds to the next probe if the last found out nothing: the gateway may lack the right to write, for instance."""

_NO_ETAG = '"00000000000000000000000000000000"'
_FAILING: Sequence[Mapping[str, str]] = ({"if-none-match": "*"}, {"if-match": _NO_ETAG})
"""Conditions that an existing object does not meet."""

_CREATING = frozenset({Honoured.YES, Honoured.CREATES})

_PART = b"-"

A = TypeVar("A")
B = TypeVar("B")

_log = structlog.get_logger("forebay.writeback")


def probe_key(bucket: str, key_prefix: str, node: str) -> ObjectKey:
    """Return a key under a slot's own prefix, where the gateway may write."""
    return ObjectKey(bucket, f"{key_prefix}.forebay/conditions-{node}")


def is_probe_key(key: ObjectKey, node: str) -> bool:
    return key.key.endswith(f".forebay/conditions-{node}")


def is_due(known: Conditions, now: float) -> bool:
    is_unknown = Honoured.UNKNOWN in (known.put, known.complete, known.delete)
    again_seconds = UNKNOWN_AGAIN_SECONDS if is_unknown else LEARNED_AGAIN_SECONDS
    return not 0 <= now - known.learned_at < again_seconds


class ConditionProbes:
    """Probes buckets when that is due, one probe of a bucket at a time."""

    def __init__(self, journal: Journal, requests: Requests, clock: Clock) -> None:
        self._journal = journal
        self._requests = requests
        self._clock = clock
        self._under_way: dict[str, asyncio.Task[Conditions]] = {}
        self._keys = set[ObjectKey]()
        """Keys of probes, or of their remains, that a task is working on."""

    @property
    def tasks(self) -> Sequence[asyncio.Task[Conditions]]:
        return list(self._under_way.values())

    async def conditions(self, write: Write, key_prefix: str) -> Conditions:
        """Return the known conditions of a bucket; probe it before its first write, and again while others go on."""
        bucket = write.key.bucket
        capabilities = self._journal.read(lambda tx: tx.buckets.capabilities(bucket))
        if capabilities is None or not write.is_acknowledged:
            return Conditions()
        if not is_due(capabilities.conditions, self._clock.now()):
            return capabilities.conditions
        probing = self._under_way.get(bucket)
        if probing is None:
            node, _ = self._journal.read(lambda tx: tx.node())
            key = probe_key(bucket, key_prefix, node)
            probing = asyncio.create_task(self._probe(key, write.spec.slot, capabilities))
            self._under_way[bucket] = probing
            probing.add_done_callback(partial(self._ended, bucket))
        return capabilities.conditions if capabilities.conditions.learned_at else await asyncio.shield(probing)

    def _ended(self, bucket: str, probing: asyncio.Task[Conditions]) -> None:
        del self._under_way[bucket]
        if not probing.cancelled() and (error := probing.exception()) is not None:
            _log.warning(
                "Forebay could not find out which conditions a bucket honours", bucket=bucket, reason=repr(error)
            )

    async def _probe(self, key: ObjectKey, slot: str, capabilities: BucketCapabilities) -> Conditions:
        if key in self._keys:
            return capabilities.conditions  # the remains of a probe are just being removed
        self._keys.add(key)
        try:
            found = await self._probed(key, slot)
        finally:
            self._keys.discard(key)
        if found is None:
            return capabilities.conditions
        found = replace(found, learned_at=self._clock.now())  # the clock may have been set meanwhile
        await self._journal.change(lambda tx: tx.buckets.amend(key.bucket, conditions=found))
        _log.info(
            "Forebay has found out which conditions a bucket honours",
            bucket=key.bucket,
            put=found.put.name.lower(),
            complete=found.complete.name.lower(),
            delete=found.delete.name.lower(),
        )
        return found

    async def _probed(self, key: ObjectKey, slot: str) -> Conditions | None:
        """Enter the probe first, so that the remains of a killed one are removed. All failed ones share a row."""
        rows = self._journal.read(lambda tx: tx.uploads.asked(key))
        asked = CreateAttempt(self._journal.worker, Moment.of(self._clock))
        row_id = rows[0].id if rows else await self._journal.change(lambda tx: tx.uploads.ask(key, slot, asked))
        found, probe = None, Probe(self._requests.origin, key, slot)
        try:
            found = await probe.run(self._clock.now())
        finally:
            with suppress(BufferUnavailable):  # the next start marks it instead
                if probe.has_left or (found is None and probe.has_asked):
                    await self._journal.change(lambda tx: tx.uploads.mark_in_doubt(row_id, Moment.of(self._clock)))
                elif not rows:  # else an earlier probe may have left something
                    await self._journal.change(lambda tx: tx.uploads.forget(row_id))
        return found

    async def clear(self, write: Write) -> Event | None:
        """Remove what a killed probe has left. None if the write is about no probe."""
        node, _ = self._journal.read(lambda tx: tx.node())
        if not is_probe_key(write.key, node):
            return None
        if write.key in self._keys:
            return Lost("the bucket is just being probed")
        self._keys.add(write.key)
        try:
            return await self._cleared(write)
        finally:
            self._keys.discard(write.key)

    @answered
    async def _cleared(self, write: Write) -> Event:
        await Probe(self._requests.origin, write.key, write.spec.slot).clear()
        listed = await self._requests.open_uploads(write.key)
        if isinstance(listed, WriteRefused | Lost):
            return listed
        for one in listed.uploads:
            aborted = await self._requests.abort(replace(write, origin_upload_id=one.upload_id))
            if not isinstance(aborted, Aborted):
                return aborted
        return Aborted()


class _ProbeAnswer(NamedTuple):
    """An answer of the origin's own; `code` is that of its error, if it is one."""

    status: int
    code: str | None
    document: bytes

    def honoured(self, *, holds: bool) -> Honoured:
        """Return what this answer to a request says about its condition, which holds or not."""
        if self.code == "PreconditionFailed":
            return Honoured.REFUSED if holds else Honoured.YES
        if self.code == "NotImplemented":
            return Honoured.REFUSED
        if self.code is not None or self.status not in (200, 204):
            return Honoured.UNKNOWN
        return Honoured.YES if holds else Honoured.IGNORED


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
        removed, _ = await _both(self._ask("DELETE"), self._abort())
        if removed.status not in (200, 204, 404):
            raise OriginUnreachable(f"an object of the gateway's own cannot be removed: HTTP {removed.status}")
        while self._version_ids:
            await self._ask("DELETE", [("versionId", self._version_ids[-1])])  # a right that the gateway may lack
            self._version_ids.pop()

    async def _probe(self, now: float) -> Conditions:
        # Side by side: what concerns the upload alone changes nothing under the key.
        put, _ = await _both(self._put(), self._begin())  # put is None if the object cannot be made
        if put is None:
            return Conditions(learned_at=now)
        complete = await self._complete()
        delete = await self._found("DELETE", [{"if-match": _NO_ETAG}, None])
        if put in _CREATING or complete is Honoured.CREATES:
            if delete is not Honoured.YES:  # else the object is gone
                await self._ask("DELETE")
            if complete is Honoured.CREATES:
                complete = _if_so(complete, await self._ask("POST", *self._completion({"if-none-match": "*"})))
                await self._ask("DELETE")
            if put in _CREATING:
                put = _if_so(put, await self._ask("PUT", headers={"if-none-match": "*"}))
        return Conditions(put, complete, delete, now)

    async def _put(self) -> Honoured | None:
        made = await self._ask("PUT")
        return await self._found("PUT", [*_FAILING, None]) if made.status == 200 else None

    async def _found(
        self,
        method: str,
        conditions: Sequence[Mapping[str, str] | None],
        query: Sequence[tuple[str, str | None]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Honoured:
        """Return how the origin treats a request under each of these conditions; None: If-Match with the present ETag.

        Stop at the first that is not honoured: a kind of request honours all, or counts as if none. One that refuses
        only If-Match, and so has done nothing yet, may be asked for CREATES.
        """
        creates = False
        for one in conditions:
            condition = {"if-match": self._etag} if one is None else one
            answer = await self._ask(method, query, {**(headers or {}), **condition}, body)
            found = answer.honoured(holds=one is None)
            if found is not Honoured.YES:
                return Honoured.CREATES if creates and found is Honoured.REFUSED else found
            creates = condition == {"if-none-match": "*"} or creates
        return Honoured.YES

    async def _begin(self) -> None:
        begun = await self._ask("POST", [("uploads", None)])
        self._upload_id = text_of(begun.document, "UploadId") if begun.status == 200 else None
        if self._upload_id is not None:
            sent = await self._ask("PUT", [("partNumber", "1"), ("uploadId", self._upload_id)], body=_PART)
            self._has_part = sent.status == 200

    async def _complete(self) -> Honoured:
        if self._upload_id is None or not self._has_part:
            return Honoured.UNKNOWN
        return await self._found("POST", [*_FAILING, None], *self._completion({}))

    def _completion(
        self, condition: Mapping[str, str]
    ) -> tuple[Sequence[tuple[str, str | None]], Mapping[str, str], bytes]:
        """Return query, headers and body of the Complete."""
        etag = f'"{hashlib.md5(_PART, usedforsecurity=False).hexdigest()}"'
        document = at_once(complete_multipart_upload_document([CompletedPart(1, etag, {})]))
        return [("uploadId", self._upload_id)], {"content-type": "application/xml", **condition}, document

    async def _abort(self) -> None:
        if self._upload_id is not None:
            aborted = await self._ask("DELETE", [("uploadId", self._upload_id)])
            self.has_left = aborted.status not in (200, 204, 404)  # 404: a Complete was carried out

    async def _ask(
        self,
        method: str,
        query: Sequence[tuple[str, str | None]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> _ProbeAnswer:
        """OriginUnreachable if the origin does not do its work, or something else answers in its stead."""
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
        status = response.status
        code = {412: "PreconditionFailed", 501: "NotImplemented"}.get(status) or error_code_of(answer)
        made = response.headers.get("etag") if method == "PUT" else text_of(answer, "ETag")
        is_deleted = status == 204 or (status == 200 and method == "DELETE" and not answer)
        is_made = made or (made is not None and method == "POST")  # radosgw leaves the ETag of a Complete empty
        is_success = status < 300 and (is_made or is_deleted or text_of(answer, "UploadId"))
        if code is None and not is_success:
            raise OriginUnreachable(f"HTTP {status}")
        if code is not None and isinstance(refusal_of(status, code, answer), Lost):
            raise OriginUnreachable(f"HTTP {status}: {code}")
        version_id = response.headers.get("x-amz-version-id", "null")
        if version_id != "null" and not any(name == "versionId" for name, _ in query):
            self._version_ids.append(version_id)
        if status == 200 and code is None and not (method == "PUT" and query):  # that would be a part's
            self._etag = made or self._etag
        return _ProbeAnswer(status, code, answer)


def _if_so(honoured: Honoured, answer: _ProbeAnswer) -> Honoured:
    """Return `honoured` if this answer to a request under a condition that holds agrees."""
    found = answer.honoured(holds=True)
    return honoured if found is Honoured.YES else found


async def _both(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Run both side by side. If one fails, wait for the other before raising, so that what it made can be removed."""
    one, other = asyncio.ensure_future(first), asyncio.ensure_future(second)
    await asyncio.gather(one, other, return_exceptions=True)
    if one.exception() is not None:
        other.exception()  # retrieved, or asyncio would report it
    return one.result(), other.result()
