"""The eviction policies, and what the index knows of a slot for them. Pure: in a transaction or in a simulation.

`lru`      The file that was used longest ago goes.
`epoch`    As lru, but what was used since the oldest last use among the blocks that come back (reuse_distance.py) is
           about to come back too, and stays: new files pass through a small queue instead, each pushing out the one
           before.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import ClassVar, Protocol, Self

from gateway.blocks.index.records import FileRecord
from gateway.blocks.index.reuse_distance import ReuseDistance

PASSING_PART = 64
"""epoch's small queue is kept at this part of the slot: what it does not hit."""

REQUEUED_MAX = 32
"""Files that one search for a victim gives another chance: it happens within a transaction."""

_ACCOUNT = struct.Struct("<BQQ4QQQ")


class Queue(IntEnum):
    """Where a file stands. Policies look at MAIN and SMALL only.

    EVICTED files are gone from the disk: that they were there is remembered, oldest first.
    """

    MAIN = 0
    SMALL = 1
    PINNED = 2
    EVICTED = 3


class Eviction(IntEnum):
    """The policies, by their numbers in the index. 1 was another one."""

    LRU = 0
    EPOCH = 2


_BY_NUMBER = {int(eviction): eviction for eviction in Eviction}


@dataclass(slots=True)
class SlotAccount:
    """What the index knows of a slot besides its files.

    `position` is the policy's time: bytes read in the slot. `blocks` lie in its files, `queue_bytes` is what the files
    of each queue take on disk, `reserved_bytes` what is set aside for files that are being written. Of
    `remembered_blocks` blocks that were evicted it is known when they were used.
    """

    eviction: Eviction = Eviction.EPOCH
    position: int = 0
    blocks: int = 0
    queue_bytes: list[int] = field(default_factory=lambda: [0] * len(Queue))
    reserved_bytes: int = 0
    remembered_blocks: int = 0
    reuse: ReuseDistance = field(default_factory=ReuseDistance)

    @property
    def used_bytes(self) -> int:
        return sum(self.queue_bytes)

    @property
    def taken_bytes(self) -> int:
        return self.used_bytes + self.reserved_bytes

    @property
    def pinned_bytes(self) -> int:
        return self.queue_bytes[Queue.PINNED]

    @property
    def evictable_bytes(self) -> int:
        return self.queue_bytes[Queue.MAIN] + self.queue_bytes[Queue.SMALL]

    def follow(self, eviction: Eviction) -> None:
        """From now on another policy decides; what the one before had learned is forgotten."""
        if eviction is not self.eviction:
            self.eviction, self.reuse = eviction, ReuseDistance()

    def pack(self) -> bytes:
        fixed = _ACCOUNT.pack(
            self.eviction, self.position, self.blocks, *self.queue_bytes, self.reserved_bytes, self.remembered_blocks
        )
        return fixed + self.reuse.pack()

    @classmethod
    def unpack(cls, packed: bytes, *, learned: bool = True) -> Self:
        """`learned` False leaves `reuse` out: it costs most, and only the slot's policy asks for it."""
        eviction, position, blocks, *queue_bytes, reserved_bytes, remembered = _ACCOUNT.unpack_from(packed)
        reuse = ReuseDistance.unpack(packed[_ACCOUNT.size :]) if learned else ReuseDistance()
        return cls(_BY_NUMBER[eviction], position, blocks, queue_bytes, reserved_bytes, remembered, reuse)


class PolicyView(Protocol):
    """What a policy sees of the index, and may change."""

    def account(self, slot: int) -> SlotAccount: ...

    def head(self, slot: int, queue: Queue) -> FileRecord | None:
        """The file of a slot's queue that stands first."""

    def next_sequence(self) -> int:
        """A number higher than all that were given."""

    def change(self, file: FileRecord) -> None:
        """Have a file that is known by its name stand where it says, by queue, sequence, frequency and used_at."""

    def recall(self, slot: int, block_id: bytes) -> int | None:
        """When the file of a block that was evicted was used last, where that is remembered."""


class Policy(Protocol):
    """What happens to a slot, in the order in which it happens."""

    remembers: ClassVar[bool]
    """Whether it asks to `recall` what was evicted."""

    def entering(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        """A new file, whose blocks were asked for and not there, as it is to be put into the index."""

    def growing(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        """The same for a file to which blocks of so many bytes were added."""

    def used(self, view: PolicyView, file: FileRecord, size_bytes: int) -> None:
        """So many bytes of a file were read."""

    def victim(self, view: PolicyView, slot: int) -> FileRecord | None:
        """The file that is to go next; None when there is none."""


class Lru:
    """Used longest ago."""

    remembers: ClassVar = False

    def entering(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        return replace(file, queue=_unless_pinned(file, Queue.MAIN))

    def growing(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        return replace(file, sequence=view.next_sequence())

    def used(self, view: PolicyView, file: FileRecord, size_bytes: int) -> None:
        view.change(replace(file, queue=_unless_pinned(file, Queue.MAIN), sequence=view.next_sequence()))

    def victim(self, view: PolicyView, slot: int) -> FileRecord | None:
        heads = [head for queue in (Queue.MAIN, Queue.SMALL) if (head := view.head(slot, queue)) is not None]
        return min(heads, key=lambda head: head.sequence, default=None)


class Epoch:
    """Not about to come back."""

    remembers: ClassVar = True

    def entering(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        self._settle_one(view, file.slot)
        return replace(self.growing(view, file, blocks, size_bytes), queue=_unless_pinned(file, Queue.SMALL))

    def growing(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        account = view.account(file.slot)
        account.position += size_bytes
        for block in blocks:
            self._may_return(account, view.recall(file.slot, block))
        return replace(file, used_at=account.position)

    def used(self, view: PolicyView, file: FileRecord, size_bytes: int) -> None:
        account = view.account(file.slot)
        account.position += size_bytes
        self._may_return(account, file.used_at)
        sequence = file.sequence if file.queue == Queue.SMALL else view.next_sequence()
        view.change(replace(file, sequence=sequence, frequency=1, used_at=account.position))

    def victim(self, view: PolicyView, slot: int) -> FileRecord | None:
        oldest = view.head(slot, Queue.MAIN)
        if oldest is None:
            return self._passing(view, slot)
        account = view.account(slot)
        kept_since = account.reuse.kept_since(account.position)
        if kept_since is None or oldest.used_at < kept_since:
            return oldest
        return self._passing(view, slot) or oldest

    def _may_return(self, account: SlotAccount, used_at: int | None) -> None:
        """What comes back very soon is the next piece of one read, or is kept by the small queue."""
        if used_at is not None and PASSING_PART // 2 * (account.position - used_at) >= account.evictable_bytes:
            account.reuse.add(account.position, used_at)

    def _settle_one(self, view: PolicyView, slot: int) -> None:
        """Nothing had to go for it, or something old went: it stays."""
        account = view.account(slot)
        if PASSING_PART * account.queue_bytes[Queue.SMALL] > account.evictable_bytes:
            settled = view.head(slot, Queue.SMALL)
            if settled is not None:
                view.change(replace(settled, queue=Queue.MAIN))

    def _passing(self, view: PolicyView, slot: int) -> FileRecord | None:
        """The first of the small queue that was not used since it stood there first."""
        for _ in range(REQUEUED_MAX):
            found = view.head(slot, Queue.SMALL)
            if found is None or not found.frequency:
                return found
            view.change(replace(found, sequence=view.next_sequence(), frequency=0))
        return view.head(slot, Queue.SMALL)


def _unless_pinned(file: FileRecord, queue: Queue) -> int:
    return file.queue if file.queue == Queue.PINNED else queue


POLICIES: Mapping[Eviction, Policy] = {Eviction.LRU: Lru(), Eviction.EPOCH: Epoch()}
