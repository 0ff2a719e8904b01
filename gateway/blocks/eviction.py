"""Room for blocks: its size, and the slots that give up files until a new block fits.

A slot at its limit makes room by itself. Otherwise the slot that has borrowed most beyond its guarantee gives back
first: so a slot always gets its guarantee, no scan pushes others out of more than it is entitled to, and slots without
guarantees end up with equal parts. With room for 100, where a is guaranteed 40 and holds 10, b holds 60 and c holds 30:
when a asks for 20, b gives 20. Its policy chooses the files (policies.py).

The index has a budget, too: above it, each new block evicts one at least, of its own slot, or of the slot with most
blocks if its own has less than its part.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.blocks.layout import FileRecord, Reservation
from gateway.blocks.policies import POLICIES, Eviction, Queue, SlotAccount, is_copy
from gateway.blocks.transaction import SWEPT_MAX, IndexTransaction
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
        """Return a slot's share. An unconfigured slot has no guarantee."""
        return self.shares.get(slot, Share())

    def obtainable_bytes(self, slot: str) -> int:
        """Return the most that a slot can have, without its pins, when others need all of their guarantees."""
        others_bytes = self.guaranteed_bytes - self.share(slot).guaranteed_bytes
        limit_bytes = self.share(slot).limit_bytes
        room_bytes = self.total_bytes - others_bytes
        return room_bytes if limit_bytes is None else min(limit_bytes, room_bytes)

    def lowered_to(self, total_bytes: int) -> Capacity:
        """Return the same shares in proportion, for a directory that can hold less for now."""
        if total_bytes >= self.total_bytes:
            return self
        part = total_bytes / self.total_bytes
        shares = {
            name: replace(one, guaranteed_bytes=int(one.guaranteed_bytes * part)) for name, one in self.shares.items()
        }
        return replace(self, total_bytes=total_bytes, shares=shares)


def capacity_of(total_bytes: int, slots: Slots, daily_writes_bytes: int | None = None) -> Capacity:
    """Return the shares that the slots ask for, the built-in slot's included."""
    shares = {
        slot.name: Share(slot.capacity_bytes or 0, slot.capacity_limit_bytes, _EVICTIONS[slot.eviction])
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


VICTIMS_PER_TRANSACTION = 64

_HURRY = 8
"""An index so many-th part above its budget gives up two blocks for each that comes."""


@dataclass(frozen=True, slots=True)
class Step:
    """Outcome of one transaction: `done` if it succeeded, and the files that left the index for it."""

    done: bool
    evicted: Sequence[FileRecord]


@dataclass(slots=True)
class Holding:
    """A slot's usage with fills in progress, the part of it that cannot be evicted, and its limits."""

    taken_bytes: int = 0
    staying_bytes: int = 0
    pinned_bytes: int = 0
    blocks: int = 0
    guaranteed_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def borrowed_bytes(self) -> int:
        return self.taken_bytes - self.guaranteed_bytes

    @property
    def kept_bytes(self) -> int:
        return max(self.staying_bytes, min(self.taken_bytes, self.guaranteed_bytes))

    @property
    def pinned_beyond_bytes(self) -> int:
        return max(0, self.pinned_bytes - self.guaranteed_bytes)

    @property
    def is_over_limit(self) -> bool:
        return self.limit_bytes is not None and self.taken_bytes > self.limit_bytes


@dataclass(slots=True)
class Holdings:
    """Holdings of all slots, so that a fill costs the same with one slot and with a thousand.

    Read from the index now and then, and kept up to date with what this process changes: the slots that a transaction
    looks at are exact, the others as they were a moment ago.
    """

    capacity: Capacity
    names: dict[int, str] = field(default_factory=dict)
    kept_bytes: int = 0
    pinned_beyond_bytes: int = 0
    may_have_copies: set[int] = field(default_factory=set)
    """Slots that other nodes' blocks may lie in, in idle room."""

    _by_slot: dict[int, Holding] = field(default_factory=dict)
    _heap: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def read(cls, transaction: IndexTransaction, capacity: Capacity) -> Holdings:
        holdings = cls(capacity, {number: name for name, number in transaction.slots().items()})
        for slot, account in transaction.accounts():
            holdings.update(slot, account)
        holdings.may_have_copies.update(holdings._by_slot)
        return holdings

    def __getitem__(self, slot: int) -> Holding:
        return self._by_slot[slot]

    def update(self, slot: int, account: SlotAccount, name: str | None = None) -> None:
        """Note that a slot holds what its account says; its name has to be told once."""
        if name is not None:
            self.names[slot] = name
        elif slot not in self.names:
            return
        share = self.capacity.share(self.names[slot])
        now = Holding(
            account.taken_bytes,
            account.reserved_bytes + account.pinned_bytes,
            account.pinned_bytes,
            account.blocks,
            share.guaranteed_bytes,
            share.limit_bytes,
        )
        before = self._by_slot.get(slot)
        if now == before:
            return
        before = before or Holding()
        self.kept_bytes += now.kept_bytes - before.kept_bytes
        self.pinned_beyond_bytes += now.pinned_beyond_bytes - before.pinned_beyond_bytes
        self._by_slot[slot] = now
        if now.borrowed_bytes > 0 and now.borrowed_bytes != before.borrowed_bytes:
            heapq.heappush(self._heap, (-now.borrowed_bytes, slot))
            if len(self._heap) > 4 * len(self._by_slot) + VICTIMS_PER_TRANSACTION:
                self._heap = [(-one.borrowed_bytes, slot) for slot, one in self._by_slot.items()]
                heapq.heapify(self._heap)

    def over_limit(self) -> list[int]:
        return [slot for slot, holding in self._by_slot.items() if holding.is_over_limit]

    def borrowers(self) -> Iterator[int]:
        """Yield the slots that have borrowed, the one that has borrowed most first."""
        seen = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                holding = self._by_slot[entry[1]]
                if -entry[0] == holding.borrowed_bytes > 0 and entry not in seen:
                    seen.append(entry)
                    yield entry[1]
        finally:
            for entry in seen:
                heapq.heappush(self._heap, entry)

    def most_blocks(self) -> list[int]:
        return sorted(self._by_slot, key=lambda slot: -self._by_slot[slot].blocks)

    def obtainable_bytes(self, asking: int, room_bytes: int) -> int:
        """Return the most that a slot can have beside fills in progress, pins and other slots' guarantees."""
        holding = self._by_slot[asking]
        others_bytes = self.kept_bytes - holding.kept_bytes
        limit_bytes = self.capacity.total_bytes if holding.limit_bytes is None else holding.limit_bytes
        return min(room_bytes - others_bytes, limit_bytes) - holding.staying_bytes

    def pins_fit(self, slot: int, size_bytes: int) -> bool:
        """Return True if a slot may pin `size_bytes` more: within its limit, beside others' guarantees and pins."""
        holding = self._by_slot[slot]
        pinned_bytes = holding.pinned_bytes + size_bytes
        if holding.limit_bytes is not None and pinned_bytes > holding.limit_bytes:
            return False
        beyond_bytes = max(0, pinned_bytes - holding.guaranteed_bytes) - holding.pinned_beyond_bytes
        kept_bytes = self.capacity.guaranteed_bytes + self.pinned_beyond_bytes + beyond_bytes
        return kept_bytes <= self.capacity.total_bytes


def make_room(
    transaction: IndexTransaction, holdings: Holdings, reservation: Reservation, index_bytes_max: int
) -> Step:
    """Evict until a reservation fits on its slot's account, or VICTIMS_PER_TRANSACTION files are out.

    What could not fit even with every file gone that is not pinned evicts nothing. For a copy only copies go.
    """
    slot, needed_bytes = transaction.slot(reservation.slot), reservation.disk_bytes
    holdings.update(slot, transaction.account(slot), reservation.slot)
    if reservation.copy:
        holdings.may_have_copies.add(slot)
    room_bytes = holdings.capacity.total_bytes - transaction.totals.unowned_bytes
    if needed_bytes > holdings.obtainable_bytes(slot, room_bytes):
        return Step(False, ())
    room = _Room(transaction, holdings, slot, needed_bytes, wanted=reservation.wanted, copy=reservation.copy)
    done = room.make() and room.keep_index_below(index_bytes_max, slot, reservation.blocks)
    return Step(done, room.evicted)


def shrink(transaction: IndexTransaction, holdings: Holdings) -> Step:
    """Evict down to the capacity and each slot's limit, VICTIMS_PER_TRANSACTION files at a time.

    There is less room than there was: even pins yield.
    """
    room = _Room(transaction, holdings)
    return Step(room.make(), room.evicted)


def shed_blocks(transaction: IndexTransaction, holdings: Holdings, blocks: int) -> Step:
    """Evict files with so many blocks in all: the index has no room for more."""
    room = _Room(transaction, holdings)
    return Step(room.shed(holdings.most_blocks(), blocks), room.evicted)


class _Room:
    """One transaction's making of room, on behalf of a slot that asks, or of none."""

    def __init__(
        self,
        transaction: IndexTransaction,
        holdings: Holdings,
        asking: int | None = None,
        needed_bytes: int = 0,
        *,
        wanted: bool = False,
        copy: bool = False,
    ) -> None:
        self.evicted: list[FileRecord] = []
        self._transaction = transaction
        self._holdings = holdings
        self._asking = asking
        self._needed_bytes = needed_bytes
        self._wanted = wanted
        self._copy = copy

    def make(self) -> bool:
        """Evict until all fits; whether it does."""
        while (order := self._order()) is not None:
            victim = self._victim(order)
            if victim is None or len(self.evicted) >= VICTIMS_PER_TRANSACTION:
                return False
            self._evict(victim)
        return True

    def keep_index_below(self, index_bytes_max: int, asking: int, blocks: int) -> bool:
        """While the index exceeds its limit, evict as many blocks as come, or more; return False when none can go."""
        transaction = self._transaction
        size_bytes = transaction.size_bytes()
        if size_bytes <= index_bytes_max:
            return True
        transaction.sweep(SWEPT_MAX)
        part_over = min(1.0, _HURRY * (size_bytes / index_bytes_max - 1.0))
        going = blocks + round(blocks * part_over) - sum(file.blocks for file in self.evicted)
        transaction.forget(asking, 0)
        has_its_part = transaction.account(asking).blocks * len(self._holdings.names) >= transaction.totals.blocks
        order = [asking] if has_its_part else self._holdings.most_blocks()
        return going <= 0 or self.shed(order, going)

    def shed(self, order: Iterable[int], blocks: int) -> bool:
        """Evict files of the first of these slots that has any, until so many blocks are out; whether one could go."""
        order, gone = list(order), 0
        while gone < blocks and len(self.evicted) < VICTIMS_PER_TRANSACTION:
            victim = self._victim(order, anyway=True)
            if victim is None:
                return gone > 0
            gone += victim.blocks
            self._evict(victim)
        return True

    def _order(self) -> Iterable[int] | None:
        """Return the slots that must give up bytes, the first to ask first; None if all fits."""
        holdings, totals = self._holdings, self._transaction.totals
        if self._asking is None:
            over = holdings.over_limit()
        else:
            holding = holdings[self._asking]
            limit_bytes = holding.limit_bytes
            is_over = limit_bytes is not None and holding.taken_bytes + self._needed_bytes > limit_bytes
            over = [self._asking] if is_over else []
        if over:
            return over
        if totals.taken_bytes + self._needed_bytes <= holdings.capacity.total_bytes:
            return None
        return self._borrowers()

    def _borrowers(self) -> Iterator[int]:
        """Yield the slots that have borrowed: those with idle copies, then the one that has borrowed most."""
        holdings, asking = self._holdings, self._asking
        for slot in list(holdings.may_have_copies):
            first = self._transaction.head(slot, Queue.MAIN)
            if first is not None and is_copy(first):
                yield slot
            else:
                holdings.may_have_copies.discard(slot)
        own_bytes = holdings[asking].borrowed_bytes + self._needed_bytes if asking is not None else 0
        asked = asking is None
        for slot in holdings.borrowers():
            if not asked and holdings[slot].borrowed_bytes <= own_bytes:
                asked = True
                if asking is not None and own_bytes > 0:
                    yield asking
            if slot != asking:
                yield slot
        if not asked and asking is not None and own_bytes > 0:
            yield asking

    def _must_give(self, slot: int) -> bool:
        holding = self._holdings[slot]
        own_bytes = self._needed_bytes if slot == self._asking else 0
        return holding.borrowed_bytes + own_bytes > 0 or holding.is_over_limit

    def _victim(self, order: Iterable[int], *, anyway: bool = False) -> FileRecord | None:
        pinned: list[int] = []
        for slot in order:
            account = self._transaction.account(slot)
            self._holdings.update(slot, account)
            if not anyway and not self._must_give(slot):
                continue  # other processes have evicted from it meanwhile
            wanted = self._wanted and slot == self._asking
            policy = POLICIES[Eviction.LRU if wanted else account.eviction]
            victim = policy.victim(self._transaction, slot)
            if victim is not None and (is_copy(victim) or not self._copy):
                return victim
            pinned.append(slot)
        if self._asking is not None:
            return None
        heads = (self._transaction.head(slot, Queue.PINNED) for slot in pinned)
        return next((head for head in heads if head is not None), None)

    def _evict(self, victim: FileRecord) -> None:
        self._transaction.evict(victim)
        self._holdings.update(victim.slot, self._transaction.account(victim.slot))
        self.evicted.append(victim)
