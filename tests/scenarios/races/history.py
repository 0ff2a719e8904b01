"""What was done to one key, when, and whether an answer can be right.

Nobody knows the order in which overlapping requests took effect, only that each did so between being sent and being
answered. So an answer is right when some write that it may have seen left just this state behind: one that was sent
before the answer came, and that no other write, begun after it was over, had replaced for certain when the read was
sent. Own writes replace at once; those of others at the latest when the slot's bound is over (docs/semantics.md, 2.1,
3.1 to 3.4).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

State: TypeAlias = str | None
"""The ETag of what is there; None: nothing is."""

EVENTS_KEPT = 60
_WRITES_BEFORE_PRUNING = 48


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much later than at once the writes of others are seen, by what is answered instead. Seconds.

    `remembered`: answers need not come from the origin. While a write is under way one worker may show it then, and
    another not yet: only its answer makes it so for all. Otherwise what one reader has seen, every later one sees.
    """

    presence_seconds: float = 0.0
    absence_seconds: float = 0.0
    remembered: bool = False


STRICT = Bounds()


@dataclass(slots=True, eq=False)
class Write:
    """`over`: when it had taken effect for certain; infinity while nobody has said so."""

    state: State
    own: bool
    sent: float
    over: float = math.inf


@dataclass(slots=True)
class History:
    """One key's: its writes as far as anybody may still see them, and its last events in words."""

    key: str
    bounds: Bounds
    writes: list[Write] = field(default_factory=lambda: [Write(None, True, -math.inf, -math.inf)])
    events: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    reads_sent: list[float] = field(default_factory=list)

    def begin(self, state: State, sent: float, *, own: bool) -> Write:
        """A write is about to be sent, that leaves this state."""
        write = Write(state, own, sent)
        self.writes.append(write)
        return write

    def end(self, write: Write, answered: float) -> None:
        """It was answered with success."""
        write.over = min(write.over, answered)
        self._prune()

    def take_back(self, write: Write) -> None:
        """It was refused, and changed nothing."""
        self.writes.remove(write)

    def newest(self) -> State:
        """The state that the write begun last leaves: a good guess at what is there, no more."""
        return self.writes[-1].state

    def explains(
        self, matches: Callable[[State], bool], sent: float, answered: float, bounds: Bounds | None = None
    ) -> bool:
        """Whether a read sent and answered then may have found a state that matches; remembers who has been seen."""
        bounds = bounds or self.bounds
        found = [
            write
            for write in self.writes
            if write.sent <= answered and matches(write.state) and not self._replaced(write, sent, bounds)
        ]
        if len(found) == 1 and not self.bounds.remembered:
            found[0].over = min(found[0].over, answered)  # nobody may see what was there before it any more
        return bool(found)

    def changing(self, sent: float, answered: float) -> bool:
        """Whether a write may have taken effect since the oldest state that a read sent then may begin with."""
        since = sent - self.bounds.presence_seconds
        return any(write.sent <= answered and write.over >= since for write in self.writes)

    def _replaced(self, write: Write, sent: float, bounds: Bounds) -> bool:
        bound = bounds.absence_seconds if write.state is None else bounds.presence_seconds
        return any(
            write.over < other.sent and other.over < (sent if other.own else sent - bound) for other in self.writes
        )

    def _prune(self) -> None:
        """Forget what no read under way, and none to come, may see."""
        if len(self.writes) < _WRITES_BEFORE_PRUNING:
            return
        earliest = min(self.reads_sent, default=self.writes[-1].sent)
        horizon = earliest - max(self.bounds.presence_seconds, self.bounds.absence_seconds)
        last = max((write.sent for write in self.writes if write.over < horizon), default=-math.inf)
        self.writes = [write for write in self.writes if write.over >= last]
