"""The memory that large blocks pass through on their way from the origin to the disk."""

from __future__ import annotations

from dataclasses import dataclass, field

KEPT_BYTES_MAX = 16 * 1024 * 1024
"""What waits for the next fills: memory that was touched before costs no page faults."""


@dataclass(slots=True)
class Buffers:
    """Lends buffers; there are as many as fills that receive. Event loop only."""

    _kept: dict[int, list[memoryview]] = field(default_factory=dict)
    _kept_bytes: int = 0

    def take(self, size_bytes: int) -> memoryview:
        kept = self._kept.get(size_bytes)
        if not kept:
            return memoryview(bytearray(size_bytes))
        self._kept_bytes -= size_bytes
        return kept.pop()

    def give_back(self, buffer: memoryview) -> None:
        """Only when no thread can still be reading it."""
        if self._kept_bytes + len(buffer) <= KEPT_BYTES_MAX:
            self._kept_bytes += len(buffer)
            self._kept.setdefault(len(buffer), []).append(buffer)
