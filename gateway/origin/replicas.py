"""Replicas of a bucket: bytes from near, truth from the source.

The source alone says what exists: it gets all writes, listings, HEADs and GETs of an unknown version. A GET that names
its version by the source's ETag is asked of the replicas first, in their order. An answer counts only if it has exactly
the bytes asked for, of that version; otherwise the source gets the same request. So a replica that lags, is dead or has
other ETags makes reads slower, never wrong, and fails none that the source can answer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from gateway.core.clock import Clock
from gateway.core.errors import OriginBusy, OriginError
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.origin.client import (
    ERROR_DOCUMENT_BYTES_MAX,
    BegunRead,
    OnEnd,
    Origin,
    OriginRequest,
    OriginResponse,
    WrappedResponse,
    begin_read_of,
)
from gateway.s3.headers import first_and_last
from gateway.s3.origin_habits import WrongAnswer, check_head
from gateway.telemetry import metrics

LACKING_SECONDS: Final = 10.0
LACKING_SECONDS_MAX: Final = 600.0
"""Seconds for which a replica is not asked again for a version that it lacks; twice as long each time it lacks it."""

LACKING_KEYS_MAX: Final = 65_536
"""Keys whose lack is remembered of each replica, in each process."""

PAUSE_SECONDS: Final = 0.5
PAUSE_SECONDS_MAX: Final = 60.0
"""Seconds for which a replica is left alone that does not answer, or answers that it cannot; doubled each time."""

QUIET_SECONDS_MAX: Final = 1.0
"""Seconds of silence after which a replica is asked whether it lives, and is given up unless it says so as fast."""

Outcome = Literal["hit", "absent", "other-version", "failed"]


class _Lack(NamedTuple):
    etag: str
    until: float
    seconds: float


class Replica:
    """One replica, as one process sees it. `bucket` is its name there."""

    def __init__(self, origin: Origin, bucket: str, clock: Clock) -> None:
        self.origin = origin
        self._bucket = bucket
        self._clock = clock
        self._lacking: OrderedDict[str, _Lack] = OrderedDict()
        self._failures = 0
        self._left_alone_until = -math.inf

    def may_have(self, key: str, etag: str | None = None) -> bool:
        """Return whether it is worth asking for a key, in the version of this ETag, if that is known."""
        now, lack = self._clock.monotonic(), self._lacking.get(key)
        if lack is not None and lack.until > now and etag in (None, lack.etag):
            return False
        return now >= self._left_alone_until

    async def ask(self, request: OriginRequest) -> OriginResponse:
        """Send a request about the bucket to this replica, and to nobody else."""
        return await self.origin.send(replace(request, bucket=self._bucket))

    async def read(self, request: OriginRequest, version: ObjectVersion, asked: ByteRange) -> OriginResponse | None:
        """Return the answer if it has the bytes asked for; None: ask elsewhere."""
        try:
            response = await self.ask(request)
        except OriginError as error:
            self._count("failed")
            if not isinstance(error, OriginBusy):
                self._leave_alone()
            return None
        outcome = _outcome(response, version, asked)
        self._count(outcome)
        status, key = response.status, version.key.key
        if outcome == "hit":
            self._failures = 0
            self._lacking.pop(key, None)
            metrics.ORIGIN_REPLICA_BYTES.add(asked.length)
            return _FromReplica(response, self, key, version.etag)
        if outcome != "failed" or status == 403:  # S3 answers 403 for what is not there to those who may not list
            self._failures = 0
            self.lacks(key, version.etag)
        else:
            self._leave_alone()
        async with response:
            if status not in (200, 206):
                with suppress(OriginError):  # a document that was read lets the connection live
                    await response.read(ERROR_DOCUMENT_BYTES_MAX)
        return None

    def lacks(self, key: str, etag: str) -> None:
        """Do not ask for this version for a while."""
        now, before = self._clock.monotonic(), self._lacking.pop(key, None)
        seconds = LACKING_SECONDS
        if before is not None and before.etag == etag:
            if before.until > now:  # said by several requests at the same time
                self._lacking[key] = before
                return
            seconds = min(2 * before.seconds, LACKING_SECONDS_MAX)
        self._lacking[key] = _Lack(etag, now + seconds, seconds)
        if len(self._lacking) > LACKING_KEYS_MAX:
            self._lacking.popitem(last=False)

    def _leave_alone(self) -> None:
        now = self._clock.monotonic()
        if now >= self._left_alone_until:  # requests that fail together count once
            self._left_alone_until = now + min(PAUSE_SECONDS * 2**self._failures, PAUSE_SECONDS_MAX)
            self._failures = min(self._failures + 1, 16)

    def _count(self, outcome: Outcome) -> None:
        metrics.ORIGIN_REPLICA.add(1, outcome)


class _FromReplica(WrappedResponse):
    def __init__(self, response: OriginResponse, replica: Replica, key: str, etag: str) -> None:
        super().__init__(response)
        self._lacks = replica, key, etag

    def doubt(self) -> None:
        replica, key, etag = self._lacks
        replica.lacks(key, etag)


class ReplicaOrigin:
    """`Origin` of one bucket: its replicas, then its source. Who made these closes them: buckets share them.

    `prefers_source` takes the name of a slot: True if its reads ask no replica.
    """

    def __init__(self, source: Origin, replicas: Sequence[Replica], prefers_source: Callable[[str], bool]) -> None:
        self._source = source
        self._replicas = tuple(replicas)
        self._prefers_source = prefers_source
        self._begin_read = begin_read_of(source)

    def reads_near(self, key: str, slot: str) -> bool:
        """Return whether a replica is likely to give the bytes of a key, once the source has named its version."""
        return not self._prefers_source(slot) and any(one.may_have(key) for one in self._replicas)

    async def send(self, request: OriginRequest) -> OriginResponse:
        """As `Origin.send`."""
        if request.replica is not None:
            return await self._replicas[request.replica].ask(request)
        if request.method == "GET" and request.size_bytes is not None and not self._prefers_source(request.slot):
            version = ObjectVersion(
                ObjectKey(request.bucket or "", request.key or ""), request.headers["if-match"], request.size_bytes
            )
            first, last = first_and_last(request.headers["range"]) or (0, None)
            asked = ByteRange(first, request.size_bytes - 1 if last is None else last)
            for replica in self._replicas:
                if replica.may_have(version.key.key, version.etag):
                    response = await replica.read(request, version, asked)
                    if response is not None:
                        return response
        return await self._source.send(request)

    def begin_read(self, request: OriginRequest, on_end: OnEnd) -> BegunRead | None:
        """As `BeginRead`, of the source: what is begun so names no version."""
        return self._begin_read(request, on_end) if request.size_bytes is None else None

    async def aclose(self) -> None:
        """Do nothing."""


def _outcome(response: OriginResponse, version: ObjectVersion, asked: ByteRange) -> Outcome:
    match response.status:
        case 200 | 206:
            try:
                check_head(response.status, response.headers, version, asked)
            except WrongAnswer:
                return "other-version"
            return "hit"
        case 404:
            return "absent"
        case 412 | 416:
            return "other-version"
    return "failed"
