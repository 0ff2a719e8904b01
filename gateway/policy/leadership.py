"""Which process decides for all, where one must: that of the lowest number that turns.

Each process writes the time into a cell of its own. There is no election and no lock: who finds no fresh beat of a
lower number leads. So a leader that is stopped or killed is replaced LOST_SECONDS after its last beat. For a moment two
may lead, when one comes back or a new one begins: what a leader does must do no harm when two do it.
"""

from __future__ import annotations

from gateway.policy.token_bucket import SharedCells

ROWS_OF_LEADERSHIP = 1
"""The beats: of `Clock.monotonic`, a cell for each process."""

BEAT_SECONDS = 0.1
"""`leads` is to be asked so often at least, by every process."""

LOST_SECONDS = 0.6
"""A process that has not beaten for so long does not lead. It is several beats, so that a busy event loop does not lose
its place, and short enough that a process that was lost is replaced within a second."""


class Leadership:
    """Who decides, as one process sees it. The cells are in row `row` of `cells`."""

    def __init__(self, cells: SharedCells, row: int) -> None:
        self._beats = cells.numbers(row)
        self._own = cells.own
        self._led_at: float | None = None
        self.leads_since = 0.0
        """When this process began to lead, while it does. Who has led before and was away begins anew: what it
        remembers of the time before says nothing about now."""

    def leads(self, now: float) -> bool:
        """Whether this process decides now. Asking is a beat: so only a process that would decide is believed to."""
        self._beats[self._own] = now
        lost = now - LOST_SECONDS
        if any(beat > lost for beat in self._beats[: self._own]):
            self._led_at = None
            return False
        if self._led_at is None or self._led_at < lost:
            self.leads_since = now
        self._led_at = now
        return True
