"""How much room there is for blocks, and how much is written for them.

`Share` and `SlotUsage` say what each slot may take of the cache directory, and what it has taken.

A reserve is room on the disk that others have a right to and have not taken yet: the cache grows no further than up to
it. The write-back buffer is such another: what it may hold must find room, whatever the cache would like to keep. Where
other files on the disk leave less than that, fills evict for what they bring, and as much again, until it is there.

`WrittenBytes` are what a thread has written that goes to a device. The kernel counts what was passed to it, and what of
its memory had to be written back for that. Both are more than what the device gets: pages that are written twice are
passed twice, and where the kernel keeps memory in larger pieces, a whole piece counts for each page. What counts here
is the lesser of the two.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
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


LOOK_SECONDS = 0.05
"""What a look at the file system says holds so long; what was granted since is counted."""

GIVEN_BACK_TIMES = 2
"""Of what a fill brings, so much leaves at most where room is missing."""


class Reserve:
    """What one process's fills must leave free: `size_bytes`, kept up to date by whoever knows it. Index thread only.

    `free_bytes` says what the file system has, `promised_bytes` what fills in progress have not all written yet.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int],
        promised_bytes: Callable[[], int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size_bytes = 0
        self._free_bytes = free_bytes
        self._promised_bytes = promised_bytes
        self._monotonic = monotonic
        self._left_bytes = 0
        self._looked_at = float("-inf")

    def capacity_for(self, needed_bytes: int, used_bytes: Callable[[], int], capacity: Capacity) -> Capacity:
        """What the cache may have in all when it takes so much more; `used_bytes` is what it has. OSError."""
        if not self.size_bytes:
            return capacity
        now = self._monotonic()
        if now >= self._looked_at + LOOK_SECONDS:
            self._left_bytes, self._looked_at = self._free_bytes() - self._promised_bytes(), now
        missing_bytes = self.size_bytes + needed_bytes - self._left_bytes
        if missing_bytes <= 0:
            self._left_bytes -= needed_bytes
            return capacity
        self._looked_at = float("-inf")  # what leaves now is room at once
        going_bytes = min(missing_bytes, GIVEN_BACK_TIMES * needed_bytes)
        return capacity.lowered_to(max(0, used_bytes() + needed_bytes - going_bytes))


_PATH = "/proc/thread-self/io"


class WrittenBytes:
    """The counters of whichever thread asks. They stand still where the kernel does not count."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def mark(self) -> tuple[int, int]:
        """Where the counters stand."""
        opened = getattr(self._of_thread, "opened", None)
        if opened is None:
            opened = self._of_thread.opened = _Opened()
        return opened.read()

    def since(self, mark: tuple[int, int]) -> int:
        """What this thread has written since a mark of its own."""
        passed, written_back = self.mark()
        return min(passed - mark[0], written_back - mark[1])


class _Opened:
    """One thread's file, closed when the thread is gone."""

    def __init__(self) -> None:
        try:
            self._descriptor = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self) -> tuple[int, int]:
        """`wchar` and `write_bytes`, which stand second and sixth."""
        if self._descriptor < 0:
            return 0, 0
        words = os.pread(self._descriptor, 512, 0).split()
        return int(words[3]), int(words[11])

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
