"""Since when must a file have been unused before it may go? Told from what comes back. Pure.

Training reads its data set again and again, each time in another order. While an epoch runs, every block that is read
was last read in the epoch before, so **the oldest last use among the blocks that come back marks where the epoch before
began**. What was used since then is about to be read again; what was not has missed a whole epoch. Nobody says what an
epoch is, so this holds for scans in order, for data sets read in turn, and for jobs of different speed.

Time is counted in bytes read in the slot (`position`). Blocks that come back are hits, and misses that are remembered
(ghosts.py): so a slot that holds a tenth of a data set learns from the other nine.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Self

RETURNS_MIN = 16
"""Of fewer, the oldest says too little: until then all is kept."""

_WINDOW = struct.Struct("<QQQQ")
_UNTIL = struct.Struct("<Q")


@dataclass(slots=True)
class Window:
    """Blocks that came back between the positions `first_at` and `last_at`, the `oldest` of them last used there.

    `count` are those in the older half: blocks that come back soon say nothing of those that come back late.
    """

    count: int = 0
    oldest: int = 0
    first_at: int = 0
    last_at: int = 0

    @property
    def half_reach(self) -> int:
        """Half the way from the latest return to the last use of the oldest block, in bytes."""
        return (self.last_at - self.oldest) // 2

    def add(self, position: int, used_at: int) -> None:
        if not self.count:
            self.oldest, self.first_at = used_at, position
        self.oldest, self.last_at = min(self.oldest, used_at), position
        self.count += used_at <= position - self.half_reach

    def tells(self, position: int) -> bool:
        """Whether it still speaks of what is read at `position`, and not of what was read before."""
        return self.count > 0 and position - self.last_at <= self.half_reach // 2


@dataclass(slots=True)
class Returns:
    """What came back of late, in the present window and the one before. `until`: how long that counts for anything."""

    current: Window = field(default_factory=Window)
    previous: Window = field(default_factory=Window)
    until: int = 0

    def add(self, position: int, used_at: int) -> None:
        """A block is read at `position`, and was read at `used_at` the last time before that."""
        last_at = max(window.last_at for window in self._windows)
        if used_at > last_at:  # nothing came back while this was away: what did before is read no more
            self.previous, self.current = Window(), Window()
        elif position - self.current.first_at >= max(window.half_reach for window in self._windows):
            self.previous, self.current = self.current, Window()
        self.current.add(position, used_at)
        self.until = position + 2 * max(window.half_reach for window in self._windows)

    def kept_since(self, position: int) -> int | None:
        """What was used from there on is to be kept; None when nothing has come back for as long as that had taken."""
        if position >= self.until:
            return None
        windows = [window for window in (self.current, self.previous) if window.tells(position)]
        count = sum(window.count for window in windows)
        if count < RETURNS_MIN:
            return 0
        oldest = min(window.oldest for window in windows)
        return max(0, oldest - (position - oldest) // count)  # there may be older ones that have not come back yet

    def pack(self) -> bytes:
        windows = (_WINDOW.pack(one.count, one.oldest, one.first_at, one.last_at) for one in self._windows)
        return b"".join(windows) + _UNTIL.pack(self.until)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        current, previous = (Window(*_WINDOW.unpack_from(packed, number * _WINDOW.size)) for number in range(2))
        return cls(current, previous, *_UNTIL.unpack_from(packed, 2 * _WINDOW.size))

    @property
    def _windows(self) -> tuple[Window, Window]:
        return self.current, self.previous


RETURNS_BYTES = 2 * _WINDOW.size + _UNTIL.size
