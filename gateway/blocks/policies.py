"""The order in which blocks leave, by reads, their age, and returns. In a transaction or in a simulation.

Training reads its data set again and again, each time in another order. While an epoch runs, every block that is read
was last read in the epoch before, so **the oldest last use among the blocks that come back marks where the epoch before
began**. Blocks used since then are about to be read again; the others have missed a whole epoch. No epoch is defined,
so this holds for scans in order, for data sets read in turn, and for jobs of different speed.

Time is counted in bytes read in the slot (`position`). Blocks that come back are hits, and misses that are remembered
(`IndexTransaction.recall`): so a slot that holds a tenth of a data set learns from the other nine.

`lru`    The file that was used longest ago goes.
`epoch`  As lru, but what is about to come back stays: new files pass through a small queue instead, each pushing out
         the one before.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import ClassVar, Protocol, Self

from gateway.blocks.layout import FileRecord

RETURNS_MIN = 16
"""With fewer returns the oldest says too little: until then all is kept."""

_WINDOW = struct.Struct("<QQQ")
_ENDS = struct.Struct("<QQ")


@dataclass(slots=True)
class Window:
    """Blocks that came back: the `oldest` of them, last used there, came at `oldest_at`.

    `count` are those in the older half: blocks that come back soon say nothing of those that come back late.
    """

    count: int = 0
    oldest: int = 0
    oldest_at: int = 0

    @property
    def reach(self) -> int:
        return self.oldest_at - self.oldest

    def add(self, position: int, used_at: int) -> None:
        if not self.count or used_at <= self.oldest:
            self.oldest, self.oldest_at = used_at, position
        self.count += 2 * (position - used_at) >= self.reach

    def tells(self, position: int) -> bool:
        """Return True if the oldest block returned less than half its absence ago, as seen from `position`."""
        # Returns after a shorter absence do not keep old evidence alive.
        return self.count > 0 and 2 * (position - self.oldest_at) <= self.reach

    def is_old(self, position: int) -> bool:
        """Return True if a new window must begin while this one is still valid."""
        return 4 * (position - self.oldest_at) >= self.reach


@dataclass(slots=True)
class ReuseDistance:
    """Recent returns, in the present window and the one before.

    `last_at` is where the latest return was, `until` where returns cease to count.
    """

    current: Window = field(default_factory=Window)
    previous: Window = field(default_factory=Window)
    last_at: int = 0
    until: int = 0

    def add(self, position: int, used_at: int) -> None:
        """Note that a block is read at `position`, and was read at `used_at` the last time before that."""
        if used_at > self.last_at:  # nothing came back while this was away: what did before is read no more
            self.previous, self.current = Window(), Window()
        elif (self.current.count >= RETURNS_MIN and self.current.is_old(position)) or not self.current.tells(position):
            self.previous, self.current = self.current, Window()
        self.current.add(position, used_at)
        self.last_at = position
        self.until = position + max(window.reach for window in self._telling(position))

    def kept_since(self, position: int) -> int | None:
        """Return the position from which used blocks must be kept; None when returns have been missing for too long."""
        if position >= self.until:
            return None
        windows = self._telling(position)
        count = sum(window.count for window in windows)
        if count < RETURNS_MIN:
            return 0
        oldest = min(window.oldest for window in windows)
        return max(0, oldest - (position - oldest) // count)  # there may be older ones that have not come back yet

    def _telling(self, position: int) -> list[Window]:
        return [window for window in (self.current, self.previous) if window.tells(position)]

    def pack(self) -> bytes:
        windows = (_WINDOW.pack(one.count, one.oldest, one.oldest_at) for one in (self.current, self.previous))
        return b"".join(windows) + _ENDS.pack(self.last_at, self.until)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        current, previous = (Window(*_WINDOW.unpack_from(packed, number * _WINDOW.size)) for number in range(2))
        return cls(current, previous, *_ENDS.unpack_from(packed, 2 * _WINDOW.size))


PASSING_PART = 64
"""epoch's small queue is kept at this part of the slot: what it does not hit."""

FIRST_TO_LEAVE = 0
"""The sequence of files that go before all others of their slot, whatever policy it has; none is given this one."""

OF_COPY = 2
"""The frequency of a copy, a file of blocks that another node looks after: it is FIRST_TO_LEAVE, and no use of it
changes that."""

REQUEUED_MAX = 32
"""Files that one search for a victim gives another chance: it happens within a transaction."""

_ACCOUNT = struct.Struct("<BQQ4QQQ")


class Queue(IntEnum):
    """A file's queue. Policies look at MAIN and SMALL only.

    EVICTED files are gone from the disk and remembered, oldest first.
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
    """The index's account of a slot besides its files.

    `position` is the policy's time: bytes read in the slot. `blocks` lie in its files, `queue_bytes` is the size of
    each queue's files on disk, `reserved_bytes` is set aside for files that are being written. The last use of
    `remembered_blocks` evicted blocks is known.
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

    def apply_settings(self, eviction: Eviction) -> None:
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


def is_copy(file: FileRecord) -> bool:
    return file.frequency == OF_COPY


class PolicyView(Protocol):
    """A policy's view of the index, for reading and changing."""

    def account(self, slot: int) -> SlotAccount: ...

    def head(self, slot: int, queue: Queue) -> FileRecord | None:
        """Return the first file of a slot's queue."""

    def next_sequence(self) -> int:
        """Return a number higher than all that were given."""

    def change(self, file: FileRecord) -> None:
        """Move a file, known by its name, to its place by queue, sequence, frequency and used_at."""

    def recall(self, slot: int, block_id: bytes) -> int | None:
        """When the file of a block that was evicted was used last, where that is remembered."""


class Lru:
    """The policy that evicts what was used longest ago. Its methods are the events of a slot, in their order."""

    remembers: ClassVar = False
    """True if it asks to `recall` evicted blocks."""

    def entering(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        """Return a new file, whose blocks were missing, as the index must enter it; `blocks`: those it had before."""
        return replace(file, queue=_unless_pinned(file, Queue.MAIN))

    def growing(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        """Return a file to which blocks of `size_bytes` were added; `blocks`: those that the index had before."""
        return replace(file, sequence=view.next_sequence())

    def used(self, view: PolicyView, file: FileRecord, size_bytes: int) -> None:
        """Note that `size_bytes` of a file were read."""
        view.change(replace(file, queue=_unless_pinned(file, Queue.MAIN), sequence=view.next_sequence()))

    def victim(self, view: PolicyView, slot: int) -> FileRecord | None:
        """Return the file that is to go next; None when there is none."""
        heads = [head for queue in (Queue.MAIN, Queue.SMALL) if (head := view.head(slot, queue)) is not None]
        return min(heads, key=lambda head: head.sequence, default=None)


class Epoch(Lru):
    """Not about to come back."""

    remembers: ClassVar = True

    def entering(self, view: PolicyView, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        account = view.account(file.slot)
        if PASSING_PART * account.queue_bytes[Queue.SMALL] > account.evictable_bytes:
            settled = view.head(file.slot, Queue.SMALL)
            if settled is not None:
                view.change(replace(settled, queue=Queue.MAIN))
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
        if kept_since is None or oldest.used_at < kept_since or oldest.sequence == FIRST_TO_LEAVE:
            return oldest
        return self._passing(view, slot) or oldest

    def _may_return(self, account: SlotAccount, used_at: int | None) -> None:
        """Count a return, except a very early one: the next piece of one read, or a block of the small queue."""
        if used_at is not None and PASSING_PART // 2 * (account.position - used_at) >= account.evictable_bytes:
            account.reuse.add(account.position, used_at)

    def _passing(self, view: PolicyView, slot: int) -> FileRecord | None:
        """Return the first of the small queue that was not used since it stood there first."""
        for _ in range(REQUEUED_MAX):
            found = view.head(slot, Queue.SMALL)
            if found is None or not found.frequency:
                return found
            view.change(replace(found, sequence=view.next_sequence(), frequency=0))
        return view.head(slot, Queue.SMALL)


def _unless_pinned(file: FileRecord, queue: Queue) -> int:
    return file.queue if file.queue == Queue.PINNED else queue


POLICIES: Mapping[Eviction, Lru] = {Eviction.LRU: Lru(), Eviction.EPOCH: Epoch()}
