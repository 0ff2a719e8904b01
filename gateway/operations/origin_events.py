"""What others have changed, told by the origin's events: nothing that was asked before is believed from then on.

An event says that something happened, not what is there now: events come late, twice, and in any order. So none is
believed itself. It voids what is remembered, as an own write does (visibility.py): fills, pages and questions that were
sent to the origin before it, and land after it, bring nothing back; the next read asks.
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
"""The consistencies of slots in which nothing ever changes."""

_KEYS_AT_ONCE = 128
"""In one transaction of the dirty keys: own writes wait no longer than for a millisecond."""


class OriginEvents:
    """Applies events for all workers, over what they share."""

    def __init__(self, catalog: Catalog, blocks: BlockCache, slots: Slots) -> None:
        self._catalog = catalog
        self._blocks = blocks
        self._slots = slots

    async def apply(self, events: Sequence[ObjectEvent]) -> list[str | None]:
        """Why each was left alone, None where it was applied; then every read asks the origin first."""
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
        """Whether the event is about the version whose blocks are here: of own writes there are events, too."""
        if event.etag is None:
            return False
        known = self._catalog.last_known(ObjectKey(event.bucket, event.key))
        return known is not None and plain_etag(known.version.etag) == plain_etag(event.etag)


def _by_bucket(events: Sequence[ObjectEvent]) -> dict[str, dict[str, None]]:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for event in events:
        found[event.bucket][event.key] = None
    return found
