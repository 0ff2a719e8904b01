"""The parts of pending objects that are being read: to look 10,000 of them up takes a tenth of a second.

What a reader needs of them stays as it is while the object is pending, and no other object ever has its sequence. What
the origin has of each of them may have changed since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from gateway.writeback.journal.records import Part

PARTS_BYTES_MAX = 32 * 1024**2
"""What is held in memory, about."""

_PART_BYTES = 700
"""Of a part, beside the checksums of its chunks."""

_FEW = 16
"""So many are looked up each time: that takes no longer than the rest of a request."""


class RecentParts:
    """Of those objects that were asked for last, as one process holds them. Event loop only."""

    def __init__(self, bytes_max: int = PARTS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._parts: OrderedDict[int, Sequence[Part]] = OrderedDict()
        self._bytes = 0

    def of(self, sequence: int, look: Callable[[], Sequence[Part]]) -> Sequence[Part]:
        """The parts of a pending object, which `look` finds where they are not held."""
        if sequence in self._parts:
            self._parts.move_to_end(sequence)
            return self._parts[sequence]
        parts = look()
        if len(parts) > _FEW and _bytes(parts) <= self._bytes_max:
            self._hold(sequence, parts)
        return parts

    def _hold(self, sequence: int, parts: Sequence[Part]) -> None:
        self._parts[sequence] = parts
        self._bytes += _bytes(parts)
        while self._bytes > self._bytes_max:
            _, oldest = self._parts.popitem(last=False)
            self._bytes -= _bytes(oldest)


def _bytes(parts: Sequence[Part]) -> int:
    return sum(_PART_BYTES + len(part.file.checksums) for part in parts)
