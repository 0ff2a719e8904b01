"""How the scrubber stands, for the status."""

from __future__ import annotations

from typing import Any, Protocol


class Pass(Protocol):
    """One pass over all blocks (`blocks.maintenance.scrubber.ScrubPass`)."""

    @property
    def started_at(self) -> float: ...

    @property
    def ended_at(self) -> float | None: ...

    @property
    def blocks(self) -> int: ...

    @property
    def read_bytes(self) -> int: ...

    @property
    def dropped_blocks(self) -> int: ...

    @property
    def part_done(self) -> float: ...


class Scrubs(Protocol):
    """The scrubber itself."""

    @property
    def progress(self) -> Pass | None: ...


class ScrubHolder:
    """Where the background process puts its scrubber once the cache directory is open and surveyed."""

    def __init__(self, period_seconds: float = 0.0) -> None:
        self._period_seconds = period_seconds
        self._scrubber: Scrubs | None = None

    def apply_settings(self, scrubber: Scrubs | None) -> None:
        self._scrubber = scrubber

    def document(self) -> dict[str, Any] | None:
        """The pass under way, or the last one; None while there is none. Times in seconds since 1970."""
        record = self._scrubber.progress if self._scrubber is not None else None
        if record is None:
            return None
        return {
            "started_at": record.started_at,
            "ended_at": record.ended_at,
            "next_at": record.started_at + self._period_seconds,
            "part_done": round(record.part_done, 4),
            "blocks": record.blocks,
            "read_bytes": record.read_bytes,
            "dropped_blocks": record.dropped_blocks,
        }
