"""Finds what other nodes have acknowledged before a marker of this one, and not flushed yet: it is to come last.

The registry finds the stores that have anything pending there, and these are asked what of it is earlier. `order`
compares writes of all nodes: the number of a write's claim, raised to that of the writes before it on its node. A
marker waits for lower numbers only, so no two wait for each other; a write that replaces another keeps the lower one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.core.errors import RegistryAway
from gateway.core.model import ObjectKey
from gateway.policy.registry import KEYS_MAX, Registry, StoreAnswer, StoreQuestion, Stores
from gateway.policy.slots import Slots


class EarlierWrites:
    """As `flushing.manifest_files.OtherNodes`. Event loop only."""

    def __init__(self, registry: Registry, stores: Stores, slots: Slots) -> None:
        self._registry = registry
        self._stores = stores
        self._slots = slots

    async def earlier(self, marker: ObjectKey, prefix: str, order: int, *, hurries: bool) -> tuple[int, str] | None:
        """As `OtherNodes.earlier`."""
        if not order or not self._registry.asks(self._slots.find(*marker)):
            return None
        start = prefix.encode("utf-8", "surrogatepass")
        try:
            stores = await self._registry.holders(marker.bucket, start, start + b"\xff")
            question = StoreQuestion(verb="earlier", bucket=marker.bucket, keys=(prefix,), order=order)
            answers = await asyncio.gather(*(self._stores.tell(store, question) for store in stores))
            found = {store: one for store, one in zip(stores, answers, strict=True) if one.names}
            if hurries:
                await asyncio.gather(*(self._hurry(store, marker.bucket, one) for store, one in found.items()))
        except RegistryAway as error:
            return 1, f"waits until it is known what other nodes have acknowledged before it: {error}"
        if not found:
            return None
        count, (store, answer) = sum(len(one.names) for one in found.values()), next(iter(found.items()))
        writes = "a write" if count == 1 else f"{count}{'+' if count >= KEYS_MAX else ''} writes"
        example = ObjectKey(marker.bucket, answer.names[0])
        return count, f"waits for {writes} of other nodes, such as {example} on {self._stores.name_of(store)}"

    async def behind(self, marker: ObjectKey, order: int, names: Sequence[str]) -> frozenset[str]:
        """As `OtherNodes.behind`."""
        if not order or not self._registry.asks(self._slots.find(*marker)):
            return frozenset()
        first, last = min(names), max(names)
        start, stop = (one.encode("utf-8", "surrogatepass") for one in (first, last))
        stores = await self._registry.holders(marker.bucket, start, stop + b"\0")
        question = StoreQuestion(verb="behind", bucket=marker.bucket, keys=(marker.key, *names), order=order)
        answers = await asyncio.gather(*(self._stores.tell(store, question) for store in stores))
        return frozenset(name for answer in answers for name in answer.names)

    async def _hurry(self, store: str, bucket: str, answer: StoreAnswer) -> None:
        await self._stores.tell(store, StoreQuestion(verb="hurry", bucket=bucket, keys=answer.names))
