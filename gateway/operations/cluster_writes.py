"""What this process knows of other nodes' writes.

Nothing that is remembered of a key counts any more once another node has changed it. Writes of a key wait until no
other node has one pending. Requests come here by other_nodes.py, and writes that go through by write_scope.py.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.core.model import Claim, Known, ObjectKey
from gateway.metadata.catalog import Catalog
from gateway.metadata.listing.pages import prefix_end
from gateway.operations.write_scope import WriteScope, invalidate
from gateway.policy.registry import SEQUENCE_BITS, WHOLE_BUCKET, Registry, StoreQuestion, Stores
from gateway.policy.slots import Slots
from gateway.s3.error_codes import s3_error

APPLIED_MAX: Final = 65_536
"""A process knows of so many keys which change it has applied last. It applies those of other keys once more."""

PATIENCE_SECONDS: Final = 20.0
"""Seconds for which a write waits until another node has flushed the key."""

PAUSE_SECONDS: Final = 0.02
PAUSE_SECONDS_MAX: Final = 0.32
"""Between two looks, which ask Redis and the other nodes; twice as long after each."""


class ClusterWrites:
    """One process's knowledge of other nodes' writes. Event loop only."""

    def __init__(self, registry: Registry, stores: Stores, catalog: Catalog, slots: Slots, clock: Clock) -> None:
        self.registry = registry
        self.stores = stores
        self.asks = registry.asks
        self.end = registry.end
        self._catalog = catalog
        self._slots = slots
        self._clock = clock
        self._applied: OrderedDict[ObjectKey, int] = OrderedDict()

    async def look(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        """Return what the registry knows of keys, and forget what this node remembers from before that."""
        asked = list(dict.fromkeys(keys))
        buckets = [ObjectKey(bucket, WHOLE_BUCKET) for bucket in {key.bucket for key in asked}]
        known = dict(zip([*asked, *buckets], await self.registry.look([*asked, *buckets]), strict=True))
        await self.apply(known.items())
        return [known[key] for key in keys]

    async def apply(self, known: Iterable[tuple[ObjectKey, Known]]) -> None:
        """Forget what is remembered of keys that have changed since this process heard of them last."""
        new = {key: told.stamp for key, told in known if told.stamp and self._applied.get(key) != told.stamp}
        by_bucket: dict[str, list[str]] = defaultdict(list)
        for key in new:
            by_bucket[key.bucket].append(key.key)
        for bucket, keys in by_bucket.items():
            await self.forget(bucket, keys)
        for key, stamp in new.items():
            self._applied[key] = stamp
            self._applied.move_to_end(key)
        while len(self._applied) > APPLIED_MAX:
            self._applied.popitem(last=False)

    async def forget(self, bucket: str, keys: Sequence[str]) -> None:
        """Forget what is remembered of keys, on all workers of this node."""
        if WHOLE_BUCKET in keys:
            await invalidate(WriteScope(self._catalog, self._slots, bucket, None))
        elif keys:
            await invalidate(WriteScope(self._catalog, self._slots, bucket, keys))

    async def forget_bucket(self, bucket: str) -> None:
        """As `Announcer.forget_bucket`."""
        await self.stores.forget(bucket, [WHOLE_BUCKET])

    async def free(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        """Wait until no other node has these keys pending, and return what is known then. S3Error 503."""
        return await self._until_free(keys, self.look)

    async def free_under(self, bucket: str, prefix: str) -> None:
        """Wait until no other node has anything pending under a prefix. S3Error 503."""
        start: bytes | None = prefix.encode()
        while start is not None:
            found = await self.registry.rows(bucket, start, prefix_end(prefix.encode()))
            await self.free([ObjectKey(bucket, name.decode()) for name, known in found.rows if known.store])
            start = found.end

    async def earlier_flushed(self, marker: ObjectKey, prefix: str) -> None:
        """Wait until the bucket has what other nodes have acknowledged under a prefix by now. S3Error 503."""
        [known] = await self.registry.begin([marker])
        if known.stamp is None:  # nobody can say what is earlier
            return await self.free_under(marker.bucket, prefix)
        start, order = prefix.encode(), known.stamp % 2**SEQUENCE_BITS
        question = StoreQuestion(verb="earlier", bucket=marker.bucket, keys=(prefix,), order=order)
        deadline, hurried = self._clock.monotonic() + PATIENCE_SECONDS, set[str]()
        pause_seconds = PAUSE_SECONDS
        while True:
            stores = await self.registry.holders(marker.bucket, start, prefix_end(start))
            answers = await asyncio.gather(*(self.stores.tell(store, question) for store in stores))
            found = {store: one.names for store, one in zip(stores, answers, strict=True) if one.names}
            if not found:
                return None
            if self._clock.monotonic() >= deadline:
                first = ObjectKey(marker.bucket, next(iter(found.values()))[0])
                raise s3_error("ServiceUnavailable", f"{first} is pending on another node: try again.")
            for store, names in found.items():
                if new := tuple(name for name in names if name not in hurried):
                    await self.stores.tell(store, StoreQuestion(verb="hurry", bucket=marker.bucket, keys=new))
                hurried.update(names)
            with cancellation.turn():
                await self._clock.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)

    async def is_checkpoint_left(self, bucket: str, prefix: str) -> bool:
        """Return whether other nodes have more of a checkpoint than the bucket. RegistryAway."""
        start = prefix.encode()
        stores = await self.registry.holders(bucket, start, prefix_end(start))
        question = StoreQuestion(verb="left", bucket=bucket, keys=(prefix,))
        answers = await asyncio.gather(*(self.stores.tell(store, question) for store in stores))
        return any(answer.names for answer in answers)

    def must_know(self, key: ObjectKey) -> bool:
        """As `Announcer.must_know`."""
        under = [self._slots.find(*key)] if key.key != WHOLE_BUCKET else self._slots.under(key.bucket, "")
        return any(map(self.asks, under))

    async def begin(self, keys: Sequence[ObjectKey]) -> None:
        """Wait until no other node has these keys pending, and tell that a write of them goes through. S3Error."""
        await self._until_free(keys, self.registry.begin)

    async def claim(self, claim: Claim) -> Known:
        """Wait until no other node has the key pending, and claim it for this node. S3Error, RegistryAway."""

        async def ask(_keys: Sequence[ObjectKey]) -> Sequence[Known]:
            return [await self.registry.claim(claim)]

        [known] = await self._until_free([claim.key], ask)
        return known

    async def _until_free(
        self, keys: Sequence[ObjectKey], ask: Callable[[Sequence[ObjectKey]], Awaitable[Sequence[Known]]]
    ) -> Sequence[Known]:
        deadline, hurried = self._clock.monotonic() + PATIENCE_SECONDS, set[int]()
        pause_seconds = PAUSE_SECONDS
        while True:
            known = await ask(keys)
            busy = [(key, told) for key, told in zip(keys, known, strict=True) if told.store is not None]
            if not busy:
                return known
            if self._clock.monotonic() >= deadline:
                raise s3_error("ServiceUnavailable", f"{busy[0][0]} is pending on another node: try again.")
            await self._hurry([one for one in busy if one[1].claim not in hurried])
            hurried |= {told.claim for _, told in busy}
            with cancellation.turn():
                await self._clock.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)

    async def _hurry(self, busy: Sequence[tuple[ObjectKey, Known]]) -> None:
        by_place: dict[tuple[str, str], list[str]] = defaultdict(list)
        for key, known in busy:
            by_place[known.store or "", key.bucket].append(key.key)
        for (store, bucket), keys in by_place.items():
            await self.stores.tell(store, StoreQuestion(verb="hurry", bucket=bucket, keys=tuple(keys)))
