"""The registry of the cluster as requests ask it: Redis while it is believed, else all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from gateway.core.errors import RegistryAway
from gateway.core.model import Known, ObjectKey
from gateway.policy.registry import KnownKeys, Registry


class SwitchedRegistry:
    """As `Registry`: Redis while it is believed, else all nodes are asked. Then nothing can be claimed."""

    def __init__(self, redis: Registry, ask_all: Registry) -> None:
        self._redis = redis
        self._ask_all = ask_all
        self.asks = redis.asks
        self.claim = redis.claim
        self.confirm = redis.confirm
        self.release = redis.release

    @property
    def can_claim(self) -> bool:
        return self._redis.can_claim

    async def look(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        with suppress(RegistryAway):
            return await self._redis.look(keys)
        return await self._ask_all.look(keys)

    async def rows(self, bucket: str, start: bytes, stop: bytes) -> KnownKeys:
        with suppress(RegistryAway):
            return await self._redis.rows(bucket, start, stop)
        return await self._ask_all.rows(bucket, start, stop)

    async def holders(self, bucket: str, start: bytes, stop: bytes) -> Sequence[str]:
        with suppress(RegistryAway):
            return await self._redis.holders(bucket, start, stop)
        return await self._ask_all.holders(bucket, start, stop)

    async def begin(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        with suppress(RegistryAway):
            return await self._redis.begin(keys)
        return await self._ask_all.begin(keys)

    async def end(self, keys: Sequence[ObjectKey]) -> None:
        try:
            await self._redis.end(keys)
        except RegistryAway:
            await self._ask_all.end(keys)
