"""What each slot may take of the cache directory, and what it has taken. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.policy.slots import DEFAULT_SLOT, Slots


@dataclass(frozen=True, slots=True)
class Share:
    """A slot's part: `guaranteed_bytes` that no other slot can take from it, and `limit_bytes` that it never exceeds.

    In between it borrows what is idle, and gives it back when others need what is theirs.
    """

    guaranteed_bytes: int = 0
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The whole of the directory, and each slot's share of it by the slot's name. The guarantees fit in together."""

    total_bytes: int
    shares: Mapping[str, Share] = field(default_factory=dict)

    def share(self, slot: str) -> Share:
        """What a slot may take. One that is configured no more has no guarantee."""
        return self.shares.get(slot, Share())

    def lowered_to(self, total_bytes: int) -> Capacity:
        """The same shares in proportion, of a directory that for now can hold less."""
        if total_bytes >= self.total_bytes:
            return self
        part = total_bytes / self.total_bytes
        shares = {name: Share(int(one.guaranteed_bytes * part), one.limit_bytes) for name, one in self.shares.items()}
        return Capacity(total_bytes, shares)

    def obtainable_bytes(self, slot: str) -> int:
        """What a slot can have at most, when others need all that they are guaranteed."""
        others_bytes = sum(share.guaranteed_bytes for name, share in self.shares.items() if name != slot)
        limit_bytes = self.share(slot).limit_bytes
        room_bytes = self.total_bytes - others_bytes
        return room_bytes if limit_bytes is None else min(limit_bytes, room_bytes)


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """What one slot has on disk, and what is set aside for its fills in progress."""

    blocks: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0


def capacity_of(total_bytes: int, slots: Slots) -> Capacity:
    """The shares that the slots ask for, the built-in slot's included."""
    return Capacity(
        total_bytes,
        {slot.name: Share(slot.capacity_bytes, slot.capacity_limit_bytes) for slot in (DEFAULT_SLOT, *slots)},
    )


def fingerprint_of(slots: Slots) -> bytes:
    """Differs when a key may belong to another slot than before: 16 bytes."""
    state = hashlib.blake2b(digest_size=16, person=b"forebay slots 1")
    for slot in sorted(slots, key=lambda slot: slot.name):
        for text in (slot.name, str(slot.prefix)):
            encoded = text.encode("utf-8", "surrogatepass")
            state.update(len(encoded).to_bytes(8, "little"))
            state.update(encoded)
    return state.digest()
