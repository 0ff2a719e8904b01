"""Replacement of the block cache when its directory cannot be opened: every read goes to the origin."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from gateway.blocks.cache import BlockCache
from gateway.blocks.filling.origin_gets import PinnedGet, UnpinnedResponse
from gateway.blocks.reading.reader import Outcome, RangeReader
from gateway.blocks.reading.sources import OriginSource
from gateway.core.clock import Clock
from gateway.core.model import BodyStream, ByteRange, MissReason, ObjectKey, ObjectVersion
from gateway.origin.client import Origin, Purpose
from gateway.telemetry import metrics

RETRIES = 3
STATE = "closed"

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ClosedCache:
    """Reads as `BlockCache` does, and keeps nothing."""

    def __init__(self, origin: Origin, clock: Clock) -> None:
        self._origin = origin
        self._clock = clock
        metrics.set_disk_state(STATE)

    async def open_range(
        self,
        version: ObjectVersion,
        byte_range: ByteRange,
        *,
        slot: str = "default",
        headers: Mapping[str, str] = _NO_HEADERS,
        answer: UnpinnedResponse | None = None,
    ) -> OriginReader:
        metrics.CACHE_STORE_UNAVAILABLE.add(1)
        get = PinnedGet(self._origin, version, byte_range, headers, Purpose.LIVE, slot, self._clock, RETRIES)
        get.begin_with(answer)
        try:
            await get.start()
        except BaseException:
            await get.aclose()
            raise
        return OriginReader(get, byte_range, slot)

    async def apply_settings(self, capacity_bytes: int) -> None:
        """Do nothing: there is no capacity and no slot to follow."""

    def warm_span(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> None:
        """Return None."""

    def holds(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> bool:
        return False

    def arrived(
        self,
        version: ObjectVersion,
        byte_range: ByteRange,
        *,
        slot: str,
        headers: Mapping[str, str],
        answer: UnpinnedResponse,
    ) -> None:
        """There are no first answers."""

    def why_missing(self, version: ObjectVersion, *, slot: str, before: ObjectVersion | None) -> MissReason:
        return "not-kept"

    def first_fetched(self, first: int, last: int | None, slot: str) -> ByteRange:
        """The byte that a read begins with: nothing is asked for by it, as there is no first look."""
        return ByteRange(first, first)

    def first_look(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> None:
        """Return None: the right would need the directory."""

    async def invalidate(self, key: ObjectKey) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class OriginReader:
    """One range straight from the origin, read once."""

    outcome: Outcome = "miss"

    def why_missing(self, before: ObjectVersion | None) -> MissReason:
        return "not-kept"

    def __init__(self, get: PinnedGet, byte_range: ByteRange, slot: str) -> None:
        self._source = OriginSource(get)
        self._range = byte_range
        self._slot = slot

    def whole(self) -> None:
        """It lies in no file."""

    def file_failed(self, error: Exception) -> None:
        """There is none."""

    async def body(self) -> BodyStream:
        """The bytes of the range, in order; all of them, or an exception."""
        position = self._range.first
        try:
            while position < self._range.stop:
                piece = await self._source.read(position, self._range.stop)
                position += len(piece)
                yield piece
        finally:
            metrics.CACHE_MISS_BYTES.add(position - self._range.first, self._slot)
            await self.aclose()

    async def aclose(self) -> None:
        """Give the connection back. Idempotent."""
        await self._source.close()


Blocks: TypeAlias = BlockCache | ClosedCache
Reader: TypeAlias = RangeReader | OriginReader
