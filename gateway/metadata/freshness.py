"""May an entry of the catalog still be believed? Pure: the promises of docs/semantics.md, clause 3."""

from __future__ import annotations

from enum import Enum

from gateway.metadata.records import Entry
from gateway.policy.slots import Slot


class Freshness(Enum):
    """FRESH answers by itself. STALE answers only when the origin does not."""

    FRESH = "fresh"
    STALE = "stale"
    USELESS = "useless"


def freshness(entry: Entry, slot: Slot, *, now_seconds: float, boot: int) -> Freshness:
    """How far `entry` may be trusted in `slot`. `now_seconds` is monotonic, of the boot whose number is `boot`.

    Ages are differences of the machine's own monotonic clock, so that no step of the wall clock makes anything live
    longer. What was learned under another boot, or in the future, is of unknown age: only `immutable` can use it.
    """
    if slot.consistency == "strict":
        return Freshness.USELESS
    learned = entry.learned
    age_seconds = now_seconds - learned.seconds if learned.boot == boot else -1.0
    if entry.head is None:
        return Freshness.FRESH if 0 <= age_seconds < slot.negative_ttl_seconds else Freshness.USELESS
    if slot.consistency == "immutable":
        return Freshness.FRESH
    if age_seconds < 0:
        return Freshness.USELESS
    if age_seconds < slot.metadata_ttl_seconds:
        return Freshness.FRESH
    limit_seconds = slot.metadata_ttl_seconds + slot.stale_if_unreachable_seconds
    return Freshness.STALE if age_seconds < limit_seconds else Freshness.USELESS
