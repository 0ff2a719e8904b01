"""Chooses the process that decides for all: the running one with the lowest number.

Each process writes the time into a cell of its own. There is no election and no lock: a process that finds no fresh
beat of a lower number leads. So a leader that is stopped or killed is replaced LOST_SECONDS after its last beat. For a
moment two may lead, when one comes back or a new one begins: a leader's decisions must do no harm when two make them.
"""

from __future__ import annotations

from gateway.shared.arena import SharedCells

ROWS_OF_LEADERSHIP = 1
"""The beats: of `Clock.monotonic`, a cell for each process."""

BEAT_SECONDS = 0.1
"""Seconds within which every process must call `leads` again."""

LOST_SECONDS = 0.6
"""A process without a beat for this long does not lead. It is several beats, so that a busy event loop does not lose
its place, and short enough that a lost process is replaced within a second."""


class Leadership:
    """The leadership as one process sees it. The cells are in row `row` of `cells`."""

    def __init__(self, cells: SharedCells, row: int) -> None:
        self._beats = cells.numbers(row)
        self._own = cells.own
        self._led_at: float | None = None
        self.leads_since = 0.0
        """When this process began to lead, while it does. A leader that was away begins anew: what it remembers from
        before says nothing about now."""

    def leads(self, now: float) -> bool:
        """Return whether this process decides now. The call is its beat: only a process that decides counts."""
        self._beats[self._own] = now
        lost = now - LOST_SECONDS
        if any(beat > lost for beat in self._beats[: self._own]):
            self._led_at = None
            return False
        if self._led_at is None or self._led_at < lost:
            self.leads_since = now
        self._led_at = now
        return True
