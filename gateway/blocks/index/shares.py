"""What each slot may take of the cache directory, and what it has taken. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gateway.blocks.index.policies import Eviction
from gateway.policy.slots import DEFAULT_SLOT, Slots

_EVICTIONS = {"lru": Eviction.LRU, "epoch": Eviction.EPOCH}


@dataclass(frozen=True, slots=True)
class Share:
    """A slot's part: `guaranteed_bytes` that no other slot can take from it, and `limit_bytes` that it never exceeds.

    In between it borrows what is idle, and gives it back when others need what is theirs. `eviction` says which of its
    files go first.
    """

    guaranteed_bytes: int = 0
    limit_bytes: int | None = None
    eviction: Eviction = Eviction.EPOCH


@dataclass(frozen=True, slots=True)
class Capacity:
    """The whole of the directory, and each slot's share of it by the slot's name. The guarantees fit in together.

    Fills write at most `daily_writes_bytes` in a day (UTC); None: as much as comes.
    """

    total_bytes: int
    shares: Mapping[str, Share] = field(default_factory=dict)
    daily_writes_bytes: int | None = None
    guaranteed_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "guaranteed_bytes", sum(share.guaranteed_bytes for share in self.shares.values()))

    def share(self, slot: str) -> Share:
        """What a slot may take. One that is configured no more has no guarantee."""
        return self.shares.get(slot, Share())

    def obtainable_bytes(self, slot: str) -> int:
        """What a slot can have at most, pins aside, when others need all that they are guaranteed."""
        others_bytes = self.guaranteed_bytes - self.share(slot).guaranteed_bytes
        limit_bytes = self.share(slot).limit_bytes
        room_bytes = self.total_bytes - others_bytes
        return room_bytes if limit_bytes is None else min(limit_bytes, room_bytes)

    def lowered_to(self, total_bytes: int) -> Capacity:
        """The same shares in proportion, of a directory that for now can hold less."""
        if total_bytes >= self.total_bytes:
            return self
        part = total_bytes / self.total_bytes
        shares = {
            name: replace(one, guaranteed_bytes=int(one.guaranteed_bytes * part)) for name, one in self.shares.items()
        }
        return replace(self, total_bytes=total_bytes, shares=shares)


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """What one slot has on disk, and what is set aside for its fills in progress; `pinned_bytes` of the former stay."""

    blocks: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0


def capacity_of(total_bytes: int, slots: Slots, daily_writes_bytes: int | None = None) -> Capacity:
    """The shares that the slots ask for, the built-in slot's included."""
    shares = {
        slot.name: Share(slot.capacity_bytes, slot.capacity_limit_bytes, _EVICTIONS[slot.eviction])
        for slot in (DEFAULT_SLOT, *slots)
    }
    return Capacity(total_bytes, shares, daily_writes_bytes)


def fingerprint_of(slots: Slots) -> bytes:
    """Differs when a key may belong to another slot than before: 16 bytes."""
    state = hashlib.blake2b(digest_size=16, person=b"forebay slots 1")
    for slot in sorted(slots, key=lambda slot: slot.name):
        for text in (slot.name, str(slot.prefix)):
            encoded = text.encode("utf-8", "surrogatepass")
            state.update(len(encoded).to_bytes(8, "little"))
            state.update(encoded)
    return state.digest()
