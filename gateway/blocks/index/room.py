"""Making room inside a transaction: files leave the index until what is asked for fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.blocks.index.eviction import Holding, yielding
from gateway.blocks.index.keeping.book import Queue
from gateway.blocks.index.ledger import Ledger
from gateway.blocks.index.records import FileRecord
from gateway.blocks.index.shares import Capacity, SlotUsage

VICTIMS_PER_TRANSACTION = 64
"""Blocks; the file that passes the bound still goes as a whole."""


@dataclass(frozen=True, slots=True)
class Step:
    """One transaction's outcome: whether what was asked is done, and the files that left the index for it."""

    done: bool
    doomed: Sequence[FileRecord]


def make_room(
    ledger: Ledger, capacity: Capacity, slot: str | None = None, needed_bytes: int = 0, *, wanted: bool = False
) -> Step:
    """Evict until `needed_bytes` more fit on a slot's account, or VICTIMS_PER_TRANSACTION blocks are out.

    What could not fit even with every block gone that is not pinned evicts nothing. Where it is `wanted`, the slot's
    own policy does not protect what was used longest ago.
    """
    usage, unowned_bytes = ledger.usage(), ledger.unsurveyed_bytes()
    asking = ledger.slot(slot) if slot is not None else None
    if asking is not None:
        usage.setdefault(asking, SlotUsage())
    holdings = _holdings(ledger, capacity, usage)
    if asking is not None:
        if needed_bytes > _obtainable_bytes(asking, holdings, usage, capacity.total_bytes - unowned_bytes):
            return Step(False, ())
        holdings[asking].taken_bytes += needed_bytes
    return _evict(ledger, holdings, capacity.total_bytes, unowned_bytes, asking, wanted=wanted)


def pins_fit(ledger: Ledger, capacity: Capacity, slot: int, size_bytes: int) -> bool:
    """Whether a slot may pin so many bytes more: within its limit, and beside what others are guaranteed or pin."""
    names = {number: name for name, number in ledger.slots().items()}
    kept = dict.fromkeys(names, 0)
    for number, used in ledger.usage().items():
        pinned_bytes = used.pinned_bytes + (size_bytes if number == slot else 0)
        limit_bytes = capacity.share(names[number]).limit_bytes
        if number == slot and limit_bytes is not None and pinned_bytes > limit_bytes:
            return False
        kept[number] = max(pinned_bytes, capacity.share(names[number]).guaranteed_bytes)
    unseen = (share.guaranteed_bytes for name, share in capacity.shares.items() if name not in names.values())
    return sum(kept.values()) + sum(unseen) <= capacity.total_bytes


def _obtainable_bytes(
    asking: int, holdings: Mapping[int, Holding], usage: Mapping[int, SlotUsage], room_bytes: int
) -> int:
    """What a slot can have at most: fills in progress and pins stay, and what others hold within their guarantees."""
    staying = {slot: used.reserved_bytes + used.pinned_bytes for slot, used in usage.items()}
    kept = {slot: max(staying[slot], min(one.taken_bytes, one.guaranteed_bytes)) for slot, one in holdings.items()}
    others_bytes = sum(kept.values()) - kept[asking]
    return min(room_bytes - others_bytes, holdings[asking].limit_bytes) - staying[asking]


def _holdings(ledger: Ledger, capacity: Capacity, usage: Mapping[int, SlotUsage]) -> dict[int, Holding]:
    names = {number: name for name, number in ledger.slots().items()}
    holdings = {}
    for number, used in usage.items():
        share = capacity.share(names[number])
        limit_bytes = capacity.total_bytes if share.limit_bytes is None else share.limit_bytes
        holdings[number] = Holding(used.used_bytes + used.reserved_bytes, share.guaranteed_bytes, limit_bytes)
    return holdings


def _evict(
    ledger: Ledger,
    holdings: dict[int, Holding],
    capacity_bytes: int,
    unowned_bytes: int,
    asking: int | None,
    *,
    wanted: bool,
) -> Step:
    doomed: list[FileRecord] = []
    blocks = 0
    while order := yielding(holdings, capacity_bytes, unowned_bytes):
        found = (ledger.book(slot).victim(wanted=wanted and slot == asking) for slot in order)
        victim = next((file for file in found if file is not None), None)
        if victim is None and asking is None:  # there is less room than there was: even pins yield
            victim = next((file for slot in order if (file := ledger.book(slot).head(Queue.PINNED))), None)
        if victim is None or blocks >= VICTIMS_PER_TRANSACTION:
            return Step(False, doomed)
        ledger.evict(victim)
        holdings[victim.slot].taken_bytes -= victim.disk_bytes
        doomed.append(victim)
        blocks += victim.blocks
    return Step(True, doomed)
