"""Changes by others, reported by the origin's events: earlier answers of the origin are not believed after one.

An event says that something happened, not the present state: events come late, twice, and in any order. So none is
believed itself. It voids what is remembered, as an own write does (visibility.py): fills, pages and questions that were
sent to the origin before it, and arrive after it, bring nothing back; the next read asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from gateway.blocks.cache import BlockCache
from gateway.core.model import ObjectKey
from gateway.metadata.catalog import Catalog
from gateway.operations.visibility import WriteScope, invalidate
from gateway.policy.slots import Slots
from gateway.s3.events import ObjectEvent
from gateway.s3.headers import plain_etag

_FROZEN: frozenset[str] = frozenset({"snapshot"})
"""Consistencies of slots in which nothing ever changes."""

_KEYS_AT_ONCE = 128
"""Keys per transaction of the dirty keys, so that own writes wait at most a millisecond."""


class OriginEvents:
    """Applies events for all workers, over their shared state."""

    def __init__(self, catalog: Catalog, blocks: BlockCache, slots: Slots) -> None:
        self._catalog = catalog
        self._blocks = blocks
        self._slots = slots

    async def apply(self, events: Sequence[ObjectEvent]) -> list[str | None]:
        """Apply events; return for each why it was ignored, or None. Afterwards every read asks the origin first."""
        reasons = [self._reason(event) for event in events]
        applied = [event for event, reason in zip(events, reasons, strict=True) if reason is None]
        outdated = [event for event in applied if not self._is_of_known_version(event)]
        for bucket, keys in _by_bucket(applied).items():
            following = iter(keys)
            while batch := list(islice(following, _KEYS_AT_ONCE)):
                await invalidate(WriteScope(self._catalog, self._slots, bucket, batch))
        for key in {ObjectKey(event.bucket, event.key): None for event in outdated}:
            await self._blocks.invalidate(key)
        return reasons

    def _reason(self, event: ObjectEvent) -> str | None:
        slot = self._slots.find(event.bucket, event.key)
        return f"the slot {slot.name} is frozen" if slot.consistency in _FROZEN else None

    def _is_of_known_version(self, event: ObjectEvent) -> bool:
        """Return whether the event is about the version whose blocks are here, as events of own writes are."""
        if event.etag is None:
            return False
        known = self._catalog.last_known(ObjectKey(event.bucket, event.key))
        return known is not None and plain_etag(known.version.etag) == plain_etag(event.etag)


def _by_bucket(events: Sequence[ObjectEvent]) -> dict[str, dict[str, None]]:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for event in events:
        found[event.bucket][event.key] = None
    return found
