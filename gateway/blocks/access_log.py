"""Which files were read since the index was last told, and how often: in memory, so that a hit writes nothing."""

from __future__ import annotations

from collections import OrderedDict

FILES_NOTED_MAX = 65_536


class AccessLog:
    """Files in the order of their last use; beyond FILES_NOTED_MAX the oldest uses are forgotten. Event loop only."""

    def __init__(self) -> None:
        self._noted: OrderedDict[str, int] = OrderedDict()

    def note(self, file: str) -> None:
        self._noted[file] = self._noted.pop(file, 0) + 1
        if len(self._noted) > FILES_NOTED_MAX:
            self._noted.popitem(last=False)

    def take(self, count_max: int) -> list[tuple[str, int]]:
        """Up to `count_max` of the files with the number of their uses, the oldest first; they are the caller's now."""
        count = min(count_max, len(self._noted))
        return [self._noted.popitem(last=False) for _ in range(count)]
