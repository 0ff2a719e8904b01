"""Since when must a file have been unused before it may go? Told from what comes back. Pure.

Training reads its data set again and again, each time in another order. While an epoch runs, every block that is read
was last read in the epoch before, so **the oldest last use among the blocks that come back marks where the epoch before
began**. What was used since then is about to be read again; what was not has missed a whole epoch. Nobody says what an
epoch is, so this holds for scans in order, for data sets read in turn, and for jobs of different speed.

Time is counted in bytes read in the slot (`position`). Blocks that come back are hits, and misses that are remembered
(`IndexTransaction.recall`): so a slot that holds a tenth of a data set learns from the other nine.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Self

RETURNS_MIN = 16
"""Of fewer, the oldest says too little: until then all is kept."""

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
        """How long the oldest block was away."""
        return self.oldest_at - self.oldest

    def add(self, position: int, used_at: int) -> None:
        if not self.count or used_at <= self.oldest:
            self.oldest, self.oldest_at = used_at, position
        self.count += 2 * (position - used_at) >= self.reach

    def tells(self, position: int) -> bool:
        """Whether it still speaks of what is read at `position`: its oldest came back not half as long ago as it was
        away. What comes back sooner does not keep old evidence alive."""
        return self.count > 0 and 2 * (position - self.oldest_at) <= self.reach

    def is_old(self, position: int) -> bool:
        """Whether it is time to collect anew, while this one still tells."""
        return 4 * (position - self.oldest_at) >= self.reach


@dataclass(slots=True)
class ReuseDistance:
    """What came back of late, in the present window and the one before.

    `last_at` is where the latest return was, `until` says how long returns count for anything.
    """

    current: Window = field(default_factory=Window)
    previous: Window = field(default_factory=Window)
    last_at: int = 0
    until: int = 0

    def add(self, position: int, used_at: int) -> None:
        """A block is read at `position`, and was read at `used_at` the last time before that."""
        if used_at > self.last_at:  # nothing came back while this was away: what did before is read no more
            self.previous, self.current = Window(), Window()
        elif self._current_is_done(position):
            self.previous, self.current = self.current, Window()
        self.current.add(position, used_at)
        self.last_at = position
        self.until = position + max(window.reach for window in self._telling(position))

    def kept_since(self, position: int) -> int | None:
        """What was used from there on is to be kept; None when nothing has come back for as long as that had taken."""
        if position >= self.until:
            return None
        windows = self._telling(position)
        count = sum(window.count for window in windows)
        if count < RETURNS_MIN:
            return 0
        oldest = min(window.oldest for window in windows)
        return max(0, oldest - (position - oldest) // count)  # there may be older ones that have not come back yet

    def _current_is_done(self, position: int) -> bool:
        enough = self.current.count >= RETURNS_MIN and self.current.is_old(position)
        return enough or not self.current.tells(position)

    def _telling(self, position: int) -> list[Window]:
        return [window for window in (self.current, self.previous) if window.tells(position)]

    def pack(self) -> bytes:
        windows = (_WINDOW.pack(one.count, one.oldest, one.oldest_at) for one in (self.current, self.previous))
        return b"".join(windows) + _ENDS.pack(self.last_at, self.until)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        current, previous = (Window(*_WINDOW.unpack_from(packed, number * _WINDOW.size)) for number in range(2))
        return cls(current, previous, *_ENDS.unpack_from(packed, 2 * _WINDOW.size))


REUSE_DISTANCE_BYTES = 2 * _WINDOW.size + _ENDS.size
