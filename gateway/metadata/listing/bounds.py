"""How old the answer to a LIST may be: as old as the strictest of the slots allows that its keys lie in. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from gateway.metadata.listing.places import END, behind_all
from gateway.metadata.records import Learned
from gateway.policy.slots import Slot, Slots

_MERGED_PART_OF_TTL = 8


@dataclass(frozen=True, slots=True)
class Bound:
    """Up to which age, in seconds, an answer is fresh, and up to which one it stands in for an origin that is down."""

    fresh_seconds: float
    stale_seconds: float

    @property
    def merge_seconds(self) -> float:
        """Neighbours whose ages differ by no more become one: little of the TTL is lost by that."""
        return self.fresh_seconds / _MERGED_PART_OF_TTL

    def allows(self, learned: Learned, now: Learned, *, stale: bool = False) -> bool:
        """Whether what was learned then may be told now, of the bucket that `now` is of."""
        if learned.generation != now.generation:
            return False
        limit_seconds = self.stale_seconds if stale else self.fresh_seconds
        if learned.boot != now.boot:
            return limit_seconds == math.inf  # its age is unknown
        age_seconds = now.seconds - learned.seconds
        return 0 <= age_seconds < limit_seconds or limit_seconds == math.inf


def bound_of(slots: Iterable[Slot]) -> Bound | None:
    """The bound that all of them allow; None where one is strict, or frozen: the index may not answer."""
    fresh_seconds = stale_seconds = math.inf
    for slot in slots:
        if slot.consistency in ("strict", "snapshot"):
            return None
        if slot.consistency == "ttl":
            fresh_seconds = min(fresh_seconds, slot.metadata_ttl_seconds)
            stale_seconds = min(stale_seconds, slot.metadata_ttl_seconds + slot.stale_if_unreachable_seconds)
    return Bound(fresh_seconds, stale_seconds)


def answerable(slots: Slots, bucket: str) -> list[tuple[bytes, bytes]]:
    """Start and stop of the parts of a bucket's key space that the index may answer for: neither strict nor frozen."""
    prefixes = [(slot.prefix.key_prefix.encode(), slot) for slot in slots.of_bucket(bucket)]
    edges = {b"", END, *(prefix for prefix, _ in prefixes), *(behind_all(prefix) for prefix, _ in prefixes)}
    parts: list[tuple[bytes, bytes]] = []
    for start, stop in pairwise(sorted(edges)):
        slot = next((slot for prefix, slot in prefixes if start.startswith(prefix)), None)
        if slot is None or slot.consistency in ("strict", "snapshot"):
            continue
        if parts and parts[-1][1] == start:
            start = parts.pop()[0]
        parts.append((start, stop))
    return parts
