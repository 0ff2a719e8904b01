"""May what was learned still be believed? Pure: the promises of docs/semantics.md, clause 3."""

from __future__ import annotations

from enum import Enum

from gateway.metadata.records import Entry, Learned
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
    if slot.consistency in ("strict", "snapshot"):
        return Freshness.USELESS  # what is in a snapshot is told by nothing else
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


def answer_freshness(learned: Learned, now: Learned, slot: Slot, *, ttl_seconds: float) -> Freshness:
    """How far what was said of a bucket may be trusted; `now` is of that bucket, `slot` the one that all of it is in.

    What runs out is stale as long as the slot goes on without its origin: `immutable` and `snapshot` do for good.
    """
    if (learned.boot, learned.generation) != (now.boot, now.generation):
        return Freshness.USELESS
    age_seconds = now.seconds - learned.seconds
    if age_seconds < 0:
        return Freshness.USELESS
    if age_seconds < ttl_seconds:
        return Freshness.FRESH
    if slot.consistency in ("immutable", "snapshot"):
        return Freshness.STALE
    more_seconds = slot.stale_if_unreachable_seconds if slot.consistency == "ttl" else 0.0
    return Freshness.STALE if age_seconds < ttl_seconds + more_seconds else Freshness.USELESS
